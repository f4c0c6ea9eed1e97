"""`reference.model`'s Llama with fewer operators a layer: what our own side of a benchmark runs on.

The same formula on the same weights: q, k and v are one product, gate and up another, the query heads of a key head
are further rows of one fused attention, and the norms are torch's. The matrices are joined once, and the names of the
checkpoint become views of them, so that nothing is held twice. `tests/test_bench_lean.py` holds it to the reference.
No windows, no biases, no taps: a model that has them runs by `reference.model` and its rows say so.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from specbench.protocols import Cache
from specbench.reference.kv_cache import AppendableCache, PreallocatedCache
from specbench.reference.model import LlamaConfig, LlamaModel
from specbench.steps import FlatTree
from specbench.types import Taps


@dataclass(frozen=True)
class _Layer:
    """qkv: [(Hq + 2 Hkv) D, hidden]. gate_up: [2 inner, hidden]."""

    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor
    input_norm: Tensor
    post_norm: Tensor


class LeanLlama(LlamaModel):
    """What is not a forward behind a cache is inherited."""

    def __init__(
        self, config: LlamaConfig, weights: dict[str, Tensor], layers: tuple[_Layer, ...], *, name: str
    ) -> None:
        super().__init__(config, weights, name=name)
        self._layers = layers
        self._capacity: int | None = None
        # Turned in fp32 where the model is narrower, as in the reference; one sign for each half of a head.
        exponents = torch.arange(0, config.head_dim, 2, device=self.device, dtype=self._wide)
        self._frequencies = (config.rope_theta ** (-exponents / config.head_dim)).repeat(2)  # [D]
        half = torch.ones(config.head_dim // 2, device=self.device, dtype=self._wide)
        self._signs = torch.cat([-half, half])

    @classmethod
    def of(cls, model: LlamaModel) -> LeanLlama:
        """The same weights; they are taken over, so `model` should not be kept. ValueError for what it cannot do."""
        if any(model.layer_windows):
            raise ValueError(
                f"{model.name} has sliding windows, which LeanLlama does not compute: use the model itself"
            )
        if any(one.endswith(".bias") for one in model._weights):
            raise ValueError(f"{model.name} has biases, which LeanLlama does not compute: use the model itself")
        weights, layers = dict(model._weights), []
        for layer in range(model.num_layers):
            prefix = f"model.layers.{layer}."

            def joined(*names: str, prefix: str = prefix) -> Tensor:
                keys = [f"{prefix}{one}.weight" for one in names]
                parts = [weights[key] for key in keys]
                whole = torch.cat(parts)
                weights.update(zip(keys, whole.split([len(one) for one in parts]), strict=True))
                return whole

            layers.append(
                _Layer(
                    qkv=joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                    output=weights[prefix + "self_attn.o_proj.weight"],
                    gate_up=joined("mlp.gate_proj", "mlp.up_proj"),
                    down=weights[prefix + "mlp.down_proj.weight"],
                    input_norm=weights[prefix + "input_layernorm.weight"],
                    post_norm=weights[prefix + "post_attention_layernorm.weight"],
                )
            )
        return cls(model.config, weights, tuple(layers), name=f"{model.name}, lean")

    def first_layers(self, num_layers: int) -> LeanLlama:
        if not 1 <= num_layers <= self.num_layers:
            raise ValueError(f"num_layers = {num_layers} must be between 1 and {self.num_layers}")
        config = replace(self.config, num_layers=num_layers)
        name = f"{self.name}, first {num_layers} layers"
        return LeanLlama(config, self._weights, self._layers[:num_layers], name=name)

    def with_capacity(self, num_rows: int) -> LeanLlama:
        """The same weights; preallocated caches are of that many rows, for texts that are known to be no longer."""
        twin = copy.copy(self)
        twin._capacity = num_rows
        return twin

    def new_cache(self, kind: str = "contiguous") -> AppendableCache:
        if kind == "preallocated" and self._capacity is not None:
            return PreallocatedCache(self.cache_spec, capacity=self._capacity)
        return super().new_cache(kind)

    @torch.no_grad()
    def forward(self, flat: FlatTree, cache: Cache, *, taps: Taps | None = None) -> Tensor:
        """The M rows of `flat` behind the cache, which grows by M rows. Returns float [M, V]."""
        if taps is not None:
            raise ValueError("taps are not filled by LeanLlama: use the model that it was made of")
        return self._told(self._behind(flat, cache)) @ self._head.T

    @torch.no_grad()
    def encode(self, flat: FlatTree, cache: Cache) -> None:
        """`forward` for rows whose logits nobody reads."""
        hidden = self._behind(flat, cache)
        if self._sink is not None:
            self._told(hidden)

    def _told(self, hidden: Tensor) -> Tensor:
        """What the output matrix is given, which the sink is handed too."""
        normed = self._normed(hidden, self._weights["model.norm.weight"])
        if self._sink is not None:
            self._sink(normed)
        return normed

    def _behind(self, flat: FlatTree, cache: Cache) -> Tensor:
        """float [M, hidden], before the last norm."""
        if getattr(cache, "spec", None) != self.cache_spec:
            raise ValueError(f"cache is a {type(cache).__name__}, must be from this model's new_cache()")
        config, rows = self.config, flat.num_rows
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
        group, prefix_len = heads // kv_heads, cache.length
        store, mask = cast(AppendableCache, cache), self._mask(flat, prefix_len, group)
        angles = flat.position_ids.to(self.device, self._wide)[:, None] * self._frequencies  # [M, D]
        cos, sin = angles.cos()[:, None], (angles.sin() * self._signs)[:, None]  # [M, 1, D]
        hidden = self._embedding[flat.tokens.to(self.device)]  # [M, hidden]
        for idx, layer in enumerate(self._layers):
            states = self._normed(hidden, layer.input_norm) @ layer.qkv.T
            states = states.view(rows, heads + 2 * kv_heads, size)
            turned = states[:, : heads + kv_heads].to(self._wide)
            turned = (turned * cos).addcmul_(turned.roll(size // 2, dims=-1), sin).to(self.dtype)
            k, v = store.append(idx, turned[:, heads:].transpose(0, 1), states[:, heads + kv_heads :].transpose(0, 1))
            q = turned[:, :heads].view(rows, kv_heads, group, size).permute(1, 2, 0, 3)  # [Hkv, G, M, D]
            q = q.reshape(1, kv_heads, group * rows, size)
            mixed = functional.scaled_dot_product_attention(q, k[None], v[None], attn_mask=mask)
            mixed = mixed.view(kv_heads, group, rows, size).permute(2, 0, 1, 3).reshape(rows, heads * size)
            hidden = hidden + mixed @ layer.output.T
            gate, up = (self._normed(hidden, layer.post_norm) @ layer.gate_up.T).chunk(2, dim=-1)
            hidden = hidden + (functional.silu(gate) * up) @ layer.down.T
        return hidden

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _mask(self, flat: FlatTree, prefix_len: int, group: int) -> Tensor | None:
        """float [G M, P+M], 0 or -inf, once for each head of a group; None for one row, which sees all."""
        if flat.num_rows == 1:
            return None
        mask = torch.zeros(flat.num_rows, prefix_len + flat.num_rows, dtype=self.dtype, device=self.device)
        mask[:, prefix_len:].masked_fill_(~flat.mask.to(self.device), -torch.inf)
        return mask.repeat(group, 1)
