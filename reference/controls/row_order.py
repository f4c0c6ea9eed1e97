"""Rows in another order than the nodes: depth first, breadth first, the last sibling first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from specbench.reference.controls.control import Control
from specbench.reference.target import ReferenceTarget
from specbench.steps import FlatTree, Steps
from specbench.tree import DraftTree

Order = Callable[[DraftTree], list[int]]


def _depth_first(tree: DraftTree) -> list[int]:
    return _walked(tree, last_sibling_first=False)


def _last_sibling_first(tree: DraftTree) -> list[int]:
    return _walked(tree, last_sibling_first=True)


def _breadth_first(tree: DraftTree) -> list[int]:
    return sorted(range(tree.num_nodes), key=lambda node: int(tree.depth[node]))


def _walked(tree: DraftTree, *, last_sibling_first: bool) -> list[int]:
    nodes, todo = [], [0]
    while todo:
        node = todo.pop()
        nodes.append(node)
        children = tree.children(node)
        todo += children if last_sibling_first else reversed(children)
    return nodes


def _in_order(order: Order) -> Callable[[Steps], Steps]:
    """Whatever the layout, rows are sorted by where `order` has their nodes. Ancestors come first in every order."""

    def plant(steps: Steps) -> Steps:
        def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
            flat = steps.flatten(tree, prefix_len)
            place = {node: idx for idx, node in enumerate(order(tree))}
            rows = torch.tensor(sorted(range(flat.num_rows), key=lambda row: place[int(flat.node_of_row[row])]))
            return FlatTree(
                tokens=flat.tokens[rows],
                position_ids=flat.position_ids[rows],
                mask=flat.mask[rows][:, rows],
                node_of_row=flat.node_of_row[rows],
                row_of_node=rows.argsort()[flat.row_of_node],
            )

        return replace(steps, flatten=flatten)

    return plant


_WHY = "a row's mask, position and node move with it, ancestors stand before descendants, and a commit names rows"
CONTROLS = (
    Control(
        "depth_first_rows",
        "the rows of a tree lie in depth-first order, whatever the order of its nodes",
        _WHY,
        lambda: ReferenceTarget(_in_order(_depth_first)),
    ),
    Control(
        "breadth_first_rows",
        "the rows of a tree lie level by level, whatever the order of its nodes",
        _WHY,
        lambda: ReferenceTarget(_in_order(_breadth_first)),
    ),
    Control(
        "last_sibling_first",
        "the rows of a tree lie in depth-first order, the last sibling before the first",
        _WHY,
        lambda: ReferenceTarget(_in_order(_last_sibling_first)),
    ),
)
