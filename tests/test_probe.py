"""specbench.probe: whatever a target does wrong becomes one exact sentence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specbench.claims import Misbehaviour
from specbench.clock import Clock
from specbench.probe import Probe
from specbench.tree import DraftTree, chain
from specbench.types import Generation, Round, Stop, VerifyResult
from specbench.watchdog import Watchdog

TREE = DraftTree.of([3, 1, 2], [-1, 0, 0])
ROUND = Round((3, 1), (-1, 0), path=(1,), bonus_token=2, emitted=(1, 2), prefix_len=0, num_rows=2)


def probe_of(vocab_size: int | None = 5, **methods: Any) -> Probe:
    """A target whose methods answer with the given values, whatever they are asked."""
    faces = {name: (lambda *args, value=value, **keywords: value) for name, value in methods.items()}
    return Probe(SimpleNamespace(**faces), vocab_size=vocab_size, clock=Clock(), watchdog=Watchdog(0, print))


def message_of(call: Any) -> str:
    with pytest.raises(Misbehaviour) as error:
        call()
    return str(error.value)


def generate(out: Any, vocab_size: int | None = 5) -> Generation:
    return probe_of(vocab_size, generate=out).generate([0], max_new_tokens=3)


GENERATED = {
    "none": (None, "a sequence of token ids or a Generation, got NoneType None"),
    "text": ("abc", "a sequence of token ids or a Generation, got str 'abc'"),
    "float": ([1, 2.0], "token ids as ints, got float 2.0 at index 1"),
    "bool": ([True], "token ids as ints, got bool True at index 0"),
    "nested": ([[1, 2]], "token ids as ints, got list [1, 2] at index 0"),
    "batch": (torch.tensor([[1, 2]]), "token ids as ints, got list [1, 2] at index 0"),
    "bool-tensor": (torch.tensor([True]), "token ids as ints, got bool True at index 0"),
    "float-tensor": (torch.tensor([1.0]), "token ids as ints, got float 1.0 at index 0"),
    "negative": ([1, -1], "token ids >= 0 and < 5, got -1 at index 1"),
    "beyond": ([0, 1, 5], "token ids >= 0 and < 5, got 5 at index 2"),
    "in-generation": (Generation((1, 9), "length"), "token ids >= 0 and < 5, got 9 at index 1"),
}


@pytest.mark.parametrize("kind", GENERATED)
def test_a_wrong_generation_gets_one_sentence(kind: str) -> None:
    out, sentence = GENERATED[kind]
    assert message_of(lambda: generate(out)) == f"generate() must return {sentence}"


def test_an_unknown_vocabulary_still_refuses_negative_tokens() -> None:
    assert message_of(lambda: generate([-1], None)) == "generate() must return token ids >= 0, got -1 at index 0"


ANSWERS = {
    "list": [1, 2],
    "tuple": (1, 2),
    "tensor": torch.tensor([1, 2]),
    "int32": torch.tensor([1, 2], dtype=torch.int32),
    "numpy": np.array([1, 2]),
    "numpy-ints": [np.int64(1), np.int32(2)],
    "scalars": [torch.tensor(1), torch.tensor(2)],
    "generation": Generation((1, 2), "length"),
    "generation-of-list": Generation([1, 2], "length"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_token_ids_come_as_any_sequence_of_whole_numbers(kind: str) -> None:
    tokens = generate(ANSWERS[kind]).tokens
    assert (tokens, {type(one) for one in tokens}) == ((1, 2), {int})


def test_bare_tokens_that_end_in_an_end_token_ended_there() -> None:
    generation = probe_of(generate=[1, 4]).generate([0], max_new_tokens=3, stop=Stop((4,)))
    assert (generation.finish_reason, generation.rounds) == ("eos", ())


def test_rounds_of_lists_become_rounds_of_tuples() -> None:
    given = Round([3, 1], [-1, 0], path=[1], bonus_token=2, emitted=[1, 2], prefix_len=0, num_rows=2)  # type: ignore[arg-type]
    assert generate(Generation((1, 2), "length", (given,))).rounds == (ROUND,)


ROUNDS = {
    "no-path": (
        Round((3, 1), (-1, 0), path=(2,), bonus_token=2, emitted=(1, 2), prefix_len=0, num_rows=2),
        "path = [2] must run from a child of the root downwards",
    ),
    "bad-tree": (
        Round((3, 1), (-1, 1), path=(1,), bonus_token=2, emitted=(1, 2), prefix_len=0, num_rows=2),
        "parents[1] = 1 must be < 1 (parents precede children)",
    ),
    "not-a-round": (SimpleNamespace(path=(1,)), "'types.SimpleNamespace' object has no attribute 'tokens'"),
}


@pytest.mark.parametrize("kind", ROUNDS)
def test_a_malformed_round_is_told_with_its_number(kind: str) -> None:
    bad, sentence = ROUNDS[kind]
    out = Generation((1, 2), "length", (ROUND, bad))  # type: ignore[arg-type]
    assert message_of(lambda: generate(out)) == (
        f"generate() must return a well-formed specbench.types.Round for each round, got round 2: {sentence}"
    )


TENSORS = {
    "none": (None, "a torch tensor of shape [3, 5], got NoneType None"),
    "list": ([[0.0] * 5] * 3, f"a torch tensor of shape [3, 5], got list {str([[0.0] * 5] * 3)[:57]}..."),
    "numpy": (np.zeros(2), "a torch tensor of shape [3, 5], got ndarray array([0., 0.])"),
    "batched": (torch.zeros(1, 3, 5), "shape [3, 5], got shape [1, 3, 5]"),
    "last-row": (torch.zeros(5), "shape [3, 5], got shape [5]"),
    "rows": (torch.zeros(2, 5), "shape [3, 5], got shape [2, 5]"),
    "columns": (torch.zeros(3, 6), "shape [3, 5], got shape [3, 6]"),
    "int": (torch.zeros(3, 5, dtype=torch.int64), "a floating dtype, got torch.int64"),
    "nan": (torch.zeros(3, 5).index_fill(0, torch.tensor(2), torch.nan), "numbers, got nan at [2, 0] (5 such entries)"),
    "inf": (torch.eye(5)[:3] / torch.zeros(1), "numbers, got inf at [0, 0] (15 such entries)"),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_a_wrong_logits_tensor_gets_one_sentence(kind: str) -> None:
    out, sentence = TENSORS[kind]
    assert message_of(lambda: probe_of(forward_tree=out).forward_tree(TREE)) == (
        f"forward_tree() must return {sentence}"
    )


def test_masked_logits_of_minus_infinity_are_numbers() -> None:
    out = torch.full((3, 5), -torch.inf)
    assert torch.equal(probe_of(forward_tree=out).forward_tree(TREE), out)


def test_a_tensor_answer_is_copied_before_the_target_can_write_over_it() -> None:
    out = torch.zeros(3, 5)
    logits = probe_of(forward_tree=out).forward_tree(TREE)
    out += 1
    assert not logits.any()


def test_logits_have_a_row_for_each_token() -> None:
    assert message_of(lambda: probe_of(logits=torch.zeros(1, 5)).logits([0, 1])) == (
        "logits() must return shape [2, 5], got shape [1, 5]"
    )


VERIFIED = {
    "none": (None, "a VerifyResult with `path` and `bonus_token`, got NoneType None"),
    "tuple": (([1], 2), "a VerifyResult with `path` and `bonus_token`, got tuple ([1], 2)"),
    "root": (
        SimpleNamespace(path=[0], bonus_token=1),
        "a VerifyResult with node numbers and a token id, "
        "got path[0] = 0 must be >= 1 (node 0 is the root, never a draft)",
    ),
    "negative": (
        SimpleNamespace(path=[], bonus_token=-1),
        "a VerifyResult with node numbers and a token id, got bonus_token = -1 must be >= 0 (a token id)",
    ),
    "beyond": (VerifyResult((1, 7), 0), "nodes < 3 in `path`, got [1, 7]"),
}


@pytest.mark.parametrize("kind", VERIFIED)
def test_a_wrong_verify_result_gets_one_sentence(kind: str) -> None:
    out, sentence = VERIFIED[kind]
    assert message_of(lambda: probe_of(verify=out).verify(TREE, torch.zeros(3, 5))) == (
        f"verify() must return {sentence}"
    )


def test_a_verifier_cannot_change_the_logits_it_is_given() -> None:
    def verify(tree: DraftTree, target_logits: torch.Tensor, *, sampling: object, coins: object) -> VerifyResult:
        target_logits += 1
        return VerifyResult((), 0)

    logits = torch.zeros(3, 5)
    adapter = SimpleNamespace(verify=verify)
    Probe(adapter, vocab_size=5, clock=Clock(), watchdog=Watchdog(0, print)).verify(TREE, logits)
    assert not logits.any()


KV = {
    "one": (torch.zeros(2, 3, 4), "a pair (keys, values), got a tensor of shape [2, 3, 4] and dtype torch.float32"),
    "flat": ((torch.zeros(3, 4), torch.zeros(3, 4)), "shape [?, ?, ?], got shape [3, 4]"),
    "nan": (
        (torch.zeros(1, 1, 1), torch.full((1, 1, 1), torch.nan)),
        "numbers, got nan at [0, 0, 0] (1 such entries)",
    ),
}


@pytest.mark.parametrize("kind", KV)
def test_wrong_keys_and_values_get_one_sentence(kind: str) -> None:
    out, sentence = KV[kind]
    assert message_of(lambda: probe_of(kv=out).kv(0)) == f"kv() must return {sentence}"


LENGTHS = {"tensor": torch.tensor(3), "bool": True, "float": 3.0}


@pytest.mark.parametrize("kind", LENGTHS)
def test_cache_len_must_be_an_int_property(kind: str) -> None:
    value = LENGTHS[kind]
    shown = "a tensor of shape [] and dtype torch.int64" if kind == "tensor" else f"{type(value).__name__} {value!r}"
    probe = Probe(SimpleNamespace(cache_len=value), vocab_size=5, clock=Clock(), watchdog=Watchdog(0, print))
    assert message_of(lambda: probe.cache_len) == (
        f"cache_len() must return an int (a property, not a method), got {shown}"
    )


class Raising:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def commit(self, path: list[int]) -> None:
        raise self.error


ERRORS = {
    "plain": (ValueError("path is no path"), "ValueError: path is no path"),
    "empty": (RuntimeError(), "RuntimeError: no message"),
    "many-lines": (RuntimeError("CUDA error\n  at frame 1\n  at frame 2"), "RuntimeError: CUDA error"),
    "assertion": (AssertionError("shape"), "AssertionError: shape"),
    "exit": (SystemExit("usage: engine"), "SystemExit: usage: engine"),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_an_exception_of_the_target_is_told_by_its_first_line(kind: str) -> None:
    error, sentence = ERRORS[kind]
    probe = Probe(Raising(error), vocab_size=5, clock=Clock(), watchdog=Watchdog(0, print))
    assert message_of(lambda: probe.commit([])) == f"commit() raised {sentence}"


def test_an_exception_of_the_target_is_told_with_the_line_that_raised_it() -> None:
    probe = Probe(Raising(KeyError("x")), vocab_size=5, clock=Clock(), watchdog=Watchdog(0, print))
    with pytest.raises(Misbehaviour) as error:
        probe.commit([])
    line = Raising.commit.__code__.co_firstlineno + 1
    assert error.value.facts.actual == f"KeyError ({Path(__file__)}:{line})"


def test_a_user_who_presses_control_c_is_obeyed() -> None:
    probe = Probe(Raising(KeyboardInterrupt()), vocab_size=5, clock=Clock(), watchdog=Watchdog(0, print))
    with pytest.raises(KeyboardInterrupt):
        probe.commit([])


def test_the_target_gets_plain_lists() -> None:
    seen: list[object] = []
    adapter = SimpleNamespace(prefill=seen.append, commit=seen.append)
    probe = Probe(adapter, vocab_size=5, clock=Clock(), watchdog=Watchdog(0, print))
    probe.prefill((1, 2))
    probe.commit((1,))
    assert seen == [[1, 2], [1]]


def test_taps_are_offered_only_when_wanted() -> None:
    seen: list[dict[str, object]] = []

    def forward_tree(tree: DraftTree, **keywords: object) -> torch.Tensor:
        seen.append(keywords)
        return torch.zeros(2, 5)

    adapter = SimpleNamespace(forward_tree=forward_tree)
    Probe(adapter, vocab_size=5, clock=Clock(), watchdog=Watchdog(0, print)).forward_tree(chain([1, 2]))
    assert seen == [{}]


def test_time_inside_the_target_is_counted_for_it() -> None:
    clock = Clock()
    Probe(SimpleNamespace(prefill=len), vocab_size=5, clock=clock, watchdog=Watchdog(0, print)).prefill([1])
    assert list(clock.seconds) == ["target"]
