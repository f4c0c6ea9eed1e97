"""Which transformers architectures the reference decoder drives rightly, found by running each tiny model.

A model holds when the tree forward in both layouts, the cache it leaves, the cache after a commit and the round after
that equal the same model's plain forward of each text, one by one. Nothing is remembered: every table is a measurement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor

from specbench.compare import EXACT_RELATIVE, max_error, measured_bound, scale_of
from specbench.reference.autoregressive import prefix_scores, score_tree_naive
from specbench.reference.hf import HFModel
from specbench.reference.hf_tiny import TINY_NAMES, tiny_config
from specbench.reference.hf_types import MODEL_TYPES, refusal
from specbench.reference.kv_cache import AppendableCache
from specbench.reference.layouts import LAYOUTS, flatten_causal
from specbench.tree import DraftTree, root_only

# Longer than every tiny window. In the tree siblings share a token, and the side path is no leftmost branch.
PREFIX = [5, 9, 2, 2, 30, 11, 7, 5, 21, 0, 13]
TREE = DraftTree.of([7, 3, 3, 1, 2, 1, 1, 28, 7, 12, 7, 3, 19], [-1, 0, 0, 1, 1, 2, 2, 3, 3, 5, 6, 9, 9])
SIDE_PATH = (2, 5, 9, 12)
NEXT_TOKEN = 17
SPECIAL = {
    "falcon-alibi": "ALiBi",
    "llama-dynamic": "rotary frequencies that follow the length",
}


@dataclass(frozen=True)
class Finding:
    """What running one tiny model showed. verdict: "holds", "wrong", "refused" or "missing" (in this transformers).

    error, bound: the largest difference and what was allowed, as shares of the largest expected value; None when
    nothing was run. reason: why it is refused, where the largest difference lies, or how the bound came about.
    """

    name: str
    special: str
    verdict: str
    error: float | None
    bound: float | None
    reason: str


def survey(names: Sequence[str] = TINY_NAMES) -> list[Finding]:
    """One finding a name, in order. ValueError for a name that `reference.hf_tiny` does not know."""
    return [examine(name) for name in names]


def examine(name: str) -> Finding:
    """Builds the tiny model `name` in fp64 and compares what the tree forward does with plain forwards."""
    if name not in TINY_NAMES:
        raise ValueError(f"name = {name!r} must be one of {', '.join(TINY_NAMES)}")
    config = tiny_config(name)
    if config is None:
        reason = f"not in this transformers ({transformers.__version__})"
        return Finding(name, SPECIAL.get(name, ""), "missing", None, None, reason)
    special = SPECIAL.get(name) or MODEL_TYPES[config.model_type].special
    refused = refusal(config)
    if refused is not None:
        return Finding(name, special, "refused", None, None, refused)
    model = HFModel.tiny(name, seed=0, dtype=torch.float64)
    error, place = max(_errors(model))
    if model.is_exact:
        bound, source = EXACT_RELATIVE, "fp64 all through"
    else:
        plain = _plain_error(model)
        bound = measured_bound(plain, 1.0, torch.float32).value
        source = f"casts to fp32: 2 x plain decoding's {plain:.1g} + 4 eps"
    if error > bound:
        return Finding(name, special, "wrong", error, bound, f"largest difference: {place}")
    return Finding(name, special, "holds", error, bound, source)


def table(findings: Sequence[Finding], *, markdown: bool = False) -> str:
    """The findings as aligned text, or as a Markdown table."""
    header = ("type", "special", "verdict", "error", "bound", "reason")
    rows = [
        (
            one.name,
            one.special,
            one.verdict,
            "-" if one.error is None else f"{one.error:.1g}",
            "-" if one.bound is None else f"{one.bound:.1g}",
            one.reason,
        )
        for one in findings
    ]
    if markdown:
        lines = [header, ("---",) * len(header), *rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    widths = [max(len(line[column]) for line in [header, *rows]) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [header, *rows]
    )


def _errors(model: HFModel) -> Iterator[tuple[float, str]]:
    """Every difference, as a share of the expected values' largest, and where it lies."""
    expected = score_tree_naive(model, PREFIX, TREE)
    committed = [*PREFIX, *(TREE.token_list[node] for node in (0, *SIDE_PATH))]
    after = prefix_scores(model, [*committed, NEXT_TOKEN])
    for layout, flatten in LAYOUTS.items():
        cache = _prefilled(model, PREFIX)
        flat = flatten(TREE, len(PREFIX))
        logits = model.forward(flat, cache)
        yield _share(logits[flat.row_of_node], expected.logits), f"logits ({layout})"
        for layer, right in enumerate(expected.layers):
            for kind, rows, values in zip("kv", cache.rows(layer), (right.k, right.v), strict=True):
                assert values is not None
                yield _share(rows[:, len(PREFIX) + flat.row_of_node], values), f"layer {layer} {kind} ({layout})"
        cache.commit(len(PREFIX), flat.row_of_node[[0, *SIDE_PATH]].tolist())
        logits = model.forward(flatten(root_only(NEXT_TOKEN), cache.length), cache)
        yield _share(logits, after.logits[-1:]), f"logits after a commit ({layout})"
        for layer, right in enumerate(after.layers):
            for kind, rows, values in zip("kv", cache.rows(layer), (right.k, right.v), strict=True):
                assert values is not None
                yield _share(rows, values), f"layer {layer} {kind} after a commit ({layout})"


def _plain_error(model: HFModel) -> float:
    """What plain decoding, one token at a time, differs by from forwards of whole texts, over all paths.

    transformers' own, not `HFModel.forward`: a fault in the forward that is judged would become its own excuse.
    """
    texts = [[*PREFIX, *TREE.path_tokens(leaf)] for leaf in TREE.leaves()]
    return max(_share(model.stepped(text), prefix_scores(model, text).logits) for text in texts)


def _prefilled(model: HFModel, tokens: list[int]) -> AppendableCache:
    cache = model.new_cache()
    model.forward(flatten_causal(tokens, 0), cache)
    return cache


def _share(actual: Tensor, expected: Tensor) -> float:
    return max_error(actual, expected) / max(scale_of(expected), 1.0)
