"""A feature-level drafter: one decoder layer that continues the target's hidden states (EAGLE, arXiv 2401.15077).

    g_j = norm(Layer(W [E[x_j]; f_{j-1}]))     at position j - 1, over the rows before it and its own ancestors
    law of the token behind x_j:               softmax(g_j U^T)

f_j is what the target's logits at token j were made of; where the target has not been yet, at drafted nodes, g stands
in for f. E is the target's embedding, U the rows of its output matrix for a reduced vocabulary. Rows of committed
tokens are computed once, from true features, and cached; rows of drafted nodes, computed from guesses, are dropped
after every draft, whatever was accepted of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specbench.protocols import Coins
from specbench.reference.drafters.growth import Shape, grow
from specbench.reference.drafters.heads import (
    check_fits,
    check_ids,
    check_weights,
    load_weights,
    save_weights,
    states_of,
)
from specbench.reference.model import LlamaConfig, LlamaModel
from specbench.tree import DraftTree, root_only
from specbench.types import Sampling, TargetState


@dataclass(frozen=True)
class FeatureConfig:
    """Sizes of the layer; vocab_size: of the target, num_ids: columns of the drafter's law."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_ids: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    kind: str = "feature_layer"

    @property
    def layer(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=1,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=1,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps,
            rope_theta=self.rope_theta,
            tied=True,
        )


LAYER = "model.layers.0."


class FeatureLayer(LlamaModel):
    """weights: "fc.weight" [H, 2 H], the layer's as in a Llama checkpoint ("model.layers.0.mlp.up_proj.weight" ...),
    "model.norm.weight" [H], "ids" int64 [V'] ascending."""

    def __init__(self, config: FeatureConfig, weights: dict[str, Tensor]) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        check_weights(
            "feature layer",
            weights,
            {
                "ids": (config.num_ids,),
                "fc.weight": (hidden, 2 * hidden),
                "model.norm.weight": (hidden,),
                LAYER + "input_layernorm.weight": (hidden,),
                LAYER + "post_attention_layernorm.weight": (hidden,),
                LAYER + "self_attn.q_proj.weight": (q_size, hidden),
                LAYER + "self_attn.k_proj.weight": (kv_size, hidden),
                LAYER + "self_attn.v_proj.weight": (kv_size, hidden),
                LAYER + "self_attn.o_proj.weight": (hidden, q_size),
                LAYER + "mlp.gate_proj.weight": (inner, hidden),
                LAYER + "mlp.up_proj.weight": (inner, hidden),
                LAYER + "mlp.down_proj.weight": (hidden, inner),
            },
        )
        check_ids(weights["ids"], config.vocab_size)
        # The layer is given features, not tokens: there is no embedding to look anything up in.
        named = weights | {"model.embed_tokens.weight": weights["fc.weight"]}
        super().__init__(config.layer, named, name="feature layer")
        self.sizes, self.own = config, weights

    @classmethod
    def untrained(cls, target: Any, ids: Tensor, *, config: LlamaConfig, seed: int = 0) -> FeatureLayer:
        """For a target, in fp32, with the sizes of a layer of `config`; small random matrices."""
        vocab_size, hidden = target.embedding.shape
        sizes = FeatureConfig(
            hidden, config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim, vocab_size,
            len(ids), config.rms_norm_eps, config.rope_theta,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(seed)

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator) * columns**-0.5

        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        inner = config.intermediate_size
        return cls(
            sizes,
            {
                "ids": ids,
                "fc.weight": matrix(hidden, 2 * hidden),
                "model.norm.weight": torch.ones(hidden),
                LAYER + "input_layernorm.weight": torch.ones(hidden),
                LAYER + "post_attention_layernorm.weight": torch.ones(hidden),
                LAYER + "self_attn.q_proj.weight": matrix(q_size, hidden),
                LAYER + "self_attn.k_proj.weight": matrix(kv_size, hidden),
                LAYER + "self_attn.v_proj.weight": matrix(kv_size, hidden),
                LAYER + "self_attn.o_proj.weight": matrix(hidden, q_size),
                LAYER + "mlp.gate_proj.weight": matrix(inner, hidden),
                LAYER + "mlp.up_proj.weight": matrix(inner, hidden),
                LAYER + "mlp.down_proj.weight": matrix(hidden, inner),
            },
        )

    def features(self, embedded: Tensor, before: Tensor, positions: Tensor, attend: Any) -> Tensor:
        """embedded: float [M, H], of tokens x_j. before: float [M, H], f or g at j - 1. Returns g, float [M, H]."""
        given = torch.cat([embedded, before], dim=-1) @ self.own["fc.weight"].T
        return self._through_layers(given[None], self._mix_by(positions, attend), None)[0]

    def converted(self, dtype: torch.dtype, device: str | torch.device | None = None) -> FeatureLayer:
        moved = {key: one.to(device=device, dtype=None if key == "ids" else dtype) for key, one in self.own.items()}
        return FeatureLayer(self.sizes, moved)

    def save(self, folder: Path, *, dtype: torch.dtype = torch.float16) -> None:
        save_weights(folder, asdict(self.sizes), self.converted(dtype).own)

    @classmethod
    def read(cls, folder: str | Path) -> FeatureLayer:
        """A folder with config.json and model.safetensors. ValueError says what does not fit."""
        fields, weights = load_weights(folder, kind="feature_layer")
        return cls(FeatureConfig(**fields), weights)


