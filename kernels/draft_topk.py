"""Draft trees by cumulative score, whole batch: each node's best tokens, level after level, and the best nodes of all.

    log_prob(x) = (logit(x) - max) - log(sum of exp(logit - max)),   score(child) = score(parent) + log_prob(child)
    draft_topk: the k likeliest tokens of each row, the lowest id first among equals
    expand:     the children of a frontier join the candidates; the best `width` of them are the next frontier
    select:     the best `max_nodes` of all candidates, the root among them, in their old order, parents renumbered

No log-probability is above 0, so no node is above its parent, which stands before it and wins a tie: the ancestors of
whoever is kept are kept. A row is searched in blocks of ids side by side, each read once, and summed in fp32 (fp64 for
fp64 logits). Two launches, one, and two; nothing is read on the host, and no shape depends on a value.
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
from specbench.kernels.verify_greedy import VOCAB_BLOCK
from specbench.tree import UNUSED

BLOCK = 64  # candidates compared at once


class Candidates(NamedTuple):
    """Trees while they grow, in columns: the root, then each level's children behind those of the level before.

    tokens: int64 [B, C]. parents: int32 [B, C], the parent's column, -1 for the root. scores: float [B, C], the sum of
    log-probabilities below the root. A column without a node has parent UNUSED (-2), token 0 and the score -inf, or NaN
    where its logits held NaN.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor


