"""Tree attention: each row attends to the prefix behind which its tree stands and to its own ancestors.

    score(i, j) = scale * q_i . k_j,  capped: cap * tanh(score / cap),  biased: + slope * (position_j - position_i)
    lse_i = log sum_j exp score(i, j),   out_i = sum_j exp(score(i, j) - lse_i) v_j

over the prefix rows j within the window of position_i, and the tree's rows j whose bit is set in row i's mask.

Split-KV flash decoding: a program takes one key head, a block of rows (all nodes of a tree and all query heads of the
group, so that each block of keys and values is loaded once for all of them) and one stretch of the prefix; one more
stretch is the tree itself. Partial results are merged by their lse:  lse = log sum_s exp lse_s,
out = sum_s exp(lse_s - lse) out_s. Where sequences and heads alone keep the GPU busy, one program goes through prefix
and tree, and nothing is merged. The mask is N x N bits and never meets the prefix.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.kernels.launch import (
    INTERPRETED,
    TRITON_DTYPES,
    check_indices,
    check_num_rows,
    check_rows_are_dense,
    check_runs,
    check_shape,
    next_power_of_2,
)
from specbench.kernels.tree_mask import TreeMask, tree_mask

PREFIX_BLOCK = 64
TREE_BLOCK = 32  # divides 64: the keys of a block share one word of the mask
CODE_DTYPES = {torch.int8: 1, torch.float8_e4m3fn: 2}
WIDEST = 256  # head size that the blocks above are made for
STAGE_BYTES = 2**15  # keys and values that a program has under way at once, three times
MIN_STRETCH = 256  # rows of the prefix, below which a split is not worth its partial result
WIDE = 512  # rows of a block where nothing runs side by side, and prefixes or trees are long
RESIDENT = {16: 3, 32: 3, 64: 2, 128: 1}  # rows a program: programs that fit on a multiprocessor of sm_90 at once


@triton.jit
def load_rows(base, offsets, is_row, dims, HEAD_DIM: tl.constexpr, CODES: tl.constexpr, DOT: tl.constexpr):
    """Rows [BLOCK, D] at offsets int64 [BLOCK], zeros where there is none. CODES: 0 numbers, 1 int8, 2 fp8 (e4m3)."""
    raw = tl.load(base + offsets[:, None] + dims[None, :], mask=is_row[:, None] & (dims < HEAD_DIM)[None, :], other=0)
    if CODES == 2:
        # e4m3 has fp16's bits but for one exponent bit and a bias of 7 instead of 15. 0x7f and 0xff are NaN.
        code = raw.to(tl.uint16)
        half = (((code & 0x80) << 8) | ((code & 0x7F) << 7)).to(tl.float16, bitcast=True)
        wide = tl.where((code & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)
        return wide.to(DOT)
    return raw.to(DOT)


@triton.jit
def attend_stretch(
    state,
    rows,
    cache,
    tree,
    begin,
    end,
    IS_TREE: tl.constexpr,
    STEP: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CODES: tl.constexpr,
    ACC: tl.constexpr,
    DOT: tl.constexpr,
):
    """The cache rows begin..end-1 of one sequence into the running maximum, sum and output (the online softmax)."""
    top, total, out = state
    queries, is_row, node, position, slopes, window, dims = rows
    k, v, k_scale, v_scale, page_table, strides, key_head, sequence = cache
    bits, depth, start, prefix_len, num_words = tree
    for block in range(tl.cdiv(tl.maximum(end - begin, 0), STEP)):
        key = begin + block * STEP + tl.arange(0, STEP)
        is_key = key < end
        if PAGE > 0:
            page = tl.load(page_table + key // PAGE, mask=is_key, other=0).to(tl.int64)
            slot = (key % PAGE).to(tl.int64)
        else:
            page = tl.zeros([STEP], dtype=tl.int64) + sequence
            slot = key.to(tl.int64)
        k_offsets = page * strides[0] + slot * strides[1] + key_head * strides[2]
        v_offsets = page * strides[3] + slot * strides[4] + key_head * strides[5]
        keys = load_rows(k, k_offsets, is_key, dims, HEAD_DIM, CODES, DOT)
        values = load_rows(v, v_offsets, is_key, dims, HEAD_DIM, CODES, DOT)
        visible = is_row[:, None] & is_key[None, :]
        key_position = key
        if IS_TREE:
            other = key - prefix_len
            word = tl.load(bits + (start + node) * num_words + (block * STEP >> 6), mask=is_row, other=0)
            visible = visible & (((word[:, None] >> (other & 63).to(tl.int64)[None, :]) & 1) == 1)
            key_position = prefix_len + tl.load(depth + start + other, mask=is_key, other=0)
        if HAS_WINDOW:
            visible = visible & (key_position[None, :] > (position - window)[:, None])

        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee", out_dtype=ACC) * SCALE
        if CODES > 0:
            s_offsets = page * strides[6] + slot * strides[7] + key_head * strides[8]
            scores *= tl.load(k_scale + s_offsets, mask=is_key, other=0.0).to(ACC)[None, :]
        if CAP > 0.0:
            ratio = scores / CAP
            small = tl.exp(-2.0 * tl.abs(ratio))  # tanh by what cannot overflow
            scores = CAP * tl.where(ratio < 0, -1.0, 1.0) * (1.0 - small) / (1.0 + small)
        if HAS_BIAS:
            scores += slopes[:, None] * (key_position[None, :] - position[:, None]).to(ACC)
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing seen yet: exp(-inf - 0) is 0, not NaN
        weights = tl.exp(scores - shift[:, None])
        rescale = tl.exp(top - shift)
        total = total * rescale + tl.sum(weights, axis=1)
        if CODES > 0:
            weights *= tl.load(v_scale + s_offsets, mask=is_key, other=0.0).to(ACC)[None, :]
        out = out * rescale[:, None] + tl.dot(weights.to(DOT), values, input_precision="ieee", out_dtype=ACC)
        top = new_top
    return top, total, out


@triton.jit
def tree_attention_kernel(
    q,
    k,
    v,
    bits,
    depth,
    cu_nodes,
    prefix_lens,
    page_table,
    alibi_slopes,
    k_scale,
    v_scale,
    part_out,
    part_lse,
    window,
    num_words,
    num_splits,
    num_rows,
    num_row_blocks,
    table_stride,
    q_row_stride,
    q_head_stride,
    k_page_stride,
    k_slot_stride,
    k_head_stride,
    v_page_stride,
    v_slot_stride,
    v_head_stride,
    s_page_stride,
    s_slot_stride,
    s_head_stride,
    QUERY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PREFIX_BLOCK: tl.constexpr,
    TREE_BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    HAS_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CODES: tl.constexpr,
    ACC: tl.constexpr,
    DOT: tl.constexpr,
):
    """PAGE: rows a page; 0 for a contiguous cache, whose pages are whole sequences. CAP: 0 for none. CODES: 0 numbers,
    1 int8, 2 fp8. ACC: the dtype of sums, DOT: of the factors of products. Splits below num_splits are stretches of
    the prefix, the last one is the tree; without HAS_SPLITS there is one for both, and results are whole."""
    sequence = tl.program_id(0)
    split = tl.program_id(2)
    key_head = (tl.program_id(1) // num_row_blocks).to(tl.int64)
    start = tl.load(cu_nodes + sequence).to(tl.int64)
    num_nodes = (tl.load(cu_nodes + sequence + 1).to(tl.int64) - start).to(tl.int32)
    prefix_len = tl.load(prefix_lens + sequence).to(tl.int32)

    row = (tl.program_id(1) % num_row_blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    node = (row // GROUP).to(tl.int64)
    head = key_head * GROUP + row % GROUP
    is_stored = node < num_nodes
    # A row without a node sees nothing, the prefix neither: it has no bit, not even its own.
    own = tl.load(bits + (start + node) * num_words + (node >> 6), mask=is_stored, other=0)
    is_row = is_stored & (((own >> (node & 63)) & 1) == 1)
    dims = tl.arange(0, BLOCK_DIM)
    q_offsets = (start + node) * q_row_stride + head * q_head_stride
    is_number = is_stored[:, None] & (dims < HEAD_DIM)[None, :]
    queries = tl.load(q + q_offsets[:, None] + dims[None, :], mask=is_row[:, None] & is_number, other=0.0).to(DOT)
    position = prefix_len + tl.load(depth + start + node, mask=is_row, other=0)
    slopes = tl.zeros([BLOCK_ROWS], dtype=ACC)
    if HAS_BIAS:
        slopes += tl.load(alibi_slopes + head, mask=is_row, other=0.0).to(ACC)

    top = tl.full([BLOCK_ROWS], float("-inf"), dtype=ACC)
    total = tl.zeros([BLOCK_ROWS], dtype=ACC)
    out = tl.zeros([BLOCK_ROWS, BLOCK_DIM], dtype=ACC)
    rows = (queries, is_row, node, position, slopes, window, dims)
    strides = (
        k_page_stride, k_slot_stride, k_head_stride,
        v_page_stride, v_slot_stride, v_head_stride,
        s_page_stride, s_slot_stride, s_head_stride,
    )  # fmt: skip
    cache = (k, v, k_scale, v_scale, page_table + sequence.to(tl.int64) * table_stride, strides, key_head, sequence)
    tree = (bits, depth, start, prefix_len, num_words)
    if split < num_splits:
        first = 0
        if HAS_WINDOW:  # the root stands at prefix_len: what it no longer sees no row sees
            first = tl.maximum(prefix_len - window + 1, 0)
        length = tl.cdiv(tl.cdiv(prefix_len - first, num_splits), PREFIX_BLOCK) * PREFIX_BLOCK
        begin = first + split * length
        end = tl.minimum(begin + length, prefix_len)
        top, total, out = attend_stretch(
            (top, total, out), rows, cache, tree, begin, end,
            False, PREFIX_BLOCK, PAGE, HEAD_DIM, SCALE, CAP, HAS_WINDOW, HAS_BIAS, CODES, ACC, DOT,
        )  # fmt: skip
    if (split == num_splits) | (not HAS_SPLITS):
        top, total, out = attend_stretch(
            (top, total, out), rows, cache, tree, prefix_len, prefix_len + num_nodes,
            True, TREE_BLOCK, PAGE, HEAD_DIM, SCALE, CAP, HAS_WINDOW, HAS_BIAS, CODES, ACC, DOT,
        )  # fmt: skip

    divisor = tl.where(total > 0, total, 1.0)
    part = (split * num_rows + start + node) * QUERY_HEADS + head
    tl.store(part_lse + part, tl.where(total > 0, top + tl.log(divisor), float("-inf")), mask=is_stored)
    tl.store(part_out + part[:, None] * HEAD_DIM + dims[None, :], out / divisor[:, None], mask=is_number)


@triton.jit
def merge_kernel(
    part_out,
    part_lse,
    out,
    lse,
    num_parts,
    num_results,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    """Partial results of one row and head by their lse. part_out: [num_parts, num_results, D]."""
    result = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    is_result = result < num_results
    dims = tl.arange(0, BLOCK_DIM)
    top = tl.full([BLOCK], float("-inf"), dtype=ACC)
    total = tl.zeros([BLOCK], dtype=ACC)
    merged = tl.zeros([BLOCK, BLOCK_DIM], dtype=ACC)
    for part in tl.range(num_parts, num_stages=4):  # loads of the next parts are under way
        where = part * num_results + result  # int64, as result is
        one = tl.load(part_lse + where, mask=is_result, other=float("-inf"))
        new_top = tl.maximum(top, one)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight, rescale = tl.exp(one - shift), tl.exp(top - shift)
        is_number = (one > float("-inf"))[:, None] & (dims < HEAD_DIM)[None, :]
        values = tl.load(part_out + where[:, None] * HEAD_DIM + dims[None, :], mask=is_number, other=0.0)
        merged = merged * rescale[:, None] + values * weight[:, None]
        total = total * rescale + weight
        top = new_top
    divisor = tl.where(total > 0, total, 1.0)
    is_number = is_result[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out + result[:, None] * HEAD_DIM + dims[None, :], merged / divisor[:, None], mask=is_number)
    tl.store(lse + result, tl.where(total > 0, top + tl.log(divisor), float("-inf")), mask=is_result)


class Plan(NamedTuple):
    """How a launch is cut up. num_splits: of the prefix, the tree is one more; 0 where one program goes through both.
    merge_block: results a program."""

    block_rows: int
    num_row_blocks: int
    prefix_block: int
    tree_block: int
    num_splits: int
    num_warps: int
    merge_block: int


def plan(
    num_sequences: int,
    num_key_heads: int,
    num_rows: int,
    longest: int,
    *,
    row_bytes: int,
    element_size: int,
    is_coded: bool,
    num_processors: int,
    num_splits: int | None = None,
) -> Plan:
    """num_rows: of the largest tree, its nodes times the query heads of a group. longest: rows that a cache has place
    for. row_bytes, element_size: of a key as it is multiplied. is_coded: keys are int8 or fp8. num_processors:
    multiprocessors of the GPU; 1 where nothing runs side by side, which is cut into few, large pieces.

    The rest is for GPUs. Three stages of keys and values lie in shared memory at once: wider ones come in smaller
    blocks. From 65 rows on 128 share each load where registers allow: with 64 a multiprocessor fetches a key for 64
    products, which asks the L2 for more than it has before matrix units are busy. Numbers wider than 16 bits are
    multiplied without matrix units, and more than 16 rows of them do not fit into registers.
    """
    if num_processors == 1:
        # The interpreter takes milliseconds a block, whatever its size: a run of known tokens comes in wide ones.
        most = 64 if num_rows <= WIDE else WIDE
        block_rows = min(most, max(16, next_power_of_2(num_rows)))
        num_row_blocks = triton.cdiv(num_rows, block_rows)
        prefix_block = PREFIX_BLOCK if longest <= 4 * WIDE else WIDE
        tree_block = TREE_BLOCK if num_rows <= WIDE else 64
        return Plan(block_rows, num_row_blocks, prefix_block, tree_block, num_splits or 0, num_warps=4, merge_block=16)
    most = 16 if element_size > 2 else 128 if row_bytes <= 256 and not is_coded else 64
    block_rows = min(most, max(16, next_power_of_2(num_rows)))
    num_row_blocks = triton.cdiv(num_rows, block_rows)
    prefix_block = max(16, min(PREFIX_BLOCK, STAGE_BYTES // (2 * row_bytes)))
    if num_splits is None:
        slots = num_processors * RESIDENT[block_rows]
        num_splits = _even_splits(num_sequences * num_key_heads * num_row_blocks, slots, longest // MIN_STRETCH)
        if num_splits == 1:
            num_splits = 0  # a split of its own for the tree would cost a partial result and a merge
    num_warps = 8 if block_rows == 128 else 4
    return Plan(block_rows, num_row_blocks, prefix_block, min(TREE_BLOCK, prefix_block), num_splits, num_warps, 4)


@lru_cache  # asked for at every launch, and hundreds of numbers are tried
def _even_splits(num_programs: int, slots: int, most: int) -> int:
    """The fewest splits with which the GPU's last wave of programs is nearly as full as it can be."""
    fullness = {}
    for num in range(1, max(1, min(most, slots)) + 1):
        waves = num * num_programs / slots
        fullness[num] = waves / triton.cdiv(num * num_programs, slots)
    best = max(fullness.values(), default=1.0)
    return min(num for num, full in fullness.items() if full >= 0.95 * best)


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parents: Tensor | TreeMask,
    prefix_lens: Tensor,
    scale: float,
    *,
    cu_nodes: Tensor,
    max_nodes: int,
    page_table: Tensor | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    num_splits: int | None = None,
    prefix_only: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns out [R, Hq, D] in q's dtype and lse float32 [R, Hq] (float64 for fp64). Nothing is read on the host.

    Arguments as in `reference.attention.tree_attention`, and: parents may be a `TreeMask` that was made before, for all
    layers of a forward. max_nodes: of the largest tree. num_splits: stretches of the prefix that are computed side by
    side with the tree, 0 for prefix and tree by one program, None for as many as keep the GPU busy. prefix_only: rows
    see their prefix and nothing of their tree: plain flash decoding, which the benchmark holds tree attention against.
    k, v of int8 or float8_e4m3fn need scales. ValueError for shapes, dtypes and strides that do not fit, CannotRun
    where there is nothing to run on.
    """
    codes = _check(q, k, v, prefix_lens, cu_nodes, page_table, alibi_slopes, k_scale, v_scale)
    check_num_rows("tree_attention", q.shape[0], prefix_lens.shape[0], max_nodes)
    for option, given, least in (("window", window, 1), ("num_splits", num_splits, 0)):
        if given is not None and (int(given) != given or given < least):
            raise ValueError(f"tree_attention: {option} = {given} must be None or a whole number >= {least}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"tree_attention: soft_cap = {soft_cap} must be None or > 0")
    if isinstance(parents, TreeMask):
        mask = parents
    else:
        check_runs("tree_attention", q=q, parents=parents)
        check_shape("tree_attention", "parents", parents, (q.shape[0],))
        mask = tree_mask(parents, prefix_lens, cu_nodes=cu_nodes, max_nodes=max_nodes)
    num_rows, num_query_heads, head_dim = q.shape
    num_key_heads, num_sequences = k.shape[2], prefix_lens.shape[0]
    group = num_query_heads // num_key_heads
    acc = torch.promote_types(q.dtype, torch.float32)
    block_dim = max(16, next_power_of_2(head_dim))
    page = 0 if page_table is None else k.shape[1]
    longest = k.shape[1] if page_table is None else page_table.shape[1] * page
    cut = plan(
        num_sequences,
        num_key_heads,
        max_nodes * group,
        longest,
        row_bytes=block_dim * q.element_size(),
        element_size=q.element_size(),
        is_coded=codes > 0,
        num_processors=_num_processors(q.device),
        num_splits=num_splits,
    )
    num_parts = max(1, cut.num_splits) if prefix_only else cut.num_splits + 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=acc, device=q.device)
    if not num_rows:
        return out, lse
    part_out, part_lse = out, lse
    if num_parts > 1:
        part_out = torch.empty(num_parts, *q.shape, dtype=acc, device=q.device)
        part_lse = torch.empty(num_parts, *q.shape[:2], dtype=acc, device=q.device)
    scale_strides = (0, 0, 0) if k_scale is None else k_scale.stride()
    tree_attention_kernel[(num_sequences, num_key_heads * cut.num_row_blocks, num_parts)](
        q,
        *((one.view(torch.uint8) if one.dtype == torch.float8_e4m3fn else one) for one in (k, v)),
        mask.bits,
        mask.depth,
        cu_nodes,
        prefix_lens,
        cu_nodes if page_table is None else page_table,
        q if alibi_slopes is None else alibi_slopes,
        q if k_scale is None else k_scale,
        q if v_scale is None else v_scale,
        part_out,
        part_lse,
        0 if window is None else window,
        mask.bits.shape[1],
        max(1, cut.num_splits),
        num_rows,
        cut.num_row_blocks,
        0 if page_table is None else page_table.stride(0),
        *q.stride()[:2],
        *k.stride()[:3],
        *v.stride()[:3],
        *scale_strides,
        QUERY_HEADS=num_query_heads,
        GROUP=group,
        PAGE=page,
        HEAD_DIM=head_dim,
        BLOCK_DIM=block_dim,
        BLOCK_ROWS=cut.block_rows,
        PREFIX_BLOCK=cut.prefix_block,
        TREE_BLOCK=cut.tree_block,
        SCALE=float(scale),
        CAP=float(soft_cap or 0.0),
        HAS_SPLITS=cut.num_splits > 0 or prefix_only,
        HAS_WINDOW=window is not None,
        HAS_BIAS=alibi_slopes is not None,
        CODES=codes,
        ACC=TRITON_DTYPES[acc],
        # The interpreter multiplies the bit patterns of bf16.
        DOT=TRITON_DTYPES[acc if INTERPRETED else q.dtype],
        num_warps=cut.num_warps,
    )
    if num_parts == 1:
        return out, lse
    num_results = num_rows * num_query_heads
    merge_kernel[(triton.cdiv(num_results, cut.merge_block),)](
        part_out,
        part_lse,
        out,
        lse,
        num_parts,
        num_results,
        HEAD_DIM=head_dim,
        BLOCK_DIM=block_dim,
        BLOCK=cut.merge_block,
        ACC=TRITON_DTYPES[acc],
    )
    return out, lse


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_lens: Tensor,
    cu_nodes: Tensor,
    page_table: Tensor | None,
    alibi_slopes: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> int:
    """The kernel's CODES; ValueError says what does not fit."""
    name = "tree_attention"
    check_runs(
        name, q=q, k=k, v=v, prefix_lens=prefix_lens, cu_nodes=cu_nodes, page_table=page_table,
        alibi_slopes=alibi_slopes, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    check_shape(name, "q", q, (None, None, None))
    num_sequences = prefix_lens.shape[0]
    first = num_sequences if page_table is None else None
    check_shape(name, "k", k, (first, None, None, q.shape[2]))
    check_shape(name, "v", v, tuple(k.shape))
    check_shape(name, "cu_nodes", cu_nodes, (num_sequences + 1,))
    if page_table is not None:
        check_shape(name, "page_table", page_table, (num_sequences, None))
    check_indices(name, prefix_lens=prefix_lens, cu_nodes=cu_nodes, page_table=page_table, alibi_slopes=alibi_slopes)
    if not k.shape[2]:
        raise ValueError(f"{name}: k has no heads")
    if q.shape[1] % k.shape[2]:
        raise ValueError(f"{name}: q has {q.shape[1]} heads, must be a multiple of k's {k.shape[2]}")
    if q.shape[2] > WIDEST:
        raise ValueError(f"{name}: head size {q.shape[2]} must be at most {WIDEST}")
    if alibi_slopes is not None:
        check_shape(name, "alibi_slopes", alibi_slopes, (q.shape[1],))
    for what, one in (("q", q), ("k", k), ("v", v)):
        check_rows_are_dense(name, what, one)
    if q.dtype not in TRITON_DTYPES:
        raise ValueError(f"{name}: q is {q.dtype}, must be one of {', '.join(map(str, TRITON_DTYPES))}")
    if k.dtype != v.dtype or k.dtype not in (q.dtype, *CODE_DTYPES):
        raise ValueError(f"{name}: k is {k.dtype} and v is {v.dtype}, must both be {q.dtype}, int8 or float8_e4m3fn")
    codes = CODE_DTYPES.get(k.dtype, 0)
    if (k_scale is not None, v_scale is not None) != (bool(codes), bool(codes)):
        raise ValueError(f"{name}: k of {k.dtype} must come {'with' if codes else 'without'} k_scale and v_scale")
    if k_scale is not None and v_scale is not None:
        check_shape(name, "k_scale", k_scale, tuple(k.shape[:3]))
        check_shape(name, "v_scale", v_scale, tuple(k.shape[:3]))
        if k_scale.stride() != v_scale.stride():
            raise ValueError(f"{name}: v_scale has strides {v_scale.stride()}, must have k_scale's {k_scale.stride()}")
    return codes
