"""`kernels.draft_topk` against `reference.drafters.scored`: each row's best tokens, and trees by score."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from specbench.kernels import draft_topk as drafting
from specbench.kernels.draft_topk import Candidates, draft_topk, expand, roots, select
from specbench.kernels.tree_mask import tree_mask, unpack_mask
from specbench.kernels.verify_greedy import verify_greedy
from specbench.reference.verify import greedy_walk
from specbench.suites.kernels import DEVICE
from specbench.suites.kernels.cases import GrowthCase, TopkCase, growth_cases, topk_cases
from specbench.suites.kernels.comparisons import (
    grows_rightly,
    poisoned_memory,
    tells_no_law,
    told_walk,
    topk_differences,
)
from specbench.suites.kernels.drawing import drawn
from specbench.tree import UNUSED, DraftTree


@drawn(200)
@given(case=topk_cases())
def test_the_best_tokens_and_their_log_probabilities(case: TopkCase) -> None:
    assert topk_differences(draft_topk, case) == []


@drawn(200)
@given(case=growth_cases())
def test_trees_grow_and_are_cut_as_the_reference_does(case: GrowthCase) -> None:
    assert grows_rightly(drafting, case)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("vocab_size", [32_000, 262_144])
def test_large_vocabularies(vocab_size: int, dtype: str) -> None:
    assert topk_differences(draft_topk, TopkCase(1, vocab_size, 3, 10**6, 0, dtype, seed=vocab_size)) == []


@pytest.mark.parametrize(
    "case",
    [
        TopkCase(2, 1, 1, 1, 0, "fp32", 0),
        TopkCase(2, 3, 3, 9, 0, "fp16", 0),
        TopkCase(2, 3, 7, 9, 0, "bf16", 0),
        TopkCase(2, 4097, 4, 1, 0, "fp32", 0),
        TopkCase(2, 4097, 4, 9, 10, "fp64", 0),
    ],
    ids=["V1", "k is V", "k above V", "all equal", "none of any probability"],
)
def test_odd_rows(case: TopkCase) -> None:
    assert topk_differences(draft_topk, case) == []


def test_by_hand() -> None:
    """Equals at both ends of the row and across its blocks; the probability of each is 1/4."""
    logits = torch.full((1, 9000), -torch.inf)
    logits[0, [4, 4095, 4096, 8999]] = 100.0
    tokens, log_probs = draft_topk(logits.to(DEVICE), 5)
    assert tokens.tolist() == [[4, 4095, 4096, 8999, -1]]
    assert log_probs.exp().tolist() == [[pytest.approx(0.25)] * 4 + [0.0]]


def test_a_row_without_a_law_is_told() -> None:
    assert tells_no_law(draft_topk)


def grown_by_hand() -> tuple[Candidates, torch.Tensor]:
    """Root 7 with children 1 (-1), 2 (-2), 3 (-4), the best two of which have two children each."""
    grown, frontier = roots(torch.tensor([7], device=DEVICE))
    for tokens, log_probs in (
        ([[1, 2, 3]], [[-1.0, -2.0, -4.0]]),
        ([[4, 5], [6, 8]], [[-3.0, -1.0], [-0.5, -9.0]]),
    ):
        given = torch.tensor([tokens], device=DEVICE), torch.tensor([log_probs], device=DEVICE)
        grown, frontier = expand(grown, frontier, *given, width=2)
    return grown, frontier


def test_a_tree_grown_by_hand() -> None:
    """7
      1 -1    2 -2    3 -4
    4 -4 5 -2  6 -2.5  8 -11      kept of six rows: 7 1 2, then 5 6, and of the equals 3 and 4 the first."""
    grown, frontier = grown_by_hand()
    assert [one[0].tolist() for one in grown] == [
        [7, 1, 2, 3, 4, 5, 6, 8],
        [-1, 0, 0, 0, 1, 1, 2, 2],
        [0.0, -1.0, -2.0, -4.0, -4.0, -2.0, -2.5, -11.0],
    ]
    assert frontier.tolist() == [[5, 6]]
    tree = select(grown, max_nodes=6)
    assert [one[0].tolist() for one in tree] == [
        [7, 1, 2, 3, 5, 6],
        [-1, 0, 0, 0, 1, 2],
        [0.0, -1.0, -2.0, -4.0, -2.0, -2.5],
    ]


def test_rows_behind_the_last_node_are_empty_and_nan_is_told_at_the_root() -> None:
    grown, frontier = roots(torch.tensor([7, 8], device=DEVICE))
    log_probs = torch.tensor([[[-1.0, -torch.inf]], [[-1.0, torch.nan]]], device=DEVICE)
    tokens = torch.tensor([[[5, -1]], [[6, -1]]], device=DEVICE)
    tree = select(expand(grown, frontier, tokens, log_probs, width=3)[0], max_nodes=3)
    assert (tree.tokens.tolist(), tree.parents.tolist()) == ([[7, 5, 0], [8, 6, 0]], [[-1, 0, UNUSED]] * 2)
    assert (tree.scores[0].tolist(), tree.scores[1].isnan().tolist()) == ([0.0, -1.0, -torch.inf], [True, False, False])


def test_children_of_nobody_are_not_read() -> None:
    """Their log-probabilities are those of a row that stands in for a node: NaN of it is nobody's."""
    grown, frontier = roots(torch.tensor([7], device=DEVICE))
    for log_probs in ([[-1.0]], [[-1.0], [torch.nan]]):
        given = torch.tensor([log_probs], device=DEVICE)
        grown, frontier = expand(grown, frontier, given.long() + 1, given, width=2)
    assert grown.scores.tolist() == [[0.0, -1.0, -2.0, -torch.inf]]


