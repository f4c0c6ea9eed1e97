"""`kernels.verify_greedy` against `reference.verify.greedy_walk`."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specbench.kernels.verify_greedy import GreedyResult, verify_greedy
from specbench.reference.verify import greedy_walk
from specbench.suites.kernels import DEVICE
from specbench.suites.kernels.cases import DTYPES, shapes
from specbench.suites.kernels.drawing import drawn
from specbench.tree import DraftTree

VOCABS = (1, 2, 3, 17, 4096, 4097, 9000)


@dataclass(frozen=True)
class GreedyCase:
    """num_tokens: drafts are among so many first ids; levels: so many different logits, hence ties."""

    trees: tuple[tuple[int, ...], ...]
    vocab_size: int
    num_tokens: int
    levels: int
    dtype: str
    seed: int

    @property
    def logits(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        num_rows = sum(len(one) for one in self.trees)
        rows = torch.randint(self.levels, (num_rows, self.vocab_size), generator=generator).double()
        rows[:, : self.num_tokens] += self.levels - 1  # what is drafted is often the winner
        return (rows - self.levels).to(DTYPES[self.dtype])

    @property
    def drafts(self) -> list[DraftTree]:
        generator = torch.Generator().manual_seed(self.seed + 1)
        most = min(self.num_tokens, self.vocab_size)
        return [DraftTree.of(torch.randint(most, (len(one),), generator=generator).tolist(), one) for one in self.trees]


@st.composite
def greedy_cases(draw: st.DrawFn) -> GreedyCase:
    return GreedyCase(
        trees=tuple(draw(st.lists(shapes(rare=(64, 65, 130)), min_size=1, max_size=3))),
        vocab_size=draw(st.sampled_from(VOCABS)),
        num_tokens=draw(st.sampled_from([1, 2, 4])),
        levels=draw(st.sampled_from([1, 2, 3, 50])),
        dtype=draw(st.sampled_from([*DTYPES])),
        seed=draw(st.integers(0, 2**16)),
    )


def asked(trees: list[DraftTree], logits: Tensor, *, max_depth: int | None = None) -> GreedyResult:
    cu_nodes = torch.tensor([0, *torch.tensor([one.num_nodes for one in trees]).cumsum(0).tolist()], dtype=torch.int32)
    return verify_greedy(
        logits.to(DEVICE),
        torch.cat([one.tokens for one in trees]).to(DEVICE),
        torch.cat([one.parents for one in trees]).to(DEVICE),
        cu_nodes=cu_nodes.to(DEVICE),
        max_depth=max(int(one.depth.max()) for one in trees) if max_depth is None else max_depth,
    )


def told(result: GreedyResult, tree: int) -> tuple[tuple[int, ...], int]:
    num = int(result.num_accepted[tree])
    assert (result.path[tree, num:] == -1).all()
    return tuple(result.path[tree, :num].tolist()), int(result.bonus_tokens[tree])


@drawn(600)
@given(case=greedy_cases())
def test_the_walk_follows_the_lowest_id_among_the_maxima(case: GreedyCase) -> None:
    trees, logits = case.drafts, case.logits
    result, row = asked(trees, logits), 0
    for idx, tree in enumerate(trees):
        right = greedy_walk(tree, logits[row : row + tree.num_nodes])
        assert told(result, idx) == (right.path, right.bonus_token)
        row += tree.num_nodes


@pytest.mark.parametrize("vocab_size", [32_000, 128_256, 262_144])
@pytest.mark.parametrize("place", ["first", "last", "both", "middle"])
def test_the_winner_of_a_large_vocabulary(vocab_size: int, place: str) -> None:
    winners = {"first": [0], "last": [vocab_size - 1], "both": [vocab_size - 1, 0], "middle": [vocab_size // 2 + 1]}
    logits = torch.full((2, vocab_size), -3.0, dtype=torch.bfloat16)
    logits[:, winners[place]] = 2.0
    result = asked([DraftTree.of([0, min(winners[place])], [-1, 0])], logits)
    assert told(result, 0) == ((1,), min(winners[place]))


def test_rows_need_not_lie_side_by_side() -> None:
    wide = torch.zeros(3, 40)
    wide[:, 21:] = 99.0  # columns that are no tokens, as padding of a vocabulary is
    wide[0, 5], wide[1, 6], wide[2, 7] = 1.0, 1.0, 1.0
    assert told(asked([DraftTree.of([0, 5, 6], [-1, 0, 1])], wide[:, :20]), 0) == ((1, 2), 7)


@pytest.mark.parametrize("row", [0, 1, 2])
def test_nan_ends_the_walk_there(row: int) -> None:
    logits = torch.zeros(3, 9000)
    logits[0, 5], logits[1, 6], logits[2, 7] = 1.0, 1.0, 1.0
    logits[row, 8999] = torch.nan
    path, bonus = told(asked([DraftTree.of([0, 5, 6], [-1, 0, 1])], logits), 0)
    assert (path, bonus) == (tuple(range(1, row + 1)), -1)


def test_minus_infinity_everywhere_is_a_tie_of_all() -> None:
    logits = torch.full((1, 5000), -torch.inf)
    assert told(asked([DraftTree.of([0], [-1])], logits, max_depth=3), 0) == ((), 0)


def test_a_walk_ends_at_the_largest_depth() -> None:
    logits = torch.zeros(4, 7)
    result = asked([DraftTree.of([0, 0, 0, 0], [-1, 0, 1, 2])], logits, max_depth=2)
    assert told(result, 0) == ((1, 2), 0)
