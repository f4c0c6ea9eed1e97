"""What `specbench law` prints: for every acceptance rule its exact distance from the target's law, and its acceptance.

Each rule runs as the decoder calls it, on every kind of drafts that it accepts, over random toy models; one line for a
rule and a kind of drafts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import specbench
from specbench import models
from specbench.law.joint import joint_law, round_law, target_law, total_variation
from specbench.law.optimum import best_by_nodes, best_by_paths
from specbench.law.toys import START, Drafting, Parents, Toy, depth_of, is_chain
from specbench.reference.verify.rules import RULES, Rule

SCHEMA = 1
NUM_MODELS = 4  # a vocabulary, unless told
CHAIN_2, CHAIN_3 = (-1, 0, 1), (-1, 0, 1, 2)
PAIR, TRIPLE = (-1, 0, 0), (-1, 0, 0, 0)
TWO_ONE, TWO_TWO = (-1, 0, 0, 1, 2), (-1, 0, 0, 1, 1, 2, 2)
SHAPES: dict[int, tuple[Parents, ...]] = {
    3: (CHAIN_3, TWO_ONE, TWO_TWO),
    4: (CHAIN_2, TRIPLE, TWO_ONE),
    5: (CHAIN_2, TRIPLE, TWO_ONE),
}
NAMES = {CHAIN_2: "chain of 2", CHAIN_3: "chain of 3", PAIR: "(2)", TRIPLE: "(3)", TWO_ONE: "(2,1)", TWO_TWO: "(2,2)"}
ROUNDS_SHAPES: tuple[Parents, ...] = (CHAIN_2, PAIR)  # for V = 3, over as many rounds as ROUNDS_TOKENS take
ROUNDS_TOKENS = 4
SHORT = 10**7  # denominators below it are printed
HEADING = ("rule", "drafts", "law", "total variation", "on chains", "of at most", "on trees", "of at most", "reached")


@dataclass(frozen=True)
class Case:
    """One rule on one model and one shape of tree. tv: of the joint law of `num_tokens` tokens.

    num_rounds: 1, then p completes them, or None, as many as it takes. accepted: drafts in the first round, on
    average. best: what the bound for the rule's kind of coupling allows.
    """

    vocab_size: int
    seed: int
    shape: Parents
    num_tokens: int
    num_rounds: int | None
    tv: Fraction
    accepted: Fraction
    best: Fraction


@dataclass(frozen=True)
class Line:
    """A rule on one kind of drafts, over all models and shapes."""

    rule: Rule
    drafting: Drafting
    cases: tuple[Case, ...]

    @property
    def tv(self) -> Fraction:
        return max(case.tv for case in self.cases)

    @property
    def breaks_its_word(self) -> bool:
        return self.rule.is_lossless and self.tv > 0

    def mean(self, field: str, *, chains: bool) -> Fraction | None:
        """Over its cases on chains, or on trees that are none."""
        values = [getattr(case, field) for case in self.cases if is_chain(case.shape) == chains]
        return Fraction(sum(values), len(values)) if values else None

    @property
    def reached(self) -> float | None:
        """Accepted drafts over the bound, pooled; None where the bound is zero."""
        best = sum(case.best for case in self.cases)
        return float(sum(case.accepted for case in self.cases) / best) if best else None


@dataclass(frozen=True)
class Survey:
    lines: tuple[Line, ...]
    seed: int
    num_models: int
    seconds: float
    is_whole: bool = True  # it was not interrupted

    @property
    def is_good(self) -> bool:
        return not any(line.breaks_its_word for line in self.lines)


def rules_named(names: Sequence[str]) -> list[Rule]:
    """Those rules, or all; ValueError names the first that does not exist."""
    for name in names:
        if name not in RULES:
            raise ValueError(models.unknown_name("rule", name, RULES))
    return [RULES[name] for name in dict.fromkeys(names)] or list(RULES.values())


def survey(
    rules: Sequence[Rule], *, seed: int = 0, num_models: int, tell: Callable[[str], None] = lambda line: None
) -> Survey:
    """num_models: for each size of the vocabulary, counted up from `seed`. tell: is given each line as it comes.
    Interrupted, it holds the lines that were done by then."""
    started, is_whole = time.perf_counter(), True
    tell(_columns(HEADING))
    lines = []
    try:
        for rule in rules:
            for drafting in draftings(rule):
                line = Line(rule, drafting, tuple(_cases(rule, drafting, range(seed, seed + num_models))))
                lines.append(line)
                tell(_columns(cells(line)))
    except KeyboardInterrupt:
        is_whole = False
    return Survey(tuple(lines), seed, num_models, time.perf_counter() - started, is_whole)


def draftings(rule: Rule) -> tuple[Drafting, ...]:
    """The kinds of drafts that a rule runs on. Gumbel coupling is about drafts that were picked with its own noise."""
    return ("race",) if rule.name == "gumbel" else rule.proposals


def measure(
    rule: Rule, drafting: Drafting, toy: Toy, shape: Parents, *, num_tokens: int, num_rounds: int | None
) -> Case:
    law = joint_law(rule.verify, toy, shape, drafting, num_tokens, num_rounds=num_rounds)
    best = best_by_paths if rule.coupling == "block" else best_by_nodes
    return Case(
        toy.vocab_size,
        toy.seed,
        shape,
        num_tokens,
        num_rounds,
        total_variation(law, target_law(toy, num_tokens)),
        round_law(rule.verify, toy, START, shape, drafting).expected_accepted,
        best(toy, START, shape, drafting),
    )


def cells(line: Line) -> tuple[str, ...]:
    kinds = [line.mean(field, chains=chains) for chains in (True, False) for field in ("accepted", "best")]
    verdict = "lossless" if line.tv == 0 else "LOSSY"
    return (
        line.rule.name,
        line.drafting,
        f"{verdict}!" if line.breaks_its_word else verdict,
        fraction_text(line.tv),
        *("-" if one is None else f"{float(one):.4f}" for one in kinds),
        "-" if line.reached is None else f"{line.reached:.1%}",
    )


def summary(survey: Survey) -> str:
    num_cases = sum(len(line.cases) for line in survey.lines)
    models_run = (
        f"{survey.num_models} models a vocabulary, seeds {survey.seed} to {survey.seed + survey.num_models - 1}"
    )
    if survey.num_models == 1:
        models_run = f"1 model a vocabulary, seed {survey.seed}"
    shapes = "; ".join(f"V = {size}: {', '.join(NAMES[one] for one in used)}" for size, used in SHAPES.items())
    many_rounds = f"over many rounds V = {min(SHAPES)}: {', '.join(NAMES[one] for one in ROUNDS_SHAPES)}"
    broken = [f"{line.rule.name} ({line.drafting})" for line in survey.lines if line.breaks_its_word]
    verdict = f"NOT LOSSLESS, though they say so: {', '.join(broken)}" if broken else "every rule keeps its word"
    laws = f"{num_cases} law{'s' * (num_cases != 1)} in {survey.seconds:.0f} s"
    return f"{models_run}; {shapes}; and {many_rounds}. {laws}: {verdict}"


def fraction_text(value: Fraction) -> str:
    """0, or the fraction and its decimal; a long fraction stands in the JSON alone."""
    if value.denominator == 1:
        return str(value)
    decimal = f"{float(value):.4g}"
    return f"{value} = {decimal}" if value.denominator < SHORT else decimal


def as_json(survey: Survey, *, command: str) -> str:
    lines = [
        {
            "rule": line.rule.name,
            "source": line.rule.source,
            "drafts": line.drafting,
            "claims_lossless": line.rule.is_lossless,
            "is_lossless": line.tv == 0,
            "tv": _exact(line.tv),
            "coupling": line.rule.coupling,
            "reached": line.reached,
            "cases": [
                {
                    "vocab_size": case.vocab_size,
                    "seed": case.seed,
                    "parents": list(case.shape),
                    "num_tokens": case.num_tokens,
                    "num_rounds": case.num_rounds,
                    "tv": _exact(case.tv),
                    "accepted": _exact(case.accepted),
                    "best": _exact(case.best),
                }
                for case in line.cases
            ],
        }
        for line in survey.lines
    ]
    head = {"schema": SCHEMA, "specbench": specbench.__version__, "command": command, "seconds": survey.seconds}
    return json.dumps({**head, "rules": lines}, indent=1) + "\n"


def as_markdown(survey: Survey) -> str:
    rows = [HEADING, ("---",) * len(HEADING), *(cells(line) for line in survey.lines)]
    return "\n".join(["| " + " | ".join(row) + " |" for row in rows] + ["", summary(survey), ""])


def _cases(rule: Rule, drafting: Drafting, seeds: Sequence[int]) -> Iterator[Case]:
    """One round of every shape, watched to one token more than it can emit; and some texts of many rounds."""
    for vocab_size, shapes in SHAPES.items():
        for seed in seeds:
            toy = Toy(vocab_size, seed, greedy=rule.name == "greedy")
            for shape in shapes:
                if _fits(rule, drafting, shape):
                    yield measure(rule, drafting, toy, shape, num_tokens=depth_of(shape) + 2, num_rounds=1)
            for shape in ROUNDS_SHAPES if vocab_size == min(SHAPES) else ():
                if _fits(rule, drafting, shape):
                    yield measure(rule, drafting, toy, shape, num_tokens=ROUNDS_TOKENS, num_rounds=None)


def _fits(rule: Rule, drafting: Drafting, shape: Parents) -> bool:
    return is_chain(shape) or not (rule.only_chains or drafting == "race")


def _columns(row: Sequence[str]) -> str:
    widths = (20, 20, 9, 24, 9, 10, 9, 10, 8)
    return "  ".join(one.ljust(width) for one, width in zip(row, widths, strict=True)).rstrip()


def _exact(value: Fraction) -> dict[str, Any]:
    return {"exact": str(value), "decimal": float(value)}
