"""What the kernel benchmark's rows say: shares of the card's own ceilings, ratios, targets, losses and their causes.

Takes the rows that `suites/benchmark/kernels` wrote; a time that is not there stays unknown. Reads no file, times
nothing.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure

Row = Mapping[str, Any]
ATTENTION, GREEDY = "tree_attention", "verify_greedy + commit_kv"
REACHED, NOT_REACHED, NOT_MEASURED = "reached", "not reached", "not measured"
TARGET_BATCH, TARGET_PREFIX = 8, 8192
FEW_NODES, MANY_NODES = 16, 64
COPY_SHARE, ROOFLINE_SHARE, FLOOR_RATIO, WORST_RATIO, GREEDY_SECONDS = 0.8, 0.6, 1.10, 0.8, 60e-6
MARKERS = {1: "o", 8: "s", 32: "^"}
COLOURS = {1: "#0072b2", 8: "#d55e00", 32: "#009e73"}


def rows_of(text: str) -> list[dict[str, Any]]:
    """Rows of JSON lines. The last line may have been cut off in writing and is left out then."""
    lines = text.splitlines()
    rows = []
    for idx, line in enumerate(lines):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if idx < len(lines) - 1:
                raise ValueError(f"line {idx + 1} is not JSON: {error.msg}") from error
    return rows


@dataclass(frozen=True)
class Cell:
    """One kernel at one size: our row, and the best of the others that were right. Ratios above one: we are faster
    (over_peer), slower (over_floor). None: not measured."""

    own: Row
    floor: Row | None
    peer: Row | None
    copy: float | None  # bytes/s
    matrix: float | None  # FLOP/s
    launch: float | None  # s

    @property
    def sizes(self) -> Mapping[str, Any]:
        return self.own["cell"]

    @property
    def seconds(self) -> float | None:
        return _seconds(self.own)

    @property
    def roofline(self) -> float | None:
        """Seconds below which this card cannot do it."""
        if self.copy is None or self.matrix is None:
            return None
        return max(self.own["bytes"] / self.copy, self.own["flops"] / self.matrix)

    @property
    def copy_share(self) -> float | None:
        return _ratio(_ratio(self.own["bytes"], self.seconds), self.copy)

    @property
    def matrix_share(self) -> float | None:
        return _ratio(_ratio(self.own["flops"], self.seconds), self.matrix)

    @property
    def roofline_share(self) -> float | None:
        return _ratio(self.roofline, self.seconds)

    @property
    def over_floor(self) -> float | None:
        return _ratio(self.seconds, _seconds(self.floor))

    @property
    def over_peer(self) -> float | None:
        return _ratio(_seconds(self.peer), self.seconds)

    @property
    def is_loss(self) -> bool:
        return self.over_peer is not None and self.over_peer < 1.0

    @property
    def cause(self) -> str:
        """Why it takes longer than the roofline says, as far as formulas can tell."""
        seconds, own, found = self.seconds, self.own, []
        if seconds is None or self.roofline is None:
            return ""
        if self.launch is not None and self.launch > 0.25 * seconds:
            found.append(f"launch-bound: two empty kernels take {self.launch * 1e6:.1f} of {seconds * 1e6:.1f} us")
        if "slots" in own:
            waves = own["programs"] / own["slots"]
            if waves / math.ceil(waves) < 0.8:
                found.append(f"occupancy: {own['programs']} programs fill waves of {own['slots']} badly")
        if own.get("partial_bytes", 0) > 0.1 * own["bytes"]:
            found.append(f"bytes: partial results add {own['partial_bytes'] / own['bytes']:.0%}")
        if own.get("used_rows", 1.0) < 0.8 and self.roofline > own["bytes"] / self.copy:
            found.append(f"padding: {own['used_rows']:.0%} of a block's rows are used")
        if not found:
            shares = f"{self.copy_share:.0%} of the copy bandwidth, {self.matrix_share:.0%} of the matrix rate"
            return f"no formula tells: {shares}"
        return "; ".join(found)


def cells_of(rows: Sequence[Row], kernel: str) -> list[Cell]:
    """One for each of our rows of a kernel, in the order of their sizes."""
    timed = [row for row in rows if row["row"] == "time" and row["kernel"] == kernel]
    ceiling = {row["name"]: row["value"] for row in rows if row["row"] == "ceiling"}
    found = []
    for own in timed:
        if own["role"] != "own":
            continue
        others = [row for row in timed if row["cell"] == own["cell"] and _seconds(row) is not None]
        floor, peer = (
            min((row for row in others if row["role"] == role), key=lambda row: row["seconds"]["median"], default=None)
            for role in ("floor", "peer")
        )
        found.append(Cell(own, floor, peer, *(ceiling.get(name) for name in ("copy", "matrix", "launch"))))
    return sorted(found, key=lambda cell: tuple(v for v in cell.sizes.values() if not isinstance(v, str)))


def _seconds(row: Row | None) -> float | None:
    return None if row is None or row["status"] != "timed" else row["seconds"]["median"]


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


@dataclass(frozen=True)
class Target:
    """wanted, found: in words. verdict: one of REACHED, NOT_REACHED, NOT_MEASURED."""

    wanted: str
    found: str
    verdict: str


def targets(rows: Sequence[Row]) -> list[Target]:
    """The issue's targets. One that holds wherever it was measured, but was not measured everywhere, is not reached
    yet: NOT_MEASURED, with what was found. A cell in which ours is wrong misses its targets."""
    attention = cells_of(rows, ATTENTION)
    aimed = [cell for cell in attention if cell.sizes["B"] == TARGET_BATCH and cell.sizes["P"] >= TARGET_PREFIX]
    few = [cell for cell in aimed if cell.sizes["N"] <= FEW_NODES]
    many = [cell for cell in aimed if cell.sizes["N"] >= MANY_NODES]
    where = f"P >= {TARGET_PREFIX:,}, B = {TARGET_BATCH}"
    greedy = cells_of(rows, GREEDY)
    return [
        _worst(
            f"{where}, N <= {FEW_NODES}: at least {COPY_SHARE:.0%} of copy bandwidth",
            few, lambda cell: cell.copy_share, lambda share: share >= COPY_SHARE, min, "{:.0%}",
        ),
        _worst(
            f"{where}, N >= {MANY_NODES}: at least {ROOFLINE_SHARE:.0%} of the roofline",
            many, lambda cell: cell.roofline_share, lambda share: share >= ROOFLINE_SHARE, min, "{:.0%}",
        ),
        _worst(
            f"{where}: at most {FLOOR_RATIO:.2f} x the floor",
            aimed, lambda cell: cell.over_floor, lambda ratio: ratio <= FLOOR_RATIO, max, "{:.2f} x",
        ),
        _mean(attention),
        _worst(
            f"no cell below {WORST_RATIO} of the best peer",
            attention, lambda cell: cell.over_peer, lambda ratio: ratio >= WORST_RATIO, min, "{:.2f} x",
        ),
        _worst(
            f"greedy verify + commit: under {GREEDY_SECONDS * 1e6:.0f} us",
            greedy, lambda cell: cell.seconds, lambda seconds: seconds < GREEDY_SECONDS, max, "{:.3g} s",
        ),
        _masks(attention),
    ]  # fmt: skip


def _worst(
    wanted: str,
    cells: Sequence[Cell],
    value: Callable[[Cell], float | None],
    holds: Callable[[float], bool],
    worst: Callable[[Iterable[float]], float],
    form: str,
) -> Target:
    fitting = [cell for cell in cells if not _is_too_large(cell)]
    num_bad = sum(map(_is_bad, fitting))
    known = [number for cell in fitting if (number := value(cell)) is not None]
    parts = []
    if known:
        num_held = sum(map(holds, known))
        parts.append(f"worst {form.format(worst(known))}, held in {num_held} of {len(known)} measured cells")
    if num_bad:
        parts.append(f"wrong or failed in {num_bad}")
    if num_missing := len(fitting) - len(known) - num_bad:
        parts.append(f"{num_missing} not measured")
    verdict = REACHED if known and not num_missing else NOT_MEASURED
    return Target(wanted, ", ".join(parts), verdict if all(map(holds, known)) and not num_bad else NOT_REACHED)


def _mean(cells: Sequence[Cell]) -> Target:
    wanted = "geometric mean over the grid at or above the best peer's"
    fitting = [cell for cell in cells if not _is_too_large(cell)]
    ratios = [ratio for cell in fitting if (ratio := cell.over_peer) is not None]
    num_bad = sum(map(_is_bad, fitting))
    if not ratios:
        return Target(wanted, "", NOT_REACHED if num_bad else NOT_MEASURED)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    found = f"{mean:.2f} x over {len(ratios)} of {len(fitting)} cells"
    if num_bad:
        return Target(wanted, f"{found}, wrong or failed in {num_bad}", NOT_REACHED)
    if len(ratios) < len(fitting):
        return Target(wanted, found, NOT_MEASURED)
    return Target(wanted, found, REACHED if mean >= 1.0 else NOT_REACHED)


def _masks(cells: Sequence[Cell]) -> Target:
    """Masks come in whole words, so that N^2 / 8 is exact from 64 nodes on."""
    wanted = "mask memory N^2 / 8 bytes a tree (whole words of 64 nodes), whatever P"
    if not cells:
        return Target(wanted, "", NOT_MEASURED)
    wrong = [
        cell.sizes
        for cell in cells
        if cell.own["mask_bytes"] * 8 != cell.sizes["B"] * cell.sizes["N"] * 64 * -(-cell.sizes["N"] // 64)
    ]
    found = f"{len(cells) - len(wrong)} of {len(cells)} cells, by formula"
    return Target(wanted, found, NOT_REACHED if wrong else REACHED)


def _is_bad(cell: Cell) -> bool:
    return cell.own["status"] in ("wrong", "failed")


def _is_too_large(cell: Cell) -> bool:
    """It was never to be measured on this card."""
    return cell.own["status"] == "not run" and cell.own["why"].startswith("does not fit")


def markdown(rows: Sequence[Row]) -> str:
    """The whole page."""
    attention = cells_of(rows, ATTENTION)
    parts = ["# Kernel benchmark", _about(rows), "## Targets", _targets(rows), "## Tree attention"]
    parts += [_attention(attention), "## Losses", _losses(attention), "## Who ran", _contenders(rows)]
    for kernel in dict.fromkeys(row["kernel"] for row in rows if row["row"] == "time" and row["kernel"] != ATTENTION):
        parts += [f"## {kernel}", _others(rows, kernel)]
    return "\n\n".join([*parts, "## Mask memory of a tree", _mask_memory(rows)]) + "\n"


def _about(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        if row["row"] == "run":
            names = ("device", "torch", "triton", "python", "specbench")
            lines.append(", ".join(f"{name} {row[name]}" for name in names))
            lines.append(f"Method: {row['method']}.")
        if row["row"] == "check":
            why = f" ({row['why']})" if row["why"] else ""
            lines.append(f"Checks, {row['name']}: {row['status']}{why}.")
        if row["row"] == "ceiling":
            lines.append(f"Measured on this card: {row['name']} {row['value']:.4g} {row['unit']} ({row['how']}).")
    return "\n".join(f"- {line}" for line in lines)


def _targets(rows: Sequence[Row]) -> str:
    lines = [[one.wanted, one.found or "-", one.verdict] for one in targets(rows)]
    return _table(["target", "found", "verdict"], lines)


def _attention(cells: Sequence[Cell]) -> str:
    heads = ["P", "N", "B", "us", "quartiles", "n", "MB", "GFLOP", "of copy", "of matrix", "roofline us", "of roofline"]
    return _table(
        [*heads, "x floor", "best peer / ours", "best peer", "cause"],
        [
            [
                *(f"{cell.sizes[name]:,}" for name in "PNB"),
                *_time(cell.own),
                f"{cell.own['bytes'] / 1e6:,.1f}",
                f"{cell.own['flops'] / 1e9:,.1f}",
                _share(cell.copy_share),
                _share(cell.matrix_share),
                "-" if cell.roofline is None else f"{cell.roofline * 1e6:,.1f}",
                _share(cell.roofline_share),
                _times(cell.over_floor),
                _times(cell.over_peer),
                "-" if cell.peer is None else cell.peer["contender"],
                (cell.cause if _misses(cell) else "") or "-",
            ]
            for cell in cells
        ],
    )


def _misses(cell: Cell) -> bool:
    share, floor = cell.roofline_share, cell.over_floor
    return cell.is_loss or (share is not None and share < ROOFLINE_SHARE) or (floor is not None and floor > FLOOR_RATIO)


def _losses(cells: Sequence[Cell]) -> str:
    lost = [cell for cell in cells if cell.is_loss and cell.peer is not None]
    if not lost:
        compared = sum(cell.over_peer is not None for cell in cells)
        return f"None in {compared} cells that were compared with a peer."
    return _table(
        ["P", "N", "B", "best peer / ours", "best peer", "cause"],
        [
            [
                *(f"{cell.sizes[name]:,}" for name in "PNB"),
                _times(cell.over_peer),
                cell.peer["contender"],  # type: ignore[index]
                cell.cause,
            ]
            for cell in lost
        ],
    )


def _contenders(rows: Sequence[Row]) -> str:
    """How often each was timed, and why not; every different reason is told."""
    timed = [row for row in rows if row["row"] == "time"]
    table = []
    for kernel, name in dict.fromkeys((row["kernel"], row["contender"]) for row in timed):
        own = [row for row in timed if (row["kernel"], row["contender"]) == (kernel, name)]
        num_timed = sum(row["status"] == "timed" for row in own)
        reasons: dict[str, int] = {}
        for row in own:
            if row["status"] != "timed":
                text = f"{row['status']}: {row['why']}"
                reasons[text] = reasons.get(text, 0) + 1
        told = "; ".join(f"{text} ({num})" for text, num in reasons.items())
        table.append([kernel, name, own[0]["role"], f"{num_timed} of {len(own)}", told or "-"])
    return _table(["kernel", "contender", "role", "timed", "else"], table)


def _others(rows: Sequence[Row], kernel: str) -> str:
    cells = {str(sorted(cell.sizes.items())): cell for cell in cells_of(rows, kernel)}
    table = []
    for row in rows:
        if row["row"] != "time" or row["kernel"] != kernel:
            continue
        cell = cells[str(sorted(row["cell"].items()))]
        sizes = ", ".join(f"{name} {value}" for name, value in row["cell"].items())
        table.append(
            [sizes, row["contender"], *_time(row), f"{row['bytes'] / 1e6:,.1f}",
             "-" if cell.roofline is None else f"{cell.roofline * 1e6:,.1f}",
             _times(_ratio(_seconds(row), cell.seconds)), row["status"] + (f": {row['why']}" if row["why"] else "")]
        )  # fmt: skip
    return _table(["cell", "contender", "us", "quartiles", "n", "MB", "roofline us", "x ours", "status"], table)


def _mask_memory(rows: Sequence[Row]) -> str:
    """Bytes for one tree, by contender, nodes and prefix."""
    found: dict[tuple[str, int], dict[int, int]] = {}
    for row in rows:
        if row["row"] == "time" and "mask_bytes" in row:
            cell = row["cell"]
            found.setdefault((row["contender"], cell["N"]), {})[cell["P"]] = row["mask_bytes"] // cell["B"]
    prefixes = sorted({one for by_prefix in found.values() for one in by_prefix})
    lines = []
    for (name, nodes), by_prefix in sorted(found.items()):
        lines.append([name, str(nodes), *(f"{by_prefix[one]:,}" if one in by_prefix else "-" for one in prefixes)])
    return _table(["contender", "N", *(f"P {one:,}" for one in prefixes)], lines)


def _time(row: Row) -> list[str]:
    if row["status"] != "timed":
        return [row["status"], "-", "-"]
    seconds = row["seconds"]
    return [
        f"{seconds['median'] * 1e6:,.1f}",
        f"{seconds['q25'] * 1e6:,.1f} to {seconds['q75'] * 1e6:,.1f}",
        str(seconds["n"]),
    ]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    clean = [[cell.replace("|", "\\|") for cell in line] for line in [heads, *lines]]
    told = ["| " + " | ".join(line) + " |" for line in clean]
    return "\n".join([told[0], "|" + " --- |" * len(heads), *told[1:]])


def roofline_figure(rows: Sequence[Row]) -> Figure:
    """Operations a second over operations a byte, each measured cell a point below the card's own two ceilings."""
    drawing = Figure(figsize=(9.0, 6.0), layout="constrained")
    axes = drawing.subplots()
    cells = [cell for cell in cells_of(rows, ATTENTION) if cell.seconds is not None]
    for batch in sorted({cell.sizes["B"] for cell in cells}):
        points = [cell for cell in cells if cell.sizes["B"] == batch]
        axes.loglog(
            [cell.own["flops"] / cell.own["bytes"] for cell in points],
            [cell.own["flops"] / cell.seconds for cell in points],
            MARKERS.get(batch, "d"), color=COLOURS.get(batch, "#555555"), alpha=0.8, label=f"B = {batch}",
        )  # fmt: skip
    if cells and (copy := cells[0].copy) is not None and (matrix := cells[0].matrix) is not None:
        knee = matrix / copy
        ends = [min([knee / 100, *(cell.own["flops"] / cell.own["bytes"] for cell in cells)]), knee, 10 * knee]
        measured = f"measured: {copy / 1e12:.2f} TB/s, {matrix / 1e12:.0f} TFLOP/s"
        axes.loglog(ends, [min(one * copy, matrix) for one in ends], "k-", linewidth=1, label=measured)
        axes.legend(fontsize=8)
    else:
        axes.text(0.5, 0.5, "nothing was timed", ha="center", transform=axes.transAxes)
    axes.set_xlabel("FLOP per byte, the fewest of each")
    axes.set_ylabel("FLOP/s")
    axes.set_title("Tree attention below its roofline")
    axes.grid(alpha=0.3)
    return drawing


