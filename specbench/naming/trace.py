"""What an instance answered, in order, on one case; and where two such traces part.

A trace is a list of answers, each taken apart into `Leaf`s: a row of logits, a row of keys, a token, a round. Two
implementations with the same fault give the same leaves; what a right one is free to choose (the order of a forward's
rows, bytes, pages) is left out or put in one order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.cases import Case
from specbench.checks import CHECKS
from specbench.claims import Misbehaviour, Violation
from specbench.compare import max_error, scale_of
from specbench.loading import TargetError
from specbench.record import ClaimRecord
from specbench.subjects import NotTested, Subject
from specbench.tree import DraftTree
from specbench.types import Generation, Taps, VerifyResult

MAX_ANSWERS = 4_096


class Parted(BaseException):
    """The trace in progress, the argument, has left the one that it is compared with. Not an Exception: no check may
    catch it."""


@dataclass(frozen=True)
class Leaf:
    """One comparable part of an answer. number: which answer of the trace. name: of the method. part: which part."""

    number: int
    name: str
    part: tuple[str | int, ...]


Leaves = dict[Leaf, Any]


class Trace:
    """The answers of one run of a check. like: another trace; `Parted` is raised at the first answer that differs from
    it by more than `tolerance` (of the answer's scale)."""

    def __init__(self, *, like: Trace | None = None, tolerance: float = 0.0) -> None:
        self.answers: list[Leaves] = []
        self.leaves: Leaves = {}  # of all answers
        self._like = like
        self._tolerance = tolerance

    def note(self, name: str, answer: Any) -> None:
        number = len(self.answers)
        if number == MAX_ANSWERS:
            return
        leaves = {Leaf(number, name, part): value for part, value in _parts(answer)}
        self.answers.append(leaves)
        self.leaves |= leaves
        if self._like is not None and not equal(leaves, self._like.answer(number), self._tolerance):
            raise Parted(self)

    def answer(self, number: int) -> Leaves:
        return self.answers[number] if number < len(self.answers) else {}


def trace_of(subject: Subject, claim: str, case: Case, *, like: Trace | None = None, tolerance: float = 0.0) -> Trace:
    """Runs the check of a claim on a case and keeps what the instances answered. How it ended is the last answer."""
    trace = Trace(like=like, tolerance=tolerance)
    subject.note = trace.note
    try:
        CHECKS[claim](subject, case, ClaimRecord(claim, subject.name))
    except Misbehaviour as violation:
        trace.note("misbehaves", violation.facts.headline.split(":", 1)[0])
    except Violation:
        pass  # what it answered tells
    except (NotTested, TargetError) as error:
        trace.note("not tested", str(error))
    finally:
        subject.note = None
    return trace


def differing(actual: Trace, right: Trace, tolerance: float) -> list[Leaf]:
    """The leaves in which two traces differ, in order: other values, or leaves that only one of them has."""
    mine, others = actual.leaves, right.leaves
    found = {leaf for leaf in mine.keys() | others.keys() if not same(mine.get(leaf), others.get(leaf), tolerance)}
    order = {leaf: idx for idx, leaf in enumerate(dict.fromkeys([*mine, *others]))}
    return sorted(found, key=lambda leaf: (leaf.number, order[leaf]))


def equal(one: Leaves, other: Leaves, tolerance: float) -> bool:
    return one.keys() == other.keys() and all(same(value, other[leaf], tolerance) for leaf, value in one.items())


def same(one: Any, other: Any, tolerance: float) -> bool:
    """Equal, tensors up to rounding."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape:
            return False
        return max_error(one, other) <= tolerance * max(1.0, scale_of(other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-9 * max(1.0, abs(other))
    return bool(type(one) is type(other) and one == other)


def _parts(answer: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(answer, Tensor):
        for row, values in enumerate(answer):
            yield ("row", row), values
    elif isinstance(answer, Taps):
        yield from _taps(answer)
    elif isinstance(answer, Generation):
        for idx, token in enumerate(answer.tokens):
            yield ("token", idx), token
        yield ("finish_reason",), answer.finish_reason
        for number, one in enumerate(answer.rounds, start=1):
            yield ("round", number), (one.tokens, one.parents, one.path, one.bonus_token, one.emitted, one.prefix_len)
    elif isinstance(answer, VerifyResult):
        yield ("path",), answer.path
        yield ("bonus_token",), answer.bonus_token
    elif isinstance(answer, DraftTree):
        yield ("tokens",), answer.token_list
        yield ("parents",), answer.parent_list
        if answer.draft_probs is not None:
            for row, values in enumerate(answer.draft_probs):
                yield ("draft_probs", row), values
    elif isinstance(answer, dict):
        for name, value in answer.items():
            yield (name,), value
    elif isinstance(answer, tuple) and answer and isinstance(answer[0], Tensor):  # keys and values [Hkv, S, D]
        for tensor, which in zip(answer, "kv", strict=True):
            for row in range(tensor.shape[1]):
                yield (which, row), tensor[:, row]
    elif isinstance(answer, BaseException):
        yield (), str(answer)
    else:
        yield (), tuple(answer) if isinstance(answer, list) else answer


def _taps(taps: Taps) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """By node: which of a forward's rows stands for it is the target's to choose. Copies: buffers are used again."""
    named = None if taps.node_of_row is None else taps.node_of_row.tolist()
    num_rows = next((len(one) for one in (taps.position_ids, taps.mask) if one is not None), 0)
    node_of_row = named or list(range(num_rows))
    rows = {node: row for row, node in reversed(list(enumerate(node_of_row)))}
    for node, row in sorted(rows.items()):
        if taps.position_ids is not None:
            yield ("position", node), int(taps.position_ids[row])
        if taps.mask is not None:
            yield ("mask", node), _seen(taps.mask[row], node_of_row)
    for idx, layer in enumerate(taps.layers):
        weights = layer.attention_weights
        if weights is not None:
            for node, row in sorted(rows.items()):
                yield ("weights", idx, node), _by_node(weights[:, row], node_of_row)
        for name in ("k", "v", "attention_output", "hidden_state"):
            value = getattr(layer, name)
            for node, row in sorted(rows.items()) if value is not None else ():
                yield (name, idx, node), (value[:, row] if name in "kv" else value[row]).clone()


def _seen(mask: Tensor, node_of_row: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Prefix rows and nodes that a row may attend to."""
    num_prefix = len(mask) - len(node_of_row)
    seen = torch.nonzero(mask).flatten().tolist()
    nodes = sorted(node_of_row[one - num_prefix] for one in seen if one >= num_prefix)
    return tuple(one for one in seen if one < num_prefix), tuple(nodes)


def _by_node(weights: Tensor, node_of_row: list[int]) -> Tensor:
    """[Hq, P+M] with the columns of the forward's rows in the order of nodes."""
    num_prefix = weights.shape[-1] - len(node_of_row)
    order = sorted(range(len(node_of_row)), key=lambda row: (node_of_row[row], row))
    return weights[:, [*range(num_prefix), *(num_prefix + row for row in order)]].clone()
