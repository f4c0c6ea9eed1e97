"""A few decoder layers as drafter, on the target's embedding and output matrix: from its features, or by themselves.

    g_j = norm(Layers(W [E[x_j]; f_{j-1}]))    reads_features: EAGLE (arXiv 2401.15077), one layer as a rule
    g_j = norm(Layers(E[x_j]))                 else: a small language model, two layers as a rule
    law of the token behind x_j:               softmax(g_j U^T)

at position j - 1, over the rows of the tokens before it (the first token has none) and its own ancestors. f_j is what
the target's logits at token j were made of; where the target has not been yet, at drafted nodes, g stands in for f. E
is the target's embedding, U the rows of its output matrix for a reduced vocabulary. Rows of committed tokens are
computed once, from true features, and cached; rows of drafted nodes, computed from guesses, are dropped after a draft.
EAGLE-3's layers, which read more of the target, are in `fused.py`.
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
from specbench.reference.drafters.folders import (
    check_fits,
    check_ids,
    check_weights,
    converted,
    load_weights,
    made,
    save_weights,
    states_of,
)
from specbench.reference.drafters.growth import Shape, grow
from specbench.reference.model import LlamaConfig, LlamaModel
from specbench.tree import DraftTree, root_only
from specbench.types import Sampling, TargetState, num_common

KIND = "draft_layers"


@dataclass(frozen=True)
class LayersConfig:
    """Sizes of the layers; vocab_size: of the target, num_ids: columns of the drafter's law. has_outer_norms: False
    where there is no norm before the first layer's attention and none behind the last layer, as EAGLE published it."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_ids: int
    reads_features: bool = True
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    kind: str = KIND
    has_outer_norms: bool = True

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor that there must be but "ids", by the name that it has in a checkpoint."""
        hidden = self.hidden_size
        shapes = self.layer_shapes() | {"model.norm.weight": (hidden,)}
        if self.reads_features:
            shapes["fc.weight"] = (hidden, 2 * hidden)
        if not self.has_outer_norms:
            del shapes["model.norm.weight"], shapes["model.layers.0.input_layernorm.weight"]
        return shapes

    def optional_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of tensors that may be there: a bias, and matrices in place of the target's."""
        hidden = self.hidden_size
        own = {"embedding.weight": (self.vocab_size, hidden), "output.weight": (self.num_ids, hidden)}
        return own | ({"fc.bias": (hidden,)} if self.reads_features else {})

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            shapes |= {
                prefix + "input_layernorm.weight": (hidden,),
                prefix + "post_attention_layernorm.weight": (hidden,),
                prefix + "self_attn.q_proj.weight": (q_size, hidden),
                prefix + "self_attn.k_proj.weight": (kv_size, hidden),
                prefix + "self_attn.v_proj.weight": (kv_size, hidden),
                prefix + "self_attn.o_proj.weight": (hidden, q_size),
                prefix + "mlp.gate_proj.weight": (inner, hidden),
                prefix + "mlp.up_proj.weight": (inner, hidden),
                prefix + "mlp.down_proj.weight": (hidden, inner),
            }
        return shapes


