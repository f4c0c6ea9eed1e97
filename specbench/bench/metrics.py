"""What is measured, defined: pure functions on recorded rounds and times. No torch, no clock, no files.

- Speed-up of a prompt: seconds a token of the baseline / seconds a token of the setting, each the median of its
  repetitions, on the same prompt and the same number of tokens. Both are taken between the first tokens' arrival and
  the last one's, over the tokens that came after the first arrival: prefill and the first round are apart, in TTFT.
  A setting's speed-up is the geometric mean over all prompts, and its interval a bootstrap over prompts: they are drawn
  with replacement, a fixed number of times from a fixed seed, and the middle 95 % of the means is the interval.
  Categories are points with their n, without intervals.
- Acceptance length: tokens emitted a verifying forward, the target's own token included. Pooled: all tokens over all
  rounds. Per request: the mean of each request's own quotient.
- Acceptance rate: accepted drafts / drafted depth. A tree of width 3 and depth 4 drafts 4 deep.
- By depth d, over the rounds that drafted as deep as d: `conditional` is accepted at d / those that accepted d - 1;
  `joint` is accepted at d / all of them.
- Forwards a token: verifying forwards of the target / tokens emitted by them; prefill is none.
- Looping share: tokens that continue a block said at least twice right before, which flatters drafting by lookup.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

CONFIDENCE = 0.95
NUM_RESAMPLES = 10_000


@dataclass(frozen=True)
class RoundCounts:
    """One verification. nodes: drafted, the root left out; depth: the deepest of them; both None where a decoder does
    not say. accepted: drafts; emitted: tokens, of which a limit may have cut some."""

    nodes: int | None
    depth: int | None
    accepted: int
    emitted: int

    def __post_init__(self) -> None:
        if self.emitted < 1 or self.accepted < 0:
            raise ValueError(f"emitted = {self.emitted} must be >= 1, accepted = {self.accepted} must be >= 0")
        if self.depth is not None and self.accepted > self.depth:
            raise ValueError(f"accepted = {self.accepted} must be <= {self.depth} (the drafted depth)")


@dataclass(frozen=True)
class Timing:
    """Of one generation. seconds: all of it. first_seconds: until the first tokens came. first_tokens: how many."""

    seconds: float
    first_seconds: float
    num_tokens: int
    first_tokens: int = 1

    @property
    def seconds_a_token(self) -> float:
        """Between the first arrival and the end. NaN where nothing came after the first arrival, or in no time: a call
        for the first token alone may take as long as the one for all of them."""
        num, seconds = self.num_tokens - self.first_tokens, self.seconds - self.first_seconds
        return seconds / num if num > 0 and seconds > 0 else math.nan

    @property
    def tokens_a_second(self) -> float:
        return 1.0 / self.seconds_a_token


@dataclass(frozen=True)
class Pair:
    """One prompt on both sides: the timings of all repetitions."""

    prompt: str
    category: str
    baseline: tuple[Timing, ...]
    setting: tuple[Timing, ...]

    def __post_init__(self) -> None:
        nums = {one.num_tokens for one in (*self.baseline, *self.setting)}
        if not self.baseline or not self.setting:
            raise ValueError(f"prompt {self.prompt}: both sides must have been timed")
        if len(nums) > 1:
            raise ValueError(f"prompt {self.prompt}: tokens {sorted(nums)} must be the same number on both sides")

    @property
    def speedup(self) -> float:
        """Of the time a token. NaN where either side has none: all its tokens came at once."""
        return median(one.seconds_a_token for one in self.baseline) / median(
            one.seconds_a_token for one in self.setting
        )

    @property
    def end_to_end(self) -> float:
        """Of all the time, prefill included."""
        return median(one.seconds for one in self.baseline) / median(one.seconds for one in self.setting)


@dataclass(frozen=True)
class Interval:
    """A geometric mean over n prompts and its bootstrap interval; NaN in an interval of fewer than two prompts."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Speedup:
    """decode, end_to_end: over all prompts. categories: (geometric mean, n) each. left_out: prompts without a time."""

    decode: Interval
    end_to_end: Interval
    categories: Mapping[str, tuple[float, int]]
    left_out: tuple[str, ...] = ()


def speedup_of(pairs: Sequence[Pair], *, seed: int = 0, num_resamples: int = NUM_RESAMPLES) -> Speedup:
    """The same seed draws the same prompts, so that the interval is a function of the rows."""
    timed = [one for one in pairs if math.isfinite(one.speedup) and one.speedup > 0]
    by_category: dict[str, list[float]] = {}
    for one in timed:
        by_category.setdefault(one.category, []).append(one.speedup)
    return Speedup(
        decode=geometric_interval([one.speedup for one in timed], seed=seed, num_resamples=num_resamples),
        end_to_end=geometric_interval([one.end_to_end for one in timed], seed=seed, num_resamples=num_resamples),
        categories={name: (geometric_mean(some), len(some)) for name, some in by_category.items()},
        left_out=tuple(one.prompt for one in pairs if one not in timed),
    )


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


