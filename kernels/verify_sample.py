"""Lossless acceptance at a temperature for a whole batch, from logits and given uniforms.

    p_i = softmax(logits_i / temperature);   the children x of a node are judged in turn
    chosen drafts: x is kept where u < p(x) / (1 - what is struck), or else struck from p
    drawn drafts:  x is kept where u < p_m(x) / q_m(x), or else p_m+1 = (p_m - q_m)+ / its sum, and q_m+1 is q_m, or q_m
                   without x where siblings were drawn without replacement, / its sum
    behind the last one the token is drawn from what is left of p: the first token at which the weights, summed up in
    the order of ids, exceed u times their total

One uniform a decision, taken in the order of the decisions. A chain is a tree of single children.

What m refusals leave of p is held as two numbers. q_m is a multiple of q wherever nothing is struck, so that

    p_m = (p - share_m q)+ / mass_m,  mass_m = sum of (p - share_m q)+,  share_m+1 = share_m + mass_m / (q's sum there)

and at refused tokens, where p_m was below q_m, nothing is left. Only the sums need a pass over the vocabulary, and only
once a second sibling is judged. The walk makes it, one program a tree, since none but it knows which node is judged.

Neither p nor an fp32 copy of the logits is ever stored: each pass over the vocabulary reads logits, but for the walk's
in stretches side by side, and sums in fp32 (fp64 for fp64 logits). Four launches, nothing is read on the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.kernels.launch import (
    TRITON_DTYPES,
    check_num_rows,
    check_rows_are_dense,
    check_runs,
    check_shape,
)
from specbench.kernels.verify_greedy import stretches_of

NODE_BLOCK = 64  # nodes looked at at once


def warps_of_walk(has_q: bool) -> int:
    """More where one program may pass over the whole vocabulary."""
    return 8 if has_q else 4


class SampleResult(NamedTuple):
    """path: int32 [B, max_depth], nodes from the root's child downwards, -1 behind the last. num_accepted: int32 [B].
    bonus_tokens: int64 [B], -1 where the logits or the q that decide it hold NaN. num_coins: int32 [B], uniforms that
    were used."""

    path: Tensor
    num_accepted: Tensor
    bonus_tokens: Tensor
    num_coins: Tensor


@triton.jit
def sums_kernel(
    logits,
    temperatures,
    cu_nodes,
    tops,
    sums,
    vocab_size,
    row_stride,
    stretch,
    NUM_STRETCHES: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    """The largest scaled logit of a row's stretch, and the sum of exponentials below it."""
    tree = tl.program_id(0)
    start = tl.load(cu_nodes + tree).to(tl.int64)
    num_nodes = tl.load(cu_nodes + tree + 1).to(tl.int64) - start
    if tl.program_id(1) < num_nodes:
        row = start + tl.program_id(1)
        temperature = tl.load(temperatures + tree).to(ACC)
        begin = tl.program_id(2) * stretch
        end = tl.minimum(begin + stretch, vocab_size)
        ids = tl.arange(0, BLOCK)
        top = tl.full([BLOCK], float("-inf"), dtype=ACC)
        total = tl.zeros([BLOCK], dtype=ACC)
        for offset in range(begin, end, BLOCK):
            token = offset + ids
            value = tl.load(logits + row * row_stride + token, mask=token < end, other=float("-inf")).to(ACC)
            value = value / temperature
            new_top = tl.where((value > top) | (value != value), value, top)
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            total = total * tl.exp(top - shift) + tl.exp(value - shift)
            top = new_top
        largest = tl.max(tl.where(top == top, top, float("-inf")), axis=0)
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        where = row * NUM_STRETCHES + tl.program_id(2)
        tl.store(tops + where, largest)
        tl.store(sums + where, tl.sum(total * tl.exp(top - shift), axis=0))  # NaN where the stretch holds NaN


@triton.jit
def log_total(tops, sums, row, NUM_STRETCHES: tl.constexpr):
    """log of the sum of exponentials of a row's scaled logits."""
    stretches = tl.arange(0, NUM_STRETCHES)
    top = tl.load(tops + row * NUM_STRETCHES + stretches)
    part = tl.load(sums + row * NUM_STRETCHES + stretches)
    largest = tl.max(top, axis=0)
    return largest + tl.log(tl.sum(part * tl.exp(top - largest), axis=0))


@triton.jit
def is_struck(struck, num_struck, token):
    """Whether a token, or each of a block, is among those struck."""
    found = token != token
    for idx in range(num_struck):
        found = found | (token == tl.load(struck + idx))
    return found


