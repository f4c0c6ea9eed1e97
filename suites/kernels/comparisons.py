"""How each kernel's answer is held against its twin's: integers exactly, numbers by the noise that the plain
computation shows in the same dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.compare import exact_bound, max_error, measured_bound, rms_error, scale_of
from specbench.reference import attention as twin
from specbench.suites.kernels.cases import DTYPES, AttentionCase, arguments

Attention = Callable[..., Any]


@dataclass(frozen=True)
class Difference:
    """what: "out" or "lse". error, bound: of the same kind (see `compare`)."""

    what: str
    error: float
    bound: float
    source: str

    def __str__(self) -> str:
        return f"{self.what} is off by {self.error:.2g}, must be within {self.bound:.2g} ({self.source})"


def attention_differences(case: AttentionCase, attention: Attention) -> list[Difference]:
    """What of a kernel's answer is beyond its bound. attention: (*positional, case, **keyword) -> out and lse."""
    on_device, extra = arguments(case)
    out, lse = attention(*on_device, case, **extra)
    positional, keyword = arguments(case, device="cpu")
    right_out, right_lse = twin.tree_attention(*positional, **keyword)
    found = []
    dtype = DTYPES[case.dtype]
    eager = None if dtype == torch.float64 else twin.tree_attention(*positional, **keyword, dtype=dtype)
    for idx, (what, mine, right) in enumerate((("out", out.cpu(), right_out), ("lse", lse.cpu(), right_lse))):
        if not torch.equal(mine.isneginf(), right.isneginf()):
            found.append(Difference(what, float("inf"), 0.0, "-inf where a row sees nothing, and there alone"))
            continue
        if eager is None:
            bound = exact_bound(scale_of(right))
            error = max_error(mine, right)
        else:
            plain = rms_error(eager[idx], right)
            bound = measured_bound(plain, scale_of(right), dtype if what == "out" else torch.float32, pooled=True)
            error = rms_error(mine, right)
        if not error <= bound.value:
            found.append(Difference(what, error, bound.value, bound.source))
    return found


def rows_moved(buffer: Tensor, prefix_lens: Tensor, path: Tensor, num_accepted: Tensor, table: Tensor | None) -> Tensor:
    """What `commit_kv` must leave of a buffer, row by row."""
    right = buffer.clone()
    for sequence in range(path.shape[0]):
        for idx in range(int(num_accepted[sequence])):
            rows = int(prefix_lens[sequence]) + int(path[sequence, idx]), int(prefix_lens[sequence]) + 1 + idx
            places = [(sequence, row) for row in rows]
            if table is not None:
                size = buffer.shape[1]
                places = [(int(table[sequence, row // size]), row % size) for row in rows]
            right[places[1]] = buffer[places[0]]
    return right
