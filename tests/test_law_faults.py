"""Faults of sampled acceptance: the law in each record is that of the planted step, and what is off is caught."""

from __future__ import annotations

from typing import Any

import pytest
from sessions import session_on
from torch import Tensor

from specbench.cases import LawCase
from specbench.checks import law as checks
from specbench.checks.law import completed, emitted_by, rows_of, sampling_of
from specbench.claims import CLAIMS
from specbench.fault_catalogue import catalogue
from specbench.judge import Failed
from specbench.law.joint import total_variation
from specbench.law.scripted import COIN_BITS
from specbench.law.toys import Toy
from specbench.profiles import PROFILES
from specbench.reference.faults import law, law_params
from specbench.reference.faults.bank import FAULTS
from specbench.reference.faults.fault import Fault
from specbench.reference.steps import STEPS
from specbench.steps import Steps
from specbench.tree import DraftTree
from specbench.types import VerifyResult

OURS = {one.id: one for one in (*law.FAULTS, *law_params.FAULTS)}
MEASURED = [one for one in OURS.values() if one.tv is not None]
CHEAP = ("law.support", "greedy.temperature_zero", "sampler.law")
# One of each kind of mistake: `specbench faults` judges them all, this one here within a minute.
SMALL = ("correction_from_p", "refused_not_struck", "q_of_next_row", "sampled_own_row", "temperature_not_on_bonus")


class Step:
    """A sampled step as a verifier."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def verify(self, tree: DraftTree, target_logits: Tensor, **rest: Any) -> VerifyResult:
        return self._steps.sample(tree, target_logits, **rest)


def distance(steps: Steps, case: LawCase) -> float:
    """Total variation of one round's law from the target's, every draft and every coin gone through."""
    toy, sampling = Toy(case.vocab_size, case.seed), sampling_of(case)
    emitted = emitted_by(Step(steps), case, toy, sampling).law  # type: ignore[arg-type]
    num_tokens = max(map(len, emitted))
    row_behind = rows_of(toy, sampling)
    right = completed({(): 1.0}, row_behind, num_tokens)
    return float(total_variation(completed(emitted, row_behind, num_tokens), right))


def test_there_are_at_least_thirty_of_them_and_all_are_in_the_bank() -> None:
    assert len(OURS) >= 30
    assert all(FAULTS[name] is one for name, one in OURS.items())


@pytest.mark.parametrize("case", [law.CHOSEN, law.DRAWN, law.DISTINCT, law.CHAIN, law_params.COLD_TOP_P], ids=str)
def test_the_walk_that_they_change_is_lossless(case: LawCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise what is recorded would be the walk's own mistake. Here every bit of a coin counts."""
    monkeypatch.setattr(checks, "COIN_BITS", COIN_BITS)
    assert distance(law.accepting(law.Walk)(STEPS), case) < 1e-12


@pytest.mark.parametrize("fault", MEASURED, ids=lambda one: one.id)
def test_the_recorded_total_variation_is_that_of_the_planted_step(fault: Any) -> None:
    assert distance(fault.plant(STEPS), fault.toy) == pytest.approx(fault.tv, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "by_hand"),
    [
        # p = (4, 2, 5)/11 behind the root; tokens 1 and 0 are drafted, kept with 2/11 and (9/11)(4/9), so that both are
        # refused with 5/11, and then only token 2 may come: from p it is another one with probability 6/11.
        ("correction_from_p", 5 / 11 * 6 / 11),
        # The first draft, of probability 2/11, always comes.
        ("sampled_first_unverified", 9 / 11),
        # One coin for both: the second, kept below 4/9, is so below 4/9 - 2/11 of all coins instead of 4/11.
        ("verifiers_coin_for_siblings", 4 / 11 - (4 / 9 - 2 / 11)),
    ],
)
def test_a_recorded_total_variation_is_the_one_worked_out_by_hand(name: str, by_hand: float) -> None:
    assert OURS[name].tv == pytest.approx(by_hand, abs=1e-6)


def test_every_recorded_total_variation_is_one_that_a_claim_would_see() -> None:
    assert [one.id for one in MEASURED if not 1e-5 < (one.tv or 0.0) <= 1.0] == []


def test_what_has_a_total_variation_belongs_to_a_claim_about_the_law_of_one_round() -> None:
    assert {one.claim for one in MEASURED} == {"law.exact", "law.params", "law.acceptance_bound"}


def test_the_page_has_a_column_for_it_where_a_class_has_one() -> None:
    one = Fault("so_off", "rng/seed", "a", "b", "law.exact", tv=0.1234, toy=law.CHAIN)
    other = Fault("not_taken", "rng/seed", "a", "b", "law.seed")
    assert catalogue([one, other], [])[-4:] == [
        "| fault | what it does | shows with | needs | caught by | TV | origin |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| `so_off` | a | b |  | `law.exact` | 0.12 |  |",
        "| `not_taken` | a | b |  | `law.seed` |  |  |",
    ]


def test_a_claim_of_the_first_level_is_told_by_whole_generations_and_has_none() -> None:
    assert [one.id for one in OURS.values() if CLAIMS[one.claim].level == 1 and one.tv is not None] == []


@pytest.mark.parametrize("name", [*SMALL, *(one.id for one in OURS.values() if one.claim in CHEAP)])
def test_it_is_caught_by_its_own_claim(name: str) -> None:
    session = session_on(OURS[name].make(), name="planted", profile=PROFILES["standard"], seed=7)
    with pytest.raises(Failed):
        session.judge(OURS[name].claim, "tiny-fp64")
