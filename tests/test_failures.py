"""specbench.failures: whole messages, of real planted faults and of facts written by hand."""

# ruff: noqa: E501
from __future__ import annotations

import re
from functools import cache

import pytest

from specbench.cases import GenerationCase, WalkCase
from specbench.claims import CLAIMS, VIOLATIONS, Facts, GreedyMismatch, WalkMismatch
from specbench.failures import MAX_SHOWN, narrow, render
from specbench.judge import Failed, RunSession, parse_replay
from specbench.loading import Target
from specbench.profiles import PROFILES
from specbench.record import BUG, EQUAL, NOISE, NOT_TESTED, ClaimRecord, RunRecord
from specbench.reference.faults.bank import FAULTS
from specbench.reference.target import ReferenceTarget
from specbench.strategies import case_kind
from specbench.tree import DraftTree, chain

# Planted fault, the case it is replayed on, the whole message.
MESSAGES = (
    (
        "sibling_leak",
        "tree.mask@tiny-fp64@TreeCase,prompt=3.1,tokens=1.5.9,parents=-1.0.0",
        """\
MaskMismatch: node 2 is let to see node 1 (not on its path)      [claim tree.mask, level 3]

  MUST      let every drafted row attend to the whole prefix, its own ancestors and itself, and to nothing else
  prompt    [3, 1]   model 0, cache contiguous, layout tree_mask
  on        tiny-fp64, seed 7, device cpu
  expected  prefix 0..0 and nodes [0, 2]   the node's ancestors, walked along parents
  actual    prefix 0..0 and nodes [0, 1, 2]   specbench.reference.faults.bank:sibling_leak
  tree      1
            ├─ 5          seen, must not be
            └─ 9          this row
  narrower  no lower claim was tested: look at the mask builder
  reproduce specbench check specbench.reference.faults.bank:sibling_leak --replay {replay}""",
    ),
    (
        "sibling_leak",
        "tree.logits@tiny-fp64@TreeCase,prompt=3.1,tokens=1.5.9,parents=-1.0.0",
        """\
LogitsMismatch: logits of node 2 are off by 0.91      [claim tree.logits, level 3]

  MUST      give every node the logits that plain decoding gives after that node's own path
  prompt    [3, 1]   model 0, cache contiguous, layout tree_mask
  on        tiny-fp64, seed 7, device cpu
  expected  within 5.5e-09 (1e-9 of the scale, fp64)   reference.autoregressive
  actual    off by 0.91   specbench.reference.faults.bank:sibling_leak
  tree      1
            ├─ 5
            └─ 9          off by 0.91
  narrower  no lower claim was tested: look at mask, positions, or cache contents
  reproduce specbench check specbench.reference.faults.bank:sibling_leak --replay {replay}""",
    ),
    (
        "missing_ancestor",
        "tree.mask@tiny-fp64@TreeCase,model=1,cache=preallocated,layout=path_batch,prompt=3.1.2,tokens=2.5.9,parents=-1.0.1",
        """\
MaskMismatch: node 1 misses node 0 (on its path)      [claim tree.mask, level 3]

  MUST      let every drafted row attend to the whole prefix, its own ancestors and itself, and to nothing else
  prompt    [3, 1, 2]   model 1, cache preallocated, layout path_batch
  on        tiny-fp64, seed 7, device cpu
  expected  prefix 0..1 and nodes [0, 1]   the node's ancestors, walked along parents
  actual    prefix 0..1 and nodes [1]   specbench.reference.faults.bank:missing_ancestor
  tree      2             missed
            └─ 5          this row
               └─ 9
  narrower  no lower claim was tested: look at the mask builder
  reproduce specbench check specbench.reference.faults.bank:missing_ancestor --replay {replay}""",
    ),
    (
        "first_rows",
        "kv.commit@tiny-fp64@CommitCase,prompt=3.1,rounds=0.5.9:-1.0.0:2,next_roots=4",
        """\
CommitMismatch: layer 0 k, row 2 is off by 5.7 after round 1      [claim kv.commit, level 3]

  MUST      keep, after a commit, exactly the keys and values of the committed tokens, contiguous and in order
  prompt    [3, 1]   model 0, cache contiguous, layout tree_mask
  on        tiny-fp64, seed 7, device cpu
  expected  within 4.1e-09 (1e-9 of the scale, fp64)   reference.autoregressive
  actual    off by 5.7; it holds no committed token's values   specbench.reference.faults.bank:first_rows
  tree      1             root
            ├─ 5
            └─ 9          its row is wrong <- row 2
  narrower  no lower claim was tested: look at the gather of the accepted path: which rows, keys and values both, and the length
  reproduce specbench check specbench.reference.faults.bank:first_rows --replay {replay}""",
    ),
    (
        "own_row",
        "greedy.walk@tiny-fp64@WalkCase,tokens=0.1,parents=-1.0,winners=1/0",
        """\
WalkMismatch: node 1 is not accepted, though its parent's row says 1: acceptance is lost      [claim greedy.walk, level 2]

  MUST      accept a draft if and only if it is the argmax (lowest id on ties) of its parent's row, and add the argmax of the last accepted row
  on        tiny-fp64, seed 7, device cpu
  expected  path [1], bonus 0   enumeration of all paths
  actual    path [], bonus 1   specbench.reference.faults.bank:own_row
  tree      0             argmax 1
            └─ 1          argmax 0
  narrower  no lower claim was tested: look at the verifier: which row judges a draft, which row gives the bonus token
  reproduce specbench check specbench.reference.faults.bank:own_row --replay {replay}""",
    ),
    (
        "first_unverified",
        "greedy.lossless@tiny-fp64@GenerationCase,prompt=3.1,max_new_tokens=3,rounds=0.5.9:-1.0.1:0",
        """\
GreedyMismatch: output differs from autoregressive decoding at token 0      [claim greedy.lossless, level 1]

  MUST      with temperature 0, emit exactly the tokens the target model emits one by one
  prompt    [3, 1]   model 0, cache contiguous, layout tree_mask
  on        tiny-fp64, seed 7, device cpu
  expected  [20, 29, 4]   reference.autoregressive
  actual    [5, 29, 24]   specbench.reference.faults.bank:first_unverified
            ^ expected 20, margin 2.9 (not a tie: bound 5.3e-09 (1e-9 of the scale, fp64))
  tree      1             root
            └─ 5          accepted, then 29
               └─ 9
  narrower  no lower claim was tested: look at the round loop
  reproduce specbench check specbench.reference.faults.bank:first_unverified --replay {replay}""",
    ),
    (
        "eos_mid_path",
        "stop.eos@tiny-fp64@GenerationCase,prompt=3.1,max_new_tokens=4,rounds=0.5.9:-1.0.1:2,eos_idx=0",
        """\
EosMismatch: output goes on after end token 20 at token 0      [claim stop.eos, level 1]

  MUST      end with the first end token, wherever in an accepted run it falls, and keep nothing beyond it
  prompt    [3, 1]   model 0, cache contiguous, layout tree_mask
  on        tiny-fp64, seed 7, device cpu
  expected  [20]   reference.autoregressive
  actual    [20, 29, 4, 5]   specbench.reference.faults.bank:eos_mid_path
  tree      1             root
            └─ 20         accepted
               └─ 29      accepted, then 4
  narrower  no lower claim was tested: look at the stop test inside an accepted run
  reproduce specbench check specbench.reference.faults.bank:eos_mid_path --replay {replay}""",
    ),
)


