"""The fp64 oracle for models whose fp64 copy does not fit: one layer's weights at a time, never an [S, S] matrix.

Rows of a text are computed a block at a time behind the keys and values of those before them, nodes of a tree one at a
time behind the prefix and their own path. So nothing here knows tree masks. It computes what `reference.model` does,
in code of its own; one text's keys and values are held a layer long. No cache, no generation.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from specbench.protocols import Cache
from specbench.reference.autoregressive import NodeScores
from specbench.reference.kv_cache import QUANTISED
from specbench.reference.model import LlamaConfig, LlamaModel, _read_hf_config, round_trip
from specbench.reference.weights import HeldWeights, StoredWeights, Weights
from specbench.steps import FlatTree
from specbench.tree import DraftTree
from specbench.types import LayerTap, Taps

WIDE = torch.float64
BLOCK_ROWS = 64
HEAD_ROWS = 4096  # of the output matrix, widened at a time


@dataclass(frozen=True)
class Trunk:
    """One text's keys and values, float64 [Hkv, P, D] a layer: what trees behind it are scored with."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def length(self) -> int:
        return self.keys[0].shape[1]

    def first(self, length: int) -> Trunk:
        """Those of the text's first `length` tokens: rows never depend on what comes after them."""
        return Trunk(tuple(one[:, :length] for one in self.keys), tuple(one[:, :length] for one in self.values))


