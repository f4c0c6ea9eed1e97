"""The acceptance rules: hand cases, every small tree under every law, and random trees."""

from __future__ import annotations

import itertools
import math
import random
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specbench.reference.verify import argmax_lowest, greedy_walk, threshold_walk
from specbench.tree import DraftTree, chain, root_only
from specbench.types import VerifyResult


def rows(winners: list[int], vocab_size: int) -> Tensor:
    """float64 [N, V]: row i has its only maximum at winners[i]."""
    logits = torch.zeros(len(winners), vocab_size, dtype=torch.float64)
    logits[range(len(winners)), winners] = 1.0
    return logits


def law(*probabilities: list[float]) -> Tensor:
    """Logits whose softmax is the given rows."""
    return torch.tensor(probabilities, dtype=torch.float64).log()


# ---- argmax


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([0.0, 2.0, 1.0], 1),
        ([3.0, 1.0, 3.0, 3.0], 0),
        ([1.0, 3.0, 3.0], 1),
        ([-0.0, 0.0], 0),
        ([0.0, -0.0], 0),
        ([-1.0, 0.0, -0.0], 1),
        ([-1.0, -0.0, 0.0], 1),
        ([-math.inf, -math.inf], 0),
        ([-math.inf, -1e300], 1),
        ([1.0, math.inf, math.inf], 1),
        ([5.0], 0),
    ],
    ids=str,
)
def test_the_lowest_id_among_the_maxima_wins(row, expected):
    assert argmax_lowest(torch.tensor(row, dtype=torch.float64)) == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_lowest_id_wins_in_a_vocabulary_wide_enough_for_vectorised_code(dtype):
    row = torch.zeros(50_000, dtype=dtype)
    row[[7_001, 7_002, 31_000, 49_999]] = 1.0
    assert argmax_lowest(row) == 7_001


@pytest.mark.parametrize("row", [[math.nan, 1.0], [1.0, math.nan], [math.nan, math.inf]], ids=str)
def test_nan_logits_are_refused_with_where_to_look(row):
    message = "target logits hold NaN, so no token is the largest: look at the forward that made them"
    with pytest.raises(ValueError, match=f"^{message}$"):
        argmax_lowest(torch.tensor(row))


def test_a_walk_over_nan_logits_is_refused():
    logits = rows([1, 0], 2)
    logits[1, 0] = math.nan
    with pytest.raises(ValueError, match=r"^target logits hold NaN"):
        greedy_walk(chain([0, 1]), logits)


def test_nan_in_a_row_that_is_never_read_does_no_harm():
    logits = rows([0, 0], 2)
    logits[1] = math.nan
    assert greedy_walk(chain([0, 1]), logits) == VerifyResult((), 0)


# ---- greedy walk by hand

every_pattern = pytest.mark.parametrize("right", list(itertools.product([True, False], repeat=4)), ids=str)


def test_the_root_alone_emits_its_argmax():
    assert greedy_walk(root_only(3), rows([5], 7)) == VerifyResult((), 5)


@every_pattern
def test_a_chain_is_accepted_up_to_its_first_wrong_draft(right):
    """Row i wants token i + 1. All 2^4 patterns of right and wrong drafts."""
    wanted = [1, 2, 3, 4, 5]
    drafts = [token if is_right else 8 for token, is_right in zip(wanted, right, strict=False)]
    num_accepted = [*right, False].index(False)
    expected = VerifyResult(tuple(range(1, num_accepted + 1)), wanted[num_accepted])
    assert greedy_walk(chain([0, *drafts]), rows(wanted, 9)) == expected


@every_pattern
def test_a_draft_is_judged_by_its_parents_row_and_never_by_its_own(right):
    """The own row of a wrong draft would accept it, and the own row of a right draft would reject it."""
    winners, drafts = [1], []
    for is_right in right:
        drafts.append(winners[-1] if is_right else (winners[-1] + 2) % 5)
        winners.append((drafts[-1] + 1) % 5 if is_right else drafts[-1])
    num_accepted = [*right, False].index(False)
    expected = VerifyResult(tuple(range(1, num_accepted + 1)), winners[num_accepted])
    assert greedy_walk(chain([0, *drafts]), rows(winners, 5)) == expected


def test_a_tie_goes_to_the_lowest_id_even_when_a_higher_one_was_drafted():
    logits = torch.tensor([[0.0, 2.0, 2.0], [9.0, 0.0, 0.0]])
    assert greedy_walk(chain([0, 2]), logits) == VerifyResult((), 1)


def test_negative_zero_ties_with_zero():
    logits = torch.tensor([[-1.0, -0.0, 0.0], [9.0, 0.0, 0.0]])
    assert greedy_walk(chain([0, 1]), logits) == VerifyResult((1,), 0)


# 0 ─┬─ 1 ─┬─ 3
#    │     └─ 4 ── 6
#    └─ 2 ── 5
BRANCHED = DraftTree.of([7, 3, 9, 4, 5, 4, 1], [-1, 0, 0, 1, 1, 2, 4])


