"""Drafting as much as pays: each round one of a few arms, by what it costs here and what is expected of it now.

    gain of an arm = (1 + E[accepted | signals]) / (forward of its rows + drafting it), in plain forwards

The arm of the largest gain drafts; plain decoding is an arm too. Signals are a function of the context and of what the
target made of it, never of what was drafted before: how often the likeliest token of the lookup and of the learned
drafter was the one that came, how long an ending stands in the text again, how sure the learned drafter is now. Nothing
is tried out in order to be known, a fresh drafter drafts the same, and a text on which nobody guesses right costs a
look every BLOCK tokens. Output is the target's whatever is chosen.

The cost model (`CostPolicy`) guesses acceptance from the signals by formula, as SpecDec++ and DSDE do by thresholds;
the router (`Router`) by a small network that `specbench.training.router` fits to what would have been accepted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from specbench.costs import cost_of
from specbench.protocols import Coins
from specbench.reference.drafters.suffix import SuffixDrafter
from specbench.tree import DraftTree, root_only
from specbench.types import Sampling, TargetState, num_common

WINDOW = 32  # tokens over which a drafter's hits are counted
BLOCK = 8  # tokens between two looks at a learned drafter that is seldom right
SELDOM = 0.1  # share of hits below which it is not asked until the next block
LEAST_GAIN = 1.02  # below this plain decoding is taken: costs are measured no better
MOST_MATCH = 32


@dataclass(frozen=True)
class Arm:
    """What one round may do. member: "" for plain decoding, "lookup" or "learned". depth, nodes: the most it drafts."""

    member: str = ""
    depth: int = 0
    nodes: int = 0


ARMS = (
    Arm(),
    Arm("lookup", 3, 3),
    Arm("lookup", 8, 8),
    Arm("lookup", 16, 16),
    Arm("learned", 2, 3),
    Arm("learned", 3, 6),
    Arm("learned", 4, 10),
    Arm("learned", 5, 16),
)


@dataclass(frozen=True)
class Signals:
    """lookup, learned: share of the last WINDOW tokens that were their likeliest, of the lookup where it had one.
    match: length of the ending that stands in the text again. sure, entropy (nats): of the learned drafter's law of the
    next token. asks_learned: False where it was seldom right, and is not looked at."""

    lookup: float
    learned: float
    match: int
    sure: float
    entropy: float
    asks_learned: bool = True

    def as_vector(self) -> list[float]:
        """What a router sees: five numbers of about one."""
        match = math.log1p(min(self.match, MOST_MATCH)) / math.log1p(MOST_MATCH)
        return [self.lookup, self.learned, match, self.sure, self.entropy / 5]


class Policy(Protocol):
    def accepted(self, signals: Signals, arms: Sequence[Arm]) -> list[float]:
        """How many drafts of each arm are expected to be accepted."""
        ...


class CostPolicy:
    """By formula. A lookup's next token is right with a = hits ^ (1 / match): a longer ending is surer. A learned tree
    of w = nodes / depth candidates a level is right with 1 - (1 - p) ^ (1 + ln w), p being how sure it is at its first
    level and its hits at the ones below."""

    def accepted(self, signals: Signals, arms: Sequence[Arm]) -> list[float]:
        return [self._of(signals, arm) for arm in arms]

    def _of(self, signals: Signals, arm: Arm) -> float:
        if not arm.member:
            return 0.0
        if arm.member == "lookup":
            first = below = signals.lookup ** (1 / signals.match) if signals.match else 0.0
        else:
            sharper = 1 + math.log(arm.nodes / arm.depth)
            first, below = (1 - (1 - one) ** sharper for one in (signals.sure, signals.learned))
        return first * sum(below**level for level in range(arm.depth))


@dataclass(frozen=True)
class Router:
    """A network of one hidden layer: softplus(V tanh(W signals + b) + c), one number an arm; lookups without a match
    get 0. arms: those that it was fitted to."""

    arms: tuple[Arm, ...]
    hidden: tuple[tuple[float, ...], ...]
    hidden_bias: tuple[float, ...]
    out: tuple[tuple[float, ...], ...]
    out_bias: tuple[float, ...]

    def accepted(self, signals: Signals, arms: Sequence[Arm]) -> list[float]:
        if tuple(arms) != self.arms:
            raise ValueError(f"the router is fitted to the arms {self.arms}, not to {tuple(arms)}: fit one to these")
        seen = signals.as_vector()
        inner = [math.tanh(_dot(row, seen) + bias) for row, bias in zip(self.hidden, self.hidden_bias, strict=True)]
        found = []
        for arm, row, bias in zip(arms, self.out, self.out_bias, strict=True):
            nothing = not arm.member or (arm.member == "lookup" and not signals.match)
            found.append(0.0 if nothing else min(float(arm.depth), _softplus(_dot(row, inner) + bias)))
        return found

    def save(self, file: Path) -> None:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        arms = [[one.member, one.depth, one.nodes] for one in self.arms]
        file.write_text(json.dumps(fields | {"arms": arms}) + "\n", "utf-8")

    @classmethod
    def load(cls, file: Path) -> Router:
        """ValueError where it is not one."""
        try:
            fields = json.loads(file.read_text("utf-8"))
            hidden, out = (tuple(tuple(map(float, row)) for row in fields[name]) for name in ("hidden", "out"))
            hidden_bias, out_bias = (tuple(map(float, fields[name])) for name in ("hidden_bias", "out_bias"))
            return cls(tuple(Arm(*one) for one in fields["arms"]), hidden, hidden_bias, out, out_bias)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file} is no router that specbench train-drafter wrote: {error!r}") from None


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


@dataclass(frozen=True)
class Costs:
    """In one unit, seconds as a rule. forward: of a target forward by its rows. drafting: of each arm."""

    forward: Mapping[int, float]
    drafting: tuple[float, ...]

    def gains(self, arms: Sequence[Arm], accepted: Sequence[float]) -> list[float]:
        """Tokens a plain forward's time, of each arm."""
        plain = cost_of(self.forward, 1)
        spent = [cost_of(self.forward, 1 + arm.nodes) + own for arm, own in zip(arms, self.drafting, strict=True)]
        return [(1 + num) * plain / one for num, one in zip(accepted, spent, strict=True)]