def peer_figure(rows: Sequence[Row]) -> Figure:
    """How many times as long the best peer takes: a tile a cell, blue where we are faster, none where no peer ran."""
    cells = cells_of(rows, ATTENTION)
    nodes = sorted({cell.sizes["N"] for cell in cells})
    places = sorted({(cell.sizes["B"], cell.sizes["P"]) for cell in cells})
    drawing = Figure(figsize=(9.0, 6.0), layout="constrained")
    axes = drawing.subplots()
    values = [[math.nan] * len(nodes) for _ in places]
    for cell in cells:
        y, x = places.index((cell.sizes["B"], cell.sizes["P"])), nodes.index(cell.sizes["N"])
        if cell.over_peer is not None:
            values[y][x] = math.log2(cell.over_peer)
        colour = "white" if abs(values[y][x]) > 1.5 else "black"
        axes.text(x, y, _times(cell.over_peer), ha="center", va="center", fontsize=8, color=colour)
    if cells:
        tiles = axes.imshow(values, cmap="RdBu", vmin=-3, vmax=3, aspect="auto")
        drawing.colorbar(tiles, label="log2 of the best peer's time over ours")
    axes.set_xticks(range(len(nodes)), [str(one) for one in nodes])
    axes.set_yticks(range(len(places)), [f"B {batch}, P {prefix:,}" for batch, prefix in places])
    axes.set_xlabel("nodes")
    axes.set_title("Best peer's time over ours")
    return drawing


def drawn(figure: Figure, kind: str) -> bytes:
    """kind: "svg" or "png". The same figure gives the same bytes."""
    stream = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "specbench"}):
        figure.savefig(stream, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return stream.getvalue()
