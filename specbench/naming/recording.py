"""What the good decoder's steps were asked and answered on a case, to ask a planted one the same without a decoder.

A step is a function of what it is given. One that answers all of it as the good one does changes nothing on the case,
so that a whole run with it, which takes a hundred times as long, would end as the good decoder's did.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.reference.faults.fault import Fault
from specbench.steps import Steps

ASKED_AGAIN = frozenset({"flatten", "process", "walk", "emit"})  # those that change none of what they are given


@dataclass(frozen=True)
class Call:
    step: str
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    answer: Any


@dataclass(frozen=True)
class Recording:
    """The calls of one decoder's steps, in order."""

    steps: Steps
    calls: list[Call] = field(default_factory=list)

    def note(self, step: str, args: tuple[Any, ...], keywords: dict[str, Any], answer: Any) -> None:
        if step in ASKED_AGAIN:
            self.calls.append(Call(step, _kept(args), _kept(keywords), _kept(answer)))


def changes_nothing(fault: Fault, planted: Collection[str], recordings: Collection[Recording]) -> bool:
    """Whether every answer of the fault's steps is the recorded one. False where that cannot be told from recordings:
    the fault lies in other parts as well."""
    if fault.target is not None or not planted or not ASKED_AGAIN.issuperset(planted):
        return False
    for recording in recordings:
        steps = fault.plant(recording.steps)
        for call in recording.calls:
            if call.step not in planted:
                continue
            args, keywords = _kept(call.args), _kept(call.keywords)
            try:
                answer = getattr(steps, call.step)(*args, **keywords)
            except Exception:
                return False
            if not _equal((answer, args, keywords), (call.answer, call.args, call.keywords)):
                return False
    return True


def _kept(value: Any) -> Any:
    """A copy of what others may write to."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, list | tuple):
        return type(value)(_kept(one) for one in value)
    if isinstance(value, dict):
        return {name: _kept(one) for name, one in value.items()}
    return value


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    if is_dataclass(one):
        return all(_equal(getattr(one, part.name), getattr(other, part.name)) for part in fields(one))
    return bool(one == other)
