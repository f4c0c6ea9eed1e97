"""What a forward of so many rows costs, between the widths that were measured and beyond them."""

from __future__ import annotations

from collections.abc import Mapping


def cost_of(costs: Mapping[int, float], rows: float) -> float:
    """costs: of one forward by its rows. Between two widths on the straight line. Beyond the widest on the one from the
    width of half its rows, or the next lower one, and never downwards: neighbours differ by no more than noise."""
    widths = sorted(costs)
    first, widest = widths[0], widths[-1]
    if rows <= first or len(widths) == 1:
        return costs[first]
    if rows > widest:
        base = max(one for one in widths[:-1] if one <= max(first, widest / 2))
        slope = max(0.0, (costs[widest] - costs[base]) / (widest - base))
        return costs[widest] + slope * (rows - widest)
    right = next(idx for idx, width in enumerate(widths) if width >= rows)
    low, high = widths[right - 1], widths[right]
    return costs[low] + (costs[high] - costs[low]) / (high - low) * (rows - low)
