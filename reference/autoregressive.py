"""The oracle: plain decoding, one token at a time, whole prefix recomputed, no cache. The definition of right.

Also the fast oracle, which scores every node of a tree by one batched causal forward over its paths; tests prove it
equal to the naive one. Nothing here knows masks, positions of trees, or caches: that is what it is there to judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.protocols import LanguageModel
from specbench.reference.processors import process_row
from specbench.reference.verify import argmax_lowest
from specbench.tree import DraftTree
from specbench.types import GREEDY, NEVER_STOP, Generation, LayerTap, Sampling, Stop, Taps


def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    stop: Stop = NEVER_STOP,
    sampling: Sampling = GREEDY,
    past_stop: bool = False,
) -> Generation:
    """Greedy decoding by definition. Costs a whole forward a token.

    past_stop: go on where `stop` would end, which a script for a drafter needs (its drafts reach beyond the stop).
    """
    tokens, num_prompt = list(prompt), len(prompt)
    for _ in range(max_new_tokens):
        row = process_row(model.logits(tokens)[-1], tokens, num_prompt=num_prompt, sampling=sampling, stop=stop)
        tokens.append(argmax_lowest(row))
        reason = stop.reason_at(tokens[num_prompt:])
        if reason and not past_stop:
            return Generation(tuple(tokens[num_prompt:]), reason)
    return Generation(tuple(tokens[num_prompt:]), "length")


@dataclass(frozen=True)
class NodeScores:
    """What plain decoding computes at each node of a tree.

    logits: float [N, V]. layers: one LayerTap per layer with N rows (k, v [Hkv, N, D]; attention_output and
    hidden_state [N, hidden]); attention weights are left out, since their width differs by node.
    """

    logits: Tensor
    layers: tuple[LayerTap, ...]


def score_tree(model: LanguageModel, prefix: Sequence[int], tree: DraftTree) -> NodeScores:
    """One causal forward over all root-to-leaf paths at once, each behind the prefix, right-padded to one length.

    Padding stands behind every row that is read, and a causal forward never looks ahead.
    """
    paths = tree.paths()
    longest = max(len(path) for path in paths)
    batch = torch.zeros(len(paths), len(prefix) + longest, dtype=torch.int64)
    where: dict[int, tuple[int, int]] = {}  # node -> (sequence, position) of its first appearance
    for row, path in enumerate(paths):
        text = [*prefix, *(tree.token_list[node] for node in path)]
        batch[row, : len(text)] = torch.tensor(text)
        for step, node in enumerate(path):
            where.setdefault(node, (row, len(prefix) + step))
    taps = Taps()
    logits = model.causal(batch, taps=taps)
    rows, positions = (list(one) for one in zip(*(where[node] for node in range(tree.num_nodes)), strict=True))
    return NodeScores(
        logits=logits[rows, positions],
        layers=tuple(_gather(tap, rows, positions) for tap in taps.layers),
    )


def score_tree_naive(model: LanguageModel, prefix: Sequence[int], tree: DraftTree) -> NodeScores:
    """The same, one node at a time: the text that ends in the node, forwarded alone, its last row kept."""
    logits: list[Tensor] = []
    layers: list[list[LayerTap]] = []
    for node in range(tree.num_nodes):
        text = [*prefix, *tree.path_tokens(node)]
        taps = Taps()
        logits.append(model.causal(torch.tensor([text]), taps=taps)[0, -1])
        layers.append([_gather(tap, [0], [len(text) - 1]) for tap in taps.layers])
    merged = [_merge([one[layer] for one in layers]) for layer in range(len(layers[0]))]
    return NodeScores(logits=torch.stack(logits), layers=tuple(merged))


def prefix_scores(model: LanguageModel, tokens: Sequence[int]) -> NodeScores:
    """Plain scores and layer values of every position of one sequence (S rows instead of N)."""
    taps = Taps()
    logits = model.causal(torch.tensor([list(tokens)], dtype=torch.int64), taps=taps)
    rows, positions = [0] * len(tokens), list(range(len(tokens)))
    return NodeScores(logits[0], tuple(_gather(tap, rows, positions) for tap in taps.layers))


def _gather(tap: LayerTap, rows: list[int], positions: list[int]) -> LayerTap:
    def heads(values: Tensor | None) -> Tensor | None:  # [B, H, S, D] -> [H, N, D]
        return None if values is None else values[rows, :, positions].transpose(0, 1)

    def flat(values: Tensor | None) -> Tensor | None:  # [B, S, hidden] -> [N, hidden]
        return None if values is None else values[rows, positions]

    return LayerTap(
        k=heads(tap.k), v=heads(tap.v), attention_output=flat(tap.attention_output), hidden_state=flat(tap.hidden_state)
    )


def _merge(taps: list[LayerTap]) -> LayerTap:
    def join(name: str, dim: int) -> Tensor | None:
        parts = [getattr(tap, name) for tap in taps]
        return None if parts[0] is None else torch.cat(parts, dim=dim)

    return LayerTap(
        k=join("k", 1),
        v=join("v", 1),
        attention_output=join("attention_output", 0),
        hidden_state=join("hidden_state", 0),
    )
