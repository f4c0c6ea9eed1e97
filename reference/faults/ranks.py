"""Ranks that decide something for themselves: what they hear from the first one is used in part, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specbench.lockstep import Group
from specbench.reference.faults.fault import Fault
from specbench.reference.target import ReferenceTarget
from specbench.tree import DraftTree
from specbench.types import VerifyResult


class _Partial:
    """A group whose `broadcast` is `hear(rank, own value, broadcast of the good group)`."""

    def __init__(self, group: Group, hear: Callable[[int, Any, Callable[[Any], Any]], Any]) -> None:
        self.rank, self.size = group.rank, group.size
        self._group = group
        self._hear = hear

    def broadcast(self, value: Any, *, root: int = 0) -> Any:
        return self._hear(self.rank, value, lambda one: self._group.broadcast(one, root=root))


def _target(plant_group: Callable[[Group], Group | None]) -> Callable[[], ReferenceTarget]:
    return lambda: ReferenceTarget(plant_group=plant_group)


def _own_acceptance(group: Group) -> Group:
    def hear(rank: int, own: Any, broadcast: Callable[[Any], Any]) -> Any:
        heard = broadcast(own)
        return own if isinstance(own, VerifyResult) else heard

    return _Partial(group, hear)


def _own_length(group: Group) -> Group:
    num_nodes = 1

    def hear(rank: int, own: Any, broadcast: Callable[[Any], Any]) -> Any:
        nonlocal num_nodes
        heard = broadcast(own)
        if isinstance(heard, DraftTree):
            num_nodes = min(own.num_nodes, heard.num_nodes)
            return DraftTree.of(heard.token_list[:num_nodes], heard.parent_list[:num_nodes])
        return VerifyResult(tuple(node for node in heard.path if node < num_nodes), heard.bonus_token)

    return _Partial(group, hear)


def _silent_without_drafts(group: Group) -> Group:
    def hear(rank: int, own: Any, broadcast: Callable[[Any], Any]) -> Any:
        if isinstance(own, DraftTree) and own.num_drafts == 0:
            return own
        return broadcast(own)

    return _Partial(group, hear)


FAULTS = (
    Fault(
        "ranks_alone",
        "rank-divergence",
        "each rank drafts and accepts by itself and asks no other",
        "logits that differ by rounding at a tie",
        "ranks.agree",
        target=_target(lambda group: None),
    ),
    Fault(
        "rank_accepts_alone",
        "rank-divergence",
        "drafts are the first rank's, but each rank accepts by its own logits",
        "logits that differ by rounding at a tie",
        "ranks.agree",
        target=_target(_own_acceptance),
    ),
    Fault(
        "rank_draft_length",
        "rank-divergence",
        "draft tokens are the first rank's, but each rank keeps as many as it would have drafted itself",
        "drafters of different seeds",
        "ranks.agree",
        target=_target(_own_length),
    ),
    Fault(
        "rank_silent",
        "rank-divergence",
        "a rank that has drafted nothing skips the exchange of drafts, whatever the others do",
        "one rank with drafts and one without",
        "ranks.agree",
        target=_target(_silent_without_drafts),
    ),
)
