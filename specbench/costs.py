"""What a forward of so many rows costs, between the widths that were measured."""

from __future__ import annotations

from collections.abc import Mapping


def cost_of(costs: Mapping[int, float], rows: float) -> float:
    """costs: of one forward by its rows, in ascending order. Between two widths on the straight line, outside of them
    the nearest one's slope."""
    widths = sorted(costs)
    if len(widths) == 1:
        return costs[widths[0]]
    right = next((idx for idx, width in enumerate(widths) if width >= rows), len(widths) - 1)
    low, high = widths[max(0, right - 1)], widths[max(1, right)]
    slope = (costs[high] - costs[low]) / (high - low)
    return costs[low] + slope * (rows - low)
