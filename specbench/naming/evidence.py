"""All that is known of a failure, and the ranked list of what it may be."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from specbench.cases import Case, CommitCase, SampledCase
from specbench.claims import Misbehaviour
from specbench.naming.fingerprint import Match, Pair, can_compare, compared, matches_of
from specbench.naming.scene import Finding, Scene, rich_cases
from specbench.naming.structure import EXPLAINED_BY, Reason, classes_of
from specbench.naming.suspect import Suspect
from specbench.naming.walks import plain_walks
from specbench.reference.faults.bank import FAULTS
from specbench.subjects import Subject

Ask = Callable[[str], "Finding | bool"]  # a claim -> how it fails on the subject, else whether it was judged and holds
MOST_SUSPECTS = 5
# Claims that are judged on little but tokens, which many faults can bend alike: where all below holds, what the claim
# is about says more than a fault of another class that happens to say the same tokens.
SPEAKS_FOR_ITSELF = ("greedy.walk", "law.support", "stop.", "processors.", "ranks.", "cost.", "metrics.")


class Evidence:
    """matches: planted faults that reproduce wrong answers of the failing cases. reasons: classes suspected by
    structure. round_seen: of the first wrong answer, 0 where there are no rounds. seconds: what looking took."""

    def __init__(
        self,
        finding: Finding,
        matches: Sequence[Match],
        reasons: Sequence[Reason],
        *,
        round_seen: int,
        seconds: float,
    ) -> None:
        self.finding = finding
        self.matches = list(matches)
        self.reasons = list(reasons)
        self.round_seen = round_seen
        self.seconds = seconds

    def rank(self, *, without: Collection[str] = (), ignore_classes: Collection[str] = ()) -> tuple[Suspect, ...]:
        """The likeliest first, a class once. without: ids of planted faults that are not to be looked at;
        ignore_classes: the same for all of a class. Nothing fits: an empty list, which is said as "unknown"."""
        allowed = [
            one for one in self.matches if one.fault.id not in without and one.fault.fault_class not in ignore_classes
        ]
        order = {fault_class: idx for idx, (fault_class, _) in enumerate(self.reasons)}
        exact = sorted(
            (one for one in allowed if one.exact), key=lambda one: order.get(one.fault.fault_class, len(order))
        )
        suspects: dict[str, Suspect] = {}
        if self.finding.claim.startswith(SPEAKS_FOR_ITSELF) and self.reasons:
            fault_class, reason = self.reasons[0]
            if not any(one.fault.fault_class == fault_class for one in exact):
                suspects[fault_class] = Suspect(fault_class, "", reason)
        for one in exact:
            suspects.setdefault(one.fault.fault_class, self._by_match(one))
        for fault_class, reason in self.reasons:
            suspects.setdefault(fault_class, Suspect(fault_class, "", reason))
        for one in allowed:
            if 2 * one.num_reproduced >= one.num_differing:
                suspects.setdefault(one.fault.fault_class, self._by_match(one))
        return tuple(suspects.values())[:MOST_SUSPECTS]

    def near_copies(self, fault: str) -> frozenset[str]:
        """The fault, those of its kin, and those of its class that do the same on the failing cases."""
        one = FAULTS[fault]
        kin = {other.id for other in FAULTS.values() if one.kin and other.kin == one.kin}
        alike = {match.fault.id for match in self.matches if match.exact and match.fault.fault_class == one.fault_class}
        return frozenset({fault} | kin | alike)

    def _by_match(self, match: Match) -> Suspect:
        fault = match.fault
        number = f"all {match.num_differing}" if match.exact else f"{match.num_reproduced} of {match.num_differing}"
        seen = f", first seen in round {self.round_seen}" if self.round_seen else ""
        evidence = f"{fault.sentence}: reproduces {number} differing answers{seen}"
        return Suspect(fault.fault_class, fault.id, evidence)


def root_of(finding: Finding, ask: Ask) -> tuple[Finding, frozenset[str]]:
    """The failure that explains this one: that of the first claim below it that fails as well, or itself. With it the
    claims below that were judged and hold."""
    held: set[str] = set()
    if isinstance(finding.violation, Misbehaviour):
        return finding, frozenset()  # what raises here is not to be asked about elsewhere
    for claim in EXPLAINED_BY.get(finding.claim, ()):
        lower = ask(claim)
        if isinstance(lower, Finding):
            return lower, frozenset(held)
        if lower:
            held.add(claim)
    return finding, frozenset(held)


def examine(subject: Subject, finding: Finding, *, held: Collection[str] = (), others: Sequence[Case] = ()) -> Evidence:
    """held: claims that hold. others: further cases of the claim, whether they fail or not: what a planted fault does
    on them has to be what the target does."""
    started = time.perf_counter()
    more = [case for case, _ in plain_walks()] if finding.claim == "greedy.walk" else rich_cases(subject, finding.case)
    comparison = None
    # A thousand sampled texts take seconds a fault, and are another thousand where coins fall in another order.
    if can_compare(subject) and not isinstance(finding.case, SampledCase):
        with suppress(Exception):  # a model that is not ours need not do what the good decoder asks of it
            comparison = compared(subject, finding.claim, [finding.case, *more, *others])
    matches = [] if comparison is None else matches_of(comparison, FAULTS.values())
    pair = None if comparison is None else comparison.pairs[0]
    reasons: list[Reason] = []
    if not (isinstance(finding.violation, Misbehaviour) and subject.target.keeps_time):  # it may hang, again and again
        reasons = classes_of(Scene(subject, finding, pair, held))
    seconds = time.perf_counter() - started
    return Evidence(finding, matches, reasons, round_seen=_round_seen(pair), seconds=seconds)


def _round_seen(pair: Pair | None) -> int:
    """The round of the first wrong answer on the case itself."""
    if pair is None or not pair.wrong:
        return 0
    first = pair.wrong[0]
    rounds = [int(one.part[1]) for one in pair.wrong if one.part[:1] == ("round",)]
    if rounds:
        return min(rounds)
    if not isinstance(pair.case, CommitCase):
        return 0
    forwards = {one.number for one in pair.target.leaves if one.name == "forward_tree" and one.number <= first.number}
    return min(len(forwards), pair.case.num_rounds + 1)
