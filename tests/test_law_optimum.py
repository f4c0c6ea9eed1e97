"""specbench.law.optimum: bounds by hand, by brute force over whole flows, and by rules that are known to reach them."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.law.joint import draft_law, round_law
from specbench.law.optimum import best_by_nodes, best_by_paths, node_optimum, transport
from specbench.law.toys import START, Drafting, Parents, Toy
from specbench.reference.verify.rules import RULES

F = Fraction
CHAIN: Parents = (-1, 0, 1)
PAIR: Parents = (-1, 0, 0)
UNEVEN: Parents = (-1, 0, 0, 1)
TWO_ONE: Parents = (-1, 0, 0, 1, 2)
TOYS = [Toy(size, seed) for size in (3, 4) for seed in range(8)]


def accepted(name: str, toy: Toy, shape: Parents, drafting: Drafting) -> Fraction:
    return round_law(RULES[name].verify, toy, START, shape, drafting).expected_accepted


def drafted_sets(toy: Toy, shape: Parents, drafting: Drafting) -> dict[frozenset[int], Fraction]:
    law: dict[frozenset[int], Fraction] = {}
    for drafted, mass in draft_law(toy, START, shape, drafting):
        tokens = frozenset(drafted.tree.token_list[1:])
        law[tokens] = law.get(tokens, F(0)) + mass
    return law


def test_single_draft_is_accepted_at_best_with_the_overlap() -> None:
    found = [node_optimum(toy.p(START), drafted_sets(toy, (-1, 0), "iid")) for toy in TOYS]
    assert found == [sum(map(min, toy.p(START), toy.q(START))) for toy in TOYS]


BY_HAND = {
    # both drafts are always 0: p(0)
    "copies": ((F(1, 3), F(2, 3)), {frozenset([0]): F(1)}, F(1, 3)),
    # two of three tokens are always drafted
    "two of three": ((F(1, 3), F(1, 3), F(1, 3)), {frozenset([0, 1]): F(1)}, F(2, 3)),
    # iid from (1/2, 1/2): {0} and {1} have 1/4 each, {0, 1} has 1/2. H = {1}: 1/10 + 3/4
    "two coins": (
        (F(9, 10), F(1, 10)),
        {frozenset([0]): F(1, 4), frozenset([1]): F(1, 4), frozenset([0, 1]): F(1, 2)},
        F(17, 20),
    ),
    "disjoint": ((F(1), F(0)), {frozenset([1]): F(1)}, F(0)),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_optimum_of_a_node_by_hand(case: str) -> None:
    p, drafts, expected = BY_HAND[case]
    assert node_optimum(p, drafts) == expected


def test_goods_stay_where_moving_them_would_lose() -> None:
    """b could bring 1/2 to x, worth 5 there, and nothing more: that a then has no place for its own is the best."""
    supply = {"a": F(1, 2), "b": F(1, 2)}
    assert transport(supply, {"a": {"x": 1}, "b": {"x": 5, "y": 1}}, {"x": F(1, 2), "y": F(1, 2)}) == F(5, 2)


def brute_force(supply: Mapping[str, int], worth: Mapping[str, Mapping[str, int]], demand: Mapping[str, int]) -> int:
    """The best of all whole flows; some best flow is whole where all limits are."""
    ways = [(source, sink) for source, sinks in worth.items() for sink in sinks]
    best = 0
    for amounts in product(*(range(min(supply[source], demand[sink]) + 1) for source, sink in ways)):
        given = {one: sum(n for n, way in zip(amounts, ways, strict=True) if way[0] == one) for one in supply}
        taken = {one: sum(n for n, way in zip(amounts, ways, strict=True) if way[1] == one) for one in demand}
        if all(given[one] <= supply[one] for one in supply) and all(taken[one] <= demand[one] for one in demand):
            gain = sum(n * worth[source][sink] for n, (source, sink) in zip(amounts, ways, strict=True))
            best = max(best, gain)
    return best


@st.composite
def problems(draw: st.DrawFn) -> tuple[dict[str, int], dict[str, dict[str, int]], dict[str, int]]:
    supply = {name: draw(st.integers(0, 3), label=name) for name in "abc"[: draw(st.integers(1, 3))]}
    demand = {name: draw(st.integers(0, 3), label=name) for name in "xy"[: draw(st.integers(1, 2))]}
    worth = {a: {x: draw(st.integers(1, 5)) for x in draw(st.sets(st.sampled_from([*demand])))} for a in supply}
    return supply, worth, demand


@given(problems())
def test_transport_is_the_best_of_all_whole_flows(
    problem: tuple[dict[str, int], dict[str, dict[str, int]], dict[str, int]],
) -> None:
    assert transport(*problem) == brute_force(*problem)


@given(problems())
def test_transport_scales_with_the_goods(
    problem: tuple[dict[str, int], dict[str, dict[str, int]], dict[str, int]],
) -> None:
    supply, worth, demand = problem
    thirds = [{one: F(mass, 3) for one, mass in side.items()} for side in (supply, demand)]
    assert transport(thirds[0], worth, thirds[1]) == F(brute_force(supply, worth, demand), 3)


@pytest.mark.parametrize("drafting", ["iid", "without_replacement", "deterministic"])
def test_bound_of_one_level_is_the_min_cut(drafting: Drafting) -> None:
    found = [best_by_nodes(toy, START, PAIR, drafting) for toy in TOYS]
    assert found == [node_optimum(toy.p(START), drafted_sets(toy, PAIR, drafting)) for toy in TOYS]


REACHED = {
    "chain": ("chain", (-1, 0, 1, 2), "iid"),
    "deterministic tree": ("deterministic", TWO_ONE, "deterministic"),
    "uneven deterministic tree": ("deterministic", UNEVEN, "deterministic"),
}


@pytest.mark.parametrize("case", REACHED)
def test_bound_by_nodes_is_reached_by_the_rule_that_is_optimal_there(case: str) -> None:
    name, shape, drafting = REACHED[case]
    found = [best_by_nodes(toy, START, shape, drafting) for toy in TOYS]
    assert found == [accepted(name, toy, shape, drafting) for toy in TOYS]


def test_copies_lend_each_other_their_children() -> None:
    """The greedy walk goes on below all copies of a token, and nothing beats it at temperature 0."""
    toys = [Toy(3, seed, greedy=True) for seed in range(8)]
    found = [best_by_nodes(toy, START, TWO_ONE, "iid") for toy in toys]
    assert found == [accepted("greedy", toy, TWO_ONE, "iid") for toy in toys]


def test_bound_by_paths_of_a_chain_is_the_overlap_of_p_and_q_over_paths() -> None:
    def overlap(toy: Toy, length: int) -> Fraction:
        total = F(0)
        for path in product(range(toy.vocab_size), repeat=length):
            p = q = F(1)
            for idx, token in enumerate(path):
                p *= toy.p(START + path[:idx])[token]
                q *= toy.q(START + path[:idx])[token]
            total += min(p, q)
        return total

    found = [best_by_paths(toy, START, CHAIN, "iid") for toy in TOYS]
    assert found == [overlap(toy, 1) + overlap(toy, 2) for toy in TOYS]


def test_acceptance_rises_from_recursive_over_k_seq_to_the_optimum() -> None:
    """k-SEQ's rational rho lies up to 1e-3 above the best one."""
    rises = [
        (
            accepted("recursive", toy, PAIR, "iid"),
            accepted("k_seq", toy, PAIR, "iid"),
            best_by_nodes(toy, START, PAIR, "iid"),
        )
        for toy in TOYS
    ]
    assert all(low <= middle + F(1, 1000) and middle <= best for low, middle, best in rises)


def test_no_rule_that_decides_by_nodes_exceeds_their_bound() -> None:
    kinds: list[tuple[str, Drafting]] = [
        ("recursive", "iid"), ("without_replacement", "without_replacement"), ("k_seq", "iid"),
        ("deterministic", "iid"), ("sample_and_match", "iid"), ("sample_and_match", "without_replacement"),
    ]  # fmt: skip
    shapes = [PAIR, UNEVEN, TWO_ONE]
    excess = [
        accepted(name, toy, shape, drafting) - best_by_nodes(toy, START, shape, drafting)
        for name, drafting in kinds
        for toy in TOYS[:4]
        for shape in shapes
    ]
    assert max(excess) <= 0


def test_whole_paths_exceed_the_bound_by_nodes_and_keep_their_own() -> None:
    cases = [("block", CHAIN), ("traversal", TWO_ONE)]
    found = [
        (
            accepted(name, toy, shape, "iid"),
            best_by_nodes(toy, START, shape, "iid"),
            best_by_paths(toy, START, shape, "iid"),
        )
        for name, shape in cases
        for toy in TOYS
    ]
    assert any(value > by_nodes for value, by_nodes, _ in found) and all(value <= top for value, _, top in found)
