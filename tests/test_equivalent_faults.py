"""Each equivalent fault does on every small input what the good step does: no claim can be asked to catch it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from specbench.reference.faults.bank import FAULTS
from specbench.reference.faults.equivalent import EQUIVALENT
from specbench.reference.kv_cache import CACHES, QUANTISED, AppendableCache, CacheSpec, new_cache
from specbench.reference.steps import STEPS
from specbench.steps import Steps
from specbench.tree import DraftTree
from specbench.types import Stop, VerifyResult

MAX_NODES = 5
SPEC = CacheSpec.uniform(num_layers=1, num_heads=1, head_dim=1)


def planted(fault: str) -> Steps:
    return next(one for one in EQUIVALENT if one.id == fault).plant(STEPS)


def shapes() -> Iterator[tuple[int, ...]]:
    """Parents of every tree with at most MAX_NODES nodes, the root among them."""
    for num_nodes in range(1, MAX_NODES + 1):
        for parents in itertools.product(*(range(node) for node in range(1, num_nodes))):
            yield (-1, *parents)


def walks() -> Iterator[tuple[DraftTree, Tensor]]:
    """Every such tree over two tokens, with everything that its texts can be followed by: one token, the other, or, in
    trees of at most four nodes, a tie. Copies of a text have equal rows."""
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    for parents in shapes():
        for drafts in itertools.product(range(2), repeat=len(parents) - 1):
            tree = DraftTree.of((0, *drafts), parents)
            texts = [tuple(tree.path_tokens(node)) for node in range(tree.num_nodes)]
            distinct = sorted(set(texts))
            for said in itertools.product(range(3 if len(parents) < MAX_NODES else 2), repeat=len(distinct)):
                yield tree, rows[[said[distinct.index(text)] for text in texts]]


@pytest.mark.parametrize("fault", ["children_last_to_first", "row_of_the_last_copy"])
def test_every_walk_over_a_small_tree_is_the_good_one(fault: str) -> None:
    walk = planted(fault).walk
    num_walks = 0
    for tree, logits in walks():
        num_walks += 1
        assert walk(tree, logits) == STEPS.walk(tree, logits), (tree.draw(), logits)
    assert num_walks > 10_000


STOPS = [
    Stop(eos, sequences, least)
    for eos in ((), (0,), (1,))
    for sequences in ((), ((0,),), ((0, 1),), ((1, 1), (0,)), ((1, 0, 1), (1, 1)))
    for least in (0, 1, 3)
]


@pytest.mark.parametrize("fault", ["limit_after_stop", "end_tokens_before_sequences"])
def test_every_short_run_is_emitted_as_by_the_good_step(fault: str) -> None:
    """Runs of up to four tokens behind outputs of up to two, every limit, end tokens and stop sequences of all kinds.

    An output that had ended before is no input.
    """
    emit = planted(fault).emit
    for num_said, num_before in itertools.product(range(1, 5), range(3)):
        path = tuple(range(1, num_said))
        for tokens in itertools.product(range(2), repeat=num_said + num_before):
            output, said = tokens[:num_before], tokens[num_before:]
            tree, result = DraftTree.of((0, *said[:-1]), range(-1, num_said - 1)), VerifyResult(path, said[-1])
            for stop, limit in itertools.product(STOPS, range(1, 6)):
                if any(stop.reason_at(output[:num]) for num in range(1, num_before + 1)):
                    continue
                given = {"stop": stop, "num_remaining": limit, "output": output}
                assert emit(tree, result, **given) == STEPS.emit(tree, result, **given), (said, given)


@pytest.mark.parametrize("kind", [kind for kind in CACHES if kind not in QUANTISED])
def test_every_path_of_a_small_tree_is_kept_as_by_the_good_commit(kind: str) -> None:
    commit = planted("compacted_in_place").commit
    for parents in shapes():
        tree = DraftTree.of(range(len(parents)), parents)
        for node in range(tree.num_nodes):
            good, other = filled(new_cache(kind, SPEC), tree), filled(new_cache(kind, SPEC), tree)
            STEPS.commit(good, 2, tree.path_to(node))
            commit(other, 2, tree.path_to(node))
            assert all(torch.equal(a, b) for a, b in zip(good.rows(0), other.rows(0), strict=True))
            assert good.length == other.length


def filled(cache: AppendableCache, tree: DraftTree) -> AppendableCache:
    """A cache with a prefix of two rows and those of the tree, all of them different."""
    k = torch.arange(1.0, 3.0 + tree.num_nodes, dtype=torch.float64)[None, :, None]
    cache.append(0, k, -k)
    return cache


def test_no_equivalent_fault_is_in_the_bank() -> None:
    assert {one.id for one in EQUIVALENT} & set(FAULTS) == set()


def test_they_are_at_most_one_in_twenty() -> None:
    assert len(EQUIVALENT) * 20 <= len(FAULTS) + len(EQUIVALENT)
