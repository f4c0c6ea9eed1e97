"""Lossless acceptance at a temperature for a whole batch, from logits and given uniforms.

    p_i = softmax(logits_i / temperature)
    chain, drafts drawn from q:    x is kept where u < p(x) / q(x); else the token is drawn from (p - q)+
    tree, drafts that were chosen: the children x of a node in turn, x is kept where u < p(x) / (1 - what is struck);
                                   else x is struck from p; behind the last one the token is drawn from what is left
    a draw: the first token at which the weights, summed up in the order of ids, exceed u times their total

One uniform a decision, taken in the order of the decisions. Neither p nor an fp32 copy of the logits is ever stored:
each pass over the vocabulary reads logits, in stretches side by side, and sums in fp32 (fp64 for fp64 logits). Four
launches, nothing is read on the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.kernels.launch import (
    TRITON_DTYPES,
    check_rows_are_dense,
    check_runs,
    check_same_device,
    check_shape,
)
from specbench.kernels.verify_greedy import stretches_of

FROM_P, FROM_RESIDUAL, FROM_REST = 0, 1, 2  # what the last token is drawn from: p, (p - q)+, p without the struck ones


class SampleResult(NamedTuple):
    """path: int32 [B, max_depth], nodes from the root's child downwards, -1 behind the last. num_accepted: int32 [B].
    bonus_tokens: int64 [B], -1 where logits hold NaN. num_coins: int32 [B], uniforms that were used."""

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
    sources,
    num_struck,
    max_depth,
    row_stride,
    q_stride,
    uniforms_stride,
    HAS_Q: tl.constexpr,
    NUM_STRETCHES: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    """One tree a program. struck: int64 [R], tokens struck from the last node's p, from the tree's first row on."""
    tree = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_nodes + tree).to(tl.int64)
    num_nodes = (tl.load(cu_nodes + tree + 1).to(tl.int64) - start).to(tl.int32)
    temperature = tl.load(temperatures + tree).to(ACC)
    nodes = tl.arange(0, BLOCK)
    node = num_nodes * 0
    depth = num_nodes * 0
    used = num_nodes * 0
    refused = num_nodes * 0
    goes_on = num_nodes > 0
    while goes_on:
        row = start + node
        total = log_total(tops, sums, row, NUM_STRETCHES)
        refused = num_nodes * 0
        mass_left = total * 0.0 + 1.0
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
                if HAS_Q:
                    q = tl.load(draft_probs + row * q_stride + token).to(ACC)
                    likely = tl.where(q > 0, p / tl.where(q > 0, q, 1.0), 0.0)
                else:
                    again = num_nodes * 0  # a copy of a sibling that was struck has no chance
                    for idx in range(refused):
                        again += (tl.load(struck + start + idx) == token).to(tl.int32)
                    p = tl.where(again > 0, 0.0, p)
                    likely = tl.where(mass_left > 0, p / tl.where(mass_left > 0, mass_left, 1.0), 0.0)
                coin = tl.load(uniforms + tree * uniforms_stride + used).to(ACC)
                used += 1
                if coin < likely:
                    found = child
                    looks = False
                else:
                    tl.store(struck + start + refused, token)
                    refused += 1
                    mass_left -= p
                    if HAS_Q:
                        looks = False  # a chain has no other child
                tl.debug_barrier()
        goes_on = found < num_nodes
        if goes_on:
            tl.store(path + tree * max_depth + depth, found)
            node = found
            depth += 1
            refused = num_nodes * 0
    for rest in range(depth, max_depth):
        tl.store(path + tree * max_depth + rest, -1)
    tl.store(num_accepted + tree, depth)
    tl.store(num_coins + tree, used + 1)
    tl.store(last_nodes + tree, node)
    if HAS_Q:
        tl.store(sources + tree, tl.where(refused > 0, 1, 0))
    else:
        tl.store(sources + tree, tl.where(refused > 0, 2, 0))
    tl.store(num_struck + tree, refused)


@triton.jit
def weights(
    logits, draft_probs, struck, row, start, token, end, temperature, total, source, num_struck,
    row_stride, q_stride, HAS_Q: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """What the last token is drawn by, for a block of token ids."""
    is_token = token < end
    value = tl.load(logits + row * row_stride + token, mask=is_token, other=float("-inf")).to(ACC)
    weight = tl.exp(value / temperature - total)
    if HAS_Q:
        q = tl.load(draft_probs + row * q_stride + token, mask=token < tl.where(source == 1, end, 0), other=0.0).to(ACC)
        weight = tl.maximum(weight - q, 0.0)
    else:
        for idx in range(num_struck):
            weight = tl.where(token == tl.load(struck + start + idx), 0.0, weight)
    return tl.where(is_token, weight, 0.0)


@triton.jit
def masses_kernel(
    logits, draft_probs, temperatures, cu_nodes, tops, sums, struck, last_nodes, sources, num_struck, masses,
    vocab_size, row_stride, q_stride, stretch,
    HAS_Q: tl.constexpr, NUM_STRETCHES: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The weight of each stretch of the vocabulary, one tree and stretch a program."""
    tree = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_nodes + tree).to(tl.int64)
    row = start + tl.load(last_nodes + tree)
    total = log_total(tops, sums, row, NUM_STRETCHES)
    temperature = tl.load(temperatures + tree).to(ACC)
    source, num = tl.load(sources + tree), tl.load(num_struck + tree)
    begin = tl.program_id(1) * stretch
    end = tl.minimum(begin + stretch, vocab_size)
    mass = tl.zeros([BLOCK], dtype=ACC)
    for offset in range(begin, end, BLOCK):
        token = offset + tl.arange(0, BLOCK)
        mass += weights(
            logits, draft_probs, struck, row, start, token, end, temperature, total, source, num,
            row_stride, q_stride, HAS_Q, ACC,
        )  # fmt: skip
    tl.store(masses + tree * NUM_STRETCHES + tl.program_id(1), tl.sum(mass, axis=0))


