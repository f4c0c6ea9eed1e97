"""The columns of a tree-attention kernel: one a dtype, with what the kernel says that it can do.

No models: what a kernel is asked is filled from a seed (see `checks.attention`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from specbench.banks import Bank
from specbench.cases import CODES, MAX_HEAD_DIM, MAX_HEADS, MAX_PAGE, AttentionCase
from specbench.claims import KERNEL_COLUMN
from specbench.loading import Target, TargetError
from specbench.types import DTYPES

HEAD_DIMS = (8, 16, 5, 64, 80, 96, 128, 256)
GROUPS = (1, 2, 3, 4)
PAGE_SIZES = (16, 1, 3)


@dataclass(frozen=True)
class Limits:
    """What of an `AttentionCase` a kernel can do, by its own word; everything where it says nothing."""

    dtypes: tuple[str, ...] = tuple(DTYPES)
    head_dims: tuple[int, ...] = HEAD_DIMS
    groups: tuple[int, ...] = GROUPS
    page_sizes: tuple[int, ...] = PAGE_SIZES
    codes: tuple[str, ...] = CODES
    only_fixed_shapes: bool = False

    @classmethod
    def of(cls, target: Target) -> Limits:
        """TargetError names the attribute that is none."""
        return cls(
            dtypes=_words(target, "dtypes", tuple(DTYPES)),
            head_dims=_numbers(target, "head_dims", HEAD_DIMS, MAX_HEAD_DIM),
            groups=_numbers(target, "groups", GROUPS, MAX_HEADS),
            page_sizes=_numbers(target, "page_sizes", PAGE_SIZES, MAX_PAGE),
            codes=_words(target, "codes", CODES),
            only_fixed_shapes=getattr(target.adapter, "only_fixed_shapes", False) is True,
        )

    def nearest(self, case: AttentionCase) -> AttentionCase:
        """The case with the head size, group and page of the kernel's that are nearest to its own."""
        return replace(
            case,
            head_dim=_nearest(case.head_dim, self.head_dims),
            group=_nearest(case.group, self.groups),
            page=_nearest(case.page, self.page_sizes) if case.page else 0,
        )

    def __str__(self) -> str:
        told = [f"head sizes {_listed(self.head_dims)}", f"groups of {_listed(self.groups)}"]
        if self.page_sizes != PAGE_SIZES:
            told.append(f"pages of {_listed(self.page_sizes)} rows")
        if self.codes != CODES:
            told.append(f"codes {', '.join(self.codes)}")
        if self.only_fixed_shapes:
            told.append("fixed shapes only")
        return ", ".join(told)


# What a claim is about, the same order in which they are judged: cases about one may ask for what stands before it.
CLAIM_OF = {
    "cu_nodes": "attention.batch",
    "any_order": "attention.any_order",
    "unused_rows": "attention.unused_rows",
    "page_table": "attention.paged",
    "window": "attention.window",
    "soft_cap": "attention.soft_cap",
    "alibi_slopes": "attention.alibi",
    "k_scale": "attention.quantised",
    "strides": "attention.strides",
    "dead_rows": "attention.dead_memory",
}


class KernelBank(Bank):
    """share_of_examples: the first dtype is asked the most."""

    def __init__(self, label: str, limits: Limits, *, device: str) -> None:
        super().__init__(f"{KERNEL_COLUMN}{label}", DTYPES[label], num_models=1)
        self.label = label
        self.limits = limits
        self.device = device
        self.share_of_examples = 1.0 if label == limits.dtypes[0] else 0.25

    @staticmethod
    def claim_of(case: AttentionCase) -> str:
        """The claim that a case is about: that of the last option it asks for."""
        return CLAIM_OF[case.options[-1]] if case.options else "attention.out"

    @property
    def description(self) -> str:
        return f"tree attention in {self.label} on {self.device}: {self.limits}"


def _words(target: Target, name: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The declared words in the order of the known ones."""
    declared = getattr(target.adapter, name, known)
    if isinstance(declared, str) or not isinstance(declared, Iterable) or not (given := list(declared)):
        raise _wrong(target, name, declared, f"a tuple of {', '.join(known)}")
    for one in given:
        if one not in known:
            raise _wrong(target, name, one, f"of {', '.join(known)}")
    return tuple(one for one in known if one in given)


def _numbers(target: Target, name: str, usual: tuple[int, ...], largest: int) -> tuple[int, ...]:
    declared = getattr(target.adapter, name, usual)
    wanted = f"a tuple of ints from 1 to {largest}"
    if isinstance(declared, str) or not isinstance(declared, Iterable) or not (given := list(declared)):
        raise _wrong(target, name, declared, wanted)
    if not all(type(one) is int and 1 <= one <= largest for one in given):
        raise _wrong(target, name, declared, wanted)
    return tuple(given)


def _wrong(target: Target, name: str, given: Any, wanted: str) -> TargetError:
    return TargetError(f"target {target.name!r}: {name} = {given!r} must be {wanted}")


def _nearest(number: int, known: tuple[int, ...]) -> int:
    return number if number in known else min(known, key=lambda one: (abs(one - number), one))


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, sorted(numbers)))
