"""A bank of one model, the target's own: for targets that come with their weights and have no build factory.

The oracle is, in this order: the target's `logits`, its own one-by-one forward (fp64 trees), or the checkpoint that it
names, loaded by us.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specbench.banks import Bank, encoded_prompts, load_checkpoint
from specbench.clock import Clock
from specbench.loading import Target, TargetError, capabilities
from specbench.probe import Probe
from specbench.protocols import Cache, LanguageModel
from specbench.steps import FlatTree
from specbench.tree import DraftTree, root_only
from specbench.types import DTYPES, Taps
from specbench.watchdog import Watchdog


class OwnBank(Bank):
    """dtype comes from `target.dtype` ("fp64", "fp32", "bf16", "fp16"), else from its logits, else fp32."""

    cache_kinds = ("contiguous",)

    def __init__(self, target: Target, *, clock: Clock, watchdog: Watchdog) -> None:
        adapter = target.adapter
        has = capabilities(adapter, target.name)
        self._path = getattr(adapter, "checkpoint", None)
        probe = Probe(adapter, vocab_size=None, clock=clock, watchdog=watchdog)
        shows_logits = callable(getattr(adapter, "logits", None))
        row = probe.logits([0])[0] if shows_logits else None
        dtype = _declared_dtype(target, row)
        super().__init__("own", dtype, num_models=1)
        self._oracle_name = ""
        if shows_logits:
            assert row is not None
            self._model: LanguageModel = _CalledModel(probe, len(row), dtype, step=False)
            self._oracle_name = "its own logits()"
        elif "tree" in has and dtype == torch.float64:
            probe.prefill([])
            self._model = _CalledModel(probe, probe.forward_tree(root_only(0)).shape[1], dtype, step=True)
            self._oracle_name = "its own one-by-one forward"
        elif self._path:
            self._model = load_checkpoint(str(self._path), dtype)
            self._oracle_name = f"{self._path}, loaded by specbench in {dtype}"
        else:
            self._model = _NoModel(_declared_vocab_size(target), dtype)
        self.from_checkpoint = bool(self._path) and not shows_logits
        if self._path:
            self.prompts, self.eos_token_ids = encoded_prompts(str(self._path))
            self.real = bool(self.prompts)

    @property
    def has_oracle(self) -> bool:
        return bool(self._oracle_name)

    @property
    def description(self) -> str:
        prompts = f", {len(self.prompts)} prompts" if self.prompts else ""
        return f"the target's own model, oracle: {self._oracle_name or 'none'}{prompts}"

    @property
    def is_called(self) -> bool:
        """The model is the target itself, asked from outside, not weights that we can run."""
        return isinstance(self._model, _CalledModel)

    def model(self, idx: int) -> LanguageModel:
        return self._model

    def wide(self, idx: int) -> LanguageModel:
        if self.is_called:
            return self._model
        return self.widened(str(self._path), self.dtype)


class _CalledModel:
    """The target asked one text at a time, by `logits` or by stepping its own tree interface with single nodes."""

    num_layers = 0
    name = "target"

    def __init__(self, probe: Probe, vocab_size: int, dtype: torch.dtype, *, step: bool) -> None:
        self._probe = probe
        self._step = step
        self.vocab_size = vocab_size
        self.dtype = dtype
        probe.vocab_size = vocab_size

    def causal(self, tokens: Tensor, *, taps: Taps | None = None) -> Tensor:
        return torch.stack([self.logits(row.tolist()) for row in tokens])

    def logits(self, tokens: Sequence[int]) -> Tensor:
        if not self._step:
            return self._probe.logits(tokens)
        rows = []
        self._probe.prefill([])
        for token in tokens:
            rows.append(self._probe.forward_tree(root_only(token))[0])
            self._probe.commit([])
        return torch.stack(rows)

    def new_cache(self, kind: str = "contiguous") -> Cache:
        raise ValueError("the target's own model is asked whole texts only")

    def forward(self, flat: FlatTree, cache: Cache, *, taps: Taps | None = None) -> Tensor:
        raise ValueError("the target's own model is asked whole texts only")


class TextSession:
    """Plain decoding through `logits` alone: each step asks for the whole text so far and keeps the last row.

    One text asked in growing lengths shows the rounding of the target's own stack. Steps like a `TreeModel`, single
    nodes only.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._text: list[int] = []
        self._next: int | None = None

    @property
    def cache_len(self) -> int:
        return len(self._text)

    def prefill(self, tokens: list[int]) -> None:
        self._text = list(tokens)

    def forward_tree(self, tree: DraftTree, *, taps: Taps | None = None) -> Tensor:
        self._next = tree.token_list[0]
        return self._model.logits([*self._text, self._next])[-1:]

    def commit(self, path: list[int]) -> None:
        assert self._next is not None
        self._text.append(self._next)

    def truncate(self, length: int) -> None:
        del self._text[length:]


class _NoModel(_CalledModel):
    """Stands in where there is no oracle, so that cases can be drawn for the claims that need none."""

    def __init__(self, vocab_size: int, dtype: torch.dtype) -> None:
        self.vocab_size = vocab_size
        self.dtype = dtype

    def logits(self, tokens: Sequence[int]) -> Tensor:
        raise ValueError("this target shows no logits and names no checkpoint")


def _declared_dtype(target: Target, row: Tensor | None) -> torch.dtype:
    declared: Any = getattr(target.adapter, "dtype", None)
    if isinstance(declared, torch.dtype):
        return declared
    if declared is not None:
        if declared not in DTYPES:
            raise TargetError(f"target {target.name!r}: dtype = {declared!r} must be one of {', '.join(DTYPES)}")
        return DTYPES[declared]
    return torch.float32 if row is None else row.dtype


def _declared_vocab_size(target: Target) -> int:
    size = getattr(target.adapter, "vocab_size", None)
    if not isinstance(size, int) or size < 2:
        raise TargetError(
            f"target {target.name!r} shows no logits and names no checkpoint, so it must have an int "
            f"`vocab_size` >= 2 to draw tokens from (found {size!r})"
        )
    return size
