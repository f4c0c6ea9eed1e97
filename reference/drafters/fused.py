"""EAGLE-3's layers (arXiv 2503.01840): they read what three layers of the target were given, and have their own output.

    f_j = W [what the target's layers l_1, l_2, l_3 were given at token j]
    r = f_{j-1},  a = [norm(E[x_j]); norm(f_{j-1})]    what the first layer adds to, and what its q, k and v are made of
    g_j = Layers(r, a)                                 further layers are as usual
    law of the token behind x_j:  softmax(norm(g_j) U^T)

at position j - 1. Where the target has not been yet, g stands in for f. With `norm_before_residual` r is norm(f) too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.reference.drafters.layers import DraftLayers, LayersConfig

KIND = "fused_layers"


@dataclass(frozen=True)
class FusedConfig(LayersConfig):
    """state_layers: of the target, counted from 0, whose inputs are read."""

    kind: str = KIND
    state_layers: tuple[int, ...] = ()
    norm_before_residual: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "state_layers", tuple(int(one) for one in self.state_layers))
        if not self.state_layers or min(self.state_layers) < 0:
            raise ValueError(f"state_layers = {list(self.state_layers)} must name layers of the target, at least one")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, first = self.hidden_size, "model.layers.0."
        shapes = self.layer_shapes()
        del shapes[first + "input_layernorm.weight"]
        for name in ("q", "k", "v"):
            key = f"{first}self_attn.{name}_proj.weight"
            shapes[key] = (shapes[key][0], 2 * hidden)
        norms = dict.fromkeys(("embedded_norm.weight", "before_norm.weight", "output_norm.weight"), (hidden,))
        return shapes | norms | {"fc.weight": (hidden, len(self.state_layers) * hidden)}

    def optional_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in super().optional_shapes().items() if name != "fc.bias"}


class FusedLayers(DraftLayers):
    """weights: as `FusedConfig.shapes` says, and "ids"."""

    config_type = FusedConfig

    def __init__(self, config: LayersConfig, weights: dict[str, Tensor]) -> None:
        assert isinstance(config, FusedConfig)
        super().__init__(config, weights)
        self.state_layers = config.state_layers
        self._norm_before_residual = config.norm_before_residual

    def before(self, states: Tensor) -> Tensor:
        return states @ self.own["fc.weight"].T

    def features(self, embedded: Tensor, before: Tensor, position_ids: Tensor, attend: Any) -> Tensor:
        inner = self._mix_by(position_ids, attend)
        normed = self._norm(before, "before_norm.weight")
        both = torch.cat([self._norm(embedded, "embedded_norm.weight"), normed], dim=-1)

        def mix(layer: int, given: Tensor) -> tuple[Tensor, Tensor | None]:
            return inner(layer, given if layer else both)

        return self._through_layers(normed if self._norm_before_residual else before, mix, None)

    def logits_of(self, features: Tensor, output: Tensor) -> Tensor:
        return super().logits_of(self._norm(features, "output_norm.weight"), output)
