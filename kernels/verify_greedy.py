"""The greedy walk for a whole batch: the target's argmax is followed down each tree.

    winner[i] = the lowest token id among the maxima of row i
    nodes of a text: the root; then all children of those nodes whose token is the winner of the lowest one of them
    path: from the root to the lowest node of the longest text that has one;   bonus = winner[that node]

Duplicate siblings spell the same text, so the walk goes on below all of them at once.

The vocabulary is searched in stretches side by side (a row's best of each stretch, then the best of those in the walk);
two launches, nothing is read on the host. A row that holds NaN has no largest logit: its winner is -1, which no child
carries, so the walk ends there with the bonus -1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.kernels.launch import (
    check_rows_are_dense,
    check_runs,
    check_shape,
    next_power_of_2,
)

VOCAB_BLOCK = 4096
NUM_STRETCHES = 8  # of a large vocabulary, side by side
NO_TOKEN = -1


class GreedyResult(NamedTuple):
    """path: int32 [B, max_depth], nodes from the root's child downwards, -1 behind the last. num_accepted: int32 [B].
    bonus_tokens: int64 [B], -1 where the row that decides holds NaN."""

    path: Tensor
    num_accepted: Tensor
    bonus_tokens: Tensor


@triton.jit
def argmax_kernel(
    logits,
    best,
    winner,
    vocab_size,
    row_stride,
    stretch,
    NUM_STRETCHES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest logit of one row's stretch and the lowest id that has it; NaN and -1 where the stretch holds NaN."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * stretch
    end = tl.minimum(begin + stretch, vocab_size)
    ids = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), dtype=best.dtype.element_ty)
    at = tl.full([BLOCK], -1, dtype=tl.int32)
    has_nan = tl.zeros([BLOCK], dtype=tl.int32)
    for offset in range(begin, end, BLOCK):
        token = offset + ids
        is_token = token < end
        value = tl.load(logits + row * row_stride + token, mask=is_token, other=float("-inf")).to(top.dtype)
        has_nan = has_nan | (value != value).to(tl.int32)
        better = is_token & ((value > top) | (at < 0))  # the first of equals stays: ids grow from block to block
        top = tl.where(better, value, top)
        at = tl.where(better, token, at)
    largest = tl.max(top, axis=0)
    lowest = tl.min(tl.where((top == largest) & (at >= 0), at, vocab_size), axis=0)
    is_bad = tl.max(has_nan, axis=0) > 0
    where = row * NUM_STRETCHES + tl.program_id(1)
    tl.store(best + where, tl.where(is_bad, float("nan"), largest))
    tl.store(winner + where, tl.where(is_bad, -1, lowest))


@triton.jit
def walk_kernel(
    best,
    winner,
    tokens,
    parents,
    cu_nodes,
    reached,
    path,
    num_accepted,
    bonus_tokens,
    max_depth,
    NUM_STRETCHES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tree a program. reached: int32 [R], how many tokens of the accepted text a node's path spells, -1 where the
    path is another one; written here before it is read."""
    tree = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_nodes + tree).to(tl.int64)
    num_nodes = (tl.load(cu_nodes + tree + 1).to(tl.int64) - start).to(tl.int32)
    stretches, nodes = tl.arange(0, NUM_STRETCHES), tl.arange(0, BLOCK)
    for first in range(0, num_nodes, BLOCK):
        other = first + nodes
        tl.store(reached + start + other, tl.where(other == 0, 0, -1), mask=other < num_nodes)
    node = num_nodes * 0  # int32 scalars, as the loop leaves them
    depth = num_nodes * 0
    token = num_nodes * 0 - 1
    goes_on = num_nodes > 0
    while goes_on:
        where = (start + node) * NUM_STRETCHES + stretches
        tops, ids = tl.load(best + where), tl.load(winner + where)
        is_bad = tl.max((tops != tops).to(tl.int32), axis=0) > 0
        largest = tl.max(tl.where(tops == tops, tops, float("-inf")), axis=0)
        # Equal tops of several stretches: the lowest id.
        token = tl.where(is_bad, -1, tl.min(tl.where(tops == largest, ids, 2147483647), axis=0))
        tl.debug_barrier()  # `reached` is complete before it is read, and read before it is written again
        wanted = tl.where((token >= 0) & (depth < max_depth), token, -2)  # -2: no node drafts that
        child = num_nodes
        for first in range(0, num_nodes, BLOCK):
            other = first + nodes
            parent = tl.load(parents + start + other, mask=other < num_nodes, other=-1).to(tl.int32)
            has_parent = (parent >= 0) & (parent < num_nodes)
            spelt = tl.load(reached + start + parent, mask=has_parent, other=-1)
            drafted = tl.load(tokens + start + other, mask=has_parent, other=-1).to(tl.int32)
            fits = has_parent & (spelt == depth) & (drafted == wanted)
            tl.store(reached + start + other, depth + 1, mask=fits)
            child = tl.minimum(child, tl.min(tl.where(fits, other, num_nodes), axis=0))
        goes_on = child < num_nodes
        node = tl.where(goes_on, child, node)
        depth = tl.where(goes_on, depth + 1, depth)
    at = node
    for step in range(max_depth):
        place = max_depth - 1 - step  # from the end: -1, then the path upwards
        is_path = place < depth
        tl.store(path + tree * max_depth + place, tl.where(is_path, at, -1))
        above = tl.load(parents + start + at, mask=is_path, other=0).to(tl.int32)
        at = tl.where(is_path, above, at)
    tl.store(num_accepted + tree, depth)
    tl.store(bonus_tokens + tree, token.to(tl.int64))


