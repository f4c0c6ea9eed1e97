"""What a sweep says: the knee of a gamma curve, what costs and acceptance predict, which setting to use. No torch.

Predicted time a token at gamma g: the rounds that the deepest setting of the same drafter recorded are cut to g (a
round that drafted d deep and accepted a becomes min(d, g) and min(a, g)), each costs what a forward of that many rows
costs here, its share of drafting and what else a round takes, and emits min(a, g) + 1, or fewer where a limit cut it.
Where a cut round would have gone on, the next one begins elsewhere than it was recorded, which is not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specbench.bench.metrics import Interval, RoundCounts
from specbench.costs import cost_of


@dataclass(frozen=True)
class Costs:
    """Seconds. forward: of one target forward by its rows, ascending. draft: of drafting one deep. host: of a round,
    all that is neither drafting nor such a forward: the walk, the commit, Python, and what a longer context than the
    curve's adds to a forward."""

    forward: Mapping[int, float]
    draft: float
    host: float

    def forward_of(self, rows: float) -> float:
        """As `cost_of` has it."""
        return cost_of(self.forward, rows)

    def ratio(self, rows: float, batch: int = 1) -> float:
        """A forward of `rows` rows of each of `batch` texts / a forward of one row of each."""
        return self.forward_of(rows * batch) / self.forward_of(batch)


def predicted(rounds: Sequence[RoundCounts], costs: Costs, gamma: int) -> float:
    """Seconds a token at gamma, from rounds recorded at a larger one. NaN without rounds."""
    seconds = tokens = 0.0
    for one in rounds:
        depth, accepted = min(one.depth or 0, gamma), min(one.accepted, gamma)
        seconds += costs.forward_of(depth + 1) + costs.draft * depth + costs.host
        tokens += min(accepted + 1, one.emitted)
    return seconds / tokens if tokens else math.nan


def knee(curve: Mapping[int, Interval]) -> int:
    """The smallest gamma whose speed-up is not below the lower end of the best one's interval: a larger one costs
    memory and has not shown that it gains anything. ValueError for a curve without points."""
    if not curve:
        raise ValueError("a curve without points has no knee")
    best = max(curve.values(), key=lambda one: one.value)
    floor = best.value if math.isnan(best.low) else best.low
    return min(gamma for gamma, one in curve.items() if one.value >= floor)


@dataclass(frozen=True)
class Candidate:
    """A setting that may be recommended. share: of the rounds' time by draft, verify and host. cost_ratio: a forward of
    its usual rows / a forward of one; None where that was not measured."""

    name: str
    speedup: Interval
    length: float
    draft_share: float | None = None
    host_share: float | None = None
    cost_ratio: float | None = None


def recommendation(candidates: Sequence[Candidate], *, baseline: str) -> str:
    """One sentence: which setting to use here, and why. candidates: those that passed the gate."""
    shown = [one for one in candidates if not math.isnan(one.speedup.value)]
    if not shown:
        return "No setting has both passed the gate and been timed, so none can be recommended."
    best = max(shown, key=lambda one: one.speedup.value)
    why = _why(best)
    if best.speedup.value <= 1.0:
        return f"Decode plainly ({baseline}): the best setting, {best.name}, is {_times(best.speedup)} as fast; {why}."
    if best.speedup.low <= 1.0 or math.isnan(best.speedup.low):
        return (
            f"{best.name} is the fastest at {_times(best.speedup)} of {baseline}, which these prompts do not tell "
            f"apart from 1; {why}."
        )
    return f"Use {best.name}: {_times(best.speedup)} the speed of {baseline}; {why}."


def _times(one: Interval) -> str:
    if math.isnan(one.low):
        return f"{one.value:.2f}x (n = {one.n})"
    return f"{one.value:.2f}x [{one.low:.2f}, {one.high:.2f}] (n = {one.n})"


def _why(one: Candidate) -> str:
    parts = ["its rounds are not told" if math.isnan(one.length) else f"{one.length:.2f} tokens a forward"]
    if one.cost_ratio is not None:
        parts.append(f"a forward of its rows costs {one.cost_ratio:.2f} of a plain one")
    if one.draft_share is not None:
        parts.append(f"drafting takes {one.draft_share:.0%} of the time")
    if one.host_share is not None:
        parts.append(f"the host {one.host_share:.0%}")
    return ", ".join(parts)
