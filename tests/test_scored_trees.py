"""Trees by cumulative score in the reference, by hand and against all trees that there are."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from specbench.reference.drafters.scored import draft_topk, expand, select
from specbench.tree import UNUSED, DraftTree

ROOT = (torch.tensor([[7]]), torch.tensor([[-1]], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.float64))
FRONTIER = torch.zeros(1, 1, dtype=torch.int32)


def test_the_lowest_id_is_first_among_equals() -> None:
    tokens, log_probs = draft_topk(torch.tensor([[1.0, 2.0, 2.0, -torch.inf]]), 4)
    weights = [math.e**2, math.e**2, math.e]
    assert tokens.tolist() == [[1, 2, 0, -1]]
    assert log_probs.exp().tolist() == [[*(pytest.approx(one / sum(weights)) for one in weights), 0.0]]


def test_a_row_without_a_law_is_told() -> None:
    for bad in (torch.nan, torch.inf):
        tokens, log_probs = draft_topk(torch.tensor([[1.0, bad]]), 1)
        assert (tokens.tolist(), log_probs.isnan().tolist()) == ([[-1]], [[True]])


def test_a_level_by_hand() -> None:
    """The second of three children has no probability, so it is no node and is not expanded."""
    (tokens, parents, scores), frontier = expand(
        ROOT, FRONTIER, torch.tensor([[[3, -1, 5]]]), torch.tensor([[[-2.0, -torch.inf, -1.0]]]), width=3
    )
    assert (tokens.tolist(), parents.tolist()) == ([[7, 3, 0, 5]], [[-1, 0, UNUSED, 0]])
    assert (scores.tolist(), frontier.tolist()) == ([[0.0, -2.0, -math.inf, -1.0]], [[3, 1, UNUSED]])


@pytest.mark.parametrize("seed", range(5))
def test_no_tree_of_that_size_has_more_probability(seed: int) -> None:
    """All sets of nodes that hold the parents of their nodes are gone through."""
    generator = torch.Generator().manual_seed(seed)
    grown, frontier = ROOT, FRONTIER
    for _ in range(2):
        shape = (1, frontier.shape[1], 3)
        log_probs = torch.randn(shape, generator=generator, dtype=torch.float64).log_softmax(-1)
        grown, frontier = expand(grown, frontier, torch.randint(9, shape, generator=generator), log_probs, width=2)
    parents, scores = grown[1][0].tolist(), grown[2][0].exp().tolist()
    trees = (
        nodes
        for nodes in itertools.combinations(range(1, len(parents)), 4)
        if all(parents[node] in (0, *nodes) for node in nodes)
    )
    most = max(sum(scores[node] for node in nodes) for nodes in trees)
    tokens, kept, kept_scores = (one[0] for one in select(grown, max_nodes=5))
    assert DraftTree(tokens, kept).num_nodes == 5
    assert float(kept_scores[1:].exp().sum()) == pytest.approx(most)
