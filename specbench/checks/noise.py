"""What plain decoding of the same weights in the same dtype gets wrong against fp64: the measure of rounding noise.

Plain decoding steps one token at a time through a cache. Tree errors are pooled (root mean square) over the rows of a
case, because a single row's error is one throw of the dice, and so is plain decoding's on that row. To the case's own
plain rows come those of a fixed text per model, so that a case of two rows has a bound that means something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.cases import Case
from specbench.compare import Bound, exact_bound, max_error, measured_bound, rms_error, scale_of
from specbench.reference.autoregressive import NodeScores
from specbench.subjects import Subject
from specbench.tree import DraftTree, chain, root_only
from specbench.types import LayerTap, Taps

MAX_STEPS = 12
CALIBRATION_TOKENS = 48
CALIBRATION_STEPS = 32
LAYER_FIELDS = ("k", "v", "attention_output", "hidden_state")


@dataclass(frozen=True)
class PlainRun:
    """Rows of plain decoding: logits float [R, V] and, per layer, a LayerTap with R rows (empty without taps)."""

    logits: Tensor
    layers: tuple[LayerTap, ...]


@dataclass(frozen=True)
class PlainErrors:
    """Plain decoding's errors against fp64. rms, worst: of logits. layers: rms per layer and field; of all rows, or of
    the worst one with a quantised cache."""

    rms: float
    worst: float
    layers: tuple[dict[str, float], ...]


def logits_bound(subject: Subject, case: Case, prefix: Sequence[int], tree: DraftTree, oracle: Tensor) -> Bound:
    """The error allowed in tree logits: 1e-9 of the scale in fp64, otherwise what plain decoding shows."""
    scale = scale_of(oracle)
    if subject.exact:
        return exact_bound(scale)
    plain = plain_over_tree(subject, case, prefix, tree, taps=False)
    usual = max(rms_error(plain.logits, oracle), calibration(subject, case).rms)
    return measured_bound(usual, scale, subject.noise_dtype, pooled=True)


def layer_bounds(
    subject: Subject, case: Case, prefix: Sequence[int], tree: DraftTree, oracle: NodeScores
) -> list[dict[str, Bound]]:
    """The error allowed per layer and field, by the same rule."""
    plain = None if subject.exact else plain_over_tree(subject, case, prefix, tree, taps=True).layers
    return _bounds(subject, case, oracle.layers, plain)


def cache_bounds(subject: Subject, case: Case, committed: Sequence[int], oracle: NodeScores) -> list[dict[str, Bound]]:
    """The error allowed in cached keys and values, per layer."""
    plain = None
    if not subject.exact:
        num_layers = len(oracle.layers)
        plain = tuple(LayerTap(k=k, v=v) for k, v in plain_kv(subject, case, committed, num_layers=num_layers))
    return _bounds(subject, case, tuple(LayerTap(k=one.k, v=one.v) for one in oracle.layers), plain)


def token_bound(subject: Subject, case: Case, prompt: Sequence[int], tokens: Sequence[int], oracle: Tensor) -> Bound:
    """The margin below which two tokens count as tied: here the largest error counts, since one logit decides.

    oracle: float64 [len(tokens), V], row i judges token i.
    """
    scale = scale_of(oracle)
    if subject.exact:
        return exact_bound(scale)
    text = [*prompt, *tokens][:-1]
    plain = plain_over_text(subject, case, text, num_prefilled=len(prompt) - 1)
    worst = max(max_error(plain.logits, oracle), calibration(subject, case).worst)
    return measured_bound(worst, scale, subject.noise_dtype)


def calibration(subject: Subject, case: Case) -> PlainErrors:
    """Plain decoding's errors over a fixed text of the case's model, measured once a run.

    With a quantised cache the worst row speaks for all: where a value lies at a step's edge, tree and plain decoding
    fall to either side, and the row's error is drawn anew. In a case of two rows there is nothing to pool it with.
    """

    rows_rms = worst_row_rms if subject.codec(case) else pooled_rms

    def measure() -> PlainErrors:
        text = _calibration_text(subject, case)
        num_prefilled = len(text) - CALIBRATION_STEPS
        tree = chain(text[num_prefilled:])
        oracle = subject.score(case, text[:num_prefilled], tree)
        plain = plain_over_tree(subject, case, text[:num_prefilled], tree, taps=bool(oracle.layers))
        layers = tuple(
            {
                name: rows_rms(getattr(mine, name), getattr(right, name), row_dim=1 if name in ("k", "v") else 0)
                for name in LAYER_FIELDS
                if getattr(mine, name) is not None and getattr(right, name) is not None
            }
            for mine, right in zip(plain.layers, oracle.layers, strict=False)
        )
        rms = rows_rms(plain.logits, oracle.logits, row_dim=0)
        return PlainErrors(rms, max_error(plain.logits, oracle.logits), layers)

    return subject.remember(("calibration", case.model, subject.codec(case)), measure, always=True)


def pooled_rms(actual: Tensor, expected: Tensor, *, row_dim: int) -> float:
    return rms_error(actual, expected)


def worst_row_rms(actual: Tensor, expected: Tensor, *, row_dim: int) -> float:
    rows = zip(actual.movedim(row_dim, 0), expected.movedim(row_dim, 0), strict=True)
    return max((rms_error(one, other) for one, other in rows), default=0.0)


def plain_over_tree(subject: Subject, case: Case, prefix: Sequence[int], tree: DraftTree, *, taps: bool) -> PlainRun:
    """Each node's row, computed by stepping down its own path one token at a time behind the prefix."""
    taps = taps or subject.bank.real  # taps are cheap beside a real model's forward, and another claim wants them
    return subject.remember(
        ("plain", case.model, subject.codec(case), tuple(prefix), tree),
        lambda: _step_over_tree(subject, case, prefix, tree, taps=taps),
    )


