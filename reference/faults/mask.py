"""Rows that see what they must not, or miss what they must see."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specbench.protocols import LanguageModel
from specbench.reference.faults.fault import Fault
from specbench.reference.model import LlamaModel
from specbench.reference.target import ReferenceTarget
from specbench.steps import FlatTree, Steps
from specbench.tree import DraftTree


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


def _rows_swapped(steps: Steps) -> Steps:
    def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
        flat = steps.flatten(tree, prefix_len)
        order = list(range(tree.num_nodes))
        order[1:] = order[:0:-1]  # all nodes but the root, the last one first
        return replace(flat, row_of_node=flat.row_of_node[order])

    return replace(steps, flatten=flatten)


def _with_attention(change: Callable[[LlamaModel], None]) -> Callable[[], ReferenceTarget]:
    """Targets whose models of ours are changed copies; any other model is handed on as it is."""

    def plant(model: LanguageModel) -> LanguageModel:
        inner = getattr(model, "_model", model)  # a counting wrapper hands its model on
        if not isinstance(inner, LlamaModel):
            return model
        faulty = copy.copy(inner)
        change(faulty)
        return faulty

    return lambda: ReferenceTarget(plant_model=plant)


def _second_layer_unmasked(model: LlamaModel) -> None:
    right = model._attention_weights

    def attention_weights(
        q: Tensor, k: Tensor, block_mask: Tensor, q_positions: Tensor, k_positions: Tensor, layer: int
    ) -> Tensor:
        seen = torch.ones_like(block_mask) if layer == 1 else block_mask
        return right(q, k, seen, q_positions, k_positions, layer)

    model._attention_weights = attention_weights  # type: ignore[method-assign]


def _first_row_hidden(model: LlamaModel) -> None:
    """The oldest cached row is masked out in the last layer, as by a mask that is one column short."""
    right = model._attention_weights

    def attention_weights(
        q: Tensor, k: Tensor, block_mask: Tensor, q_positions: Tensor, k_positions: Tensor, layer: int
    ) -> Tensor:
        if layer == model.num_layers - 1 and k.shape[2] > q.shape[2]:
            k_positions = torch.where(torch.arange(k.shape[2], device=k.device) == 0, -1, k_positions)
        return right(q, k, block_mask, q_positions, k_positions, layer)

    model._attention_weights = attention_weights  # type: ignore[method-assign]


def _heads_modulo(model: LlamaModel) -> None:
    group = model.config.num_heads // model.config.num_kv_heads

    def attention(
        layer: int, q: Tensor, k: Tensor, v: Tensor, block_mask: Tensor, q_positions: Tensor, k_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        weights = model._attention_weights(q, k, block_mask, q_positions, k_positions, layer)
        return weights @ v.repeat(1, group, 1, 1), weights  # head h reads values h mod Hkv

    model.attention = attention  # type: ignore[method-assign]


def _finite_mask(model: LlamaModel) -> None:
    right = model._attention_weights

    def attention_weights(q: Tensor, k: Tensor, block_mask: Tensor, *rest: Any) -> Tensor:
        seen_all = right(q, k, torch.ones_like(block_mask), *rest)
        hidden = torch.nn.functional.pad(~block_mask, (k.shape[2] - q.shape[2], 0))
        faint = torch.where(hidden, seen_all * math.exp(-12), seen_all)  # as if -12 had been added to the score
        return faint / faint.sum(dim=-1, keepdim=True)

    model._attention_weights = attention_weights  # type: ignore[assignment,method-assign]


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
        target=_with_attention(_second_layer_unmasked),
    ),
    Fault(
        "rows_swapped",
        "tree-construction",
        "logits are handed back in another order than the nodes'",
        "two drafts with different rows",
        "tree.logits",
        _rows_swapped,
    ),
    Fault(
        "heads_modulo",
        "GQA-head-mapping",
        "query head h reads the values of head h mod Hkv: right for full and for multi-query heads",
        "grouped heads, 1 < Hkv < Hq",
        "tree.layers",
        target=_with_attention(_heads_modulo),
    ),
    Fault(
        "finite_mask",
        "mask-leak",
        "what a row must not see is made faint by a finite number instead of being hidden",
        "two drafts in different branches",
        "tree.noninterference",
        target=_with_attention(_finite_mask),
    ),
    Fault(
        "first_row_hidden",
        "mask-missing-ancestor",
        "the last layer does not see the oldest row of the prefix",
        "a prefix of one token",
        "tree.sensitivity",
        target=_with_attention(_first_row_hidden),
    ),
)
