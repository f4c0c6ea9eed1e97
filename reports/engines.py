"""The audit of engines (`specbench engines --json`): how far each mode went, beside what rounding can explain.

On a real model a mode's largest regret is held against a bound measured on plain decoding; on a sentinel there is no
rounding, and a verdict alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from specbench.record import BUG
from specbench.reports.figures import MOST_SETTINGS, label_row, rows_axis
from specbench.reports.table import Column, Table, count, share, text
from specbench.reports.theme import ACCENT, INK, LIGHT, PAPER, SOFT, figure

Rows = Sequence[Mapping[str, Any]]


def audits(results: Rows) -> Table:
    """results: `engines` of the JSON. ValueError for one without its fields."""
    rows = []
    for idx, one in enumerate(results):
        try:
            facts = one["facts"]
            left, tokens = facts.get("num_left"), one["num_tokens"]
            plain_left, plain_tokens = facts.get("plain_left"), facts.get("plain_tokens")
            rows.append(
                {
                    **{name: one[name] for name in ("engine", "model", "weights", "mode", "verdict")},
                    "outputs": one["num_outputs"],
                    "tokens": tokens,
                    "regret": facts.get("worst_regret"),
                    "bound": facts.get("bound"),
                    "left": left / tokens if left is not None and tokens else None,
                    "plain_left": plain_left / plain_tokens if plain_left is not None and plain_tokens else None,
                    "plain_tokens": plain_tokens,
                    "sentence": one["sentence"],
                }
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"result {idx} of the engines' audit lacks or has a wrong {error}") from None
    columns = (
        text("engine", "engine"),
        text("model", "model"),
        text("weights", "weights"),
        text("mode", "mode"),
        text("verdict", "verdict"),
        count("outputs", "n outputs"),
        count("tokens", "n tokens"),
        Column("regret", "largest regret", 3),
        Column("bound", "bound", 3),
        share("left", "not the oracle's token"),
        share("plain_left", "plain decoding's share"),
        count("plain_tokens", "plain's n tokens"),
        text("sentence", "what was found"),
    )
    return Table("engines", "Audit of engines", columns, tuple(rows))


def regrets(rows: Rows) -> Figure:
    """rows: of `audits` that have a bound. A bar from 1 % of the bound to it, and the largest regret as a share of it:
    a dot inside is rounding's, a cross outside is not."""
    rows = [one for one in rows if one["bound"]][:MOST_SETTINGS]
    drawing = figure(0.6 + 0.46 * len(rows))
    axes = drawing.subplots()
    shares = [max(0.01, (one["regret"] or 0.0) / one["bound"]) for one in rows]
    right = max(1.5, 1.3 * max(shares, default=1.0))
    axes.axvspan(0.008, 1.0, color=ACCENT, alpha=0.12, linewidth=0)
    axes.axvline(1.0, color=ACCENT, linewidth=1.2)
    for idx, (one, value) in enumerate(zip(rows, shares, strict=True)):
        beyond = value > 1 or one["verdict"] == BUG
        colour = LIGHT["s2"] if beyond else INK
        axes.plot(value, -idx, "X" if beyond else "o", markersize=7, color=colour, markeredgecolor=PAPER)
        said = f"{one['verdict']}, {one['regret'] or 0.0:.2g} of {one['bound']:.2g}, n = {one['tokens']:,}"
        label_row(axes, -idx, f"{one['engine']}, {one['mode']}, {one['weights']}", said, colour)
    axes.set_xscale("log")
    axes.set_xlim(0.008, right)
    ticks = [one for one in (0.01, 0.1, 0.3, 1, 3, 10, 100) if one <= right]
    axes.set_xticks(ticks, [f"{one:g}" for one in ticks])
    axes.minorticks_off()
    rows_axis(axes, len(rows))
    axes.tick_params(axis="x", labelcolor=SOFT)
    axes.set_xlabel("largest regret / bound (shaded: rounding explains it)")
    return drawing


def rates(rows: Rows) -> Figure:
    """rows: of `audits` that have both shares. How often a token is not the oracle's: the mode's dot beside plain
    decoding's diamond."""
    rows = [one for one in rows if one["left"] is not None and one["plain_left"] is not None][:MOST_SETTINGS]
    drawing = figure(0.75 + 0.46 * len(rows))
    axes = drawing.subplots()
    for idx, one in enumerate(rows):
        mine, plain = 100 * one["left"], 100 * one["plain_left"]
        axes.plot([plain, mine], [-idx, -idx], color=SOFT, linewidth=1.2, zorder=1)
        axes.plot(plain, -idx, "D", markersize=6, color=SOFT, markerfacecolor=PAPER, label=_once("plain decoding", idx))
        axes.plot(mine, -idx, "o", markersize=6, color=ACCENT, label=_once("this mode", idx))
        said = f"{mine:.1f} %, plain {plain:.1f} %"
        label_row(axes, -idx, f"{one['engine']}, {one['mode']}, {one['weights']}", said, INK)
    axes.set_xlim(left=-0.02 * max([1.0, *(100 * one[name] for one in rows for name in ("left", "plain_left"))]))
    rows_axis(axes, len(rows))
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    axes.set_xlabel("tokens that are not the oracle's, %")
    handles, labels = axes.get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower left", ncols=2)
    return drawing


def _once(label: str, idx: int) -> str | None:
    return label if idx == 0 else None
