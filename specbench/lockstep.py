"""Ranks that decode one text in lock step, simulated by threads: what one rank broadcasts is what all of them get.

`LockStep` hands each rank its `Group` and runs one function a rank, one of them at a time: they take turns where they
meet, so ranks may share a model that is not made for threads. A rank that waits for a partner which has gone, or which
does not come in time, is told so by an exception: a decoder's fault is a finding and not a hang.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

Value = TypeVar("Value")
Answer = TypeVar("Answer")


class Group(Protocol):
    """What a rank sees of the others: a collective operation that all call in the same order."""

    rank: int
    size: int

    def broadcast(self, value: Value, *, root: int = 0) -> Value:
        """Returns what rank `root` passed, on every rank; the others pass None or a value of the same type."""
        ...


class OutOfStep(RuntimeError):
    """The ranks do not call the same thing in the same order; the text says which does what."""


class RankGroup:
    """One rank's place in a `LockStep`. num_broadcasts: completed so far."""

    def __init__(self, meeting: LockStep, rank: int) -> None:
        self.rank = rank
        self.size = meeting.size
        self.num_broadcasts = 0
        self._meeting = meeting

    def broadcast(self, value: Value, *, root: int = 0) -> Value:
        """A copy of what rank `root` passed. OutOfStep when the ranks do not meet, ValueError for no such root."""
        if not 0 <= root < self.size:
            raise ValueError(f"root = {root} must be >= 0 and < {self.size} (ranks)")
        heard: Value = self._meeting.exchange(self.rank, self.num_broadcasts, root, value)
        self.num_broadcasts += 1
        return heard


class LockStep:
    """size: ranks. timeout: seconds a rank waits for the others."""

    def __init__(self, size: int, *, timeout: float) -> None:
        if size < 1:
            raise ValueError(f"size = {size} must be >= 1 (ranks)")
        self.size = size
        self.groups = [RankGroup(self, rank) for rank in range(size)]
        self._timeout = timeout
        self._changed = threading.Condition()
        self._calls: dict[int, dict[int, tuple[int, Any]]] = {}  # number of the broadcast -> rank -> (root, value)
        self._gone: set[int] = set()
        self._broken = ""
        self._turn = threading.Lock()
        self._whose_turn: int | None = None

    def run(self, calls: Sequence[Callable[[], Answer]]) -> list[Answer | BaseException]:
        """Runs one call a rank, in turns. Returns the answers, or what a rank raised, in the order of ranks."""
        if len(calls) != self.size:
            raise ValueError(f"calls has {len(calls)} entries, must have {self.size} (ranks)")
        answers: list[Answer | BaseException] = [OutOfStep("this rank has not ended")] * self.size

        def work(rank: int) -> None:
            self._take_turn(rank)
            try:
                answers[rank] = calls[rank]()
            except BaseException as error:  # handed to the caller, as an answer is
                answers[rank] = error
            finally:
                self._pass_turn(rank)
                self.leave(rank)

        threads = [
            threading.Thread(target=work, args=(rank,), name=f"specbench-rank-{rank}", daemon=True)
            for rank in range(self.size)
        ]
        for one in threads:
            one.start()
        with self._changed:
            self._changed.wait_for(lambda: self._broken or len(self._gone) == self.size)
            # Once one rank has fallen out of step the others get as long again, and are then left behind.
            self._changed.wait_for(lambda: len(self._gone) == self.size, timeout=self._timeout)
        return list(answers)

    def exchange(self, rank: int, number: int, root: int, value: Any) -> Any:
        """Waits until all ranks have come to their broadcast `number`, and returns a copy of the root's value."""
        self._pass_turn(rank)
        heard = self._meet(rank, number, root, value)
        # Not after OutOfStep: the turn may be held by the very rank that never comes.
        self._take_turn(rank)
        return heard

    def _meet(self, rank: int, number: int, root: int, value: Any) -> Any:
        deadline = time.monotonic() + self._timeout
        with self._changed:
            here = self._calls.setdefault(number, {})
            here[rank] = (root, value)
            self._changed.notify_all()
            while len(here) < self.size and not self._broken:
                missing = sorted(set(range(self.size)) - set(here))
                gone = [other for other in missing if other in self._gone]
                if gone:
                    other = self.groups[gone[0]].num_broadcasts
                    self._break(f"rank {rank} waits in broadcast {number + 1}, rank {gone[0]} has ended after {other}")
                elif not self._changed.wait(max(0.0, deadline - time.monotonic())) and len(here) < self.size:
                    self._break(
                        f"rank {rank} has waited {self._timeout:g} s in broadcast {number + 1}, "
                        f"rank {missing[0]} has not come"
                    )
            given = sorted(here.items())
            roots = {one: f"names root {its}" for one, (its, _) in given}
            kinds = {one: f"passes a {type(its).__name__[:40]}" for one, (_, its) in given if its is not None}
            for does in (roots, kinds):
                if len(set(does.values())) > 1:
                    said = ", ".join(f"rank {one} {its}" for one, its in does.items())
                    self._break(f"broadcast {number + 1}: {said}")
            if self._broken:
                raise OutOfStep(self._broken)
            return copy.deepcopy(here[root][1])

    def leave(self, rank: int) -> None:
        """A rank has ended: whoever waits for it need not wait on."""
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()

    def _take_turn(self, rank: int) -> None:
        """A rank that holds its turn too long is worked beside: it may be waiting for what only another can do."""
        if self._turn.acquire(timeout=self._timeout):
            self._whose_turn = rank

    def _pass_turn(self, rank: int) -> None:
        if self._whose_turn == rank:
            self._whose_turn = None
            self._turn.release()

    def _break(self, sentence: str) -> None:
        """From now on no rank can go on; all hear why."""
        self._broken = self._broken or sentence
        self._changed.notify_all()
