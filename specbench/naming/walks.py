"""A verifier tried on plain trees: chains with every pattern of matches, and a wide tree with every path.

No ties, no near ties, no token twice below one node. What goes wrong on them, and what does not, tells rules apart that
one failing case cannot.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from specbench.cases import WalkCase
from specbench.checks.walk import walk_logits
from specbench.claims import Violation
from specbench.subjects import Subject
from specbench.tree import DraftTree

VOCAB_SIZE = 16
REFUSES = 14  # what a row says that goes no further, and one less a node
WIDE = (-1, 0, 0, 1, 1, 1, 2, 2, 3, 5, 6)


@dataclass(frozen=True)
class Walked:
    """What a verifier answered to a tree and what is right. kept: the first node that is wrongly kept, None when there
    is none. kept_by_itself: its own row says its token. bonus_of_child: the token behind the path is what the row of a
    child of its last node says, which was refused."""

    path: tuple[int, ...]
    bonus: int
    right: tuple[int, ...]
    right_bonus: int
    is_chain: bool
    kept: int | None
    kept_by_itself: bool
    bonus_of_child: bool

    @property
    def is_wrong(self) -> bool:
        return (self.path, self.bonus) != (self.right, self.right_bonus)


def walked(subject: Subject) -> list[Walked]:
    """Every plain tree; empty where the target does not answer one."""
    answers = []
    for case, right in plain_walks():
        answer = walk(subject, case, right)
        if answer is None:
            return []
        answers.append(answer)
    return answers


def plain_walks() -> Iterator[tuple[WalkCase, tuple[int, ...]]]:
    """Cases and the path that is right in each."""
    for length in (1, 2, 3):
        parents = tuple(range(-1, length))
        tokens = tuple(range(3, 4 + length))
        for matches in itertools.product((True, False), repeat=length):
            for itself in (False, True):
                yield _chain(tokens, parents, matches, itself=itself)
    tree = DraftTree.of([3 + node for node in range(len(WIDE))], WIDE)
    for node in range(tree.num_nodes):
        yield _leading_to(tree, tree.path_to(node)[1:])


def walk(subject: Subject, case: WalkCase, right: tuple[int, ...]) -> Walked | None:
    """right: the path that the rows of the case say."""
    logits = walk_logits(case)
    try:
        result = subject.open(case).verify(case.tree, logits)
    except Violation:
        return None
    winner = [min(one) for one in case.winners]
    tree, path = case.tree, result.path
    kept = next((node for node in path if node not in right), None)
    right_bonus = winner[right[-1] if right else 0]
    is_chain = all(len(tree.children(node)) <= 1 for node in range(tree.num_nodes))
    by_itself = kept is not None and winner[kept] == tree.token_list[kept]
    refused = tree.children(path[-1] if path else 0)
    of_child = result.bonus_token in {winner[child] for child in refused}
    return Walked(path, result.bonus_token, right, right_bonus, is_chain, kept, by_itself, of_child)


def keeps_at_gap(subject: Subject, gap: float, *, token: int = 3) -> bool:
    """Whether a draft is kept whose logit is `gap` below its parent's largest. token: 3 is the second choice then, any
    other is behind it."""
    logits = torch.full((2, VOCAB_SIZE), -8.0, dtype=torch.float64)
    logits[:, 5], logits[:, 3] = 0.0, -4.0
    logits[0, token] = -gap
    try:
        return bool(subject.open(WalkCase()).verify(DraftTree.of([1, token], [-1, 0]), logits).path)
    except Violation:
        return False


def _chain(
    tokens: tuple[int, ...], parents: tuple[int, ...], matches: tuple[bool, ...], *, itself: bool
) -> tuple[WalkCase, tuple[int, ...]]:
    """Row i says node i + 1 where `matches[i]`. itself: elsewhere it says the node's own token, else one that nobody
    has, another one a row."""
    winners = []
    for node, token in enumerate(tokens):
        if node < len(matches) and matches[node]:
            winners.append((tokens[node + 1],))
        else:
            winners.append((token if itself and node else REFUSES - node,))
    num_kept = next((idx for idx, one in enumerate(matches) if not one), len(matches))
    case = WalkCase(tokens=tokens, parents=parents, winners=tuple(winners), vocab_size=VOCAB_SIZE)
    return case, tuple(range(1, num_kept + 1))


def _leading_to(tree: DraftTree, path: list[int]) -> tuple[WalkCase, tuple[int, ...]]:
    """Rows on the path say the next node, all others their first child, which must not be followed, or nobody."""
    winners = []
    for node in range(tree.num_nodes):
        children = tree.children(node)
        if node in (0, *path):
            following = [child for child in children if child in path]
            winners.append((tree.token_list[following[0]] if following else node % 3,))
        else:
            winners.append((tree.token_list[children[0]] if children else node % 3,))
    case = WalkCase(
        tokens=tuple(tree.token_list),
        parents=tuple(tree.parent_list),
        winners=tuple(winners),
        vocab_size=VOCAB_SIZE,
    )
    return case, tuple(path)