class DraftLayers(LlamaModel):
    """weights: as `LayersConfig.shapes` says, and "ids" int64 [V'], the tokens that can be drafted, ascending."""

    config_type: type[LayersConfig] = LayersConfig
    state_layers: tuple[int, ...] = ()

    def __init__(self, config: LayersConfig, weights: dict[str, Tensor]) -> None:
        optional = {key: shape for key, shape in config.optional_shapes().items() if key in weights}
        check_weights(config.kind, weights, config.shapes() | optional | {"ids": (config.num_ids,)})
        check_ids(weights["ids"], config.vocab_size)
        sizes = LlamaConfig(
            vocab_size=1,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=config.rope_theta,
            tied=True,
        )
        # The layers are given vectors, not tokens: there is no embedding to look anything up in.
        instead = {"model.embed_tokens.weight": weights["model.layers.0.post_attention_layernorm.weight"]}
        super().__init__(sizes, weights | instead, name=config.kind)
        self.sizes, self.own = config, weights

    @classmethod
    def untrained(cls, config: LayersConfig, ids: Tensor, *, seed: int = 0) -> DraftLayers:
        """Small random matrices, in fp32."""
        generator = torch.Generator().manual_seed(seed)
        weights = {"ids": ids}
        for key, shape in config.shapes().items():
            if len(shape) == 1:
                weights[key] = torch.ones(shape)
            else:
                weights[key] = torch.randn(shape, generator=generator) * shape[1] ** -0.5
        return cls(config, weights)

    @property
    def ids(self) -> Tensor:
        return self.own["ids"]

    def features(self, embedded: Tensor, before: Tensor, position_ids: Tensor, attend: Any) -> Tensor:
        """embedded: float [B, M, H], of tokens x_j. before: float [B, M, H], f or g at j - 1. position_ids: int64 [M].
        Returns g, float [B, M, H]."""
        given = embedded
        if self.sizes.reads_features:
            given = self._linear(torch.cat([embedded, before], dim=-1), "fc")
        return self._through_layers(given, self._mix_by(position_ids, attend), None)

    def before(self, states: Tensor) -> Tensor:
        """What `features` reads in place of its own features, float [..., H], from the target's states."""
        return states

    def logits_of(self, features: Tensor, output: Tensor) -> Tensor:
        """features: float [..., H]. output: float [V', H], rows of the target's matrix. Returns float [..., V']."""
        return features @ self.own.get("output.weight", output).T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return super()._norm(x, name) if name in self.own else x

    def converted(self, dtype: torch.dtype, device: str | torch.device | None = None) -> DraftLayers:
        return type(self)(self.sizes, converted(self.own, dtype, device))

    def write(self, folder: Path, *, dtype: torch.dtype = torch.float16) -> None:
        save_weights(folder, asdict(self.sizes), self.converted(dtype).own)

    @classmethod
    def read(cls, folder: str | Path) -> DraftLayers:
        """A folder with config.json and model.safetensors. ValueError says what does not fit."""
        fields, weights = load_weights(folder, kind=cls.config_type.kind)
        return cls(made(cls.config_type, fields, folder), weights)


class LayersDrafter:
    """Drafts by `layers` over a target that tells its states."""

    def __init__(self, target: Any, layers: DraftLayers, *, shape: Shape) -> None:
        """target: a model with `states`, `embedding` and `head`, as `reference.model.LlamaModel`; for layers with
        `state_layers` one that has `layer_inputs` too."""
        check_fits(target, layers.sizes.hidden_size, layers.sizes.vocab_size)
        self.reads_target_state, self.state_layers = layers.sizes.reads_features, layers.state_layers
        if self.state_layers and not hasattr(target, "layer_inputs"):
            raise ValueError(
                f"the drafter reads what layers {list(self.state_layers)} of its target are given, which a "
                f"{type(target).__name__} does not tell: it must have layer_inputs()"
            )
        self.target, self._shape = target, shape
        self.layers = layers.converted(target.dtype, target.device)
        self.embedding = self.layers.own.get("embedding.weight", target.embedding)
        self.output = target.head[self.layers.ids]  # [V', H]
        self.reset()

    def reset(self) -> None:
        self._tokens: list[int] = []  # row j - 1 is that of token j
        self._rows = Rows(self.layers.num_layers)
        self._features = self.output[:0]  # g of every row, [n, H]
        self.last_law: _LayersLaw | None = None  # of the last draft

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
        self.last_law = _LayersLaw(self, self._rows, self._features[-1])
        return grow(context[-1], self.last_law, self._shape, max_nodes=max_nodes, max_depth=max_depth)

    @property
    def ids(self) -> Tensor:
        return self.layers.ids

    @torch.no_grad()
    def first_laws(self, context: list[int], roots: range, target_state: TargetState | None) -> Tensor:
        """log-probabilities float [len(roots), V'] of the token behind context[r] for each root r >= 1."""
        self._catch_up(context, target_state)
        return self.law(self._features[roots.start - 1 : roots.stop - 1])

    def law(self, features: Tensor) -> Tensor:
        """log-probabilities float [..., V'] from features float [..., H]."""
        return self.layers.logits_of(features, self.output).float().log_softmax(-1)

    @torch.no_grad()
    def _catch_up(self, context: list[int], target_state: TargetState | None) -> None:
        """Caches the rows of all tokens but the first, the root's too: f of the token before it is known."""
        start = max(1, num_common(self._tokens, context))
        if start == len(context) and self._rows.held[0] is not None:  # no longer than what is cached
            self._rows, self._features = self._rows.first(start - 1), self._features[: start - 1]
            self._tokens = list(context)
            return
        before = embedded = self.embedding[context[start:]]
        if self.reads_target_state:
            states = states_of(self.target, context, target_state, layers=self.state_layers)
            before = self.layers.before(states[start - 1 : len(context) - 1].to(self.layers.dtype))
        self._tokens = []  # nothing holds where the next lines raise
        rows = self._rows.first(start - 1)
        num_new = len(context) - start
        attend = rows.behind(torch.ones(num_new, num_new, dtype=torch.bool).tril())
        features = self.layers.features(embedded[None], before[None], torch.arange(start - 1, len(context) - 1), attend)
        self._features = torch.cat([self._features[: start - 1], features[0]])
        self._rows, self._tokens = rows, list(context)


