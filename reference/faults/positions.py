"""Rows at the wrong position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from specbench.reference.faults.fault import Fault
from specbench.reference.faults.hooks import Change, everywhere, in_verify
from specbench.reference.model import Attend, LlamaModel, Mix
from specbench.steps import FlatTree, Steps
from specbench.tree import DraftTree


def _with_depth(change: Callable[[DraftTree, FlatTree], Tensor]) -> Callable[[Steps], Steps]:
    """Plants a layout whose positions are the prefix's length and `change(tree, flat)`, int64 [M]."""

    def plant(steps: Steps) -> Steps:
        def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
            flat = steps.flatten(tree, prefix_len)
            return replace(flat, position_ids=prefix_len + change(tree, flat))

        return replace(steps, flatten=flatten)

    return plant


def _rank_added(tree: DraftTree, flat: FlatTree) -> Tensor:
    ranks = [0, *(tree.children(tree.parent_list[node]).index(node) for node in range(1, tree.num_nodes))]
    return (tree.depth + torch.tensor(ranks))[flat.node_of_row]


def _deeper_with_each_parent(tree: DraftTree, flat: FlatTree) -> Tensor:
    """A new level begins wherever the parent is another one than the node's before."""
    depth = [0]
    for node in range(1, tree.num_nodes):
        depth.append(depth[-1] + (tree.parent_list[node] != tree.parent_list[node - 1]))
    return torch.tensor(depth)[flat.node_of_row]


def _rows_counted_on(tree: DraftTree, flat: FlatTree) -> Tensor:
    return torch.arange(flat.num_rows) if flat.num_rows > tree.num_nodes else tree.depth[flat.node_of_row]


def _depth_of_row_number(tree: DraftTree, flat: FlatTree) -> Tensor:
    return tree.depth[torch.arange(flat.num_rows) % tree.num_nodes]


def _with_base(base_of: Callable[[int, FlatTree, int], int]) -> Callable[[Steps], Steps]:
    """Plants positions that begin, from the second round on, at `base_of(old prefix length, old flat, prefix
    length)`."""

    def plant(steps: Steps) -> Steps:
        before: tuple[int, FlatTree] | None = None

        def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
            nonlocal before
            flat = steps.flatten(tree, prefix_len)
            is_next = before is not None and prefix_len > before[0]
            base = base_of(before[0], before[1], prefix_len) if before and is_next else prefix_len
            before = prefix_len, flat
            return replace(flat, position_ids=flat.position_ids - prefix_len + base)

        return replace(steps, flatten=flatten)

    return plant


def _short_after_full_accept(old_len: int, old: FlatTree, prefix_len: int) -> int:
    deepest = int(old.position_ids.max()) - old_len
    return prefix_len - 1 if deepest and prefix_len == old_len + 1 + deepest else prefix_len


def _stale_base(steps: Steps) -> Steps:
    base: int | None = None

    def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
        nonlocal base
        flat = steps.flatten(tree, prefix_len)
        base = prefix_len if base is None else min(base, prefix_len)
        return replace(flat, position_ids=flat.position_ids - prefix_len + base)

    return replace(steps, flatten=flatten)


