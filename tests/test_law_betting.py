"""specbench.law.betting: the bound is the optimum or above it, right rules are not accused, wrong ones soon are."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from specbench.law.betting import BoundTest, most_kept
from specbench.law.optimum import node_optimum
from specbench.tree import Proposal


def law(seed: int, vocab_size: int, *, zeros: int = 0) -> Tensor:
    drawn = torch.rand(vocab_size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 2
    drawn[:zeros] = 0.0
    return drawn / drawn.sum()


def drafted(q: Tensor, num: int, proposal: Proposal) -> dict[frozenset[int], float]:
    """The probability of each set of drafted tokens, draw by draw."""
    sets: dict[frozenset[int], float] = {}
    for tokens in product(range(len(q)), repeat=num):
        mass, left = 1.0, q.clone()
        for token in tokens:
            mass *= float(left[token] / left.sum()) if left.sum() > 0 else 0.0
            if proposal == "without_replacement":
                left[token] = 0.0
        if mass > 0:
            sets[frozenset(tokens)] = sets.get(frozenset(tokens), 0.0) + mass
    return sets


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("num", "proposal"), [(1, "iid"), (2, "iid"), (3, "iid"), (2, "without_replacement")])
def test_the_bound_is_the_optimum_of_all_sets(seed: int, num: int, proposal: Proposal) -> None:
    p, q = law(seed, 5, zeros=seed % 2), law(100 + seed, 5).flip(0)
    optimum = float(node_optimum(tuple(p.tolist()), drafted(q, num, proposal)))
    bound = most_kept(p, q, num, proposal)
    assert bound >= optimum - 1e-12
    assert bound == pytest.approx(optimum, abs=1e-12 if num == 1 else 0.02)


def test_the_bound_by_hand() -> None:
    p, q = torch.tensor([0.5, 0.5], dtype=torch.float64), torch.tensor([0.9, 0.1], dtype=torch.float64)
    assert most_kept(p, q, 1, "iid") == pytest.approx(0.6)
    # Both drafts are token 0 with 0.81, and then half of the target's tokens are not among them.
    assert most_kept(p, q, 2, "iid") == pytest.approx(0.5 + 0.19)
    assert most_kept(p, q, 2, "without_replacement") == pytest.approx(1.0)
    assert most_kept(p, torch.tensor([1.0, 0.0], dtype=torch.float64), 2, "without_replacement") <= 1.0


def test_three_drafts_without_replacement_are_refused() -> None:
    with pytest.raises(ValueError, match="num_drafts = 3 must be at most 2 without replacement"):
        most_kept(law(0, 4), law(1, 4), 3, "without_replacement")


def rounds(seed: int, num: int, excess: float, *, alpha: float) -> BoundTest:
    """A rule that keeps as many as its bound allows and `excess` more; bounds that differ from round to round."""
    generator = torch.Generator().manual_seed(seed)
    test = BoundTest(alpha=alpha)
    for bound, coin in torch.rand(num, 2, generator=generator, dtype=torch.float64).tolist():
        bound = 0.3 + 0.5 * bound
        test.note(coin < bound + excess, bound)
    return test


def test_a_rule_at_its_bound_is_rarely_accused_at_any_time() -> None:
    accused = sum(rounds(seed, 300, 0.0, alpha=0.05).is_rejected for seed in range(400))
    assert accused <= 34  # 20 are allowed, and three deviations


def test_what_it_says_it_would_have_seen_it_sees_about_as_often_as_not() -> None:
    excess = rounds(0, 1_500, 0.0, alpha=1e-6).detectable_excess()
    assert 0.03 < excess < 0.12
    seen = sum(rounds(seed, 1_500, excess, alpha=1e-6).is_rejected for seed in range(100))
    assert 30 <= seen <= 95


def test_a_draft_that_cannot_be_kept_decides_at_once() -> None:
    test = BoundTest(alpha=1e-6)
    test.note(False, 0.0)
    assert not test.is_rejected
    test.note(True, 0.0)
    assert test.is_rejected
    assert math.isinf(test.log_e_value)


def test_no_rounds_show_nothing() -> None:
    test = BoundTest(alpha=1e-6)
    assert not test.is_rejected
    assert math.isinf(test.detectable_excess())
    with pytest.raises(ValueError, match="alpha = 0 must be"):
        BoundTest(alpha=0)
