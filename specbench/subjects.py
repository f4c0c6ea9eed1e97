"""A subject is one column of the table: a target on one bank of models. It opens instances and knows their oracle."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from specbench.ambient import SettingsOfTheTarget
from specbench.banks import Bank, CheckpointBank, HFBank, TinyBank
from specbench.cases import BATCH_LAYOUTS, BatchCase, Case, DrafterCase
from specbench.claims import KERNEL_COLUMN, Violation
from specbench.clock import Clock
from specbench.kernel_bank import KernelBank, Limits
from specbench.loading import EXPOSE, Target, TargetError, capabilities
from specbench.lockstep import Group
from specbench.models import find_model
from specbench.own_bank import OwnBank, TextSession
from specbench.probe import Probe, describe, first_line, type_name
from specbench.profiles import Profile
from specbench.protocols import Drafter, LanguageModel
from specbench.reference import autoregressive
from specbench.reference.decoder import Decoder
from specbench.reference.kv_cache import QUANTISED
from specbench.reference.model import LlamaModel
from specbench.reference.session import TreeSession
from specbench.reference.streaming import StreamedOracle
from specbench.tree import PROPOSALS, DraftTree
from specbench.types import DTYPES, GREEDY, NEVER_STOP, Sampling, Stop
from specbench.watchdog import Watchdog

Remembered = TypeVar("Remembered")
_SHOWN_AT_RUN_TIME = ("rounds", "lse")
_OF_THE_TARGET = ("drafters with law", "taps")  # what `remember` keeps of the target itself


class NotTested(Exception):
    """The subject does not expose what a claim needs; the text says what to expose."""


@dataclass(frozen=True)
class Unavailable:
    """A column that cannot be judged here; `reason` says how to get it."""

    name: str
    reason: str

    @property
    def description(self) -> str:
        return f"NOT TESTED: {self.reason}"


class Subject:
    """A target on a bank. `missing` answers whether a claim can be judged.

    exact: fp64 against the same implementation, judged at 1e-9. noise_dtype: in which plain decoding shows the noise
    that is excused. A foreign implementation of fp64 weights may keep norms and softmax in fp32 (transformers does), so
    what it is excused is measured in fp32.
    """

    def __init__(self, target: Target, bank: Bank, *, clock: Clock, watchdog: Watchdog) -> None:
        self.target = target
        self.bank = bank
        self.clock = clock
        self.watchdog = watchdog
        self.name = bank.name
        foreign = bank.from_checkpoint or (target.has_build_from and not target.has_build)
        self.exact = bank.exact and not foreign
        self.noise_dtype = torch.float32 if bank.exact and foreign else bank.noise_dtype
        declared = getattr(target.adapter, "dtype", None)
        if foreign and declared in DTYPES and torch.finfo(DTYPES[declared]).eps > torch.finfo(self.noise_dtype).eps:
            self.noise_dtype = DTYPES[declared]  # an engine that computes in half precision, whatever the folder holds
        self.note: Callable[[str, Any], None] | None = None  # told of every answer of an instance, for a trace
        self.used_prompts: set[str] = set()
        self._memory: dict[tuple[Any, ...], Any] = {}
        self._of_the_target: dict[tuple[Any, ...], Any] = {}
        self._keeps_all = False
        self._writes: dict[int, int] = {}  # model -> writes to its weights when the target was first handed it
        self._plain_texts: dict[tuple[Any, ...], tuple[tuple[int, ...], bool]] = {}
        accepted = inspect.signature(target.adapter.build).parameters if target.has_build else {}
        offered = getattr(target.adapter, "cache_kinds", bank.cache_kinds)  # a target may know fewer than the bank
        kinds = tuple(one for one in bank.cache_kinds if one in offered)
        self.cache_kinds = kinds if kinds and "cache" in accepted else ("contiguous",)
        self.layouts = ("tree_mask", "path_batch") if "layout" in accepted else ("tree_mask",)
        self.batch_layouts = BATCH_LAYOUTS if "batch_layout" in accepted else BATCH_LAYOUTS[:1]
        self.has = self._capabilities()

    def beside(self, target: Target) -> Subject:
        """Another target in this column, judged by the same oracle, bounds and plain texts. It and its `twin`s are
        to be judged on the same cases again and again: what the oracle said is kept."""
        other = Subject(target, self.bank, clock=Clock(), watchdog=Watchdog(0.0, lambda sentence: None))
        other.exact, other.noise_dtype = self.exact, self.noise_dtype
        other._memory, other._plain_texts, other._keeps_all = dict(self._memory), self._plain_texts, True
        return other

    def twin(self, target: Target) -> Subject:
        """The same for a target that has the same abilities, which are not looked for again."""
        other = copy.copy(self)
        other.target, other.note, other._of_the_target = target, None, {}
        return other

    @property
    def description(self) -> str:
        return self.bank.description

    def missing(self, needs: Sequence[str]) -> str | None:
        """The sentence that says what to expose, or None when all is there (some show at run time)."""
        for need in needs:
            if need not in self.has and need not in _SHOWN_AT_RUN_TIME:
                return EXPOSE[need]
        return None

    def vocab_size(self, idx: int) -> int:
        return self.bank.model(idx).vocab_size

    def open(
        self,
        case: Case,
        *,
        drafter: Drafter | None = None,
        model: LanguageModel | None = None,
        drafts_itself: bool = False,
        group: Group | None = None,
    ) -> Probe:
        """A fresh instance for a case. model: stands in for the bank's own, to count its forwards for instance.
        drafts_itself: build_from is handed the same folder for the drafter. group: the ranks this is one of."""
        one = model if model is not None else self.bank.model(case.model)
        if case.model not in self._writes:
            self._writes[case.model] = _num_writes(self.bank.model(case.model))
        with self.clock.count("target"):
            adapter = self._make(one, case, drafter, drafts_itself=drafts_itself, group=group)
        return Probe(adapter, vocab_size=one.vocab_size, clock=self.clock, watchdog=self.watchdog, note=self.note)

    def rewritten_models(self) -> list[int]:
        """Models whose weights were written to since this was asked last, after a target had been handed them."""
        now = {idx: _num_writes(self.bank.model(idx)) for idx in self._writes}
        before, self._writes = self._writes, now
        return [idx for idx, count in now.items() if count != before[idx]]

    def open_plain(self, case: Case) -> Probe:
        """Plain decoding in the subject's dtype on the same weights: what a target's noise is measured against.

        Never the forward that is judged: a fault in it would become the very bound that excuses it.
        """
        model = self.bank.model(case.model)
        if isinstance(self.bank, OwnBank) and self.bank.is_called:
            plain = TextSession(model)
            return Probe(plain, vocab_size=model.vocab_size, clock=self.clock, watchdog=self.watchdog)
        if isinstance(model, LlamaModel) and self.noise_dtype != model.dtype:
            model = model.to(self.noise_dtype)
        session = TreeSession(model, cache=self.codec(case) or "contiguous")
        return Probe(session, vocab_size=model.vocab_size, clock=self.clock, watchdog=self.watchdog)

    def codec(self, case: Case) -> str:
        """The rounding that the case's cache kind does, "" for none: what is right, or usual, then depends on it."""
        return case.cache if case.cache in QUANTISED else ""

    def oracle(self, case: Case) -> LanguageModel:
        """The fp64 model that says what is right. In fp64 it rounds keys and values as a quantised cache does. In a
        lower precision a value near a step's edge falls to either side, so there the oracle stays as it is and the
        steps are part of the noise that plain decoding shows with the same cache."""
        model = self.bank.wide(case.model)
        if self.exact and self.codec(case) and isinstance(model, LlamaModel):
            return model.with_codec(self.codec(case))
        return model

    def open_stepping(self, case: Case) -> Probe:
        """The target's own one-by-one forward where that is the definition of right (fp64 weights of its own)."""
        return self.open(case) if isinstance(self.bank, OwnBank) and self.bank.is_called else self.open_plain(case)

    @property
    def drafter_names(self) -> tuple[str, ...]:
        """Drafters that a case may name: those that a build_drafter declares, or one that has no name."""
        declared = getattr(self.target.adapter, "drafter_names", ()) if self.target.has_build_drafter else ()
        return tuple(str(one) for one in declared) or ("default",)

    @property
    def self_drafters(self) -> tuple[str, ...]:
        """Those of them that draft what the model itself says, by the target's own word."""
        declared = getattr(self.target.adapter, "self_drafters", ()) if self.target.has_build_drafter else ()
        return tuple(str(one) for one in declared)

    @property
    def lookup_drafters(self) -> tuple[str, ...]:
        """Those of them that draft only what has stood in the context, by the target's own word."""
        declared = getattr(self.target.adapter, "lookup_drafters", ()) if self.target.has_build_drafter else ()
        return tuple(str(one) for one in declared)

    @property
    def law_drafts(self) -> tuple[tuple[str, ...], bool]:
        """Which drafts its verifier is made for, by its own word: `proposals`, all of them where it names none, and
        whether chains only (`only_chains`)."""
        adapter = self.target.adapter
        declared = tuple(str(one) for one in getattr(adapter, "proposals", ()))
        for one in declared:
            if one not in PROPOSALS:
                raise TargetError(
                    f"target {self.target.name!r}: proposals names {one!r}, must be of {', '.join(PROPOSALS)}"
                )
        return declared or PROPOSALS, bool(getattr(adapter, "only_chains", False))

    @property
    def drafters_with_law(self) -> tuple[str, ...]:
        """Those that name a law at a temperature; all of them when none does, or when one cannot be asked."""

        def find() -> tuple[str, ...]:
            sampling, names = Sampling(temperature=1.0), []
            for name in self.drafter_names:
                probe = self.open_drafter(DrafterCase(drafter=name))
                if probe.draft([0], max_nodes=4, max_depth=2, sampling=sampling).draft_probs is not None:
                    names.append(name)
            return tuple(names) or self.drafter_names

        try:
            return self.remember(("drafters with law",), find, always=True)
        except (Violation, TargetError):
            return self.drafter_names

    @property
    def makes_fresh_drafters(self) -> bool:
        """Whether `open_drafter` gives a drafter that has seen no text: a new one, or an old one after its reset()."""
        target = self.target
        return target.has_build_drafter or target.make is not None or callable(getattr(target.adapter, "reset", None))

    def drafter_model(self, case: Case) -> LanguageModel:
        """The model that drafters are made over: in fp64, so that no draft hangs on a rounding tie."""
        return self.bank.wide(case.model) if self.bank.real else self.bank.model(case.model)

    def open_drafter(self, case: DrafterCase, *, model: LanguageModel | None = None) -> Probe:
        """A drafter for a case, fresh where `makes_fresh_drafters`. Only one is to be used at a time. model: what it is
        made over instead of `drafter_model`."""
        target = self.target
        with self.clock.count("target"):
            if target.has_build_drafter:
                adapter = self.build_drafter(case.drafter, self.drafter_model(case) if model is None else model)
            elif target.make is not None:
                adapter = self._made("its factory", target.make)
            else:
                adapter = target.adapter
        if not callable(getattr(adapter, "draft", None)):
            raise TargetError(f"target {target.name!r}: {describe(adapter)} as a drafter must have draft()")
        self._able(adapter)
        vocab_size = self.vocab_size(case.model)
        probe = Probe(adapter, vocab_size=vocab_size, clock=self.clock, watchdog=self.watchdog, note=self.note)
        if adapter is target.adapter and callable(getattr(adapter, "reset", None)):
            probe.reset()
        return probe

    def build_drafter(self, name: str, model: LanguageModel) -> Any:
        """The target's drafter of a name, fresh, over `model`."""
        names, adapter = self.drafter_names, self.target.adapter
        if name not in names:
            raise TargetError(
                f"target {self.target.name!r} has no drafter {name!r}: its drafter_names are {', '.join(names)}"
            )
        keywords = {"name": name} if getattr(adapter, "drafter_names", ()) else {}
        return self._made("build_drafter", lambda: adapter.build_drafter(model, **keywords))

    def open_kernel(self) -> Probe:
        """The target's `attention`."""
        return Probe(self.target.adapter, vocab_size=None, clock=self.clock, watchdog=self.watchdog, note=self.note)

    def remember(self, key: tuple[Any, ...], make: Callable[[], Remembered], *, always: bool = False) -> Remembered:
        """What `make` returns, kept for later claims on a real model, where one forward costs what a thousand tiny
        ones do. Tiny models are asked afresh, so that every claim draws its own cases."""
        is_its_own = key[0] in _OF_THE_TARGET
        if not (always or self.bank.real or (self._keeps_all and not is_its_own)):
            return make()
        memory = self._of_the_target if is_its_own else self._memory
        if key not in memory:
            while len(memory) >= (40 if self.bank.real else 400):
                memory.pop(next(iter(memory)))
            memory[key] = make()
        return memory[key]

    def score(self, case: Case, prefix: Sequence[int], tree: DraftTree) -> autoregressive.NodeScores:
        """What plain decoding computes at each node, in fp64."""
        with self.clock.count("oracle"):
            return self.remember(
                ("score", case.model, self.exact and self.codec(case), tuple(prefix), tree),
                lambda: _score_tree(self.oracle(case), prefix, tree),
            )

    def score_text(self, case: Case, tokens: Sequence[int]) -> autoregressive.NodeScores:
        """The same at each position of one text."""
        with self.clock.count("oracle"):
            if self.bank.real:  # all layers of a long text: too much to keep
                return autoregressive.prefix_scores(self.oracle(case), tokens)
            key = ("text", case.model, self.exact and self.codec(case), tuple(tokens))
            return self.remember(key, lambda: autoregressive.prefix_scores(self.oracle(case), tokens))

    def rows(self, case: Case, tokens: Sequence[int]) -> Tensor:
        """float64 [S, V]: oracle logits of one text."""
        with self.clock.count("oracle"):
            key = ("rows", case.model, self.exact and self.codec(case), tuple(tokens))
            return self.remember(key, lambda: self.oracle(case).logits(tokens))

    def plain_text(
        self,
        case: Case,
        prompt: tuple[int, ...],
        max_new_tokens: int,
        *,
        sampling: Sampling = GREEDY,
        stop: Stop = NEVER_STOP,
        past_stop: bool = False,
    ) -> tuple[int, ...]:
        """What plain greedy decoding emits in the subject's own dtype. By definition (whole prefix, no cache) on tiny
        models; with a cache, proven equal by tests, on real ones. past_stop: what it would go on with (tiny models)."""
        codec = self.codec(case)
        # Only a least length changes what is said before the end; otherwise one text serves every stop and every limit.
        least = stop if stop.min_new_tokens else NEVER_STOP
        key = (case.model, codec, prompt, sampling, least)
        text, ended = self._plain_texts.get(key, ((), False))
        if len(text) < max_new_tokens and not ended:
            with self.clock.count("oracle"):
                text, ended = self._plain_text(case, prompt, max_new_tokens, sampling, least)
            if len(self._plain_texts) > 512:
                self._plain_texts.clear()
            self._plain_texts[key] = text, ended
        text = text[:max_new_tokens]
        if not past_stop:
            ends = (num for num in range(1, len(text) + 1) if stop.reason_at(text[:num]))
            text = text[: next(ends, len(text))]
        return text

    def _plain_text(
        self, case: Case, prompt: tuple[int, ...], num_tokens: int, sampling: Sampling, stop: Stop
    ) -> tuple[tuple[int, ...], bool]:
        """At least `num_tokens` tokens, and whether the text has ended for good."""
        model, codec = self.bank.model(case.model), self.codec(case)
        if self.bank.real:
            decoder = Decoder(model, cache=codec or "contiguous")
            plain = decoder.generate(prompt, max_new_tokens=num_tokens, sampling=sampling, stop=stop)
            return plain.tokens, plain.finish_reason != "length"
        model = model.with_codec(codec) if isinstance(model, LlamaModel) else model
        num_tokens += 4  # a script for a drafter will ask for a little more
        plain = autoregressive.generate(
            model, prompt, max_new_tokens=num_tokens, sampling=sampling, stop=stop, past_stop=True
        )
        return plain.tokens, False

    def _make(
        self,
        model: LanguageModel,
        case: Case,
        drafter: Drafter | None,
        *,
        drafts_itself: bool = False,
        group: Group | None = None,
    ) -> Any:
        target = self.target
        if target.has_build:
            # Claims that are not about caches name the usual kind, which a target need not have.
            exact = [one for one in self.cache_kinds if one not in QUANTISED]
            cache = case.cache if case.cache in self.cache_kinds or not exact else exact[0]
            wanted: dict[str, Any] = {"cache": cache, "layout": case.layout, "group": group}
            if isinstance(case, BatchCase):
                wanted["batch_layout"] = case.batch_layout
            accepted = inspect.signature(target.adapter.build).parameters
            keywords = {key: value for key, value in wanted.items() if key in accepted}
            return self._made("build", lambda: target.adapter.build(model, drafter, **keywords))
        if target.has_build_from:
            folder = str(self.bank.checkpoint(case.model))
            drafter_folder = folder if drafts_itself else None
            return self._made("build_from", lambda: target.adapter.build_from(folder, drafter_folder))
        return target.adapter

    def _made(self, name: str, factory: Callable[[], Any]) -> Any:
        with self.watchdog.guard(f"{name}()"), SettingsOfTheTarget():
            try:
                return factory()
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                said = f"{name}() raised {type_name(error)}: {first_line(error)}"
        raise TargetError(f"target {self.target.name!r}: {said}")

    def _capabilities(self) -> frozenset[str]:
        adapter = self.target.adapter
        if isinstance(self.bank, KernelBank):
            return self._able(adapter)
        extra: set[str] = set()
        if self.target.has_build_drafter:
            self._able(adapter)
            if not (self.target.has_build or self.target.has_build_from):
                return frozenset({"oracle", "draft"})
        if self.target.has_build or self.target.has_build_from:
            adapter = self._make(self.bank.model(0), Case(), None)
            if not self._able(adapter):
                factory = "build" if self.target.has_build else "build_from"
                raise TargetError(
                    f"target {self.target.name!r}: {factory}() returned {describe(adapter)}, must return an object "
                    "with some of the methods of the adapter levels in the README"
                )
            extra = {"oracle", "build"} if self.target.has_build else {"oracle"}
            if self.target.has_build and "group" in inspect.signature(self.target.adapter.build).parameters:
                extra.add("ranks")
            drafts = {"draft"} if self.target.has_build_drafter else set()
            return (self._able(adapter) - {"draft"}) | extra | drafts
        if isinstance(self.bank, OwnBank) and self.bank.has_oracle:
            extra = {"oracle"}
        return self._able(adapter) | extra

    def _able(self, adapter: Any) -> frozenset[str]:
        try:
            return capabilities(adapter, self.target.name)
        except (TargetError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise TargetError(
                f"target {self.target.name!r}: reading its methods raised {type_name(error)}: {first_line(error)}"
            ) from None


def _score_tree(oracle: LanguageModel, prefix: Sequence[int], tree: DraftTree) -> autoregressive.NodeScores:
    """A streaming oracle reads its weights once for all nodes."""
    if isinstance(oracle, StreamedOracle):
        return oracle.score_tree(prefix, tree)
    return autoregressive.score_tree(oracle, prefix, tree)


def _num_writes(model: Any) -> int:
    """How often weights were written to in place, as torch counts it; 0 for models that are no tensors of ours."""
    weights = getattr(model, "_weights", None)
    inner = getattr(model, "model", None)
    if isinstance(inner, torch.nn.Module):
        return sum(one._version for one in inner.parameters())
    return sum(one._version for one in weights.values()) if isinstance(weights, dict) else 0


def make_subjects(
    target: Target, *, model: str, profile: Profile, device: str, clock: Clock, watchdog: Watchdog
) -> list[Subject | Unavailable]:
    """The columns of a run. model: a name that `specbench model fetch` knows, a folder, a hub id, or "none"."""
    banks: list[Bank | Unavailable]
    words = capabilities(target.adapter, target.name)
    kernel = _kernel_banks(target, device) if "attention" in words else []
    if target.has_build:
        tiny = [TinyBank(label, dtype, device=device) for label, dtype in DTYPES.items()]
        banks = [tiny[0], *([HFBank(name) for name in HFBank.TYPES] if device == "cpu" else []), *tiny[1:]]
        banks += _real_banks(model, profile.real_dtypes, device)
    elif target.has_build_from:
        banks = [TinyBank(label, DTYPES[label], savable=True) for label in ("fp64", "fp32")]
        banks += _real_banks(model, ("fp32",), device)
    elif target.has_build_drafter:
        banks = [TinyBank("fp64", torch.float64, device=device), *([HFBank("hf-fp64")] if device == "cpu" else [])]
        banks += _real_banks(model, ("fp32",), device)
    elif not kernel or words & {"generate", "verify", "tree", "draft", "sampler", "oracle"}:
        banks = [OwnBank(target, clock=clock, watchdog=watchdog)]
    else:
        banks = []
    return [
        one if isinstance(one, Unavailable) else Subject(target, one, clock=clock, watchdog=watchdog)
        for one in (*banks, *kernel)
    ]


def _kernel_banks(target: Target, device: str) -> list[Bank | Unavailable]:
    """A column a dtype."""
    limits = Limits.of(target)
    declared = ", ".join(limits.dtypes)
    return [
        KernelBank(label, limits, device=device)
        if label in limits.dtypes
        else Unavailable(f"{KERNEL_COLUMN}{label}", f"the kernel says dtypes = ({declared}): add {label} where it can")
        for label in DTYPES
    ]


def _real_banks(model: str, dtypes: Sequence[str], device: str) -> list[Bank | Unavailable]:
    if model == "none":
        return []
    found = find_model(model)
    short = model if found is None else found.name
    if found is None:
        how = f"run `specbench model fetch {model}`, or give a folder by --specbench-model"
        return [Unavailable(f"{short}-{dtype}", f"the model {model} is not here: {how}") for dtype in dtypes]
    return [
        CheckpointBank(f"{short}-{dtype}", str(found.path), DTYPES[dtype], provenance=found.label, device=device)
        for dtype in dtypes
    ]
