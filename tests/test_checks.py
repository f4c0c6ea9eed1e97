"""specbench.checks on targets that fill taps wrongly, or break one head only: what strategies do not reach."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from sessions import session_on

from specbench.banks import TinyBank
from specbench.cases import TreeCase
from specbench.checks import CHECKS
from specbench.claims import Violation
from specbench.judge import Failed
from specbench.loading import TargetError
from specbench.record import BUG, EQUAL, NOISE, ClaimRecord
from specbench.reference.decoder import Decoder
from specbench.subjects import NotTested
from specbench.tree import DraftTree
from specbench.types import Stop, Taps

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


def run(claim: str, change: Change) -> None:
    session = session_on(Spoiling(change), name="spoiled")
    CHECKS[claim](session.subjects["tiny-fp64"], CASE, ClaimRecord(claim, "tiny-fp64"))


def set_tap(name: str, value: object) -> Change:
    return lambda taps: setattr(taps, name, value)


def move_mass(row: int, source: int, to: int) -> Change:
    """In the last head of the second layer one row's mass goes from one column to another."""

    def change(taps: Taps) -> None:
        weights = taps.layers[1].attention_weights
        weights[-1, row, to] += weights[-1, row, source]
        weights[-1, row, source] = 0.0

    return change


def spoil_layer(name: str, value: float) -> Change:
    """One entry of the second layer's tap becomes `value`."""

    def change(taps: Taps) -> None:
        tap = getattr(taps.layers[1], name).clone()
        tap.view(-1)[-1] = value
        setattr(taps.layers[1], name, tap)

    return change


