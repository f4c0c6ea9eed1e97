"""The exact law of a function of coins, with nothing changed in it: it is run again and again on coins of our choosing.

`explore` is the engine: a run asks for coins (whole numbers, uniform on a range) and for branches (an index, drawn with
given weights). Branches are followed one by one; a coin is split into the pieces on which the rest of the run is alike.
`law_of` drives it with `specbench.protocols.Coins`; `specbench.law.foreign` does so with PyTorch's random functions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.protocols import Coins

COIN_BITS = 53  # a float64 coin is k / 2^53, k uniform: what torch.rand hands out
GRID = 256  # first looks a coin
SPARSE = 4  # of which every so manieth is repeated with later coins elsewhere
MAX_COINS = 64
MAX_PIECES = 400  # of one coin
MAX_RUNS = 2_000_000

Probe = Callable[[int], float]  # position in the run -> where in its range the answer lies

# What later coins hold while an earlier one is looked at.
PROBES: tuple[Probe, ...] = (
    lambda position: 0.0,
    lambda position: 1.0,
    lambda position: 0.5,
    lambda position: (0.6180339887 * (position + 1)) % 1.0,
)


UNSTEADY = "it answers differently to equal coins: it keeps state or has randomness of its own"
TOO_MANY = f"a coin of it has more than {MAX_PIECES} pieces: its law is not piecewise constant in that coin"


class CannotTell(Exception):
    """The law of this function is not to be had this way; the text says why. Never a verdict about the function."""


def law_of(
    function: Callable[[Coins], Hashable],
    *,
    hints: Sequence[float] = (),
    max_coins: int = MAX_COINS,
    max_runs: int = MAX_RUNS,
    grid: int = GRID,
    coin_bits: int = COIN_BITS,
    shift: float = 0.5,
) -> dict[Hashable, float]:
    """Outcome -> probability, for a function that is given fresh coins, each k / 2^coin_bits with k uniform.

    Breakpoints are found to the last bit, so that the pieces found carry their exact mass; the sum is 1 up to float
    rounding (below 1e-12). What can be missed: a piece narrower than 1 / grid with neighbours that behave alike. One
    between unlike neighbours, as in any inverse CDF, or at the end of [0, 1), is found at any width; `hints` are values
    of coins to look at besides. Behaving alike means: asking for the same and answering the same, with later coins at
    0 at each of the grid's points, at three other fixed settings at every fourth and at both ends of what was found so,
    and at both ends of all of their pieces at four values in each piece found. grid: a power of two. coin_bits:
    fewer than 53 put the law off by 2^-coin_bits a breakpoint, in as many fewer runs. shift: in [0, 1), where in
    its cell of the grid each first look lies: laws that are looked at with other shifts miss other things.
    CannotTell: more than `max_coins` coins, more than `max_runs` runs, too many pieces of one coin, or other
    answers to equal coins.
    """

    def run(choices: Choices) -> Hashable:
        return function(_ScriptedCoins(choices, coin_bits))

    return explore(run, hints=hints, max_coins=max_coins, max_runs=max_runs, grid=grid, shift=shift)


def explore(
    run: Callable[[Choices], Hashable],
    *,
    hints: Sequence[float] = (),
    max_coins: int = MAX_COINS,
    max_runs: int = MAX_RUNS,
    grid: int = GRID,
    shift: float = 0.5,
) -> dict[Hashable, float]:
    """Outcome -> probability, for a function that asks `Choices` for everything random in it. See `law_of`."""
    explorer = _Explorer(run, hints, max_coins, max_runs, grid, shift)
    first, again = explorer.run(()), explorer.run(())
    law = explorer.law((), again).law
    if not (first == again == explorer.run(())):
        raise CannotTell(UNSTEADY)
    return law


@dataclass(frozen=True)
class Ask:
    """One request: a whole number in [low, high), or an index drawn with `weights`."""

    low: int
    high: int
    weights: tuple[float, ...] | None = None

    def at(self, fraction: float) -> int:
        """The answer that lies at this fraction of the range; a branch of weight 0 is never answered."""
        if self.weights is None:
            return min(self.low + int(fraction * (self.high - self.low)), self.high - 1)
        rest = fraction * sum(self.weights)
        possible = [index for index, weight in enumerate(self.weights) if weight > 0]
        for index in possible:
            rest -= self.weights[index]
            if rest < 0:
                return index
        return possible[-1]

    def allows(self, answer: int) -> bool:
        return self.low <= answer < self.high and (self.weights is None or self.weights[answer] > 0)


class Choices:
    """What one run is told: the scripted answers first, then whatever the probe says."""

    def __init__(self, prefix: Sequence[int], tail: Sequence[int], probe: Probe, max_coins: int) -> None:
        self._scripted = (*prefix, *tail)
        self._num_certain = len(prefix)
        self._probe = probe
        self._max_coins = max_coins
        self.asks: list[Ask] = []
        self.answers: list[int] = []

    def coin(self, high: int, low: int = 0) -> int:
        """A whole number in [low, high), each as likely."""
        return low if high - low == 1 else self._answer(Ask(low, high))

    def branch(self, weights: Sequence[float]) -> int:
        """An index, drawn with these weights >= 0; they need not sum to one."""
        if not all(0 <= weight < float("inf") for weight in weights) or sum(weights) <= 0:
            raise CannotTell(f"it draws with the weights {list(weights)}, which are no law")
        positive = [index for index, weight in enumerate(weights) if weight > 0]
        return positive[0] if len(positive) == 1 else self._answer(Ask(0, len(weights), tuple(weights)))

    def _answer(self, ask: Ask) -> int:
        position = len(self.asks)
        if position >= self._max_coins:
            raise CannotTell(f"it asks for more than {self._max_coins} coins")
        answer = self._scripted[position] if position < len(self._scripted) else ask.at(self._probe(position))
        if not ask.allows(answer):
            if position < self._num_certain:
                raise CannotTell(UNSTEADY)
            answer = ask.at(0.0)  # a tail that was made for another value of an earlier coin
        self.asks.append(ask)
        self.answers.append(answer)
        return answer


@dataclass(frozen=True)
class _Run:
    answers: tuple[int, ...]
    asks: tuple[Ask, ...]
    outcome: Hashable

    def behind(self, position: int) -> tuple[Hashable, tuple[Ask, ...]]:
        """All that this run shows of the law behind the ask at `position`."""
        return self.outcome, self.asks[position + 1 :]


@dataclass(frozen=True)
class _Part:
    """The law behind a prefix of answers, and the runs that pin down its pieces: both ends of every one."""

    law: dict[Hashable, float]
    corners: list[_Run]


class _Explorer:
    def __init__(
        self,
        function: Callable[[Choices], Hashable],
        hints: Sequence[float],
        max_coins: int,
        max_runs: int,
        grid: int,
        shift: float,
    ) -> None:
        self._function = function
        self._hints = hints
        self._grid = grid
        self._shift = shift
        self._max_coins = max_coins
        self._runs_left = self._max_runs = max_runs

    def run(self, prefix: Sequence[int], tail: Sequence[int] = (), probe: Probe = PROBES[0]) -> _Run:
        self._runs_left -= 1
        if self._runs_left < 0:
            raise CannotTell(f"its law takes more than {self._max_runs:,} runs to explore")
        choices = Choices(prefix, tail, probe, self._max_coins)
        outcome = self._function(choices)
        return _Run(tuple(choices.answers), tuple(choices.asks), outcome)

    def law(self, prefix: tuple[int, ...], run: _Run) -> _Part:
        """run: any run that begins with `prefix`."""
        position = len(prefix)
        if len(run.asks) <= position:
            return _Part({run.outcome: 1.0}, [run])
        ask = run.asks[position]
        if ask.weights is None:
            return self._constant(prefix, run) or self._coin(prefix, ask)
        total = sum(ask.weights)
        part = _Part({}, [])
        for answer, weight in enumerate(ask.weights):
            if weight > 0:
                longer = (*prefix, answer)
                rest = self.law(longer, run if run.answers[position] == answer else self.run(longer))
                _add(part.law, rest.law, weight / total)
                part.corners.extend(rest.corners)
        return part

    def _constant(self, prefix: tuple[int, ...], run: _Run) -> _Part | None:
        """The rest at once, where it asks for coins and heeds none of them: those of a block behind the last in use."""
        position, asks = len(prefix), run.asks[len(prefix) :]
        if any(ask.weights is not None for ask in asks):
            return None
        corners = [run]
        for probe in _scan(position, len(run.asks), self._hints, self._grid, self._shift):
            another = self.run(prefix, probe=probe)
            if another.outcome != run.outcome or another.asks[position:] != asks:
                return None
            corners.append(another)
        return _Part({run.outcome: 1.0}, corners[:8])

    def _coin(self, prefix: tuple[int, ...], ask: Ask) -> _Part:
        """Split by what the probes show; where the pieces of later coins do not hold all over one, split it by that."""
        position, part = len(prefix), _Part({}, [])
        splitter = _Splitter(self, prefix)
        points = self._points(ask)
        pending = splitter.pieces(points)[::-1]
        num_done = 0
        while pending:
            low, high = pending.pop()
            middle = (low + high) // 2
            rest = self.law((*prefix, middle), self.run((*prefix, middle)))
            unlike = self._unlike(prefix, sorted({low, high, (3 * low + high) // 4, (low + 3 * high) // 4}), rest)
            if unlike is not None:
                value, tail = unlike
                splitter.tails.append(tail)
                inside = [point for point in points if low < point < high]
                pending += splitter.pieces(sorted({low, high, middle, value, *inside}))[::-1]
            else:
                num_done += 1
                _add(part.law, rest.law, (high - low + 1) / (ask.high - ask.low))
                tail = rest.corners[0].answers[position + 1 :]
                part.corners.extend(rest.corners)
                part.corners.extend(self.run((*prefix, end), tail) for end in {low, high} - {middle})
            if num_done + len(pending) > MAX_PIECES:
                raise CannotTell(TOO_MANY)
        return part

    def _unlike(self, prefix: tuple[int, ...], values: list[int], rest: _Part) -> tuple[int, tuple[int, ...]] | None:
        """A value of the coin for which what was found in the middle does not hold, and later answers that show it."""
        position = len(prefix)
        for corner in rest.corners:
            tail = corner.answers[position + 1 :]
            for value in values:
                if self.run((*prefix, value), tail).behind(position) != corner.behind(position):
                    return value, tail
        return None

    def _points(self, ask: Ask) -> list[int]:
        size = ask.high - ask.low
        near = {int(hint * size) + step for hint in self._hints for step in (-1, 0, 1)}
        grid = {(cell * size + int(self._shift * size)) // self._grid for cell in range(self._grid)}
        return sorted(ask.low + point for point in near | grid | {0, size - 1} if 0 <= point < size)


class _Splitter:
    """The pieces of one coin on which runs with equal later answers look alike."""

    def __init__(self, explorer: _Explorer, prefix: tuple[int, ...]) -> None:
        self._explorer = explorer
        self._prefix = prefix
        self._seen: dict[tuple[int, int], tuple[Hashable, tuple[Ask, ...]]] = {}
        self.tails: list[tuple[int, ...]] = []  # later answers that are known to matter

    def pieces(self, points: list[int]) -> list[tuple[int, int]]:
        """Of [points[0], points[-1]]: first and last value of every piece, in order.

        Every point is looked at with later coins at 0; with what else they may be, both ends of each piece found and
        every SPARSE-th point.
        """
        first, others = range(1), range(1, len(PROBES) + len(self.tails))
        found = []
        for low, high in self._split(points, first):
            if self._look(low, 0)[1]:  # else nothing is asked for behind this coin: all would say the same
                inside = [point for point in points[::SPARSE] if low < point < high]
                found += self._split(sorted({low, *inside, high}), others)
            else:
                found.append((low, high))
        return found

    def _split(self, points: list[int], probes: range) -> list[tuple[int, int]]:
        ends: list[int] = []
        for left, right in itertools.pairwise(points):
            self._find_ends(left, right, probes, ends)
        starts = [points[0], *(end + 1 for end in ends)]
        return list(zip(starts, [*ends, points[-1]], strict=True))

    def _find_ends(self, left: int, right: int, probes: range, ends: list[int]) -> None:
        while (probe := self._difference(left, right, probes)) is not None:
            low, high = left, right
            while high - low > 1:
                middle = (low + high) // 2
                if self._look(middle, probe) == self._look(left, probe):
                    low = middle
                else:
                    high = middle
            self._find_ends(left, low, probes, ends)  # by the other probes
            ends.append(low)
            if len(ends) > MAX_PIECES:
                raise CannotTell(TOO_MANY)
            left = high

    def _difference(self, left: int, right: int, probes: range) -> int | None:
        if left == right:
            return None
        return next((probe for probe in probes if self._look(left, probe) != self._look(right, probe)), None)

    def _look(self, value: int, probe: int) -> tuple[Hashable, tuple[Ask, ...]]:
        if (value, probe) not in self._seen:
            prefix = (*self._prefix, value)
            if probe < len(PROBES):
                run = self._explorer.run(prefix, probe=PROBES[probe])
            else:
                run = self._explorer.run(prefix, self.tails[probe - len(PROBES)])
            self._seen[value, probe] = run.behind(len(self._prefix))
        return self._seen[value, probe]


class _ScriptedCoins:
    def __init__(self, choices: Choices, coin_bits: int) -> None:
        self._choices = choices
        self._coin_bits = coin_bits

    def uniform(self, num: int) -> Tensor:
        size = 1 << self._coin_bits
        # A quotient by a power of two is exact, and a float as well in Python.
        return torch.tensor([self._choices.coin(size) / size for _ in range(num)], dtype=torch.float64)


def _scan(start: int, stop: int, hints: Sequence[float], grid: int, shift: float) -> Iterator[Probe]:
    """Probes that bring every coin of [start, stop) to both ends, alone and with all before or behind it, to the hints,
    and once to every point of the grid, no two coins in the same order.
    """
    for place in range(start, stop + 1):
        yield _step(place, 0.0, 1.0)
        yield _step(place, 1.0, 0.0)
    for place in range(start, stop):
        for fraction in (0.0, 1.0, *hints):
            yield _alone(place, fraction)
    for row in range(grid):
        yield _grid_row(row, grid, shift)


def _step(place: int, before: float, behind: float) -> Probe:
    return lambda position: before if position < place else behind


def _alone(place: int, fraction: float) -> Probe:
    return lambda position: fraction if position == place else 0.5


def _grid_row(row: int, grid: int, shift: float) -> Probe:
    """Over all rows each position takes every point once: its step through the grid is odd."""
    return lambda position: ((row * (2 * position + 1) + 37 * position) % grid + shift) / grid


def _add(law: dict[Hashable, float], part: dict[Hashable, float], weight: float) -> None:
    for outcome, probability in part.items():
        law[outcome] = law.get(outcome, 0.0) + weight * probability
