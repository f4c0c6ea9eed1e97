"""Engines on a sentinel or a real model: every mode asked the same requests, judged by its tokens; a table, a page."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from specbench.audit import Audit, Output, audit_greedy, audit_outputs, counted, first_wrong, no_tokens
from specbench.careless import Careless
from specbench.engine_models import RealModel, SentinelModel, ended
from specbench.engines import REFUSALS, Answer, Engine, Files, Missing, Refused, Request, Settings
from specbench.engines.answers import Malformed, checked
from specbench.engines.apart import Died
from specbench.law.sequential import ALPHA
from specbench.record import BUG, EQUAL, NOT_TESTED
from specbench.reference.sentinel import DTYPES
from specbench.regret import Oracle, Plain, audit_ties, plain_of
from specbench.sanitize import plain as printable
from specbench.types import Sampling

GREEDY = Sampling(0.0)
# What a verdict rests on.
TOKENS, ENDING, REFUSAL, NO_DRAFTS, FAILURE = "tokens", "how it ended", "refusal", "no drafts", "failure of specbench"
MOST_TRIES = 3  # at a smaller case of what is wrong
# Whose activations are rounded as our own forward's in that dtype; those of a quantised file are not.
_OUR_DTYPES = DTYPES | {"f32": DTYPES["fp32"]}


@dataclass(frozen=True)
class Result:
    """One mode of an engine in one format of the weights. num_*: sums over the requests, None where it does not say.
    smallest: of what is wrong on a sentinel, the shortest request that fails by itself. num_emitted: tokens, of which
    the audit may have judged fewer. because: what the verdict rests on, one of those above."""

    engine: str
    model: str
    sampling: str
    mode: str
    weights: str
    audit: Audit
    num_forwards: int | None
    num_drafted: int | None
    num_kept: int | None
    seconds: float
    drafts: bool = False
    smallest: str = ""
    num_emitted: int | None = None
    because: str = TOKENS

    @property
    def drafting(self) -> str:
        """What shows that drafts were verified."""
        if self.num_drafted:
            kept = "" if self.num_kept is None else f"{self.num_kept} of "
            return f"{kept}{counted(self.num_drafted, 'draft')} {'kept' if kept else 'verified'}"
        if self.num_forwards:
            emitted = self.audit.num_tokens if self.num_emitted is None else self.num_emitted
            return f"{emitted / self.num_forwards:.2f} tokens a forward"
        return "it does not say" if self.drafts else "-"

    @property
    def tokens(self) -> str:
        judged = f"{self.audit.num_tokens:,}"
        return (
            judged if self.num_emitted in (None, self.audit.num_tokens) else f"{self.num_emitted:,} ({judged} judged)"
        )

    def as_fields(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "audit"}
        return own | self.audit.as_fields()

    @classmethod
    def from_fields(cls, data: Mapping[str, Any]) -> Result:
        audit = Audit(**{name: data[name] for name in Audit.__dataclass_fields__})
        own = [one for one in fields(cls) if one.name != "audit"]
        # An earlier version has not written what has a default.
        told = {one.name: data[one.name] for one in own if one.default is MISSING or one.name in data}
        return cls(audit=audit, **told)


@dataclass(frozen=True)
class _Run:
    """What one mode answered. refused, raised: a sentence, or empty. answers: one for each output."""

    mode: str
    outputs: tuple[Output, ...]
    answers: tuple[Answer, ...]
    refused: str
    raised: str
    seconds: float


def run_engines(
    engines: Mapping[str, Engine],
    model: SentinelModel | RealModel,
    *,
    weights: Sequence[str] | None,
    modes: Sequence[str] | None,
    sampling: Sampling = GREEDY,
    max_new_tokens: int,
    tell: Callable[[str], None],
) -> Iterator[Result]:
    """Those that are installed, one after the other. weights, modes: None takes the first format that the model has,
    and every mode that it can judge. tell: is given each line as it comes."""
    for name, engine in engines.items():
        try:
            tell(f"{engine.version()} on {model.name}")
        except Missing as missing:
            tell(f"{name} is not installed: {missing}; or let `specbench engines {name} --env DIR` install it apart")
            continue
        for one in run_engine(
            engine, model, weights=weights, modes=modes, sampling=sampling, max_new_tokens=max_new_tokens
        ):
            tell(_line_of(one))
            yield one


def run_engine(
    engine: Engine,
    model: SentinelModel | RealModel,
    *,
    weights: Sequence[str] | None = None,
    modes: Sequence[str] | None = None,
    sampling: Sampling = GREEDY,
    max_new_tokens: int,
) -> Iterator[Result]:
    """One result a mode and format, as it comes. ValueError names an unknown mode or format."""
    check(engine, model, weights=weights, modes=modes, sampling=sampling)
    modes = None if modes is None else [*dict.fromkeys(modes)]
    with tempfile.TemporaryDirectory(prefix="specbench-engines-") as folder:
        for one in dict.fromkeys(weights or (_first_format(engine, model),)):
            files = model.write(Path(folder) / one, one)
            runs = _Runs(engine, model, files, one, sampling, max_new_tokens)
            if isinstance(model, SentinelModel):
                yield from _judged_by_program(runs, model, modes or [*engine.modes])
            else:
                yield from _judged_by_ties(runs, model, modes)


def check(
    engine: Engine,
    model: SentinelModel | RealModel,
    *,
    weights: Sequence[str] | None,
    modes: Sequence[str] | None,
    sampling: Sampling,
) -> None:
    """ValueError for what cannot be asked, before anything runs."""
    for what, given, known in (("mode", modes, [*engine.modes]), ("weights", weights, engine.weights)):
        for one in given or ():
            if one not in known:
                raise ValueError(f"{what} = {one!r} must be one of {'; '.join(known)}")
    asked = weights or (_first_format(engine, model),)
    for one in asked:
        if one not in model.formats:
            raise ValueError(f"{model.name} is not written as {one}: weights must be one of {'; '.join(model.formats)}")
        if model.has_law and one.startswith("q"):
            raise ValueError(f"{one} rounds the table of a law: sample from weights that hold it exactly")
    if sampling.temperature and not model.has_law:
        raise ValueError(f"{model.name} has no law that sampled tokens could be held against: take a sentinel")
    if isinstance(model, RealModel) and "plain" not in engine.modes:
        has = "; ".join(engine.modes)
        raise ValueError(f"modes must have 'plain', which judges the others on a real model, besides {has}")


def _first_format(engine: Engine, model: SentinelModel | RealModel) -> str:
    """The engine's first that the model has; a real model's GGUF file before what other engines read as folders."""
    if isinstance(model, RealModel) and model.gguf_format in engine.weights:
        return model.gguf_format
    return next((one for one in engine.weights if one in model.formats), engine.weights[0])


@dataclass(frozen=True)
class _Runs:
    """An engine with all that it is asked, but for the mode."""

    engine: Engine
    model: SentinelModel | RealModel
    files: Files
    weights: str
    sampling: Sampling
    max_new_tokens: int

    def run(self, mode: str, requests: Mapping[str, Request] | None = None) -> _Run:
        """requests: None for all of the model's."""
        requests = requests or self.model.requests(self.max_new_tokens)
        started, refused, raised = time.perf_counter(), "", ""
        answers: list[Answer] = []
        settings = Settings(
            mode,
            self.weights,
            temperature=self.sampling.temperature,
            top_k=self.sampling.top_k,
            top_p=self.sampling.top_p,
            min_p=self.sampling.min_p,
        )
        try:
            self._ask([*requests.values()], settings, answers)
        except Malformed as wrong:
            raised = _line(wrong)
        except REFUSALS as error:
            name = "" if isinstance(error, Refused) else type(error).__name__
            refused = ": ".join(word for word in (name, _line(error)) if word)
            if answers:  # what it can decode it does not refuse half-way
                refused, raised = "", f"{_after(answers, requests)} raised {refused or name}"
        except Died as error:
            raised = f"{_after(answers, requests)} {_line(error)}"
        except Exception as error:  # an engine may raise anything; the other modes go on
            told = ": ".join(word for word in (type(error).__name__, _line(error)) if word)
            raised = f"{_after(answers, requests)} raised {told}"
        else:
            if len(answers) < len(requests):
                raised = f"it gave {counted(len(answers), 'answer')} to {counted(len(requests), 'request')}"
        outputs = tuple(
            Output(one.prompt, answer.tokens, name, mode, one.max_new_tokens, answer.logprobs)
            for (name, one), answer in zip(requests.items(), answers, strict=False)
        )
        return _Run(mode, outputs, tuple(answers), refused, raised, time.perf_counter() - started)

    def _ask(self, requests: Sequence[Request], settings: Settings, answers: list[Answer]) -> None:
        """answers: those that are as they must be are added to it."""
        vocab_size = None if isinstance(self.model, SentinelModel) else self.model.vocab_size
        said = self.engine.generate(self.files, requests, settings)
        try:
            for number, one in enumerate(said, start=1):
                if number > len(requests):
                    num = len(requests)
                    raise Malformed(f"it gave more than {counted(num, 'answer')} to {counted(num, 'request')}")
                answers.append(checked(one, number, vocab_size=vocab_size))
        finally:
            if isinstance(said, Generator):  # whose process ends now, and not when it is collected
                said.close()

    def result(self, run: _Run, audit: Audit, *, smallest: str = "", because: str = TOKENS) -> Result:
        """audit: by the tokens; what else there is to say of the mode comes here."""
        if audit.facts.get("failed"):
            because = FAILURE
        num_drafted, num_kept = (
            _sum([getattr(one, name) for one in run.answers]) for name in ("num_drafted", "num_kept")
        )
        forwards = [one.num_forwards for one in run.answers]
        num_forwards = None if None in forwards else _sum(forwards)
        if run.raised and audit.verdict != BUG:
            because, audit = ENDING, replace(audit, verdict=BUG, num_wrong=1, sentence=run.raised)
        elif run.refused and audit.verdict != BUG:
            because = REFUSAL
            audit = replace(audit, verdict=NOT_TESTED, num_wrong=0, sentence=f"refused: {run.refused}")
        elif audit.verdict != BUG and self.engine.modes[run.mode].drafts and num_drafted == 0:
            because, audit = NO_DRAFTS, replace(audit, verdict=NOT_TESTED, sentence="no draft was verified")
        ends = () if isinstance(self.model, SentinelModel) else self.model.ends
        return Result(
            engine=self.engine.version(),
            model=self.model.name,
            sampling=_described(self.sampling),
            mode=run.mode,
            weights=self.weights,
            audit=audit,
            num_forwards=num_forwards,
            num_drafted=num_drafted,
            num_kept=num_kept,
            seconds=run.seconds,
            drafts=self.engine.modes[run.mode].drafts,
            smallest=smallest,
            num_emitted=sum(len(ended(one, ends).tokens) for one in run.outputs),
            because=because,
        )