def test_an_ancestor_of_a_kept_node_is_kept() -> None:
    """A chain of certain tokens, all of the score 0: the parent stands first and wins the tie."""
    grown, frontier = roots(torch.zeros(1, dtype=torch.int64, device=DEVICE))
    for _ in range(5):
        shape = (1, frontier.shape[1], 2)
        log_probs = torch.zeros(shape, device=DEVICE)
        grown, frontier = expand(grown, frontier, log_probs.long() + 1, log_probs, width=1)
    for max_nodes in range(1, 12):
        tree = DraftTree(
            *(one[0] for one in select(grown, max_nodes=max_nodes)[:2])
        )  # raises where a parent is missing
        assert tree.num_nodes == max_nodes


def test_selected_trees_are_what_masks_and_walks_take() -> None:
    """Padded rows are nodes for neither."""
    grown, _ = grown_by_hand()
    with poisoned_memory():
        tree = select(grown, max_nodes=10)
    cu_nodes = torch.tensor([0, 10], dtype=torch.int32, device=DEVICE)
    tokens, parents = tree.tokens.flatten(), tree.parents.flatten()
    right = DraftTree(tokens[:8], parents[:8])
    bits = tree_mask(parents, cu_nodes[:1], cu_nodes=cu_nodes, max_nodes=10).bits
    seen = torch.zeros(10, 10, dtype=torch.bool)
    seen[:8, :8] = right.ancestor_mask
    assert torch.equal(unpack_mask(bits, 10).cpu(), seen)
    logits = torch.nn.functional.one_hot(torch.tensor([2, 0, 6, 0, 0, 0, 9, 0, 0, 0]), 10).double()
    walk = verify_greedy(logits.to(DEVICE), tokens, parents, cu_nodes=cu_nodes, max_depth=2)
    assert told_walk(walk, 0) == ((2, 6), 9)
    assert greedy_walk(right, logits[:8]).path == (2, 6)


def test_what_does_not_fit_is_refused() -> None:
    grown, frontier = roots(torch.tensor([7], device=DEVICE))
    tokens = torch.zeros(1, 1, 2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="draft_topk: k = 0 must be at least 1"):
        draft_topk(torch.zeros(1, 5, device=DEVICE), 0)
    with pytest.raises(ValueError, match=r"expand: log_probs has shape \[1, 1, 3\], must be \[1, 1, 2\]"):
        expand(grown, frontier, tokens, torch.zeros(1, 1, 3, device=DEVICE), width=1)
    with pytest.raises(ValueError, match="select: max_nodes = 0 must be at least 1"):
        select(grown, max_nodes=0)