@cache
def session(fault: str) -> RunSession:
    target = Target(f"specbench.reference.faults.bank:{fault}", ReferenceTarget(FAULTS[fault].plant))
    return RunSession(target, model="none", profile=PROFILES["quick"], seed=7, device="cpu", timeout=0, on_hang=print)


@pytest.mark.parametrize(
    ("fault", "replay", "message"),
    MESSAGES,
    ids=[f"{fault}-{replay.partition('@')[0]}" for fault, replay, _ in MESSAGES],
)
def test_the_message_of_a_planted_fault_is_whole(fault: str, replay: str, message: str) -> None:
    one = session(fault)
    one.run.claims.clear()
    claim, subject, case = parse_replay(replay)
    with pytest.raises(Failed) as failure:
        one.judge(claim, subject, only=case)
    assert str(failure.value) == message.replace("{replay}", replay)


def run_with(**verdicts: str) -> RunRecord:
    """A run on one subject in which claims (dots as double underscores) have had these verdicts."""
    run = RunRecord("mypkg.mod:Adapter", "0.1.0", "quick", 0, environment={"device": "device cuda"})
    run.claims = [ClaimRecord(name.replace("__", "."), "own", verdict) for name, verdict in verdicts.items()]
    return run


def greedy(facts: Facts, run: RunRecord, case: GenerationCase | None = None) -> str:
    case = case or GenerationCase(prompt=(7,), max_new_tokens=3)
    return render(
        GreedyMismatch(facts), CLAIMS["greedy.lossless"], case, subject="own", run=run,
        command="specbench check mypkg.mod:Adapter --replay x",
    )  # fmt: skip


