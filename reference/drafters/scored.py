"""Draft trees by cumulative score, a batch of them level by level: the twin of `kernels.draft_topk`, in loops and fp64.

A node's score is the sum of the log-probabilities on its path. Sources: EAGLE-2 (arXiv 2406.16858), which expands the
best of each level and keeps the best of all; Sequoia (2402.12374) for why the sum is what to keep nodes by.
"""

from __future__ import annotations

import math

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
    first. A child of log-probability -inf or NaN is no node: parent UNUSED, token 0.
    """
    new_rows, new_frontier = [], []
    num_old = grown[0].shape[1]
    for tree, columns in enumerate(frontier.tolist()):
        row = [one[tree].tolist() for one in grown]
        for column, its_tokens, its_log_probs in zip(columns, tokens[tree], log_probs[tree], strict=True):
            for token, log_prob in zip(its_tokens.tolist(), its_log_probs.tolist(), strict=True):
                score = row[2][column] + log_prob if column >= 0 else -math.inf
                is_node = score > -math.inf
                for values, value in zip(
                    row, (token if is_node else 0, column if is_node else UNUSED, score), strict=True
                ):
                    values.append(value)
        children = [child for child in range(num_old, len(row[0])) if row[1][child] != UNUSED]
        best = sorted(children, key=lambda child, scores=row[2]: (-scores[child], child))[:width]
        new_frontier.append(best + [UNUSED] * (width - len(best)))
        new_rows.append(row)
    return _nodes(new_rows), torch.tensor(new_frontier, dtype=torch.int32)


def select(grown: Nodes, *, max_nodes: int) -> Nodes:
    """The best `max_nodes` nodes of each tree, the root among them, in their old order, parents renumbered. Behind them
    token 0, parent UNUSED, score -inf. The root's score is NaN where a candidate's is."""
    rows = []
    for tree in range(grown[0].shape[0]):
        tokens, parents, scores = (one[tree].tolist() for one in grown)
        nodes = [node for node, parent in enumerate(parents) if parent != UNUSED]
        kept = sorted(sorted(nodes, key=lambda node, scores=scores: (-scores[node], node))[:max_nodes])
        row_of = {node: row for row, node in enumerate(kept)}
        if any(math.isnan(score) for score in scores):
            scores[0] = math.nan
        num_empty = max_nodes - len(kept)
        rows.append(
            [
                [tokens[node] for node in kept] + [0] * num_empty,
                [row_of.get(parents[node], -1) for node in kept] + [UNUSED] * num_empty,
                [scores[node] for node in kept] + [-math.inf] * num_empty,
            ]
        )
    return _nodes(rows)


def _nodes(rows: list[list[list[float]]]) -> Nodes:
    tokens, parents, scores = (list(one) for one in zip(*rows, strict=True))
    return (
        torch.tensor(tokens, dtype=torch.int64),
        torch.tensor(parents, dtype=torch.int32),
        torch.tensor(scores, dtype=torch.float64),
    )
