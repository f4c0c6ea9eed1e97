"""A verifier of several trees tried on plain batches: in what must trees differ for their answers to be wrong.

No ties, and every row says a token of its own, so that a wrong one tells whose row it was read from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbench.cases import Walk, WalkBatchCase, WalkCase
from specbench.checks.walk import walk_logits
from specbench.claims import Violation
from specbench.subjects import Subject
from specbench.tree import DraftTree
from specbench.types import VerifyResult

VOCAB_SIZE = 97
_CHAIN, _STAR = (-1, 0, 1, 2), (-1, 0, 0, 0)
_Tree = tuple[tuple[int, ...], tuple[int, ...]]  # parents, and the path that is right
# By what differs between the trees.
_KINDS: dict[str, tuple[_Tree, ...]] = {
    "nothing": ((_CHAIN, (1,)), (_CHAIN, (1,)), (_CHAIN, (1,))),
    "accepts": ((_CHAIN, ()), (_CHAIN, (1, 2, 3)), (_CHAIN, (1,))),
    "shapes": ((_CHAIN, (1, 2)), (_STAR, (3,)), (_CHAIN, (1, 2))),
    "sizes": ((_CHAIN[:2], (1,)), (_CHAIN, (1,)), (_CHAIN[:3], (1,))),
    "roots": ((_CHAIN[:3], ()), (_CHAIN[:1], ()), (_CHAIN[:3], ()), (_CHAIN[:3], ())),
    "zero": ((_CHAIN[:2], ()), (_CHAIN, (1,)), (_CHAIN[:3], (1,))),
}


@dataclass(frozen=True)
class Batch:
    """One batch and its answers. differs: in what the trees differ; "zero" is "sizes" where the target says token 0
    behind each path, which may be that of a padding. said: the tokens that the rows of each tree say."""

    differs: str
    answers: tuple[VerifyResult, ...]
    right: tuple[VerifyResult, ...]
    said: tuple[frozenset[int], ...]

    @property
    def wrong(self) -> list[int]:
        """Trees that are decided wrongly."""
        return [idx for idx, pair in enumerate(zip(self.answers, self.right, strict=True)) if pair[0] != pair[1]]

    @property
    def is_shuffled(self) -> bool:
        """Whether all answers are right and stand in another order."""
        return bool(self.wrong) and sorted(map(repr, self.answers)) == sorted(map(repr, self.right))

    @property
    def misses_bonus_only(self) -> bool:
        """Whether every path is right."""
        return [one.path for one in self.answers] == [one.path for one in self.right]


def batches(subject: Subject) -> list[Batch]:
    """Every plain batch; without those that the target does not answer."""
    found = (_verified(subject, differs, trees) for differs, trees in _KINDS.items())
    return [one for one in found if one is not None]


def _verified(subject: Subject, differs: str, trees: Sequence[_Tree]) -> Batch | None:
    walks, right = [], []
    for idx, (parents, path) in enumerate(trees):
        tokens = tuple(1 + 8 * idx + node for node in range(len(parents)))
        winners = [(64 + 8 * idx + node,) for node in range(len(parents))]
        for parent, node in zip((0, *path), path, strict=False):
            winners[parent] = (tokens[node],)
        if differs == "zero":
            winners[path[-1] if path else 0] = (0,)
        walks.append(Walk(tokens, parents, tuple(winners)))
        right.append(VerifyResult(path, winners[path[-1] if path else 0][0]))
    case = WalkBatchCase(walks=tuple(walks), vocab_size=VOCAB_SIZE)
    logits = [
        walk_logits(WalkCase(tokens=one.tokens, parents=one.parents, winners=one.winners, vocab_size=VOCAB_SIZE))
        for one in walks
    ]
    try:
        answers = subject.open(case).verify_batch([DraftTree.of(one.tokens, one.parents) for one in walks], logits)
    except Violation:
        return None
    said = tuple(frozenset(token for row in one.winners for token in row) for one in walks)
    return Batch(differs, tuple(answers), tuple(right), said)