def stretches_of(vocab_size: int) -> tuple[int, int, int]:
    """How a vocabulary is searched side by side: ids a step, stretches (a power of two), ids a stretch."""
    block = min(VOCAB_BLOCK, next_power_of_2(vocab_size))
    num_stretches = min(NUM_STRETCHES, next_power_of_2(triton.cdiv(vocab_size, block)))
    return block, num_stretches, triton.cdiv(triton.cdiv(vocab_size, num_stretches), block) * block


def verify_greedy(logits: Tensor, tokens: Tensor, parents: Tensor, *, cu_nodes: Tensor, max_depth: int) -> GreedyResult:
    """logits: float [R, V], the rows of all trees one behind the other; row i follows node i. tokens, parents: int [R],
    parents within a row's own tree; cu_nodes: int [B+1], where each tree's rows begin and end.
    max_depth: of the deepest tree: a walk ends there.

    Twin of `reference.verify.greedy_walk`. ValueError for shapes that do not fit.
    """
    check_runs("verify_greedy", logits=logits, tokens=tokens, parents=parents, cu_nodes=cu_nodes)
    check_shape("verify_greedy", "logits", logits, (None, None))
    check_rows_are_dense("verify_greedy", "logits", logits)
    num_rows, vocab_size = logits.shape
    check_rows_are_dense("verify_greedy", "cu_nodes", cu_nodes)
    for name, one in (("tokens", tokens), ("parents", parents)):
        check_shape("verify_greedy", name, one, (num_rows,))
        check_rows_are_dense("verify_greedy", name, one)
    num_trees, device = cu_nodes.shape[0] - 1, logits.device
    if vocab_size < 1:
        raise ValueError("verify_greedy: logits have no column: a vocabulary holds at least one token")
    block, num_stretches, stretch = stretches_of(vocab_size)
    wide = torch.promote_types(logits.dtype, torch.float32)  # exact for every dtype: no sum is formed
    best = torch.empty(num_rows, num_stretches, dtype=wide, device=device)
    winner = torch.empty(num_rows, num_stretches, dtype=torch.int32, device=device)
    result = GreedyResult(
        torch.empty(num_trees, max_depth, dtype=torch.int32, device=device),
        torch.empty(num_trees, dtype=torch.int32, device=device),
        torch.empty(num_trees, dtype=torch.int64, device=device),
    )
    if num_rows:
        argmax_kernel[(num_rows, num_stretches)](
            logits, best, winner, vocab_size, logits.stride(0), stretch, NUM_STRETCHES=num_stretches, BLOCK=block
        )
    if num_trees:
        reached = torch.empty(num_rows, dtype=torch.int32, device=device)
        walk_kernel[(num_trees,)](
            best, winner, tokens, parents, cu_nodes, reached, *result, max_depth, NUM_STRETCHES=num_stretches, BLOCK=64
        )
    return result
