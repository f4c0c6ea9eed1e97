"""The report's sections: which numbers and figures stand together, and how each is defined. Plain text, no HTML.

A section is left out where its records are not there. Every drawing carries the table that it was drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from specbench.record import EQUAL, NOISE, RunRecord
from specbench.reports import bench, engines, figures, kernels, lossiness, trees
from specbench.reports.bench import Study
from specbench.reports.table import Column, Table, by, count, named, ratio, share, text
from specbench.reports.theme import as_png, as_svg
from specbench.sanitize import plain

MAX_MESSAGE = 6_000


@dataclass(frozen=True)
class Drawing:
    """name: of its files. svg: a file of its own. png: None for one that is drawn by code. table: its numbers. is_wide:
    it needs more than a column, and scrolls where there is not as much. is_fluid: it has no size of its own."""

    name: str
    title: str
    svg: str
    png: bytes | None
    table: Table
    is_wide: bool = False
    is_fluid: bool = True


@dataclass(frozen=True)
class Listing:
    """A text as it stands: a command, a message."""

    title: str
    text: str
    is_open: bool = True


@dataclass(frozen=True)
class Section:
    """finding: what one reads first. definitions: of the numbers, beside them. tables: besides those of drawings, shown
    open."""

    id: str
    title: str
    finding: str = ""
    definitions: tuple[str, ...] = ()
    drawings: tuple[Drawing, ...] = ()
    tables: tuple[Table, ...] = ()
    folded: tuple[Table, ...] = ()
    listings: tuple[Listing, ...] = ()


def drawn(
    title: str, make: Callable[..., Figure], table: Table, *rows: Any, name: str = "", is_wide: bool = False
) -> Drawing:
    """make: called with the rows, by default the table's. name: of the files, by default the table's."""
    figure = make(*(rows or (table.rows,)))
    svg = as_svg(figure)
    figure.set_layout_engine("none")  # it is laid out now, and is the same as PNG
    return Drawing(name or table.name, title, svg, as_png(figure), table, is_wide)


def of_bench(study: Study) -> list[Section]:
    """Inside `theme.style`."""
    found = [_verdicts(study), _ladder(study), _speedups(study), _gamma(study), _acceptance(study), _lengths(study)]
    found += [_rounds(study), _memory(study), _costs(study), _looping(study), _machine(study)]
    return [one for one in found if one is not None]


def of_history(studies: Sequence[Study]) -> Section | None:
    """studies: the oldest first. Inside `theme.style`. None where no setting is in two runs."""
    table = bench.history(studies)
    if not table.rows:
        return None
    others = sorted({word for one in table.rows for word in one["other"].split(", ") if word})
    finding = f"{len(studies)} runs, the newest of which the rest of this page is about."
    if others:
        finding += f" They differ in {' and '.join(others)} too: see the table."
    return Section(
        "history",
        "What has changed since?",
        finding,
        (
            "Each run's own speed-up over its own baseline, as above, with its interval over prompts. A machine that "
            "was busier for a whole run slows both alike.",
            "other than before: what besides time is not the same as in the run before. `specbench compare A B` judges "
            "two runs and exits with 1 on a regression.",
        ),
        (drawn(table.title, figures.history, table),),
        tables=(table,) if others else (),
    )


def _verdicts(study: Study) -> Section:
    table = bench.verdicts(study)
    nums = {name: sum(row["verdict"] == name for row in table.rows) for name in ("EQUAL", "NOISE", "BUG", "NOT TESTED")}
    finding = ", ".join(f"{num} {name}" for name, num in nums.items() if num)
    return Section(
        "verdicts",
        "Was the output right?",
        f"{len(table.rows)} settings: {finding}." if table.rows else "The run names no settings.",
        (
            "EQUAL: exactly plain decoding's tokens. NOISE: other tokens, each a tie within a bound that was measured "
            "on plain decoding in this dtype. BUG: other tokens than that. NOT TESTED: nobody could tell, and that is "
            "no pass.",
            "Only EQUAL and NOISE are verified, and only verified settings have a speed-up.",
            "equal, at least: the exact one-sided 95 % bound (Clopper-Pearson) of the share of outputs that are plain "
            "decoding's, token for token.",
            "law, where anything was drawn: above temperature 0 equal tokens are not asked for; it says whether the "
            "law of the draws was checked.",
        ),
        tables=(table,),
    )


def _ladder(study: Study) -> Section | None:
    table = bench.ladder(study)
    if not table.rows:
        return None
    verified = sum(one["verdict"] in (EQUAL, NOISE) for one in table.rows)
    return Section(
        "ladder",
        "The ladder, step by step",
        f"{verified} of {len(table.rows)} steps are verified.",
        (
            "tokens a forward: emitted by a verifying forward, the target's own token included, pooled over rounds; "
            "plain decoding has 1. speed-up: as below, of verified steps alone; a hollow dot's interval holds 1.",
            "The bar says what a free drafter and free rows would give; the distance to the dot is what they cost.",
        ),
        (drawn("Tokens a forward and speed-up of each step", figures.ladder, table),),
    )


def _speedups(study: Study) -> Section | None:
    table, categories, duels = bench.speeds(study), bench.categories(study), bench.duels(study)
    rows = [one for one in table.rows if one["role"] != "baseline"]
    if not rows:
        return None
    shown = _chosen(study, rows)
    what = "every verified setting" if len(shown) == len(rows) else f"{len(shown)} of {len(rows)} verified settings"
    drawings = [drawn(f"Speed-up of {what}", figures.speedups, table, shown, categories.rows)]
    best = named(study.best or "")
    own = [one for one in categories.rows if one["setting"] == best]
    if study.best is not None and own:
        overall = next(one for one in table.rows if one["setting"] == best)
        drawings.append(drawn(f"{best}, by category", figures.categories, categories, own, overall))
    clear = sum(one["low"] is not None and one["low"] > 1 for one in rows)
    slower = sum(one["high"] is not None and one["high"] < 1 for one in rows)
    finding = f"Beside the baseline {len(rows)} settings are verified: {clear} shown to be faster, {slower} slower."
    return Section(
        "speedups",
        "How much faster?",
        finding,
        (
            "speed-up: seconds a token of the baseline / seconds a token of the setting, each the median of its "
            "repetitions, on the same prompt and the same number of tokens; the geometric mean over all n prompts. "
            "Prefill and the first round are not in it: end to end has them.",
            f"baseline: {study.baseline}, the fastest plain decoding of this run that was right.",
            "[from, to]: 95 % bootstrap interval over prompts. A filled dot: the interval leaves out 1. Small circles: "
            "categories, points with their n and no intervals, for they hold few prompts.",
            "beside transformers: times as fast as transformers' decoder with the same drafts, on the same tokens.",
            "tokens/s, a token: medians over rows behind the first arrival. first token: from the call to the first "
            "tokens. prompts left out: all their tokens came at once, so that there is no time between them.",
        ),
        tuple(drawings),
        tables=(duels,) if duels.rows else (),
    )


def _chosen(study: Study, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """All, or where they are too many for a figure the fastest of each drafter, then the fastest of the rest; in their
    order."""
    names = sorted(range(len(rows)), key=lambda idx: (rows[idx]["setting"] not in study.shown, idx))
    return [rows[idx] for idx in sorted(names[: figures.MOST_SETTINGS])]


def _gamma(study: Study) -> Section | None:
    table = bench.gammas(study)
    if not table.rows:
        return None
    knees = [
        f"{one['curve']} at γ = {one['gamma']} ({one['speedup']:.2f}×)" for one in table.rows if "knee" in one["mark"]
    ]
    return Section(
        "gamma",
        "How long should a draft be?",
        f"The knee: {'; '.join(knees)}.",
        (
            "γ: drafted tokens in depth. A curve is one drafter of which nothing else differs.",
            "knee: the smallest γ whose speed-up is not below the lower end of the best one's interval: a longer draft "
            "has not shown that it gains anything.",
            "predicted (dashed): from the rounds that the longest draft recorded, cut to γ, the measured cost of a "
            "forward and of drafting, and what else a round of theirs took; against the baseline's time on the same "
            "prompt, and the geometric mean of that, as the measured curve. Its best is a diamond.",
        ),
        (drawn("Speed-up by drafted length", figures.gamma, table),),
    )


def _acceptance(study: Study) -> Section | None:
    summary, table = bench.acceptances(study), bench.depths(study)
    if not summary.rows:
        return None
    shown = [one for one in table.rows if one["setting"] in study.shown]
    drawings = (drawn("Acceptance by depth", figures.depths, table, shown),) if shown else ()
    first = summary.rows[0]
    finding = (
        f"{first['setting']} emits {first['length']:.2f} tokens a forward (n = {first['num_rounds']:,} rounds of "
        f"{first['num_requests']:,} requests)."
    )
    return Section(
        "acceptance",
        "How good are the drafts?",
        finding,
        (
            "acceptance length: tokens emitted a verifying forward, the target's own (bonus) token included: no draft "
            "accepted is length 1. pooled: all tokens over all rounds; per request: the mean of each request's own.",
            "rate: accepted drafts / drafted depth; a tree of width 3 and depth 4 drafts 4 deep. forwards a token: "
            "verifying forwards / tokens emitted by them.",
            "conditional at depth d: accepted at d / rounds that accepted d - 1 and drafted d. joint: accepted at d / "
            "all rounds that drafted as deep as d.",
            "Drawn: the fastest setting of each drafter that says how deep it drafted. Settings that are not verified "
            "are marked in the tables.",
        ),
        drawings,
        tables=(summary,),
    )


def _lengths(study: Study) -> Section | None:
    table = bench.lengths(study)
    shown = [one for one in table.rows if one["setting"] in study.shown]
    if not shown:
        return None
    return Section(
        "lengths",
        "How many tokens does a round give?",
        "",
        (
            "length of a round: drafts accepted + 1, the target's own token. What a token limit cut off is counted as "
            "accepted.",
        ),
        (drawn("Rounds by acceptance length", figures.lengths, table, shown),),
    )


def _rounds(study: Study) -> Section | None:
    table = bench.phases(study)
    if not table.rows:
        return None
    first = table.rows[0]
    parts = ", ".join(f"{part} {100 * first[f'{part}_share']:.0f} %" for part in bench.PHASES)
    return Section(
        "rounds",
        "Where does the time go?",
        f"{first['setting']}: {parts}.",
        (
            "a token, a round: behind the first arrival, over the rows that tell. draft: the drafter. verify: the "
            "target's forward and the walk over its logits. commit: keeping the accepted rows of the cache. host: what "
            "no step accounts for.",
            "rows that do not tell: of a decoder that shows only the whole.",
        ),
        (drawn("Milliseconds of a token", figures.rounds, table, _chosen(study, table.rows)),),
    )


def _memory(study: Study) -> Section | None:
    table = bench.memory(study)
    if not table.rows:
        return None
    return Section(
        "memory",
        "How much memory?",
        "",
        (
            "predicted, by formula: weights; cache (keys and values of the context); tree (attention and feed-forward "
            "of a round); logits (of a round). working, predicted: the most of these but the weights at one time, so "
            "less than their sum.",
            "measured, in a process of its own: weights (what loading added) and working (the peak above what was "
            "loaded).",
        ),
        (drawn("Predicted beside measured", figures.memory, table),),
    )


def _costs(study: Study) -> Section | None:
    table = bench.costs(study)
    if not table.rows:
        return None
    last = table.rows[-1]
    finding = ""
    if last["times"] is not None:
        finding = f"A forward of {last['rows']} rows costs {last['times']:.2f}× one of 1 row."
    return Section(
        "costs",
        "What does a wider forward cost?",
        finding,
        (
            "Median milliseconds of one target forward by its rows, behind the context that is named. Where the curve "
            "is flat, tokens are verified for nothing.",
        ),
        (drawn("A forward by its rows", figures.costs, table),),
    )


def _looping(study: Study) -> Section | None:
    table = bench.loops(study)
    if not table.rows:
        return None
    last = table.rows[-1]
    finding = ""
    if last["looping"] is not None:
        finding = f"{100 * last['looping']:.1f} % of {last['tokens']:,} tokens loop, which flatters looking text up."
    return Section(
        "looping",
        "Does the output repeat itself?",
        finding,
        (
            "looping: share of the tokens in a stretch of 16 or more that says a block of up to 64 tokens three times "
            f"or more without a break, of {study.baseline}'s outputs, each prompt once.",
        ),
        (drawn("Looping share by category", figures.looping, table),),
    )


def _machine(study: Study) -> Section:
    command = plain(str(study.run.header["command"]), MAX_MESSAGE)
    return Section(
        "machine",
        "Machine, versions, and how to reproduce",
        "",
        ("Two runs can be compared where machine and definition are the same.",),
        tables=(bench.machine(study),),
        folded=(bench.settings(study),),
        listings=(
            Listing("To run it again", command),
            Listing("To write this page again", "specbench report RUN.jsonl"),
        ),
    )


def of_kernels(rows: Sequence[Mapping[str, Any]]) -> Section:
    """rows: what `specbench.suites.benchmark.kernels` wrote. ValueError where they are not."""
    try:
        table = _cells(kernels.cells_of(rows, kernels.ATTENTION))
        device = next((str(one["device"]) for one in rows if one["row"] == "run"), "an unnamed device")
        is_timed = any(one["seconds"] is not None for one in table.rows)
        title = "Tree attention below its roofline"
        drawings = (drawn(title, _roofline, table, rows, is_wide=True),) if is_timed else ()
        aims = [vars(one) for one in kernels.targets(rows)]
    except (KeyError, TypeError) as error:
        raise ValueError(f"a row of the kernels' benchmark lacks or has a wrong {error}") from None
    columns = (text("wanted", "target"), text("found", "found"), text("verdict", "verdict"))
    targets = Table("kernel-targets", "Targets", columns, tuple(aims))
    num = sum(one["verdict"] == kernels.REACHED for one in aims)
    return Section(
        "kernels",
        "How fast are the kernels?",
        f"{num} of {len(aims)} targets reached on {named(device)}; {len(table.rows)} cells of tree attention.",
        (
            "roofline: the time below which this card cannot do it, by the fewest bytes at its measured copy bandwidth "
            "and the fewest operations at its measured matrix rate; of roofline: its share of the time taken.",
            "over floor: the time / that of dense attention of the same rows with no mask. over peer: the best peer's "
            "time / ours; above 1 ours is faster. A kernel whose output was not right has no time.",
        ),
        drawings,
        tables=(targets,) if drawings else (targets, table),
    )


def _roofline(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """With its powers of ten in words, since figures in a page read no mathematics."""
    drawing = kernels.roofline_figure(rows)
    drawing.axes[0].xaxis.set_major_formatter(EngFormatter(sep=" "))
    drawing.axes[0].yaxis.set_major_formatter(EngFormatter(sep=" "))
    return drawing


def _cells(cells: Sequence[kernels.Cell]) -> Table:
    rows = tuple(
        {
            **{name: one.sizes[name] for name in ("P", "N", "B")},
            "status": one.own["status"],
            "n": one.own["seconds"]["n"] if one.seconds is not None else None,
            "seconds": one.seconds,
            "intensity": one.own["flops"] / one.own["bytes"],
            "rate": one.own["flops"] / one.seconds if one.seconds is not None else None,
            "roofline": one.roofline,
            "roofline_share": one.roofline_share,
            "over_floor": one.over_floor,
            "over_peer": one.over_peer,
            "peer": one.peer["contender"] if one.peer is not None else None,
        }
        for one in cells
    )
    columns = (
        count("P", "P, prefix"),
        count("N", "N, nodes"),
        count("B", "B, batch"),
        text("status", "status"),
        count("n", "n times"),
        Column("seconds", "median (µs)", 1, "", 1e6),
        Column("intensity", "FLOP a byte", 1),
        Column("rate", "TFLOP/s", 1, "", 1e-12),
        Column("roofline", "roofline (µs)", 1, "", 1e6),
        share("roofline_share", "of roofline"),
        ratio("over_floor", "over floor"),
        ratio("over_peer", "over peer"),
        text("peer", "best peer"),
    )
    return Table("kernels", "Tree attention", columns, rows)


def of_lossiness(record: Mapping[str, Any]) -> Section:
    """record: what `specbench law --lossiness FILE.json` wrote. ValueError where it is not."""
    columns = (
        text("rule", "rule"),
        text("parameter", "parameter"),
        Column("value", "value", 3),
        Column("acceptance_length", "acceptance length", 3),
        Column("tv", "TV to sampling", 4),
        Column("tv_largest", "largest TV", 4),
        Column("tv_greedy", "TV to greedy", 4),
    )
    names = [one.name for one in columns[2:]]
    try:
        rows = tuple(
            {"rule": curve["rule"], "parameter": curve["parameter"], **{name: point[name] for name in names}}
            for curve in record["curves"]
            for point in curve["points"]
        )
        table = Table("lossiness", "What lossy rules gain and lose", columns, rows)
        drawing = drawn(
            "Acceptance length against total variation", lossiness.figure, table, record["curves"], is_wide=True
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"the lossiness record lacks or has a wrong {error}") from None
    return Section(
        "lossiness",
        "What does a lossy rule give up?",
        f"{len(by(rows, 'rule'))} rules, {record.get('drafts', '')}.",
        (
            "acceptance length: accepted drafts + 1, mean of a round. total variation: half the sum of the differences "
            "between the law that is emitted and the target's; 0 is lossless, 1 has nothing in common.",
        ),
        (drawing,),
        listings=_command(record),
    )


def of_engines(record: Mapping[str, Any]) -> Section:
    """record: what `specbench engines --json` wrote. ValueError where it is not."""
    table = engines.audits(record["engines"])
    drawings = []
    if any(one["bound"] for one in table.rows):
        drawings.append(drawn("Largest regret beside its bound", engines.regrets, table))
        drawings.append(drawn("How often a token is not the oracle's", engines.rates, table, name="engines-rates"))
    nums = {name: len(some) for (name,), some in by(table.rows, "verdict").items()}
    return Section(
        "engines",
        "Are other engines right?",
        f"{len(table.rows)} modes: {', '.join(f'{num} {name}' for name, num in nums.items())}.",
        (
            "regret: the oracle's best logit minus that of the token which was emitted, float64, on the engine's own "
            "weights. bound: what no error of so many tokens exceeds but with the stated false-alarm rate, measured on "
            "the engine's plain decoding.",
            "not the oracle's token: tokens with a regret above 0, of all; beside it plain decoding's share. A mode "
            "that leaves more often than plain decoding does is a BUG even where each single regret is small.",
        ),
        tuple(drawings),
        tables=(table,),
        listings=_command(record),
    )


def of_consistency(run: RunRecord) -> Section:
    """The failures of a consistency run, the smallest tree of each claim drawn."""
    failing, drawings, seen = trees.failing(run), list[Drawing](), set[str]()
    for one in trees.failures(run):
        nodes = trees.tree_of(one.message)
        if not nodes or one.claim in seen or len(drawings) == trees.MOST_TREES:
            continue
        seen.add(one.claim)
        name = f"tree-{len(drawings) + 1}"
        title = plain(f"{one.claim} on {one.subject}: {one.message.partition(chr(10))[0]}", 200, one_line=True)
        table = trees.nodes_table(name, nodes)
        drawings.append(Drawing(name, title, trees.drawing(nodes), None, table, is_wide=True, is_fluid=False))
    num = len(failing.rows)
    told = f"{num} of {len(run.claims)} cells fail" if num else f"None of {len(run.claims)} cells fails"
    return Section(
        "consistency",
        "What fails, and on which tree?",
        f"{plain(run.target, 200, one_line=True)}: {told}.",
        (
            "A cell is a claim on a subject. Each tree is the smallest case that still fails: a row a node, children "
            "to the right and below; filled: accepted or committed, a thick ring: spoken of.",
        ),
        tuple(drawings),
        tables=(trees.counts(run), failing) if num else (trees.counts(run),),
        listings=tuple(
            Listing(f"{one.claim} on {one.subject}", plain(one.message, MAX_MESSAGE), is_open=False)
            for one in trees.failures(run)[: trees.MOST_TREES]
        ),
    )


def _command(record: Mapping[str, Any]) -> tuple[Listing, ...]:
    command = record.get("command")
    return (Listing("To run it again", plain(command, MAX_MESSAGE)),) if isinstance(command, str) else ()
