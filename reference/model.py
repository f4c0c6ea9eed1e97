"""A Llama-family forward written out: RMSNorm, rotary embedding, grouped heads, SwiGLU, tied or untied head.

In fp64 every operation is fp64, so that logic faults (1e-2) and rounding (1e-15) cannot be confused. In a lower dtype
norms, rotary angles and softmax are computed in fp32, as engines do. One sequence with an explicit cache, or whole
causal sequences without one; how rows attend is an argument, so that a batch can bring its own. No fused attention, no
generation loop.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor

from specbench.protocols import Cache
from specbench.reference.kv_cache import QUANTISED, AppendableCache, CacheSpec, LayerSpec, new_cache
from specbench.steps import FlatTree
from specbench.types import LayerTap, Taps

# (layer, q [B, Hq, M, D], k [B, Hkv, M, D], v [B, Hkv, M, D]) -> mixed values [B, Hq, M, D], weights [B, Hq, M, K] or
# None where they are never formed.
Attend = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
# (layer, normed hidden states [B, M, hidden]) -> what the layer adds to them [B, M, hidden], attention weights if any.
Mix = Callable[[int, Tensor], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class LlamaConfig:
    """The fields of a Llama checkpoint's config.json that decide what the forward computes.

    windows: for each layer how many positions a row sees, its own included, None for all; empty means None for every
    layer. (Mistral slides all layers, Gemma every other one.)
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    tied: bool = False
    windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(f"windows has {len(self.windows)} entries, must have {self.num_layers} (layers) or none")
        for layer, window in enumerate(self.windows):
            if window is not None and window < 1:
                raise ValueError(f"windows[{layer}] = {window} must be >= 1 (a row sees itself), or None")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads = {self.num_heads} must be a multiple of num_kv_heads = {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} must be even (rotary embedding turns pairs)")


