"""specbench.judge: which verdict arises when, what is recorded, and that a replay tells the same story."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sessions import session_on

from specbench.cases import decode
from specbench.checks import CHECKS
from specbench.claims import CLAIMS, DECODER_CLAIMS
from specbench.judge import Failed, RunSession, Skipped, parse_replay
from specbench.profiles import Profile
from specbench.record import BUG, EQUAL, NOISE, NOT_TESTED, ClaimRecord
from specbench.reference.faults.bank import FAULTS
from specbench.reference.target import ReferenceTarget

FEW = Profile("few", 20, num_real=0, real_prompts=0, real_tokens=0, real_dtypes=())


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wrong_targets", Path(__file__).parent / "targets" / "wrong.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


wrong = _load()


def fresh(adapter: Any, seed: int = 3) -> RunSession:
    return session_on(adapter, name="mine:Adapter", profile=FEW, seed=seed)


@cache
def session(name: str) -> RunSession:
    """By attribute of targets/wrong.py, by planted fault, or "reference"."""
    if name == "reference":
        return fresh(ReferenceTarget())
    return fresh(ReferenceTarget(FAULTS[name].plant) if name in FAULTS else getattr(wrong, name)())


def judged(name: str, claim: str, subject: str = "tiny-fp64") -> tuple[ClaimRecord, str]:
    """The record, and the text of Failed or Skipped."""
    one = session(name)
    one.run.claims.clear()
    text = ""
    try:
        one.judge(claim, subject)
    except (Failed, Skipped) as ended:
        text = str(ended)
    (record,) = one.run.claims
    return record, text


@pytest.mark.parametrize("claim", DECODER_CLAIMS)
def test_the_reference_is_equal_in_fp64_on_every_claim(claim: str) -> None:
    record, text = judged("reference", claim)
    assert (record.verdict, text, record.message) == (EQUAL, "", "")


@pytest.mark.parametrize("claim", ["tree.logits", "kv.commit"])
def test_rounding_in_bf16_is_noise_with_its_share_of_the_bound(claim: str) -> None:
    record, text = judged("reference", claim, "tiny-bf16")
    assert (record.verdict, text, 0 < record.worst <= 1) == (NOISE, "", True)


def test_counts_are_of_the_cases_that_ran() -> None:
    record, _ = judged("reference", "tree.mask")
    assert (record.num_cases, record.num_rounds, record.num_nodes > 20) == (20, 20, True)


def test_lossless_tokens_are_counted_and_their_share_told() -> None:
    record, _ = judged("reference", "greedy.lossless")
    total = record.num_tokens
    assert record.detail.startswith(f"{total} of {total} tokens equal (100 %), at least ")
    clean = f"{record.num_cases} of {record.num_cases} generations identical to plain decoding"
    assert f"% at 95 % confidence: not enough tokens for 99.99 %; {clean}" in record.detail


def test_a_fault_is_a_bug_with_a_small_case_and_its_replay() -> None:
    record, text = judged("sibling_leak", "tree.mask")
    assert (record.verdict, record.message, record.shrunk_drafts) == (BUG, text, 2)


def test_the_recorded_replay_is_in_the_messages_last_line() -> None:
    record, text = judged("sibling_leak", "tree.mask")
    assert text.splitlines()[-1] == f"  reproduce specbench check mine:Adapter --replay {record.replay}"


@pytest.mark.parametrize(
    ("fault", "claim"),
    [
        ("sibling_leak", "tree.mask"),
        ("first_rows", "kv.commit"),
        ("own_row", "greedy.walk"),
        ("first_unverified", "greedy.lossless"),
        ("eos_mid_path", "stop.eos"),
    ],
)
def test_a_replay_fails_with_the_same_text_in_another_run(fault: str, claim: str) -> None:
    record, text = judged(fault, claim)
    again = fresh(ReferenceTarget(FAULTS[fault].plant))
    with pytest.raises(Failed) as failure:
        again.judge(claim, "tiny-fp64", only=parse_replay(record.replay)[2])
    assert str(failure.value) == text


def test_a_replay_shows_the_case_it_was_given_though_a_smaller_one_would_fail_as_well() -> None:
    text = "TreeCase,model=1,prompt=3.1,tokens=1.5.9.4,parents=-1.0.0.1"
    with pytest.raises(Failed) as failure:
        session("sibling_leak").judge("tree.mask", "tiny-fp64", only=decode(text))
    assert str(failure.value).endswith(f"--replay tree.mask@tiny-fp64@{text}")


def test_a_replay_on_a_right_target_is_one_equal_case() -> None:
    record, _ = judged("sibling_leak", "tree.mask")
    one = session("reference").judge("tree.mask", "tiny-fp64", only=parse_replay(record.replay)[2])
    assert (one.verdict, one.num_cases, one.num_nodes) == (EQUAL, 1, 2)


def test_equal_seeds_draw_equal_cases() -> None:
    runs = []
    for _ in range(2):
        one = fresh(ReferenceTarget(FAULTS["sibling_leak"].plant), seed=11)
        with pytest.raises(Failed):
            one.judge("tree.mask", "tiny-fp64")
        record = one.run.claims[0]
        runs.append((record.num_cases, record.num_nodes, record.replay))
    assert runs[0] == runs[1]


NOT_EXPOSED = {
    ("VerifierOnly", "tree.mask"): "give the target prefill, forward_tree, commit, truncate and cache_len (level 3)",
    ("VerifierOnly", "greedy.lossless"): (
        "give the target generate(prompt, *, max_new_tokens, sampling, stop, seed) (level 1)"
    ),
    ("GeneratorOnly", "greedy.walk"): ("give the target verify(tree, target_logits, *, sampling, coins) (level 2)"),
    ("GeneratorOnly", "cost.rows"): (
        "give the target build(model, drafter), so that the harness can hand it models and drafters"
    ),
    ("GeneratorOnly", "threshold.consistency"): (
        "give the target with_threshold(threshold), the same decoder under lossy threshold acceptance"
    ),
}


@pytest.mark.parametrize(("name", "claim"), NOT_EXPOSED, ids=["-".join(one) for one in NOT_EXPOSED])
def test_a_claim_that_the_target_does_not_expose_is_not_tested_and_says_what_to_expose(name: str, claim: str) -> None:
    record, text = judged(name, claim, "own")
    assert (record.verdict, record.reason, text) == (NOT_TESTED, NOT_EXPOSED[name, claim], NOT_EXPOSED[name, claim])


@pytest.mark.parametrize(
    ("name", "claim"),
    [("VerifierOnly", "greedy.walk"), ("GeneratorOnly", "greedy.lossless"), ("GeneratorOnly", "stop.eos")],
)
def test_a_right_target_of_a_single_level_is_equal_where_it_can_be_judged(name: str, claim: str) -> None:
    record, text = judged(name, claim, "own")
    assert (record.verdict, text) == (EQUAL, "")


MISBEHAVIOUR = {
    ("Raising", "greedy.lossless"): "generate() raised RuntimeError: CUDA error: device-side assert",
    ("NaN", "tree.logits"): "forward_tree() must return numbers, got nan at [0, 1] (1 such entries)",
    ("WrongShape", "tree.logits"): "forward_tree() must return shape [1, 31], got shape [1, 1, 31]",
    ("Nondeterministic", "greedy.lossless"): (
        "the target is not deterministic: one and the same case failed and then did not"
    ),
}


@pytest.mark.parametrize(("name", "claim"), MISBEHAVIOUR, ids=[name for name, _ in MISBEHAVIOUR])
def test_a_misbehaving_target_is_a_bug_told_in_one_sentence(name: str, claim: str) -> None:
    record, text = judged(name, claim)
    level = CLAIMS[claim].level
    first = f"Misbehaviour: {MISBEHAVIOUR[name, claim]}      [claim {claim}, level {level}]"
    assert (record.verdict, text.splitlines()[0]) == (BUG, first)


def test_a_misbehaviour_is_recorded_with_a_case_that_can_be_replayed() -> None:
    record, text = judged("Raising", "greedy.lossless")
    with pytest.raises(Failed) as failure:
        session("Raising").judge("greedy.lossless", "tiny-fp64", only=parse_replay(record.replay)[2])
    assert str(failure.value) == text


def test_a_target_that_takes_no_layout_is_not_expected_to_forward_a_batch_of_paths() -> None:
    record, text = judged("_Factory", "cost.rows")
    assert (record.verdict, text) == (EQUAL, "")


MISFITS = {
    "TreeCase,model=11": "replay string: model = 11 must be < 11 on tiny-fp64",
    "TreeCase,prompt=31,tokens=31": "replay string: token 31 must be >= 0 and < 31 (vocabulary of tiny-fp64)",
    "TreeCase,cache=paged": (
        "replay string: cache = 'paged' must be one of contiguous, preallocated, paged_1, paged_4, paged_16, ring, "
        "int8, fp8 on tiny-fp64"
    ),
    "TreeCase,layout=ring": "replay string: layout = 'ring' must be one of tree_mask, path_batch on tiny-fp64",
}


@pytest.mark.parametrize("text", MISFITS)
def test_a_replay_outside_the_subject_is_refused_before_the_target_is_asked(text: str) -> None:
    with pytest.raises(Failed) as failure:
        session("reference").judge("tree.mask", "tiny-fp64", only=decode(text))
    assert str(failure.value) == MISFITS[text]


REPLAYS = {
    "tree.mask": "replay string 'tree.mask' must be claim@subject@case, as a failure prints it",
    "tree.msk@own@TreeCase": (f"replay string names claim 'tree.msk': expected one of {', '.join(CLAIMS)}"),
    "tree.mask@own@WalkCase": "replay string: tree.mask is judged on a TreeCase, this is a WalkCase",
    "tree.mask@own@PerturbedCase,place=0": (
        "replay string: tree.mask is judged on a TreeCase, this is a PerturbedCase"
    ),
    "tree.mask@own@Tree": (
        "replay string names the case kind 'Tree': "
        "expected one of TreeCase, PerturbedCase, ChunkCase, LongCase, CommitCase, WalkCase, GenerationCase, StopCase, "
        "ProcessorCase, MachineCase, DrafterCase, BatchCase, WalkBatchCase, LawCase, SampledCase, AttentionCase"
    ),
}


@pytest.mark.parametrize("text", REPLAYS)
def test_a_malformed_replay_says_which_part_is_wrong(text: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_replay(text)
    assert str(error.value) == REPLAYS[text]


def test_time_is_shared_out_between_target_oracle_and_harness() -> None:
    one = fresh(ReferenceTarget())
    one.judge("tree.logits", "tiny-fp64")
    seconds = one.finish().seconds
    parts = sum(value for name, value in seconds.items() if name != "total")
    assert parts == pytest.approx(seconds["total"], rel=1e-6)


def test_more_flips_than_plain_decoding_are_a_bug_though_each_is_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty generations that part from plain decoding at forty places, each with one flip more: 2^-40."""
    monkeypatch.setitem(CHECKS, "greedy.lossless", lambda subject, case, record: [
        record.note_flips(place, 1, 0, 5) for place in range(40)
    ])  # fmt: skip
    record, text = judged("reference", "greedy.lossless", "tiny-bf16")
    lines = text.splitlines()
    assert (record.verdict, record.message, record.replay) == (BUG, text, "")
    assert lines[0] == (
        "GreedyMismatch: NOISE budget exceeded: more flipped tokens than plain decoding in 40 of 40 generations"
        "      [claim greedy.lossless, level 1]"
    )
    assert lines[4:7] == [
        "  expected  about 20 of 40: as often as not   plain decoding in bfloat16 on the same weights",
        "  actual    40 of 40, as by rounding alone once in 1e+12 runs   mine:Adapter",
        "            ^ where the texts part, 40 of 200 tokens (20.0 %) are not the oracle's argmax, in plain "
        "decoding's own text 0 (0.0 %); more of them in 40 generations, fewer in 0",
    ]
    assert lines[-1] == "  reproduce specbench check mine:Adapter --hypothesis-seed=3 --hypothesis-profile=few"


def test_as_many_flips_as_plain_decoding_are_noise_and_both_rates_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHECKS, "greedy.lossless", lambda subject, case, record: [
        record.note_flips(place, place % 2, 1 - place % 2, 5) for place in range(40)
    ])  # fmt: skip
    record, text = judged("reference", "greedy.lossless", "tiny-bf16")
    rates = "20 of 200 tokens (10.0 %) are not the oracle's argmax, in plain decoding's own text 20 (10.0 %)"
    assert (text, rates in record.detail) == ("", True)