def geometric_interval(
    ratios: Sequence[float], *, seed: int = 0, num_resamples: int = NUM_RESAMPLES, confidence: float = CONFIDENCE
) -> Interval:
    """The percentile bootstrap (Efron 1979) of a geometric mean: ratios are drawn with replacement."""
    import numpy as np  # who only reads rows does without

    num = len(ratios)
    if num < 2:
        return Interval(geometric_mean(ratios), math.nan, math.nan, num)
    logs = np.log(np.asarray(ratios, dtype=np.float64))
    drawn = np.random.default_rng(seed).integers(0, num, size=(num_resamples, num))
    tail = (1 - confidence) / 2
    low, high = np.quantile(logs[drawn].mean(axis=1), [tail, 1 - tail])
    return Interval(geometric_mean(ratios), float(np.exp(low)), float(np.exp(high)), num)


@dataclass(frozen=True)
class DepthCounts:
    """Rounds at one depth. drafted: that reached it with a draft; reached: those of them that accepted all before it;
    accepted: those that accepted it."""

    depth: int
    drafted: int
    reached: int
    accepted: int

    @property
    def conditional(self) -> float:
        return self.accepted / self.reached if self.reached else math.nan

    @property
    def joint(self) -> float:
        return self.accepted / self.drafted if self.drafted else math.nan


@dataclass(frozen=True)
class Acceptance:
    """length: pooled; length_per_request: the mean of the requests' own. rate, by_depth: None and empty where the
    decoder does not say what it drafted. histogram: rounds by drafts accepted."""

    num_requests: int
    num_rounds: int
    num_tokens: int
    length: float
    length_per_request: float
    forwards_a_token: float
    rate: float | None
    by_depth: tuple[DepthCounts, ...] = ()
    histogram: Mapping[int, int] = field(default_factory=dict)


def acceptance_of(requests: Sequence[Sequence[RoundCounts]]) -> Acceptance:
    """requests: the rounds of each. Requests without rounds are left out."""
    told = [rounds for rounds in requests if rounds]
    rounds = [one for some in told for one in some]
    num_tokens = sum(one.emitted for one in rounds)
    depths = [one.depth for one in rounds]
    known = None not in depths
    drafted = sum(one for one in depths if one is not None)
    lengths = [sum(one.emitted for one in some) / len(some) for some in told]
    return Acceptance(
        num_requests=len(told),
        num_rounds=len(rounds),
        num_tokens=num_tokens,
        length=num_tokens / len(rounds) if rounds else math.nan,
        length_per_request=sum(lengths) / len(lengths) if lengths else math.nan,
        forwards_a_token=len(rounds) / num_tokens if num_tokens else math.nan,
        rate=sum(one.accepted for one in rounds) / drafted if known and drafted else None,
        by_depth=by_depth(rounds) if known else (),
        histogram=dict(sorted(Counter(one.accepted for one in rounds).items())),
    )


def by_depth(rounds: Iterable[RoundCounts]) -> tuple[DepthCounts, ...]:
    """One entry for each depth that was drafted. A round whose depth is not known counts nowhere."""
    known = [(one.depth, one.accepted) for one in rounds if one.depth is not None]
    return tuple(
        DepthCounts(
            depth,
            drafted=sum(deepest >= depth for deepest, _ in known),
            reached=sum(deepest >= depth and accepted >= depth - 1 for deepest, accepted in known),
            accepted=sum(accepted >= depth for _, accepted in known),
        )
        for depth in range(1, max((deepest for deepest, _ in known), default=0) + 1)
    )


@dataclass(frozen=True)
class Breakdown:
    """Seconds of all rounds. verify: the forward and the walk. host: what no step accounts for."""

    draft: float
    verify: float
    commit: float
    host: float

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.commit + self.host

    def share(self, part: str) -> float:
        return getattr(self, part) / self.total if self.total else math.nan


def breakdown_of(phases: Iterable[Mapping[str, float]]) -> Breakdown:
    """phases: of each row, seconds by draft, verify and commit in the rounds behind the first, and `decode`, all the
    time between the first tokens' arrival and the end."""
    sums = dict.fromkeys(("draft", "verify", "commit", "decode"), 0.0)
    for one in phases:
        for name in sums:
            sums[name] += one[name]
    told = sums["draft"] + sums["verify"] + sums["commit"]
    return Breakdown(sums["draft"], sums["verify"], sums["commit"], sums["decode"] - told)
