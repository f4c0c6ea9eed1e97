"""What drafters of others are worth: the claims' verdicts on tiny models, and acceptance on a real one.

Greedy acceptance needs no verifier: plain decoding gives a text once, each drafter is walked along it, and the longest
path of its tree that spells what comes is what a greedy verifier would accept. Texts are told apart by whether the
drafter was made for such: in its domain, or out of it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import Any

from specbench.claims import CLAIMS
from specbench.drafters.findings import FINDINGS
from specbench.engines import Missing
from specbench.judge import Failed, Skipped, quiet_session
from specbench.loading import Target, load_target
from specbench.models import unknown_name
from specbench.profiles import PROFILES, Profile
from specbench.prompts import CATEGORIES, Prompt, encode, load_prompts
from specbench.protocols import Drafter, SeededCoins
from specbench.record import BUG, EQUAL, NOT_TESTED
from specbench.types import GREEDY, Stop, VerifyResult

GAMMA = 4  # drafts in a chain, and levels of a tree
MAX_NODES = 8  # of a tree
LAW_PROFILE = PROFILES["quick"]  # a case of drafter.law takes 233 drafts
NUM_LAYERS = 10  # of a draft model that is the beginning of its target
CLAIM_IDS = tuple(one for one in CLAIMS if one.startswith("drafter.") and one != "drafter.self_draft")
# Texts whose continuation is largely in the prompt; and those in the language that the real model was trained on.
REPEATING = ("code", "repeating")
ENGLISH = ("arithmetic", "code", "dialogue", "english", "repeating")


@dataclass(frozen=True)
class Entry:
    """A drafter that can be asked for. package: what it is of. target, name: what the claims judge, and which of its
    drafters. domain: categories of prompts that it is made for. make: over draft models of a real target; None where
    there is no draft model that was trained for one."""

    package: str
    target: str
    name: str
    domain: tuple[str, ...]
    make: Callable[[Any], Drafter] | None


@dataclass(frozen=True)
class Text:
    """A prompt of a category and what plain greedy decoding emits after it."""

    category: str
    prompt: tuple[int, ...]
    plain: tuple[int, ...]


@dataclass(frozen=True)
class Acceptance:
    """Pooled over texts. num_tokens: emitted, the target's own token of each forward among them. num_nodes: drafted.
    accepted, drafted: rounds that accepted, and that drafted, as deep as 1, 2, ..."""

    num_texts: int = 0
    num_tokens: int = 0
    num_forwards: int = 0
    num_nodes: int = 0
    accepted: tuple[int, ...] = ()
    drafted: tuple[int, ...] = ()

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(
            num_texts=self.num_texts + other.num_texts,
            num_tokens=self.num_tokens + other.num_tokens,
            num_forwards=self.num_forwards + other.num_forwards,
            num_nodes=self.num_nodes + other.num_nodes,
            accepted=_sums(self.accepted, other.accepted),
            drafted=_sums(self.drafted, other.drafted),
        )

    @property
    def length(self) -> float:
        """Tokens a forward of the target, its own token included."""
        return self.num_tokens / self.num_forwards if self.num_forwards else 1.0

    @property
    def by_depth(self) -> str:
        """`31/40 12/38`: accepted / drafted at depth 1, 2, ..."""
        return " ".join(f"{kept}/{made}" for kept, made in zip(self.accepted, self.drafted, strict=True)) or "-"


def _sums(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    return tuple(first + second for first, second in zip_longest(one, other, fillvalue=0))


@dataclass(frozen=True)
class Result:
    """One drafter. verdicts: by claim. findings: the first line of each BUG, by claim. inside, outside: acceptance in
    and out of its domain. seconds: drafting. missing: the sentence that says how to install it, where it is not there.
    """

    drafter: str
    version: str
    domain: tuple[str, ...]
    verdicts: Mapping[str, str] = field(default_factory=dict)
    findings: Mapping[str, str] = field(default_factory=dict)
    inside: Acceptance = Acceptance()
    outside: Acceptance = Acceptance()
    seconds: float = 0.0
    missing: str = ""


def _assisted(
    folder: Callable[[Any], Path], schedule: str = "constant", gamma: int = GAMMA
) -> Callable[[Any], Drafter]:
    def make(models: Any) -> Drafter:
        from specbench.drafters.assisted import assisted_drafter

        return assisted_drafter(models.load(folder(models)), gamma=gamma, schedule=schedule)

    return make


def _early_exit(models: Any) -> Drafter:
    from specbench.drafters.assisted import early_exit_drafter

    return early_exit_drafter(models.load(), num_layers=NUM_LAYERS, gamma=GAMMA)


def _prompt_lookup(models: Any) -> Drafter:
    from specbench.drafters.prompt_lookup import PromptLookupDrafter

    return PromptLookupDrafter(gamma=GAMMA)


def _universal(models: Any) -> Drafter:
    from transformers import AutoTokenizer

    from specbench.drafters.universal import UniversalDrafter

    folder = models.other_ids(NUM_LAYERS)
    theirs, ours = (AutoTokenizer.from_pretrained(one) for one in (folder, models.target))
    return UniversalDrafter(models.load(folder), theirs, ours, vocab_size=models.vocab_size, gamma=GAMMA)


def _folder(models: Any) -> Drafter:
    from specbench.drafters.folder import load_folder

    return load_folder(models.first_layers(NUM_LAYERS), target_folder=models.target, gamma=GAMMA)


def _mapped(models: Any) -> Drafter:
    from specbench.drafters.folder import load_folder

    return load_folder(models.other_ids(NUM_LAYERS), target_folder=models.target, gamma=GAMMA, mapped=True)


def _suffix(**options: Any) -> Callable[[Any], Drafter]:
    def make(models: Any) -> Drafter:
        from specbench.drafters.suffix import SuffixDrafter

        return SuffixDrafter(gamma=MAX_NODES if options.get("as_tree") else GAMMA, **options)

    return make


def _first(models: Any) -> Path:
    return models.first_layers(NUM_LAYERS)


def _rounded(models: Any) -> Path:
    return models.rounded(4)


_HERE = "specbench.drafters"
DRAFTERS: dict[str, Entry] = {
    "prompt lookup": Entry("transformers", f"{_HERE}.prompt_lookup:PromptLookup", "lookup", REPEATING, _prompt_lookup),
    "assistant, first layers": Entry(
        "transformers", f"{_HERE}.assisted:Assisted", "constant", ENGLISH, _assisted(_first)
    ),
    "assistant, 4 bits": Entry("transformers", f"{_HERE}.assisted:Assisted", "constant", ENGLISH, _assisted(_rounded)),
    "assistant, 4 bits, default": Entry(
        "transformers", f"{_HERE}.assisted:Assisted", "default", ENGLISH, _assisted(_rounded, "default")
    ),
    "assistant, first layers, heuristic": Entry(
        "transformers", f"{_HERE}.assisted:Assisted", "heuristic", ENGLISH, _assisted(_first, "heuristic")
    ),
    "early exit": Entry("transformers", f"{_HERE}.assisted:EarlyExit", "early_exit", ENGLISH, _early_exit),
    "other tokenizer": Entry("transformers", f"{_HERE}.universal:Universal", "", ENGLISH, _universal),
    "suffix chain": Entry("arctic-inference", f"{_HERE}.suffix:Suffix", "chain", REPEATING, _suffix()),
    "suffix tree": Entry(
        "arctic-inference", f"{_HERE}.suffix:Suffix", "tree", REPEATING, _suffix(as_tree=True, max_factor=4.0)
    ),
    "suffix, remembering": Entry(
        "arctic-inference", f"{_HERE}.suffix:Suffix", "remembering", REPEATING, _suffix(across_texts=True)
    ),
    "Medusa, random": Entry("specbench", f"{_HERE}.medusa:Medusa", "medusa", ENGLISH, None),
    "EAGLE-3, random": Entry("speculators", f"{_HERE}.speculator:Speculator", "", ENGLISH, None),
    "folder, first layers": Entry("transformers", f"{_HERE}.folder:Folder", "same", ENGLISH, _folder),
    "folder, mapped": Entry("transformers", f"{_HERE}.folder:Folder", "mapped", ENGLISH, _mapped),
}


def run_drafters(
    names: Sequence[str] | None,
    *,
    target_folder: str | Path | None,
    prompts: Sequence[Prompt] | None = None,
    max_new_tokens: int = 24,
    profile: Profile | None = PROFILES["standard"],
    seed: int = 0,
    work: str | Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Iterator[Result]:
    """One result a drafter, as it comes. ValueError names an unknown drafter.

    names: None takes all of DRAFTERS. target_folder: a Llama with a tokenizer; None measures no acceptance. prompts:
    None takes `few_prompts()`. profile: of the claims; None judges none. work: where draft models are made and kept;
    None makes a folder that goes with the run. tell: is given each line as it comes.
    """
    for name in names or ():
        if name not in DRAFTERS:
            raise ValueError(unknown_name("drafter", name, DRAFTERS))
    with tempfile.TemporaryDirectory(prefix="specbench-drafters-") as folder:
        models, texts = None, list[Text]()
        if target_folder is not None:
            from specbench.drafters.draft_models import DraftModels

            models = DraftModels(target_folder, folder if work is None else work)
            texts = plain_texts(target_folder, few_prompts() if prompts is None else prompts, max_new_tokens)
            tell(f"{sum(len(one.plain) for one in texts)} tokens of plain decoding after {len(texts)} prompts")
        judged: dict[tuple[str, str], Result] = {}  # several drafters differ in their models only
        for name in names or DRAFTERS:
            kind = DRAFTERS[name].target, DRAFTERS[name].name
            if kind not in judged:
                judged[kind] = _judged(name, DRAFTERS[name], profile, seed)
            result = replace(judged[kind], drafter=name, domain=DRAFTERS[name].domain)
            if models is not None and not result.missing:
                result = _measured(result, DRAFTERS[name], models, texts)
            tell(f"{name}: {told(result)}")
            yield result


def told(result: Result) -> str:
    """A result in a line."""
    parts = [", ".join(f"{claim.partition('.')[2]} {verdict}" for claim, verdict in result.verdicts.items())]
    if is_measured(result):
        inside, outside = result.inside.length, result.outside.length
        parts.append(f"{inside:.2f} tokens a forward in its domain, {outside:.2f} out of it")
    return result.missing or "; ".join(one for one in parts if one)


def is_measured(result: Result) -> bool:
    return result.inside.num_texts + result.outside.num_texts > 0


def few_prompts(num_each: int = 2) -> list[Prompt]:
    """The first of each category."""
    prompts = load_prompts()
    return [one for each in CATEGORIES for one in [two for two in prompts if two.category == each][:num_each]]


def plain_texts(target_folder: str | Path, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Text]:
    """Plain greedy decoding in fp32, once a prompt."""
    import torch
    from transformers import AutoTokenizer

    from specbench.banks import load_checkpoint
    from specbench.reference.decoder import Decoder

    tokenizer: Any = AutoTokenizer.from_pretrained(target_folder, trust_remote_code=False)
    end = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    decoder = Decoder(load_checkpoint(str(target_folder), torch.float32))
    texts: list[Text] = []
    for one in prompts:
        prompt = encode(one, tokenizer)
        plain = decoder.generate(prompt, max_new_tokens=max_new_tokens, stop=Stop(end)).tokens
        texts.append(Text(one.category, tuple(prompt), plain))
    return texts


def replay(drafter: Drafter, text: Text, *, gamma: int = GAMMA, max_nodes: int = MAX_NODES) -> Acceptance:
    """Walks a drafter along a text, as a greedy decoder would ask it. What cannot be emitted is not asked for."""
    context, found = list(text.prompt), Acceptance(num_texts=1, num_tokens=len(text.plain))
    done = 0
    while done < len(text.plain):
        left = text.plain[done:]
        max_depth = min(gamma, len(left) - 1)
        path: list[int] = []
        depth = num_nodes = 0
        if max_depth:
            tree = drafter.draft(
                list(context), max_nodes=max_nodes, max_depth=max_depth, sampling=GREEDY, coins=SeededCoins(0)
            )
            path, depth, num_nodes = tree.longest_match(left), int(tree.depth.max()), tree.num_drafts
        emitted = left[: len(path) + 1]
        if callable(observe := getattr(drafter, "observe", None)):
            observe(VerifyResult(tuple(path), emitted[-1]))
        accepted = (1,) * len(path) + (0,) * (depth - len(path))
        found += Acceptance(num_forwards=1, num_nodes=num_nodes, accepted=accepted, drafted=(1,) * depth)
        context += emitted
        done += len(emitted)
    return found


class _Only:
    """A target of several drafters as one of one."""

    def __init__(self, adapter: Any, name: str) -> None:
        self._adapter = adapter
        self.drafter_names = (name,)
        self.lookup_drafters = tuple(one for one in getattr(adapter, "lookup_drafters", ()) if one == name)

    def build_drafter(self, model: Any, name: str) -> Any:
        return self._adapter.build_drafter(model, name=name)


def _judged(name: str, entry: Entry, profile: Profile | None, seed: int) -> Result:
    result = Result(name, _version(entry.package), entry.domain)
    target = load_target(entry.target)
    adapter = _Only(target.adapter, entry.name) if entry.name else target.adapter
    try:
        keywords = {"name": entry.name} if entry.name else {}
        adapter.build_drafter(_Sized(), **keywords)
    except Missing as missing:
        return replace(result, missing=str(missing))
    if profile is None:
        return result
    sessions = [quiet_session(Target(target.name, adapter), profile=one, seed=seed) for one in (profile, LAW_PROFILE)]
    verdicts, findings = dict[str, str](), dict[str, str]()
    for claim in CLAIM_IDS:
        session, seen = sessions[claim == "drafter.law"], list[str]()
        for subject in session.subjects:
            try:
                seen.append(session.judge(claim, subject).verdict)
            except Skipped:
                seen.append(NOT_TESTED)
            except Failed as failed:
                seen.append(BUG)
                findings.setdefault(claim, str(failed).splitlines()[0].partition("   ")[0])
        verdicts[claim] = next((one for one in (BUG, EQUAL) if one in seen), NOT_TESTED)
    return replace(result, verdicts=verdicts, findings=findings)


class _Sized:
    """All of a model that is needed to see whether a drafter can be made."""

    vocab_size = 7


def _measured(result: Result, entry: Entry, models: Any, texts: Sequence[Text]) -> Result:
    if entry.make is None:
        return result
    drafter = entry.make(models)
    inside, outside = Acceptance(), Acceptance()
    started = time.perf_counter()
    for text in texts:
        found = replay(drafter, text)
        if text.category in entry.domain:
            inside += found
        else:
            outside += found
    return replace(result, inside=inside, outside=outside, seconds=time.perf_counter() - started)


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return package


PAGE = """# Drafters that nobody here wrote

