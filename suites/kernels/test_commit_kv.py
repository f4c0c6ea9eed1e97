"""`kernels.commit_kv` against rows moved one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from specbench.kernels.commit_kv import commit_kv
from specbench.suites.kernels import DEVICE
from specbench.suites.kernels.cases import CommitCase, commit_cases
from specbench.suites.kernels.comparisons import moves_rightly
from specbench.suites.kernels.drawing import drawn


@drawn(600)
@given(case=commit_cases())
def test_the_paths_rows_stand_behind_the_root_and_nothing_else_has_moved(case: CommitCase) -> None:
    assert moves_rightly(commit_kv, case)


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
