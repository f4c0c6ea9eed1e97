"""Reduction by structure: every step is a valid, smaller case, and greedy steps reach the smallest one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.cases import (
    Case,
    ChunkCase,
    CommitCase,
    CommitRound,
    GenerationCase,
    MachineCase,
    Op,
    PerturbedCase,
    ProcessorCase,
    StopCase,
    TreeCase,
    WalkCase,
    decode,
    encode,
    tokens_of,
)
from specbench.reduce import reduce_case, smaller_cases
from specbench.tree import DraftTree


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
    kinds = ["tree", "perturbed", "chunk", "walk", "commit", "generation", "stop", "processor", "machine"]
    kind = draw(st.sampled_from(kinds))
    place = {"model": draw(st.integers(0, 2)), "layout": draw(st.sampled_from(["tree_mask", "path_batch"]))}
    rooted = (prompt[-1], *tokens[1:])
    if kind == "tree":
        return TreeCase(**place, prompt=prompt, tokens=rooted, parents=parents)
    if kind == "perturbed":
        where = draw(st.integers(0, len(prompt) - 1 + len(tokens) - 1))
        return PerturbedCase(**place, prompt=prompt, tokens=rooted, parents=parents, place=where, token=1)
    if kind == "chunk":
        chunks = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
        return ChunkCase(**place, prompt=prompt, tokens=rooted, parents=parents, keep=2, chunks=chunks)
    if kind == "machine":
        ops = (Op("prefill", prompt), Op("draft", tokens, parents), Op("commit", (len(tokens) - 1, 2)), Op("fork"))
        return MachineCase(**place, ops=ops)
    if kind == "walk":
        winners = tuple((draw(st.integers(0, 3)),) for _ in tokens)
        return WalkCase(**place, tokens=tokens, parents=parents, winners=winners, vocab_size=4)
    played = rounds()
    if kind == "commit":
        roots = tuple(draw(st.integers(0, 3)) for _ in played)
        return CommitCase(**place, prompt=prompt, rounds=played, next_roots=roots, cut=draw(st.integers(0, 3)))
    base = {"prompt": prompt, "rounds": played, "max_new_tokens": draw(st.integers(1, 5)), "eos_idx": 2}
    if kind == "stop":
        return StopCase(**place, **base, stop_from=3, stop_len=2, min_new_tokens=1, turns=((), (1, 2)))
    if kind == "processor":
        grammar = ((1, 0, 2, 1), (3, 0))
        return ProcessorCase(
            **place, **base, repetition=130, presence=50, frequency=-100, bans=((1, 2),), grammar=grammar
        )
    return GenerationCase(**place, **base)


PENALTIES = {"repetition": 100, "presence": 0, "frequency": 0}


def weight(case: Case) -> tuple[int, ...]:
    """What may only go down: nodes, then lengths, then the sum of all numbers and names that are not the default."""
    rounds = getattr(case, "rounds", ())
    numbers = sum(tokens_of(case)) + case.model + getattr(case, "cut", 0) + sum(one.accept for one in rounds)
    names = (case.layout != "tree_mask") + (case.cache != "contiguous")
    lengths = len(getattr(case, "prompt", ())) + len(rounds) + getattr(case, "max_new_tokens", 0)
    lengths += sum(1 + len(one) for name in ("turns", "bans", "grammar") for one in getattr(case, name, ()))
    lengths += len(getattr(case, "chunks", ())) + sum(1 + len(one.numbers) for one in getattr(case, "ops", ()))
    changed = sum(getattr(case, name, usual) != usual for name, usual in PENALTIES.items())
    added = sum(getattr(case, name, 0) for name in ("stop_from", "stop_len", "min_new_tokens", "keep"))
    nodes = sum(one.numbers[0] for one in getattr(case, "ops", ()) if one.name == "commit")
    return (case.num_drafts, lengths, numbers + names + changed + added + nodes + getattr(case, "eos_idx", 0))


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


def test_a_tree_that_fails_in_certain_sizes_only_is_cut_to_the_least_of_them() -> None:
    """No node can go alone, and the layout cannot change alone, since whole paths have more rows."""
    case = TreeCase(prompt=(0,), tokens=(0,) * 10, parents=(-1, 0, 0, *range(7)), layout="path_batch")

    def fails(one: Case) -> bool:
        num_rows = one.num_drafts + 1
        if one.layout == "path_batch":
            num_rows = sum(len(path) for path in DraftTree.of(one.tokens, one.parents).paths())
        return num_rows % 4 == 0

    assert fails(case)
    smallest = reduce_case(case, fails, max_checks=1000)
    assert smallest == TreeCase(prompt=(0,), tokens=(0,) * 4, parents=(-1, 0, 1, 2))


def test_the_lowest_model_that_fails_is_taken() -> None:
    smallest = reduce_case(TreeCase(model=8), lambda one: one.model in (6, 8), max_checks=100)
    assert smallest == TreeCase(model=6)


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
