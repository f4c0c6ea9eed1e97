"""What plain decoding of the same weights in the same dtype gets wrong against fp64: the measure of rounding noise.

Plain decoding steps one token at a time through a cache. Its errors are pooled over all rows of a case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.cases import Case
from specbench.compare import Bound, exact_bound, max_error, measured_bound, scale_of
from specbench.reference.autoregressive import NodeScores
from specbench.subjects import Subject
from specbench.tree import DraftTree, root_only
from specbench.types import LayerTap, Taps

MAX_STEPS = 12
LAYER_FIELDS = ("k", "v", "attention_output", "hidden_state")


@dataclass(frozen=True)
class PlainRun:
    """Rows of plain decoding: logits float [R, V] and, per layer, a LayerTap with R rows (empty without taps)."""

    logits: Tensor
    layers: tuple[LayerTap, ...]


def plain_over_tree(subject: Subject, case: Case, prefix: Sequence[int], tree: DraftTree, *, taps: bool) -> PlainRun:
    """Each node's row, computed by stepping down its own path one token at a time behind the prefix."""
    taps = taps or subject.bank.real  # taps are cheap beside a real model's forward, and another claim wants them
    return subject.remember(
        ("plain", case.model, tuple(prefix), tree), lambda: _step_over_tree(subject, case, prefix, tree, taps=taps)
    )


def _step_over_tree(subject: Subject, case: Case, prefix: Sequence[int], tree: DraftTree, *, taps: bool) -> PlainRun:
    probe = subject.open_plain(case)
    probe.prefill(prefix)
    logits: dict[int, Tensor] = {}
    layers: dict[int, list[LayerTap]] = {}
    todo = [0]
    while todo:  # depth first, so the cache always holds the path to the parent
        node = todo.pop()
        probe.truncate(len(prefix) + int(tree.depth[node]))
        seen = Taps() if taps else None
        logits[node] = probe.forward_tree(root_only(tree.token_list[node]), taps=seen)[0]
        layers[node] = seen.layers if seen else []
        probe.commit([])
        todo.extend(reversed(tree.children(node)))
    nodes = range(tree.num_nodes)
    return PlainRun(torch.stack([logits[node] for node in nodes]), _stack([layers[node] for node in nodes]))


def plain_over_text(subject: Subject, case: Case, tokens: Sequence[int], *, num_prefilled: int) -> PlainRun:
    """Rows of `tokens[num_prefilled:]`, stepped one at a time behind a prefill of the others."""
    probe = subject.open_plain(case)
    probe.prefill(tokens[:num_prefilled])
    rows = []
    for token in tokens[num_prefilled:]:
        rows.append(probe.forward_tree(root_only(token))[0])
        probe.commit([])
    return PlainRun(torch.stack(rows), ())


def plain_kv(subject: Subject, case: Case, tokens: Sequence[int], *, num_layers: int) -> list[tuple[Tensor, Tensor]]:
    """The cache of plain decoding over `tokens`, the last dozen stepped one by one: keys and values by layer."""
    probe = subject.open_plain(case)
    num_prefilled = max(0, len(tokens) - MAX_STEPS)
    probe.prefill(tokens[:num_prefilled])
    for token in tokens[num_prefilled:]:
        probe.forward_tree(root_only(token))
        probe.commit([])
    return [probe.kv(layer) for layer in range(num_layers)]


def logits_bound(subject: Subject, case: Case, prefix: Sequence[int], tree: DraftTree, oracle: Tensor) -> Bound:
    """The error allowed in tree logits: 1e-9 of the scale in fp64, otherwise what plain decoding shows."""
    scale = scale_of(oracle)
    if subject.exact:
        return exact_bound(scale)
    plain = plain_over_tree(subject, case, prefix, tree, taps=False)
    return measured_bound(max_error(plain.logits, oracle), scale, subject.bank.dtype)


def layer_bounds(
    subject: Subject, case: Case, prefix: Sequence[int], tree: DraftTree, oracle: NodeScores
) -> list[dict[str, Bound]]:
    """The error allowed per layer and field, by the same rule."""
    plain = None if subject.exact else plain_over_tree(subject, case, prefix, tree, taps=True)
    bounds: list[dict[str, Bound]] = []
    for layer, right in enumerate(oracle.layers):
        bounds.append({})
        for name in LAYER_FIELDS:
            values = getattr(right, name)
            if values is None:
                continue
            scale = scale_of(values)
            if plain is None:
                bounds[layer][name] = exact_bound(scale)
            else:
                error = max_error(getattr(plain.layers[layer], name), values)
                bounds[layer][name] = measured_bound(error, scale, subject.bank.dtype)
    return bounds


def _stack(rows: list[list[LayerTap]]) -> tuple[LayerTap, ...]:
    """Single-row taps of R forwards as one LayerTap per layer with R rows."""
    out = []
    for layer in range(len(rows[0])):
        parts = [one[layer] for one in rows]
        joined = {}
        for name in LAYER_FIELDS:
            values = [getattr(one, name) for one in parts]
            joined[name] = None if values[0] is None else torch.cat(values, dim=1 if name in ("k", "v") else 0)
        out.append(LayerTap(**joined))
    return tuple(out)
