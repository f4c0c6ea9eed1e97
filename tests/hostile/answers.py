"""Decoders whose answers are none: wrong types, shapes and numbers, endless ones, and objects that bite when touched.

`Answers` is a right decoder but for one method, whose answer goes through `change` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from specbench.reference.decoder import Decoder
from specbench.types import Generation


class Answers:
    def __init__(self, name: str, change: Callable[[Any], Any]) -> None:
        def method(self: Decoder, *args: Any, **keywords: Any) -> Any:
            return change(getattr(Decoder, name)(self, *args, **keywords))

        self._decoder = type("Hostile", (Decoder,), {name: method})

    def build(self, model: Any, drafter: Any) -> Decoder:
        return self._decoder(model, drafter)


# logits [N, V]


def quantised(logits: Tensor) -> Tensor:
    return torch.quantize_per_tensor(logits.float(), 0.1, 0, torch.qint8)


def one_infinite(logits: Tensor) -> Tensor:
    return logits.index_fill(1, torch.tensor(2), torch.inf)


def all_impossible(logits: Tensor) -> Tensor:
    return torch.full_like(logits, -torch.inf)


def with_gradient(logits: Tensor) -> Tensor:
    return logits.clone().requires_grad_() * 1.0


def expanded_view(logits: Tensor) -> Tensor:
    return logits.T.contiguous().T


def inferred(logits: Tensor) -> Tensor:
    with torch.inference_mode():
        return logits.clone()


class Biting(Tensor):
    """A tensor that no function of torch gets anything out of."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise RuntimeError(f"{function.__name__} is not implemented for Biting")


def biting(logits: Tensor) -> Tensor:
    return torch.Tensor._make_subclass(Biting, logits)


# token ids


def numpy_ints(generation: Generation) -> list[Any]:
    return [np.int64(token) for token in generation.tokens]


def endless_generator(generation: Generation) -> Iterator[int]:
    while True:
        yield 0


class GrowingList(list[int]):
    """Says that it holds one token, and never stops handing them out."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


class Untouchable:
    """Raises whatever is asked of it, its type included."""

    def __getattribute__(self, name: str) -> NoReturn:
        raise RuntimeError(f"do not touch {name}")

    def __repr__(self) -> NoReturn:
        raise RuntimeError("do not look")

    __len__ = __iter__ = __index__ = __bool__ = __hash__ = __repr__  # type: ignore[assignment]

    def __eq__(self, other: object) -> NoReturn:
        raise RuntimeError("do not compare")


class Unspeakable:
    def __repr__(self) -> NoReturn:
        raise SystemExit("no repr")


class Talkative:
    def __repr__(self) -> str:
        return "blah " * 1_000_000


class NoIndex:
    def __index__(self) -> NoReturn:
        raise RuntimeError("no number")


class EndlessPath:
    """path: a generator that does not end."""

    bonus_token = 0

    @property
    def path(self) -> Iterator[int]:
        while True:
            yield 1


def odd_reason(generation: Generation) -> Generation:
    return replace(generation, finish_reason=Untouchable())  # type: ignore[arg-type]


def endless_rounds(generation: Generation) -> Generation:
    def rounds() -> Iterator[Any]:
        while True:
            yield from generation.rounds

    return replace(generation, rounds=rounds())  # type: ignore[arg-type]


def texts_for_rounds(generation: Generation) -> Generation:
    return replace(generation, rounds=("a round",))  # type: ignore[arg-type]


def texts_in_a_round(generation: Generation) -> Generation:
    return replace(generation, rounds=tuple(replace(one, num_rows="two") for one in generation.rounds))  # type: ignore[arg-type]


# verify, kv


def path_of_text(result: Any) -> Any:
    return SimpleNamespace(path=["one"], bonus_token=result.bonus_token)


def fractional_bonus(result: Any) -> Any:
    return SimpleNamespace(path=result.path, bonus_token=1.5)


class EndlessPair(tuple[Any, ...]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.zeros(1)
