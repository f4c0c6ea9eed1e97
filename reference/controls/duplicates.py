"""Siblings that carry the same token: a copy without children before every drafted node."""

from __future__ import annotations

from typing import Any

from specbench.lockstep import Group
from specbench.protocols import Drafter, LanguageModel
from specbench.reference.controls.control import Control
from specbench.reference.decoder import Decoder
from specbench.reference.target import ReferenceTarget
from specbench.tree import DraftTree
from specbench.types import VerifyResult


class _Copying:
    """Another drafter's trees with copies in them, as far as `max_nodes` has room."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter: Any = drafter
        self._drafted: list[int] = []  # the node of the other drafter that each node stands for

    def draft(self, context: list[int], *, max_nodes: int, **asked: Any) -> DraftTree:
        tree: DraftTree = self._drafter.draft(context, max_nodes=max_nodes, **asked)
        room = max_nodes - tree.num_drafts
        tokens, parents, place = tree.token_list[:1], [-1], {0: 0}
        self._drafted = [0]
        for node in range(1, tree.num_nodes):
            for _ in range(1 + (node <= room)):  # the copy comes first, so that a walk meets it first
                place[node] = len(tokens)
                tokens.append(tree.token_list[node])
                parents.append(place[tree.parent_list[node]])
                self._drafted.append(node)
        return DraftTree.of(tokens, parents)


class _CopyingAndObserving(_Copying):
    """Tells the other drafter of its own nodes."""

    def observe(self, result: VerifyResult) -> None:
        self._drafter.observe(VerifyResult(tuple(self._drafted[node] for node in result.path), result.bonus_token))


class _DuplicateSiblings(ReferenceTarget):
    def build(
        self,
        model: LanguageModel,
        drafter: Drafter | None,
        *,
        cache: str = "contiguous",
        layout: str = "tree_mask",
        batch_layout: str = "packed",
        group: Group | None = None,
    ) -> Decoder:
        if drafter is not None:
            drafter = (_CopyingAndObserving if hasattr(drafter, "observe") else _Copying)(drafter)
        return super().build(model, drafter, cache=cache, layout=layout, batch_layout=batch_layout, group=group)


CONTROLS = (
    Control(
        "duplicate_siblings",
        "every drafted node has a sibling before it that carries the same token and has no children",
        "both spell the same text, and a walk that goes on below all copies of it loses nothing",
        _DuplicateSiblings,
    ),
)
