"""Making a failing case smaller by its structure, after Hypothesis has shrunk its draws.

Taking one node out of a tree changes parents, tokens and whatever is listed per node at once, which a shrinker of draws
finds only by luck. Here each step is one such change; it is kept when the case still fails in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from specbench.cases import Case, CommitCase, CommitRound, GenerationCase, PerturbedCase, TreeCase, WalkCase


def reduce_case(case: Case, fails: Callable[[Case], bool], *, max_checks: int) -> Case:
    """The smallest case reached by greedy steps. fails: whether a case shows the same violation. At most `max_checks`
    cases are tried."""
    num_checks = 0
    improved = True
    while improved:
        improved = False
        for smaller in smaller_cases(case):
            if num_checks == max_checks:
                return case
            num_checks += 1
            if fails(smaller):
                case, improved = smaller, True
                break
    return case


def smaller_cases(case: Case) -> Iterator[Case]:
    """Cases one step smaller, the boldest steps first. Every step lowers nodes, lengths, or the sum of numbers."""
    if isinstance(case, CommitCase | GenerationCase):
        yield from _fewer_rounds(case)
        for number, one in enumerate(case.rounds):
            for smaller in _smaller_rounds(one):
                yield _with(case, rounds=(*case.rounds[:number], smaller, *case.rounds[number + 1 :]))
    if isinstance(case, TreeCase | WalkCase):
        yield from _fewer_nodes(case)
    yield from _shorter_prompts(case)
    if case.layout != "tree_mask":
        yield _with(case, layout="tree_mask")
    if case.cache != "contiguous":
        yield _with(case, cache="contiguous")
    yield from _lower_numbers(case)


def _fewer_rounds(case: CommitCase | GenerationCase) -> Iterator[Case]:
    for number in range(len(case.rounds)):
        rest = _without(case.rounds, [number])
        if isinstance(case, GenerationCase):
            yield _with(case, rounds=rest)
        elif rest:
            yield _with(case, rounds=rest, next_roots=_without(case.next_roots, [number]))


def _smaller_rounds(one: CommitRound) -> Iterator[CommitRound]:
    for gone, parents in _smaller_trees(one.parents):
        if one.accept not in gone:
            accept = one.accept - sum(node < one.accept for node in gone)
            yield CommitRound(_without(one.tokens, gone), parents, accept)
    if one.accept:
        yield replace(one, accept=max(0, one.parents[one.accept]))
    for tokens in _lower(one.tokens):
        yield replace(one, tokens=tokens)


def _fewer_nodes(case: TreeCase | WalkCase) -> Iterator[Case]:
    for gone, parents in _smaller_trees(case.parents):
        changes: dict[str, Any] = {"tokens": _without(case.tokens, gone), "parents": parents}
        if isinstance(case, WalkCase):
            changes["winners"] = _without(case.winners, gone)
        if isinstance(case, PerturbedCase):
            node = case.place - len(case.prefix)
            if node in gone:
                continue
            changes["place"] = case.place - sum(other < node for other in gone)
        yield _with(case, **changes)


def _smaller_trees(parents: tuple[int, ...]) -> Iterator[tuple[list[int], tuple[int, ...]]]:
    """Nodes to take out and the parents that remain: whole subtrees, the largest first, then single inner nodes, whose
    children move up."""
    subtrees: list[list[int]] = [[node] for node in range(len(parents))]
    for node in range(len(parents) - 1, 0, -1):
        subtrees[parents[node]] += subtrees[node]
    for gone in sorted((sorted(one) for one in subtrees[1:]), key=len, reverse=True):
        yield gone, _renumbered(parents, gone)
    for node in range(1, len(parents)):
        if len(subtrees[node]) > 1:
            lifted = tuple(parents[node] if parent == node else parent for parent in parents)
            yield [node], _renumbered(lifted, [node])


def _renumbered(parents: tuple[int, ...], gone: Sequence[int]) -> tuple[int, ...]:
    return tuple(parent - sum(node < parent for node in gone) for parent in _without(parents, gone))


def _shorter_prompts(case: Case) -> Iterator[Case]:
    prompt: tuple[int, ...] = getattr(case, "prompt", ())
    for num_cut in sorted({len(prompt) - 1, len(prompt) // 2, 1}, reverse=True):
        if not 0 < num_cut < len(prompt):
            continue
        if isinstance(case, PerturbedCase):
            if case.place >= num_cut:
                yield _with(case, prompt=prompt[num_cut:], place=case.place - num_cut)
        else:
            yield _with(case, prompt=prompt[num_cut:])


def _lower_numbers(case: Case) -> Iterator[Case]:
    for name in ("max_new_tokens", "cut", "eos_idx"):
        value = getattr(case, name, 0)
        lowest = 1 if name == "max_new_tokens" else 0
        for lower in sorted({lowest, value // 2, value - 1}):
            if lowest <= lower < value:
                yield _with(case, **{name: lower})
    if case.model:
        yield _with(case, model=0)
    for name in ("prompt", "tokens", "next_roots"):
        for values in _lower(getattr(case, name, ())):
            if not isinstance(case, TreeCase):
                yield _with(case, **{name: values})
            elif name == "prompt":
                yield _with(case, prompt=values, tokens=(values[-1], *case.tokens[1:]))
            elif values[0] == case.prompt[-1]:
                yield _with(case, tokens=values)


def _lower(values: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if any(values):
        yield (0,) * len(values)
        for idx, value in enumerate(values):
            if value:
                yield (*values[:idx], 0, *values[idx + 1 :])


def _without(values: tuple[Any, ...], gone: Sequence[int]) -> tuple[Any, ...]:
    return tuple(value for idx, value in enumerate(values) if idx not in gone)


def _with(case: Case, **changes: Any) -> Case:
    return replace(case, **changes)
