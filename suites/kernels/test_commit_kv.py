"""`kernels.commit_kv` against rows moved one by one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specbench.kernels.commit_kv import commit_kv
from specbench.suites.kernels import DEVICE
from specbench.suites.kernels.comparisons import rows_moved
from specbench.suites.kernels.drawing import drawn

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class CommitCase:
    """paths: nodes of each sequence, in any order. page: rows a page, 0 for contiguous. width: 0 for scales."""

    paths: tuple[tuple[int, ...], ...]
    prefix_lens: tuple[int, ...]
    num_buffers: int
    num_heads: int
    width: int
    dtype: torch.dtype
    page: int
    strided: bool
    seed: int


@st.composite
def commit_cases(draw: st.DrawFn) -> CommitCase:
    paths = []
    for _ in range(draw(st.integers(1, 3))):
        nodes = draw(st.lists(st.integers(1, 70), unique=True, max_size=draw(st.sampled_from([3, 8, 20]))))
        paths.append(tuple(sorted(nodes) if draw(st.booleans()) else nodes))
    return CommitCase(
        paths=tuple(paths),
        prefix_lens=tuple(draw(st.sampled_from([0, 1, 5, 16, 63])) for _ in paths),
        num_buffers=draw(st.sampled_from([1, 2, 5])),
        num_heads=draw(st.sampled_from([1, 2, 3])),
        width=draw(st.sampled_from([0, 1, 5, 8, 128])),
        dtype=draw(st.sampled_from(DTYPES)),
        page=draw(st.sampled_from([0, 1, 3, 16])),
        strided=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


def buffers_of(case: CommitCase, generator: torch.Generator) -> tuple[list[Tensor], Tensor | None]:
    num_rows = max(case.prefix_lens) + 72
    num_sequences, first, table = len(case.paths), (len(case.paths), num_rows), None
    if case.page:
        per_sequence = -(-num_rows // case.page)
        first = (num_sequences * per_sequence, case.page)
        table = torch.randperm(first[0], generator=generator).view(num_sequences, per_sequence).to(torch.int32)
    shape = (*first, case.num_heads, *([case.width] if case.width else []))
    made = [torch.randint(-99, 99, shape, generator=generator).to(case.dtype) for _ in range(case.num_buffers)]
    if case.strided:
        made = [one.transpose(1, 2).contiguous().transpose(1, 2) for one in made]
    return [one.to(DEVICE) for one in made], None if table is None else table.to(DEVICE)


@drawn(600)
@given(case=commit_cases())
def test_the_paths_rows_stand_behind_the_root_and_nothing_else_has_moved(case: CommitCase) -> None:
    buffers, table = buffers_of(case, torch.Generator().manual_seed(case.seed))
    prefix_lens = torch.tensor(case.prefix_lens, dtype=torch.int32, device=DEVICE)
    num_accepted = torch.tensor([len(one) for one in case.paths], dtype=torch.int32, device=DEVICE)
    longest = max(1, *(len(one) for one in case.paths)) + 1
    filled = [(*one, *(77 for _ in range(longest - len(one)))) for one in case.paths]  # what stands behind is not read
    path = torch.tensor(filled, dtype=torch.int32, device=DEVICE)
    right = [rows_moved(one, prefix_lens, path, num_accepted, table) for one in buffers]
    commit_kv(buffers, prefix_lens, path, num_accepted, page_table=table)
    assert all(torch.equal(mine, wanted) for mine, wanted in zip(buffers, right, strict=True))


def test_nan_moves_as_it_is() -> None:
    """Bits are moved, not numbers."""
    buffer = torch.full((1, 6, 1, 4), torch.nan, dtype=torch.float32, device=DEVICE)
    buffer.view(torch.int32)[0, 3] = 0x7FC01234
    one = torch.tensor([1], dtype=torch.int32, device=DEVICE)
    commit_kv([buffer], one, torch.tensor([[2]], dtype=torch.int32, device=DEVICE), one)
    assert (buffer.view(torch.int32)[0, 2] == 0x7FC01234).all()


def test_buffers_of_other_strides_are_refused() -> None:
    one, other = torch.zeros(1, 8, 2, 4, device=DEVICE), torch.zeros(1, 2, 8, 4, device=DEVICE).transpose(1, 2)
    ints = torch.tensor([1], dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"buffers\[1\] has strides .* must be like buffers\[0\]"):
        commit_kv([one, other], ints, ints[None], ints)
