"""The oldest planted faults are caught by the suite itself, on cases small enough to think through; `specbench faults`
runs them all."""

from __future__ import annotations

import pytest
from sessions import session_on

from specbench.cases import Case
from specbench.claims import DECODER_CLAIMS
from specbench.judge import Failed, parse_replay
from specbench.profiles import PROFILES
from specbench.record import BUG, EQUAL
from specbench.reference.faults.bank import FAULTS
from specbench.reference.faults.equivalent import EQUIVALENT

# What the first release must catch, by name, so that losing one from the bank is seen.
PLANTED = {
    "future_leak",
    "sibling_leak",
    "cousin_leak",
    "missing_ancestor",
    "one_layer_mask",
    "own_row",
    "index_position",
    "base_not_advanced",
    "no_rollback",
    "first_rows",
    "values_not_moved",
    "first_unverified",
    "bonus_row",
    "eos_mid_path",
}
# What a fault must leave alone for the claims to tell it apart: these hold although the decoder is broken.
STILL_HOLDS = {
    "one_layer_mask": ["tree.mask", "tree.positions", "greedy.walk"],
    "index_position": ["tree.mask", "greedy.walk"],
    "base_not_advanced": ["tree.mask", "tree.positions", "tree.logits", "greedy.walk"],
    "no_rollback": ["tree.mask", "tree.positions", "tree.layers", "tree.logits", "greedy.walk"],
    "first_rows": ["tree.mask", "tree.positions", "tree.layers", "tree.logits", "greedy.walk"],
    "values_not_moved": ["tree.mask", "tree.positions", "tree.layers", "tree.logits", "greedy.walk"],
    "own_row": ["tree.mask", "tree.logits", "kv.commit", "kv.rollback"],
    "first_unverified": ["tree.mask", "tree.logits", "kv.commit", "kv.rollback"],
    "bonus_row": ["tree.mask", "tree.logits", "kv.commit", "kv.rollback"],
    "eos_mid_path": ["tree.logits", "kv.commit", "greedy.walk", "greedy.lossless", "progress"],
}


def test_the_bank_holds_the_faults_of_the_first_release() -> None:
    assert set(FAULTS) >= PLANTED


def test_the_bank_is_as_wide_as_the_catalogue_says() -> None:
    assert len(FAULTS) >= 150
    assert len({one.fault_class for one in FAULTS.values()}) >= 35
    assert sum(bool(one.subtle) for one in FAULTS.values()) >= 60
    assert len(EQUIVALENT) <= 0.05 * len(FAULTS)


@pytest.mark.parametrize("fault", sorted(PLANTED))
def test_a_planted_fault_is_caught_on_trees_of_at_most_four_drafts(fault: str) -> None:
    """Through the very session that `pytest suites/consistency --target` runs, on the exact tiny models."""
    session = session_on(FAULTS[fault].make(), name="planted", profile=PROFILES["standard"], seed=7)
    with pytest.raises(Failed):
        session.judge(FAULTS[fault].claim, "tiny-fp64")
    caught = session.run.find(FAULTS[fault].claim, "tiny-fp64")
    assert caught.verdict == BUG
    assert largest_tree(parse_replay(caught.replay)[2]) <= 4


@pytest.mark.parametrize("fault", sorted(STILL_HOLDS))
def test_claims_that_a_fault_does_not_touch_still_hold(fault: str) -> None:
    """Otherwise the line that narrows a failure down would point anywhere."""
    session = session_on(FAULTS[fault].make(), name="planted", seed=7)
    assert {session.judge(claim, "tiny-fp64").verdict for claim in STILL_HOLDS[fault]} == {EQUAL}


def test_every_claim_has_a_fault_that_it_must_catch() -> None:
    """Those about kernels have theirs in kernels/faults: see suites/kernels/test_attention_faults.py."""
    judged_here = set(DECODER_CLAIMS)
    assert judged_here - {one.claim for one in FAULTS.values()} == set()


def largest_tree(case: Case) -> int:
    """Drafted nodes of the largest tree in a case."""
    trees = [one.tokens for one in getattr(case, "rounds", ())] + [one.parents for one in getattr(case, "ops", ())]
    trees += [one.tokens for row in getattr(case, "rows", ()) for one in row.rounds]
    trees += [one.tokens for one in getattr(case, "walks", ())]
    return max((len(one) - 1 for one in trees), default=case.num_drafts)