class FusedAttention(Protocol):
    """Somebody else's attention of M rows over K keys; arguments as in `LlamaModel.attention`."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block_mask: Tensor,
        q_positions: Tensor,
        k_positions: Tensor,
        *,
        window: int | None,
        scale: float,
        soft_cap: float | None = None,
    ) -> Tensor:
        """Returns mixed values [B, Hq, M, Dv]. window: positions that a row sees, its own included, None for all.
        soft_cap: scores are squeezed between minus it and it before they are masked."""
        ...


StateSink = Callable[[Tensor], None]


class LlamaModel:
    """Weights and the forward over them. Satisfies `specbench.protocols.LanguageModel`.

    weights: tensors by their name in a Hugging Face Llama checkpoint ("model.layers.0.self_attn.q_proj.weight" ...),
    all of one dtype on one device.
    """

    def __init__(self, config: LlamaConfig, weights: dict[str, Tensor], *, name: str = "reference.model"):
        self.config = config
        self.name = name
        self._weights = weights
        self._codec = ""
        self._fused: FusedAttention | None = None
        self._sink: StateSink | None = None
        self._sink_layers: tuple[int, ...] = ()
        self._embedding = weights["model.embed_tokens.weight"]
        self._head = self._embedding if config.tied else weights["lm_head.weight"]
        # fp16 and bf16 keep norms, angles and softmax in fp32; fp32 and fp64 compute throughout in their own dtype.
        self._wide = torch.promote_types(self.dtype, torch.float32)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """How many positions each layer sees, the row's own included; None for all."""
        return self.config.windows or (None,) * self.num_layers

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    def to(self, dtype: torch.dtype, device: str | torch.device | None = None) -> LlamaModel:
        """The same weights rounded to (or widened to) another dtype."""
        weights = {key: one.to(device=device, dtype=dtype) for key, one in self._weights.items()}
        return LlamaModel(self.config, weights, name=self.name).with_codec(self._codec)

    def with_codec(self, kind: str) -> LlamaModel:
        """The same weights; `causal` and `logits` round keys and values as a cache of that kind does, without one.

        kind: a name in `kv_cache.QUANTISED`, or "" for none. The rounding is written out apart from the cache's, which
        it is there to judge.
        """
        if kind and kind not in QUANTISED:
            raise ValueError(f"codec {kind!r} is unknown: choose one of {', '.join(QUANTISED)}, or '' for none")
        twin = copy.copy(self)
        twin._codec = kind
        return twin

    def with_attention(self, attention: FusedAttention | None) -> LlamaModel:
        """The same weights; rows behind a cache attend by `attention`, None for the written-out one, which whole causal
        texts keep."""
        twin = copy.copy(self)
        twin._fused = attention
        return twin

    def with_state_sink(self, sink: StateSink | None, layers: Sequence[int] = ()) -> LlamaModel:
        """The same weights; each forward behind a cache hands `sink` what its logits are made of, float [M, hidden], or
        where layers are named, what these are given, float [M, len(layers) * hidden]."""
        if layers and type(self).forward is not LlamaModel.forward:
            raise ValueError(f"{self.name} does not tell what its layers are given: use the model that it was made of")
        twin = copy.copy(self)
        twin._sink, twin._sink_layers = sink, tuple(layers)
        return twin

    def first_layers(self, num_layers: int) -> LlamaModel:
        """The model cut after `num_layers` layers, with the same norm and head: the weights are shared, not copied."""
        if not 1 <= num_layers <= self.num_layers:
            raise ValueError(f"num_layers = {num_layers} must be between 1 and {self.num_layers}")
        name = f"{self.name}, first {num_layers} layers"
        windows = self.config.windows[:num_layers]
        config = replace(self.config, num_layers=num_layers, windows=windows)
        return LlamaModel(config, self._weights, name=name).with_codec(self._codec)

    @property
    def embedding(self) -> Tensor:
        """float [V, hidden]."""
        return self._embedding

    @property
    def head(self) -> Tensor:
        """float [V, hidden], the output matrix."""
        return self._head

    @property
    def cache_spec(self) -> CacheSpec:
        """The shape of one sequence's cache."""
        size = self.config.head_dim
        layers = tuple(LayerSpec(self.config.num_kv_heads, size, size, window) for window in self.layer_windows)
        return CacheSpec(layers, self.dtype, str(self.device))

    def new_cache(self, kind: str = "contiguous") -> AppendableCache:
        """An empty cache of a kind in `kv_cache.CACHES`."""
        return new_cache(kind, self.cache_spec)

    @torch.no_grad()
    def forward(self, flat: FlatTree, cache: Cache, *, taps: Taps | None = None) -> Tensor:
        """The M rows of `flat` behind the cache, which grows by M rows. Returns float [M, V]."""
        if getattr(cache, "spec", None) != self.cache_spec:
            other = " of other rows" if hasattr(cache, "spec") else ""
            raise ValueError(f"cache is a {type(cache).__name__}{other}, must be from this model's new_cache()")
        prefix_len = cache.length
        given = Taps() if taps is None and self._sink_layers else taps
        if taps is not None:
            prefix = torch.ones(flat.num_rows, prefix_len, dtype=torch.bool)
            taps.node_of_row, taps.position_ids = flat.node_of_row, flat.position_ids
            taps.mask = torch.cat([prefix, flat.mask], dim=1)  # [M, P+M]
        mix = self._mix_behind(cast(AppendableCache, cache), flat, taps)
        hidden = self._hidden_states(flat.tokens[None], mix, given)
        if self._sink is not None:
            asked = self._layer_inputs(flat.tokens[None], given, self._sink_layers) if self._sink_layers else hidden
            self._sink(asked[0])
        if taps is not None:
            for layer in taps.layers:
                _drop_batch(layer, num_keys=prefix_len + flat.num_rows)
        return hidden[0] @ self._head.T

    @torch.no_grad()
    def states(self, tokens: Sequence[int]) -> Tensor:
        """float [S, hidden]: what the logits of a whole text are made of."""
        mix = self._mix_causal(torch.arange(len(tokens)), None)
        return self._hidden_states(torch.tensor([list(tokens)], dtype=torch.int64), mix, None)[0]

    @torch.no_grad()
    def layer_inputs(self, tokens: Sequence[int], layers: Sequence[int]) -> Tensor:
        """float [S, len(layers) * hidden]: what these layers are given of a whole text, side by side."""
        ids, taps = torch.tensor([list(tokens)], dtype=torch.int64), Taps()
        self._hidden_states(ids, self._mix_causal(torch.arange(len(tokens)), None), taps)
        return self._layer_inputs(ids, taps, layers)[0]

    def normed(self, hidden: Tensor) -> Tensor:
        """float [..., hidden]: what a layer leaves, as the output matrix is given it."""
        return self._norm(hidden, "model.norm.weight")

    def _layer_inputs(self, tokens: Tensor, taps: Taps | None, layers: Sequence[int]) -> Tensor:
        """tokens: int64 [B, M], taps: of their forward. Returns float [B, M, len(layers) * hidden]."""
        assert taps is not None
        given = [self._embedding[tokens.to(self.device)], *(one.hidden_state for one in taps.layers)]
        return torch.cat([cast(Tensor, given[layer]) for layer in layers], dim=-1)

    @torch.no_grad()
    def causal(self, tokens: Tensor, *, taps: Taps | None = None) -> Tensor:
        """tokens: int64 [B, S], whole sequences without a cache. Returns float [B, S, V]; taps have a leading B."""
        position_ids = torch.arange(tokens.shape[1])
        if taps is not None:
            taps.position_ids, taps.mask = position_ids, position_ids[:, None] >= position_ids[None, :]
        return self._hidden_states(tokens, self._mix_causal(position_ids, taps), taps) @ self._head.T

    @torch.no_grad()
    def rows(self, tokens: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """Any rows under any attention: tokens int64 [B, M], position_ids int64 [M] or [B, M]. Returns float [B, M, V].

        A batch over several caches passes an `attend` that appends each sequence's rows to its own cache and calls
        `attention` on what comes back.
        """
        return self._hidden_states(tokens, self._mix_by(position_ids, attend), None) @ self._head.T

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Level 0: float [S, V], row i predicts token i + 1."""
        return self.causal(torch.tensor([list(tokens)], dtype=torch.int64))[0]

    def _hidden_states(self, tokens: Tensor, mix: Mix, taps: Taps | None) -> Tensor:
        """tokens [B, M]. Returns the normed last hidden state [B, M, hidden]."""
        return self._through_layers(self._embedding[tokens.to(self.device)], mix, taps)

    def _through_layers(self, hidden: Tensor, mix: Mix, taps: Taps | None) -> Tensor:
        """hidden: [B, M, hidden], what the first layer is given."""
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            attention_output, weights = mix(layer, self._norm(hidden, prefix + "input_layernorm.weight"))
            hidden = hidden + attention_output
            normed = self._norm(hidden, prefix + "post_attention_layernorm.weight")
            gate = torch.nn.functional.silu(self._linear(normed, prefix + "mlp.gate_proj"))
            hidden = hidden + self._linear(
                self._activations(gate * self._linear(normed, prefix + "mlp.up_proj")), prefix + "mlp.down_proj"
            )
            if taps is not None:
                tap = taps.layer(layer)
                tap.attention_weights, tap.attention_output, tap.hidden_state = weights, attention_output, hidden
        return self.normed(hidden)

    def _activations(self, inner: Tensor) -> Tensor:
        """What the last matrix of a feed-forward block is given, float [B, M, inner]; row by row."""
        return inner

    def _mix_by(self, position_ids: Tensor, attend: Attend) -> Mix:
        """Self-attention around `attend`: projections and rotary embedding before it, the output projection behind."""
        config = self.config
        cos, sin = self._rotation(position_ids.to(self.device))

        def mix(layer: int, normed: Tensor) -> tuple[Tensor, Tensor | None]:
            prefix = f"model.layers.{layer}.self_attn."
            q = self._heads(normed, prefix + "q_proj", config.num_heads)  # [B, Hq, M, D]
            k = self._heads(normed, prefix + "k_proj", config.num_kv_heads)
            v = self._heads(normed, prefix + "v_proj", config.num_kv_heads)
            mixed, weights = attend(layer, self._rotate(q, cos, sin), self._rotate(k, cos, sin), v)
            return self._linear(mixed.transpose(1, 2).flatten(2), prefix + "o_proj"), weights

        return mix

    def _mix_behind(self, cache: AppendableCache, flat: FlatTree, taps: Taps | None) -> Mix:
        """Rows of `flat` behind a cache, which keeps them. Taps get keys and values as cached."""
        prefix_len = cache.length
        block_mask, positions = flat.mask.to(self.device), flat.position_ids.to(self.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
            all_k, all_v = (one[None] for one in cache.append(layer, k[0], v[0]))  # [1, Hkv, K, D]
            num_cached = all_k.shape[2] - flat.num_rows  # a sliding cache may hold the last rows of the prefix only
            if taps is not None:
                tap = taps.layer(layer)
                tap.k, tap.v = all_k[:, :, num_cached:].clone(), all_v[:, :, num_cached:].clone()
            cached = torch.arange(prefix_len - num_cached, prefix_len, device=self.device)
            return self.attention(layer, q, all_k, all_v, block_mask, positions, torch.cat([cached, positions]))

        return self._mix_by(flat.position_ids, attend)

    def _mix_causal(self, position_ids: Tensor, taps: Taps | None) -> Mix:
        """Whole sequences, each row behind those before it."""
        positions = position_ids.to(self.device)
        mask = positions[:, None] >= positions[None, :]
        model = self if self._fused is None else self.with_attention(None)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
            k, v = round_trip(self._codec, k), round_trip(self._codec, v)
            if taps is not None:
                taps.layer(layer).k, taps.layer(layer).v = k, v
            return model.attention(layer, q, k, v, mask, positions, positions)

        return self._mix_by(position_ids, attend)

    def attention(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block_mask: Tensor,
        q_positions: Tensor,
        k_positions: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """One layer's attention of M rows over K keys, the last M of them the rows' own.

        q: [B, Hq, M, D]. k, v: [B, Hkv, K, D]. block_mask: bool [M, M] or [B, M, M], among the last M keys; the keys
        before them are all visible. q_positions: [M] or [B, M], k_positions: [K] or [B, K]; a key at a negative
        position is padding and hidden, and so is one that has left the layer's window.
        Returns mixed values [B, Hq, M, D] and weights [B, Hq, M, K], None from an attention that does not form them.
        """
        if self._fused is not None:
            window, scale = self.layer_windows[layer], 1.0 / math.sqrt(self.config.head_dim)
            return self._fused(q, k, v, block_mask, q_positions, k_positions, window=window, scale=scale), None
        weights = self._attention_weights(q, k, block_mask, q_positions, k_positions, layer)
        return weights @ v.repeat_interleave(self.config.num_heads // self.config.num_kv_heads, dim=1), weights

    def _attention_weights(
        self, q: Tensor, k: Tensor, block_mask: Tensor, q_positions: Tensor, k_positions: Tensor, layer: int
    ) -> Tensor:
        """Query head h reads key head h // (Hq / Hkv). Masks stay [M, M]: one over the prefix would be all ones."""
        k = k.repeat_interleave(self.config.num_heads // self.config.num_kv_heads, dim=1)
        scores = (q @ k.mT).to(self._wide) / math.sqrt(self.config.head_dim)  # [B, Hq, M, K]
        block = scores[..., scores.shape[3] - scores.shape[2] :]
        block.masked_fill_(~block_mask.unsqueeze(-3), -math.inf)
        if bool((k_positions < 0).any()):
            scores.masked_fill_((k_positions < 0)[..., None, None, :], -math.inf)
        window = self.layer_windows[layer]
        if window is not None:
            left = q_positions[..., :, None] - k_positions[..., None, :] >= window  # [M, K] or [B, M, K]
            scores.masked_fill_(left.unsqueeze(-3), -math.inf)
        return scores.softmax(dim=-1).to(self.dtype)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        bias = self._weights.get(name + ".bias")
        out = x @ self._weights[name + ".weight"].T
        return out if bias is None else out + bias

    def _heads(self, x: Tensor, name: str, num_heads: int) -> Tensor:
        return self._linear(x, name).unflatten(-1, (num_heads, self.config.head_dim)).transpose(1, 2)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.to(self._wide)
        scale = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + self.config.rms_norm_eps)
        return self._weights[name] * (wide * scale).to(self.dtype)

    def _rotation(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin: [1, M, D/2] or [B, 1, M, D/2] in the wide dtype, the same for every head."""
        exponents = torch.arange(0, self.config.head_dim, 2, device=self.device, dtype=self._wide)
        angles = position_ids.to(self._wide)[..., None] * self.config.rope_theta ** (-exponents / self.config.head_dim)
        return angles.cos().unsqueeze(-3), angles.sin().unsqueeze(-3)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding, Llama's half split: dimension i turns with dimension i + D/2."""
        left, right = x.to(self._wide).chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(self.dtype)

    def save(self, folder: Path) -> None:
        """Write a Hugging Face checkpoint folder: config.json and model.safetensors."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file({key: one.contiguous() for key, one in self._weights.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self._hf_config(), indent=2))

    def _hf_config(self) -> dict[str, object]:
        config = self.config
        return {
            **_hf_type(config),
            **hf_shape(config),
            # A reader drops biases that the config does not announce.
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._weights,
            "mlp_bias": "model.layers.0.mlp.up_proj.bias" in self._weights,
            "max_position_embeddings": 8192,
            "hidden_act": "silu",
            "bos_token_id": None,
            "eos_token_id": None,
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    @classmethod
    def load(cls, path: str | Path, *, dtype: torch.dtype = torch.float64, device: str = "cpu") -> LlamaModel:
        """Any Llama-architecture checkpoint that transformers reads, by folder or hub id; weights cast to `dtype`.

        Safetensors only, never remote code. ValueError names the first config field that this forward does not compute.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        hf_config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        config = _read_hf_config(hf_config, path)
        loaded = AutoModelForCausalLM.from_pretrained(
            path, config=hf_config, dtype="auto", use_safetensors=True, trust_remote_code=False
        )
        weights = {
            key: one.to(device=device, dtype=dtype)
            for key, one in loaded.state_dict().items()
            if not (config.tied and key == "lm_head.weight")  # the embedding again
        }
        return cls(config, weights, name=Path(path).name)


def hf_shape(config: LlamaConfig) -> dict[str, object]:
    """The fields of a Hugging Face config.json that say the sizes, the same for every type like Llama."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied,
    }


def round_trip(codec: str, x: Tensor) -> Tensor:
    """x: float [..., D], each row rounded to a whole number of steps ("int8") or to 4 significant bits ("fp8").

    int8: a step is the row's largest magnitude / 127. fp8 is e4m3: that magnitude becomes 448, numbers below 2^-6 lie
    2^-9 apart, and the quotient goes by way of fp32. "" leaves x alone.
    """
    if not codec:
        return x
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    step = wide.abs().amax(dim=-1, keepdim=True) / (127 if codec == "int8" else 448)
    step = torch.where(step > 0, step, 1.0)
    if codec == "int8":
        return (torch.round(wide / step) * step).to(x.dtype)
    scaled = (wide / step).float()
    exponent = torch.frexp(scaled).exponent.clamp(min=-5)  # scaled = m * 2^exponent with m in [1/2, 1)
    grid = torch.ldexp(torch.ones_like(scaled), exponent - 4)
    return ((torch.round(scaled / grid) * grid).to(wide.dtype) * step).to(x.dtype)


def _drop_batch(tap: LayerTap, *, num_keys: int) -> None:
    """Fields of a batch of one without the batch; weights get a zero for every prefix row that the cache let go."""
    for name, value in vars(tap).items():
        if value is not None:
            setattr(tap, name, value[0])
    if tap.attention_weights is not None:
        missing = num_keys - tap.attention_weights.shape[2]
        tap.attention_weights = torch.nn.functional.pad(tap.attention_weights, (missing, 0))


def tiny_llama(config: LlamaConfig, *, seed: int, dtype: torch.dtype = torch.float64) -> LlamaModel:
    """A seeded random model. Logits have a standard deviation near 2, so greedy output varies and ties are rare."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64) * (gain / math.sqrt(columns))

    def gain_vector() -> Tensor:
        return 1.0 + 0.1 * torch.randn(config.hidden_size, generator=generator, dtype=torch.float64)

    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    weights = {"model.embed_tokens.weight": matrix(config.vocab_size, hidden, gain=2.0 * math.sqrt(hidden))}
    if config.tied:
        weights["model.embed_tokens.weight"] = matrix(config.vocab_size, hidden, gain=2.0)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        weights[prefix + "input_layernorm.weight"] = gain_vector()
        weights[prefix + "post_attention_layernorm.weight"] = gain_vector()
        # Queries and keys are drawn large: attention must depend on what it sees, or a wrong mask would hide.
        weights[prefix + "self_attn.q_proj.weight"] = matrix(q_size, hidden, gain=1.5)
        weights[prefix + "self_attn.k_proj.weight"] = matrix(kv_size, hidden, gain=1.5)
        weights[prefix + "self_attn.v_proj.weight"] = matrix(kv_size, hidden, gain=2.0)
        weights[prefix + "self_attn.o_proj.weight"] = matrix(hidden, q_size, gain=2.0)
        weights[prefix + "mlp.gate_proj.weight"] = matrix(inner, hidden, gain=1.5)
        weights[prefix + "mlp.up_proj.weight"] = matrix(inner, hidden, gain=1.5)
        weights[prefix + "mlp.down_proj.weight"] = matrix(hidden, inner, gain=1.5)
    weights["model.norm.weight"] = gain_vector()
    if not config.tied:
        weights["lm_head.weight"] = matrix(config.vocab_size, hidden, gain=2.0)
    return LlamaModel(config, {key: one.to(dtype) for key, one in weights.items()}, name=f"tiny llama {seed}")


def _hf_type(config: LlamaConfig) -> dict[str, object]:
    """Llama, or Mistral when every layer has the same window. ValueError for windows that neither can say."""
    if len(set(config.windows)) > 1:
        raise ValueError(f"windows = {config.windows} must be equal to be saved: no Llama-like type has others")
    if not config.windows or config.windows[0] is None:
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    window = {"sliding_window": config.windows[0]}
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", **window}


def _read_hf_config(hf_config: object, path: str | Path) -> LlamaConfig:
    """The fields we compute with, after refusing what we would compute wrongly."""
    model_type = getattr(hf_config, "model_type", None)
    if model_type not in ("llama", "mistral"):
        raise ValueError(
            f"{path}: model_type = {model_type!r} must be 'llama' or 'mistral'; other types load through reference.hf"
        )
    rope = getattr(hf_config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type != "default":
        raise ValueError(f"{path}: rope_type = {rope_type!r} must be 'default'; load this checkpoint by reference.hf")
    if getattr(hf_config, "hidden_act", "silu") != "silu":
        raise ValueError(f"{path}: hidden_act = {hf_config.hidden_act!r} must be 'silu'")  # type: ignore[attr-defined]
    get = hf_config.__getattribute__
    heads, hidden = get("num_attention_heads"), get("hidden_size")
    window = getattr(hf_config, "sliding_window", None) if model_type == "mistral" else None
    return LlamaConfig(
        vocab_size=get("vocab_size"),
        hidden_size=hidden,
        intermediate_size=get("intermediate_size"),
        num_layers=get("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=getattr(hf_config, "num_key_value_heads", None) or heads,
        head_dim=getattr(hf_config, "head_dim", None) or hidden // heads,
        rms_norm_eps=get("rms_norm_eps"),
        rope_theta=float(rope.get("rope_theta") or getattr(hf_config, "rope_theta", None) or 10_000.0),
        tied=get("tie_word_embeddings"),
        windows=() if window is None else (int(window),) * get("num_hidden_layers"),
    )