def _after(answers: Sequence[Answer], requests: Mapping[str, Request]) -> str:
    return f"after {counted(len(answers), 'answer')} of {len(requests)} it"


def _judged_by_program(runs: _Runs, model: SentinelModel, modes: Sequence[str]) -> Iterator[Result]:
    alpha, last = ALPHA / len(runs.engine.modes), runs.engine.temperature_last
    for mode in modes:
        run = runs.run(mode)

        def judge(run: _Run = run) -> Audit:
            audits = audit_outputs(model.program, run.outputs, runs.sampling, temperature_last=last, alpha=alpha)
            return audits[0] if audits else no_tokens(run.mode)

        audit = _unless_it_fails(judge, run)
        is_reduced = audit.verdict == BUG and not runs.sampling.temperature and not isinstance(runs.engine, Careless)
        yield runs.result(run, audit, smallest=_smallest(runs, model, run) if is_reduced else "")


def _unless_it_fails(judge: Callable[[], Audit], run: _Run) -> Audit:
    """A fault of ours ends the judgement of one mode, and no other's."""
    try:
        return judge()
    except Exception as error:
        told = f"specbench failed to judge it, please report this: {type(error).__name__}: {_line(error)}"
        return Audit(run.mode, NOT_TESTED, len(run.outputs), 0, 0, told, {"failed": True})