@triton.jit
def weights(
    logits, draft_probs, struck, row, token, end, temperature, total, share, num_struck, row_stride, q_stride,
    HAS_Q: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """What is left of p for a block of token ids, and q there, both zero where struck; q is read where it counts."""
    is_left = (token < end) & (is_struck(struck, num_struck, token) == 0)
    value = tl.load(logits + row * row_stride + token, mask=is_left, other=float("-inf")).to(ACC)
    weight = tl.exp(value / temperature - total)
    q = weight * 0.0
    if HAS_Q:
        counts = is_left & (token < tl.where(share > 0, end, 0))
        q = tl.load(draft_probs + row * q_stride + token, mask=counts, other=0.0).to(ACC)
        weight -= share * q
    return tl.where(is_left, tl.where(weight < 0, 0.0, weight), 0.0), q  # NaN stays


@triton.jit
def walk_kernel(
    logits,
    draft_probs,
    temperatures,
    uniforms,
    tokens,
    parents,
    cu_nodes,
    tops,
    sums,
    struck,
    path,
    num_accepted,
    num_coins,
    last_nodes,
    shares,
    num_struck,
    max_depth,
    vocab_size,
    row_stride,
    q_stride,
    uniforms_stride,
    HAS_Q: tl.constexpr,
    STRIKE: tl.constexpr,
    NUM_STRETCHES: tl.constexpr,
    BLOCK: tl.constexpr,
    VOCAB_BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    """One tree a program. struck: int64 [R], the last node's refused tokens, from the tree's first row on. shares:
    [B, 3], of q, to be taken off p; where nothing is left then, the share before the last refusal and its mass."""
    tree = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_nodes + tree).to(tl.int64)
    num_nodes = (tl.load(cu_nodes + tree + 1).to(tl.int64) - start).to(tl.int32)
    temperature = tl.load(temperatures + tree).to(ACC)
    nodes = tl.arange(0, BLOCK)
    node = num_nodes * 0
    depth = num_nodes * 0
    used = num_nodes * 0
    refused = num_nodes * 0
    share = temperature * 0.0
    next_share = temperature * 0.0
    p_left = temperature * 0.0 + 1.0
    goes_on = num_nodes > 0
    while goes_on:
        row = start + node
        total = log_total(tops, sums, row, NUM_STRETCHES)
        refused = num_nodes * 0
        share = temperature * 0.0
        next_share = temperature * 0.0
        p_left = temperature * 0.0 + 1.0  # sums of what is left of p and of q
        q_left = temperature * 0.0 + 1.0
        tried = node  # children stand behind their parent
        found = num_nodes
        looks = depth < max_depth
        while looks:
            child = num_nodes
            for first in range(0, num_nodes, BLOCK):
                other = first + nodes
                parent = tl.load(parents + start + other, mask=other < num_nodes, other=-1).to(tl.int32)
                fits = (parent == node) & (other > tried)
                child = tl.minimum(child, tl.min(tl.where(fits, other, num_nodes), axis=0))
            looks = child < num_nodes
            if looks:
                tried = child
                token = tl.load(tokens + start + child).to(tl.int64)
                p = tl.exp(tl.load(logits + row * row_stride + token).to(ACC) / temperature - total)
                p = tl.where(is_struck(struck + start, refused, token), 0.0, p)  # a copy has no chance
                q = p * 0.0 + 1.0
                if HAS_Q:
                    q = tl.load(draft_probs + row * q_stride + token).to(ACC)
                    if next_share > share:
                        p_sums = tl.zeros([VOCAB_BLOCK], dtype=ACC)
                        q_sums = tl.zeros([VOCAB_BLOCK], dtype=ACC)
                        for offset in range(0, vocab_size, VOCAB_BLOCK):
                            ids = offset + tl.arange(0, VOCAB_BLOCK)
                            some_p, some_q = weights(
                                logits, draft_probs, struck + start, row, ids, vocab_size, temperature, total,
                                next_share, refused, row_stride, q_stride, HAS_Q, ACC,
                            )  # fmt: skip
                            p_sums += some_p
                            q_sums += some_q
                        new_p_left = tl.sum(p_sums, axis=0)
                        if new_p_left > 0:  # else p was q, and its draft could not have been refused
                            p_left = new_p_left
                            share = next_share
                        if STRIKE:
                            q_left = tl.sum(q_sums, axis=0)
                    p = tl.maximum(p - share * q, 0.0)
                whole = p_left * q
                likely = tl.where(whole > 0, p * q_left / tl.where(whole > 0, whole, 1.0), 0.0)
                coin = tl.load(uniforms + tree * uniforms_stride + used).to(ACC)
                used += 1
                if coin < likely:
                    found = child
                    looks = False
                else:
                    if HAS_Q:
                        next_share = share + tl.where(q_left > 0, p_left / tl.where(q_left > 0, q_left, 1.0), 0.0)
                    else:
                        p_left -= p
                    if q > 0:
                        tl.store(struck + start + refused, token)
                        refused += 1
                tl.debug_barrier()
        goes_on = found < num_nodes
        if goes_on:
            tl.store(path + tree * max_depth + depth, found)
            node = found
            depth += 1
            refused = num_nodes * 0
            next_share = temperature * 0.0
    if not HAS_Q:
        p_left = temperature * 0.0 + 1.0
    for rest in range(depth, max_depth):
        tl.store(path + tree * max_depth + rest, -1)
    tl.store(num_accepted + tree, depth)
    tl.store(num_coins + tree, used + 1)
    tl.store(last_nodes + tree, node)
    tl.store(shares + tree * 3, next_share)
    tl.store(shares + tree * 3 + 1, share)
    tl.store(shares + tree * 3 + 2, p_left)
    tl.store(num_struck + tree, refused)


@triton.jit
def masses_kernel(
    logits, draft_probs, temperatures, cu_nodes, tops, sums, struck, last_nodes, shares, num_struck, masses,
    vocab_size, row_stride, q_stride, stretch,
    HAS_Q: tl.constexpr, NUM_STRETCHES: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The weight of each stretch of the vocabulary, one tree and stretch a program."""
    tree = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_nodes + tree).to(tl.int64)
    row = start + tl.load(last_nodes + tree)
    total = log_total(tops, sums, row, NUM_STRETCHES)
    temperature = tl.load(temperatures + tree).to(ACC)
    share, num = tl.load(shares + tree * 3), tl.load(num_struck + tree)
    begin = tl.program_id(1) * stretch
    end = tl.minimum(begin + stretch, vocab_size)
    mass = tl.zeros([BLOCK], dtype=ACC)
    for offset in range(begin, end, BLOCK):
        token = offset + tl.arange(0, BLOCK)
        weight, _ = weights(
            logits, draft_probs, struck + start, row, token, end, temperature, total, share, num,
            row_stride, q_stride, HAS_Q, ACC,
        )  # fmt: skip
        mass += weight
    tl.store(masses + tree * NUM_STRETCHES + tl.program_id(1), tl.sum(mass, axis=0))


@triton.jit
def draw_kernel(
    logits, draft_probs, temperatures, uniforms, cu_nodes, tops, sums, struck, last_nodes, shares, num_struck, masses,
    num_coins, bonus_tokens, vocab_size, row_stride, q_stride, uniforms_stride, stretch,
    HAS_Q: tl.constexpr, NUM_STRETCHES: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The token at which the summed weights exceed the goal; the last one of any weight where rounding keeps it out."""
    tree = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_nodes + tree).to(tl.int64)
    row = start + tl.load(last_nodes + tree)
    total = log_total(tops, sums, row, NUM_STRETCHES)
    temperature = tl.load(temperatures + tree).to(ACC)
    share, num = tl.load(shares + tree * 3), tl.load(num_struck + tree)
    stretches = tl.arange(0, NUM_STRETCHES)
    mass = tl.load(masses + tree * NUM_STRETCHES + stretches)
    whole = tl.sum(mass, axis=0)
    coin = tl.load(uniforms + tree * uniforms_stride + tl.load(num_coins + tree) - 1).to(ACC)
    goal = coin * whole
    reached = tl.cumsum(mass, axis=0)
    hit = tl.min(tl.where((reached > goal) & (mass > 0), stretches, NUM_STRETCHES), axis=0)
    last = tl.max(tl.where(mass > 0, stretches, 0), axis=0)
    chosen = tl.minimum(hit, last)
    base = tl.sum(tl.where(stretches < chosen, mass, 0.0), axis=0)
    begin = chosen * stretch
    end = tl.minimum(begin + stretch, vocab_size)
    if whole <= 0.0:  # nothing is left: what was refused last could not have been, and what it was refused by stays
        share, num, goal = tl.load(shares + tree * 3 + 1), num * 0, coin * tl.load(shares + tree * 3 + 2)
        begin, end, base = begin * 0, vocab_size, base * 0.0
    found = vocab_size
    fallback = vocab_size * 0 - 1
    for offset in range(begin, end, BLOCK):
        token = offset + tl.arange(0, BLOCK)
        weight, _ = weights(
            logits, draft_probs, struck + start, row, token, end, temperature, total, share, num,
            row_stride, q_stride, HAS_Q, ACC,
        )  # fmt: skip
        up_to = base + tl.cumsum(weight, axis=0)
        found = tl.minimum(found, tl.min(tl.where((up_to > goal) & (weight > 0), token, vocab_size), axis=0))
        fallback = tl.maximum(fallback, tl.max(tl.where(weight > 0, token, -1), axis=0))
        base += tl.sum(weight, axis=0)
    drawn = tl.where(found < vocab_size, found, fallback)
    is_number = (total == total) & (whole == whole)
    tl.store(bonus_tokens + tree, tl.where(is_number, drawn, -1).to(tl.int64))


def verify_sample(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    uniforms: Tensor,
    temperatures: Tensor,
    *,
    cu_nodes: Tensor,
    max_nodes: int,
    max_depth: int,
    draft_probs: Tensor | None = None,
    without_replacement: bool = False,
) -> SampleResult:
    """logits: float [R, V], the rows of all trees one behind the other, filters already applied as -inf. tokens,
    parents: int [R], parents within a row's own tree and before their children. uniforms: float [B, max_nodes] or
    wider, in [0, 1). temperatures: float [B], above 0. cu_nodes: int [B+1].

    draft_probs: None for drafts that were chosen (twin of the rule `deterministic`); else float [R, V], q of each
    node's children, for those that were drawn, in the order of their draws: independently (`recursive`, `chain`), or
    without_replacement (the rule of that name). Rows of nodes without children are not read.

    ValueError for shapes that do not fit.
    """
    name = "verify_sample"
    check_runs(
        name, logits=logits, tokens=tokens, parents=parents, uniforms=uniforms, temperatures=temperatures,
        cu_nodes=cu_nodes, draft_probs=draft_probs,
    )  # fmt: skip
    check_shape(name, "logits", logits, (None, None))
    num_rows, vocab_size = logits.shape
    num_trees, device = temperatures.shape[0], logits.device
    check_shape(name, "tokens", tokens, (num_rows,))
    check_shape(name, "parents", parents, (num_rows,))
    check_shape(name, "cu_nodes", cu_nodes, (num_trees + 1,))
    check_num_rows(name, num_rows, num_trees, max_nodes)
    check_shape(name, "uniforms", uniforms, (num_trees, None))
    if uniforms.shape[1] < max_nodes:
        raise ValueError(
            f"{name}: uniforms has {uniforms.shape[1]} columns, must have at least {max_nodes} (max_nodes)"
        )
    q = logits if draft_probs is None else draft_probs
    check_shape(name, "draft_probs", q, (num_rows, vocab_size))
    if without_replacement and draft_probs is None:
        raise ValueError(f"{name}: draft_probs is None, must be q where siblings were drawn without replacement")
    for what, one in (
        ("logits", logits), ("draft_probs", q), ("tokens", tokens), ("parents", parents), ("uniforms", uniforms),
        ("temperatures", temperatures), ("cu_nodes", cu_nodes),
    ):  # fmt: skip
        check_rows_are_dense(name, what, one)
    acc = torch.promote_types(logits.dtype, torch.float32)
    block, num_stretches, stretch = stretches_of(vocab_size)

    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    tops, sums = (torch.empty(num_rows, num_stretches, dtype=acc, device=device) for _ in range(2))
    masses = torch.empty(num_trees, num_stretches, dtype=acc, device=device)
    shares = torch.empty(num_trees, 3, dtype=acc, device=device)
    struck, last_nodes, num_struck = ints(num_rows, dtype=torch.int64), ints(num_trees), ints(num_trees)
    result = SampleResult(
        ints(num_trees, max_depth), ints(num_trees), ints(num_trees, dtype=torch.int64), ints(num_trees)
    )
    if not num_trees:
        return result
    constants = {"NUM_STRETCHES": num_stretches, "BLOCK": block, "ACC": TRITON_DTYPES[acc]}
    of_q = {"HAS_Q": draft_probs is not None}
    strides = logits.stride(0), q.stride(0)
    sums_kernel[(num_trees, max_nodes, num_stretches)](
        logits, temperatures, cu_nodes, tops, sums, vocab_size, logits.stride(0), stretch, **constants
    )
    walk_kernel[(num_trees,)](
        logits, q, temperatures, uniforms, tokens, parents, cu_nodes, tops, sums, struck,
        result.path, result.num_accepted, result.num_coins, last_nodes, shares, num_struck, max_depth,
        vocab_size, *strides, uniforms.stride(0), **of_q, STRIKE=without_replacement,
        NUM_STRETCHES=num_stretches, BLOCK=NODE_BLOCK, VOCAB_BLOCK=block, ACC=constants["ACC"],
        num_warps=warps_of_walk(draft_probs is not None),
    )  # fmt: skip
    masses_kernel[(num_trees, num_stretches)](
        logits, q, temperatures, cu_nodes, tops, sums, struck, last_nodes, shares, num_struck, masses,
        vocab_size, *strides, stretch, **of_q, **constants,
    )  # fmt: skip
    draw_kernel[(num_trees,)](
        logits, q, temperatures, uniforms, cu_nodes, tops, sums, struck, last_nodes, shares, num_struck, masses,
        result.num_coins, result.bonus_tokens, vocab_size, *strides, uniforms.stride(0), stretch, **of_q, **constants,
    )  # fmt: skip
    return result
