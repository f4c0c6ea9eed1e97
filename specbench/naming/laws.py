"""A sampling verifier taken apart on plain drafts: which of its decisions has another law than it should?

One draft below the root, drawn or given, then two: what is accepted how often, and what is said behind an accept and
behind a refusal. All laws are exact, by going through the coins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from torch import Tensor

from specbench.cases import LawCase
from specbench.checks.law import as_asked, drafts_of, exact_law, laws_of
from specbench.claims import Violation
from specbench.law.joint import total_variation
from specbench.law.toys import Toy, is_chain
from specbench.loading import TargetError
from specbench.probe import Probe
from specbench.protocols import Coins
from specbench.subjects import NotTested, Subject
from specbench.tree import DraftTree
from specbench.types import Sampling, VerifyResult

SEEDS = range(2)  # of the toys
CLOSE = 1e-6
GRID = 8  # a name is not a verdict
Rows = list[list[float]]


@dataclass(frozen=True)
class Answered:
    """A tree, its laws and what a verifier makes of it. num_coins: that the longest run took."""

    tree: DraftTree
    p: Rows
    q: Rows | None
    law: Mapping[VerifyResult, float]
    num_coins: int

    def accepted(self) -> float:
        """P that the first draft is kept."""
        return sum(mass for result, mass in self.law.items() if result.path[:1] == (1,))

    def behind(self, path: tuple[int, ...]) -> list[float]:
        """The law of the token behind a path; empty where the path never comes."""
        masses = [0.0] * len(self.p[0])
        for result, mass in self.law.items():
            if result.path == path and result.bonus_token < len(masses):
                masses[result.bonus_token] += mass
        total = sum(masses)
        return [one / total for one in masses] if total > CLOSE else []


def answered(subject: Subject, parents: tuple[int, ...], proposal: str, *, most: int = 6) -> list[Answered]:
    """At most so many drafts of that shape over some toys; none where the verifier is not made for it or fails."""
    proposals, only_chains = subject.law_drafts
    if proposal not in proposals or (only_chains and not is_chain(parents)):
        return []
    try:
        return list(islice(_answered(subject, parents, proposal), most))
    except (Violation, NotTested, TargetError):
        return []


def _answered(subject: Subject, parents: tuple[int, ...], proposal: str) -> Iterator[Answered]:
    for seed in SEEDS:
        case = LawCase(seed=seed, parents=parents, proposal=proposal)
        probe = subject.open(case)
        for drafted, _ in drafts_of(case, Toy(case.vocab_size, seed)):
            law, num_coins = _law_of(probe, *as_asked(drafted))
            p = [[float(one) for one in row] for row in drafted.target_probs]
            q = None if drafted.draft_probs is None else [[float(one) for one in row] for row in drafted.draft_probs]
            yield Answered(drafted.tree, p, q, law, num_coins)


def _law_of(probe: Probe, tree: DraftTree, logits: Tensor) -> tuple[Mapping[VerifyResult, float], int]:
    most = 0

    def verify(coins: Coins) -> VerifyResult:
        nonlocal most
        counting = _Counting(coins)
        result = probe.verify(tree, logits, sampling=Sampling(temperature=1.0), coins=counting)
        most = max(most, counting.num_drawn)
        return result

    return exact_law(verify, grid=GRID), most


def is_off(subject: Subject, case: LawCase) -> bool:
    """Whether a verifier emits another law than the target's, or fails; False where that cannot be told."""
    try:
        _, actual, right = laws_of(subject, case, grid=GRID)
    except Violation:
        return True
    except (NotTested, TargetError):
        return False
    return total_variation(actual, right) > CLOSE


def kept_rightly(one: Answered) -> bool:
    """Whether a first draft is kept as often as a lossless rule may keep one: by p / q, or by p alone."""
    token = one.tree.token_list[1]
    return any(abs(one.accepted() - chance) < CLOSE for chance in _chances(one.p[0], one.q, token))


def kept_by(one: Answered, row: list[float]) -> bool:
    """Whether it is kept as another row than the root's says."""
    token = one.tree.token_list[1]
    return any(abs(one.accepted() - chance) < CLOSE for chance in _chances(row, one.q, token))


def kept_by_other_q(one: Answered) -> bool:
    """Whether it is kept by p / q with the q of another row."""
    token = one.tree.token_list[1]
    others = [] if one.q is None else [row[token] for row in one.q[1:] if row[token]]
    return any(abs(one.accepted() - min(1.0, one.p[0][token] / drawn)) < CLOSE for drawn in others)


def residuals(one: Answered) -> list[list[float]]:
    """What may follow a refusal of the first draft: the positive part of p - q, or p without the draft."""
    token, p = one.tree.token_list[1], one.p[0]
    found = [[mass if other != token else 0.0 for other, mass in enumerate(p)]]
    if one.q is not None:
        found.append([max(0.0, mass - drawn) for mass, drawn in zip(p, one.q[0], strict=True)])
    return [[mass / sum(law) for mass in law] for law in found if sum(law) > 0]


def alike(law: list[float], other: list[float]) -> bool:
    return max(abs(one - two) for one, two in zip(law, other, strict=True)) < CLOSE


def _chances(p: list[float], q: Rows | None, token: int) -> list[float]:
    chances = [p[token]]
    if q is not None and q[0][token]:
        chances.append(min(1.0, p[token] / q[0][token]))
    return chances


class _Counting:
    """Coins that are counted."""

    def __init__(self, coins: Coins) -> None:
        self._coins = coins
        self.num_drawn = 0

    def uniform(self, num: int) -> Tensor:
        self.num_drawn += num
        return self._coins.uniform(num)
