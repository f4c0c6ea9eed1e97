"""A subject is one column of the table: a target on one bank of models. It opens instances and knows their oracle."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from specbench.banks import Bank, CheckpointBank, HFBank, TinyBank
from specbench.cases import Case
from specbench.clock import Clock
from specbench.loading import EXPOSE, Target, TargetError, capabilities
from specbench.models import find_model
from specbench.own_bank import OwnBank, TextSession
from specbench.probe import Probe, describe, first_line
from specbench.profiles import Profile
from specbench.protocols import Drafter, LanguageModel
from specbench.reference import autoregressive
from specbench.reference.decoder import Decoder
from specbench.reference.model import LlamaModel
from specbench.reference.session import TreeSession
from specbench.tree import DraftTree
from specbench.types import DTYPES
from specbench.watchdog import Watchdog

Remembered = TypeVar("Remembered")


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
        self.used_prompts: set[str] = set()
        self._memory: dict[tuple[Any, ...], Any] = {}
        self._plain_texts: dict[tuple[int, tuple[int, ...], int], tuple[int, ...]] = {}
        accepted = inspect.signature(target.adapter.build).parameters if target.has_build else {}
        self.cache_kinds = bank.cache_kinds if "cache" in accepted else ("contiguous",)
        self.layouts = ("tree_mask", "path_batch") if "layout" in accepted else ("tree_mask",)
        self.has = self._capabilities()

    @property
    def description(self) -> str:
        return self.bank.description

    def missing(self, needs: Sequence[str]) -> str | None:
        """The sentence that says what to expose, or None when all is there ("rounds" shows at run time)."""
        for need in needs:
            if need not in self.has and need != "rounds":
                return EXPOSE[need]
        return None

    def vocab_size(self, idx: int) -> int:
        return self.bank.model(idx).vocab_size

    def open(self, case: Case, *, drafter: Drafter | None = None, model: LanguageModel | None = None) -> Probe:
        """A fresh instance for a case. model: stands in for the bank's own, to count its forwards for instance."""
        one = model if model is not None else self.bank.model(case.model)
        with self.clock.count("target"):
            adapter = self._make(one, case, drafter)
        return Probe(adapter, vocab_size=one.vocab_size, clock=self.clock, watchdog=self.watchdog)

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
        return Probe(TreeSession(model), vocab_size=model.vocab_size, clock=self.clock, watchdog=self.watchdog)

    def open_stepping(self, case: Case) -> Probe:
        """The target's own one-by-one forward where that is the definition of right (fp64 weights of its own)."""
        return self.open(case) if isinstance(self.bank, OwnBank) and self.bank.is_called else self.open_plain(case)

    def remember(self, key: tuple[Any, ...], make: Callable[[], Remembered], *, always: bool = False) -> Remembered:
        """What `make` returns, kept for later claims on a real model, where one forward costs what a thousand tiny
        ones do. Tiny models are asked afresh, so that every claim draws its own cases."""
        if not (self.bank.real or always):
            return make()
        if key not in self._memory:
            while len(self._memory) >= 40:
                self._memory.pop(next(iter(self._memory)))
            self._memory[key] = make()
        return self._memory[key]

    def score(self, case: Case, prefix: Sequence[int], tree: DraftTree) -> autoregressive.NodeScores:
        """What plain decoding computes at each node, in fp64."""
        with self.clock.count("oracle"):
            return self.remember(
                ("score", case.model, tuple(prefix), tree),
                lambda: autoregressive.score_tree(self.bank.wide(case.model), prefix, tree),
            )

    def score_text(self, case: Case, tokens: Sequence[int]) -> autoregressive.NodeScores:
        """The same at each position of one text."""
        with self.clock.count("oracle"):
            return autoregressive.prefix_scores(self.bank.wide(case.model), tokens)

    def rows(self, case: Case, tokens: Sequence[int]) -> Tensor:
        """float64 [S, V]: oracle logits of one text."""
        with self.clock.count("oracle"):
            return self.remember(("rows", case.model, tuple(tokens)), lambda: self.bank.wide(case.model).logits(tokens))

    def plain_text(self, case: Case, prompt: tuple[int, ...], max_new_tokens: int) -> tuple[int, ...]:
        """What plain greedy decoding emits in the subject's own dtype. By definition (whole prefix, no cache) on tiny
        models; with a cache, proven equal by tests, on real ones."""
        key = (case.model, prompt, max_new_tokens)
        if key not in self._plain_texts:
            model = self.bank.model(case.model)
            with self.clock.count("oracle"):
                if self.bank.real:
                    tokens = Decoder(model).generate(prompt, max_new_tokens=max_new_tokens).tokens
                else:
                    tokens = autoregressive.generate(model, prompt, max_new_tokens=max_new_tokens).tokens
            if len(self._plain_texts) > 512:
                self._plain_texts.clear()
            self._plain_texts[key] = tokens
        return self._plain_texts[key]

    def _make(self, model: LanguageModel, case: Case, drafter: Drafter | None) -> Any:
        target = self.target
        if target.has_build:
            wanted = {"cache": case.cache, "layout": case.layout}
            accepted = inspect.signature(target.adapter.build).parameters
            keywords = {key: value for key, value in wanted.items() if key in accepted}
            return self._made("build", lambda: target.adapter.build(model, drafter, **keywords))
        if target.has_build_from:
            folder = str(self.bank.checkpoint(case.model))
            return self._made("build_from", lambda: target.adapter.build_from(folder, None))
        return target.adapter

    def _made(self, name: str, factory: Callable[[], Any]) -> Any:
        try:
            with self.watchdog.guard(f"{name}()"):
                return factory()
        except Exception as error:
            raise TargetError(
                f"target {self.target.name!r}: {name}() raised {type(error).__name__}: {first_line(error)}"
            ) from error

    def _capabilities(self) -> frozenset[str]:
        adapter = self.target.adapter
        extra: set[str] = set()
        if self.target.has_build or self.target.has_build_from:
            adapter = self._make(self.bank.model(0), Case(), None)
            if not capabilities(adapter, self.target.name):
                factory = "build" if self.target.has_build else "build_from"
                raise TargetError(
                    f"target {self.target.name!r}: {factory}() returned {describe(adapter)}, must return an object "
                    "with some of the methods of the adapter levels in the README"
                )
            extra = {"oracle", "build"} if self.target.has_build else {"oracle"}
        elif isinstance(self.bank, OwnBank) and self.bank.has_oracle:
            extra = {"oracle"}
        return capabilities(adapter, self.target.name) | extra


def make_subjects(
    target: Target, *, model: str, profile: Profile, device: str, clock: Clock, watchdog: Watchdog
) -> list[Subject | Unavailable]:
    """The columns of a run. model: a name that `specbench model fetch` knows, a folder, a hub id, or "none"."""
    banks: list[Bank | Unavailable]
    if target.has_build:
        tiny = [TinyBank(label, dtype, device=device) for label, dtype in DTYPES.items()]
        banks = [tiny[0], *([HFBank("sdpa"), HFBank("eager")] if device == "cpu" else []), *tiny[1:]]
        banks += _real_banks(model, profile.real_dtypes, device)
    elif target.has_build_from:
        banks = [TinyBank("fp64", torch.float64), TinyBank("fp32", torch.float32)]
        banks += _real_banks(model, ("fp32",), device)
    else:
        banks = [OwnBank(target, clock=clock, watchdog=watchdog)]
    return [
        one if isinstance(one, Unavailable) else Subject(target, one, clock=clock, watchdog=watchdog) for one in banks
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