class FeatureDrafter:
    """Drafts by `layer` over a target that tells its states."""

    reads_target_state = True

    def __init__(self, target: Any, layer: FeatureLayer, *, shape: Shape) -> None:
        """target: a model with `states`, `embedding` and `head`, as `reference.model.LlamaModel`."""
        check_fits(target, layer.sizes.hidden_size, layer.sizes.vocab_size)
        self._target, self._shape = target, shape
        self._layer = layer.converted(target.dtype, target.device)
        self._output = target.head[self._layer.own["ids"]]  # [V', H]
        self.reset()

    def reset(self) -> None:
        self._tokens: list[int] = []  # row j - 1 of the cache is that of token j: the first token has none
        self._keys: Any = None  # [Hkv, n, D]
        self._values: Any = None
        self._last: Any = None  # g of the root, [H]
        self.last_law: _FeatureLaw | None = None  # of the last draft

    def draft(
        self,
        context: list[int],
        *,
        max_nodes: int,
        max_depth: int,
        sampling: Sampling,
        coins: Coins,
        target_state: TargetState | None = None,
    ) -> DraftTree:
        if len(context) < 2 or max_nodes < 1 or max_depth < 1:
            return root_only(context[-1])  # the target has said nothing yet
        self._catch_up(context, target_state)
        self.last_law = _FeatureLaw(self)
        return grow(context[-1], self.last_law, self._shape, max_nodes=max_nodes, max_depth=max_depth)

    @torch.no_grad()
    def _catch_up(self, context: list[int], target_state: TargetState | None) -> None:
        """Caches the rows of all tokens but the first, the root's too: f of the token before it is known."""
        num_common = 0
        for cached, wanted in zip(self._tokens, context, strict=False):
            if cached != wanted:
                break
            num_common += 1
        # At least the root's row is computed, for its g.
        start = max(1, min(num_common, len(context) - 1))
        hidden = states_of(self._target, context, target_state)
        kept = start - 1
        keys, values = (one[:, :kept] if kept else None for one in (self._keys, self._values))
        self._tokens = []  # nothing holds where the next lines raise
        attend = _Attend(keys, values, torch.ones(len(context) - start, len(context) - start, dtype=torch.bool).tril())
        features = self._layer.features(
            self._target.embedding[context[start:]],
            hidden[start - 1 : len(context) - 1].to(self._layer.dtype),
            torch.arange(start - 1, len(context) - 1),
            attend,
        )
        self._keys, self._values, self._last = attend.keys, attend.values, features[-1]
        self._tokens = list(context)


class _FeatureLaw:
    """Rows of drafted nodes stand behind the committed ones for as long as this draft is grown."""

    def __init__(self, drafter: FeatureDrafter) -> None:
        self._drafter = drafter
        self.ids = drafter._layer.own["ids"]
        self._features = {0: drafter._last}
        self.row_of: dict[int, int] = {}  # node -> its row behind the committed ones
        self.keys, self.values = drafter._keys, drafter._values

    @torch.no_grad()
    def __call__(self, tokens: Sequence[int], parents: Sequence[int], level: Sequence[int]) -> Tensor:
        drafter = self._drafter
        if list(level) != [0]:  # the root's row is cached
            num_committed = len(drafter._tokens) - 1
            ancestors = [self._ancestors(node, parents) for node in level]
            mask = torch.zeros(len(level), len(self.row_of) + len(level), dtype=torch.bool)
            for idx, above in enumerate(ancestors):
                mask[idx, [self.row_of[node] for node in above]] = True
                mask[idx, len(self.row_of) + idx] = True
            attend = _Attend(self.keys, self.values, mask)
            depth = len(ancestors[0]) + 1
            features = drafter._layer.features(
                drafter._target.embedding[[tokens[node] for node in level]],
                torch.stack([self._features[parents[node]] for node in level]),
                torch.full((len(level),), num_committed - 1 + depth),
                attend,
            )
            for node, one in zip(level, features, strict=True):
                self.row_of[node] = len(self.row_of)
                self._features[node] = one
            self.keys, self.values = attend.keys, attend.values
        states = torch.stack([self._features[node] for node in level])
        return (states @ drafter._output.T).float().log_softmax(-1)

    def _ancestors(self, node: int, parents: Sequence[int]) -> list[int]:
        """Drafted nodes above a node; they all have rows, since levels are asked for in order."""
        above: list[int] = []
        while (node := parents[node]) > 0:
            above.append(node)
        return above


class _Attend:
    """New rows behind keys [Hkv, P, D] and values, all visible but the last columns, which `mask` bool [M, T] says;
    keeps all rows as `keys` and `values`."""

    def __init__(self, keys: Any, values: Any, mask: Tensor) -> None:
        self.keys, self.values, self._mask = keys, values, mask

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        self.keys = k[0] if self.keys is None else torch.cat([self.keys, k[0]], dim=1)
        self.values = v[0] if self.values is None else torch.cat([self.values, v[0]], dim=1)
        num_rows, num_keys = q.shape[2], self.keys.shape[1]
        mask = torch.ones(num_rows, num_keys, dtype=torch.bool, device=q.device)
        mask[:, num_keys - self._mask.shape[1] :] = self._mask.to(q.device)
        group = q.shape[1] // self.keys.shape[0]
        keys, values = (one.repeat_interleave(group, dim=0) for one in (self.keys, self.values))
        scores = (q[0] @ keys.mT).masked_fill(~mask, -math.inf) / math.sqrt(q.shape[3])
        return (scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype) @ values)[None], None