def _turned(queries: bool, shift: Callable[[Tensor], Tensor]) -> Change:
    """Queries, or keys, of a tree are turned by `shift(position_ids)` positions too many."""

    def change(model: LlamaModel) -> None:
        right = model._mix_by

        def mix_by(position_ids: Tensor, attend: Attend) -> Mix:
            cos, sin = model._rotation(shift(position_ids))

            def attend_turned(layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
                if queries:
                    return attend(layer, model._rotate(q, cos, sin), k, v)
                return attend(layer, q, model._rotate(k, cos, sin), v)

            return right(position_ids, attend_turned)

        model._mix_by = mix_by  # type: ignore[method-assign]

    return change


def _to_row_number(position_ids: Tensor) -> Tensor:
    return position_ids[0] + torch.arange(len(position_ids)) - position_ids


def _to_depth(position_ids: Tensor) -> Tensor:
    return -position_ids[0].expand(len(position_ids))


def _angles_in_float32(model: LlamaModel) -> None:
    def rotation(position_ids: Tensor) -> tuple[Tensor, Tensor]:
        exponents = torch.arange(0, model.config.head_dim, 2, device=model.device, dtype=torch.float32)
        frequencies = model.config.rope_theta ** (-exponents / model.config.head_dim)
        angles = (position_ids.float()[..., None] * frequencies).unsqueeze(-3)
        return angles.cos().to(model._wide), angles.sin().to(model._wide)

    model._rotation = rotation  # type: ignore[method-assign]


FAULTS = (
    Fault(
        "index_position",
        "position-ids",
        "a draft's position is its index in the flattened tree instead of its depth",
        "the second child of any node: chains and the leftmost path are right",
        "tree.positions",
        _with_depth(lambda tree, flat: flat.node_of_row),
        origin="NVIDIA/TensorRT-LLM#13081",
        subtle="a second sibling",
        kin="row_for_depth",
    ),
    Fault(
        "rows_counted_on",
        "position-ids",
        "paths that are written out one after the other go on counting where the path before ends",
        "two paths, in a layout of whole paths",
        "tree.positions",
        _with_depth(_rows_counted_on),
        subtle="a layout of whole paths",
        kin="row_for_depth",
    ),
    Fault(
        "depth_of_row_number",
        "position-ids",
        "depths are looked up by the number of the row instead of by its node",
        "rows that are not in the order of nodes: a layout of whole paths",
        "tree.positions",
        _with_depth(_depth_of_row_number),
        subtle="a layout of whole paths",
    ),
    Fault(
        "sibling_positions_rise",
        "position-ids",
        "siblings stand one behind the other instead of at the same position",
        "a second sibling",
        "tree.positions",
        _with_depth(_rank_added),
        subtle="a second sibling",
    ),
    Fault(
        "level_begins_with_parent",
        "position-ids",
        "a new level is taken to begin wherever the parent changes",
        "two nodes of one level with different parents",
        "tree.positions",
        _with_depth(_deeper_with_each_parent),
        subtle="width at depth two",
    ),
    Fault(
        "base_one_ahead",
        "position-ids",
        "the rows of a tree begin one position too far right",
        "any forward of a tree",
        "tree.positions",
        _with_depth(lambda tree, flat: tree.depth[flat.node_of_row] + 1),
    ),
    Fault(
        "drafts_one_back",
        "position-ids",
        "depth is counted from the first level of drafts, which gets the root's position",
        "any draft",
        "tree.positions",
        _with_depth(lambda tree, flat: (tree.depth[flat.node_of_row] - 1).clamp(min=0)),
    ),
    Fault(
        "base_not_advanced",
        "position-ids",
        "positions start from the prompt's length in every round",
        "a second round",
        "kv.commit",
        _stale_base,
        subtle="a second round",
    ),
    Fault(
        "base_counts_rejected_rows",
        "position-ids",
        "a round's positions begin behind all rows of the round before, rejected ones too",
        "a second round after a rejection",
        "kv.commit",
        _with_base(lambda old_len, old, prefix_len: old_len + old.num_rows),
        origin="vllm-project/vllm#44697",
        subtle="a second round after a rejection",
    ),
    Fault(
        "base_short_after_full_accept",
        "position-ids",
        "a round's positions begin one too early when the round before was accepted to its end",
        "a second round after a full accept",
        "kv.commit",
        _with_base(_short_after_full_accept),
        subtle="full accept, then a second round",
    ),
    Fault(
        "keys_by_row_number",
        "position-ids",
        "keys are turned by the row's number in the flattened tree, queries by the right position",
        "a second sibling",
        "tree.layers",
        in_verify(_turned(False, _to_row_number)),
        subtle="a second sibling; the position ids are right",
        kin="turned_by_row_number",
    ),
    Fault(
        "queries_by_row_number",
        "position-ids",
        "queries are turned by the row's number in the flattened tree, keys by the right position",
        "a second sibling",
        "tree.layers",
        in_verify(_turned(True, _to_row_number)),
        subtle="a second sibling; the position ids are right",
        kin="turned_by_row_number",
    ),
    Fault(
        "keys_without_base",
        "position-ids",
        "keys of a tree are turned by their depth alone, the prefix's length is left out",
        "a prefix of one token",
        "tree.layers",
        in_verify(_turned(False, _to_depth)),
    ),
    Fault(
        "angles_in_float32",
        "dtype/precision",
        "rotary angles of a model in double precision are computed in single precision",
        "any position but zero",
        "tree.logits",
        target=everywhere(_angles_in_float32),
        subtle="an error of a ten-millionth",
    ),
)