Each runs unchanged behind our `Drafter` (`specbench/drafters/`) and is asked as its own decoder asks it. The claims
judge it on tiny models, with a tiny draft model of its own where it has one: `specbench check TARGET`. NOT TESTED for
`drafter.law` says that drafts are not drawn: there is no law to hold them to. What BUG is about, and whether it is one,
is told at the end.
"""

ACCEPTANCE = """
Acceptance on a real model is measured along its own plain greedy text, {texts} texts with {tokens} tokens in
all, {gamma} drafts a round ({nodes} in a tree): what a greedy verifier would accept. *length* is tokens a forward of
the target, its own token included, pooled; *by depth* is rounds that accepted / rounds that drafted as deep as 1, 2,
... In its domain: for what looks the text up, prompts that hold their own continuation (code, repeating); for draft
models, which are made of the target, the language that it was trained on (all but Chinese).
"""


def page(results: Sequence[Result], command: str) -> str:
    """docs/drafters.md."""
    parts = [PAGE, f"<!-- output of: {command} -->", *claims_table(results), ""]
    for one in results:
        parts += [f"- {one.drafter}, {claim}: {line}" for claim, line in one.findings.items()]
    measured = [one for one in results if is_measured(one)]
    if measured:
        one = measured[0]
        num_texts = one.inside.num_texts + one.outside.num_texts
        longest = max(two.inside.num_tokens + two.outside.num_tokens for two in measured)
        how = ACCEPTANCE.format(texts=num_texts, tokens=longest, gamma=GAMMA, nodes=MAX_NODES)
        parts += [how, *acceptance_table(measured)]
    return "\n".join([*parts, FINDINGS])


def claims_table(results: Sequence[Result]) -> list[str]:
    """Markdown lines: a drafter a row, a claim a column."""
    short = [one.partition(".")[2] for one in CLAIM_IDS]
    lines = [f"| drafter | of | {' | '.join(short)} |", f"| --- | --- |{' --- |' * len(short)}"]
    for one in results:
        if one.missing:
            lines.append(f"| {one.drafter} | not installed: {one.missing} |{' - |' * len(short)}")
        else:
            said = [one.verdicts.get(claim, "-") for claim in CLAIM_IDS]
            lines.append(f"| {one.drafter} | {one.version} | {' | '.join(said)} |")
    return lines


def acceptance_table(results: Sequence[Result]) -> list[str]:
    """Markdown lines."""
    lines = [
        "| drafter | in its domain: length | by depth | out of it: length | by depth | drafted nodes |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for one in results:
        cells = [f"{half.length:.2f} | {half.by_depth}" for half in (one.inside, one.outside)]
        nodes = one.inside.num_nodes + one.outside.num_nodes
        lines.append(f"| {one.drafter} | {' | '.join(cells)} | {nodes:,} |")
    return lines
