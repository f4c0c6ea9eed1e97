"""Reduced models that decide over all rows of a forward what each row has to decide for itself."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from specbench.protocols import Cache
from specbench.reference.faults.fault import Fault
from specbench.reference.reduced import STEPS, ReducedLlama, Reduction
from specbench.reference.reduced_targets import over
from specbench.steps import FlatTree
from specbench.types import Taps


class _OfForward(ReducedLlama):
    """Right on a whole text without a cache, and on one row."""

    _is_behind = False

    def forward(self, flat: FlatTree, cache: Cache, *, taps: Taps | None = None) -> Tensor:
        twin = copy.copy(self)
        twin._is_behind = True
        return super(_OfForward, twin).forward(flat, cache, taps=taps)

    def _rounded(self, x: Tensor) -> Tensor:
        """One step for all rows."""
        if not self._is_behind:
            return super()._rounded(x)
        step = (x.abs().amax() / STEPS).clamp(min=torch.finfo(x.dtype).tiny)
        return torch.round(x / step) * step

    def _activations(self, inner: Tensor) -> Tensor:
        """The same ones in all rows: those that are largest over them."""
        if not self._is_behind or self.reduction.keep is None:
            return super()._activations(inner)
        chosen = inner.abs().sum(dim=-2, keepdim=True).topk(self.reduction.keep, dim=-1).indices  # [B, 1, keep]
        return inner * torch.zeros_like(inner[..., :1, :]).scatter(-1, chosen, 1.0)


class _Over:
    """A target over a model of its own, which nobody else's model can stand in for."""

    planted = frozenset({"own model"})

    def __init__(self, reduction: Reduction) -> None:
        self._decoder = over(reduction, _OfForward)

    def __getattr__(self, name: str) -> object:
        if name == "_decoder":  # while it is copied
            raise AttributeError(name)
        return getattr(self._decoder, name)


FAULTS = (
    Fault(
        "int8_step_of_forward",
        "dtype/precision",
        "rows that are rounded to int8 before a matrix share the step of the largest of all rows of the forward",
        "two rows in one forward",
        "tree.logits",
        target=lambda: _Over(Reduction(weights=True, activations=True)),
        subject="own",
    ),
    Fault(
        "activations_of_forward",
        "dtype/precision",
        "the activations that a sparse feed-forward keeps are chosen over all rows of the forward",
        "two rows in one forward",
        "tree.logits",
        target=lambda: _Over(Reduction(keep=12)),
        subject="own",
    ),
)
