"""Which planted faults give the target's own wrong numbers: each is run on the cases on which the target was.

The good decoder runs there first: where the target differs from it is what has to be reproduced, and everywhere else
a fault that is the same one has to be as right as the target is.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from specbench.cases import Case, DrafterCase, LawCase, WalkBatchCase, WalkCase
from specbench.loading import Target, TargetError
from specbench.naming.recording import Recording, changes_nothing
from specbench.naming.trace import Leaf, Parted, Trace, differing, same, trace_of
from specbench.own_bank import OwnBank
from specbench.reference.faults.fault import Fault
from specbench.reference.target import ReferenceTarget
from specbench.steps import Steps
from specbench.subjects import Subject

SECONDS_COMPARING = 10  # with all faults, on one failing case
# Of an answer's scale: a fault is larger by far, a second implementation's rounding smaller.
EXACT, ROUNDED = 1e-9, 1e-3
ONLY_BETWEEN_RANKS = ("ranks.agree",)  # claims that hold where every rank has the same fault


@dataclass(frozen=True)
class Match:
    """num_reproduced: of the target's `num_differing` wrong leaves. exact: all, and nothing else is different."""

    fault: Fault
    num_reproduced: int
    num_differing: int
    exact: bool


@dataclass(frozen=True)
class Pair:
    """What the target and the good decoder answer on one case, and where they differ."""

    case: Case
    target: Trace
    right: Trace
    wrong: list[Leaf]


def can_compare(subject: Subject) -> bool:
    """Numbers are compared where rounding is far below any fault, on models of ours that take no time."""
    if subject.bank.real or isinstance(subject.bank, OwnBank):
        return False
    return torch.finfo(subject.noise_dtype).eps < 1e-6


def tolerance_of(subject: Subject) -> float:
    return EXACT if subject.exact else ROUNDED


def _asked(case: Case, subject: Subject) -> Case:
    """The case with the subject's own drafter, where it has only one: what it is called says nothing."""
    if isinstance(case, DrafterCase) and case.drafter not in subject.drafter_names and len(subject.drafter_names) == 1:
        return replace(case, drafter=subject.drafter_names[0])
    return case


@dataclass(frozen=True)
class Comparison:
    """The target beside the good decoder on some cases of a claim. reference: the good one's column, which knows what
    the oracle says of them. used: which of its parts were used on the way. recordings: of its steps, on the first case.
    """

    claim: str
    pairs: tuple[Pair, ...]
    reference: Subject
    used: frozenset[str]
    recordings: tuple[Recording, ...]


def compared(subject: Subject, claim: str, cases: Sequence[Case]) -> Comparison:
    good = _Watched()
    reference = subject.beside(Target("reference", good))
    pairs: list[Pair] = []
    for case in cases:
        right = trace_of(reference, claim, case)
        good.records = False
        target = trace_of(subject, claim, case)
        pairs.append(Pair(case, target, right, differing(target, right, tolerance_of(subject))))
    if all(isinstance(case, WalkCase | WalkBatchCase | LawCase) for case in cases):
        good.used -= {"model", "decoder"}  # a verifier alone was asked
    if any(isinstance(case, DrafterCase) for case in cases):
        good.used.add("drafters")  # the good decoder has no drafter of that name, but a faulty one may be asked
    return Comparison(claim, tuple(pairs), reference, frozenset(good.used), tuple(good.recordings))


def matches_of(comparison: Comparison, faults: Collection[Fault]) -> list[Match]:
    """Faults that reproduce at least one wrong leaf, the best first. Those in parts that are not used are left out, and
    those that change nothing on the first case, where the target is wrong."""
    found: list[Match] = []
    if not any(one.wrong for one in comparison.pairs):
        return found
    started = time.perf_counter()
    for fault in faults:
        if time.perf_counter() - started > SECONDS_COMPARING:
            break
        made = fault.make()
        planted: frozenset[str] = getattr(made, "planted", frozenset())
        if not planted & comparison.used and (planted or "model" not in comparison.used):
            continue
        if comparison.claim in ONLY_BETWEEN_RANKS and "group" not in planted:
            continue
        if comparison.pairs[0].wrong and changes_nothing(fault, planted, comparison.recordings):
            continue
        with suppress(TargetError, ValueError):  # one that cannot be built over these models
            match = _match(fault, comparison.reference.twin(Target("planted", made)), comparison)
            if match.num_reproduced:
                found.append(match)
    return sorted(found, key=lambda one: (not one.exact, -one.num_reproduced))


def _match(fault: Fault, faulty: Subject, comparison: Comparison) -> Match:
    """Stops at the first answer that is not the target's: what comes after it proves nothing."""
    tolerance = tolerance_of(faulty)
    num_differing = sum(len(one.wrong) for one in comparison.pairs)
    num_reproduced, exact = 0, True
    for pair in comparison.pairs:
        try:
            trace = trace_of(faulty, comparison.claim, _asked(pair.case, faulty), like=pair.target, tolerance=tolerance)
            exact = len(trace.answers) == len(pair.target.answers)
        except Parted as parted:
            trace, exact = parted.args[0], False
        answers, target = trace.leaves, pair.target.leaves
        num_reproduced += sum(
            one in answers and one in target and same(answers[one], target[one], tolerance) for one in pair.wrong
        )
        if not exact:
            break
    if exact:
        num_reproduced = num_differing  # leaves that the target lacks are lacking here as well
    return Match(fault, num_reproduced, num_differing, exact)


class _Watched(ReferenceTarget):
    """The good decoder, which notes what of it is used."""

    def __init__(self) -> None:
        super().__init__(self._watch, plant_batch=self._watch_batch, plant_group=self._watch_group)
        self.used: set[str] = {"model", "decoder", "verifier"}
        self.recordings: list[Recording] = []
        self.records = True

    def build_drafter(self, model: Any, *, name: str = "self_chain") -> Any:
        self.used.add("drafters")
        return super().build_drafter(model, name=name)

    def _watch(self, steps: Steps) -> Steps:
        recording = Recording(steps)
        self.recordings.append(recording)
        return replace(steps, **{name: self._noting(name, step, recording) for name, step in vars(steps).items()})

    def _watch_batch(self, steps: Any) -> Any:
        return replace(steps, **{name: self._noting(f"batch.{name}", step) for name, step in vars(steps).items()})

    def _watch_group(self, group: Any) -> Any:
        self.used.add("group")
        return group

    def _noting(self, name: str, step: Any, recording: Recording | None = None) -> Any:
        def noted(*args: Any, **keywords: Any) -> Any:
            self.used.add(name)
            answer = step(*args, **keywords)
            if recording is not None and self.records:
                recording.note(name, args, keywords, answer)
            return answer

        return noted
