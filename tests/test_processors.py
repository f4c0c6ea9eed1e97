"""reference.processors: by hand, and against transformers' own processors; stops and grammars of specbench.types."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor
from transformers.generation.logits_process import MinNewTokensLengthLogitsProcessor

from specbench.reference.autoregressive import generate
from specbench.reference.model import LlamaConfig, tiny_llama
from specbench.reference.processors import forbidden_tokens, process_row
from specbench.reference.steps import process
from specbench.tree import DraftTree
from specbench.types import GREEDY, NEVER_STOP, Automaton, Sampling, Stop

ROW = torch.tensor([2.0, -1.0, 0.5, 4.0, -3.0], dtype=torch.float64)
MODEL = tiny_llama(LlamaConfig(31, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8), seed=0)


def processed(sampling: Sampling, history: list[int], *, num_prompt: int, stop: Stop = NEVER_STOP) -> list[float]:
    return process_row(ROW, history, num_prompt=num_prompt, sampling=sampling, stop=stop).tolist()


def test_a_repetition_penalty_counts_each_token_of_prompt_and_output_once() -> None:
    out = processed(Sampling(repetition_penalty=2.0), [0, 1, 1], num_prompt=1)
    assert out == [1.0, -2.0, 0.5, 4.0, -3.0]


def test_presence_and_frequency_look_at_the_output_alone() -> None:
    sampling = Sampling(presence_penalty=1.0, frequency_penalty=0.25)
    assert processed(sampling, [3, 2, 2, 4], num_prompt=1) == [2.0, -1.0, 0.5 - 0.5 - 1.0, 4.0, -3.0 - 0.25 - 1.0]


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_the_repetition_penalty_is_transformers(penalty: float) -> None:
    history = [0, 4, 4, 2]
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([history]), ROW[None].clone())[0]
    assert processed(Sampling(repetition_penalty=penalty), history, num_prompt=2) == theirs.tolist()


def test_bad_words_are_transformers() -> None:
    words = [[1], [2, 3], [4, 2, 0]]
    for history in ([2], [4, 2], [2, 2], [0, 4, 2]):
        theirs = NoBadWordsLogitsProcessor(words, eos_token_id=[])(torch.tensor([history]), ROW[None].clone())[0]
        ours = processed(Sampling(bad_words=tuple(map(tuple, words))), history, num_prompt=0)
        assert ours == theirs.tolist()


@pytest.mark.parametrize("num_new", range(4))
def test_the_least_length_is_transformers(num_new: int) -> None:
    history = [1, 1, *[3] * num_new]
    theirs = MinNewTokensLengthLogitsProcessor(2, 2, eos_token_id=[0, 4])(torch.tensor([history]), ROW[None].clone())[0]
    ours = processed(GREEDY, history, num_prompt=2, stop=Stop((0, 4), min_new_tokens=2))
    assert ours == theirs.tolist()


def test_a_grammar_leaves_only_what_its_state_allows() -> None:
    grammar = Automaton((((1, 1), (3, 0)), ((4, 0),)))
    assert forbidden_tokens([3, 1], 5, sampling=Sampling(grammar=grammar), stop=NEVER_STOP) == [0, 1, 2, 3]
    assert forbidden_tokens([1, 4], 5, sampling=Sampling(grammar=grammar), stop=NEVER_STOP) == [0, 2, 4]


def test_processors_are_called_in_turn_behind_everything_else() -> None:
    seen: list[tuple[int, ...]] = []

    def first(history: tuple[int, ...], row: torch.Tensor) -> torch.Tensor:
        seen.append(history)
        return row + 1

    sampling = Sampling(presence_penalty=1.0, processors=(first, lambda history, row: row * 2))
    assert processed(sampling, [4, 0], num_prompt=1)[0] == 2 * (2.0 - 1.0 + 1)
    assert seen == [(4, 0)]


def test_each_node_is_processed_with_its_own_path() -> None:
    """Two siblings and a child of the second one, behind a prompt of one and an output of one."""
    seen: list[tuple[int, ...]] = []

    def recorder(history: tuple[int, ...], row: torch.Tensor) -> torch.Tensor:
        seen.append(history)
        return row

    tree = DraftTree.of((0, 1, 2, 3), (-1, 0, 0, 2))
    process(
        tree, ROW.repeat(4, 1), context=[4, 0], num_prompt=1, sampling=Sampling(processors=(recorder,)), stop=NEVER_STOP
    )
    assert seen == [(4, 0), (4, 0, 1), (4, 0, 2), (4, 0, 2, 3)]


def test_rows_are_left_alone_when_nothing_is_asked() -> None:
    tree = DraftTree.of((7, 1), (-1, 0))
    logits = ROW.repeat(2, 1)
    assert process(tree, logits, context=[7], num_prompt=1, sampling=GREEDY, stop=NEVER_STOP) is logits


REASONS = {
    "an end token": (Stop((4,)), [1, 4], "eos"),
    "an end token that may not be yet": (Stop((4,), min_new_tokens=2), [1, 4], None),
    "an end token after the least length": (Stop((4,), min_new_tokens=2), [1, 2, 4], "eos"),
    "a stop sequence": (Stop(stop_sequences=((1, 4),)), [2, 1, 4], "stop"),
    "half a stop sequence": (Stop(stop_sequences=((1, 4),)), [4], None),
    "a stop sequence among the first tokens": (Stop(stop_sequences=((1, 4),), min_new_tokens=2), [1, 4], None),
    "both at once": (Stop((4,), stop_sequences=((1, 4),)), [1, 4], "eos"),
    "nothing said": (Stop((4,)), [], None),
}


@pytest.mark.parametrize(("stop", "output", "expected"), REASONS.values(), ids=REASONS)
def test_why_an_output_ends(stop: Stop, output: list[int], expected: str | None) -> None:
    assert stop.reason_at(output) == expected


BAD = {
    "an empty stop sequence": (
        lambda: Stop(stop_sequences=((),)),
        "stop_sequences[0] = [] must hold at least one token",
    ),
    "a negative bad word": (lambda: Sampling(bad_words=((1,), (-1,))), "bad_words[1] = [-1] must hold at least one"),
    "a negative least length": (lambda: Stop(min_new_tokens=-1), "min_new_tokens = -1 must be >= 0"),
    "no repetition": (lambda: Sampling(repetition_penalty=0.0), "repetition_penalty = 0.0 must be finite and > 0.0"),
    "an infinite penalty": (lambda: Sampling(presence_penalty=math.inf), "presence_penalty = inf must be finite"),
    "a state without tokens": (lambda: Automaton(((),)), "transitions[0] is empty: a state must allow at least one"),
    "a state that is not there": (lambda: Automaton((((3, 1),),)), "transitions[0] holds (3, 1), must be a token >= 0"),
}


@pytest.mark.parametrize(("make", "sentence"), BAD.values(), ids=BAD)
def test_what_makes_no_sense_is_refused_in_one_sentence(make, sentence: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError) as raised:
        make()
    assert str(raised.value).startswith(sentence)


def test_an_automaton_that_was_left_has_no_state() -> None:
    grammar = Automaton((((1, 1),), ((2, 0),)))
    assert [grammar.state_after(text) for text in ([], [1], [1, 2], [2], [2, 1])] == [0, 1, 0, None, None]


def test_plain_decoding_goes_on_past_a_stop_only_when_asked() -> None:
    plain = generate(MODEL, [3, 1], max_new_tokens=6).tokens
    stop = Stop((plain[2],))
    short = generate(MODEL, [3, 1], max_new_tokens=6, stop=stop)
    long = generate(MODEL, [3, 1], max_new_tokens=6, stop=stop, past_stop=True)
    assert (short.tokens, short.finish_reason, long.tokens) == (plain[: plain.index(plain[2]) + 1], "eos", plain)