def _smallest(runs: _Runs, model: SentinelModel, run: _Run) -> str:
    """The first few wrong outputs, those of the shortest prompts first, are asked for again, alone: no further than the
    first wrong token, then whole. What is too short or too long is wrong too."""
    requests, wrong = runs.model.requests(runs.max_new_tokens), []
    for one in run.outputs:
        place = first_wrong(model.program, one)
        if place is not None or len(one.tokens) != one.max_new_tokens:
            num = runs.max_new_tokens if place is None else min(place + 1, runs.max_new_tokens)
            wrong.append((len(one.prompt), num, one.name))
    if not wrong:  # but a margin that it shows
        return ""
    tries = [(name, num) for _, num, name in sorted(wrong)[:MOST_TRIES]]
    tries = [(name, one) for name, num in tries for one in dict.fromkeys((num, runs.max_new_tokens))]
    for name, num in tries:
        alone = {name: replace(requests[name], max_new_tokens=num)}
        where = f"prompt {list(alone[name].prompt)} ({name}), {counted(num, 'new token')}, alone"
        again = runs.run(run.mode, alone)
        if again.raised:
            return f"{where}: {again.raised}"
        if any(audit.verdict == BUG for audit in audit_greedy(model.program, again.outputs)):
            said = list(again.outputs[0].tokens)
            right = model.program.continuation(alone[name].prompt, num)
            found = f"{where}: it gives {said}, and must give {right}"
            other = _other_tokens(runs, run.mode, alone, said)
            return found if other is None else f"{found}; it is not deterministic: asked again it gives {other}"
        if num == runs.max_new_tokens:
            said = list(again.outputs[0].tokens) if again.outputs else []
            other = _other_tokens(runs, run.mode, alone, said)
            if other is not None:
                return f"{where}: it is not deterministic: it gives {said}, and asked again {other}"
    return "no single request fails by itself: it takes several, or more tokens behind the wrong one, or chance"