def _cut(arm: Arm, max_nodes: int, max_depth: int) -> Arm:
    """With as many nodes a level as before."""
    if arm.depth <= max_depth and arm.nodes <= max_nodes:
        return arm
    depth = min(arm.depth, max_depth, max_nodes)
    return Arm(arm.member, depth, min(max_nodes, math.ceil(arm.nodes * depth / arm.depth)))


def members_of(learned: Any, arms: Sequence[Arm]) -> dict[str, Any]:
    """The drafters of the arms by name; the lookup drafts as much as the largest arm."""
    lookup = SuffixDrafter(num_nodes=max(one.nodes for one in arms), gamma=max(one.depth for one in arms))
    return {"lookup": lookup, "learned": learned}


def draft_by(
    members: Mapping[str, Any],
    arm: Arm,
    context: list[int],
    *,
    target_state: TargetState | None,
    sampling: Sampling,
    coins: Coins,
) -> DraftTree:
    """What an arm drafts; the root alone for plain decoding."""
    if not arm.member:
        return root_only(context[-1])
    told = {"target_state": target_state} if arm.member == "learned" else {}
    return members[arm.member].draft(
        context, max_nodes=arm.nodes, max_depth=arm.depth, sampling=sampling, coins=coins, **told
    )


class AdaptiveDrafter:
    """learned: a drafter with `first_laws` and `ids`, as `HeadsDrafter` and `LayersDrafter` are. costs: of `arms`, the
    first of which decodes plainly. seldom: share of hits below which `learned` is not asked."""

    reads_target_state = True

    def __init__(
        self, learned: Any, policy: Policy, costs: Costs, *, arms: Sequence[Arm] = ARMS, seldom: float = SELDOM
    ) -> None:
        if arms[0] != Arm() or len(costs.drafting) != len(arms):
            raise ValueError(f"arms must begin with {Arm()} and have a cost each, {len(costs.drafting)} are given")
        self.state_layers = getattr(learned, "state_layers", ())
        self.members = members_of(learned, arms)
        self._policy, self._costs, self._arms, self._seldom = policy, costs, tuple(arms), seldom
        self.reset()

    def reset(self) -> None:
        for one in self.members.values():
            if hasattr(one, "reset"):
                one.reset()
        self._tokens: list[int] = []
        self._hits: dict[int, bool] = {}  # place of a token -> whether it was the learned drafter's likeliest

    def draft(
        self,
        context: list[int],
        *,
        max_nodes: int,
        max_depth: int,
        sampling: Sampling,
        coins: Coins,
        target_state: TargetState | None = None,
    ) -> DraftTree:
        if len(context) < 2 or max_nodes < 1 or max_depth < 1:
            return root_only(context[-1])
        arm = self.choose(self.signals(context, target_state), max_nodes=max_nodes, max_depth=max_depth)
        return draft_by(self.members, arm, context, sampling=sampling, coins=coins, target_state=target_state)

    def choose(self, signals: Signals, *, max_nodes: int, max_depth: int) -> Arm:
        """The arm of the largest gain within the limits, of equals the first, as it is cut to them; plain decoding
        where none gains LEAST_GAIN."""
        accepted = self._policy.accepted(signals, self._arms)
        arms = [_cut(arm, max_nodes, max_depth) for arm in self._arms]
        for idx, arm in enumerate(arms):
            refused = arm.member == "learned" and not signals.asks_learned
            accepted[idx] = 0.0 if refused else min(accepted[idx], arm.depth)
        gains = self._costs.gains(arms, accepted)
        best = max(gains)
        return arms[gains.index(best)] if best >= LEAST_GAIN else arms[0]

    def signals(self, context: list[int], target_state: TargetState | None) -> Signals:
        """Of a context of at least two tokens."""
        lookup = self.members["lookup"]
        match = lookup.read(context)
        said = [one for one in lookup.hits[-WINDOW:] if one is not None]
        of_lookup = sum(said) / len(said) if said else 0.0
        common = num_common(self._tokens, context)
        self._tokens = list(context)
        self._hits = {place: hit for place, hit in self._hits.items() if place < common}
        block = len(context) - len(context) % BLOCK  # tokens before it decide whether this block asks
        if block > 2:
            share = self._share(context, block, target_state)
            if share < self._seldom:
                unsure = math.log(len(self.members["learned"].ids))
                return Signals(of_lookup, share, match, 0.0, unsure, asks_learned=False)
        law = self._look(context, len(context), target_state)
        entropy = float(-(law.exp() * law.clamp(min=-1e4)).sum())
        share = self._share(context, len(context), target_state)
        return Signals(of_lookup, share, match, float(law.max().exp()), entropy)

    def _share(self, context: list[int], end: int, target_state: TargetState | None) -> float:
        """Of hits among the last WINDOW tokens before `end`; the first two tokens of a text are no drafter's."""
        places = range(max(2, end - WINDOW), end)
        if any(place not in self._hits for place in places):
            self._look(context, end, target_state)
        return sum(self._hits[place] for place in places) / max(1, len(places))

    def _look(self, context: list[int], end: int, target_state: TargetState | None) -> Tensor:
        """Notes the hits of the last WINDOW tokens before `end` that are not known. Returns the law of the token behind
        them, log-probabilities float [V']."""
        learned = self.members["learned"]
        first = next((place for place in range(max(2, end - WINDOW), end) if place not in self._hits), end)
        laws = learned.first_laws(context, range(first - 1, end), target_state)  # of the tokens first .. end
        likeliest = learned.ids[laws[:-1].argmax(-1)].tolist()
        for place, token in enumerate(likeliest, start=first):
            self._hits[place] = token == context[place]
        return laws[-1]