@triton.jit
def draw_kernel(
    logits, draft_probs, temperatures, uniforms, cu_nodes, tops, sums, struck, last_nodes, sources, num_struck, masses,
    num_coins, bonus_tokens, vocab_size, row_stride, q_stride, uniforms_stride, stretch,
    HAS_Q: tl.constexpr, NUM_STRETCHES: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The token at which the summed weights exceed the goal; the last one of any weight where rounding keeps it out."""
    tree = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_nodes + tree).to(tl.int64)
    row = start + tl.load(last_nodes + tree)
    total = log_total(tops, sums, row, NUM_STRETCHES)
    temperature = tl.load(temperatures + tree).to(ACC)
    source, num = tl.load(sources + tree), tl.load(num_struck + tree)
    stretches = tl.arange(0, NUM_STRETCHES)
    mass = tl.load(masses + tree * NUM_STRETCHES + stretches)
    whole = tl.sum(mass, axis=0)
    if whole <= 0.0:  # nothing is left: what was refused could not have been, and p stands in
        source, num = source * 0, num * 0
    coin = tl.load(uniforms + tree * uniforms_stride + tl.load(num_coins + tree) - 1).to(ACC)
    goal = coin * whole
    reached = tl.cumsum(mass, axis=0)
    hit = tl.min(tl.where((reached > goal) & (mass > 0), stretches, NUM_STRETCHES), axis=0)
    last = tl.max(tl.where(mass > 0, stretches, 0), axis=0)
    chosen = tl.minimum(hit, last)
    base = tl.sum(tl.where(stretches < chosen, mass, 0.0), axis=0)
    begin = chosen * stretch
    end = tl.minimum(begin + stretch, vocab_size)
    if whole <= 0.0:
        begin, end, goal, base = begin * 0, vocab_size, coin, base * 0.0
    found = vocab_size
    fallback = vocab_size * 0 - 1
    for offset in range(begin, end, BLOCK):
        token = offset + tl.arange(0, BLOCK)
        weight = weights(
            logits, draft_probs, struck, row, start, token, end, temperature, total, source, num,
            row_stride, q_stride, HAS_Q, ACC,
        )  # fmt: skip
        up_to = base + tl.cumsum(weight, axis=0)
        found = tl.minimum(found, tl.min(tl.where((up_to > goal) & (weight > 0), token, vocab_size), axis=0))
        fallback = tl.maximum(fallback, tl.max(tl.where(weight > 0, token, -1), axis=0))
        base += tl.sum(weight, axis=0)
    drawn = tl.where(found < vocab_size, found, fallback)
    tl.store(bonus_tokens + tree, tl.where(total == total, drawn, -1).to(tl.int64))


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
) -> SampleResult:
    """logits: float [R, V], the rows of all trees one behind the other, filters already applied as -inf. tokens,
    parents: int [R], parents within a row's own tree and before their children. uniforms: float [B, max_nodes] or
    wider, in [0, 1). temperatures: float [B], above 0. cu_nodes: int [B+1]. draft_probs: float [R, V], q of each node's
    child, for chains whose drafts were drawn (twin of the rule `chain`); None for trees of chosen drafts (twin of
    `deterministic`).

    ValueError for shapes that do not fit.
    """
    name = "verify_sample"
    check_runs(name, logits)
    check_same_device(
        name, logits=logits, tokens=tokens, parents=parents, uniforms=uniforms, temperatures=temperatures,
        cu_nodes=cu_nodes, draft_probs=draft_probs,
    )  # fmt: skip
    check_shape(name, "logits", logits, (None, None))
    num_rows, vocab_size = logits.shape
    num_trees, device = temperatures.shape[0], logits.device
    check_shape(name, "tokens", tokens, (num_rows,))
    check_shape(name, "parents", parents, (num_rows,))
    check_shape(name, "cu_nodes", cu_nodes, (num_trees + 1,))
    check_shape(name, "uniforms", uniforms, (num_trees, None))
    if uniforms.shape[1] < max_nodes:
        raise ValueError(
            f"{name}: uniforms has {uniforms.shape[1]} columns, must have at least {max_nodes} (max_nodes)"
        )
    if draft_probs is not None:
        check_shape(name, "draft_probs", draft_probs, (num_rows, vocab_size))
    for what, one in (("logits", logits), ("tokens", tokens), ("parents", parents), ("uniforms", uniforms)):
        check_rows_are_dense(name, what, one)
    acc = torch.promote_types(logits.dtype, torch.float32)
    block, num_stretches, stretch = stretches_of(vocab_size)

    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    tops, sums = (torch.empty(num_rows, num_stretches, dtype=acc, device=device) for _ in range(2))
    masses = torch.empty(num_trees, num_stretches, dtype=acc, device=device)
    struck, last_nodes, sources, num_struck = ints(num_rows, dtype=torch.int64), *(ints(num_trees) for _ in range(3))
    result = SampleResult(
        ints(num_trees, max_depth), ints(num_trees), ints(num_trees, dtype=torch.int64), ints(num_trees)
    )
    if not num_trees:
        return result
    q = logits if draft_probs is None else draft_probs
    constants = {
        "NUM_STRETCHES": num_stretches,
        "BLOCK": block,
        "ACC": TRITON_DTYPES[acc],
    }
    of_q = {"HAS_Q": draft_probs is not None}
    strides = logits.stride(0), q.stride(0)
    sums_kernel[(num_trees, max_nodes, num_stretches)](
        logits, temperatures, cu_nodes, tops, sums, vocab_size, logits.stride(0), stretch, **constants
    )
    walk_kernel[(num_trees,)](
        logits, q, temperatures, uniforms, tokens, parents, cu_nodes, tops, sums, struck,
        result.path, result.num_accepted, result.num_coins, last_nodes, sources, num_struck, max_depth,
        *strides, uniforms.stride(0),
        **of_q, NUM_STRETCHES=num_stretches, BLOCK=64, ACC=constants["ACC"],
    )  # fmt: skip
    masses_kernel[(num_trees, num_stretches)](
        logits, q, temperatures, cu_nodes, tops, sums, struck, last_nodes, sources, num_struck, masses,
        vocab_size, *strides, stretch, **of_q, **constants,
    )  # fmt: skip
    draw_kernel[(num_trees,)](
        logits, q, temperatures, uniforms, cu_nodes, tops, sums, struck, last_nodes, sources, num_struck, masses,
        result.num_coins, result.bonus_tokens, vocab_size, *strides, uniforms.stride(0), stretch, **of_q, **constants,
    )  # fmt: skip
    return result