def _other_tokens(runs: _Runs, mode: str, alone: Mapping[str, Request], said: list[int]) -> list[int] | None:
    """Of the same request once more, where they differ."""
    again = runs.run(mode, alone)
    tokens = list(again.outputs[0].tokens) if again.outputs else []
    return None if tokens == said else tokens


def _judged_by_ties(runs: _Runs, model: RealModel, modes: Sequence[str] | None) -> Iterator[Result]:
    """Plain decoding comes first in all its shapes: it is what the others are judged by, and itself by its other
    shapes."""
    oracle = Oracle(runs.files.target)
    plain = {name: runs.run(name) for name in runs.engine.modes if name.startswith("plain")}
    dtype = _OUR_DTYPES.get(runs.weights)
    told = {name: _outputs(model, run) for name, run in plain.items()}
    shown = {name: plain_of(oracle, outputs, dtype) for name, outputs in told.items() if outputs}
    for name, run in plain.items():
        if modes is None or name in modes:
            others = [one for other, one in shown.items() if other != name] or [*shown.values()]
            yield runs.result(run, _tied(oracle, model, others, run, told["plain"], runs.weights))
    for name in modes if modes is not None else [one for one in runs.engine.modes if one not in plain]:
        if name in plain:
            continue
        run = runs.run(name)
        if not runs.engine.modes[name].as_plain:
            audit = Audit(name, NOT_TESTED, len(run.outputs), 0, 0, "it rounds otherwise than plain decoding")
            yield runs.result(run, audit)
            continue
        yield runs.result(run, _tied(oracle, model, [*shown.values()], run, told["plain"], runs.weights))


