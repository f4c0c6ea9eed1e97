"""Figures of a benchmark: each takes a table's rows (see `reports.bench`) and returns a Figure. No file is read here.

Drawn 360 units wide, so that a phone shows letters of a legible size. Colour is never the only carrier: series have
markers and names, stacks have their numbers in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator, PercentFormatter

from specbench.reports.table import by
from specbench.reports.theme import ACCENT, INK, LIGHT, MARKERS, PAPER, SERIES, SOFT, figure

Rows = Sequence[Mapping[str, Any]]
COLOURS = [LIGHT[name] for name in SERIES]
MOST_SETTINGS = 16  # of a figure; the table has all
MOST_CURVES = 6
MOST_DATES = 5  # below an axis
MAX_NAME = 42
LINE_LETTERS = 54  # of a line, name and number
RATIOS = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8, 12, 16)
SMALL = 9.0


def speedups(rows: Rows, points: Rows) -> Figure:
    """rows: of `speedups`, the fastest first. points: of `categories`. A filled dot: the interval leaves
    out 1; circles below it are categories."""
    drawing = figure(0.6 + 0.48 * len(rows))
    axes = drawing.subplots()
    categories = by(points, "setting")
    values = [1.0]
    for idx, one in enumerate(rows):
        y = -idx
        colour = ACCENT if idx == 0 else INK
        low, high = _or(one["low"], one["speedup"]), _or(one["high"], one["speedup"])
        mine = [point["speedup"] for point in categories.get((one["setting"],), ())]
        axes.plot([low, high], [y, y], color=colour, linewidth=2.2, solid_capstyle="butt")
        is_clear = one["low"] is not None and (low > 1 or high < 1)
        axes.plot(one["speedup"], y, "o", markersize=6.5, color=colour, markerfacecolor=colour if is_clear else PAPER)
        circles: dict[str, Any] = {"markersize": 3.4, "markerfacecolor": "none", "markeredgewidth": 0.9, "color": SOFT}
        axes.plot(mine, [y - 0.22] * len(mine), "o", **circles)
        values += [low, high, *mine]
        label_row(axes, y, one["setting"], _interval(one), colour)
    _ratio_axis(axes, values)
    axes.axvline(1, color=SOFT, linewidth=0.9, linestyle=(0, (3, 2)), zorder=0)
    rows_axis(axes, len(rows))
    axes.set_xlabel("speed-up over the baseline (1 = as fast)")
    return drawing


def ladder(rows: Rows) -> Figure:
    """rows: of `ladder`. A panel a step, on one axis, on which plain decoding is 1: a bar for tokens a forward, a dot
    with its interval for the speed-up, hollow where that does not leave out 1. What lies between is the cost."""
    drawing = figure(0.6 + 0.62 * len(rows))
    panels = drawing.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
    values = [1.0]
    for axes, one in zip(panels, rows, strict=True):
        length, speedup = one["length"], one["speedup"]
        words = [] if length is None else [f"{length:.2f} tokens"]
        if length is not None:
            axes.barh(0, length, height=0.5, color=LIGHT["s2"])
            values.append(length)
        if speedup is not None:
            low, high = _or(one["low"], speedup), _or(one["high"], speedup)
            is_clear = one["low"] is not None and (low > 1 or high < 1)
            axes.plot([low, high], [0, 0], color=INK, linewidth=2.2, solid_capstyle="butt")
            axes.plot(speedup, 0, "o", markersize=6.5, color=INK, markerfacecolor=INK if is_clear else PAPER)
            values += [low, high]
            words.append(f"{speedup:.2f}×" if one["low"] is None else f"{speedup:.2f}× [{low:.2f}, {high:.2f}]")
        axes.set_title(_short(one["setting"], 24), loc="left")
        axes.set_title(", ".join(words) or "no figure", loc="right")
        axes.axvline(1, color=SOFT, linewidth=0.9, linestyle=(0, (3, 2)))
        axes.set_ylim(-0.5, 0.5)
        axes.yaxis.set_major_locator(NullLocator())
        axes.spines["left"].set_visible(False)
    panels[-1].set_xlim(0, 1.05 * max(values))
    panels[-1].set_xlabel("times plain decoding: tokens a forward (bar), speed-up (dot)")
    return drawing


def categories(rows: Rows, overall: Mapping[str, Any]) -> Figure:
    """rows: of `categories`, one setting's. overall: its row of `speedups`, drawn as a band."""
    drawing = figure(0.6 + 0.26 * len(rows))
    axes = drawing.subplots()
    values = [1.0, overall["speedup"]]
    if overall["low"] is not None:
        axes.axvspan(overall["low"], overall["high"], color=ACCENT, alpha=0.14, linewidth=0)
        values += [overall["low"], overall["high"]]
    axes.axvline(overall["speedup"], color=ACCENT, linewidth=1.2)
    for idx, one in enumerate(rows):
        axes.plot(one["speedup"], -idx, "o", markersize=5.5, color=INK, markerfacecolor=PAPER)
        values.append(one["speedup"])
    labels = [f"{_short(one['category'], 22)} (n = {one['n']})" for one in rows]
    axes.set_yticks([-idx for idx in range(len(rows))], labels)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.axvline(1, color=SOFT, linewidth=0.9, linestyle=(0, (3, 2)), zorder=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="y")
    _ratio_axis(axes, values)
    axes.set_ylim(-len(rows) + 0.4, 0.6)
    axes.set_xlabel("speed-up (band: all prompts, 95 % interval)")
    return drawing


