"""specbench.checks on targets that fill taps wrongly, or break one head only: what strategies do not reach."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from specbench.cases import TreeCase
from specbench.checks import CHECKS
from specbench.claims import Violation
from specbench.judge import RunSession
from specbench.loading import Target
from specbench.profiles import PROFILES
from specbench.record import ClaimRecord
from specbench.reference.decoder import Decoder
from specbench.types import Taps

# Two branches of two below the root, behind a prefix of two.
CASE = TreeCase(prompt=(3, 1, 4), tokens=(4, 1, 5, 9, 2), parents=(-1, 0, 0, 1, 2))

Change = Callable[[Taps], None]


class Spoiling:
    """The reference decoder, whose taps are changed after each tapped forward."""

    def __init__(self, change: Change) -> None:
        self._change = change

    def build(self, model: object, drafter: object) -> Decoder:
        change = self._change

        class Spoiled(Decoder):
            def forward_tree(self, tree, *, taps=None):  # type: ignore[no-untyped-def]
                logits = super().forward_tree(tree, taps=taps)
                if taps is not None:
                    change(taps)
                return logits

        return Spoiled(model)  # type: ignore[arg-type]


def violation_of(claim: str, change: Change) -> str:
    session = RunSession(
        Target("spoiled", Spoiling(change)),
        model="none",
        profile=PROFILES["quick"],
        seed=0,
        device="cpu",
        timeout=0,
        on_hang=lambda sentence: None,
    )
    with pytest.raises(Violation) as caught:
        CHECKS[claim](session.subjects["tiny-fp64"], CASE, ClaimRecord(claim, "tiny-fp64"))
    return caught.value.facts.headline


def set_tap(name: str, value: object) -> Change:
    return lambda taps: setattr(taps, name, value)


def move_mass(row: int, source: int, to: int) -> Change:
    """In the last head of the second layer one row's mass goes from one column to another."""

    def change(taps: Taps) -> None:
        weights = taps.layers[1].attention_weights
        weights[-1, row, to] += weights[-1, row, source]
        weights[-1, row, source] = 0.0

    return change


HEADLINES = {
    "positions too few": (
        "tree.positions",
        set_tap("position_ids", torch.tensor([2, 3, 3])),
        "forward_tree() must fill taps.position_ids with shape [5], got shape [3]",
    ),
    "mask without prefix": (
        "tree.mask",
        set_tap("mask", torch.ones(5, 5, dtype=torch.bool)),
        "forward_tree() must fill taps.mask with shape [5, 7], got shape [5, 5]",
    ),
    "node out of range": (
        "tree.mask",
        set_tap("node_of_row", torch.tensor([0, 1, 2, 3, 5])),
        "forward_tree() must fill taps.node_of_row with nodes >= 0 and < 5, got [0, 1, 2, 3, 5]",
    ),
    "node without a row": (
        "tree.mask",
        set_tap("node_of_row", torch.tensor([0, 1, 2, 3, 3])),
        "forward_tree() must fill taps.node_of_row with every node 0..4 at least once, got [0, 1, 2, 3, 3]",
    ),
    "one head misses an ancestor": (
        "tree.attention_weights",
        move_mass(row=3, source=2 + 1, to=2 + 3),
        "layer 1: node 3 misses node 1 (on its path)",
    ),
    "one head misses the prefix": (
        "tree.attention_weights",
        move_mass(row=3, source=0, to=1),
        "layer 1: node 3 misses prefix row 0",
    ),
    "one head sees an uncle": (
        "tree.attention_weights",
        move_mass(row=3, source=2 + 1, to=2 + 2),
        "layer 1: node 3 puts attention mass on node 2 (not on its path)",
    ),
}


@pytest.mark.parametrize("what", HEADLINES)
def test_a_wrong_tap_is_told_with_its_place(what: str) -> None:
    claim, change, headline = HEADLINES[what]
    assert violation_of(claim, change) == headline
