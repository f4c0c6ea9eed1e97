"""Our own tree attention as a foreign target: it holds, each of its planted faults is a BUG, and most are named.

Only on the fixed cases, and without making them smaller: a kernel that is wrong may read where nothing is, so each is
asked in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from specbench.cases import AttentionCase
from specbench.checks import CHECKS
from specbench.claims import CLAIMS, KERNEL_CLAIMS, Violation
from specbench.clock import Clock
from specbench.fixed import kernel_cases
from specbench.kernels.faults.bank import FAULTS
from specbench.kernels.faults.fault import planted
from specbench.kernels.tree_attention import tree_attention
from specbench.loading import Target
from specbench.naming.kernels import likely_fault
from specbench.profiles import PROFILES
from specbench.record import ClaimRecord
from specbench.subjects import Subject, make_subjects
from specbench.suites.kernels import DEVICE
from specbench.suites.kernels.attention import Attention
from specbench.suites.kernels.children import is_caught
from specbench.watchdog import Watchdog

# One pass is what our own launcher does where it is not told a number of splits, which claims do.
NOT_REACHED = ("one_pass_without_the_tree",)
OURS = [one.id for one in FAULTS.values() if one.kernel == "tree_attention" and one.id not in NOT_REACHED]
# The first claim that catches a fault, and how the fault is named where its formula is known.
CAUGHT_BY = {
    "group_mapping": ("attention.out", "group_interleaved"),
    "last_block_skipped": ("attention.out", "last_block_64_"),
    "mask_shared": ("attention.batch", "mask_shared"),
    "lower_triangle_unmasked": ("attention.out", "causal"),
    "mask_ignores_the_words": ("attention.out", "unknown"),
    "window_edge": ("attention.window", "window_edge"),
    "window_by_block": ("attention.window", "unknown"),
    "window_by_slot": ("attention.window", "window_keys_by_row"),
    "window_of_the_deepest": ("attention.window", "window_of_deepest"),
    "merge_without_rescale": ("attention.out", "merge_without_rescale"),
    "merge_forgets_the_tree": ("attention.out", "tree_left_out"),
    "softmax_without_maximum": ("attention.out", "softmax_without_maximum"),
    "online_without_rescale": ("attention.out", "unknown"),
    "empty_row_is_nan": ("attention.out", "NaN"),
    "unused_rows_see_the_prefix": ("attention.unused_rows", "unused_see_prefix"),
    "dead_rows_times_zero": ("attention.dead_memory", "rows behind the last one are read"),
    "cap_of_one": ("attention.soft_cap", "cap_of_one"),
    "bias_by_row": ("attention.alibi", "bias_by_row"),
    "bias_of_the_first_head": ("attention.alibi", "bias_of_first_head"),
    "value_scale_forgotten": ("attention.quantised", "value_scale_ignored"),
    "scale_of_the_first_head": ("attention.quantised", "scale_of_first_head"),
    "fp8_subnormals": ("attention.quantised", "fp8_subnormals"),
    "page_of_another": ("attention.paged", "table_shared"),
    "int32_offset": ("attention.strides", "strides are not looked at"),
    "narrow_sums": ("attention.out", "unknown"),
    "lse_without_maximum": ("attention.lse", "lse_without_largest_part"),
}
HALF = ("int32_offset",)  # shows in rows far apart, which only half precision is asked for


def column(attention: Callable[..., Any], label: str) -> Subject:
    target = Target("ours", Attention(attention))
    quiet = Watchdog(0, lambda sentence: None)
    subjects = make_subjects(
        target, model="none", profile=PROFILES["quick"], device=DEVICE, clock=Clock(), watchdog=quiet
    )
    (found,) = (one for one in subjects if one.name == f"kernel-{label}")
    assert isinstance(found, Subject)
    return found


def failures(subject: Subject, claim: str) -> list[AttentionCase]:
    """The fixed cases on which a claim fails."""
    found = []
    for case in kernel_cases(claim, subject):
        try:
            CHECKS[claim](subject, case, ClaimRecord(claim, subject.name))
        except Violation:
            assert isinstance(case, AttentionCase)
            found.append(case)
    return found


@pytest.mark.parametrize(
    ("label", "claim"),
    [*(("fp64", one) for one in KERNEL_CLAIMS), ("fp16", "attention.out"), ("fp16", "attention.strides")],
)
def test_our_own_kernel_holds_as_a_target(label: str, claim: str) -> None:
    subject = column(tree_attention, label)
    assert (subject.missing(CLAIMS[claim].needs), len(kernel_cases(claim, subject)) > 0) == (None, True)
    assert failures(subject, claim) == []


def test_every_fault_of_the_bank_has_its_claim() -> None:
    assert sorted(CAUGHT_BY) == sorted(OURS)


@pytest.mark.parametrize("fault", OURS)
def test_a_planted_fault_is_a_bug_and_gets_its_name(fault: str) -> None:
    assert is_caught(_is_named, fault)


def _is_named(fault: str) -> bool:
    claim, name = CAUGHT_BY[fault]
    subject = column(planted(FAULTS[fault]).tree_attention, "fp16" if fault in HALF else "fp64")
    failing = failures(subject, claim)
    named = likely_fault(subject, claim, failing[0], failing[1:]) if failing else "holds"
    if not named.startswith(name):
        print(f"{fault} on {claim}: {named}")
    return named.startswith(name)
