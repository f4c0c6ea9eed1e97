"""What a lossy acceptance rule gains in length and loses of the law, over the range of its parameter, exactly.

All rules run on the same drafts, chains of 3 drawn from q, over the same toy models and as many rounds as the text
takes. Most of them end a round with an argmax, so each is held against greedy decoding as well as against sampling.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction

import specbench
from specbench.law.joint import Tokens, joint_law, round_law, target_law, total_variation
from specbench.law.toys import START, Drafting, Parents, Toy
from specbench.reference.verify.block import block_verification
from specbench.reference.verify.chain import speculative_sampling
from specbench.reference.verify.chance import RuleFn
from specbench.reference.verify.entropy import deferred_rejection
from specbench.reference.verify.greedy import greedy_acceptance
from specbench.reference.verify.relaxed import relaxed_acceptance
from specbench.reference.verify.threshold import threshold_acceptance
from specbench.reference.verify.typical import typical_acceptance

SCHEMA = 1
VOCAB_SIZE, NUM_TOKENS = 3, 4
SHAPE: Parents = (-1, 0, 1, 2)
DRAFTING: Drafting = "iid"
NUM_MODELS = 12
DRAFTS = f"chains of {len(SHAPE) - 1} drawn from q, V = {VOCAB_SIZE}, joint law of {NUM_TOKENS} tokens"
SHARES = tuple(step / 20 for step in range(21))


@dataclass(frozen=True)
class Point:
    """A rule at one value of its parameter. Means over the models; tv_largest is of the worst of them.

    tv: to the law of sampling from the target. tv_greedy: to greedy decoding. acceptance_length: accepted drafts + 1.
    """

    value: float | None
    acceptance_length: float
    tv: float
    tv_largest: float
    tv_greedy: float


@dataclass(frozen=True)
class Curve:
    """parameter: what its values are; "" for a rule without one."""

    rule: str
    parameter: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class _Family:
    rule: str
    parameter: str
    function_at: Callable[[float], RuleFn]
    values: Sequence[float]


FAMILIES = (
    _Family("threshold", "threshold", threshold_acceptance, SHARES),
    # Medusa's numbers, 0.09 and 0.3, lie on this curve: its paper ties delta to the root of epsilon.
    _Family("typical", "epsilon = delta^2", lambda value: typical_acceptance(epsilon=value, delta=value**0.5), SHARES),
    _Family("relaxed", "delta", lambda value: relaxed_acceptance(delta=value), SHARES),
    _Family(
        "entropy",
        "threshold, window 1",
        lambda value: deferred_rejection(window=1, threshold=value),
        tuple(step / 10 for step in range(12)),  # the entropy of three tokens is at most ln 3 = 1.0986
    ),
)
LOSSLESS = {"chain": speculative_sampling, "block": block_verification, "greedy": greedy_acceptance}


def curves(*, seed: int = 0, num_models: int) -> Iterator[Curve]:
    """One for each lossy rule; then the lossless ones as curves of a single point."""
    toys = [Toy(VOCAB_SIZE, one) for one in range(seed, seed + num_models)]
    for family in FAMILIES:
        points = tuple(point(family.function_at(value), toys, value) for value in family.values)
        yield Curve(family.rule, family.parameter, points)
    for rule, function in LOSSLESS.items():
        yield Curve(rule, "", (point(function, toys, None),))


def point(function: RuleFn, toys: Sequence[Toy], value: float | None) -> Point:
    lengths, variations, from_greedy = [], [], []
    for toy in toys:
        law = joint_law(function, toy, SHAPE, DRAFTING, NUM_TOKENS)
        variations.append(total_variation(law, target_law(toy, NUM_TOKENS)))
        from_greedy.append(total_variation(law, _greedy_law(toy)))
        lengths.append(1 + round_law(function, toy, START, SHAPE, DRAFTING).expected_accepted)
    return Point(value, _mean(lengths), _mean(variations), float(max(variations)), _mean(from_greedy))


def as_json(drawn: Sequence[Curve], *, command: str) -> str:
    record = {
        "schema": SCHEMA,
        "specbench": specbench.__version__,
        "command": command,
        "drafts": DRAFTS,
        "curves": [asdict(one) for one in drawn],
    }
    return json.dumps(record, indent=1) + "\n"


def table(curve: Curve) -> str:
    """A few lines of text, one a value."""
    lines = [f"{curve.rule}: {curve.parameter or 'lossless'}"]
    for one in curve.points:
        value = "" if one.value is None else f"{one.value:g}"
        lines.append(
            f"  {value:>5}  length {one.acceptance_length:.4f}  TV {one.tv:.4f} (largest {one.tv_largest:.4f})"
            f"  TV to greedy {one.tv_greedy:.4f}"
        )
    return "\n".join(lines)


def _greedy_law(toy: Toy) -> dict[Tokens, Fraction]:
    return target_law(Toy(toy.vocab_size, toy.seed, greedy=True), NUM_TOKENS)


def _mean(values: Sequence[Fraction]) -> float:
    return float(sum(values) / len(values))
