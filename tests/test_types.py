"""The plain values: what they refuse and the few numbers they derive."""

from __future__ import annotations

import math
import re

import pytest
import torch

from specbench.types import (
    GREEDY,
    NEVER_STOP,
    Generation,
    LayerTap,
    Round,
    Sampling,
    Stop,
    Taps,
    VerifyResult,
    as_token_ids,
)


def a_round(path: tuple[int, ...]) -> Round:
    return Round(tokens=(1,), parents=(-1,), path=path, bonus_token=0, emitted=(0,), prefix_len=0, num_rows=1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.5}, "temperature = -0.5 must be finite and >= 0.0 (0.0 means argmax)"),
        ({"temperature": math.inf}, "temperature = inf must be finite and >= 0.0 (0.0 means argmax)"),
        ({"temperature": math.nan}, "temperature = nan must be finite and >= 0.0 (0.0 means argmax)"),
        ({"top_k": 0}, "top_k = 0 must be >= 1, or None for no cut"),
        ({"top_p": 0.0}, "top_p = 0.0 must be in (0, 1], or None for no cut"),
        ({"top_p": 1.5}, "top_p = 1.5 must be in (0, 1], or None for no cut"),
        ({"top_p": math.nan}, "top_p = nan must be in (0, 1], or None for no cut"),
        ({"num_beams": 0}, "num_beams = 0 must be >= 1"),
    ],
)
def test_impossible_sampling_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Sampling(**fields)


def test_boundary_sampling_is_accepted():
    sampling = Sampling(temperature=0.0, top_k=1, top_p=1.0, num_beams=4)
    assert (sampling.top_k, sampling.top_p, sampling.num_beams) == (1, 1.0, 4)


def test_sampling_is_greedy_unless_told():
    assert (GREEDY.temperature, GREEDY.top_k, GREEDY.top_p, GREEDY.num_beams) == (0.0, None, None, 1)


def test_a_negative_end_token_is_refused_by_index():
    with pytest.raises(ValueError, match=r"^eos_token_ids\[1\] = -1 must be >= 0 \(a token id\)$"):
        Stop(eos_token_ids=(3, -1))


def test_end_tokens_are_kept_as_ints_whatever_sequence_they_came_in():
    assert Stop([torch.tensor(3), 5]) == Stop((3, 5)) and Stop([3]).eos_token_ids == (3,)  # type: ignore[arg-type]


def test_never_stop_has_no_end_token():
    assert NEVER_STOP.eos_token_ids == ()


@pytest.mark.parametrize(
    ("path", "bonus_token", "message"),
    [
        ((0, 1), 5, "path[0] = 0 must be >= 1 (node 0 is the root, never a draft)"),
        ((1, -1), 5, "path[1] = -1 must be >= 1 (node 0 is the root, never a draft)"),
        ((1,), -1, "bonus_token = -1 must be >= 0 (a token id)"),
    ],
)
def test_an_impossible_verify_result_is_refused_by_name(path, bonus_token, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        VerifyResult(path, bonus_token)


@pytest.mark.parametrize(("path", "num_accepted", "acceptance_length"), [((), 0, 1), ((2,), 1, 2), ((1, 4, 6), 3, 4)])
def test_acceptance_length_counts_the_extra_token_and_num_accepted_does_not(path, num_accepted, acceptance_length):
    result = VerifyResult(path, 0)
    assert (result.num_accepted, result.acceptance_length) == (num_accepted, acceptance_length)


def test_a_verify_result_of_tensor_scalars_equals_one_of_ints():
    assert VerifyResult([torch.tensor(1)], torch.tensor(7)) == VerifyResult((1,), 7)  # type: ignore[arg-type]


def test_acceptance_length_is_pooled_over_rounds():
    """Three forwards emit 1 + 4 + 2 tokens."""
    assert Generation((0,) * 7, "length", (a_round(()), a_round((1, 2, 3)), a_round((1,)))).acceptance_length == 7 / 3


def test_acceptance_length_without_rounds_is_not_a_number():
    assert math.isnan(Generation((), "length").acceptance_length)


def test_a_layer_tap_is_made_on_first_use_and_kept():
    taps = Taps()
    tap = taps.layer(2)
    assert len(taps.layers) == 3 and taps.layer(2) is tap and taps.layer(0) == LayerTap()


@pytest.mark.parametrize("tokens", [[3, 0, 9], (3, 0, 9), torch.tensor([3, 0, 9])], ids=["list", "tuple", "tensor"])
def test_token_ids_of_any_kind_become_a_tuple_of_ints(tokens):
    assert as_token_ids(tokens, argument="prompt", vocab_size=10) == (3, 0, 9)


def test_no_token_ids_are_an_empty_tuple():
    assert as_token_ids([], argument="prompt") == ()


@pytest.mark.parametrize(
    ("tokens", "vocab_size", "message"),
    [
        ([3, 10], 10, "prompt[1] = 10 must be >= 0 and < 10 (the vocabulary)"),
        ([-1], 10, "prompt[0] = -1 must be >= 0 and < 10 (the vocabulary)"),
        ([4, 4, -1], None, "prompt[2] = -1 must be >= 0"),
    ],
)
def test_the_first_impossible_token_id_is_named(tokens, vocab_size, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        as_token_ids(tokens, argument="prompt", vocab_size=vocab_size)