def gamma(rows: Rows) -> Figure:
    """rows: of `gamma`. A panel a curve. The knee wears a ring; what is predicted is dashed, its optimum a diamond."""
    curves = list(by(rows, "curve").items())[:MOST_CURVES]
    drawing = figure(0.75 + 1.35 * len(curves))
    panels = drawing.subplots(len(curves), 1, sharex=True, squeeze=False)[:, 0]
    for idx, (axes, ((curve,), mine)) in enumerate(zip(panels, curves, strict=True)):
        colour = INK if idx else ACCENT
        told = [one for one in mine if one["predicted"] is not None]
        known = [one for one in mine if one["speedup"] is not None]
        xs, ys = [one["gamma"] for one in known], [one["speedup"] for one in known]
        lows, highs = ([_or(one[end], one["speedup"]) for one in known] for end in ("low", "high"))
        ends = [[one - low for one, low in zip(ys, lows, strict=True)]]
        ends += [[high - one for one, high in zip(ys, highs, strict=True)]]
        dashed: dict[str, Any] = {"color": SOFT, "linestyle": (0, (4, 2)), "linewidth": 1}
        predicted = [one["predicted"] for one in told]
        axes.plot([one["gamma"] for one in told], predicted, label="predicted" if told else None, **dashed)
        axes.errorbar(xs, ys, yerr=ends, color=colour, marker="o", markersize=4, elinewidth=1, label="measured")
        title = [_short(curve, 24)]
        for one in mine:
            marks = one["mark"].split(", ")
            if "knee" in marks:
                title.insert(1, f"knee γ = {one['gamma']} ({one['speedup']:.2f}×)")
                axes.plot(one["gamma"], one["speedup"], "o", markersize=10, color=colour, markerfacecolor="none")
            if "predicted best" in marks:
                title.append(f"predicted γ = {one['gamma']}")
                axes.plot(one["gamma"], one["predicted"], "D", markersize=5, color=SOFT, markerfacecolor=PAPER)
        axes.set_title(", ".join(title), loc="left")
        axes.axhline(1, color=SOFT, linewidth=0.9, linestyle=(0, (3, 2)), zorder=0)
        axes.set_ylim(*_around([1.0, *ys, *lows, *highs, *predicted], 0.12))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        axes.grid(axis="y")
    panels[-1].set_xlabel("γ, drafted tokens in depth (○ knee, ◇ predicted best)")
    _legend(drawing, panels[0])
    return drawing


