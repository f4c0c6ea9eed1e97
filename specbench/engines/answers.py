"""Answers of an engine, made to be what they must be, or refused in a sentence. Standard library only, as `engine.py`.

Numbers of numpy and torch, and their arrays, become Python's. Whether the tokens are right is judged elsewhere.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

from specbench.engines.engine import Answer

_SHOWN = 60  # characters of a wrong value


class Malformed(Exception):
    """What an engine gave is no answer; the text says which, what is wrong in it, and what must stand there."""


def checked(given: Any, number: int, *, vocab_size: int | None = None) -> Answer:
    """The answer to request `number`, counted from 1. vocab_size: tokens must be below it; None lets any int stand."""
    try:
        return _checked(given, vocab_size)
    except Malformed as wrong:
        raise Malformed(f"answer {number}: {wrong}") from None


def each(said: Any) -> Iterator[Answer]:
    """What `generate` gave, one checked answer after the other."""
    if isinstance(said, (Answer, Mapping, str)) or not isinstance(said, Iterable):
        raise Malformed(f"generate must give Answers, one a request (yield them), not {_shown(said)}")
    for number, one in enumerate(said, start=1):
        yield checked(one, number)


def _checked(given: Any, vocab_size: int | None) -> Answer:
    if not isinstance(given, Answer):
        raise Malformed(f"must be an Answer(tokens=...), not {_shown(given)}")
    tokens = tuple(_int(f"tokens[{at}]", one) for at, one in enumerate(_items("tokens", given.tokens, "token ids")))
    if vocab_size is not None:
        for at, token in enumerate(tokens):
            if not 0 <= token < vocab_size:
                raise Malformed(f"tokens[{at}] = {_shown(token)} must be between 0 and {vocab_size - 1}, a token id")
    counts = {name: _count(name, getattr(given, name)) for name in ("num_forwards", "num_drafted", "num_kept")}
    drafted, kept = counts["num_drafted"], counts["num_kept"]
    if drafted is not None and kept is not None and kept > drafted:
        raise Malformed(f"num_kept = {_shown(kept)} must be at most num_drafted = {_shown(drafted)}")
    places = _items("logprobs", given.logprobs, "places, one a token")
    if len(places) not in (0, len(tokens)):
        raise Malformed(f"logprobs is of {len(places)} of {len(tokens)} tokens, must have a place for each, or none")
    return Answer(tokens=tokens, logprobs=tuple(_place(at, place) for at, place in enumerate(places)), **counts)


def _items(name: str, value: Any, what: str) -> list[Any]:
    value = _unwrapped(value)
    if isinstance(value, (str, bytes, Mapping, Set)) or not isinstance(value, Iterable):
        raise Malformed(f"{name} must be a sequence of {what}, not {_shown(value)}")
    return list(value)


def _int(name: str, value: Any) -> int:
    """bool is an int to Python, and no token."""
    value = _unwrapped(value)
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise Malformed(f"{name} = {_shown(value)} must be an int")


def _count(name: str, value: Any) -> int | None:
    number = None if value is None else _int(name, value)
    if number is not None and number < 0:
        raise Malformed(f"{name} = {_shown(number)} must be at least 0, or None where it is not known")
    return number


def _place(at: int, place: Any) -> tuple[tuple[int, float], ...]:
    pairs = [
        _items(f"logprobs[{at}][{nth}]", pair, "a token and its logprob")
        for nth, pair in enumerate(_items(f"logprobs[{at}]", place, "pairs (token, logprob)"))
    ]
    told = []
    for nth, pair in enumerate(pairs):
        name = f"logprobs[{at}][{nth}]"
        if len(pair) != 2:
            raise Malformed(f"{name} = {_shown(pair)} must be a pair (token, logprob)")
        logprob = _unwrapped(pair[1])
        if isinstance(logprob, bool) or not isinstance(logprob, (int, float)) or math.isnan(logprob):
            raise Malformed(f"{name} has the logprob {_shown(logprob)}, must be a number")
        told.append((_int(f"{name}[0]", pair[0]), float(logprob)))
    return tuple(told)


def _unwrapped(value: Any) -> Any:
    """Of numpy or torch, neither of which need be here."""
    return value.tolist() if hasattr(value, "tolist") else value


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # an int of thousands of digits, or a __repr__ of the engine's own
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
