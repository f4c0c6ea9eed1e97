"""bench.metrics: every figure against one computed by hand."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from specbench.bench.metrics import (
    Breakdown,
    DepthCounts,
    Pair,
    RoundCounts,
    Timing,
    acceptance_of,
    breakdown_of,
    by_depth,
    geometric_interval,
    speedup_of,
)

# Two requests. The first: 4 drafted in a chain, 2 accepted; 4 drafted, none; nothing drafted. The second: a tree of 6
# nodes, 3 deep, all 3 accepted; 2 drafted, 2 accepted.
FIRST = [RoundCounts(4, 4, 2, 3), RoundCounts(4, 4, 0, 1), RoundCounts(0, 0, 0, 1)]
SECOND = [RoundCounts(6, 3, 3, 4), RoundCounts(2, 2, 2, 3)]


def timing(seconds_a_token: float, *, num: int = 11, first: float = 1.0, first_tokens: int = 1) -> Timing:
    return Timing(first + seconds_a_token * (num - first_tokens), first, num, first_tokens)


def pair(prompt: str, baseline: float, setting: float, category: str = "code") -> Pair:
    return Pair(prompt, category, (timing(baseline),), (timing(setting),))


def test_time_a_token_leaves_out_what_came_first() -> None:
    """10 tokens in 5 s, of which 2 came after 1 s: 8 tokens in 4 s."""
    one = Timing(seconds=5.0, first_seconds=1.0, num_tokens=10, first_tokens=2)
    assert (one.seconds_a_token, one.tokens_a_second) == (0.5, 2.0)


def test_tokens_that_all_came_at_once_have_no_time_a_token() -> None:
    assert math.isnan(Timing(5.0, 5.0, 4, 4).seconds_a_token)


def test_a_first_token_that_took_as_long_as_all_leaves_no_time_a_token() -> None:
    """Where a target is asked for one token alone, that call may be the slower one: no prompt gets a speed-up of it."""
    one = Timing(seconds=0.2, first_seconds=0.2, num_tokens=10)
    assert math.isnan(one.seconds_a_token) and math.isnan(one.tokens_a_second)
    assert speedup_of([Pair("a", "code", (timing(1.0, num=10),), (one,))]).left_out == ("a",)


def test_a_speedup_is_of_medians_of_repetitions() -> None:
    baseline = tuple(timing(one) for one in (4.0, 9.0, 3.0))
    setting = tuple(timing(one) for one in (2.0, 1.0, 8.0))
    assert Pair("a", "code", baseline, setting).speedup == pytest.approx(4.0 / 2.0)


def test_speedups_are_averaged_geometrically_over_prompts() -> None:
    """Twice as fast on one prompt and half as fast on another is no speed-up; the arithmetic mean says 1.25."""
    found = speedup_of([pair("a", 2.0, 1.0), pair("b", 1.0, 2.0)])
    assert found.decode.value == pytest.approx(1.0)


def test_a_long_prompt_weighs_no_more_than_a_short_one() -> None:
    """A quotient of sums would say (110 + 1) / (110 + 0.5), that is 1.005."""
    slow = Pair("a", "code", (timing(11.0),), (timing(11.0),))
    found = speedup_of([slow, pair("b", 0.1, 0.05)])
    assert found.decode.value == pytest.approx(math.sqrt(2.0))


def test_prefill_is_in_the_end_to_end_speedup_alone() -> None:
    """Baseline: 1 s until the first token, then 10 s; the setting: 1 s and 5 s."""
    found = speedup_of([pair("a", 1.0, 0.5)])
    assert (found.decode.value, found.end_to_end.value) == (pytest.approx(2.0), pytest.approx(11 / 6))


def test_categories_are_points_with_their_n() -> None:
    pairs = [pair("a", 2.0, 1.0), pair("b", 8.0, 1.0), pair("c", 3.0, 1.0, "dialogue")]
    assert speedup_of(pairs).categories == {"code": (pytest.approx(4.0), 2), "dialogue": (pytest.approx(3.0), 1)}


def test_other_token_counts_on_the_two_sides_are_refused() -> None:
    with pytest.raises(ValueError, match=r"prompt a: tokens \[11, 12\] must be the same number on both sides"):
        Pair("a", "code", (timing(1.0),), (timing(1.0, num=12),))


def test_a_prompt_without_a_time_is_named_and_left_out() -> None:
    at_once = Pair("b", "code", (Timing(2.0, 1.0, 4),), (Timing(1.0, 1.0, 4, 4),))
    found = speedup_of([pair("a", 2.0, 1.0), at_once])
    assert (found.decode.value, found.decode.n, found.left_out) == (pytest.approx(2.0), 1, ("b",))


def test_the_interval_of_two_prompts_is_known_by_hand() -> None:
    """Draws of two from {1, 4}: 1 with 1/4, 2 with 1/2, 4 with 1/4. The middle 95 % reaches from 1 to 4, the middle
    40 % is 2 alone."""
    wide = geometric_interval([1.0, 4.0])
    narrow = geometric_interval([1.0, 4.0], confidence=0.4)
    assert (wide.value, wide.low, wide.high, wide.n) == (
        pytest.approx(2.0), pytest.approx(1.0), pytest.approx(4.0), 2,
    )  # fmt: skip
    assert (narrow.low, narrow.high) == (pytest.approx(2.0), pytest.approx(2.0))


def test_the_interval_shrinks_as_the_normal_one_does() -> None:
    """100 ratios, half of them e and half 1/e: log-means have a standard deviation of 0.1, so 1.96 * 0.1 each way."""
    found = geometric_interval([math.e, 1 / math.e] * 50)
    assert (math.log(found.low), math.log(found.high)) == (
        pytest.approx(-0.196, abs=0.01), pytest.approx(0.196, abs=0.01),
    )  # fmt: skip


def test_the_interval_is_a_function_of_the_ratios_and_the_seed() -> None:
    ratios = [1.1, 1.4, 0.9, 2.0, 1.3]
    assert geometric_interval(ratios, seed=1) == geometric_interval(ratios, seed=1)
    assert geometric_interval(ratios, seed=1) != geometric_interval(ratios, seed=2)


def test_one_prompt_has_no_interval() -> None:
    found = geometric_interval([1.5])
    assert found.value == pytest.approx(1.5) and math.isnan(found.low) and math.isnan(found.high)


def test_acceptance_lengths_are_pooled_and_per_request() -> None:
    """12 tokens in 5 rounds; 5 / 3 and 7 / 2 by request."""
    found = acceptance_of([FIRST, SECOND, []])
    assert (found.num_requests, found.num_rounds, found.num_tokens) == (2, 5, 12)
    assert (found.length, found.length_per_request) == (12 / 5, pytest.approx((5 / 3 + 7 / 2) / 2))
    assert found.forwards_a_token == 5 / 12


def test_the_acceptance_rate_is_of_drafted_depth_and_not_of_nodes() -> None:
    """Accepted 2 + 0 + 0 + 3 + 2 of 4 + 4 + 0 + 3 + 2 deep; nodes are 16."""
    assert acceptance_of([FIRST, SECOND]).rate == 7 / 13


def test_acceptance_by_depth_is_conditional_and_joint() -> None:
    """By hand: four rounds drafted 1 and 2 deep, three of them 3 deep, two 4 deep."""
    found = by_depth([*FIRST, *SECOND])
    assert found == (
        DepthCounts(1, drafted=4, reached=4, accepted=3),
        DepthCounts(2, drafted=4, reached=3, accepted=3),
        DepthCounts(3, drafted=3, reached=2, accepted=1),
        DepthCounts(4, drafted=2, reached=0, accepted=0),
    )
    assert [one.joint for one in found] == [3 / 4, 3 / 4, 1 / 3, 0.0]
    assert [one.conditional for one in found[:3]] == [3 / 4, 1.0, 1 / 2] and math.isnan(found[3].conditional)


def test_the_histogram_counts_rounds_by_accepted_drafts() -> None:
    assert acceptance_of([FIRST, SECOND]).histogram == {0: 2, 2: 2, 3: 1}


def test_what_a_decoder_does_not_say_is_not_made_up() -> None:
    found = acceptance_of([[RoundCounts(None, None, 2, 3), RoundCounts(None, None, 0, 1)]])
    assert (found.length, found.rate, found.by_depth) == (2.0, None, ())


@pytest.mark.parametrize(
    ("fields", "message"),
    [((1, 1, 2, 3), "accepted = 2 must be <= 1"), ((0, 0, 0, 0), "emitted = 0 must be >= 1")],
)
def test_impossible_rounds_are_refused(fields: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RoundCounts(*fields)


def test_host_time_is_what_no_step_accounts_for() -> None:
    phases = [{"draft": 1.0, "verify": 5.0, "commit": 0.5, "decode": 7.0}] * 2
    found = breakdown_of(phases)
    assert found == Breakdown(2.0, 10.0, 1.0, 1.0)
    assert (found.total, found.share("verify")) == (14.0, 10 / 14)


@pytest.mark.parametrize("module", ["metrics", "rows"])
def test_definitions_and_rows_are_read_without_torch(module: str) -> None:
    code = f"import sys, specbench.bench.{module}; sys.exit('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
