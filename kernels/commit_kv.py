"""Accepted rows moved up in place: behind the prefix stand the root's row and the path's, in order.

    cache[P + 1 + j] = cache[P + path[j]]   for j < num_accepted,   P = prefix_lens[b]

for every sequence, layer, key and value, and for the scales of quantised rows, in one launch. Sources and destinations
overlap: a program reads all rows of its columns before it writes any. Prefix, root and dead rows are not touched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.kernels.launch import check_indices, check_runs, check_shape, next_power_of_2

MAX_TILE = 8192  # entries that a program holds at once


@triton.jit
def commit_kv_kernel(
    pointers,
    prefix_lens,
    path,
    num_accepted,
    page_table,
    max_depth,
    path_stride,
    table_stride,
    page_stride,
    slot_stride,
    head_stride,
    ELEMENT: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    MAX_PATH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """pointers: int64, the address of each buffer. One program moves some columns of one sequence in one buffer."""
    sequence = tl.program_id(0).to(tl.int64)
    base = tl.load(pointers + tl.program_id(1)).to(tl.pointer_type(ELEMENT))
    prefix_len = tl.load(prefix_lens + sequence).to(tl.int64)
    num_moved = tl.minimum(tl.load(num_accepted + sequence), max_depth)
    step = tl.arange(0, MAX_PATH)
    is_moved = step < num_moved
    node = tl.load(path + sequence * path_stride + step, mask=is_moved, other=0).to(tl.int64)
    source, destination = prefix_len + node, prefix_len + 1 + step
    if PAGE > 0:
        table = page_table + sequence * table_stride
        source_page = tl.load(table + source // PAGE, mask=is_moved, other=0).to(tl.int64)
        destination_page = tl.load(table + destination // PAGE, mask=is_moved, other=0).to(tl.int64)
        source, destination = source % PAGE, destination % PAGE
    else:
        source_page = tl.zeros([MAX_PATH], dtype=tl.int64) + sequence
        destination_page = source_page
    column = (tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    across = (column // WIDTH) * head_stride + column % WIDTH
    is_entry = is_moved[:, None] & (column < NUM_HEADS * WIDTH)[None, :]
    reads = (source_page * page_stride + source * slot_stride)[:, None] + across[None, :]
    writes = (destination_page * page_stride + destination * slot_stride)[:, None] + across[None, :]
    rows = tl.load(base + reads, mask=is_entry)
    tl.debug_barrier()  # no thread may write what another one has still to read
    tl.store(base + writes, rows, mask=is_entry)


def commit_kv(
    buffers: Sequence[Tensor],
    prefix_lens: Tensor,
    path: Tensor,
    num_accepted: Tensor,
    *,
    page_table: Tensor | None = None,
    pointers: Tensor | None = None,
) -> None:
    """buffers: keys and values of all layers, each [B, S, Hkv, D], or pages [num_pages, T, Hkv, D] with page_table int
    [B, max_pages]; all of one shape, strides and dtype. Scales, [B, S, Hkv] or [num_pages, T, Hkv], are buffers of a
    call of their own. prefix_lens, num_accepted: int [B]. path: int [B, max_depth], nodes of the last forward, whose
    rows stand at prefix_len + node; what stands behind num_accepted is not read.

    pointers: what `pointers_of(buffers)` gave before: a CUDA graph cannot copy them from the host.

    Twin of the caches' `commit`. ValueError for shapes that do not fit. Nothing is read on the host.
    """
    name = "commit_kv"
    if not buffers:
        return
    first = buffers[0]
    check_runs(
        name, prefix_lens=prefix_lens, path=path, num_accepted=num_accepted, page_table=page_table,
        **{f"buffers[{idx}]": one for idx, one in enumerate(buffers)},
    )  # fmt: skip
    for idx, one in enumerate(buffers):
        check_shape(name, f"buffers[{idx}]", one, tuple(first.shape))
        if one.stride() != first.stride() or one.dtype != first.dtype:
            raise ValueError(
                f"{name}: buffers[{idx}] has strides {one.stride()} and is {one.dtype}, must be like buffers[0]: "
                f"{first.stride()}, {first.dtype}"
            )
    if first.dim() not in (3, 4):
        raise ValueError(f"{name}: buffers have {first.dim()} dimensions, must have 4 (rows) or 3 (scales)")
    check_shape(name, "path", path, (None, None))
    num_sequences, max_depth = path.shape
    if page_table is None:
        check_shape(name, "buffers[0]", first, (num_sequences, *first.shape[1:]))
    else:
        check_shape(name, "page_table", page_table, (num_sequences, None))
    check_shape(name, "prefix_lens", prefix_lens, (num_sequences,))
    check_shape(name, "num_accepted", num_accepted, (num_sequences,))
    check_indices(name, prefix_lens=prefix_lens, num_accepted=num_accepted, path=path, page_table=page_table)
    width = first.shape[3] if first.dim() == 4 else 1
    if width > 1 and first.stride(3) != 1:
        raise ValueError(f"{name}: buffers have stride {first.stride(3)} in their last dimension, must be 1")
    if not num_sequences or not max_depth:
        return
    rows = next_power_of_2(max_depth)
    columns = max(1, min(next_power_of_2(first.shape[2] * width), MAX_TILE // rows))
    # The bits are moved, whatever they mean.
    element = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}[first.element_size()]
    if pointers is None:
        pointers = pointers_of(buffers)
    check_shape(name, "pointers", pointers, (len(buffers),))
    commit_kv_kernel[(num_sequences, len(buffers), triton.cdiv(first.shape[2] * width, columns))](
        pointers,
        prefix_lens,
        path,
        num_accepted,
        path if page_table is None else page_table,
        max_depth,
        path.stride(0),
        0 if page_table is None else page_table.stride(0),
        *first.stride()[:3],
        ELEMENT=element,
        NUM_HEADS=first.shape[2],
        WIDTH=width,
        PAGE=0 if page_table is None else first.shape[1],
        MAX_PATH=rows,
        COLUMNS=columns,
    )


def pointers_of(buffers: Sequence[Tensor]) -> Tensor:
    """int64, on the buffers' device: where each begins."""
    return torch.tensor([one.data_ptr() for one in buffers], dtype=torch.int64).to(buffers[0].device)