@pytest.mark.parametrize(
    ("winners", "expected"),
    [
        ([3, 5, 0, 0, 1, 0, 8], VerifyResult((1, 4, 6), 8)),
        ([3, 5, 0, 0, 2, 0, 8], VerifyResult((1, 4), 2)),
        ([3, 4, 0, 6, 1, 0, 8], VerifyResult((1, 3), 6)),
        ([9, 5, 4, 0, 1, 2, 8], VerifyResult((2, 5), 2)),
        ([9, 5, 5, 0, 1, 2, 8], VerifyResult((2,), 5)),
        ([4, 5, 4, 0, 1, 2, 8], VerifyResult((), 4)),
        ([1, 5, 4, 0, 1, 2, 8], VerifyResult((), 1)),
    ],
    ids=str,
)
def test_a_branched_tree_is_walked_as_by_hand(winners, expected):
    assert greedy_walk(BRANCHED, rows(winners, 10)) == expected


def test_the_same_token_in_another_branch_is_not_a_child():
    """The root wants 3, its row then 4: the only 4 hangs below 9."""
    tree = DraftTree.of([7, 3, 9, 4], [-1, 0, 0, 2])
    assert greedy_walk(tree, rows([3, 4, 4, 0], 10)) == VerifyResult((1,), 4)


def test_a_grandchild_with_the_wanted_token_is_not_taken_for_a_child():
    assert greedy_walk(chain([7, 3, 4]), rows([4, 4, 5], 10)) == VerifyResult((), 4)


@pytest.mark.parametrize("parent", [1, 2])
def test_a_duplicate_sibling_without_children_costs_no_acceptance(parent):
    """Nodes 1 and 2 spell the same text; the next draft hangs below one of them."""
    tree = DraftTree.of([7, 3, 3, 4], [-1, 0, 0, parent])
    assert greedy_walk(tree, rows([3, 4, 4, 5], 10)) == VerifyResult((parent, 3), 5)


def test_duplicates_at_two_depths_are_walked_as_one_text():
    """3-4 is spelt by nodes 1-3 and 2-4, and only node 4 has a child."""
    tree = DraftTree.of([7, 3, 3, 4, 4, 5], [-1, 0, 0, 1, 2, 4])
    assert greedy_walk(tree, rows([3, 4, 4, 5, 5, 6], 10)) == VerifyResult((2, 4, 5), 6)


