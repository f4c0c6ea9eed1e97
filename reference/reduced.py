"""A Llama with less in it: matrices in int8, what they are given in int8, or a feed-forward of its largest activations.

Each is a model of its own, and speculative decoding over it must say what its own plain decoding says. That holds only
where every row decides for itself: a step of int8 or a choice of activations that is taken over all rows of a forward
makes a row depend on what is verified beside it, so that M rows at once are not what M forwards of one row are. Scales
of weights are the same in every forward; those of activations, and which of them are kept, are a row's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from specbench.reference.model import LlamaConfig, LlamaModel, round_trip

STEPS = 127  # on either side of 0


@dataclass(frozen=True)
class Reduction:
    """weights: the matrices of the layers are kept as int8, with a step for each output. activations: every row that
    they are given is rounded to int8 as well. keep: activations of a feed-forward that are kept in a row, None for all.
    """

    weights: bool = False
    activations: bool = False
    keep: int | None = None


@dataclass(frozen=True)
class Int8Matrix:
    """codes: int8 [out, in]. steps: float [out, 1], so that codes * steps is the matrix."""

    codes: Tensor
    steps: Tensor

    @classmethod
    def of(cls, matrix: Tensor) -> Int8Matrix:
        """A step is the largest magnitude of a row / 127."""
        wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
        steps = wide.abs().amax(dim=1, keepdim=True) / STEPS
        steps = torch.where(steps > 0, steps, 1.0)
        return cls(torch.round(wide / steps).to(torch.int8), steps)

    def in_dtype(self, dtype: torch.dtype) -> Tensor:
        return (self.codes * self.steps).to(dtype)


class ReducedLlama(LlamaModel):
    """weights: of a Llama, without `matrices`, those that are kept as int8, by name."""

    def __init__(
        self,
        config: LlamaConfig,
        weights: dict[str, Tensor],
        reduction: Reduction,
        matrices: dict[str, Int8Matrix],
        *,
        name: str,
    ) -> None:
        if reduction.keep is not None and not 1 <= reduction.keep <= config.intermediate_size:
            raise ValueError(f"keep = {reduction.keep} must be between 1 and {config.intermediate_size} (activations)")
        super().__init__(config, weights, name=name)
        self.reduction, self._matrices = reduction, matrices

    @classmethod
    def of(cls, model: LlamaModel, reduction: Reduction) -> ReducedLlama:
        """The same model with that reduction. ValueError for one whose layers are not a Llama's."""
        if type(model) is not LlamaModel:
            raise ValueError(f"{model.name} is a {type(model).__name__}, must be a LlamaModel to be reduced")
        weights, matrices = dict(model._weights), {}
        if reduction.weights:
            # The embedding and the output matrix stay: what they cost is a matter of the vocabulary.
            for key in [one for one in weights if one.startswith("model.layers.") and one.endswith("_proj.weight")]:
                matrices[key.removesuffix(".weight")] = Int8Matrix.of(weights.pop(key))
        parts = {"int8 weights": reduction.weights, "int8 activations": reduction.activations}
        words = [word for word, is_there in parts.items() if is_there]
        words += [] if reduction.keep is None else [f"{reduction.keep} activations"]
        twin = cls(model.config, weights, reduction, matrices, name=", ".join([model.name, *words]))
        twin._codec = model._codec
        return twin

    @property
    def num_bytes(self) -> int:
        """Of all that is kept."""
        held = [*self._weights.values(), *(one for both in self._matrices.values() for one in (both.codes, both.steps))]
        return sum(one.numel() * one.element_size() for one in held)

    def to(self, dtype: torch.dtype, device: str | torch.device | None = None) -> ReducedLlama:
        """The same codes; what is no code is rounded to (or widened to) another dtype."""
        wide = torch.promote_types(dtype, torch.float32)
        weights = {key: one.to(device=device, dtype=dtype) for key, one in self._weights.items()}
        matrices = {
            key: Int8Matrix(one.codes.to(device), one.steps.to(device=device, dtype=wide))
            for key, one in self._matrices.items()
        }
        return self._like(self.config, weights, matrices, self.name)

    def first_layers(self, num_layers: int) -> ReducedLlama:
        if not 1 <= num_layers <= self.num_layers:
            raise ValueError(f"num_layers = {num_layers} must be between 1 and {self.num_layers}")
        config = replace(self.config, num_layers=num_layers, windows=self.config.windows[:num_layers])
        name = f"{self.name}, first {num_layers} layers"
        return self._like(config, self._weights, self._matrices, name)

    def _like(
        self, config: LlamaConfig, weights: dict[str, Tensor], matrices: dict[str, Int8Matrix], name: str
    ) -> ReducedLlama:
        twin = type(self)(config, weights, self.reduction, matrices, name=name)
        twin._codec = self._codec
        return twin

    def save(self, folder: Path) -> None:
        raise ValueError("a reduced model has no checkpoint format: save the LlamaModel that it was made of")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        if self.reduction.activations:
            x = self._rounded(x)
        if name not in self._matrices:
            return super()._linear(x, name)
        out, bias = x @ self._matrices[name].in_dtype(self.dtype).T, self._weights.get(name + ".bias")
        return out if bias is None else out + bias

    def _rounded(self, x: Tensor) -> Tensor:
        """float [..., n], each row to whole numbers of its own step."""
        return round_trip("int8", x)

    def _activations(self, inner: Tensor) -> Tensor:
        """The largest in magnitude of each row; those that tie with the last one stay too."""
        if self.reduction.keep is None:
            return inner
        least = inner.abs().topk(self.reduction.keep, dim=-1).values[..., -1:]
        return inner.masked_fill(inner.abs() < least, 0.0)
