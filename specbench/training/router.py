"""The router of an adaptive drafter: a small network, fitted to what its arms would have had accepted.

Nothing has to be decoded for that: behind every place of a greedy text it is known what comes, so each arm drafts there
and what it would have got is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbench.protocols import SeededCoins
from specbench.reference.drafters.adaptive import (
    ARMS,
    AdaptiveDrafter,
    Arm,
    CostPolicy,
    Costs,
    Router,
    Signals,
    draft_by,
)
from specbench.training.texts import Progress, Text
from specbench.types import GREEDY, TargetState

EVERY = 3  # places of a text that are looked at
NUM_HIDDEN = 12


@dataclass(frozen=True)
class Place:
    """What was seen at a place of a text, and how many drafts of each arm would have been accepted there."""

    signals: Signals
    accepted: tuple[int, ...]


def places_of(
    learned: Any, texts: Sequence[Text], *, arms: Sequence[Arm] = ARMS, progress: Progress = lambda *told: None
) -> list[Place]:
    """learned: a drafter over the target that wrote `texts`. Places whose next tokens are not the target's likeliest,
    as in a text that was sampled, are left out."""
    deepest = max(one.depth for one in arms)
    found = []
    for number, text in enumerate(texts):
        drafter = AdaptiveDrafter(learned, CostPolicy(), Costs({1: 1.0}, (0.0,) * len(arms)), arms=arms)
        drafter.reset()
        tokens, labels = text.tokens.tolist(), text.labels.tolist()
        for end in range(max(2, text.start + 1), len(tokens) - deepest, EVERY):
            coming = tokens[end : end + deepest]
            if coming == labels[end - 1 : end - 1 + deepest]:
                context, state = tokens[:end], TargetState(text.states[: end - 1])
                accepted = [_accepted(drafter, arm, context, state, coming) for arm in arms]
                found.append(Place(drafter.signals(context, state), tuple(accepted)))
        progress("places", number + 1, len(texts))
    return found


def _accepted(drafter: AdaptiveDrafter, arm: Arm, context: list[int], state: TargetState, coming: Sequence[int]) -> int:
    tree = draft_by(drafter.members, arm, context, sampling=GREEDY, coins=SeededCoins(0), target_state=state)
    return len(tree.longest_match(coming))


def fit_router(
    places: Sequence[Place], *, arms: Sequence[Arm] = ARMS, num_steps: int = 1500, rate: float = 0.02, seed: int = 0
) -> Router:
    """By least squares over all places at once. ValueError without places."""
    if not places:
        raise ValueError("there is no place at which a greedy text goes on long enough: write more or longer texts")
    seen = torch.tensor([one.signals.as_vector() for one in places], dtype=torch.float64)
    wanted = torch.tensor([one.accepted for one in places], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return (0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_()

    weights = [drawn(NUM_HIDDEN, seen.shape[1]), drawn(NUM_HIDDEN), drawn(len(arms), NUM_HIDDEN), drawn(len(arms))]
    optimizer = torch.optim.Adam(weights, lr=rate, weight_decay=1e-4)
    # What a router answers by itself, whatever its network says, teaches the network nothing.
    asked = torch.tensor(
        [
            [arm.member == "learned" or (arm.member == "lookup" and one.signals.match > 0) for arm in arms]
            for one in places
        ]
    )
    for _ in range(num_steps):
        optimizer.zero_grad()
        inner = (seen @ weights[0].T + weights[1]).tanh()
        told = torch.nn.functional.softplus(inner @ weights[2].T + weights[3])
        ((told - wanted) * asked).pow(2).mean().backward()
        optimizer.step()
    hidden, hidden_bias, out, out_bias = (one.detach().tolist() for one in weights)
    return Router(tuple(arms), tuple(map(tuple, hidden)), tuple(hidden_bias), tuple(map(tuple, out)), tuple(out_bias))