BY_HAND = Facts(
    headline="output differs from autoregressive decoding at token 1",
    expected="[9, 4, 1]",
    actual="[9, 3, 1]",
    remark="expected 4, margin 1.7 (not a tie: bound 2e-12 (1e-9 of the scale, fp64))",
    tree=DraftTree.of([7, 3, 9, 3], [-1, 0, 0, 2]),
    notes={0: "root", 2: "accepted", 3: "accepted, then 1"},
)


def test_a_message_says_what_must_expected_actual_picture_narrowing_and_reproduction_in_this_order() -> None:
    assert (
        greedy(BY_HAND, run_with(tree__mask=EQUAL, greedy__walk=BUG))
        == """\
GreedyMismatch: output differs from autoregressive decoding at token 1      [claim greedy.lossless, level 1]

  MUST      with temperature 0, emit exactly the tokens the target model emits one by one
  prompt    [7]   model 0, cache contiguous, layout tree_mask
  on        own, seed 0, device cuda
  expected  [9, 4, 1]   reference.autoregressive
  actual    [9, 3, 1]   mypkg.mod:Adapter
            ^ expected 4, margin 1.7 (not a tie: bound 2e-12 (1e-9 of the scale, fp64))
  tree      7             root
            ├─ 3
            └─ 9          accepted
               └─ 3       accepted, then 1
  narrower  greedy.walk FAILS: look at the verifier: which row judges a draft, which row gives the bonus token first
  reproduce specbench check mypkg.mod:Adapter --replay x"""
    )


def test_a_message_without_a_tree_or_remark_leaves_their_lines_out() -> None:
    labels = [line[2:11].strip() for line in greedy(Facts("a", "b", "c"), run_with()).splitlines()[2:]]
    assert labels == ["MUST", "prompt", "on", "expected", "actual", "narrower", "reproduce"]


def test_the_first_line_alone_names_what_where_and_the_claim() -> None:
    """It is all that pytest's summary shows."""
    assert greedy(BY_HAND, run_with()).splitlines()[0] == (
        "GreedyMismatch: output differs from autoregressive decoding at token 1      [claim greedy.lossless, level 1]"
    )


def test_expected_stands_before_actual() -> None:
    text = greedy(BY_HAND, run_with())
    assert text.index("\n  expected  ") < text.index("\n  actual    ")


def test_no_line_ends_in_blanks() -> None:
    assert not [line for line in greedy(BY_HAND, run_with()).splitlines() if line != line.rstrip()]


