"""The claim about the greedy acceptance rule alone: a tree, its logits, and what may be accepted."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from specbench.cases import Case, WalkCase
from specbench.claims import Facts, WalkMismatch
from specbench.record import ClaimRecord
from specbench.subjects import Subject


def check_walk(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """Enumerates what is right and compares: every accepted node is the argmax of its parent's row, the bonus is the
    argmax of the last accepted row, and no path goes on further.

    Of duplicate siblings any copy may be taken, since all spell the same text, but none that ends before another does.
    """
    assert isinstance(case, WalkCase)
    tree = case.tree
    result = subject.open(case).verify(tree, walk_logits(case, gap=narrow_gap(subject)))
    winners = winners_of(case)
    winner = [min(one) for one in winners]
    path = list(result.path)
    right = longest_path(case, winner)
    notes = {node: f"argmax {_named(winners[node])}" for node in range(tree.num_nodes)}
    for node in path:
        notes[node] += "  accepted"
    last = path[-1] if path else 0
    problem = ""
    if not tree.is_path(path):
        problem = f"path {path} does not run from parent to child"
    elif any(tree.token_list[node] != winner[tree.parent_list[node]] for node in path):
        bad = next(node for node in path if tree.token_list[node] != winner[tree.parent_list[node]])
        says = _named(winners[tree.parent_list[bad]])
        problem = f"node {bad} is accepted, but its parent's row says {says}"
    elif len(path) < len(right):
        child = right[len(path)]
        problem = f"node {child} is not accepted, though its parent's row says {winner[last]}: acceptance is lost"
    elif result.bonus_token != winner[last]:
        problem = f"bonus token is {result.bonus_token}, must be {winner[last]} (argmax of the row of node {last})"
    if problem:
        raise WalkMismatch(
            Facts(
                headline=problem,
                expected=f"path {right}, bonus {winner[right[-1] if right else 0]}",
                actual=f"path {path}, bonus {result.bonus_token}",
                source="enumeration of all paths",
                tree=tree,
                notes=notes,
            )
        )


def walk_logits(case: WalkCase, *, gap: float = 2.0**-10) -> Tensor:
    """float64 [N, V]: winners share the row's maximum exactly.

    Losers differ from one another and some are negative, so that a rule which adds, averages or clips rows shows. By
    flavour they lie at least 1 below (0), one of them only `gap` below (1), all logits are negative (2), or all losers
    but one are -inf (3). Where the maximum is zero, the lowest winner has -0.0, which equals it. A row depends on its
    token and winners alone, so that copies have equal ones and nodes of a smaller tree keep theirs.
    """
    tokens = torch.arange(case.vocab_size, dtype=torch.float64)
    logits = torch.empty(len(case.tokens), case.vocab_size, dtype=torch.float64)
    for node, winners in enumerate(winners_of(case)):
        mark = case.tokens[node] + min(winners)
        logits[node] = -1.0 - (tokens + mark) % 7
        best = float(mark % 3)
        losers = [token for token in range(case.vocab_size) if token not in winners]
        near = losers[mark % len(losers)] if losers else None
        if case.flavour == 3 and losers:
            logits[node, [token for token in losers if token != near]] = -torch.inf
        if case.flavour == 1 and near is not None:
            logits[node, near] = best - gap
        logits[node, list(winners)] = best
        if best == 0.0:
            logits[node, min(winners)] = -0.0
    return logits - 50.0 if case.flavour == 2 else logits


def narrow_gap(subject: Subject) -> float:
    """What a verifier must tell apart: a thousandth, or what the precision that the target declares can hold."""
    return max(2.0**-10, 16 * torch.finfo(subject.noise_dtype).eps)


def winners_of(case: WalkCase) -> list[tuple[int, ...]]:
    """By node. Nodes that spell the same text have the first one's, as a model gives one text one row."""
    by_text: dict[tuple[int, ...], tuple[int, ...]] = {}
    texts = (tuple(case.tree.path_tokens(node)) for node in range(case.tree.num_nodes))
    return [by_text.setdefault(text, winners) for text, winners in zip(texts, case.winners, strict=True)]


def _named(winners: tuple[int, ...]) -> str:
    best, *ties = sorted(winners)
    return f"{best} (ties with {', '.join(map(str, ties))}; the lowest id wins)" if ties else str(best)


def longest_path(case: WalkCase, winner: list[int]) -> list[int]:
    """The longest path whose every node is its parent's argmax, lowest nodes first: by enumeration."""
    fitting = [
        path[1:]
        for path in (case.tree.path_to(node) for node in range(case.tree.num_nodes))
        if all(case.tree.token_list[child] == winner[parent] for parent, child in itertools.pairwise(path))
    ]
    return max(fitting, key=lambda path: (len(path), [-node for node in path]))
