"""The most drafts that any lossless rule can accept, exactly: what a rule leaves lying is measured against it.

A rule that couples one node at a time with p is bounded by transport at each node (Hu et al., arXiv 2502.18779; Thomas
and Pal, arXiv 2511.15898); one that couples whole blocks exceeds that, and is bounded by transport over paths.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from math import lcm
from typing import Any

from specbench.law.enumeration import Law, outcomes
from specbench.law.joint import draft_law
from specbench.law.toys import Context, Drafting, Parents, Toy, depth_of, draft

Tokens = tuple[int, ...]
Branches = tuple["Branches", ...]  # a node as the tuple of its children: a leaf is ()


def node_optimum(p: Law, drafts: Mapping[frozenset[int], Any]) -> Any:
    """The most that any coupling of one node's drafts with p accepts: P(the target's token is among the drafted ones).

    drafts: P of each set of drafted tokens. By min cut, the least over sets H of p(H) + P(a draft is not in H); with a
    single draft, the sum of min(p, q).
    """
    return min(
        sum((p[token] for token in inside), 0 * p[0])
        + sum(weight for drafted, weight in drafts.items() if not drafted <= set(inside))
        for inside in _subsets(range(len(p)))
    )


def best_by_nodes(toy: Toy, context: Context, shape: Parents, drafting: Drafting) -> Fraction:
    """The expected number of accepted drafts under the best rule that keeps p at every node by itself.

    A drafted token is worth one and what can be had below it, where copies of it lend it the children of all of them.
    """
    nodes: list[Branches] = [()] * len(shape)
    for node in range(len(shape) - 1, 0, -1):
        nodes[shape[node]] = (nodes[node], *nodes[shape[node]])
    return _best_below(toy, context, nodes[0], _marginal(drafting))


@lru_cache(maxsize=10_000)
def best_by_paths(toy: Toy, context: Context, shape: Parents, drafting: Drafting) -> Fraction:
    """No lossless rule accepts more on average: the sum over d of the most that P(accepted >= d) can be.

    That is the largest flow from what is drafted, a set of paths of length d, to the target's paths; on a chain the sum
    over paths of min(p(path), q(path)).
    """
    drawn = draft_law(toy, context, shape, _marginal(drafting))
    total = Fraction(0)
    for depth in range(1, depth_of(shape) + 1):
        drafts: dict[frozenset[Tokens], Any] = {}
        for drafted, weight in drawn:
            tree = drafted.tree
            ends = [node for node in range(tree.num_nodes) if int(tree.depth[node]) == depth]
            paths = frozenset(tuple(tree.path_tokens(node)[1:]) for node in ends)
            drafts[paths] = drafts.get(paths, 0) + weight
        target = {path: _path_mass(toy, context, path) for path in {one for paths in drafts for one in paths}}
        total += transport(drafts, {paths: dict.fromkeys(paths, 1) for paths in drafts}, target)
    return total


def transport(supply: Mapping[Any, Any], worth: Mapping[Any, Mapping[Any, Any]], demand: Mapping[Any, Any]) -> Fraction:
    """The most that goods are worth where they arrive: each source gives at most its supply, each sink takes at most
    its demand, and worth[source][sink] > 0 is that of one unit where that way is open.

    Numbers are made whole first, then the way that gains most is filled again and again (successive longest paths).
    """
    scale = _denominator([*supply.values(), *demand.values()])
    unit = _denominator([gain for ways in worth.values() for gain in ways.values()])
    room: dict[Any, dict[Any, int]] = {"start": {}, "end": {}}
    gains: dict[tuple[Any, Any], int] = {}
    ways: list[tuple[Any, Any, Any, Any]] = [("start", ("from", source), supply[source], 0) for source in worth]
    ways += [(("to", sink), "end", mass, 0) for sink, mass in demand.items()]
    ways += [
        (("from", source), ("to", sink), supply[source], gain * unit)
        for source, sinks in worth.items()
        for sink, gain in sinks.items()
    ]
    for here, there, mass, gain in ways:
        room.setdefault(here, {})[there] = int(mass * scale)
        room.setdefault(there, {})[here] = 0
        gains[here, there], gains[there, here] = int(gain), -int(gain)
    total = 0
    while path := _best_way(room, gains):
        least = min(room[here][there] for here, there in path)
        for here, there in path:
            room[here][there] -= least
            room[there][here] += least
        total += least * sum(gains[step] for step in path)
    return Fraction(total, scale * unit)


def _best_way(room: Mapping[Any, Mapping[Any, int]], gains: Mapping[tuple[Any, Any], int]) -> list[tuple[Any, Any]]:
    """The steps from start to end that gain most (Bellman and Ford); none where all are full or none gains any more."""
    best: dict[Any, int] = {"start": 0}
    before: dict[Any, Any] = {}
    todo: list[Any] = ["start"]
    while todo:
        changed: dict[Any, None] = {}
        for here in todo:
            for there, left in room[here].items():
                gain = best[here] + gains[here, there]
                if left > 0 and (there not in best or gain > best[there]):
                    best[there], before[there] = gain, here
                    changed[there] = None
        todo = list(changed)
    path: list[tuple[Any, Any]] = []
    place: Any = "end" if best.get("end", 0) > 0 else None
    while place in before:
        path.append((before[place], place))
        place = before[place]
    return path


@lru_cache(maxsize=10_000)
def _best_below(toy: Toy, context: Context, node: Branches, drafting: Drafting) -> Fraction:
    if not node:
        return Fraction(0)
    star = (-1, *(0 for _ in node))
    supply: dict[frozenset[tuple[int, Branches]], Any] = {}
    for weight, drafted in outcomes(lambda chance: draft(toy, context, star, drafting, chance)):
        below: dict[int, Branches] = {}
        for token, children in zip(drafted.tree.token_list[1:], node, strict=False):  # fewer where q is exhausted
            below[token] = tuple(sorted((*below.get(token, ()), *children)))
        key = frozenset(below.items())
        supply[key] = supply.get(key, 0) + weight
    worth = {
        key: {token: 1 + _best_below(toy, (*context, token), children, drafting) for token, children in key}
        for key in supply
    }
    return transport(supply, worth, dict(enumerate(toy.p(context))))


def _denominator(numbers: Iterable[Any]) -> int:
    return lcm(*(Fraction(one).denominator for one in numbers))


def _subsets(tokens: Sequence[int]) -> Iterable[list[int]]:
    for bits in range(2 ** len(tokens)):
        yield [token for idx, token in enumerate(tokens) if bits >> idx & 1]


def _path_mass(toy: Toy, context: Context, path: Tokens) -> Any:
    mass = Fraction(1)
    for idx, token in enumerate(path):
        mass *= toy.p(context + path[:idx])[token]
    return mass


def _marginal(drafting: Drafting) -> Drafting:
    """A single race drafts as a draw does: noise it shares with the target widens no bound."""
    return "iid" if drafting == "race" else drafting
