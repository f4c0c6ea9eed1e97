"""The public catalogue of planted faults as Markdown: the part of docs/faults.md that follows from the bank alone.

What was measured on them is added by `fault_report`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

from specbench.reference.faults.fault import Fault

MODULE = "specbench.reference.faults.bank"
WIDTH = 124

# The classes of faults that real implementations shipped, in the order of the catalogue, and what each is.
CLASSES: dict[str, dict[str, str]] = {
    "Attention and positions": {
        "mask-leak": "a draft attends to a draft that is not its ancestor",
        "mask-future": "a draft attends to what comes after it",
        "row-self": "a draft is judged by its own row, which has seen it, instead of its parent's",
        "mask-missing-ancestor": "a draft does not attend to all of its prefix and ancestors",
        "mask-prefix/padding": "rows that hold no token of the text, or no token yet, are attended to",
        "GQA-head-mapping": "a query head reads another group's keys and values",
        "sliding-window": "the window is ignored, or measured in rows instead of positions",
        "position-ids": "a draft stands at another position than prefix plus depth",
    },
    "Caches and recurrent state": {
        "kv-not-rolled-back": "rejected rows stay in the cache",
        "kv-off-by-one": "a commit keeps one row too many or too few",
        "kv-wrong-path-compacted": "a commit keeps other rows than the accepted path's",
        "kv-stale-after-reject": "what a rejected draft left behind is read in a later round",
        "kv-slot/page-mapping": "rows are written to, read from or freed in the wrong slot or page",
        "recurrent-state-rollback": "the state of a recurrent layer is not that of the committed tokens",
    },
    "Acceptance and the law of the output": {
        "accept-draft-first-unverified": "a first draft is accepted without being compared",
        "accept-off-by-one": "one token too many, or one too few, is accepted",
        "accept-wrong-branch": "the walk goes on at a node that is no child of the accepted one",
        "accept-padding/placeholder": "padding is taken for a draft",
        "bonus/correction-token-wrong": "the token after the accepted path comes from the wrong row, or is left out",
        "accept-rule/residual-wrong": "accepting or redrawing a draft leaves another law than the target's",
        "q-not-matching": "the law that is divided by is not the one that drafts were drawn from",
        "sampling-params-one-side": "temperature or filters reach only one of drafter and verifier",
        "greedy-vs-sampling": "a greedy row is sampled, or a sampled one is greedy",
        "rng/seed": "draws that must be independent share their random numbers",
        "tie-breaking": "of equal maxima, another one is taken than plain decoding takes",
    },
    "Processors and stopping": {
        "logits-processor-state": "penalties and processors see another history than the emitted tokens and the path",
        "grammar-state": "a grammar's state is not that of the node whose children it masks",
        "eos/stop/max-length": "an end token, a stop sequence or a limit ends the text in the wrong place",
    },
    "Batches, loops, buffers and numerics": {
        "batch-raggedness": "rows of unequal length, tree or accept count are treated alike",
        "batch-cross-talk": "a row reads or changes what belongs to another",
        "rank-divergence": "ranks decide differently about one text",
        "static-buffer-stale": "a buffer of fixed size still holds the round before",
        "loop-state-stale": "the loop carries on with what a skipped, stopped or preempted round left behind",
        "abort-path": "a forward that is dropped leaves traces",
        "capacity/out-of-range": "the last block does not fit into cache, table or type",
        "chunked-prefill/prefix-cache": "a prompt that came in pieces, or from a prefix cache, leaves another state",
        "dtype/precision": "precision is lost where the model itself keeps it",
    },
    "Drafters, trees, vocabularies and reports": {
        "drafter-desync": "the drafter's state is not that of the committed tokens; only acceptance falls",
        "drafter-training-alignment": "the drafter's inputs and targets are shifted against each other",
        "tree-construction": "a tree has wrong parents, duplicate siblings or too many nodes",
        "tokenizer/vocab": "an id of one vocabulary is read in another",
        "metric-wrong": "reported counts or rates are not what happened",
        "logprob-reporting": "reported probabilities belong to another row, model or stage",
        "memory": "rows or pages are kept that nothing will read",
        "performance": "the output is right and takes more forwards or rows than it should",
    },
}


def catalogue(faults: Iterable[Fault], equivalent: Sequence[Fault]) -> list[str]:
    """The lines of the page up to what is measured. equivalent: those that no input shows, listed apart."""
    by_class: dict[str, list[Fault]] = {}
    for one in faults:
        by_class.setdefault(one.fault_class, []).append(one)
    known = [name for group in CLASSES.values() for name in group]
    groups = {**CLASSES, "Further classes": {name: "" for name in by_class if name not in known}}
    lines = _introduction(by_class)
    for heading, classes in groups.items():
        held = {name: sentence for name, sentence in classes.items() if name in by_class}
        if held:
            lines += ["", f"## {heading}", "", ", ".join(f"[{name}](#{_anchor(name)})" for name in held)]
        for name, sentence in held.items():
            lines += ["", f"### {name}", "", *([f"{sentence[0].upper()}{sentence[1:]}.", ""] if sentence else [])]
            lines += _fault_table(by_class[name])
    if equivalent:
        lines += ["", "## Equivalent faults", "", "Changes that no input can show. They are not counted above.", ""]
        lines += markdown_table(
            ("fault", "class", "what it does", "why nothing shows it"),
            [(f"`{one.id}`", one.fault_class, one.sentence, one.shows_when) for one in equivalent],
        )
    return lines


def markdown_table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (heading, ["---"] * len(heading), *escaped)]


def _introduction(by_class: dict[str, list[Fault]]) -> list[str]:
    faults = [one for members in by_class.values() for one in members]
    num_subtle, num_origins = sum(bool(one.subtle) for one in faults), sum(bool(one.origin) for one in faults)
    what = (
        f"{len(faults)} faults in {len(by_class)} classes, {num_subtle} of them subtle. Each is planted in a decoder "
        "that is otherwise right, as the replacement of a step or two, and must be caught by the claim beside it. "
        "*Needs* says what a test must have in it for a subtle one to show. An origin is a public report or fix of "
        f"such a fault ({num_origins} have one). Faults that leave the output right and cost acceptance, memory or "
        "time count too. *TV* is the exact total variation of one round's law from the target's, on a toy model that "
        "the bank keeps with it."
    )
    how = (
        "`specbench faults --markdown docs/faults.md` judges all of them and writes this page. With `--list` it judges "
        "none, renews what follows from the bank, and leaves what was measured last at the end."
    )
    return [
        "# How speculative decoding goes wrong",
        "",
        *textwrap.wrap(what, WIDTH),
        "",
        "A planted fault is a target like any other:",
        "",
        "```bash",
        f"specbench check {MODULE}:sibling_leak     # how it fails",
        "specbench faults sibling_leak cousin_leak  # what catches it, how fast, and what it is taken for",
        "```",
        "",
        *textwrap.wrap(how, WIDTH),
    ]


def _fault_table(faults: Sequence[Fault]) -> list[str]:
    """With a column for total variations where one of them was taken."""
    with_tv = any(one.tv is not None for one in faults)
    return markdown_table(
        ("fault", "what it does", "shows with", "needs", "caught by", *(["TV"] * with_tv), "origin"),
        [
            (
                *(f"`{one.id}`", one.sentence, one.shows_when, one.subtle, f"`{one.claim}`"),
                *([_total_variation(one.tv)] * with_tv),
                _origin(one.origin),
            )
            for one in faults
        ],
    )


def _total_variation(tv: float | None) -> str:
    return "" if tv is None else f"{tv:.2g}"


def _origin(origin: str) -> str:
    """`owner/repository#number` as a link; issues and pull requests share their numbers."""
    repository, _, number = origin.partition("#")
    return f"[{origin}](https://github.com/{repository}/issues/{number})" if number else origin


def _anchor(heading: str) -> str:
    """The name that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