def history(rows: Rows) -> Figure:
    """rows: of `history`. Runs stand side by side, the oldest left; a bar: an interval that leaves room for chance."""
    runs = sorted({one["run"] for one in rows})
    drawing = figure(2.6)
    axes = drawing.subplots()
    values = [1.0]
    for idx, ((setting,), mine) in enumerate(list(by(rows, "setting").items())[:MOST_CURVES]):
        xs, ys = [runs.index(one["run"]) for one in mine], [one["speedup"] for one in mine]
        lows, highs = ([_or(one[end], one["speedup"]) for one in mine] for end in ("low", "high"))
        ends = [[one - low for one, low in zip(ys, lows, strict=True)]]
        ends += [[high - one for one, high in zip(ys, highs, strict=True)]]
        style: dict[str, Any] = {"color": COLOURS[idx], "marker": MARKERS[idx], "markersize": 4.5, "elinewidth": 0.9}
        axes.errorbar(xs, ys, yerr=ends, label=_short(setting), **style)
        values += [*lows, *highs]
    axes.axhline(1, color=SOFT, linewidth=0.9, linestyle=(0, (3, 2)), zorder=0)
    step = -(-len(runs) // MOST_DATES)
    axes.set_xticks(range(0, len(runs), step), [one[5:16].replace("T", "\n") for one in runs[::step]])
    axes.set_xlim(-0.3, len(runs) - 0.7)
    axes.set_ylim(*_around(values, 0.12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.grid(axis="y")
    axes.set_xlabel("run (month-day, UTC)")
    _legend(drawing, axes)
    return drawing


def depths(rows: Rows) -> Figure:
    """rows: of `depths`. Above conditional, below joint acceptance."""
    drawing = figure(3.9)
    for axes, (field, what) in zip(
        drawing.subplots(2, 1, sharex=True),
        (("conditional", "accepted, of those that got there"), ("joint", "accepted, of all drafted so deep")),
        strict=True,
    ):
        for idx, ((setting,), mine) in enumerate(list(by(rows, "setting").items())[:MOST_CURVES]):
            told = [one for one in mine if one[field] is not None]
            xs, ys = [one["depth"] for one in told], [one[field] for one in told]
            axes.plot(xs, ys, color=COLOURS[idx], marker=MARKERS[idx], markersize=4.5, label=_short(setting))
        axes.set_title(what, loc="left")
        axes.set_ylim(0, 1.03)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y")
    axes.set_xlabel("depth")
    _legend(drawing, axes)
    return drawing


def lengths(rows: Rows) -> Figure:
    """rows: of `lengths`. One row of bars a setting, the first in the accent's colour."""
    settings = list(by(rows, "setting").items())[:MOST_CURVES]
    drawing = figure(0.45 + 0.95 * len(settings))
    panels = drawing.subplots(len(settings), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for idx, (axes, ((setting,), mine)) in enumerate(zip(panels, settings, strict=True)):
        colour = SOFT if idx else ACCENT
        axes.bar([one["length"] for one in mine], [one["share"] for one in mine], width=0.72, color=colour)
        num = sum(one["rounds"] for one in mine)
        axes.set_title(f"{_short(setting)} (n = {num:,} rounds)", loc="left")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.yaxis.set_major_locator(MaxNLocator(3))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y")
        axes.set_axisbelow(True)
    panels[-1].set_xlabel("tokens emitted by a round, the target's own included")
    return drawing


def rounds(rows: Rows) -> Figure:
    """rows: of `rounds`. Milliseconds of a token by phase, in words below each bar."""
    return _stacks(
        rows,
        {"draft": "s2", "verify": "accent", "commit": "s3", "host": "s6"},
        lambda one: f"{1e3 * one['total']:.1f} ms",
        unit=1e-3,
        label="milliseconds a token, behind the first tokens",
    )


def memory(rows: Rows) -> Figure:
    """rows: of `memory`. Of each setting what was predicted and, below it, what was measured."""
    bars = []
    for one in rows[: MOST_SETTINGS // 2]:
        predicted = {name: one[name] for name in ("weights", "cache", "tree", "logits")}
        measured = {"weights": one["measured_weights"], "working": one["measured_working"]}
        bars += [
            {"setting": f"{one['setting']}, {what}", **some}
            for what, some in (("predicted", predicted), ("measured", measured))
            if any(value is not None for value in some.values())
        ]
    colours = {"weights": "s6", "cache": "accent", "tree": "s3", "logits": "s4", "working": "s2"}
    bars = [{name: one.get(name) for name in ("setting", *colours)} for one in bars]

    def total(one: Mapping[str, Any]) -> str:
        return f"{sum(one[name] or 0 for name in colours) / 2**20:,.0f} MiB"

    return _stacks(bars, colours, total, unit=2.0**20, label="MiB")


def costs(rows: Rows) -> Figure:
    """rows: of `costs`."""
    drawing = figure(2.5)
    axes = drawing.subplots()
    for idx, ((model, context), mine) in enumerate(list(by(rows, "model", "context").items())[:MOST_CURVES]):
        xs, ys = [one["rows"] for one in mine], [1e3 * one["seconds"] for one in mine]
        label = ", ".join(
            part for part in (_short(model or "", 24), f"context {context}" if context is not None else "") if part
        )
        axes.plot(xs, ys, color=COLOURS[idx], marker=MARKERS[idx], markersize=4.5, label=label or "forward")
        for one in mine if idx == 0 else ():
            if one["times"] is not None and one["rows"] > 1 and _is_power_of_two(one["rows"]):
                place: dict[str, Any] = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center", "color": SOFT}
                axes.annotate(f"{one['times']:.2f}×", (one["rows"], 1e3 * one["seconds"]), fontsize=SMALL, **place)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator([one["rows"] for one in rows if _is_power_of_two(one["rows"])]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylim(0, 1.18e3 * max(one["seconds"] for one in rows))
    axes.grid(axis="y")
    axes.set_xlabel("rows of the forward (tokens verified at once)")
    axes.set_ylabel("ms")
    _legend(drawing, axes)
    return drawing


def looping(rows: Rows) -> Figure:
    """rows: of `looping`."""
    drawing = figure(0.5 + 0.27 * len(rows))
    axes = drawing.subplots()
    shares = [one["looping"] or 0.0 for one in rows]
    colours = [SOFT if one["category"] != "all" else INK for one in rows]
    axes.barh([-idx for idx in range(len(rows))], shares, height=0.55, color=colours)
    for idx, (one, value) in enumerate(zip(rows, shares, strict=True)):
        place: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(f"{100 * value:.0f} % of {one['tokens']:,}", (value, -idx), fontsize=SMALL, **place)
    axes.set_yticks([-idx for idx in range(len(rows))], [_short(one["category"], 24) for one in rows])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_xlim(0, max(0.1, 1.3 * max(shares)))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    axes.set_xlabel("tokens that go on a block said twice before")
    return drawing


def _is_power_of_two(num: int) -> bool:
    return num.bit_count() == 1


def _stacks(rows: Rows, colours: Mapping[str, str], total: Any, *, unit: float, label: str) -> Figure:
    """colours: of the theme, by the name of the part. total: the words at a bar's end."""
    names = [name for name in colours if any(one[name] for one in rows)]
    drawing = figure(0.8 + 0.56 * len(rows))
    axes = drawing.subplots()
    for idx, one in enumerate(rows):
        y, left = -idx, 0.0
        for name in names:
            value = max(0.0, (one[name] or 0.0) / unit)
            style: dict[str, Any] = {"color": LIGHT[colours[name]], "edgecolor": PAPER, "linewidth": 0.8}
            axes.barh(y, value, left=left, height=0.3, label=name if idx == 0 else None, **style)
            left += value
        label_row(axes, y, one["setting"], total(one), INK)
        parts = [f"{name} {_digits(one[name] / unit)}" for name in names if one[name] is not None]
        where = axes.get_yaxis_transform()
        axes.text(0, y - 0.31, " · ".join(parts), transform=where, va="center", fontsize=SMALL, color=SOFT)
    rows_axis(axes, len(rows))
    axes.set_xlim(left=0)
    axes.set_xlabel(label)
    _legend(drawing, axes)
    return drawing


def label_row(axes: Axes, y: float, left: str, right: str, colour: str) -> None:
    """Above a row: its name on the left, its number on the right."""
    name = _short(left, max(12, LINE_LETTERS - len(right)))
    for x, said, align in ((0.0, name, "left"), (1.0, right, "right")):
        axes.text(x, y + 0.33, said, transform=axes.get_yaxis_transform(), ha=align, va="center", color=colour)


def rows_axis(axes: Axes, num: int) -> None:
    axes.set_ylim(-num + 0.45, 0.55)
    axes.yaxis.set_major_locator(NullLocator())
    axes.spines["left"].set_visible(False)


def _ratio_axis(axes: Axes, values: Sequence[float]) -> None:
    """Logarithmic: half and double are equally far from 1."""
    low, high = min(values), max(values)
    axes.set_xscale("log")
    axes.set_xlim(low / 1.08, high * 1.08)
    ticks = [one for one in RATIOS if low / 1.08 <= one <= high * 1.08]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.grid(axis="x")
    axes.set_axisbelow(True)


def _legend(drawing: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        columns = 1 if max(map(len, labels)) > 24 else 2 if max(map(len, labels)) > 11 else 5
        drawing.legend(handles, labels, loc="outside lower left", ncols=min(columns, len(labels)), handlelength=1.6)


def _interval(one: Mapping[str, Any]) -> str:
    if one["low"] is None:
        return f"{one['speedup']:.2f}×, n = {one['n']}"
    return f"{one['speedup']:.2f}× [{one['low']:.2f}, {one['high']:.2f}], n = {one['n']}"


def _around(values: Sequence[float], margin: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    return low - margin * (high - low + 0.1), high + margin * (high - low + 0.1)


def _or(value: float | None, other: float) -> float:
    return other if value is None else value


def _digits(value: float) -> str:
    """Three of them, at most two behind the point."""
    size = abs(value)
    return f"{value:,.{0 if size >= 100 else 1 if size >= 10 else 2}f}"


def _short(name: str, limit: int = MAX_NAME) -> str:
    """What tells settings apart often stands at the end of their names."""
    tail = limit // 3
    cut = name if len(name) <= limit else f"{name[: limit - tail - 1]}…{name[-tail:]}"
    return f" {cut}" if cut.startswith("_") else cut  # legends leave out what begins so