def test_a_case_without_a_prompt_has_no_prompt_line() -> None:
    text = render(
        WalkMismatch(Facts("a", "b", "c")),
        CLAIMS["greedy.walk"],
        WalkCase(),
        subject="own",
        run=run_with(),
        command="x",
    )
    assert "\n  prompt" not in text


def test_long_values_are_cut_and_their_length_told() -> None:
    text = greedy(Facts("a", expected="9" * 500, actual="c"), run_with())
    assert f"\n  expected  {'9' * (MAX_SHOWN - 20)} ... (500 characters)   reference" in text


def test_a_tree_of_more_than_forty_nodes_is_cut_and_the_rest_counted() -> None:
    drawing = greedy(Facts("a", "b", "c", tree=chain(range(50))), run_with()).split("  tree      ")[1].splitlines()
    assert (len(drawing), drawing[38].strip()) == (41, "... 12 more nodes")


NARROWER = {
    "nothing below": ({}, "no lower claim was tested: look at the round loop"),
    "only untested below": (
        {"tree__mask": NOT_TESTED},
        "no lower claim was tested: look at the round loop",
    ),
    "all hold": (
        {"tree__mask": EQUAL, "tree__logits": NOISE, "greedy__walk": EQUAL},
        "tree.mask, tree.logits, greedy.walk hold: look at the round loop",
    ),
    "one fails": (
        {"tree__mask": EQUAL, "greedy__walk": BUG},
        "greedy.walk FAILS: look at the verifier: which row judges a draft, which row gives the bonus token first",
    ),
    "two fail": (
        {"tree__mask": BUG, "tree__logits": BUG},
        "tree.mask, tree.logits FAILS (each): look at the mask builder first",
    ),
    "higher ones do not count": (
        {"stop__eos": BUG, "cost__rows": EQUAL},
        "no lower claim was tested: look at the round loop",
    ),
}


@pytest.mark.parametrize("kind", NARROWER)
def test_narrowing_follows_what_lower_claims_said(kind: str) -> None:
    verdicts, sentence = NARROWER[kind]
    assert narrow(CLAIMS["greedy.lossless"], "own", run_with(**verdicts)) == sentence


def test_narrowing_reads_the_same_subject_only() -> None:
    assert narrow(CLAIMS["greedy.lossless"], "another", run_with(tree__mask=BUG)) == (
        "no lower claim was tested: look at the round loop"
    )


def test_narrowing_names_the_nearest_eight_that_hold_and_counts_the_others() -> None:
    ids = list(CLAIMS)
    run = run_with(**{name.replace(".", "__"): EQUAL for name in ids[:12]})
    claim = CLAIMS[ids[12]]
    assert narrow(claim, "own", run) == f"{', '.join(ids[4:12])}, 4 more hold: look at {claim.look_at}"


def test_narrowing_names_the_lowest_eight_that_fail_and_counts_the_others() -> None:
    ids = list(CLAIMS)
    run = run_with(**{name.replace(".", "__"): BUG for name in ids[:12]})
    first = CLAIMS[ids[0]].look_at
    assert narrow(CLAIMS[ids[12]], "own", run) == f"{', '.join(ids[:8])}, 4 more FAILS (each): look at {first} first"


# Every class, by STYLE.md


ORDER = ("MUST", "prompt", "inputs", "parents", "on", "expected", "actual", "", "tree", "narrower", "reproduce")
# What a target may say: lines of its own, a forged label, an escape, a CI command.
HOSTILE = "one\n  reproduce rm -rf /\n::error::two\x1b[2J"


def of_class(claim_id: str, facts: Facts) -> list[str]:
    """The lines of a message of the claim's own class, on a case of its own kind."""
    violation, case = VIOLATIONS[claim_id](facts), case_kind(claim_id)()
    text = render(violation, CLAIMS[claim_id], case, subject="own", run=run_with(), command="specbench check x")
    return text.split("\n")


def test_every_claim_has_a_class_of_its_own() -> None:
    assert (set(VIOLATIONS), len({one.__name__ for one in VIOLATIONS.values()})) == (set(CLAIMS), len(CLAIMS))


