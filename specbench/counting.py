"""A language model that counts the rows it is asked to compute: what a decoder really spends, not what it reports."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specbench.protocols import Cache, LanguageModel
from specbench.steps import FlatTree
from specbench.types import Taps
from specbench.wrapping import WrappedModel


class CountingModel(WrappedModel):
    """rows: one entry per forward, the rows it computed (cached rows not counted)."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self.rows: list[int] = []

    def forward(self, flat: FlatTree, cache: Cache, *, taps: Taps | None = None) -> Tensor:
        self.rows.append(flat.num_rows)
        return super().forward(flat, cache, taps=taps)

    def causal(self, tokens: Tensor, *, taps: Taps | None = None) -> Tensor:
        self.rows.append(tokens.numel())
        return super().causal(tokens, taps=taps)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        self.rows.append(len(tokens))
        return super().logits(tokens)