def _tied(
    oracle: Oracle, model: RealModel, plain: Sequence[Plain], run: _Run, reference: Sequence[Output], weights: str
) -> Audit:
    outputs = _outputs(model, run)
    if not outputs:
        return no_tokens(run.mode)
    if not plain:
        what = "there is no plain decoding to judge it by"
        return Audit(run.mode, NOT_TESTED, len(outputs), 0, 0, what)
    return _unless_it_fails(lambda: audit_ties(oracle, _joined(plain), outputs, reference, weights=weights), run)


def _joined(shown: Sequence[Plain]) -> Plain:
    return Plain(
        tuple(error for one in shown for error in one.errors),
        tuple(place for one in shown for place in one.places),
        max(one.rounding for one in shown),
        shown[0].source,
    )


def _outputs(model: RealModel, run: _Run) -> list[Output]:
    return [ended(one, model.ends) for one in run.outputs]


def _described(sampling: Sampling) -> str:
    if not sampling.temperature:
        return "greedy"
    filters = {name: getattr(sampling, name) for name in ("top_k", "top_p", "min_p")}
    return ", ".join(
        [f"temperature {sampling.temperature:g}", *(f"{k} {v:g}" for k, v in filters.items() if v is not None)]
    )


def _line(error: BaseException) -> str:
    return printable(str(error), 300, one_line=True).strip()


def _line_of(one: Result) -> str:
    line = f"  {one.weights:5} {one.mode:26} {one.audit.verdict:10}  {one.audit.sentence}; {one.drafting}"
    return printable(line, 2_000, one_line=True)


def _sum(numbers: Sequence[int | None]) -> int | None:
    told = [one for one in numbers if one is not None]
    return sum(told) if told else None


