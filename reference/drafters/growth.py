"""Growing a draft tree level by level from a law of the next token: fixed in shape, or by score under a budget.

A law is asked for the children of some nodes of one level at a time, so that a model computes a level in one forward.
What a law keeps of nodes it has seen is its own business. Drawing drafts is `sampled.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specbench.tree import DraftTree


class Law(Protocol):
    """ids: int64 [V'], the token of each column of what the law returns; None where columns are tokens."""

    @property
    def ids(self) -> Tensor | None: ...

    def __call__(self, tokens: Sequence[int], parents: Sequence[int], level: Sequence[int]) -> Tensor:
        """tokens, parents: all nodes grown so far. level: the nodes whose children are asked for, of one depth, each
        asked for once. Returns log-probabilities float [len(level), V']."""
        ...


@dataclass(frozen=True)
class Static:
    """The same tree every round. paths: each node as the ranks (0 the likeliest) of the tokens on its way from the
    root, every beginning of a path a path too. Medusa (arXiv 2401.10774) keeps its trees so."""

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        known = set(self.paths) | {()}
        for path in self.paths:
            if not path or min(path) < 0 or path[:-1] not in known:
                raise ValueError(f"paths holds {path}, must hold {path[:-1]} too, and ranks >= 0")

    @classmethod
    def widths(cls, *widths: int) -> Static:
        """The widths[d] likeliest children of every node at depth d."""
        if not widths or min(widths) < 1:
            raise ValueError(f"widths = {widths} must name at least one level, each >= 1")
        level: list[tuple[int, ...]] = [()]
        paths: list[tuple[int, ...]] = []
        for width in widths:
            level = [(*path, rank) for path in level for rank in range(width)]
            paths += level
        return cls(tuple(paths))

    @classmethod
    def best(cls, accuracies: Sequence[Sequence[float]], *, num_nodes: int) -> Static:
        """The tree of `num_nodes` drafts that is accepted furthest on average, when the token of rank r at depth d is
        right with probability accuracies[d][r] whatever stands before it (Medusa's choice, greedily)."""
        paths: list[tuple[int, ...]] = []
        reach: dict[tuple[int, ...], float] = {(): 1.0}
        open_paths: dict[tuple[int, ...], float] = {(0,): accuracies[0][0]} if accuracies and accuracies[0] else {}
        while open_paths and len(paths) < num_nodes:
            path = max(open_paths, key=lambda one: (open_paths[one], -len(one), [-rank for rank in one]))
            reach[path] = open_paths.pop(path)
            paths.append(path)
            depth, rank = len(path), path[-1]
            if rank + 1 < len(accuracies[depth - 1]):
                sibling = (*path[:-1], rank + 1)
                open_paths[sibling] = reach[path[:-1]] * accuracies[depth - 1][rank + 1]
            if depth < len(accuracies):
                child = (*path, 0)
                open_paths[child] = reach[path] * accuracies[depth][0]
        return cls(tuple(paths))


@dataclass(frozen=True)
class BestFirst:
    """Of each level the `beam` likeliest nodes get their `width` likeliest children, `depth` levels deep; of all these
    the `num_nodes` of the highest score are kept (EAGLE-2, arXiv 2406.16858). A node's score is the sum of the
    log-probabilities on its path. least_score: nodes below it are left out; a tree may be the root alone."""

    num_nodes: int
    depth: int = 5
    beam: int = 8
    width: int = 8
    least_score: float = -math.inf

    def __post_init__(self) -> None:
        for name in ("num_nodes", "depth", "beam", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be >= 1")


Shape = Static | BestFirst


def grow(root_token: int, law: Law, shape: Shape, *, max_nodes: int, max_depth: int) -> DraftTree:
    """The tree of a shape, cut to at most `max_nodes` drafts and `max_depth` levels."""
    if isinstance(shape, Static):
        return _static(root_token, law, shape, max_nodes=max_nodes, max_depth=max_depth)
    return _best_first(root_token, law, shape, max_nodes=max_nodes, max_depth=max_depth)


def _static(root_token: int, law: Law, shape: Static, *, max_nodes: int, max_depth: int) -> DraftTree:
    tokens, parents = [root_token], [-1]
    # In order of depth; the first ones are kept where the budget is smaller.
    paths = sorted((one for one in shape.paths if len(one) <= max_depth), key=len)[:max_nodes]
    node_of: dict[tuple[int, ...], int] = {(): 0}
    for depth in range(1, max((len(one) for one in paths), default=0) + 1):
        level = [one for one in paths if len(one) == depth]
        above = [one for one in dict.fromkeys(path[:-1] for path in level) if one in node_of]
        if not above:
            break
        most = 1 + max(path[-1] for path in level)
        found = dict(zip(above, _likeliest(law, tokens, parents, [node_of[one] for one in above], most), strict=True))
        for path in level:
            likeliest = found.get(path[:-1], [])
            if path[-1] < len(likeliest):
                node_of[path] = len(tokens)
                parents.append(node_of[path[:-1]])
                tokens.append(likeliest[path[-1]][0])
    return DraftTree.of(tokens, parents)


def _best_first(root_token: int, law: Law, shape: BestFirst, *, max_nodes: int, max_depth: int) -> DraftTree:
    tokens, parents, scores = [root_token], [-1], [0.0]
    level = [0]
    for _ in range(min(shape.depth, max_depth)):
        children = []
        for node, likeliest in zip(level, _likeliest(law, tokens, parents, level, shape.width), strict=True):
            for token, log_prob in likeliest:
                if scores[node] + log_prob >= shape.least_score:
                    children.append(len(tokens))
                    tokens.append(token)
                    parents.append(node)
                    scores.append(scores[node] + log_prob)
        level = sorted(sorted(children, key=lambda child: -scores[child])[: shape.beam])
        if not level:
            break
    # A node stands behind its parent and scores no more, so that sorting by score keeps every parent of what is kept.
    kept = sorted(sorted(range(1, len(tokens)), key=lambda node: -scores[node])[: min(shape.num_nodes, max_nodes)])
    row_of = {node: row for row, node in enumerate([0, *kept])}
    return DraftTree.of([root_token, *(tokens[node] for node in kept)], [-1, *(row_of[parents[node]] for node in kept)])


def _likeliest(
    law: Law, tokens: Sequence[int], parents: Sequence[int], level: Sequence[int], most: int
) -> Iterator[list[tuple[int, float]]]:
    """For each node of `level` its `most` likeliest children and their log-probabilities; of equals the first column.
    Tokens of no probability are left out."""
    log_probs = law(tokens, parents, level)
    # Twice as many, since topk does not say which of equals it takes.
    best, columns = log_probs.topk(min(2 * most, log_probs.shape[1]), dim=1)
    ids = columns if law.ids is None else law.ids[columns]
    for row, its_columns, its_ids in zip(best.tolist(), columns.tolist(), ids.tolist(), strict=True):
        ordered = sorted(zip(row, its_columns, its_ids, strict=True), key=lambda one: (-one[0], one[1]))
        yield [(token, min(0.0, log_prob)) for log_prob, _, token in ordered[:most] if log_prob > -math.inf]
