"""Rows at the wrong position."""

from __future__ import annotations

from dataclasses import replace

from specbench.reference.faults.fault import Fault
from specbench.steps import FlatTree, Steps
from specbench.tree import DraftTree


def _index(steps: Steps) -> Steps:
    def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
        flat = steps.flatten(tree, prefix_len)
        return replace(flat, position_ids=flat.node_of_row + prefix_len)

    return replace(steps, flatten=flatten)


def _stale_base(steps: Steps) -> Steps:
    base: int | None = None

    def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
        nonlocal base
        flat = steps.flatten(tree, prefix_len)
        base = prefix_len if base is None else min(base, prefix_len)
        return replace(flat, position_ids=flat.position_ids - prefix_len + base)

    return replace(steps, flatten=flatten)


FAULTS = (
    Fault(
        "index_position",
        "position-ids",
        "a draft's position is its index in the flattened tree instead of its depth",
        "the second child of any node: chains and the leftmost path are right",
        "tree.positions",
        _index,
    ),
    Fault(
        "base_not_advanced",
        "position-ids",
        "positions start from the prompt's length in every round",
        "a second round",
        "kv.commit",
        _stale_base,
    ),
)
