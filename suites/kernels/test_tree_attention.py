"""`kernels.tree_attention` against `reference.attention`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from specbench.cases import AttentionCase
from specbench.checks.attention import arguments
from specbench.kernels import tree_attention as module
from specbench.kernels.tree_attention import Plan, plan, tree_attention
from specbench.suites.kernels import DEVICE
from specbench.suites.kernels.cases import attention_case, attention_cases, on_device
from specbench.suites.kernels.comparisons import asked_of, attention_differences, decodes_fp8, finds_far_pages
from specbench.suites.kernels.drawing import drawn

kernel = asked_of(tree_attention)


@drawn(500)
@given(case=attention_cases())
def test_every_row_attends_to_its_prefix_and_its_path(case: AttentionCase) -> None:
    assert not attention_differences(case, kernel)


CHAIN = (-1, 0, 1, 2)


@pytest.mark.parametrize("num_nodes", [300, 1024])
def test_large_trees(num_nodes: int) -> None:
    """Words of the mask beyond the first, rows beyond the first block. Every 7th node hangs on the root."""
    parents = (-1, *(0 if node % 7 == 0 else node // 2 for node in range(1, num_nodes)))
    case = attention_case([parents], [65], num_key_heads=1, group=1, head_dim=8, page=16, window=70)
    assert not attention_differences(case, kernel)


@pytest.mark.parametrize("prefix_len", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize("num_splits", [1, 4, 9])
def test_any_number_of_splits_is_merged(prefix_len: int, num_splits: int) -> None:
    """More splits than blocks leave some of them empty."""
    case = attention_case([CHAIN, (-1, 0, 0)], [prefix_len, 3], num_key_heads=2, group=2, num_splits=num_splits)
    assert not attention_differences(case, kernel)


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("fp64", 256), ("fp32", 128), ("bf16", 128), ("bf16", 256), ("fp16", 5)]
)
def test_a_gpus_pieces_give_the_same(monkeypatch: pytest.MonkeyPatch, dtype: str, head_dim: int) -> None:
    """Where there is no GPU its blocks are asked for all the same: smaller ones, and more splits."""
    monkeypatch.setattr(module, "_num_processors", lambda device: 132)
    tree = (-1, *(node // 2 for node in range(32)))
    case = attention_case([tree, CHAIN], [600, 65], group=4, head_dim=head_dim, dtype=dtype, page=16)

    def as_launched(*positional: Any, **keyword: Any) -> Any:
        *tensors, one = positional
        return tree_attention(*tensors, max_nodes=max(map(len, one.trees)), **keyword)

    assert not attention_differences(case, as_launched)


USUAL = {"row_bytes": 256, "element_size": 2, "is_coded": False, "num_processors": 132}
PLANS: dict[str, tuple[tuple[int, int, int, int], dict[str, Any], Plan]] = {
    # 8 x 8 programs a split, two of 64 rows at once on each of 132 multiprocessors: 4 splits fill 256 of 264 places.
    "N16": ((8, 8, 64, 8208), {}, Plan(64, 1, 64, 32, 4, 4, 4)),
    "N64": ((8, 8, 256, 8256), {}, Plan(128, 2, 64, 32, 0, 8, 4)),  # 128 of 132 places: one pass
    "short": ((1, 8, 4, 1025), {}, Plan(16, 1, 64, 32, 4, 4, 4)),  # splits of at least 256 rows
    "int8": ((8, 8, 256, 8256), {"is_coded": True}, Plan(64, 4, 64, 32, 0, 4, 4)),  # 256 of 264
    "fp32 of 128": ((8, 8, 64, 8208), {"row_bytes": 512, "element_size": 4}, Plan(16, 4, 32, 32, 3, 4, 4)),
    "fp64 of 256": ((1, 1, 64, 100), {"row_bytes": 2048, "element_size": 8}, Plan(16, 4, 16, 16, 0, 4, 4)),
    "named": ((8, 8, 64, 8208), {"num_splits": 9}, Plan(64, 1, 64, 32, 9, 4, 4)),
    "no GPU": ((8, 8, 256, 2048), {"num_processors": 1}, Plan(64, 4, 64, 32, 0, 4, 16)),
    "no GPU, long": ((8, 8, 1024, 2049), {"num_processors": 1}, Plan(512, 2, 512, 64, 0, 4, 16)),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_launch_is_cut_to_fill_the_gpu(name: str) -> None:
    sizes, others, expected = PLANS[name]
    assert plan(*sizes, **(USUAL | others)) == expected


@pytest.mark.parametrize("num_splits", [0, 1, 2])
def test_rows_may_see_their_prefix_alone(num_splits: int) -> None:
    positional, keyword = on_device(*arguments(attention_case([CHAIN, (-1, 0)], [70, 3], group=2)))
    q, k, v, _, lens, scale = positional
    out, lse = tree_attention(*positional, max_nodes=4, num_splits=num_splits, prefix_only=True, **keyword)
    for sequence, rows in enumerate((slice(0, 4), slice(4, 6))):
        keys, values = (one[sequence, : lens[sequence], 0] for one in (k, v))
        scores = scale * q[rows] @ keys.mT
        torch.testing.assert_close(lse[rows], scores.logsumexp(-1), rtol=0, atol=1e-12)
        torch.testing.assert_close(out[rows], scores.softmax(-1) @ values, rtol=0, atol=1e-12)


def test_a_row_without_a_node_gets_zeros_and_minus_infinity() -> None:
    case = attention_case([(-1, 0, -2, 0, -2)], [5], group=2)
    positional, keyword = on_device(*arguments(case))
    out, lse = kernel(*positional, case, **keyword)
    assert torch.equal(out[[2, 4]], torch.zeros_like(out[[2, 4]]))
    assert torch.equal(lse[[2, 4]], torch.full_like(lse[[2, 4]], -math.inf))
    assert not out.isnan().any() and lse[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("num_rows", [513, 1024])
def test_a_long_run_of_known_tokens_comes_in_wide_blocks(num_rows: int) -> None:
    chain = tuple(range(-1, num_rows - 1))
    assert not attention_differences(attention_case([chain], [2060], head_dim=4), kernel)


def test_large_scores_neither_overflow_nor_vanish() -> None:
    """Scores of some thousands: exponentials of the numbers themselves would be inf and 0."""
    case = attention_case([CHAIN], [70], dtype="fp32", num_splits=2, large=1)
    positional, keyword = on_device(*arguments(case))
    assert not attention_differences(case, kernel)
    assert float(kernel(*positional, case, **keyword)[1].abs().max()) > 1000


def test_a_page_far_out_in_memory_is_found() -> None:
    assert finds_far_pages(tree_attention)


def test_a_small_lse_is_measured_by_the_scores_that_it_is_the_difference_of() -> None:
    """One row, whose lse is its score, 0.04 of products of order one: measured by 0.04 a right kernel was accused."""
    case = attention_case([(-1,)], [0], head_dim=128, dtype="fp32", seed=30)
    assert not attention_differences(case, kernel)


def test_every_fp8_code_is_read_as_the_number_that_it_is() -> None:
    assert decodes_fp8(tree_attention)


WRONG: dict[str, tuple[dict[int, Any], dict[str, Any], str]] = {
    "q": ({0: torch.zeros(4, 8)}, {}, "q has shape [4, 8], must be [any, any, any]"),
    "heads": ({0: torch.zeros(4, 3, 8)}, {}, "q has 3 heads, must be a multiple of k's 2"),
    "k": ({1: torch.zeros(1, 9, 2, 7)}, {}, "k has shape [1, 9, 2, 7], must be [1, any, any, 8]"),
    "v": ({2: torch.zeros(1, 8, 2, 8)}, {}, "v has shape [1, 8, 2, 8], must be [1, 9, 2, 8]"),
    "dtype": ({1: torch.zeros(1, 9, 2, 8).half()}, {}, "k is torch.float16 and v is torch.float32, must both be"),
    "parents": ({3: torch.zeros(3, dtype=torch.int32)}, {}, "parents has shape [3], must be [4]"),
    "cu_nodes": ({}, {"cu_nodes": torch.zeros(3, dtype=torch.int32)}, "cu_nodes has shape [3], must be [2]"),
    "alibi": ({}, {"alibi_slopes": torch.zeros(3)}, "alibi_slopes has shape [3], must be [4]"),
    "scales": ({}, {"k_scale": torch.ones(1, 9, 2)}, "must come without k_scale and v_scale"),
    "table": ({}, {"page_table": torch.zeros(2, 3)}, "page_table has shape [2, 3], must be [1, any]"),
    "stride": ({0: torch.zeros(4, 8, 4).mT}, {}, "q has stride 4 in its last dimension, must be 1"),
    "wide": (
        {0: torch.zeros(4, 4, 300), 1: torch.zeros(1, 9, 2, 300), 2: torch.zeros(1, 9, 2, 300)},
        {},
        "head size 300 must be at most 256",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_told(name: str) -> None:
    places, keyword, sentence = WRONG[name]
    positional: list[Any] = [
        torch.zeros(4, 4, 8), torch.zeros(1, 9, 2, 8), torch.zeros(1, 9, 2, 8),
        torch.tensor([-1, 0, 1, 2], dtype=torch.int32), torch.tensor([5], dtype=torch.int32), 1.0,
    ]  # fmt: skip
    for place, tensor in places.items():
        positional[place] = tensor
    moved = [one.to(DEVICE) if isinstance(one, Tensor) else one for one in positional]
    usual = {"cu_nodes": torch.tensor([0, 4], dtype=torch.int32)} | keyword
    with pytest.raises(ValueError) as told:
        tree_attention(*moved, max_nodes=4, **{key: one.to(DEVICE) for key, one in usual.items()})
    assert sentence in str(told.value)
