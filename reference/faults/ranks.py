"""Ranks that decide something for themselves: what they hear from the first one is used in part, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specbench.lockstep import Group
from specbench.reference.faults.fault import Fault
from specbench.reference.target import ReferenceTarget
from specbench.tree import DraftTree, root_only
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


class _OwnRoot:
    """Where it has accepted nothing a rank takes itself for the one to be heard."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size = group.rank, group.size
        self._group = group

    def broadcast(self, value: Any, *, root: int = 0) -> Any:
        nothing = isinstance(value, VerifyResult) and not value.path
        return self._group.broadcast(value, root=self.rank if nothing else root)


def _plain_rounds_alone(group: Group) -> Group:
    """Without drafts there is nothing to agree on but the bonus token, which is thought to be the same everywhere."""
    num_drafts = 0

    def hear(rank: int, own: Any, broadcast: Callable[[Any], Any]) -> Any:
        nonlocal num_drafts
        if isinstance(own, VerifyResult) and not num_drafts:
            return own
        heard = broadcast(own)
        if isinstance(heard, DraftTree):
            num_drafts = heard.num_drafts
        return heard

    return _Partial(group, hear)


def _own_bonus(group: Group) -> Group:
    def hear(rank: int, own: Any, broadcast: Callable[[Any], Any]) -> Any:
        heard = broadcast(own)
        is_same_path = isinstance(own, VerifyResult) and own.path == heard.path
        return VerifyResult(heard.path, own.bonus_token) if is_same_path else heard

    return _Partial(group, hear)


def _own_path(group: Group) -> Group:
    def hear(rank: int, own: Any, broadcast: Callable[[Any], Any]) -> Any:
        heard = broadcast(own)
        return VerifyResult(own.path, heard.bonus_token) if isinstance(own, VerifyResult) else heard

    return _Partial(group, hear)


def _children_reversed(group: Group) -> Group:
    def hear(rank: int, own: Any, broadcast: Callable[[Any], Any]) -> Any:
        heard = broadcast(own)
        if rank == 0 or not isinstance(heard, DraftTree):
            return heard
        tokens = list(heard.token_list)
        for node in range(heard.num_nodes):
            leaves = [child for child in heard.children(node) if not heard.children(child)]
            for child, other in zip(leaves, reversed(leaves), strict=True):
                tokens[child] = heard.token_list[other]
        return DraftTree.of(tokens, heard.parent_list)

    return _Partial(group, hear)


def _count_only(group: Group) -> Group:
    """The other ranks are told how many drafts are accepted, and keep the leftmost so many."""
    tree = root_only(0)

    def hear(rank: int, own: Any, broadcast: Callable[[Any], Any]) -> Any:
        nonlocal tree
        heard = broadcast(own)
        if isinstance(heard, DraftTree):
            tree = heard
            return heard
        path: list[int] = []
        while len(path) < len(heard.path) and tree.children(path[-1] if path else 0):
            path.append(tree.children(path[-1] if path else 0)[0])
        return heard if rank == 0 else VerifyResult(tuple(path), heard.bonus_token)

    return _Partial(group, hear)


FAULTS = (
    Fault(
        "ranks_alone",
        "rank-divergence",
        "each rank drafts and accepts by itself and asks no other",
        "logits that differ by rounding at a tie",
        "ranks.agree",
        target=_target(lambda group: None),
        origin="vllm-project/vllm#31307",
    ),
    Fault(
        "rank_accepts_alone",
        "rank-divergence",
        "drafts are the first rank's, but each rank accepts by its own logits",
        "logits that differ by rounding at a tie",
        "ranks.agree",
        target=_target(_own_acceptance),
        origin="vllm-project/vllm#17509",
    ),
    Fault(
        "rank_draft_length",
        "rank-divergence",
        "draft tokens are the first rank's, but each rank keeps as many as it would have drafted itself",
        "drafters of different seeds",
        "ranks.agree",
        target=_target(_own_length),
        subtle="drafts of unequal length on the ranks",
    ),
    Fault(
        "rank_silent",
        "rank-divergence",
        "a rank that has drafted nothing skips the exchange of drafts, whatever the others do",
        "one rank with drafts and one without",
        "ranks.agree",
        target=_target(_silent_without_drafts),
        origin="vllm-project/vllm#49027",
        subtle="a round in which one rank has no drafts",
    ),
    Fault(
        "rank_names_itself",
        "rank-divergence",
        "where nothing is accepted each rank names itself as the one to be heard",
        "a round in which nothing is accepted",
        "ranks.agree",
        target=_target(_OwnRoot),
    ),
    Fault(
        "plain_rounds_alone",
        "rank-divergence",
        "in a round without drafts nothing is exchanged, and each rank takes its own token",
        "a round without drafts, and logits that differ by rounding at a tie",
        "ranks.agree",
        target=_target(_plain_rounds_alone),
        subtle="a round without drafts",
    ),
    Fault(
        "rank_own_bonus",
        "rank-divergence",
        "the accepted path is the first rank's, the bonus token behind it each rank's own",
        "logits that differ by rounding at a tie behind the path",
        "ranks.agree",
        target=_target(_own_bonus),
    ),
    Fault(
        "rank_own_path",
        "rank-divergence",
        "the bonus token is the first rank's, the accepted path each rank's own",
        "logits that differ by rounding at a tie on the path",
        "ranks.agree",
        target=_target(_own_path),
        subtle="a tie at an accepted draft",
    ),
    Fault(
        "rank_children_order",
        "rank-divergence",
        "the ranks agree on the draft, but all others than the first keep leaf siblings in reverse order",
        "two leaf siblings",
        "ranks.agree",
        target=_target(_children_reversed),
        subtle="siblings",
    ),
    Fault(
        "rank_count_only",
        "rank-divergence",
        "only the number of accepted drafts is exchanged: other ranks keep the leftmost ones",
        "an accepted path off the leftmost one",
        "ranks.agree",
        target=_target(_count_only),
        subtle="a partial accept off the leftmost path",
    ),
)
