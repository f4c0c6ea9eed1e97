"""Scenarios S13 (self-draft under every accept pattern) and S14 (degenerate trees) of the bank of real faults.

They run through the claims' own checks, on one case each, so that what is proved here is what a target is judged by.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch

from specbench.banks import TinyBank
from specbench.cases import Case, CommitRound, DrafterCase, GenerationCase
from specbench.checks import CHECKS
from specbench.claims import AcceptanceMismatch, DrafterStale, SelfDraftRejected
from specbench.clock import Clock
from specbench.loading import Target
from specbench.protocols import SeededCoins
from specbench.record import ClaimRecord
from specbench.reference import autoregressive
from specbench.reference.decoder import Decoder
from specbench.reference.drafters.by_name import DRAFTERS
from specbench.reference.drafters.model import ModelDrafter
from specbench.reference.drafters.scripted import RoundScript, ScriptedDrafter
from specbench.reference.faults.bank import FAULTS
from specbench.reference.model import LlamaConfig, tiny_llama
from specbench.reference.target import ReferenceTarget
from specbench.subjects import Subject
from specbench.tree import DraftTree, root_only
from specbench.types import GREEDY
from specbench.watchdog import Watchdog

MODEL = tiny_llama(LlamaConfig(31, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8), seed=0)
PROMPT = (3, 1, 4, 1, 5)
PATTERNS = list(itertools.product(range(4), repeat=3))  # levels kept in each of three rounds of a chain of three


def self_draft_all(target: ReferenceTarget, drafter: str, patterns: list[tuple[int, ...]]) -> ClaimRecord:
    """Each pattern is the levels kept in the first rounds; after them the drafter's own drafts are judged."""
    subject = subject_of(target)
    record = ClaimRecord("drafter.self_draft", subject.name)
    for levels in patterns:
        script = tuple(CommitRound((0,) * 4, (-1, 0, 1, 2), level) for level in levels)
        case = GenerationCase(prompt=PROMPT, max_new_tokens=18, rounds=script, drafter=drafter)
        CHECKS["drafter.self_draft"](subject, case, record)
    return record


@pytest.mark.parametrize(("drafter", "num_rounds"), [("self_chain", 2), ("self_tree", 2), ("own_2", 3)])
def test_s13_a_self_draft_is_accepted_after_every_pattern_of_forced_accepts(drafter: str, num_rounds: int) -> None:
    """own_2 is the drafter that keeps rows of its own."""
    patterns = list(itertools.product(range(4), repeat=num_rounds))
    assert self_draft_all(ReferenceTarget(), drafter, patterns).num_ties == 0


def test_s13_the_forced_rounds_refuse_where_the_script_says() -> None:
    """Otherwise the scenario would prove nothing about rounds after a refusal. With 1 and 0 levels kept, 2 + 1 tokens
    come by force, and the 15 that are left take four rounds of four."""
    assert self_draft_all(ReferenceTarget(), "self_chain", [(1, 0)]).num_rounds == 6


@pytest.mark.parametrize("fault", ["drafter_not_rolled_back", "drafter_hole", "drafter_position"])
def test_s13_a_drafter_out_of_step_is_seen_by_acceptance_alone(fault: str) -> None:
    """Its output is right: no claim about tokens can fail."""
    with pytest.raises(SelfDraftRejected):
        self_draft_all(FAULTS[fault].make(), "own_0", PATTERNS)
    target = FAULTS[fault].make()
    drafter = target.build_drafter(MODEL, name="faulty")
    tokens = target.build(MODEL, drafter).generate(PROMPT, max_new_tokens=20).tokens
    assert tokens == autoregressive.generate(MODEL, PROMPT, max_new_tokens=20).tokens


