"""Decoders that raise: in every call, and everything that can be raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from specbench.reference.decoder import Decoder
from specbench.subjects import NotTested


class _Face:
    """A right decoder seen from outside: what it calls itself inside is not what we call."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)


class RaisesIn:
    """A right decoder but for one method or property, which calls `raising`."""

    def __init__(self, name: str, raising: Callable[[], object]) -> None:
        def method(self: _Face, *args: Any, **keywords: Any) -> object:
            return raising()

        body: Any = property(method) if name in ("cache_len", "num_layers") else method
        self._face = type("Hostile", (_Face,), {name: body})

    def build(self, model: Any, drafter: Any) -> Any:
        return self._face(Decoder(model, drafter))


class RaisesInBuild:
    def build(self, model: Any, drafter: Any) -> Decoder:
        raise RuntimeError("no kernel image for this device")


class LeavesInBuild:
    def build(self, model: Any, drafter: Any) -> Decoder:
        raise SystemExit("usage: engine --gpus N")


class RaisesInBuildFrom:
    def build_from(self, checkpoint: str, drafter_checkpoint: str | None) -> Decoder:
        raise OSError("shard 3 of 7 is missing")


class RaisesLaterInBuild:
    """The instance that is made to look at its methods comes out well, one that is to draft does not."""

    def build(self, model: Any, drafter: Any) -> Decoder:
        if drafter is not None:
            raise RuntimeError("out of pages")
        return Decoder(model, drafter)


class RaisesAtFirstLogits:
    def logits(self, tokens: list[int]) -> NoReturn:
        raise RuntimeError("no weights here")


class RaisesAtLaterLogits:
    """Level 0 and 1: its second text of logits is too long for it."""

    def logits(self, tokens: list[int]) -> Any:
        import torch

        if len(tokens) > 1:
            raise IndexError("position 1 is out of range")
        return torch.zeros(1, 7, dtype=torch.float64)

    def generate(self, prompt: list[int], *, max_new_tokens: int, sampling: Any, stop: Any, seed: int) -> list[int]:
        return [0] * max_new_tokens


class OutOfBand(BaseException):
    pass


class NoText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class TextOfAnotherMake(Exception):
    class _Text(str):
        def strip(self, *args: object) -> NoReturn:
            raise ValueError("not to be stripped")

        splitlines = __getitem__ = __len__ = strip  # type: ignore[assignment]

    def __str__(self) -> str:
        return self._Text("text of another make")


class NoContext(Exception):
    """Whoever walks an exception's context gets another one."""

    @property
    def __context__(self) -> NoReturn:  # type: ignore[override]
        raise ValueError("no context")

    @property
    def __cause__(self) -> NoReturn:  # type: ignore[override]
        raise ValueError("no cause")


def raises(error: BaseException) -> Callable[[], NoReturn]:
    def raising() -> NoReturn:
        raise error

    return raising


def recurses() -> object:
    return recurses()


def skips_the_test() -> NoReturn:
    """pytest's own exceptions are no way out."""
    pytest.skip("nothing to see here")


def leaves_pytest() -> NoReturn:
    pytest.exit("that will do")


def claims_to_be_not_tested() -> NoReturn:
    """Nor are specbench's."""
    raise NotTested("trust me")


def rejects_the_case() -> object:
    """Nor are Hypothesis's: a rejected case would not count."""
    from hypothesis import assume

    return assume(False)


def overflows() -> NoReturn:
    raise ValueError("x" * 5_000_000)
