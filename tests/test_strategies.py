"""specbench.strategies: the smallest case of each, and what an ordinary run is made of.

Statistics are of cases drawn with a fixed seed, so they cannot change between two runs of one version.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from random import Random
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, seed, settings
from hypothesis import strategies as st

from specbench.banks import TinyBank
from specbench.cases import (
    ChunkCase,
    CommitCase,
    CommitRound,
    GenerationCase,
    PerturbedCase,
    ProcessorCase,
    StopCase,
    TreeCase,
    WalkCase,
)
from specbench.checks.generation import make_drafter
from specbench.claims import DECODER_CLAIMS
from specbench.clock import Clock
from specbench.loading import Target
from specbench.reduce import reduce_case
from specbench.reference.target import ReferenceTarget
from specbench.strategies import MAX_DRAFTS, RUN, case_kind, strategy_for
from specbench.subjects import Subject
from specbench.watchdog import Watchdog

QUIET = {
    "database": None,
    "deadline": None,
    "derandomize": False,
    "suppress_health_check": list(HealthCheck),
    "report_multiple_bugs": False,
}
NUM_CASES = 300


@cache
def subject() -> Subject:
    bank = TinyBank("fp64", torch.float64)
    return Subject(Target("it", ReferenceTarget()), bank, clock=Clock(), watchdog=Watchdog(0, print))


def smallest(strategy: st.SearchStrategy[Any], condition: Any) -> Any:
    once = settings(phases=[Phase.generate, Phase.shrink], **QUIET)
    return find(strategy, condition, settings=once, random=Random(0))


@cache
def drawn(claim: str) -> list[Any]:
    """The cases that a claim would be judged on in a run of 300."""
    cases: list[Any] = []

    @seed(20)
    @settings(max_examples=NUM_CASES, phases=[Phase.generate], **QUIET)
    @given(strategy_for(claim, subject()))
    def collect(case: Any) -> None:
        cases.append(case)

    collect()
    return cases


def widths(case: Any) -> Counter[int]:
    """Nodes by depth, counted along parents."""
    depth = [0]
    for parent in case.parents[1:]:
        depth.append(depth[parent] + 1)
    return Counter(depth)


def num_drafts(case: Any) -> int:
    return len(case.parents) - 1


ONE_ROUND = (CommitRound((0,), (-1,), 0),)
AND_A_RUN = (*ONE_ROUND, RUN)
SMALLEST = {
    "tree.mask": TreeCase(prompt=(0,), tokens=(0,), parents=(-1,)),
    "tree.noninterference": PerturbedCase(prompt=(0,), tokens=(0, 0), parents=(-1, 0), place=1, token=1),
    "tree.sensitivity": PerturbedCase(prompt=(0,), tokens=(0,), parents=(-1,), place=0, token=1),
    "kv.commit": CommitCase(prompt=(0,), rounds=ONE_ROUND, next_roots=(0,), cut=0),
    "greedy.walk": WalkCase(tokens=(0,), parents=(-1,), winners=((0,),), vocab_size=2),
    "greedy.lossless": GenerationCase(prompt=(0,), max_new_tokens=1, rounds=ONE_ROUND, eos_idx=0),
    "progress": GenerationCase(prompt=(0,), max_new_tokens=1, rounds=ONE_ROUND, eos_idx=0),
    "threshold.consistency": GenerationCase(prompt=(0,), max_new_tokens=1, rounds=ONE_ROUND, eos_idx=0),
    "stop.sequences": StopCase(prompt=(0,), max_new_tokens=1, rounds=ONE_ROUND, eos_idx=0, stop_len=1),
    "stop.resume": StopCase(prompt=(0,), max_new_tokens=1, rounds=AND_A_RUN, eos_idx=0, turns=((),)),
    "greedy.repeatable": StopCase(prompt=(0,), max_new_tokens=1, rounds=ONE_ROUND, eos_idx=0, turns=((0,),)),
    "processors.penalties": ProcessorCase(prompt=(0,), max_new_tokens=1, rounds=ONE_ROUND, eos_idx=0),
    "processors.bad_words": ProcessorCase(prompt=(0,), max_new_tokens=1, rounds=ONE_ROUND, eos_idx=0, bans=((0, 1),)),
    "processors.grammar": ProcessorCase(
        prompt=(0,), max_new_tokens=1, rounds=ONE_ROUND, eos_idx=0, grammar=((0, 0), (0, 0))
    ),
    "kv.chunked": ChunkCase(prompt=(0,), tokens=(0,), parents=(-1,)),
    "kv.pages": CommitCase(cache="paged_1", prompt=(0,), rounds=ONE_ROUND, next_roots=(0,), cut=0),
}


@pytest.mark.parametrize("claim", SMALLEST)
def test_the_smallest_case_is_one_token_and_the_first_model(claim: str) -> None:
    assert smallest(strategy_for(claim, subject()), lambda case: True) == SMALLEST[claim]


def test_the_smallest_wide_tree_is_two_siblings() -> None:
    found = smallest(strategy_for("tree.mask", subject()), lambda case: len(set(case.parents)) < len(case.parents))
    assert found == TreeCase(prompt=(0,), tokens=(0, 0, 0), parents=(-1, 0, 0))


def test_a_drawn_tree_with_cousins_is_cut_down_to_two_chains_of_two() -> None:
    """By our own reduction, not by Hypothesis's shrinker: that one's way depends on the modules a run has imported."""

    def has_cousins(case: Any) -> bool:
        grandparents = [case.parents[one] for one in set(case.parents[1:]) if one > 0]
        return len(grandparents) > len(set(grandparents))

    for case in [case for case in drawn("tree.mask") if has_cousins(case)][:10]:
        found = reduce_case(case, has_cousins, max_checks=1000)
        assert (found.prompt, num_drafts(found), widths(found)) == ((0,), 4, Counter({0: 1, 1: 2, 2: 2}))


# See test_machines, and test_kernel_targets for those about kernels.
@pytest.mark.parametrize("claim", [one for one in DECODER_CLAIMS if one != "kv.machine"])
def test_every_claim_draws_the_kind_of_case_that_its_replay_brings(claim: str) -> None:
    first = settings(max_examples=1, phases=[Phase.generate], **QUIET)
    found = find(strategy_for(claim, subject()), lambda case: True, settings=first)
    assert type(found) is case_kind(claim)


TREE_CLAIMS = ("tree.mask", "tree.noninterference", "tree.sensitivity", "greedy.walk")


@pytest.mark.parametrize("claim", TREE_CLAIMS)
def test_the_median_tree_has_eight_drafted_nodes(claim: str) -> None:
    assert median(num_drafts(case) for case in drawn(claim)) >= 8


@pytest.mark.parametrize("claim", TREE_CLAIMS)
def test_half_of_the_trees_branch_at_depth_two_or_below(claim: str) -> None:
    wide = [case for case in drawn(claim) if any(num >= 2 for depth, num in widths(case).items() if depth >= 2)]
    assert len(wide) >= NUM_CASES / 2


@pytest.mark.parametrize("claim", TREE_CLAIMS)
def test_trees_have_up_to_sixty_four_drafted_nodes(claim: str) -> None:
    sizes = [num_drafts(case) for case in drawn(claim)]
    assert (min(sizes) <= 1, max(sizes) > 40, max(sizes) <= MAX_DRAFTS == 64) == (True, True, True)


ODD = {
    "chain": lambda case: num_drafts(case) > 2 and max(widths(case).values()) == 1,
    "star": lambda case: num_drafts(case) > 2 and set(case.parents[1:]) == {0},
    "full binary": lambda case: num_drafts(case) > 5 and all(p == (n - 1) // 2 for n, p in enumerate(case.parents)),
    "ragged": lambda case: len({case.parents.count(node) for node in range(len(case.parents))}) > 2,
    "duplicate siblings": lambda case: len(set(zip(case.parents, case.tokens, strict=True))) < len(case.tokens),
    "one token in two branches": lambda case: any(
        case.tokens[one] == case.tokens[other] and case.parents[one] != case.parents[other]
        for one in range(1, len(case.tokens))
        for other in range(1, one)
    ),
    "root alone": lambda case: num_drafts(case) == 0,
    "empty prefix": lambda case: len(case.prompt) == 1,
    "long prefix": lambda case: len(case.prompt) > 20,
    "vocabulary of two": lambda case: subject().vocab_size(case.model) == 2,
    "path batch": lambda case: case.layout == "path_batch",
    "preallocated": lambda case: case.cache == "preallocated",
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_cases_occur_in_every_run(kind: str) -> None:
    """Five of 300 at least, so that the 120 of a standard run have one as well."""
    assert sum(map(ODD[kind], drawn("tree.mask"))) >= 5


def test_every_model_of_the_bank_is_drawn() -> None:
    assert {case.model for case in drawn("tree.mask")} == set(range(subject().bank.num_models))


def test_a_change_always_changes_something() -> None:
    def before(case: PerturbedCase) -> int:
        return (*case.prompt[:-1], *case.tokens)[case.place]

    both = [*drawn("tree.noninterference"), *drawn("tree.sensitivity")]
    assert not [case for case in both if case.token == before(case)]


def test_interference_is_judged_at_drafted_nodes_and_sensitivity_anywhere() -> None:
    drafted = [case.place >= len(case.prompt) for case in drawn("tree.noninterference")]
    anywhere = {case.place >= len(case.prompt) for case in drawn("tree.sensitivity")}
    assert (all(drafted), anywhere) == (True, {True, False})


def test_commits_accept_nothing_something_and_everything() -> None:
    rounds = [one for case in drawn("kv.commit") for one in case.rounds if len(one.tokens) > 2]
    kinds = Counter(
        "nothing" if one.accept == 0 else "leaf" if one.accept not in one.parents else "inner" for one in rounds
    )
    assert min(kinds[kind] for kind in ("nothing", "leaf", "inner")) >= 20


def test_commits_go_off_the_first_rows_of_the_block() -> None:
    """What `first rows` compaction gets wrong: an accepted path that is not 1, 2, 3, ... in memory."""
    rounds = [one for case in drawn("kv.commit") for one in case.rounds]
    assert sum(one.accept > 0 and one.parents[one.accept] != one.accept - 1 for one in rounds) >= len(rounds) / 4


def test_duplicate_siblings_share_the_winners_of_their_row() -> None:
    """They spell one text, and a model gives one text one row."""
    for case in drawn("greedy.walk"):
        by_text: dict[tuple[int, ...], tuple[int, ...]] = {}
        texts: list[tuple[int, ...]] = []
        for node, parent in enumerate(case.parents):
            texts.append((*texts[parent], case.tokens[node]) if node else ())
            assert by_text.setdefault(texts[node], case.winners[node]) == case.winners[node]


def test_walks_meet_ties_and_accepted_paths_of_two() -> None:
    cases = drawn("greedy.walk")
    ties = sum(any(len(one) > 1 for one in case.winners) for case in cases)

    def accepts_two(case: WalkCase) -> bool:
        said = [min(one) for one in case.winners]
        fits = {node for node in range(1, len(said)) if case.tokens[node] == said[case.parents[node]]}
        return any(case.parents[node] in fits and case.parents[case.parents[node]] == 0 for node in fits)

    assert (ties >= 60, sum(map(accepts_two, cases)) >= 60) == (True, True)


@pytest.mark.parametrize("claim", ["greedy.lossless", "progress"])
def test_the_median_generation_takes_three_rounds(claim: str) -> None:
    one = subject()
    num_rounds = []
    for case in drawn(claim)[::10]:
        decoder = one.open(case, drafter=make_drafter(one, case))
        num_rounds.append(len(decoder.generate(case.prompt, max_new_tokens=case.max_new_tokens).rounds))
    assert median(num_rounds) >= 3


def test_generations_draft_for_targets_that_take_a_drafter_only() -> None:
    """A target that decodes by itself gets prompts and lengths; a script it cannot play would not shrink."""
    alone = SimpleNamespace(
        bank=SimpleNamespace(num_models=1), vocab_size=lambda idx: 5, has=frozenset({"generate"}),
        cache_kinds=("contiguous",), layouts=("tree_mask",),
    )  # fmt: skip
    found = find(
        strategy_for("greedy.lossless", alone), lambda case: case.max_new_tokens > 1, settings=settings(**QUIET)
    )  # type: ignore[arg-type]
    assert found == GenerationCase(prompt=(0,), max_new_tokens=2, rounds=(), eos_idx=0)


@given(st.data())
@settings(max_examples=20, **QUIET)
def test_cache_kinds_and_layouts_are_the_targets_own(data: st.DataObject) -> None:
    """A target whose build takes no `layout` would otherwise be expected to forward the rows of a batch of paths."""
    plain = SimpleNamespace(
        bank=SimpleNamespace(num_models=1),
        vocab_size=lambda idx: 5,
        cache_kinds=("contiguous",),
        layouts=("tree_mask",),
    )
    case = data.draw(strategy_for("tree.mask", plain))  # type: ignore[arg-type]
    assert (case.cache, case.layout) == ("contiguous", "tree_mask")