@pytest.mark.parametrize("claim_id", CLAIMS)
def test_a_message_of_every_class_keeps_to_the_rules(claim_id: str) -> None:
    """Whatever the facts hold: the first line is readable alone, MUST stands before expected and that before actual,
    a target's text stays on its own line, and the last line reproduces."""
    facts = Facts(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, DraftTree.of([1, 2], [-1, 0]), {1: HOSTILE})
    first, blank, *rest = of_class(claim_id, facts)
    labels = [line[2:12].strip() for line in rest if not line.startswith(" " * 12) or line.startswith(" " * 12 + "^")]
    name, level = VIOLATIONS[claim_id].__name__, CLAIMS[claim_id].level
    assert re.fullmatch(rf"{name}: one .*two\\x1b\[2J {{6}}\[claim {re.escape(claim_id)}, level {level}\]", first)
    assert (blank, [one for one in ORDER if one in labels]) == ("", labels)
    assert rest[0] == f"  MUST      {CLAIMS[claim_id].must}"
    assert rest[-1] == "  reproduce specbench check x"
    assert [line for line in [first, *rest] if line != line.rstrip() or "\x1b" in line or line.startswith("::")] == []


@pytest.mark.parametrize("claim_id", CLAIMS)
def test_a_must_sentence_goes_on_from_a_correct_decoder_must(claim_id: str) -> None:
    claim = CLAIMS[claim_id]
    for text in (claim.must, claim.look_at):
        assert re.fullmatch(r"[a-z0-9][^\n]*[^.\s]", text)
        assert len(text) < 250


BY_CLASS = {
    "tree.noninterference": """\
Interference: logits of node 2 move      [claim tree.noninterference, level 3]

  MUST      leave a node's logits bit-identical when a token off its path changes
  prompt    [0]   model 0, cache contiguous, layout tree_mask
  on        own, seed 0, device cuda
  expected  4   the oracle
  actual    5   mypkg.mod:Adapter
  narrower  no lower claim was tested: look at the mask: a row reads a draft that is not its ancestor
  reproduce specbench check x""",
    "kv.rollback": """\
RollbackMismatch: logits of node 2 move      [claim kv.rollback, level 3]

  MUST      drop every rejected row, and be able to cut back to any committed length and go on from there
  prompt    [0]   model 0, cache contiguous, layout tree_mask
  on        own, seed 0, device cuda
  expected  4   the oracle
  actual    5   mypkg.mod:Adapter
  narrower  no lower claim was tested: look at the crop after a rejection
  reproduce specbench check x""",
    "stop.max_tokens": """\
MaxTokensMismatch: logits of node 2 move      [claim stop.max_tokens, level 1]

  MUST      emit exactly max_new_tokens tokens when no end token comes first, and keep nothing beyond them
  prompt    [0]   model 0, cache contiguous, layout tree_mask
  on        own, seed 0, device cuda
  expected  4   the oracle
  actual    5   mypkg.mod:Adapter
  narrower  no lower claim was tested: look at the length cut inside an accepted run
  reproduce specbench check x""",
    "cost.rows": """\
RowCountMismatch: logits of node 2 move      [claim cost.rows, level 1]

  MUST      forward each node and the root once a round, accepted ones at most once more, and never the prefix again
  prompt    [0]   model 0, cache contiguous, layout tree_mask
  on        own, seed 0, device cuda
  expected  4   the oracle
  actual    5   mypkg.mod:Adapter
  narrower  no lower claim was tested: look at what is passed to the target forward each round
  reproduce specbench check x""",
}


@pytest.mark.parametrize("claim_id", BY_CLASS)
def test_the_message_of_a_class_is_whole(claim_id: str) -> None:
    assert "\n".join(of_class(claim_id, Facts("logits of node 2 move", "4", "5", "the oracle"))) == BY_CLASS[claim_id]
