"""Rows stored as int8 or fp8 (e4m3) codes, each row and head with a scale that stands beside it and moves with it.

Reads are dequantised, the newest rows too: a row in a tree and the same row decoded one by one see the same numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.reference.caches.cache import LayerSpec
from specbench.reference.caches.preallocated import PreallocatedCache

INT8_LARGEST = 127.0
FP8_LARGEST = 448.0


class Int8Cache(PreallocatedCache):
    """Codes are int8 [H, capacity, D], scales [H, capacity, 1]: a row's largest magnitude / 127."""

    codes_dtype = torch.int8
    largest = INT8_LARGEST

    def _new_parts(self, layer: LayerSpec) -> tuple[Tensor, ...]:
        """(key codes, key scales, value codes, value scales); a recurrent state keeps its own numbers."""
        if layer.is_state:
            return super()._new_parts(layer)
        wide = torch.promote_types(self.spec.dtype, torch.float32)
        return tuple(
            part
            for width in (layer.key_dim, layer.value_dim)
            for part in (self._buffer(layer, width, self.codes_dtype), self._buffer(layer, 1, wide))
        )

    def poison(self, value: float) -> None:
        """Overwrites scales beyond the length with `value`, codes with their largest bit pattern that is a number."""
        for parts, length in zip(self._parts, self._lengths, strict=True):
            for part in parts:
                part[:, length:] = value if part.is_floating_point() else 126

    def _encode(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        if self.spec.layers[layer].is_state:
            return k, v
        return *self._quantise(k), *self._quantise(v)

    def _decode(self, layer: int, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        if self.spec.layers[layer].is_state:
            return super()._decode(layer, parts)
        key_codes, key_scales, value_codes, value_scales = parts
        return self._dequantise(key_codes, key_scales), self._dequantise(value_codes, value_scales)

    def _quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: float [H, M, D]. Returns codes [H, M, D] and scales [H, M, 1], which a row of zeros sets to one."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scales = wide.abs().amax(dim=-1, keepdim=True) / self.largest
        scales = torch.where(scales > 0, scales, 1.0)
        return self._codes((wide / scales).clamp(-self.largest, self.largest)), scales

    def _dequantise(self, codes: Tensor, scales: Tensor) -> Tensor:
        return (self._numbers(codes).to(scales.dtype) * scales).to(self.spec.dtype)

    def _codes(self, scaled: Tensor) -> Tensor:
        """scaled: within +-largest."""
        return scaled.round().to(torch.int8)

    def _numbers(self, codes: Tensor) -> Tensor:
        return codes


class Fp8Cache(Int8Cache):
    """Codes are e4m3 numbers in uint8 [H, capacity, D] (CPU tensors of fp8 cannot be gathered); largest 448."""

    codes_dtype = torch.uint8
    largest = FP8_LARGEST

    def _codes(self, scaled: Tensor) -> Tensor:
        # By way of fp32, stated so that an oracle can round alike: torch has no direct way from fp64.
        return scaled.float().to(torch.float8_e4m3fn).view(torch.uint8)

    def _numbers(self, codes: Tensor) -> Tensor:
        return codes.contiguous().view(torch.float8_e4m3fn).float()
