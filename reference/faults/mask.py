"""Rows that see what they must not, or miss what they must see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from specbench.protocols import Cache, LanguageModel
from specbench.reference.faults.fault import Fault
from specbench.reference.model import LlamaModel
from specbench.steps import FlatTree, Steps
from specbench.tree import DraftTree
from specbench.types import Taps


def _with_mask(change: Callable[[DraftTree, FlatTree], Tensor]) -> Callable[[Steps], Steps]:
    """Plants a layout whose mask is `change(tree, flat)`."""

    def plant(steps: Steps) -> Steps:
        def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
            flat = steps.flatten(tree, prefix_len)
            return replace(flat, mask=change(tree, flat))

        return replace(steps, flatten=flatten)

    return plant


def _pairs(tree: DraftTree, flat: FlatTree, leaks: Callable[[int, int], bool]) -> Tensor:
    """The mask with extra visibility wherever `leaks(node, other_node)`."""
    mask = flat.mask.clone()
    for row, node in enumerate(flat.node_of_row.tolist()):
        for other_row, other in enumerate(flat.node_of_row.tolist()):
            if node != other and leaks(node, other):
                mask[row, other_row] = True
    return mask


def _future(tree: DraftTree, flat: FlatTree) -> Tensor:
    return _pairs(tree, flat, lambda node, other: node in tree.path_to(other))


def _sibling(tree: DraftTree, flat: FlatTree) -> Tensor:
    return _pairs(
        tree, flat, lambda node, other: 0 < other < node and tree.parent_list[node] == tree.parent_list[other]
    )


def _cousin(tree: DraftTree, flat: FlatTree) -> Tensor:
    def leaks(node: int, other: int) -> bool:
        parent, other_parent = tree.parent_list[node], tree.parent_list[other]
        if min(parent, other_parent) <= 0 or parent == other_parent:
            return False
        return other < node and tree.parent_list[parent] == tree.parent_list[other_parent]

    return _pairs(tree, flat, leaks)


def _no_root(tree: DraftTree, flat: FlatTree) -> Tensor:
    mask = flat.mask.clone()
    root_rows = flat.node_of_row == 0
    mask[torch.outer(~root_rows, root_rows)] = False
    return mask


def _one_layer(steps: Steps) -> Steps:
    def forward(model: LanguageModel, flat: FlatTree, cache: Cache, *, taps: Taps | None = None) -> Tensor:
        return steps.forward(_SecondLayerUnmasked(model), flat, cache, taps=taps)

    return replace(steps, forward=forward)


class _SecondLayerUnmasked(LlamaModel):
    """The same weights, but the second layer lets every row see the whole block."""

    def __init__(self, model: LanguageModel) -> None:
        model = getattr(model, "_model", model)  # a counting wrapper hands its model on
        if not isinstance(model, LlamaModel):
            raise ValueError("this fault can be planted in reference.model only")
        super().__init__(model.config, model._weights, name=model.name)

    def _attention_weights(
        self, q: Tensor, k: Tensor, block_mask: Tensor, q_positions: Tensor, k_positions: Tensor, layer: int
    ) -> Tensor:
        seen = torch.ones_like(block_mask) if layer == 1 else block_mask
        return super()._attention_weights(q, k, seen, q_positions, k_positions, layer)


FAULTS = (
    Fault(
        "future_leak",
        "mask-future",
        "a draft attends to the drafts after it on its own path",
        "any chain of two",
        "tree.mask",
        _with_mask(_future),
    ),
    Fault(
        "sibling_leak",
        "mask-leak",
        "a draft attends to its earlier siblings",
        "two children of one node",
        "tree.mask",
        _with_mask(_sibling),
    ),
    Fault(
        "cousin_leak",
        "mask-leak",
        "a draft attends to earlier children of its parent's siblings, and to nothing else that is wrong",
        "two nodes with different parents at depth two",
        "tree.mask",
        _with_mask(_cousin),
    ),
    Fault(
        "missing_ancestor",
        "mask-missing-ancestor",
        "drafts do not see the root",
        "any draft",
        "tree.mask",
        _with_mask(_no_root),
    ),
    Fault(
        "one_layer_mask",
        "mask-leak",
        "the second layer ignores the mask inside the block, the others and the mask itself are right",
        "any draft",
        "tree.attention_weights",
        _one_layer,
    ),
)
