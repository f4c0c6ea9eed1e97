"""specbench.cases: a case survives the journey through a replay string, and a bad string is refused in one sentence."""

from __future__ import annotations

import re
import shlex
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.cases import (
    DRAFTERS,
    MAX_REPLAY_CHARS,
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
from specbench.strategies import strategy_for

# What strategies ask a subject for, without a model behind it.
SUBJECT: Any = SimpleNamespace(
    bank=SimpleNamespace(num_models=3),
    vocab_size=lambda idx: 5 + idx,
    has=frozenset({"build"}),
    cache_kinds=("contiguous", "preallocated"),
    layouts=("tree_mask", "path_batch"),
    law_drafts=(("iid", "deterministic"), False),
)
CLAIM_OF_KIND = {
    "TreeCase": "tree.mask",
    "PerturbedCase": "tree.sensitivity",
    "CommitCase": "kv.commit",
    "WalkCase": "greedy.walk",
    "GenerationCase": "threshold.consistency",
    "StopCase": "stop.sequences",
    "ProcessorCase": "processors.grammar",
    "ChunkCase": "kv.chunked",
    "LawCase": "law.params",
}


@pytest.mark.parametrize("kind", CLAIM_OF_KIND)
def test_every_drawn_case_comes_back_from_its_string(kind: str) -> None:
    @settings(max_examples=60, deadline=None, database=None, derandomize=True)
    @given(strategy_for(CLAIM_OF_KIND[kind], SUBJECT))
    def round_trip(case: Case) -> None:
        assert (type(case).__name__, decode(encode(case))) == (kind, case)

    round_trip()


@pytest.mark.parametrize("kind", CLAIM_OF_KIND)
def test_every_string_is_one_word_for_a_shell(kind: str) -> None:
    @settings(max_examples=60, deadline=None, database=None, derandomize=True)
    @given(strategy_for(CLAIM_OF_KIND[kind], SUBJECT))
    def quoted(case: Case) -> None:
        assert shlex.quote(encode(case)) == encode(case)

    quoted()


EXAMPLES = {
    "TreeCase": TreeCase(),
    "TreeCase,model=3,layout=path_batch,prompt=7.3,tokens=3.9.4,parents=-1.0.0": TreeCase(
        model=3, layout="path_batch", prompt=(7, 3), tokens=(3, 9, 4), parents=(-1, 0, 0)
    ),
    "PerturbedCase,prompt=7.3,tokens=3.9,parents=-1.0,place=2,token=4": PerturbedCase(
        prompt=(7, 3), tokens=(3, 9), parents=(-1, 0), place=2, token=4
    ),
    "CommitCase,prompt=7,rounds=0.5:-1.0:1/0:-1:0,next_roots=2.3,cut=1": CommitCase(
        prompt=(7,), rounds=(CommitRound((0, 5), (-1, 0), 1), CommitRound((0,), (-1,), 0)), next_roots=(2, 3), cut=1
    ),
    "WalkCase,tokens=0.1,parents=-1.0,winners=0.2/1,vocab_size=3": WalkCase(
        tokens=(0, 1), parents=(-1, 0), winners=((0, 2), (1,)), vocab_size=3
    ),
    "GenerationCase,cache=preallocated,prompt=7,max_new_tokens=9,eos_idx=4,drafter=self_tree": GenerationCase(
        cache="preallocated", prompt=(7,), max_new_tokens=9, eos_idx=4, drafter="self_tree"
    ),
}


@pytest.mark.parametrize("text", EXAMPLES)
def test_strings_leave_defaults_out_and_read_as_written(text: str) -> None:
    assert (encode(EXAMPLES[text]), decode(text)) == (text, EXAMPLES[text])


def test_counts_of_a_case_leave_roots_out() -> None:
    commit = decode("CommitCase,rounds=0.5:-1.0:1/0.1.2:-1.0.0:0,next_roots=2.3")
    assert (commit.num_drafts, commit.num_rounds) == (3, 2)


def test_all_tokens_of_a_case_are_found() -> None:
    texts = (
        "PerturbedCase,prompt=7.3,tokens=3.9,parents=-1.0,token=4",
        "CommitCase,prompt=7,rounds=0.5:-1.0:1,next_roots=2",
    )
    assert [tokens_of(decode(text)) for text in texts] == [[7, 3, 3, 9, 4], [7, 2, 0, 5]]


TREE = "TreeCase,prompt=3,tokens=3.9,parents=-1.0"
COMMIT = "CommitCase,prompt=3,next_roots=1"
WALK = "WalkCase,tokens=0.1,parents=-1.0,vocab_size=3"
KINDS = (
    "TreeCase, PerturbedCase, ChunkCase, LongCase, CommitCase, WalkCase, GenerationCase, StopCase, ProcessorCase, "
    "MachineCase, DrafterCase, BatchCase, WalkBatchCase, LawCase, SampledCase, AttentionCase"
)
BAD = {
    "": (f"replay string names the case kind '': expected one of {KINDS}"),
    "treecase,prompt=3": (f"replay string names the case kind 'treecase': expected one of {KINDS}"),
    "Case": (f"replay string names the case kind 'Case': expected one of {KINDS}"),
    "TreeCase,promt=3": (
        "replay string: TreeCase has no field 'promt': expected one of model, cache, layout, prompt, tokens, parents"
    ),
    "TreeCase,tree=3": (
        "replay string: TreeCase has no field 'tree': expected one of model, cache, layout, prompt, tokens, parents"
    ),
    "TreeCase,model=": "replay string: model holds '', must be a whole number",
    "TreeCase,model=1.5": "replay string: model holds '1.5', must be a whole number",
    "TreeCase,model=1_0": "replay string: model holds '1_0', must be a whole number",
    "TreeCase,model=٣": "replay string: model holds '٣', must be a whole number",
    "TreeCase,prompt=3..4": "replay string: prompt holds '', must be a whole number",
    "TreeCase,prompt=3.x": "replay string: prompt holds 'x', must be a whole number",
    "TreeCase,prompt=1234567890123": "replay string: prompt holds '1234567890123', must be a whole number",
    "TreeCase,layout=Tree": (
        "replay string: layout = 'Tree' must be a word of lower-case letters, digits and underscores"
    ),
    "TreeCase,cache=": "replay string: cache = '' must be a word of lower-case letters, digits and underscores",
    "TreeCase,prompt=": "replay string: prompt must hold at least one token id >= 0",
    "TreeCase,prompt=-3": "replay string: prompt must hold at least one token id >= 0",
    "TreeCase,prompt=3,tokens=4": "replay string: tokens[0] = 4 must be 3 (the root, last of the prompt)",
    "TreeCase,prompt=3,tokens=": "tokens is empty: a tree has at least its root, the last committed token",
    "TreeCase,prompt=3,tokens=3.9": "parents has 1 entries, must match tokens (2)",
    "TreeCase,prompt=3,tokens=3.9,parents=-1.1": "parents[1] = 1 must be < 1 (parents precede children)",
    "TreeCase,prompt=3,tokens=3.9,parents=-1.-1": "parents[1] = -1 must be >= 0 (only node 0 is a root)",
    "TreeCase,prompt=3,tokens=3.-9,parents=-1.0": "tokens[1] = -9 must be >= 0 (a token id)",
    "PerturbedCase,prompt=3,tokens=3,place=1": (
        "replay string: place = 1 must be >= 0 and < 1 (a prefix token or a node)"
    ),
    f"{COMMIT},rounds=0.5:-1.0:2": "replay string: accept = 2 must be >= 0 and < 2 (a node)",
    f"{COMMIT},rounds=0.5:-1.0:-1": "replay string: accept = -1 must be >= 0 and < 2 (a node)",
    f"{COMMIT},rounds=0.5:-1.0": "replay string: round '0.5:-1.0' must be tokens:parents:accept",
    f"{COMMIT},rounds=0:-1:0:0": "replay string: round '0:-1:0:0' must be tokens:parents:accept",
    f"{COMMIT},rounds=0.5:-1.3:1": "parents[1] = 3 must be < 1 (parents precede children)",
    f"{COMMIT},rounds=0:-1:0/0:-1:0": "replay string: 2 rounds and 1 next_roots must be as many, >= 1",
    "CommitCase,prompt=3": "replay string: 0 rounds and 0 next_roots must be as many, >= 1",
    f"{COMMIT},rounds=0:-1:0,cut=-1": "replay string: cut = -1 must be >= 0 and < 100000 (rows to drop)",
    f"{WALK},winners=1": "replay string: winners has 1 rows, must be 2 (nodes)",
    f"{WALK},winners=1/3": "replay string: winners = 3 must be >= 0 and < 3 (a token id)",
    f"{WALK},winners=1/": "replay string: winners must name at least one token a row",
    "WalkCase,vocab_size=1": "replay string: vocab_size = 1 must be >= 2 and < 100000 (a vocabulary)",
    "WalkCase,vocab_size=999999999999": (
        "replay string: vocab_size = 999999999999 must be >= 2 and < 100000 (a vocabulary)"
    ),
    "WalkCase,tokens=5,vocab_size=3": "replay string: tokens = 5 must be >= 0 and < 3 (a token id)",
    "GenerationCase,max_new_tokens=-1": "replay string: max_new_tokens = -1 must be >= 0 and < 100000 (a length)",
    "GenerationCase,eos_idx=-2": ("replay string: eos_idx = -2 must be >= -1 and < 100000 (an index, or -1 for none)"),
    "StopCase,stop_len=-1": "replay string: stop_len = -1 must be >= 0 and < 100000 (a number of tokens)",
    "ProcessorCase,repetition=0": "replay string: repetition = 0 must be >= 1 and < 100000 (hundredths)",
    "ProcessorCase,bans=1": "replay string: bans holds [1], must hold pairs first.length, length >= 1",
    "ProcessorCase,grammar=1.0/2": "replay string: grammar holds [2], must hold token.state pairs by state",
    "ProcessorCase,grammar=1.1": "replay string: grammar = 1 must be >= 0 and < 1 (a state)",
    "ChunkCase,chunks=0": "replay string: chunks = 0 must be >= 1 and < 100000 (a length)",
    "MachineCase,ops=step": "replay string: operation 'step' must be name:numbers:parents",
    "MachineCase,ops=exec:1:": (
        "replay string: operation 'exec' must be one of prefill, chunk, draft, commit, step, truncate, abort, fork, "
        "switch, reset, resume"
    ),
    "MachineCase,ops=draft:1.2:-1.3": "parents[1] = 3 must be < 1 (parents precede children)",
    "GenerationCase,drafter=medusa": f"replay string: drafter = 'medusa' must be one of {', '.join(DRAFTERS)}",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_string_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ValueError) as error:
        decode(text)
    assert str(error.value) == BAD[text]


def test_a_string_too_long_is_not_read() -> None:
    with pytest.raises(ValueError) as error:
        decode("TreeCase" + "," * MAX_REPLAY_CHARS)
    assert str(error.value) == f"replay string has {MAX_REPLAY_CHARS + 8} characters, at most 1000000 are read"


def test_too_many_numbers_are_not_read() -> None:
    with pytest.raises(ValueError) as error:
        decode("TreeCase,prompt=" + ".".join(["1"] * 100_001))
    assert str(error.value) == "replay string: prompt holds 100001 numbers, at most 100000 are read"


@pytest.mark.parametrize("value", ["__import__('os')", "1+1", "[1]", "{}", "0x10", "1e3", "None"])
@pytest.mark.parametrize("field", ["model", "prompt", "layout"])
def test_nothing_in_a_string_is_evaluated(field: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"^replay string: {field} "):
        decode(f"TreeCase,{field}={value}")


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(
    st.sampled_from([*CLAIM_OF_KIND, ""]),
    st.lists(
        st.tuples(
            st.sampled_from(["model", "cache", "prompt", "tokens", "parents", "rounds", "winners", "place", "x", ""]),
            st.text(alphabet="0123.-:/=_ax ", max_size=12),
        ),
        max_size=4,
    ),
)
def test_any_string_gives_a_case_or_a_value_error(kind: str, fields: list[tuple[str, str]]) -> None:
    text = ",".join([kind, *(f"{name}={value}" for name, value in fields)])
    try:
        case = decode(text)
    except ValueError as refused:
        sentence = str(refused)
    else:
        sentence = "tokens" if decode(encode(case)) == case else "another case came back"
    assert re.match(r"replay string|tokens|parents", sentence)
