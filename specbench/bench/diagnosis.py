"""Why it is not faster: what a setting's rounds cost and give, and what one thing mended would change. No torch.

A round takes R seconds and emits L tokens; the baseline needs T seconds a token. Drafting pays where L is above the
break-even length R / T, and the speed-up over all tokens is L T / R. Each cause is judged by that quotient with its own
seconds taken out of R, as far as they are more than plain decoding's own:

    draft cost       drafting itself
    host overhead    commit, and what no step accounts for
    tree too wide    the forward's rows beyond a chain as deep, at what the measured curve of forwards says
    gamma            the best gamma that the same rounds, cut, predict (chains only)
    batch            the forward as it would be for one text at a time
    memory           no quotient: a peak within a tenth of all there is pages
    drafter quality  what is left: every draft accepted

The cause is the one that gains most among the first five, where it brings the setting above 1; otherwise it is the
drafter's quality, or, where not even full acceptance would do, the cost of verifying.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from specbench.bench.metrics import Breakdown, Interval, breakdown_of, speedup_of
from specbench.bench.rows import Row, Run, Setting
from specbench.bench.summary import baseline_of, costs_of
from specbench.bench.sweep import Costs, predicted

ALL_OF_IT = 0.9  # of the memory that there is
OFTEN = 0.5  # of the rounds


@dataclass(frozen=True)
class Diagnosis:
    """speedup: geometric mean over prompts, as everywhere; the other quotients are pooled over all tokens. mended:
    cause -> the quotient without it. None where the rows do not tell."""

    setting: str
    cause: str
    speedup: Interval
    pooled: float
    length: float
    break_even: float
    mended: dict[str, float]
    full: float | None = None
    rows: float | None = None
    cost_ratio: float | None = None
    shares: tuple[float, float, float] | None = None
    best_gamma: int | None = None
    all_accepted: float | None = None
    peak_share: float | None = None

    @property
    def sentence(self) -> str:
        length = f"{self.length:.2f} tokens a round, {self.break_even:.2f} would break even"
        if self.cause == "none":
            return f"it is faster: {length}"
        if self.cause in self.mended:
            return f"{self.cause}: {self.mended[self.cause]:.2f}x without it; {length}"
        if self.cause == "memory":
            return f"memory: the peak is {self.peak_share:.0%} of all there is, so that it pages; {length}"
        if self.cause == "verify cost":
            return f"verify cost: with every draft accepted it would be {self.full:.2f}x; {length}"
        return f"drafter quality: {length}"


def diagnose(run: Run) -> list[Diagnosis]:
    """Of every setting that drafts, says its rounds and passed the gate. ValueError where there is none, or no plain
    decoding to hold it against."""
    baseline = baseline_of(run)
    if baseline is None:
        raise ValueError("no plain decoding was both right and timed: there is nothing to be faster than")
    names = [
        name
        for name, one in run.settings.items()
        if not one.is_plain and one.side != "transformers" and name in run.gates and run.gates[name].passed
    ]
    found = [one for name in names if (one := _diagnosed(run, run.settings[name], baseline)) is not None]
    if not found:
        raise ValueError("no setting that drafts has passed the gate and says what its rounds emitted")
    return found


def _diagnosed(run: Run, setting: Setting, baseline: str) -> Diagnosis | None:
    speedup = speedup_of(run.pairs(baseline, setting.name)).decode
    prompts = {one.prompt for one in run.pairs(baseline, setting.name)}
    mine = [one for one in run.of(setting.name) if one.prompt in prompts and one.later_rounds]
    if not mine:
        return None
    rounds = [one for row in mine for one in row.later_rounds]  # times are those behind the first
    num = len(rounds)
    seconds = sum(one.seconds - one.first_seconds for one in mine) / num
    length = sum(one.emitted for one in rounds) / num
    plain = _seconds_a_token(run, baseline, mine)
    pooled = length * plain / seconds

    def without(saved: float) -> float:
        return length * plain / (seconds - saved) if seconds > saved else math.inf

    depths = [one.depth for one in rounds if one.depth is not None]
    depth = sum(depths) / num if len(depths) == num else None
    parts, costs = _parts(mine), costs_of(run, mine)
    mended: dict[str, float] = {}
    best_gamma, shares = None, None
    rows = _rows_a_round(mine)
    if parts is not None:
        shares = (parts.share("draft"), parts.share("verify"), parts.share("commit") + parts.share("host"))
        host = (parts.commit + parts.host) / num - _host_of_plain(run, setting)
        mended |= {"draft cost": without(parts.draft / num), "host overhead": without(max(0.0, host))}
    if costs is not None and rows is not None and depth is not None:
        if rows > depth + 1.01:
            together = costs.forward_of(rows * setting.batch) - costs.forward_of((depth + 1) * setting.batch)
            mended["tree too wide"] = without(together / setting.batch)
        elif setting.width == 1 and setting.batch == 1:
            best_gamma, quick = _best_gamma(mine, costs, max(depths))
            mended["gamma"] = plain / quick
        if setting.batch > 1:
            mended["batch"] = pooled * costs.ratio(rows, setting.batch) / costs.ratio(rows)
    full = (depth + 1) * plain / seconds if depth is not None else None
    peak_share = _peak_share(run, setting.name)
    return Diagnosis(
        setting.name,
        _cause(speedup, pooled, mended, full, peak_share),
        speedup,
        pooled,
        length,
        break_even=seconds / plain,
        mended=mended,
        full=full,
        rows=rows,
        cost_ratio=None if costs is None or rows is None else costs.ratio(rows, setting.batch),
        shares=shares,
        best_gamma=best_gamma,
        all_accepted=sum(one.depth == one.accepted > 0 for one in rounds) / num if depth is not None else None,
        peak_share=peak_share,
    )


def _cause(
    speedup: Interval, pooled: float, mended: dict[str, float], full: float | None, peak_share: float | None
) -> str:
    if (speedup.value if math.isnan(speedup.low) else speedup.low) > 1:
        return "none"
    if peak_share is not None and peak_share >= ALL_OF_IT:
        return "memory"
    best = max(mended, key=lambda name: mended[name], default="")
    if best and mended[best] > max(1.0, pooled):
        return best
    return "verify cost" if full is not None and full <= 1 else "drafter quality"


def _seconds_a_token(run: Run, baseline: str, mine: Sequence[Row]) -> float:
    """Of the baseline on the prompts of `mine`, each weighed by its rows there: the median of its repetitions."""
    times = {
        prompt: median(one.timing.seconds_a_token for one in run.of(baseline) if one.prompt == prompt)
        for prompt in {one.prompt for one in mine}
    }
    weights = [len(one.tokens) - one.first_tokens for one in mine]
    return sum(num * times[one.prompt] for num, one in zip(weights, mine, strict=True)) / sum(weights)


def _parts(rows: Sequence[Row]) -> Breakdown | None:
    told = [one.phases for one in rows if one.phases is not None]
    return breakdown_of(told) if told and len(told) == len(rows) else None


def _host_of_plain(run: Run, setting: Setting) -> float:
    """Seconds a round of our own plain decoding; 0 where there is none."""
    names = [
        name for name, one in run.settings.items() if one.is_plain and one.side == "own" and one.batch == setting.batch
    ]
    rows = [one for one in run.rows if one.setting in names]
    parts, num = _parts(rows), sum(len(one.later_rounds) for one in rows)
    return (parts.commit + parts.host) / num if parts is not None and num else 0.0


def _rows_a_round(rows: Sequence[Row]) -> float | None:
    told = [one.num_rows for one in rows if one.num_rows is not None]
    return sum(told) / sum(len(one.rounds) for one in rows) if len(told) == len(rows) else None


def _best_gamma(rows: Sequence[Row], costs: Costs, deepest: int) -> tuple[int | None, float]:
    """And its seconds a token."""
    rounds = [one for row in rows for one in row.later_rounds]
    times = {gamma: predicted(rounds, costs, gamma) for gamma in range(1, deepest + 1)}
    best = min(times, key=lambda gamma: times[gamma], default=None)
    return best, times[best] if best is not None else math.inf


def _peak_share(run: Run, name: str) -> float | None:
    for one in run.others.get("memory", ()):
        if one["setting"] == name and one["bytes"].get("total"):
            return float(one["bytes"]["device" if "device" in one["bytes"] else "peak"] / one["bytes"]["total"])
    return None


def told(found: Sequence[Diagnosis]) -> list[str]:
    """Lines of text: a sentence a setting, and its numbers below it."""
    lines = []
    for one in found:
        ends = "" if math.isnan(one.speedup.low) else f" [{one.speedup.low:.2f}, {one.speedup.high:.2f}]"
        lines.append(f"{one.setting}: {one.speedup.value:.2f}x{ends}, {one.sentence}")
        facts = [f"pooled over all tokens {one.pooled:.2f}x"]
        if one.shares is not None:
            facts.append(f"draft {one.shares[0]:.0%}, verify {one.shares[1]:.0%}, host {one.shares[2]:.0%} of the time")
        if one.cost_ratio is not None:
            facts.append(f"a forward of its {one.rows:.1f} rows costs {one.cost_ratio:.2f} of one row's")
        if one.full is not None:
            facts.append(f"{one.full:.2f}x with every draft accepted")
        if one.best_gamma is not None:
            facts.append(f"predicted best gamma {one.best_gamma}")
        if one.all_accepted is not None and one.all_accepted >= OFTEN:
            facts.append(f"{one.all_accepted:.0%} of the rounds accepted all: a larger gamma may gain")
        if one.mended:
            facts.append("without " + ", ".join(f"{name} {value:.2f}x" for name, value in one.mended.items()))
        lines += [f"    {fact}" for fact in facts]
    return lines