class DraftTrees(NamedTuple):
    """tokens: int64 [B, max_nodes], 0 where no node is. parents: int32 [B, max_nodes], parents before children, -1 for
    the root, UNUSED (-2) behind the last node. scores: float [B, max_nodes], -inf behind the last node; the root's is
    0, or NaN where a candidate's was NaN. Flat, the rows of all trees are what `tree_mask` and `verify_greedy` take,
    with cu_nodes = max_nodes * arange(B+1).
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor


@triton.jit
def block_kernel(logits, best, chosen, tops, sums, vocab_size, row_stride, k, BLOCK: tl.constexpr):
    """The k best of one block of a row's ids, and its sum of exponentials, NaN where it holds NaN or inf."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    where = row * tl.num_programs(1) + tl.program_id(1)
    ids = tl.arange(0, BLOCK)
    is_token = first + ids < vocab_size
    value = tl.load(logits + row * row_stride + first + ids, mask=is_token, other=float("-inf"))
    value = value.to(best.dtype.element_ty)
    left = tl.where(value == value, value, float("-inf"))
    largest = tl.max(left, axis=0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(tops + where, largest)
    tl.store(sums + where, tl.sum(tl.exp(value - shift), axis=0))
    for rank in range(k):
        top, at = tl.max(left, axis=0, return_indices=True)  # the lowest of equals
        tl.store(best + where * k + rank, top)
        tl.store(chosen + where * k + rank, first + at)
        left = tl.where(ids == at, float("-inf"), left)


@triton.jit
def merge_kernel(best, chosen, tops, sums, tokens, log_probs, num_blocks, k, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """The k best of one row's blocks, which stand in the order of ids, as do equals within each."""
    row = tl.program_id(0).to(tl.int64)
    blocks, entries = tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    top = tl.load(tops + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf"))
    part = tl.load(sums + row * num_blocks + blocks, mask=blocks < num_blocks, other=0.0)
    largest = tl.max(top, axis=0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(part * tl.exp(top - shift), axis=0)
    left = tl.load(best + row * num_blocks * k + entries, mask=entries < num_blocks * k, other=float("-inf"))
    for rank in range(k):
        value, at = tl.max(left, axis=0, return_indices=True)
        log_prob = tl.minimum(value - shift - tl.log(tl.where(total > 0, total, 1.0)), 0.0)
        log_prob = tl.where(value > float("-inf"), log_prob, float("-inf"))
        log_prob = tl.where(total == total, log_prob, float("nan"))
        token = tl.load(chosen + row * num_blocks * k + at)
        tl.store(tokens + row * k + rank, tl.where(log_prob > float("-inf"), token, -1).to(tl.int64))
        tl.store(log_probs + row * k + rank, log_prob)
        left = tl.where(entries == at, float("-inf"), left)


@triton.jit
def expand_kernel(
    tokens,
    parents,
    scores,
    frontier,
    child_tokens,
    log_probs,
    new_tokens,
    new_parents,
    new_scores,
    new_frontier,
    num_old,
    num_children,
    frontier_len,
    width,
    UNUSED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tree a program. BLOCK: its children at once."""
    tree = tl.program_id(0).to(tl.int64)
    old, new = tree * num_old, tree * (num_old + num_children)
    child = tl.arange(0, BLOCK)
    for first in range(0, num_old, BLOCK):
        at = first + child
        is_old = at < num_old
        tl.store(new_tokens + new + at, tl.load(tokens + old + at, mask=is_old, other=0), mask=is_old)
        tl.store(new_parents + new + at, tl.load(parents + old + at, mask=is_old, other=0), mask=is_old)
        tl.store(new_scores + new + at, tl.load(scores + old + at, mask=is_old, other=0.0), mask=is_old)
    is_child = child < num_children
    place = child // (num_children // frontier_len)
    parent = tl.load(frontier + tree * frontier_len + place, mask=is_child, other=UNUSED)
    has_parent = parent >= 0
    score = tl.load(scores + old + parent, mask=has_parent, other=float("-inf"))
    score += tl.load(log_probs + tree * num_children + child, mask=has_parent, other=0.0)
    is_node = score > float("-inf")  # not where it is NaN
    token = tl.load(child_tokens + tree * num_children + child, mask=is_node, other=0)
    tl.store(new_tokens + new + num_old + child, token, mask=is_child)
    tl.store(new_parents + new + num_old + child, tl.where(is_node, parent, UNUSED), mask=is_child)
    tl.store(new_scores + new + num_old + child, score, mask=is_child)
    left = tl.where(is_node, score, float("-inf"))
    for rank in range(width):
        top, at = tl.max(left, axis=0, return_indices=True)
        tl.store(new_frontier + tree * width + rank, tl.where(top > float("-inf"), num_old + at, UNUSED))
        left = tl.where(child == at, float("-inf"), left)


@triton.jit
def keep_kernel(scores, kept, num_candidates, max_nodes, BLOCK: tl.constexpr):
    """kept: int32 [B, C], 1 for the best `max_nodes` of a tree; of equals those that stand first."""
    tree = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores + tree * num_candidates + node, mask=node < num_candidates, other=float("-inf"))
    num_before = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, num_candidates, BLOCK):
        other = first + tl.arange(0, BLOCK)
        its = tl.load(scores + tree * num_candidates + other, mask=other < num_candidates, other=float("-inf"))
        is_before = (its[None, :] > score[:, None]) | (
            (its[None, :] == score[:, None]) & (other[None, :] < node[:, None])
        )
        num_before += tl.sum(is_before.to(tl.int32), axis=1)
    is_kept = (score > float("-inf")) & (num_before < max_nodes)  # not where it is NaN
    tl.store(kept + tree * num_candidates + node, is_kept.to(tl.int32), mask=node < num_candidates)


@triton.jit
def select_kernel(
    tokens,
    parents,
    scores,
    kept,
    tree_tokens,
    tree_parents,
    tree_scores,
    num_candidates,
    max_nodes,
    UNUSED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of a tree's candidates to their rows, and the rows of that block that no candidate takes."""
    tree = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start, is_candidate = tree * num_candidates, node < num_candidates
    parent = tl.load(parents + start + node, mask=is_candidate, other=UNUSED)
    score = tl.load(scores + start + node, mask=is_candidate, other=float("-inf"))
    token = tl.load(tokens + start + node, mask=is_candidate, other=0)
    is_kept = tl.load(kept + start + node, mask=is_candidate, other=0) > 0
    row = tl.zeros([BLOCK], dtype=tl.int32)  # kept ones in front
    parent_row = tl.zeros([BLOCK], dtype=tl.int32)
    num_kept = tl.zeros([BLOCK], dtype=tl.int32)
    num_nan = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, num_candidates, BLOCK):
        other = first + tl.arange(0, BLOCK)
        counts = tl.load(kept + start + other, mask=other < num_candidates, other=0)
        its = tl.load(scores + start + other, mask=other < num_candidates, other=0.0)
        row += tl.sum(tl.where(other[None, :] < node[:, None], counts[None, :], 0), axis=1)
        parent_row += tl.sum(tl.where(other[None, :] < parent[:, None], counts[None, :], 0), axis=1)
        num_kept += counts
        num_nan += (its != its).to(tl.int32)
    score = tl.where((node == 0) & (tl.max(num_nan, axis=0) > 0), float("nan"), score)
    out = tree * max_nodes
    tl.store(tree_tokens + out + row, token, mask=is_kept)
    tl.store(tree_parents + out + row, tl.where(parent < 0, parent, parent_row), mask=is_kept)
    tl.store(tree_scores + out + row, score, mask=is_kept)
    is_empty = (node >= tl.sum(num_kept, axis=0)) & (node < max_nodes)
    tl.store(tree_tokens + out + node, tl.zeros([BLOCK], dtype=tl.int64), mask=is_empty)
    tl.store(tree_parents + out + node, tl.full([BLOCK], UNUSED, dtype=tl.int32), mask=is_empty)
    tl.store(tree_scores + out + node, tl.where(is_empty, float("-inf"), score), mask=is_empty)


def draft_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """logits: float [R, V]. Returns tokens int64 [R, k], the likeliest first, of equals the lowest id; and their
    log_probs [R, k], float32 (float64 for float64 logits).

    -1 and -inf where a row has fewer than k tokens of any probability; -1 and NaN all along a row that holds NaN or
    +inf, which has no law. k: at least 1, meant to be small: a row's best is searched k times. Twin of
    `reference.drafters.scored.draft_topk`. ValueError for shapes that do not fit.
    """
    name = "draft_topk"
    check_runs(name, logits=logits)
    check_shape(name, "logits", logits, (None, None))
    check_rows_are_dense(name, "logits", logits)
    _check_positive(name, k=k, vocab_size=logits.shape[1])
    (num_rows, vocab_size), device = logits.shape, logits.device
    block = min(VOCAB_BLOCK, next_power_of_2(vocab_size))
    num_blocks = triton.cdiv(vocab_size, block)
    wide = torch.promote_types(logits.dtype, torch.float32)
    best = torch.empty(num_rows, num_blocks, k, dtype=wide, device=device)
    chosen = torch.empty(num_rows, num_blocks, k, dtype=torch.int32, device=device)
    tops, sums = (torch.empty(num_rows, num_blocks, dtype=wide, device=device) for _ in range(2))
    tokens = torch.empty(num_rows, k, dtype=torch.int64, device=device)
    log_probs = torch.empty(num_rows, k, dtype=wide, device=device)
    if num_rows:
        block_kernel[(num_rows, num_blocks)](
            logits, best, chosen, tops, sums, vocab_size, logits.stride(0), k, BLOCK=block
        )
        merge_kernel[(num_rows,)](
            best, chosen, tops, sums, tokens, log_probs, num_blocks, k,
            BLOCKS=next_power_of_2(num_blocks), BLOCK=next_power_of_2(num_blocks * k),
        )  # fmt: skip
    return tokens, log_probs


def roots(tokens: Tensor, *, dtype: torch.dtype = torch.float32) -> tuple[Candidates, Tensor]:
    """Trees of a root alone, and the frontier int32 [B, 1] that it is. tokens: int64 [B]. dtype: of scores."""
    check_shape("roots", "tokens", tokens, (None,))
    parents = torch.full_like(tokens[:, None], -1, dtype=torch.int32)
    return Candidates(tokens[:, None], parents, torch.zeros_like(parents, dtype=dtype)), torch.zeros_like(parents)


def expand(
    grown: Candidates, frontier: Tensor, tokens: Tensor, log_probs: Tensor, *, width: int
) -> tuple[Candidates, Tensor]:
    """frontier: int32 [B, F], columns of `grown`, UNUSED for none. tokens: int64 [B, F, k] and log_probs: float
    [B, F, k], at most 0: the children of each, as `draft_topk` gives them; those of UNUSED are not read.

    Returns the candidates with F * k more columns, the children of the frontier's first node before those of its
    second; and the next frontier int32 [B, width], the best of the new ones, best first, of equals the one that stands
    first, UNUSED where there are fewer. A child of log-probability -inf or NaN is no node. Twin of
    `reference.drafters.scored.expand`. ValueError for shapes that do not fit.
    """
    name = "expand"
    num_trees, num_old = _check_candidates(name, grown, frontier=frontier, child_tokens=tokens, log_probs=log_probs)
    check_shape(name, "frontier", frontier, (num_trees, None))
    check_shape(name, "tokens", tokens, (num_trees, frontier.shape[1], None))
    check_shape(name, "log_probs", log_probs, tuple(tokens.shape))
    _check_positive(name, width=width, frontier_len=frontier.shape[1], k=tokens.shape[2])
    num_children = frontier.shape[1] * tokens.shape[2]
    shape, device = (num_trees, num_old + num_children), frontier.device
    new = Candidates(
        torch.empty(shape, dtype=torch.int64, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
        torch.empty(shape, dtype=grown.scores.dtype, device=device),
    )
    new_frontier = torch.empty(num_trees, width, dtype=torch.int32, device=device)
    if num_trees:
        expand_kernel[(num_trees,)](
            *(one.contiguous() for one in (*grown, frontier, tokens, log_probs)),
            *new, new_frontier, num_old, num_children, frontier.shape[1], width,
            UNUSED=UNUSED, BLOCK=next_power_of_2(num_children),
        )  # fmt: skip
    return new, new_frontier


def select(grown: Candidates, *, max_nodes: int) -> DraftTrees:
    """The best of all candidates. max_nodes: rows of a tree, the root's included.

    Twin of `reference.drafters.scored.select`. ValueError for shapes that do not fit.
    """
    name = "select"
    num_trees, num_candidates = _check_candidates(name, grown)
    _check_positive(name, max_nodes=max_nodes)
    shape, device = (num_trees, max_nodes), grown.scores.device
    made = DraftTrees(
        torch.empty(shape, dtype=torch.int64, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
        torch.empty(shape, dtype=grown.scores.dtype, device=device),
    )
    if num_trees:
        kept = torch.empty(num_trees, num_candidates, dtype=torch.int32, device=device)
        tokens, parents, scores = (one.contiguous() for one in grown)
        keep_kernel[(num_trees, triton.cdiv(num_candidates, BLOCK))](
            scores, kept, num_candidates, max_nodes, BLOCK=BLOCK
        )
        select_kernel[(num_trees, triton.cdiv(max(num_candidates, max_nodes), BLOCK))](
            tokens, parents, scores, kept, *made, num_candidates, max_nodes, UNUSED=UNUSED, BLOCK=BLOCK
        )
    return made


def _check_candidates(kernel: str, grown: Candidates, **others: Tensor) -> tuple[int, int]:
    """Trees and columns."""
    check_runs(kernel, **grown._asdict(), **others)
    check_shape(kernel, "scores", grown.scores, (None, None))
    num_trees, num_candidates = grown.scores.shape
    for name in ("tokens", "parents"):
        check_shape(kernel, name, getattr(grown, name), (num_trees, num_candidates))
    _check_positive(kernel, num_candidates=num_candidates)
    return num_trees, num_candidates


def _check_positive(kernel: str, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{kernel}: {name} = {number} must be at least 1")
