"""Reduction by structure: every step is a valid, smaller case, and greedy steps reach the smallest one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.cases import (
    Case,
    CommitCase,
    CommitRound,
    GenerationCase,
    PerturbedCase,
    TreeCase,
    WalkCase,
    decode,
    encode,
    tokens_of,
)
from specbench.reduce import reduce_case, smaller_cases


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small cases of every kind, drawn without the strategies under which reduction usually runs."""

    def tree() -> tuple[tuple[int, ...], tuple[int, ...]]:
        parents = [-1, *(draw(st.integers(0, node)) for node in range(draw(st.integers(0, 6))))]
        return tuple(draw(st.integers(0, 3)) for _ in parents), tuple(parents)

    def rounds() -> tuple[CommitRound, ...]:
        return tuple(
            CommitRound(*one, accept=draw(st.integers(0, len(one[0]) - 1)))
            for one in (tree() for _ in range(draw(st.integers(1, 3))))
        )

    prompt = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=5)))
    tokens, parents = tree()
    kind = draw(st.sampled_from(["tree", "perturbed", "walk", "commit", "generation"]))
    place = {"model": draw(st.integers(0, 2)), "layout": draw(st.sampled_from(["tree_mask", "path_batch"]))}
    rooted = (prompt[-1], *tokens[1:])
    if kind == "tree":
        return TreeCase(**place, prompt=prompt, tokens=rooted, parents=parents)
    if kind == "perturbed":
        where = draw(st.integers(0, len(prompt) - 1 + len(tokens) - 1))
        return PerturbedCase(**place, prompt=prompt, tokens=rooted, parents=parents, place=where, token=1)
    if kind == "walk":
        winners = tuple((draw(st.integers(0, 3)),) for _ in tokens)
        return WalkCase(**place, tokens=tokens, parents=parents, winners=winners, vocab_size=4)
    played = rounds()
    if kind == "commit":
        roots = tuple(draw(st.integers(0, 3)) for _ in played)
        return CommitCase(**place, prompt=prompt, rounds=played, next_roots=roots, cut=draw(st.integers(0, 3)))
    return GenerationCase(**place, prompt=prompt, rounds=played, max_new_tokens=draw(st.integers(1, 5)), eos_idx=2)


def weight(case: Case) -> tuple[int, ...]:
    """What may only go down: nodes, then lengths, then the sum of all numbers and names that are not the default."""
    rounds = getattr(case, "rounds", ())
    numbers = sum(tokens_of(case)) + case.model + getattr(case, "cut", 0) + sum(one.accept for one in rounds)
    names = (case.layout != "tree_mask") + (case.cache != "contiguous")
    lengths = len(getattr(case, "prompt", ())) + len(rounds) + getattr(case, "max_new_tokens", 0)
    return (case.num_drafts, lengths, numbers + names + getattr(case, "eos_idx", 0))


@given(case=cases())
@settings(max_examples=300, deadline=None, database=None, derandomize=True)
def test_every_step_is_a_valid_case_that_weighs_less(case: Case) -> None:
    for smaller in smaller_cases(case):
        assert decode(encode(smaller)) == smaller  # decoding validates trees, rounds and prompts
        assert weight(smaller) < weight(case)


def test_a_tree_is_cut_down_to_the_two_nodes_that_matter() -> None:
    """Fails when two nodes with different parents stand at depth two: the cousin-leak condition, smallest with four."""
    case = TreeCase(
        prompt=(3, 1, 2),
        tokens=(2, *range(1, 13)),
        parents=(-1, 0, 0, 0, 1, 1, 2, 2, 3, 4, 6, 10, 0),
        layout="path_batch",
    )

    def fails(one: Case) -> bool:
        deep = [node for node, parent in enumerate(one.parents) if parent > 0 and one.parents[parent] == 0]
        return len({one.parents[node] for node in deep}) > 1

    smallest = reduce_case(case, fails, max_checks=1000)
    assert smallest == TreeCase(prompt=(0,), tokens=(0,) * 5, parents=(-1, 0, 0, 1, 2))


def test_a_change_keeps_its_node_while_others_go() -> None:
    case = PerturbedCase(prompt=(1, 2), tokens=(2, 5, 6, 7, 8), parents=(-1, 0, 0, 2, 0), place=4, token=9)

    def fails(one: Case) -> bool:
        node = one.place - len(one.prefix)
        return node > 0 and one.tokens[node] == 7

    smallest = reduce_case(case, fails, max_checks=1000)
    assert smallest == PerturbedCase(prompt=(0,), tokens=(0, 7), parents=(-1, 0), place=1, token=9)


def test_no_more_cases_are_tried_than_allowed() -> None:
    tried = []

    def fails(one: Case) -> bool:
        tried.append(one)
        return False

    case = TreeCase(prompt=(1,), tokens=(1,) * 9, parents=(-1, *range(8)))
    assert reduce_case(case, fails, max_checks=5) == case
    assert len(tried) == 5
