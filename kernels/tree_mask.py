"""Ancestor bitmasks: bit j of row i is set where node j is node i or stands above it; depth and position beside them.

    bits[i] = OR over j in {i, parent(i), parent(parent(i)), ...} of 1 << j,   depth[i] = |that set| - 1,
    position[i] = prefix_len + depth[i]

64 nodes a word, N^2 / 8 bytes for a tree of N, whatever the prefix. One program follows the parents of a block of
nodes; a circle of parents ends after N steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.kernels.launch import (
    check_indices,
    check_num_rows,
    check_runs,
    check_shape,
    next_power_of_2,
)
from specbench.tree import UNUSED

BLOCK = 64
WORD_BITS = 64


class TreeMask(NamedTuple):
    """bits: int64 [R, W], word w of a row holds nodes 64 w to 64 w + 63 of its own tree. depth: int32 [R], 0 for an
    unused row too. position_ids: int64 [R]."""

    bits: Tensor
    depth: Tensor
    position_ids: Tensor


@triton.jit
def tree_mask_kernel(
    parents,
    cu_nodes,
    prefix_lens,
    bits,
    depth,
    position_ids,
    num_words,
    UNUSED: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tree = tl.program_id(0)
    start = tl.load(cu_nodes + tree).to(tl.int64)
    num_nodes = tl.load(cu_nodes + tree + 1).to(tl.int64) - start
    node = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_row = node < num_nodes
    parent = tl.load(parents + start + node, mask=is_row, other=UNUSED)
    at = tl.where(parent == UNUSED, -1, node).to(tl.int64)
    words = tl.arange(0, WORDS)
    seen = tl.zeros([BLOCK, WORDS], dtype=tl.int64)
    num_seen = tl.zeros([BLOCK], dtype=tl.int32)
    num_steps = 0
    while (num_steps < num_nodes) & (tl.max(at, axis=0) >= 0):
        is_node = (at >= 0) & (at < num_nodes)
        bit = tl.full([BLOCK], 1, dtype=tl.int64) << (at & 63)
        hit = is_node[:, None] & ((at >> 6)[:, None] == words[None, :])
        seen = seen | tl.where(hit, bit[:, None], 0)
        num_seen += is_node.to(tl.int32)
        at = tl.load(parents + start + at, mask=is_node, other=-1).to(tl.int64)
        num_steps += 1
    levels = tl.maximum(num_seen - 1, 0)
    row = start + node
    where = row[:, None] * num_words + words[None, :]
    tl.store(bits + where, seen, mask=is_row[:, None] & (words < num_words)[None, :])
    tl.store(depth + row, levels, mask=is_row)
    tl.store(position_ids + row, tl.load(prefix_lens + tree).to(tl.int64) + levels, mask=is_row)


def tree_mask(parents: Tensor, prefix_lens: Tensor, *, cu_nodes: Tensor, max_nodes: int) -> TreeMask:
    """parents: int [R], within a row's own tree, in any order, -1 for a root, UNUSED (-2) for a row without a node.
    prefix_lens: int [B]. cu_nodes: int [B+1]. max_nodes: of the largest tree; no value is read on the host.

    Parents outside their tree end the path there. ValueError for shapes that do not fit.
    """
    check_runs("tree_mask", parents=parents, prefix_lens=prefix_lens, cu_nodes=cu_nodes)
    num_trees = prefix_lens.shape[0]
    check_shape("tree_mask", "parents", parents, (None,))
    check_shape("tree_mask", "cu_nodes", cu_nodes, (num_trees + 1,))
    check_indices("tree_mask", prefix_lens=prefix_lens, cu_nodes=cu_nodes)
    check_num_rows("tree_mask", parents.shape[0], num_trees, max_nodes)
    num_rows, num_words = parents.shape[0], triton.cdiv(max_nodes, WORD_BITS)
    made = TreeMask(
        torch.empty(num_rows, num_words, dtype=torch.int64, device=parents.device),
        torch.empty(num_rows, dtype=torch.int32, device=parents.device),
        torch.empty(num_rows, dtype=torch.int64, device=parents.device),
    )
    grid = (num_trees, triton.cdiv(max_nodes, BLOCK))
    if num_rows:
        tree_mask_kernel[grid](
            parents.contiguous(),
            cu_nodes,
            prefix_lens,
            *made,
            num_words,
            UNUSED=UNUSED,
            WORDS=next_power_of_2(num_words),
            BLOCK=BLOCK,
        )
    return made


def pack_mask(mask: Tensor) -> Tensor:
    """bool [N, N] as bits int64 [N, W]: for masks that do not come from parents."""
    num_nodes = mask.shape[0]
    num_words = triton.cdiv(num_nodes, WORD_BITS)
    padded = torch.nn.functional.pad(mask, (0, num_words * WORD_BITS - num_nodes)).view(num_nodes, num_words, WORD_BITS)
    weights = torch.ones(WORD_BITS, dtype=torch.int64, device=mask.device) << torch.arange(
        WORD_BITS, device=mask.device
    )
    return (padded * weights).sum(dim=2)


def unpack_mask(bits: Tensor, num_nodes: int) -> Tensor:
    """bits int64 [N, W] as bool [N, num_nodes]."""
    nodes = torch.arange(num_nodes, device=bits.device)
    return (bits[:, nodes // WORD_BITS] >> (nodes % WORD_BITS)) & 1 == 1