def test_an_accepted_leaf_with_a_duplicate_is_named_once():
    tree = DraftTree.of([7, 3, 3], [-1, 0, 0])
    assert greedy_walk(tree, rows([3, 8, 8], 10)) == VerifyResult((1,), 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_walk_reads_logits_of_any_dtype(dtype):
    assert greedy_walk(BRANCHED, rows([3, 5, 0, 0, 1, 0, 8], 10).to(dtype)) == VerifyResult((1, 4, 6), 8)


# ---- greedy walk against plain decoding


def emitted_tokens(tree: DraftTree, result: VerifyResult) -> list[int]:
    return [*(tree.token_list[node] for node in result.path), result.bonus_token]


def plain_walk(texts: list[tuple[int, ...]], winners: list[int]) -> list[int]:
    """Decode from the root's text while the text is one whose next token is known: the definition, with no tree."""
    next_token = dict(zip(texts, winners, strict=True))
    text = texts[0]
    while text in next_token:
        text = (*text, next_token[text])
    return list(text[1:])


@pytest.mark.parametrize(
    ("num_nodes", "vocab_size"),
    [(1, 2), (2, 2), (3, 2), (4, 2), (5, 2), (2, 3), (3, 3), (4, 3)],
    ids=lambda value: str(value),
)
def test_every_small_tree_under_every_law_emits_what_plain_decoding_does(num_nodes, vocab_size):
    """All shapes, all tokens, all argmaxes; equal texts have equal rows, as they do in any model."""
    one_hot = torch.eye(vocab_size, dtype=torch.float64)
    shapes = itertools.product(*([-1] if node == 0 else range(node) for node in range(num_nodes)))
    for parents in shapes:
        for drafts in itertools.product(range(vocab_size), repeat=num_nodes - 1):
            tree = DraftTree.of([0, *drafts], parents)
            texts = [tuple(tree.path_tokens(node)) for node in range(num_nodes)]
            distinct = sorted(set(texts), key=texts.index)
            for by_text in itertools.product(range(vocab_size), repeat=len(distinct)):
                winners = [by_text[distinct.index(text)] for text in texts]
                result = greedy_walk(tree, one_hot[winners])
                emitted = emitted_tokens(tree, result)
                assert emitted == plain_walk(texts, winners) and tree.is_path(result.path), (tree.draw(), winners)


def toy_model(text: list[int], seed: int, vocab_size: int) -> list[float]:
    """Logits that depend on the whole text, with ties every now and then."""
    generator = random.Random(f"{seed} {text}")
    return [float(generator.randrange(4)) for _ in range(vocab_size)]


@st.composite
def trees(draw, vocab_size: int) -> DraftTree:
    tokens, parents = [draw(st.integers(0, vocab_size - 1))], [-1]
    for node in range(1, draw(st.integers(1, 24))):
        parents.append(draw(st.integers(0, node - 1)))
        tokens.append(draw(st.integers(0, vocab_size - 1)))
    return DraftTree.of(tokens, parents)


@settings(max_examples=150, deadline=None)
@given(tree=trees(3), seed=st.integers(0, 1000))
def test_the_walk_emits_the_longest_drafted_part_of_plain_decoding_and_one_token_more(tree, seed):
    logits = torch.tensor([toy_model(tree.path_tokens(node), seed, 3) for node in range(tree.num_nodes)])
    result = greedy_walk(tree, logits)
    drafted = {tuple(tree.path_tokens(node)) for node in range(tree.num_nodes)}
    text = [tree.token_list[0]]
    while tuple(text) in drafted:
        row = toy_model(text, seed, 3)
        text.append(row.index(max(row)))
    assert emitted_tokens(tree, result) == text[1:] and tree.is_path(result.path)


@settings(max_examples=100, deadline=None)
@given(tree=trees(3), seed=st.integers(0, 1000))
def test_the_walk_does_not_change_what_it_is_given(tree, seed):
    logits = torch.randn(tree.num_nodes, 3, generator=torch.Generator().manual_seed(seed))
    before = logits.clone()
    greedy_walk(tree, logits)
    threshold_walk(0.3)(tree, logits)
    assert torch.equal(logits, before)


# ---- threshold walk


@settings(max_examples=150, deadline=None)
@given(tree=trees(3), seed=st.integers(0, 1000), threshold=st.sampled_from([0.5, 0.6, 0.9, 1.0]))
def test_at_thresholds_of_one_half_and_above_only_greedy_tokens_are_emitted(tree, seed, threshold):
    """Drafts may be refused that greedy takes; whatever is emitted is the start of what plain decoding says."""
    logits = torch.tensor([toy_model(tree.path_tokens(node), seed, 3) for node in range(tree.num_nodes)])
    text = tree.token_list[:1]
    for token in emitted_tokens(tree, threshold_walk(threshold)(tree, logits)):
        row = toy_model(text, seed, 3)
        assert token == row.index(max(row))
        text.append(token)


def test_below_one_half_a_draft_that_is_not_the_argmax_is_accepted():
    """p = (.2, .3, .5), the draft 1 has .3: greedy refuses it and says 2, a threshold of .25 keeps it."""
    logits = law([0.2, 0.3, 0.5], [0.7, 0.2, 0.1])
    assert greedy_walk(chain([0, 1]), logits) == VerifyResult((), 2)
    assert threshold_walk(0.25)(chain([0, 1]), logits) == VerifyResult((1,), 0)


def test_a_draft_at_or_below_the_threshold_is_refused_and_the_argmax_is_emitted():
    assert threshold_walk(0.35)(chain([0, 1]), law([0.2, 0.3, 0.5], [0.7, 0.2, 0.1])) == VerifyResult((), 2)


def test_the_probability_must_strictly_exceed_the_threshold():
    """Two equal logits have probability one half exactly."""
    logits = torch.zeros(2, 2)
    assert threshold_walk(0.5)(chain([0, 0]), logits) == VerifyResult((), 0)
    assert threshold_walk(0.4999)(chain([0, 0]), logits) == VerifyResult((1,), 0)


def test_a_threshold_of_one_accepts_nothing_and_zero_accepts_everything():
    logits = law([0.01, 0.99], [0.99, 0.01], [0.5, 0.5])
    assert threshold_walk(1.0)(chain([0, 1, 1]), logits) == VerifyResult((), 1)
    assert threshold_walk(0.0)(chain([0, 1, 1]), logits) == VerifyResult((1, 2), 0)


def test_among_children_above_the_threshold_the_most_probable_is_taken():
    tree = DraftTree.of([0, 0, 2, 1], [-1, 0, 0, 0])
    assert threshold_walk(0.1)(tree, law([0.2, 0.35, 0.45], *[[0.6, 0.2, 0.2]] * 3)) == VerifyResult((2,), 0)


def test_children_of_equal_probability_are_taken_by_lowest_token_id():
    tree = DraftTree.of([0, 2, 1], [-1, 0, 0])
    assert threshold_walk(0.1)(tree, torch.zeros(3, 3)).path == (2,)


def test_the_threshold_too_judges_a_draft_by_its_parents_row():
    """The draft's own row is sure of it, its parent's is not."""
    assert threshold_walk(0.5)(chain([0, 1]), law([0.9, 0.1], [0.01, 0.99])) == VerifyResult((), 0)


@pytest.mark.parametrize("threshold", [-0.1, 1.1, math.nan])
def test_a_threshold_that_is_no_probability_is_refused(threshold):
    message = f"threshold = {threshold} must be between 0.0 and 1.0 (a probability)"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        threshold_walk(threshold)


def test_the_threshold_walk_refuses_nan_logits():
    with pytest.raises(ValueError, match=r"^target logits hold NaN"):
        threshold_walk(0.3)(chain([0, 1]), torch.full((2, 2), math.nan))
