"""Tree attention written out: every row of every tree attends to its prefix and to its own ancestors.

score(i, j) = scale * q_i . k_j, capped (cap * tanh(score / cap)), then biased (slope * (position_j - position_i)).
Row by row, in fp64 whatever the inputs' dtype: the definition that kernels are held against. In a lower dtype it is the
plain computation whose rounding they are compared with.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specbench.tree import UNUSED


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parents: Tensor,
    prefix_lens: Tensor,
    scale: float,
    *,
    cu_nodes: Tensor,
    page_table: Tensor | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Returns out [R, Hq, D] in `dtype` and lse [R, Hq], the logarithm of the summed exponentials of the scores, in
    fp32 or wider, as scores and softmax are.

    q: [R, Hq, D], the rows of all trees one behind the other; cu_nodes: int [B+1], where each tree's rows begin and
    end. k, v: [B, S, Hkv, D], or pages [num_pages, T, Hkv, D] with page_table int [B, max_pages]: row r of sequence b
    lies in page page_table[b, r // T] at r % T. Rows 0..P-1 are the prefix (P = prefix_lens[b]), rows P..P+N-1 the
    tree's nodes; what lies behind them is dead and never read. Query head h reads key head h // (Hq / Hkv).
    parents: int [R], within a row's own tree, -1 for the root; parents need not precede children. UNUSED (-2) marks a
    row that holds no node: it gets zeros and -inf.
    window: how many positions a row sees, its own included; a node stands at P + its depth.
    k_scale, v_scale: float [B, S, Hkv] or [num_pages, T, Hkv]; codes (int8 or fp8) times these are keys and values.
    """
    wide = torch.promote_types(dtype, torch.float32)
    out = torch.zeros(q.shape, dtype=dtype)
    lse = torch.full(q.shape[:2], -math.inf, dtype=wide)
    group = q.shape[1] // k.shape[2]
    for b, prefix_len in enumerate(prefix_lens.tolist()):
        start, end = int(cu_nodes[b]), int(cu_nodes[b + 1])
        own = parents[start:end].tolist()
        for node in range(end - start):
            path = ancestors(own, node)
            if not path:
                continue
            position = prefix_len + len(path) - 1
            first = 0 if window is None else max(0, position - window + 1)
            # The path upwards, cut where the window ends; then what of the prefix the window still holds.
            seen = path[: position - first + 1]
            rows = [*range(min(first, prefix_len), prefix_len), *(prefix_len + one for one in reversed(seen))]
            positions = torch.arange(position - len(rows) + 1, position + 1, dtype=wide)
            keys = rows_of(k, b, rows, page_table, k_scale).to(dtype)
            values = rows_of(v, b, rows, page_table, v_scale).to(dtype)
            for head in range(q.shape[1]):
                scores = scale * (keys[:, head // group] @ q[start + node, head].to(dtype)).to(wide)
                if soft_cap is not None:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                if alibi_slopes is not None:
                    scores = scores + alibi_slopes[head].to(wide) * (positions - position)
                lse[start + node, head] = scores.logsumexp(0)
                out[start + node, head] = scores.softmax(0).to(dtype) @ values[:, head // group]
    return out, lse


def ancestors(parents: list[int], node: int) -> list[int]:
    """The nodes from `node` up to its root, both included; none for an unused row."""
    path: list[int] = []
    if parents[node] == UNUSED:
        return path
    while node >= 0:
        if len(path) == len(parents):
            raise ValueError(f"parents = {parents} run in a circle from node {path[0]}")
        path.append(node)
        node = parents[node]
    return path


def rows_of(cache: Tensor, sequence: int, rows: list[int], page_table: Tensor | None, scales: Tensor | None) -> Tensor:
    """float64 [len(rows), Hkv, D]: rows of one sequence, decoded."""
    index = torch.tensor(rows, dtype=torch.int64)
    if page_table is None:
        where = (torch.full_like(index, sequence), index)
    else:
        size = cache.shape[1]
        where = (page_table[sequence].to(torch.int64)[index // size], index % size)
    if cache.dtype == torch.float8_e4m3fn:  # CPU fp8 knows no gathering by index
        found = cache.view(torch.uint8)[where].view(torch.float8_e4m3fn).double()
    else:
        found = cache[where].double()
    return found if scales is None else found * scales[where].double()[..., None]
