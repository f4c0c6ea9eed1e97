"""The curve that lets a person choose: what a lossy acceptance rule gains in length against what it loses of the law.

Takes the curves that `specbench law --lossiness FILE.json` writes, and draws them. Reads no file and computes no law.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

MARKERS = "osD^v<>"
NUM_LABELS = 5  # values of the parameter written beside a curve
PANELS = {"tv": "to sampling from the target", "tv_greedy": "to greedy decoding"}


def figure(curves: Sequence[Mapping[str, Any]], *, title: str = "") -> Figure:
    """One panel for each law that is held against, in it one line a curve: rule, parameter, points of value,
    acceptance_length, tv and tv_greedy. A lossless rule, which has no parameter, is a star."""
    drawing = Figure(figsize=(12.0, 5.0), layout="constrained")
    drawing.suptitle(title)
    for axes, (field, held_against) in zip(drawing.subplots(1, len(PANELS), sharey=True), PANELS.items(), strict=True):
        for idx, curve in enumerate(curves):
            _draw(axes, curve, field, MARKERS[idx % len(MARKERS)])
        axes.set_xlabel("acceptance length (accepted drafts + 1, mean of a round)")
        axes.set_ylabel(f"total variation {held_against}")
        axes.set_ylim(-0.03, 1.03)
        axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return drawing


def _draw(axes: Axes, curve: Mapping[str, Any], field: str, marker: str) -> None:
    points = curve["points"]
    lengths = [point["acceptance_length"] for point in points]
    variations = [point[field] for point in points]
    if not curve["parameter"]:
        axes.plot(lengths, variations, "*", markersize=13, label=f"{curve['rule']} (lossless)")
        return
    label = f"{curve['rule']}: {curve['parameter']}"
    (line,) = axes.plot(lengths, variations, marker=marker, markersize=4, label=label)
    for point in _labelled(points, field):
        place = (point["acceptance_length"], point[field])
        style = {"textcoords": "offset points", "fontsize": 7, "color": line.get_color()}
        axes.annotate(f"{point['value']:g}", place, xytext=(4, 4), **style)


def _labelled(points: Sequence[Mapping[str, Any]], field: str) -> list[Mapping[str, Any]]:
    """Some of the points that differ, first and last among them; of equal ones the first."""
    unlike: dict[tuple[float, float], Mapping[str, Any]] = {}
    for point in points:
        unlike.setdefault((point["acceptance_length"], point[field]), point)
    chosen = list(unlike.values())
    step = max(1, -(-len(chosen) // NUM_LABELS))
    return [*chosen[:-1:step], *chosen[-1:]]
