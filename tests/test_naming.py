"""The name of a fault: from the target's own numbers, from the shape of what is wrong, or honestly unknown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from sessions import session_on

from specbench.claims import CLAIMS
from specbench.judge import Failed, RunSession
from specbench.naming import fingerprint
from specbench.naming.evidence import Evidence
from specbench.naming.recording import Recording, changes_nothing
from specbench.naming.structure import EXPLAINED_BY
from specbench.naming.suspect import Suspect, as_line
from specbench.naming.trace import Leaf, Trace, differing
from specbench.profiles import PROFILES
from specbench.record import BUG
from specbench.reference.faults.bank import FAULTS
from specbench.reference.faults.fault import Fault
from specbench.reference.steps import STEPS
from specbench.reference.target import ReferenceTarget
from specbench.steps import FlatTree, Steps
from specbench.tree import DraftTree
from specbench.types import Generation, VerifyResult

# A fault of each kind of evidence, named although its whole class is unknown to the fingerprint: claim and column as
# the bank says.
BY_STRUCTURE = {
    "sibling_leak": "not on its path",
    "future_leak": "drafted behind it",
    "missing_ancestor": "misses node 0 on its path",
    "index_position": "stands at position",
    "heads_modulo": "grouped heads",
    "no_rollback": "as many as drafts were rejected",
    "first_rows": "belongs to another node",
    "state_after_block": "recurrent layers",
    "siblings_share_a_slot": "with a window",
    "own_row": "own row",
    "bonus_row": "the token behind it",
    "eos_mid_path": "the end is not",
    "q_before_temperature": "not the law",
    "grown_one_row_short": "does not fit",
    "dead_row_times_zero": "beyond a plain round",
    "tiled_chunks": "a long context",
    "no_bonus_on_full_accept": "decides rightly and emits other tokens",
    "drafts_kept": "an earlier request",
    "longer_text_found": "begins alike",
    "count_zero_wraps": "nothing is accepted",
    "two_rows_at_least": "other roots",
    "first_trees_parents": "other parents",
    "stale_sampling": "other penalties than their neighbours",
    "twins_share_a_cache": "the same prompt",
    "worst_first": "least likely",
    "drafter_normed_twice": "nearly right",
    "padded_ids_clamped": "the last token of the vocabulary",
    "drafts_beyond_the_limit": "than can be emitted",
}


def named(adapter: Any, claim: str, *, subject: str = "tiny-fp64") -> tuple[str, Evidence | None, str]:
    """The line, the evidence and the message of a claim that fails."""
    session = naming_session(adapter)
    with pytest.raises(Failed) as failed:
        session.judge(claim, subject)
    return session.run.claims[-1].likely, session.evidence, str(failed.value)


def naming_session(adapter: Any) -> RunSession:
    return session_on(adapter, profile=PROFILES["standard"], seed=7, naming=True)


def test_a_failure_says_which_planted_fault_gives_the_same_numbers() -> None:
    line, found, message = named(FAULTS["values_not_moved"].make(), "kv.commit")
    assert line.startswith(
        "kv-wrong-path-compacted (values_not_moved): keys of the accepted path are gathered, values are not: "
        "reproduces all "
    )
    assert "differing answers, first seen in round 1" in line
    assert f"\n  likely    {line}\n  reproduce " in message
    assert found is not None and "values_not_moved" in found.near_copies("values_not_moved")


@pytest.mark.parametrize("fault", BY_STRUCTURE)
def test_the_class_is_told_without_any_planted_fault_of_it(fault: str) -> None:
    _, found, _ = named(FAULTS[fault].make(), FAULTS[fault].claim)
    assert found is not None
    first = found.rank(ignore_classes={FAULTS[fault].fault_class})[0]
    assert (first.fault_class, first.fault) == (FAULTS[fault].fault_class, "")
    assert BY_STRUCTURE[fault] in first.evidence


def test_a_fault_of_a_claim_above_is_named_where_it_begins() -> None:
    """greedy.lossless fails because of the mask, and says so."""
    line, found, _ = named(FAULTS["sibling_leak"].make(), "greedy.lossless")
    assert found is not None and found.finding.claim == "tree.mask"
    assert line.startswith("mask-leak (sibling_leak): ")


def test_a_fault_that_no_one_planted_gets_its_class_by_structure() -> None:
    """A draft sees the nodes two places before it in memory, ancestors or not."""

    def plant(steps: Steps) -> Steps:
        def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
            flat = steps.flatten(tree, prefix_len)
            mask = flat.mask.clone()
            for row in range(3, len(mask)):
                mask[row, row - 2] = True
            return replace(flat, mask=mask)

        return replace(steps, flatten=flatten)

    line, found, _ = named(ReferenceTarget(plant), "tree.mask")
    assert found is not None and not any(one.exact for one in found.matches)
    assert line.startswith("mask-leak: node ")


class _Echo:
    """A black box that says its last token again and again."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def generate(self, prompt: list[int], *, max_new_tokens: int, **keywords: Any) -> list[int]:
        return [prompt[-1]] * max_new_tokens


