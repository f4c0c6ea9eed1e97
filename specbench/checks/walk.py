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
    argmax of the last accepted row, and no child of the last accepted node carries the bonus.

    Below duplicate siblings any copy may be taken, since all spell the same text.
    """
    assert isinstance(case, WalkCase)
    tree = case.tree
    result = subject.open(case).verify(tree, walk_logits(case))
    winner = [min(one) for one in case.winners]
    path = list(result.path)
    right = _longest_path(case, winner)
    notes = {node: f"argmax {winner[node]}" for node in range(tree.num_nodes)}
    for node in path:
        notes[node] += "  accepted"
    last = path[-1] if path else 0
    problem = ""
    if not tree.is_path(path):
        problem = f"path {path} does not run from parent to child"
    elif any(tree.token_list[node] != winner[tree.parent_list[node]] for node in path):
        bad = next(node for node in path if tree.token_list[node] != winner[tree.parent_list[node]])
        problem = f"node {bad} is accepted, but its parent's row says {winner[tree.parent_list[bad]]}"
    elif any(tree.token_list[child] == winner[last] for child in tree.children(last)):
        child = next(child for child in tree.children(last) if tree.token_list[child] == winner[last])
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


def walk_logits(case: WalkCase) -> Tensor:
    """float64 [N, V]: winners share the row's maximum exactly, every other token lies below by at least 1.

    Losers differ from one another and some are negative, so that a rule which adds, averages or clips rows shows.
    """
    tokens = torch.arange(case.vocab_size, dtype=torch.float64)
    logits = torch.stack([-1.0 - (tokens + node) % 7 for node in range(len(case.tokens))])
    for node, winners in enumerate(case.winners):
        logits[node, list(winners)] = float(node % 3)
    return logits


def _longest_path(case: WalkCase, winner: list[int]) -> list[int]:
    """The longest path whose every node is its parent's argmax, lowest nodes first: by enumeration."""
    fitting = [
        path[1:]
        for path in (case.tree.path_to(node) for node in range(case.tree.num_nodes))
        if all(case.tree.token_list[child] == winner[parent] for parent, child in itertools.pairwise(path))
    ]
    return max(fitting, key=lambda path: (len(path), [-node for node in path]))
