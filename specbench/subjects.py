"""A subject is one column of the table: a target on one bank of models. It opens instances and knows their oracle."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specbench.banks import Bank
from specbench.cases import Case
from specbench.clock import Clock
from specbench.loading import EXPOSE, Target, TargetError, capabilities
from specbench.probe import Probe
from specbench.protocols import Drafter, LanguageModel
from specbench.reference import autoregressive
from specbench.reference.decoder import Decoder
from specbench.reference.session import TreeSession
from specbench.tree import DraftTree
from specbench.watchdog import Watchdog


class NotTested(Exception):
    """The subject does not expose what a claim needs; the text says what to expose."""


class Subject:
    """A target on a bank. Made by `make_subjects`; `missing` answers whether a claim can be judged."""

    def __init__(self, target: Target, bank: Bank, *, clock: Clock, watchdog: Watchdog) -> None:
        self.target = target
        self.bank = bank
        self.clock = clock
        self.watchdog = watchdog
        self.name = bank.name
        self._plain_texts: dict[tuple[int, tuple[int, ...], int], tuple[int, ...]] = {}
        self._own: Any = None
        self.has = self._capabilities()

    @property
    def exact(self) -> bool:
        return self.bank.exact

    def missing(self, needs: Sequence[str]) -> str | None:
        """The sentence that says what to expose, or None when everything needed is there ("rounds" shows at run time)."""
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
        """Plain decoding in the subject's dtype on the same weights: what a target's noise is measured against."""
        session = TreeSession(self.bank.model(case.model))
        return Probe(session, vocab_size=session.vocab_size, clock=self.clock, watchdog=self.watchdog)

    def score(self, case: Case, prefix: Sequence[int], tree: DraftTree) -> autoregressive.NodeScores:
        """What plain decoding computes at each node, in fp64."""
        with self.clock.count("oracle"):
            return autoregressive.score_tree(self.bank.wide(case.model), prefix, tree)

    def score_text(self, case: Case, tokens: Sequence[int]) -> autoregressive.NodeScores:
        """The same at each position of one text."""
        with self.clock.count("oracle"):
            return autoregressive.prefix_scores(self.bank.wide(case.model), tokens)

    def rows(self, case: Case, tokens: Sequence[int]) -> Tensor:
        """float64 [S, V]: oracle logits of one text."""
        with self.clock.count("oracle"):
            return self.bank.wide(case.model).logits(tokens)

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
        if self.target.has_build:
            accepted = inspect.signature(self.target.adapter.build).parameters
            wanted = {"cache": case.cache, "layout": case.layout}
            keywords = {key: value for key, value in wanted.items() if key in accepted}
            return _made(self.target, "build", self.target.adapter.build, model, drafter, **keywords)
        if self.target.has_build_from:
            folder = str(self.bank.checkpoint(case.model))
            return _made(self.target, "build_from", self.target.adapter.build_from, folder, None)
        return self.target.adapter

    def _capabilities(self) -> frozenset[str]:
        adapter = self.target.adapter
        extra: set[str] = set()
        if self.target.has_build or self.target.has_build_from:
            adapter = self._make(self.bank.model(0), Case(), None)
            extra = {"oracle", "build"} if self.target.has_build else {"oracle"}
        return capabilities(adapter, self.target.name) | extra


def _made(target: Target, name: str, factory: Any, *arguments: Any, **keywords: Any) -> Any:
    try:
        return factory(*arguments, **keywords)
    except Exception as error:
        raise TargetError(f"target {target.name!r}: {name}() raised {type(error).__name__}: {error}") from error