HEADLINES = {
    "NaN in attention weights": (
        "tree.attention_weights",
        spoil_layer("attention_weights", torch.nan),
        "forward_tree() must fill taps.layers[1].attention_weights with numbers, got 1 times NaN",
    ),
    "NaN in a hidden state": (
        "tree.layers",
        spoil_layer("hidden_state", torch.nan),
        "layer 1 hidden_state of node 4 is off by inf",
    ),
    "infinite key": ("tree.layers", spoil_layer("k", torch.inf), "layer 1 k of node 4 is off by inf"),
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
    with pytest.raises(Violation) as caught:
        run(claim, change)
    assert caught.value.facts.headline == headline


@pytest.mark.parametrize(
    ("claim", "name"), [("tree.layers", "attention_output"), ("tree.attention_weights", "attention_weights")]
)
def test_a_layer_left_out_is_not_tested_rather_than_equal(claim: str, name: str) -> None:
    with pytest.raises(NotTested) as caught:
        run(claim, lambda taps: setattr(taps.layers[1], name, None))
    assert str(caught.value) == f"fill taps.layers[1].{name} in forward_tree; what it fills shows no difference"


def test_a_tree_that_the_target_changes_is_judged_as_it_was_given() -> None:
    """A forward that overwrites its argument was once blamed on the cache."""

    class Mutating:
        def build(self, model: object, drafter: object) -> Decoder:
            class Mutated(Decoder):
                def forward_tree(self, tree, *, taps=None):  # type: ignore[no-untyped-def]
                    logits = super().forward_tree(tree, taps=taps)
                    tree.tokens.zero_()
                    return logits

            return Mutated(model)  # type: ignore[arg-type]

    assert session_on(Mutating()).judge("kv.rollback", "tiny-fp64").verdict == EQUAL


def test_a_last_round_left_uncommitted_is_no_fault() -> None:
    class Leaving:
        def build(self, model: object, drafter: object) -> Decoder:
            class Left(Decoder):
                def generate(self, prompt, **keywords):  # type: ignore[no-untyped-def]
                    out = super().generate(prompt, **keywords)
                    self.truncate(min(self.cache_len, len(prompt) - 1))
                    return out

            return Left(model, drafter)  # type: ignore[arg-type]

    session = session_on(Leaving())
    assert [session.judge(claim, "tiny-fp64").verdict for claim in ("stop.eos", "stop.max_tokens")] == [EQUAL, EQUAL]


class Own(Decoder):
    """Weights of its own in fp32, every level up to three. Oracle: its `logits`, which are right."""

    dtype = "fp32"

    def __init__(self) -> None:
        super().__init__(TinyBank("fp32", torch.float32).model(0))


class OwnForgetsPrefix(Own):
    """The forward loses the first cached value row: in every forward, plain steps included."""

    def forward_tree(self, tree, *, taps=None):  # type: ignore[no-untyped-def]
        for layer in range(self.num_layers):
            self._cache.rows(layer)[1][:, :1] = 0
        return super().forward_tree(tree, taps=taps)


def verdict_of(adapter: object, claim: str, subject: str) -> str:
    session = session_on(adapter)
    with suppress(Failed):
        session.judge(claim, subject)
    return session.run.claims[-1].verdict


@pytest.mark.parametrize(("adapter", "verdict"), [(Own(), NOISE), (OwnForgetsPrefix(), BUG)])
def test_a_fault_in_the_forward_is_never_the_bound_that_excuses_it(adapter: object, verdict: str) -> None:
    """Noise was once measured with the very forward under test, and twice the fault excused the fault."""
    assert verdict_of(adapter, "tree.logits", "own") == verdict


class KeepsText(Decoder):
    """A second generate goes on from the first one's text."""

    _text: tuple[int, ...] = ()

    def generate(self, prompt, **keywords):  # type: ignore[no-untyped-def]
        out = super().generate([*self._text, *prompt], **keywords)
        self._text = (*self._text, *prompt, *out.tokens)
        return out


class KeepsCache(Decoder):
    """A second prefill appends to what is cached."""

    def prefill(self, tokens):  # type: ignore[no-untyped-def]
        self.extend(list(tokens))


class FirstEndTokenOnly(Decoder):
    def generate(self, prompt, *, stop, **keywords):  # type: ignore[no-untyped-def]
        return super().generate(prompt, stop=Stop(stop.eos_token_ids[:1]), **keywords)


class OrdersByToken(Decoder):
    """Right, but its rows stand in an order that depends on the tokens, so that rounding does too."""

    def forward_tree(self, tree, *, taps=None):  # type: ignore[no-untyped-def]
        order = sorted(
            range(tree.num_nodes), key=lambda node: [(tree.token_list[one], one) for one in tree.path_to(node)]
        )
        place = {node: row for row, node in enumerate(order)}
        parents = [-1, *(place[tree.parent_list[node]] for node in order[1:])]
        return super().forward_tree(DraftTree.of([tree.token_list[node] for node in order], parents))[
            [place[node] for node in range(tree.num_nodes)]
        ]


class Building:
    def __init__(self, made: type[Decoder]) -> None:
        self._made = made

    def build(self, model: object, drafter: object) -> Decoder:
        return self._made(model, drafter)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("made", "claim", "verdicts"),
    [
        (KeepsText, "greedy.lossless", {BUG}),
        (KeepsCache, "kv.rollback", {BUG}),
        (FirstEndTokenOnly, "stop.eos", {BUG}),
        (OrdersByToken, "tree.noninterference", {EQUAL, NOISE}),
        (OrdersByToken, "tree.logits", {EQUAL}),
    ],
)
def test_what_a_newcomer_found_by_hand(made: type[Decoder], claim: str, verdicts: set[str]) -> None:
    assert verdict_of(Building(made), claim, "tiny-fp64") in verdicts


def test_a_factory_that_returns_nothing_is_told_before_anything_is_judged() -> None:
    class Forgetful:
        def build(self, model: object, drafter: object) -> None:
            return None

    with pytest.raises(TargetError) as caught:
        session_on(Forgetful(), name="spoiled")
    assert str(caught.value) == (
        "target 'spoiled': build() returned NoneType None, must return an object "
        "with some of the methods of the adapter levels in the README"
    )