class StreamedOracle:
    """fp64 scores of the weights as the target has them: rounded to `dtype`, then widened.

    source: a folder with config.json and safetensors, of a type that `reference.model` reads, or a `LlamaModel` itself
    (then only its layers are computed in blocks). ValueError for anything else. Satisfies `LanguageModel` but for
    caches: it is asked whole texts.
    """

    def __init__(
        self, source: str | Path | LlamaModel, dtype: torch.dtype = WIDE, *, block_rows: int = BLOCK_ROWS
    ) -> None:
        if block_rows < 1:
            raise ValueError(f"block_rows = {block_rows} must be >= 1")
        if isinstance(source, LlamaModel):
            if type(source) is not LlamaModel:
                raise ValueError(f"{source.name} is a {type(source).__name__}: only LlamaModel itself is computed here")
            self.config, self.name = source.config, source.name
            self.codec = source._codec
            self._weights: Weights = HeldWeights(source._weights)
        else:
            self._weights = StoredWeights(source)
            self.config, self.name, self.codec = read_config(source), Path(source).name, ""
        self._rounding = dtype
        self._block_rows = block_rows
        self._head = "model.embed_tokens.weight" if self.config.tied else "lm_head.weight"

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @property
    def dtype(self) -> torch.dtype:
        return WIDE

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        return self.config.windows or (None,) * self.num_layers

    def with_codec(self, kind: str) -> StreamedOracle:
        """As `LlamaModel.with_codec`: keys and values rounded as a cache of that kind does, "" for none."""
        if kind and kind not in QUANTISED:
            raise ValueError(f"codec {kind!r} is unknown: choose one of {', '.join(QUANTISED)}, or '' for none")
        twin = copy.copy(self)
        twin.codec = kind
        return twin

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """float64 [S, V], row i predicts token i + 1."""
        hidden = self._embed(tokens)
        for layer in self._layers():
            self._advance(layer, hidden)
        return self._logits(hidden)

    @torch.no_grad()
    def causal(self, tokens: Tensor, *, taps: Taps | None = None) -> Tensor:
        """tokens: int64 [B, S], whole sequences. Returns float64 [B, S, V]; taps have a leading B and no weights."""
        texts = [self._embed(row) for row in tokens.tolist()]
        for idx, layer in enumerate(self._layers()):
            outputs = [torch.empty_like(hidden) if taps is not None else None for hidden in texts]
            rows = [self._advance(layer, hidden, output) for hidden, output in zip(texts, outputs, strict=True)]
            if taps is not None:
                tap = taps.layer(idx)
                tap.k, tap.v = (torch.stack(one) for one in zip(*rows, strict=True))
                tap.attention_output = torch.stack([one for one in outputs if one is not None])
                tap.hidden_state = torch.stack(texts)
        return torch.stack([self._logits(hidden) for hidden in texts])

    def score_tree(self, prefix: Sequence[int], tree: DraftTree) -> NodeScores:
        """What plain decoding computes at each node, behind a prefix whose layers are dropped as they are used."""
        return self._score(tree, len(prefix), self._behind(prefix))

    def trunk(self, prefix: Sequence[int]) -> Trunk:
        """The prefix's keys and values of all layers, to score several trees behind it, or behind its beginnings."""
        kept = [(keys, values) for _, keys, values in self._behind(prefix)]
        return Trunk(tuple(keys for keys, _ in kept), tuple(values for _, values in kept))

    def score_behind(self, trunk: Trunk, tree: DraftTree) -> NodeScores:
        """As `score_tree`, the prefix being known."""
        layers = zip(self._layers(), trunk.keys, trunk.values, strict=True)
        return self._score(tree, trunk.length, layers)

    def new_cache(self, kind: str = "contiguous") -> Cache:
        raise ValueError("the streamed oracle is asked whole texts only")

    def forward(self, flat: FlatTree, cache: Cache, *, taps: Taps | None = None) -> Tensor:
        raise ValueError("the streamed oracle is asked whole texts only")

    @torch.no_grad()
    def _behind(self, prefix: Sequence[int]) -> Iterator[tuple[_Layer, Tensor, Tensor]]:
        """Each layer with the prefix's keys and values in it."""
        hidden = self._embed(prefix)
        for layer in self._layers():
            yield layer, *self._advance(layer, hidden)

    @torch.no_grad()
    def _score(self, tree: DraftTree, prefix_len: int, layers: Iterable[tuple[_Layer, Tensor, Tensor]]) -> NodeScores:
        """A node reads the prefix's rows and, in order, those of its own path."""
        paths = [tree.path_to(node) for node in range(tree.num_nodes)]
        hidden = self._embed(tree.token_list)
        taps: list[LayerTap] = []
        for layer, prefix_k, prefix_v in layers:
            q, k, v = layer.project(hidden, tree.position_ids(prefix_len))
            # The prefix's rows once, and behind them room for the path of the node whose turn it is.
            room = k.new_empty(k.shape[0], max(len(path) for path in paths), k.shape[2])
            keys, values = torch.cat([prefix_k, room], dim=1), torch.cat([prefix_v, room], dim=1)
            mixed = torch.empty_like(q)
            for node, path in enumerate(paths):
                end = prefix_len + len(path)
                keys[:, prefix_len:end], values[:, prefix_len:end] = k[:, path], v[:, path]
                first = 0 if layer.window is None else max(0, end - layer.window)
                mixed[:, [node]] = _attend(q[:, [node]], keys[:, first:end], values[:, first:end], None)
            attention_output = layer.output(mixed)
            hidden = layer.feed_forward(hidden + attention_output)
            taps.append(LayerTap(k=k, v=v, attention_output=attention_output, hidden_state=hidden))
        return NodeScores(self._logits(hidden), tuple(taps))

    def _advance(self, layer: _Layer, hidden: Tensor, output: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One layer over a whole text, block by block: `hidden` [S, hidden] becomes the layer's output in place.

        output: where what the attention adds is written, [S, hidden]. Returns keys and values [Hkv, S, D].
        """
        num_rows, config = hidden.shape[0], self.config
        keys = hidden.new_empty(config.num_kv_heads, num_rows, config.head_dim)
        values = torch.empty_like(keys)
        for start in range(0, num_rows, self._block_rows):
            stop = min(start + self._block_rows, num_rows)
            block, positions = hidden[start:stop], torch.arange(start, stop)
            q, keys[:, start:stop], values[:, start:stop] = layer.project(block, positions)
            first = 0 if layer.window is None else max(0, start - layer.window + 1)
            # Without a window a row sees all that comes before the block, and there is nothing to hide there.
            distance = positions[:, None] - torch.arange(start if layer.window is None else first, stop)
            unseen = distance < 0 if layer.window is None else (distance < 0) | (distance >= layer.window)
            added = layer.output(_attend(q, keys[:, first:stop], values[:, first:stop], unseen))
            if output is not None:
                output[start:stop] = added
            hidden[start:stop] = layer.feed_forward(block + added)
        return keys, values

    def _layers(self) -> Iterator[_Layer]:
        """One at a time: asking for the next empties the last."""
        for idx, window in enumerate(self.layer_windows):
            prefix = f"model.layers.{idx}."
            names = [
                *(f"self_attn.{one}_proj" for one in "qkvo"),
                *(f"mlp.{one}_proj" for one in ("gate", "up", "down")),
            ]
            tensors = {
                name + kind: self._widened(self._weights.tensor(prefix + name + kind))
                for name in names
                for kind in (".weight", ".bias")
                if kind == ".weight" or prefix + name + kind in self._weights
            }
            for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
                tensors[name] = self._widened(self._weights.tensor(prefix + name))
            yield _Layer(self.config, window, self.codec, tensors)
            tensors.clear()  # also where the layer is still in a variable

    def _embed(self, tokens: Sequence[int]) -> Tensor:
        """float64 [S, hidden]."""
        if not tokens:
            return torch.empty(0, self.config.hidden_size, dtype=WIDE)
        return self._widened(self._weights.rows("model.embed_tokens.weight", list(tokens)))

    def _logits(self, hidden: Tensor) -> Tensor:
        """float64 [S, V]: the last norm, then the output matrix a block of rows at a time."""
        normed = _norm(hidden, self._widened(self._weights.tensor("model.norm.weight")), self.config.rms_norm_eps)
        logits = normed.new_empty(normed.shape[0], self.vocab_size)
        for start in range(0, self.vocab_size, HEAD_ROWS):
            stop = min(start + HEAD_ROWS, self.vocab_size)
            logits[:, start:stop] = normed @ self._widened(self._weights.block(self._head, start, stop)).T
        return logits

    def _widened(self, stored: Tensor) -> Tensor:
        return stored.to(self._rounding).to(WIDE)


class _Layer(NamedTuple):
    """One decoder layer's weights in fp64, by their names inside the layer, and what it does to rows [M, hidden]."""

    config: LlamaConfig
    window: int | None
    codec: str
    tensors: dict[str, Tensor]

    def project(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [Hq, M, D], k and v [Hkv, M, D]; q and k turned by the positions, k and v as a cache would return them."""
        config = self.config
        normed = _norm(hidden, self.tensors["input_layernorm.weight"], config.rms_norm_eps)
        q, k, v = (
            self._linear(normed, f"self_attn.{one}_proj").unflatten(1, (-1, config.head_dim)).transpose(0, 1)
            for one in "qkv"
        )
        q, k = _turned(q, positions, config.rope_theta), _turned(k, positions, config.rope_theta)
        return q, round_trip(self.codec, k), round_trip(self.codec, v)

    def output(self, mixed: Tensor) -> Tensor:
        """mixed [Hq, M, D]. Returns what the attention adds [M, hidden]."""
        return self._linear(mixed.transpose(0, 1).flatten(1), "self_attn.o_proj")

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """The second half of the layer, with its residual."""
        normed = _norm(hidden, self.tensors["post_attention_layernorm.weight"], self.config.rms_norm_eps)
        gate, up = self._linear(normed, "mlp.gate_proj"), self._linear(normed, "mlp.up_proj")
        return hidden + self._linear(gate * torch.sigmoid(gate) * up, "mlp.down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        out = x @ self.tensors[name + ".weight"].T
        return out + self.tensors[name + ".bias"] if name + ".bias" in self.tensors else out


def read_config(folder: str | Path) -> LlamaConfig:
    """The config of a checkpoint that is computed here; ValueError says what in it is not."""
    from transformers import AutoConfig

    try:
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: config.json cannot be read: {str(error).strip().splitlines()[0]}") from None
    return _read_hf_config(hf_config, folder)


def _norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return gain * (x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps))


def _turned(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of x [H, M, D]: (left, right) halves as the two coordinates of D/2 points."""
    size = x.shape[-1]
    speeds = theta ** (-torch.arange(0, size, 2, dtype=WIDE) / size)
    angles = positions.to(WIDE)[:, None] * speeds  # [M, D/2]
    left, right = x[..., : size // 2], x[..., size // 2 :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


def _attend(q: Tensor, k: Tensor, v: Tensor, unseen: Tensor | None) -> Tensor:
    """q [Hq, M, D], k and v [Hkv, K, D]. unseen: bool [M, U], about the last U keys, or None. Returns [Hq, M, D].

    The query heads of one key head are one matrix of rows, so keys and values are never repeated.
    """
    num_rows, num_groups = q.shape[1], q.shape[0] // k.shape[0]
    scores = q.reshape(k.shape[0], -1, q.shape[2]) @ k.mT  # [Hkv, Hq/Hkv * M, K]
    scores = scores.div_(math.sqrt(q.shape[2])).unflatten(1, (num_groups, num_rows))
    if unseen is not None:
        scores[..., scores.shape[-1] - unseen.shape[1] :].masked_fill_(unseen, -math.inf)
    weights = scores.softmax(dim=-1).flatten(1, 2)
    return (weights @ v).reshape(q.shape)