PAGE = """# Engines that nobody here wrote

Every mode is asked the same requests and judged by its tokens alone.

- On a [sentinel](sentinel.md) the next token is known by integers and leads by 10: EQUAL, or BUG with the first wrong
  token. The drafter agrees with the target in three contexts of five, so that drafts are kept and refused; for prompt
  lookup and n-gram modes some prompts repeat their own continuation, with tokens spoilt. Above temperature 0 the
  tokens are held against the exact law behind each text; *would have shown* says how far off it could still be. The
  drafter's laws are then half of the target's, so that what a refusal draws shows: a residual that is p or its argmax,
  acceptance by p alone and a wrong q are BUG within the usual 1,800 tokens. A wrong bonus token is not, where few
  rounds keep all their drafts.
- On a real model each token is held against an oracle in fp64 that reads the same text. A token's regret is how far
  its logit lies below the best. NOISE needs every regret to be within a bound that comes from the errors of this
  engine's plain decoding in all its shapes, and no more of them than plain decoding has. The drafter is the model
  itself, rounded to 4 bits.
- NOT TESTED: it refuses the mode before its first answer, drafted nothing, or rounds otherwise than its plain decoding.
  An engine that raises anything else, dies, hangs, or gives what is no answer is a BUG of that mode.

*tokens* are those that it emitted, and in brackets those of them that were judged, where these are fewer. *drafting*
shows that drafts were really verified. What was found is told in [reproductions](reproductions/README.md), with scripts
that use the engine alone.

Exit code 0: something was judged of each engine that was named, and nothing is a BUG. 1: a BUG. 2: a wrong option, an
interrupt, or an engine of which nothing was judged (not installed, it refuses every mode).

## An engine of your own

A plain callable is judged greedily, without drafts and with: `specbench engines ./mine.py:load`.

```python
def load(target, drafter):
    # Folders that transformers reads; drafter is None for plain decoding.
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target)
    assistant = None if drafter is None else AutoModelForCausalLM.from_pretrained(drafter)

    def generate(prompt, num):
        # At most num new tokens behind token ids; fewer only behind an end token of the model.
        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "assistant_model": assistant, "do_sample": False}
        return model.generate(ids, max_new_tokens=num, **options)[0, len(prompt) :]

    return generate
```

An engine object has modes of its own, may be sampled from, and may say how many drafts it kept:
`specbench engines ./mine.py:ENGINE`.

```python
from specbench.engines.engine import Answer, Mode, Refused


class Mine:
    requirements = ("torch", "transformers")  # what pip installs for it with --env
    weights = ("fp32",)  # formats that it reads; fp32, bf16 and fp16 are folders, f32, q8_0 ... GGUF files
    modes = {"plain": Mode(), "drafter": Mode(drafts=True)}  # plain first, and all its shapes: "plain, batch" ...
    temperature_last = False  # top_k, top_p and min_p look at the law after the temperature

    def version(self):
        return "mine 0.1"

    def generate(self, files, requests, settings):
        if settings.temperature:
            raise Refused("it decodes greedily only")
        decode = load(files.target, files.drafter if settings.mode == "drafter" else None)
        for request in requests:
            yield Answer(tokens=decode(request.prompt, request.max_new_tokens))


ENGINE = Mine()
```

- A request has `prompt` (token ids), `text` (the same as text, without BOS) and `max_new_tokens`. Answers come in the
  order of the requests; *batch* modes may answer them all at once.
- `Answer(tokens, num_forwards, num_drafted, num_kept, logprobs)`: all but the tokens may be left out. Tokens are ints,
  of Python, numpy or torch; counts are of this request; logprobs has for each token pairs (token, log probability), the
  two likeliest first.
- `settings` has `mode`, `weights`, `temperature` (0 is greedy), `top_k`, `top_p`, `min_p` (None is off) and `seed`.
- `Refused`, before the first answer, says that a mode or a setting cannot be had. `Missing`, from `version`, says how
  the engine is installed. Both come from `specbench.engines.engine`.
- It runs in a process of its own for each mode, by the interpreter of `--python` or `--env`, which needs the engine and
  nothing of specbench's. Files beside it can be imported. `--timeout` is for one answer: an engine that answers a batch
  at once needs the batch's. The first answer of a mode has `--load-timeout` more, to load the model.
"""


def page(runs: Sequence[tuple[str, Sequence[Result]]]) -> str:
    """runs: commands and what they found."""
    parts = [PAGE]
    for command, results in runs:
        fence = "``" if "`" in command else "`"
        parts += [f"## {fence}{command}{fence}", "", *table(results), ""]
        for one in results:
            if one.smallest:
                where = _text(f"{one.engine}, {one.mode}, {one.weights}")
                parts += [f"{where}: smallest case: {_text(one.smallest)}", ""]
    return "\n".join(parts)


def results_of(data: Any, where: str) -> tuple[str, list[Result]]:
    """What --json has written: the command and its results. ValueError where it is something else."""
    try:
        found = [Result.from_fields(one) for one in data["engines"]]
        table(found)  # what cannot be shown was not written by us
        return str(data["command"]), found
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ValueError(f"{where} is not what `specbench engines --json` writes") from None


def table(results: Sequence[Result]) -> list[str]:
    """Markdown lines."""
    lines = [
        "| engine | model | weights | sampling | mode | verdict | tokens | drafting | s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in results:
        says_enough = one.audit.verdict == EQUAL and one.sampling == "greedy" and not one.audit.facts
        note = "" if says_enough else f": {one.audit.sentence}"
        words = [one.engine, one.model, one.weights, one.sampling, one.mode, f"{one.audit.verdict}{note}", one.tokens]
        cells = [_text(word) for word in [*words, one.drafting, f"{one.seconds:.1f}"]]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _text(text: str) -> str:
    """As Markdown, in a table too: what an engine says must not end its cell."""
    one_line = printable(text, 10_000, one_line=True)
    for mark in ("\\", "|", "`", "<"):
        one_line = one_line.replace(mark, "\\" + mark)
    return one_line
