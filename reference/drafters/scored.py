"""Draft trees by cumulative score, a batch of them level by level: the twin of `kernels.draft_topk`, in loops and fp64.

A node's score is the sum of the log-probabilities on its path. Sources: EAGLE-2 (arXiv 2406.16858), which expands the
best of each level and keeps the best of all; Sequoia (2402.12374) for why the sum is what to keep nodes by.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.tree import UNUSED

# tokens int64 [B, C], parents int32 [B, C], scores float64 [B, C]
Nodes = tuple[Tensor, Tensor, Tensor]


def draft_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """logits: float [R, V]. Returns tokens int64 [R, k] and log_probs float64 [R, k], the likeliest first, of equals
    the lowest id; -1 and -inf where a row has fewer tokens of any probability, -1 and NaN in a row without a law."""
    rows = [_best(row, k) for row in logits.double()]
    tokens = torch.tensor([[token for token, _ in row] for row in rows], dtype=torch.int64)
    log_probs = torch.tensor([[log_prob for _, log_prob in row] for row in rows], dtype=torch.float64)
    return tokens.view(-1, k), log_probs.view(-1, k)


def _best(row: Tensor, k: int) -> list[tuple[int, float]]:
    if row.isnan().any() or row.isposinf().any():
        return [(-1, math.nan)] * k
    log_probs = row.log_softmax(-1)
    # Logits are sorted, since log-probabilities of different logits may round to the same.
    best = [int(token) for token in row.sort(descending=True, stable=True).indices if row[token] > -math.inf][:k]
    return [(token, min(0.0, float(log_probs[token]))) for token in best] + [(-1, -math.inf)] * (k - len(best))


def expand(grown: Nodes, frontier: Tensor, tokens: Tensor, log_probs: Tensor, *, width: int) -> tuple[Nodes, Tensor]:
    """frontier: int32 [B, F], columns of `grown`, UNUSED for none. tokens: int64 [B, F, k], log_probs: float [B, F, k].

    Returns the nodes with their children behind them, and the next frontier int32 [B, width]: the best children, best
    first. A child of log-probability -inf or NaN is no node: parent UNUSED, token 0. Children of UNUSED are not read.
    """
    num_trees, num_old = grown[0].shape
    rows, new_frontier = [], []
    for tree in range(num_trees):
        row = _Row(*(one[tree].tolist() for one in grown))
        for place, parent in enumerate(frontier[tree].tolist()):
            for token, log_prob in zip(tokens[tree, place].tolist(), log_probs[tree, place].tolist(), strict=True):
                score = row.scores[parent] + log_prob if parent >= 0 else -math.inf
                is_node = score > -math.inf
                row.append(token if is_node else 0, parent if is_node else UNUSED, score)
        best = row.best([node for node in row.nodes if node >= num_old], width)
        new_frontier.append(best + [UNUSED] * (width - len(best)))
        rows.append(row)
    return _nodes(rows), torch.tensor(new_frontier, dtype=torch.int32)


def select(grown: Nodes, *, max_nodes: int) -> Nodes:
    """The best `max_nodes` nodes of each tree, the root among them, in their old order, parents renumbered. Behind them
    token 0, parent UNUSED, score -inf. The root's score is NaN where a candidate's is."""
    rows = []
    for tree in range(grown[0].shape[0]):
        row, made = _Row(*(one[tree].tolist() for one in grown)), _Row([], [], [])
        kept = sorted(row.best(row.nodes, max_nodes))
        for node in kept:
            parent = row.parents[node]
            made.append(row.tokens[node], kept.index(parent) if parent >= 0 else -1, row.scores[node])
        for _ in range(max_nodes - len(kept)):
            made.append(0, UNUSED, -math.inf)
        if any(math.isnan(score) for score in row.scores):
            made.scores[0] = math.nan
        rows.append(made)
    return _nodes(rows)


@dataclass
class _Row:
    """One tree's columns."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]

    def append(self, token: int, parent: int, score: float) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score)

    @property
    def nodes(self) -> list[int]:
        return [node for node, parent in enumerate(self.parents) if parent != UNUSED]

    def best(self, nodes: list[int], num: int) -> list[int]:
        """Best first, of equals the one that stands first."""
        return sorted(nodes, key=lambda node: (-self.scores[node], node))[:num]


def _nodes(rows: list[_Row]) -> Nodes:
    return (
        torch.tensor([row.tokens for row in rows], dtype=torch.int64),
        torch.tensor([row.parents for row in rows], dtype=torch.int32),
        torch.tensor([row.scores for row in rows], dtype=torch.float64),
    )