class _EchoTarget:
    def build(self, model: Any, drafter: Any) -> _Echo:
        return _Echo(model)


def test_what_nothing_explains_is_unknown_rather_than_guessed() -> None:
    assert named(_EchoTarget(), "greedy.lossless")[0] == "unknown"


def test_naming_changes_no_verdict_and_no_case() -> None:
    """It comes last, and looks at the target in other instances."""
    plain = session_on(FAULTS["first_rows"].make(), profile=PROFILES["standard"], seed=7)
    naming = naming_session(FAULTS["first_rows"].make())
    for session in (plain, naming):
        with pytest.raises(Failed):
            session.judge("kv.commit", "tiny-fp64")
    mine, its = (session.run.claims[-1] for session in (plain, naming))
    assert (mine.verdict, mine.replay, mine.num_cases) == (its.verdict, its.replay, its.num_cases)
    assert mine.likely == ""


def test_a_verdict_is_kept_when_looking_for_the_fault_breaks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **keywords: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("specbench.judge.root_of", interrupted)
    session = naming_session(FAULTS["first_rows"].make())
    with pytest.raises(KeyboardInterrupt):
        session.judge("kv.commit", "tiny-fp64")
    record = session.run.claims[-1]
    assert record.verdict == BUG and record.replay and "CommitMismatch" in record.message


def test_looking_stops_when_a_run_has_spent_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    session = naming_session(FAULTS["sibling_leak"].make())
    monkeypatch.setattr(session, "_seconds_naming", 1e6)
    with pytest.raises(Failed):
        session.judge("tree.mask", "tiny-fp64")
    assert session.run.claims[-1].likely.startswith("not looked for: 60 s of this run")


def test_a_column_of_lower_precision_is_named_as_the_exact_one() -> None:
    session = naming_session(FAULTS["sibling_leak"].make())
    for subject in ("tiny-fp64", "tiny-bf16"):
        with pytest.raises(Failed):
            session.judge("tree.mask", subject)
    exact, rounded = session.run.claims
    assert rounded.likely == exact.likely


def test_a_fault_is_not_named_by_itself_or_its_near_copies_when_they_are_left_out() -> None:
    _, found, _ = named(FAULTS["sibling_leak"].make(), "tree.mask")
    assert found is not None
    assert found.rank()[0].fault == "sibling_leak"
    assert "sibling_leak" not in {one.fault for one in found.rank(without=found.near_copies("sibling_leak"))}


