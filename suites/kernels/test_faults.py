"""Every planted fault of a kernel is caught by what the suite asks of it, and the good kernel passes all of that.

A faulty kernel may read where nothing is, so each is asked in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from specbench.kernels import commit_kv, draft_topk, round, tree_attention, tree_mask, verify_greedy, verify_sample
from specbench.kernels.faults.bank import FAULTS
from specbench.kernels.faults.fault import planted
from specbench.suites.kernels.cases import CommitCase, GreedyCase, GrowthCase, SampleCase, TopkCase, attention_case
from specbench.suites.kernels.children import is_caught
from specbench.suites.kernels.comparisons import (
    asked_of,
    attention_differences,
    decodes_fp8,
    finds_far_pages,
    grows_rightly,
    masks_rightly,
    moves_rightly,
    samples_rightly,
    tells_nan,
    tells_no_law,
    topk_differences,
    walks_rightly,
)
from specbench.suites.kernels.rounds import rounds_rightly
from specbench.tree import UNUSED

TREE = (-1, 0, 0, 1, 1, 2, 2, 3, 5)
SECOND = (-1, 0, 1, 1, 0)
STAR = (-1, 0, 0, 0, 0)
COPIES = (-1, 0, 0, 2, 2, 4)  # of one token: the first child of the root has no child
WIDE = (-1, *(max(0, node - 3) for node in range(1, 70)))
ATTENTION = [
    attention_case([TREE, SECOND], [7, 66], num_key_heads=2, group=2, num_splits=2),
    attention_case([WIDE], [3], num_key_heads=1, group=1),
    attention_case([TREE, SECOND], [67, 2], group=2, page=3, window=4, num_splits=2),
    attention_case([TREE], [130], window=66, num_splits=3, seed=3),
    attention_case([TREE, (*SECOND, UNUSED)], [9, 5], num_key_heads=2, group=2, alibi=1, soft_cap=150, page=16),
    attention_case([TREE], [70], num_key_heads=2, codes="int8", page=1),
    attention_case([TREE], [70], num_key_heads=2, codes="fp8"),
    attention_case([TREE], [70], dtype="fp32"),
    attention_case([TREE], [70], dtype="fp32", large=1),
    attention_case([TREE, SECOND], [70, 2], window=5, num_splits=0),
]
MASKS = [[TREE, SECOND], [WIDE], [(-1, 3, 0, 2), (-1, UNUSED, 0)]]
GREEDY = [
    GreedyCase((TREE, SECOND), vocab, num_tokens, levels, "fp32", seed)
    for vocab, num_tokens, levels in ((3, 1, 1), (5, 2, 2), (9000, 1, 3), (9000, 9000, 10**6))
    for seed in range(3)
]
GREEDY.append(GreedyCase((COPIES,), 3, 1, 1, "fp32", 0))
SAMPLE = [
    SampleCase(trees, vocab_size, proposal, peak, (100, 40, 170)[: len(trees)], "fp64", seed)
    for seed in range(12)
    for trees, vocab_size, proposal, peak in (
        ((STAR,) * 3, 5 if seed % 3 else 2, "without_replacement", 0),  # of two tokens: copies
        ((STAR,) * 3, 5, "iid", 0),
        ((STAR, STAR, COPIES), 3, "deterministic", 0),
        ((TREE, STAR), 9000, "deterministic", 9 * (seed % 2)),
        ((STAR, (-1, 0, 1)), 9000, "iid", 9 * (seed % 2)),
    )
    if vocab_size < 9000 or seed < 4
]
TOPK = [
    TopkCase(2, vocab_size, k, levels, missing, "fp32", seed)
    for vocab_size, k, levels, missing in ((3, 5, 2, 0), (17, 3, 1, 5), (9000, 3, 10**6, 0), (9000, 5, 50, 9))
    for seed in range(2)
]
GROWTH = [
    GrowthCase(2, 3, 3, 2, max_nodes, levels, 3, bad, "fp64", seed)
    for max_nodes, levels, bad in ((7, 1000, 0), (7, 2, 0), (70, 5, 1))
    for seed in range(3)
]
COMMIT = [
    CommitCase(((1, 3, 4), (2, 5)), (5, 0), 2, 2, 8, torch.float32, 0, False, 0),
    CommitCase(((4, 1, 3), (3, 1)), (5, 16), 2, 2, 8, torch.float32, 3, False, 1),
    CommitCase((tuple(range(2, 40)), ()), (1, 63), 1, 3, 128, torch.float32, 16, True, 2),
]


KERNELS = {
    one.__name__.rpartition(".")[2]: one
    for one in (tree_attention, tree_mask, verify_greedy, verify_sample, draft_topk, commit_kv, round)
}


def answers(kernel: str, module: ModuleType) -> Iterator[bool]:
    """Whether each thing asked of the kernel comes out right."""
    if kernel == "round":
        yield rounds_rightly(module.Round, "grouped", page=4)
        yield rounds_rightly(module.Round, "windowed", page=0)
        return
    launcher = getattr(module, kernel)
    if kernel == "tree_attention":
        yield from (not attention_differences(case, asked_of(launcher)) for case in ATTENTION)
        yield decodes_fp8(launcher)
        yield finds_far_pages(launcher)
    elif kernel == "tree_mask":
        yield from (masks_rightly(launcher, trees, [7 + 3 * idx for idx in range(len(trees))]) for trees in MASKS)
    elif kernel == "verify_greedy":
        yield from (walks_rightly(launcher, case) for case in GREEDY)
        yield tells_nan(launcher, 1)
    elif kernel == "verify_sample":
        yield from (samples_rightly(launcher, case) for case in SAMPLE)
    elif kernel == "draft_topk":
        yield from (not topk_differences(launcher, case) for case in TOPK)
        yield tells_no_law(launcher)
        yield from (grows_rightly(module, case) for case in GROWTH)
    else:
        yield from (moves_rightly(launcher, case) for case in COMMIT)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_good_kernel_passes_what_its_faults_fail(kernel: str) -> None:
    assert all(answers(kernel, KERNELS[kernel]))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str) -> None:
    assert is_caught(_fails, fault)


def _fails(fault: str) -> bool:
    one = FAULTS[fault]
    return not all(answers(one.kernel, planted(one)))