class Rows:
    """Keys and values of some rows, of each layer [Hkv, n, D]."""

    def __init__(self, num_layers: int) -> None:
        self.held: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    def first(self, num_rows: int) -> Rows:
        """The first `num_rows` of them."""
        return self.picked(slice(num_rows)) if num_rows else Rows(len(self.held))

    def picked(self, which: slice | list[int]) -> Rows:
        twin = Rows(len(self.held))
        twin.held = [None if one is None else (one[0][:, which], one[1][:, which]) for one in self.held]
        return twin

    def behind(self, mask: Tensor) -> Any:
        """How new rows attend, and are added to these: all of these are visible but the last columns, new rows
        included, which `mask` bool [M, T] says."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
            old = self.held[layer]
            keys, values = (k[0], v[0]) if old is None else (torch.cat([old[0], k[0]], 1), torch.cat([old[1], v[0]], 1))
            self.held[layer] = keys, values
            visible = torch.ones(q.shape[2], keys.shape[1], dtype=torch.bool, device=q.device)
            visible[:, keys.shape[1] - mask.shape[1] :] = mask.to(q.device)
            group = q.shape[1] // keys.shape[0]
            keys, values = (one.repeat_interleave(group, dim=0) for one in (keys, values))
            scores = (q[0] @ keys.mT).masked_fill(~visible, -math.inf) / math.sqrt(q.shape[3])
            weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
            return (weights @ values)[None], None

        return attend


class _LayersLaw:
    """Rows of drafted nodes stand behind the committed ones for as long as this draft is grown."""

    def __init__(self, drafter: LayersDrafter, committed: Rows, last: Tensor) -> None:
        self._drafter = drafter
        self.ids = drafter.layers.ids
        self.rows = committed.picked(slice(None))
        self.num_committed = 0 if self.rows.held[0] is None else self.rows.held[0][0].shape[1]
        self.row_of: dict[int, int] = {}  # node -> its row behind the committed ones
        self.features = {0: last}

    @torch.no_grad()
    def __call__(self, tokens: Sequence[int], parents: Sequence[int], level: Sequence[int]) -> Tensor:
        drafter = self._drafter
        if list(level) != [0]:  # the root's row is cached
            above = [self._ancestors(node, parents) for node in level]
            mask = torch.zeros(len(level), len(self.row_of) + len(level), dtype=torch.bool)
            for idx, nodes in enumerate(above):
                mask[idx, [self.row_of[node] for node in nodes]] = True
                mask[idx, len(self.row_of) + idx] = True
            features = drafter.layers.features(
                drafter.embedding[[tokens[node] for node in level]][None],
                torch.stack([self.features[parents[node]] for node in level])[None],
                torch.full((len(level),), self.num_committed + len(above[0])),
                self.rows.behind(mask),
            )[0]
            for node, one in zip(level, features, strict=True):
                self.row_of[node] = len(self.row_of)
                self.features[node] = one
        states = torch.stack([self.features[node] for node in level])
        return drafter.law(states)

    def _ancestors(self, node: int, parents: Sequence[int]) -> list[int]:
        """Drafted nodes above a node; they all have rows, since levels are asked for in order."""
        above: list[int] = []
        while (node := parents[node]) > 0:
            above.append(node)
        return above