SHAPES = {
    "single node": RoundScript((0, 7), (-1, 0), 1),
    "star": RoundScript((0, 7, 8, 9, 10), (-1, 0, 0, 0, 0), 4),
    "width one": RoundScript((0, 7, 8, 9), (-1, 0, 1, 2), 2),
    "empty tree": RoundScript((0,), (-1,), 0),
    "duplicates": RoundScript((0, 7, 7, 8, 8), (-1, 0, 0, 1, 2), 2),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_s14_a_degenerate_tree_loses_no_token_and_no_acceptance(shape: str) -> None:
    script = SHAPES[shape]
    plain = autoregressive.generate(MODEL, PROMPT, max_new_tokens=20).tokens
    drafter = ScriptedDrafter([*PROMPT, *plain], [script], vocab_size=31)
    generation = Decoder(MODEL, drafter).generate(PROMPT, max_new_tokens=16)
    depth = int(DraftTree.of(script.tokens, script.parents).depth[script.accept])
    assert generation.tokens == plain[:16]
    assert {len(one.path) for one in generation.rounds[:-1]} == {depth}


@pytest.mark.parametrize("shape", SHAPES)
def test_s14_the_rounds_of_degenerate_trees_add_up(shape: str) -> None:
    script = SHAPES[shape]
    rounds = (CommitRound(script.tokens, script.parents, script.accept),)
    check("metrics.acceptance", GenerationCase(prompt=PROMPT, max_new_tokens=7, rounds=rounds, eos_idx=-1))


def test_s14_a_bonus_token_that_is_counted_as_a_draft_is_seen_on_a_single_node() -> None:
    rounds = (CommitRound((0, 7), (-1, 0), 1),)
    case = GenerationCase(prompt=PROMPT, max_new_tokens=6, rounds=rounds, eos_idx=-1)
    with pytest.raises(AcceptanceMismatch, match="acceptance_rate is 2, its rounds say 1"):
        check("metrics.acceptance", case, FAULTS["bonus_counted"].make())


def drafted(name: str, *, max_nodes: int, max_depth: int = 4, temperature: float = 0.0) -> DraftTree:
    return DRAFTERS[name](MODEL).draft(
        [*PROMPT, *PROMPT],
        max_nodes=max_nodes,
        max_depth=max_depth,
        sampling=replace(GREEDY, temperature=temperature),
        coins=SeededCoins(0),
    )


@pytest.mark.parametrize("name", DRAFTERS)
def test_s14_a_budget_of_one_node_is_one_node_and_one_of_none_the_root(name: str) -> None:
    assert drafted(name, max_nodes=1).num_drafts == 1
    assert drafted(name, max_nodes=0).token_list == root_only(PROMPT[-1]).token_list
    assert drafted(name, max_nodes=9, max_depth=0).token_list == root_only(PROMPT[-1]).token_list


def test_s14_a_tree_of_width_one_is_the_chain() -> None:
    chain = ModelDrafter(MODEL, widths=(1, 1, 1))
    tree = chain.draft(list(PROMPT), max_nodes=9, max_depth=9, sampling=GREEDY, coins=SeededCoins(0))
    assert tree.parent_list == [-1, 0, 1, 2]


def test_s14_only_draws_with_replacement_may_repeat_a_sibling() -> None:
    """At temperature 0 every draw of the iid drafter is the argmax: two siblings alike, and well-formed."""
    tree = drafted("sampled_iid", max_nodes=2)
    assert tree.token_list[1] == tree.token_list[2] and tree.proposal == "iid"
    assert drafted("sampled_distinct", max_nodes=2, max_depth=1).num_drafts == 1


@pytest.mark.parametrize("accepts", list(itertools.product((0, 1, 2, 3, -1), repeat=3)), ids=str)
def test_s3_a_drafter_with_rows_of_its_own_survives_every_accept_history(accepts: tuple[int, ...]) -> None:
    """0, partial and full accepts and plain steps in every order, each followed by the token 9."""
    check("drafter.state", DrafterCase(prompt=PROMPT, accepts=accepts, followers=(9, 9, 9), drafter="caching"))


@pytest.mark.parametrize(("fault", "accept"), [("drafter_hole", 3), ("drafter_not_rolled_back", 0)])
def test_s3_a_hole_after_a_full_accept_and_a_lingering_row_are_seen(fault: str, accept: int) -> None:
    case = DrafterCase(prompt=PROMPT, accepts=(accept,), followers=(9,), drafter="faulty")
    with pytest.raises(DrafterStale, match=f"after accepts {accept} the draft is not what a fresh drafter drafts"):
        check("drafter.state", case, FAULTS[fault].make())


def check(claim: str, case: Case, target: ReferenceTarget | None = None) -> None:
    subject = reference() if target is None else subject_of(target)
    CHECKS[claim](subject, case, ClaimRecord(claim, subject.name))


@cache
def reference() -> Subject:
    return subject_of(ReferenceTarget())


def subject_of(target: ReferenceTarget) -> Subject:
    """The target on the exact tiny models."""
    bank = TinyBank("fp64", torch.float64)
    return Subject(Target("it", target), bank, clock=Clock(), watchdog=Watchdog(0, print))