def plain_over_text(subject: Subject, case: Case, tokens: Sequence[int], *, num_prefilled: int) -> PlainRun:
    """Rows of `tokens[num_prefilled:]`, stepped one at a time behind a prefill of the others."""
    return plain_over_tree(subject, case, tokens[:num_prefilled], chain(tokens[num_prefilled:]), taps=False)


def plain_kv(subject: Subject, case: Case, tokens: Sequence[int], *, num_layers: int) -> list[tuple[Tensor, Tensor]]:
    """The cache of plain decoding over `tokens`, the last dozen stepped one by one: keys and values by layer."""
    probe = subject.open_stepping(case)
    num_prefilled = max(0, len(tokens) - MAX_STEPS)
    probe.prefill(tokens[:num_prefilled])
    for token in tokens[num_prefilled:]:
        probe.forward_tree(root_only(token))
        probe.commit([])
    return [probe.kv(layer) for layer in range(num_layers)]


def _bounds(
    subject: Subject, case: Case, oracle: tuple[LayerTap, ...], plain: tuple[LayerTap, ...] | None
) -> list[dict[str, Bound]]:
    bounds: list[dict[str, Bound]] = []
    for layer, right in enumerate(oracle):
        bounds.append({})
        for name in LAYER_FIELDS:
            values = getattr(right, name)
            if values is None:
                continue
            if plain is None:
                bounds[layer][name] = exact_bound(scale_of(values))
                continue
            fixed = calibration(subject, case).layers
            usual = fixed[layer].get(name, 0.0) if layer < len(fixed) else 0.0
            usual = max(usual, rms_error(getattr(plain[layer], name), values))
            bounds[layer][name] = measured_bound(usual, scale_of(values), subject.noise_dtype, pooled=True)
    return bounds


def _calibration_text(subject: Subject, case: Case) -> list[int]:
    """The end of a real prompt where there is one, else seeded tokens."""
    for _, tokens in subject.bank.prompts:
        if len(tokens) >= CALIBRATION_TOKENS:
            return list(tokens[-CALIBRATION_TOKENS:])
    generator = torch.Generator().manual_seed(case.model)
    return torch.randint(subject.vocab_size(case.model), (CALIBRATION_TOKENS,), generator=generator).tolist()


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
