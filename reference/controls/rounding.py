"""Other roundings: products summed in another order. What differs is as small as what plain decoding gets wrong."""

from __future__ import annotations

from torch import Tensor

from specbench.reference.controls.control import Control
from specbench.reference.controls.models import inside
from specbench.reference.model import LlamaModel
from specbench.reference.recurrent import HybridModel
from specbench.reference.target import ReferenceTarget


class _Split(LlamaModel):
    """Every product over a row is taken in two halves, as by two blocks of a kernel, and their sums are added."""

    def _linear(self, x: Tensor, name: str) -> Tensor:
        half = x.shape[-1] // 2
        wide, weight = x.to(self._wide), self._weights[name + ".weight"].to(self._wide)
        out = wide[..., half:] @ weight[:, half:].T + wide[..., :half] @ weight[:, :half].T
        bias = self._weights.get(name + ".bias")
        return out.to(self.dtype) if bias is None else (out + bias).to(self.dtype)


class _SplitHybrid(HybridModel, _Split):
    """The same with recurrent layers."""


def _split(model: LlamaModel) -> LlamaModel:
    if isinstance(model, HybridModel):
        twin: LlamaModel = _SplitHybrid(model.config, model.recurrence, model._weights, name=model.name)
    else:
        twin = _Split(model.config, model._weights, name=model.name)
    return twin.with_codec(model._codec)


CONTROLS = (
    Control(
        "split_sums",
        "every matrix product is summed in two halves",
        "sums in another order round otherwise; a token that differs for it lies at a margin below rounding, which is "
        "a matter of numerics and no fault of logic",
        lambda: ReferenceTarget(plant_model=lambda model: inside(model, _split)),
    ),
)