def test_leaves_part_where_answers_differ_and_where_only_one_answers() -> None:
    one, other = Trace(), Trace()
    one.note("forward_tree", torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    other.note("forward_tree", torch.tensor([[1.0, 2.0], [3.0, 5.0]]))
    one.note("cache_len", 3)
    assert differing(one, other, 1e-9) == [Leaf(0, "forward_tree", ("row", 1)), Leaf(1, "cache_len", ())]


def test_generations_and_walks_are_taken_apart() -> None:
    trace = Trace()
    trace.note("generate", Generation((4, 5), "length"))
    trace.note("verify", VerifyResult((1, 2), 7))
    assert trace.leaves == {
        Leaf(0, "generate", ("token", 0)): 4,
        Leaf(0, "generate", ("token", 1)): 5,
        Leaf(0, "generate", ("finish_reason",)): "length",
        Leaf(1, "verify", ("path",)): (1, 2),
        Leaf(1, "verify", ("bonus_token",)): 7,
    }


def test_a_trace_that_leaves_another_one_is_stopped_there() -> None:
    """A check catches no BaseException, and what comes after the first difference proves nothing."""
    right = Trace()
    right.note("cache_len", 3)
    with pytest.raises(BaseException) as parted:
        Trace(like=right, tolerance=1e-9).note("cache_len", 4)
    assert type(parted.value).__name__ == "Parted" and not isinstance(parted.value, Exception)


def test_the_correct_decoder_has_nothing_planted_and_faults_say_where() -> None:
    assert ReferenceTarget().planted == frozenset()
    assert FAULTS["future_leak"].make().planted == {"flatten"}
    assert FAULTS["batch_minimum"].make().planted == {"batch.verify"}


def test_ranking_puts_what_reproduces_everything_before_what_only_looks_like_it() -> None:
    found = named(FAULTS["bonus_row"].make(), "greedy.walk")[1]
    assert found is not None
    first = found.rank()[0]
    assert (first.fault_class, first.fault) == ("bonus/correction-token-wrong", "bonus_row")
    assert first.evidence.startswith(FAULTS["bonus_row"].sentence)


def test_the_line_names_the_first_suspect_and_the_classes_behind_it() -> None:
    suspects = [Suspect("a", "x", "does this"), Suspect("b", "", "looks so"), Suspect("c", "", "or so")]
    assert as_line(suspects) == "a (x): does this"
    assert as_line([*suspects[:1], Suspect("d", "y", "does so too")]) == "a (x): does this; less likely: d"
    assert as_line(suspects[1:]) == "b: looks so; less likely: c"
    assert as_line([]) == "unknown"


def test_fingerprints_are_not_compared_where_rounding_hides_them() -> None:
    session = session_on(ReferenceTarget())
    able = {name: fingerprint.can_compare(one) for name, one in session.subjects.items()}  # type: ignore[arg-type]
    assert able["tiny-fp64"] and able["tiny-fp32"] and not able["tiny-bf16"]


def test_claims_are_explained_by_claims() -> None:
    named_below = {lower for below in EXPLAINED_BY.values() for lower in below}
    assert {*EXPLAINED_BY, *named_below} - set(CLAIMS) == set()
    assert [claim for claim, below in EXPLAINED_BY.items() if claim in below] == []


@pytest.mark.parametrize("fault", ["cousin_leak", "bans_within_a_round", "stop_sequence_in_round", "first_rows"])
def test_a_fault_whose_steps_answer_as_the_good_ones_do_reproduces_nothing(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those are not run: here they are, all of them."""
    monkeypatch.setattr(fingerprint, "SECONDS_COMPARING", 600)
    skipped: list[Fault] = []

    def watched(one: Fault, *rest: Any) -> bool:
        if changes_nothing(one, *rest):
            skipped.append(one)
        return False

    monkeypatch.setattr(fingerprint, "changes_nothing", watched)
    _, found, _ = named(FAULTS[fault].make(), FAULTS[fault].claim)
    assert found is not None
    assert len(skipped) >= 10
    assert {one.id for one in skipped}.isdisjoint(match.fault.id for match in found.matches)


def test_a_step_that_writes_to_what_it_is_given_changes_something() -> None:
    def plant(steps: Steps) -> Steps:
        def process(tree: DraftTree, logits: torch.Tensor, **asked: Any) -> torch.Tensor:
            asked["context"].append(0)
            return logits

        return replace(steps, process=process)

    def clean(steps: Steps) -> Steps:
        return replace(steps, process=lambda tree, logits, **asked: logits)

    tree, logits = DraftTree.of([1], [-1]), torch.zeros(1, 3)
    recording = Recording(STEPS)
    recording.note("process", (tree, logits), {"context": [1]}, logits)
    recording.note("forward", (), {}, logits)
    assert len(recording.calls) == 1
    faults = [Fault("writes", "a", "b", "c", "greedy.walk", one) for one in (clean, plant)]
    assert [changes_nothing(one, {"process"}, [recording]) for one in faults] == [True, False]
    assert not changes_nothing(faults[0], {"process", "forward"}, [recording])

    def more(steps: Steps) -> Steps:
        return replace(steps, process=lambda tree, logits, **asked: logits + 1)

    assert not changes_nothing(Fault("says_more", "a", "b", "c", "greedy.walk", more), {"process"}, [recording])
