"""What an engine gives as an answer: right forms become Python's own, wrong ones are a sentence that says where."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specbench.engines import Answer
from specbench.engines.answers import Malformed, checked, each

NAN = float("nan")


@pytest.mark.parametrize(
    "tokens",
    [[3, 4], (3, 4), np.array([3, 4]), torch.tensor([3, 4]), [np.int64(3), torch.tensor(4)], range(3, 5)],
    ids=["list", "tuple", "numpy", "torch", "scalars", "range"],
)
def test_tokens_of_every_right_form_are_ints(tokens: Any) -> None:
    answer = checked(Answer(tokens, np.int32(1), torch.tensor(4), 2, logprobs=[[(np.int64(3), np.float32(-1))], []]), 1)
    assert answer == Answer((3, 4), 1, 4, 2, (((3, -1.0),), ()))
    assert {type(one) for one in (*answer.tokens, answer.num_forwards, answer.num_drafted)} == {int}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (None, "answer 3: must be an Answer(tokens=...), not None"),
        ({"tokens": [1]}, "answer 3: must be an Answer(tokens=...), not {'tokens': [1]}"),
        (Answer(None), "answer 3: tokens must be a sequence of token ids, not None"),
        (Answer("12"), "answer 3: tokens must be a sequence of token ids, not '12'"),
        (Answer(5), "answer 3: tokens must be a sequence of token ids, not 5"),
        (Answer({1, 2}), "answer 3: tokens must be a sequence of token ids, not {1, 2}"),
        (Answer([1, True]), "answer 3: tokens[1] = True must be an int"),
        (Answer(np.array([1, 0]) > 0), "answer 3: tokens[0] = True must be an int"),
        (Answer([1.0]), "answer 3: tokens[0] = 1.0 must be an int"),
        (Answer(["1"]), "answer 3: tokens[0] = '1' must be an int"),
        (Answer([[1, 2]]), "answer 3: tokens[0] = [1, 2] must be an int"),
        (Answer(torch.tensor([[1, 2]])), "answer 3: tokens[0] = [1, 2] must be an int"),
        (Answer([1, -1]), "answer 3: tokens[1] = -1 must be between 0 and 15, a token id"),
        (Answer([10**30]), f"answer 3: tokens[0] = {10**30} must be between 0 and 15, a token id"),
        (Answer([10**5000]), "answer 3: tokens[0] = a int must be between 0 and 15, a token id"),
        (Answer([1], num_forwards=-3), "answer 3: num_forwards = -3 must be at least 0, or None where it is not known"),
        (Answer([1], num_drafted="y"), "answer 3: num_drafted = 'y' must be an int"),
        (Answer([1], num_kept=0.5), "answer 3: num_kept = 0.5 must be an int"),
        (Answer([1], num_drafted=1, num_kept=2), "answer 3: num_kept = 2 must be at most num_drafted = 1"),
        (Answer([1], logprobs=None), "answer 3: logprobs must be a sequence of places, one a token, not None"),
        (Answer([1, 2], logprobs=[()]), "answer 3: logprobs is of 1 of 2 tokens, must have a place for each, or none"),
        (Answer([1], logprobs=[(1, -0.5)]), "answer 3: logprobs[0][0] must be a sequence of a token and its logprob, "),
        (Answer([1], logprobs=[[(1,)]]), "answer 3: logprobs[0][0] = [1] must be a pair (token, logprob)"),
        (Answer([1], logprobs=[[(1, NAN)]]), "answer 3: logprobs[0][0] has the logprob nan, must be a number"),
        (Answer([1], logprobs=[[("1", -1)]]), "answer 3: logprobs[0][0][0] = '1' must be an int"),
    ],
)
def test_a_wrong_form_is_named_with_its_place(given: Any, sentence: str) -> None:
    with pytest.raises(Malformed) as caught:
        checked(given, 3, vocab_size=16)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize("said", [None, 3, {"a": 1}, Answer((1,)), "text"])
def test_what_is_no_sequence_of_answers_is_named(said: Any) -> None:
    with pytest.raises(Malformed, match=r"^generate must give Answers, one a request \(yield them\), not "):
        list(each(said))
