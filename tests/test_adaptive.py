"""Adaptive drafting: signals and gains by hand, nothing but the context decides, the router learns what is accepted."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specbench.protocols import SeededCoins
from specbench.reference.decoder import Decoder
from specbench.reference.drafters.adaptive import (
    ARMS,
    BLOCK,
    AdaptiveDrafter,
    Arm,
    CostPolicy,
    Costs,
    Router,
    Signals,
)
from specbench.reference.drafters.by_name import DRAFTERS
from specbench.reference.drafters.heads import HeadsConfig, HeadsDrafter, MarkovHeads
from specbench.reference.drafters.trained import WIDEST
from specbench.reference.model import LlamaConfig, tiny_llama
from specbench.training.router import Place, fit_router, places_of
from specbench.training.texts import Text
from specbench.tree import DraftTree
from specbench.types import GREEDY, Sampling, TargetState

CONFIG = LlamaConfig(
    vocab_size=13, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4
)
MODEL = tiny_llama(CONFIG, seed=0)
FREE = {"max_nodes": 64, "max_depth": 16}
CHEAP = Costs({1: 1.0, 17: 1.2}, (0.0,) * len(ARMS))


class Knowing:
    """A learned drafter that is sure of the token after the last one (x + 1), which is right where texts count up."""

    reads_target_state = True
    ids = torch.arange(13)

    def __init__(self) -> None:
        self.asked: list[range] = []

    def first_laws(self, context: list[int], roots: range, target_state: TargetState | None) -> Tensor:
        self.asked.append(roots)
        laws = torch.full((len(roots), 13), 0.1 / 12)
        for row, root in enumerate(roots):
            laws[row, (context[root] + 1) % 13] = 0.9
        return laws.log()

    def draft(self, context: list[int], *, max_nodes: int, max_depth: int, **named: object) -> DraftTree:
        num = min(max_nodes, max_depth)
        return DraftTree.of([(context[-1] + step) % 13 for step in range(num + 1)], list(range(-1, num)))


def draft(drafter: AdaptiveDrafter, context: list[int]) -> DraftTree:
    return drafter.draft(context, max_nodes=16, max_depth=16, sampling=GREEDY, coins=SeededCoins(0))


def test_signals_by_hand():
    """1 2 3 1 2 3: the lookup had something to say of the last two tokens, and was right; the learned one was right of
    3 in 4 (the third to sixth: 3 is 2 + 1, 1 is not 3 + 1)."""
    signals = AdaptiveDrafter(Knowing(), CostPolicy(), CHEAP).signals([1, 2, 3, 1, 2, 3], None)
    entropy = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1 / 12))
    assert (signals.lookup, signals.learned, signals.match, signals.asks_learned) == (1.0, 0.75, 3, True)
    assert (signals.sure, signals.entropy) == (pytest.approx(0.9), pytest.approx(entropy))
    assert signals.as_vector() == pytest.approx([1.0, 0.75, math.log(4) / math.log(33), 0.9, entropy / 5])


@pytest.mark.parametrize(
    ("arm", "accepted"),
    [
        (Arm(), 0.0),
        (Arm("lookup", 3, 3), 0.8 + 0.64 + 0.512),  # hits 0.64, a match of 2: 0.64 ** (1 / 2)
        (Arm("learned", 2, 2), 0.5 * (1 + 0.4)),
        # Two candidates a level: 1 - (1 - p) ** (1 + ln 2).
        (Arm("learned", 1, 2), 1 - 0.5 ** (1 + math.log(2))),
    ],
    ids=str,
)
def test_the_cost_models_formula(arm: Arm, accepted: float):
    signals = Signals(lookup=0.64, learned=0.4, match=2, sure=0.5, entropy=1.0)
    assert CostPolicy().accepted(signals, [arm]) == [pytest.approx(accepted)]
    assert CostPolicy().accepted(Signals(0.9, 0.4, 0, 0.5, 1.0), [Arm("lookup", 3, 3)]) == [0.0]  # nothing to look up


def test_gains_by_hand():
    """A forward of 1 row takes 10, of 3 rows 12, drafting 2 or nothing: (1 + 0.4) 10 / 14 and (1 + 2) 10 / 12."""
    costs = Costs({1: 10.0, 3: 12.0}, (0.0, 2.0, 0.0))
    arms = (Arm(), Arm("learned", 2, 2), Arm("lookup", 2, 2))
    assert costs.gains(arms, [0.0, 0.4, 2.0]) == pytest.approx([1.0, 1.0, 2.5])


def test_the_arm_of_the_largest_gain_drafts_and_plain_decoding_wins_ties():
    arms = (Arm(), Arm("learned", 2, 2), Arm("learned", 4, 4))
    sure = Signals(0.0, 0.9, 0, 0.9, 0.3)
    unsure = Signals(0.0, 0.9, 0, 0.01, 4.0)
    cheap, dear = Costs({1: 1.0, 5: 1.1}, (0.0, 0.0, 0.0)), Costs({1: 1.0, 5: 1.1}, (0.0, 2.0, 9.0))
    assert AdaptiveDrafter(Knowing(), CostPolicy(), cheap, arms=arms).choose(sure, **FREE) == arms[2]
    assert AdaptiveDrafter(Knowing(), CostPolicy(), cheap, arms=arms).choose(unsure, **FREE) == arms[0]
    assert AdaptiveDrafter(Knowing(), CostPolicy(), dear, arms=arms).choose(sure, **FREE) == arms[0]
    nothing_asked = Signals(0.0, 0.0, 0, 0.9, 0.3, asks_learned=False)
    assert AdaptiveDrafter(Knowing(), CostPolicy(), cheap, arms=arms).choose(nothing_asked, **FREE) == arms[0]
    with pytest.raises(ValueError, match=r"arms must begin with Arm\(.*\) and have a cost each, 3 are given"):
        AdaptiveDrafter(Knowing(), CostPolicy(), cheap, arms=arms[1:])


def test_arms_are_weighed_as_they_are_cut_to_the_limits():
    """Of 16 nodes in depth one is left: 1 token more for a second row at 0.5 and drafting at 0.6, below plain."""
    arms, costs = (Arm(), Arm("lookup", 16, 16)), Costs({1: 1.0, 2: 1.5, 17: 2.0}, (0.0, 0.6))
    certain = Signals(1.0, 0.0, 20, 0.0, 0.0)
    one = AdaptiveDrafter(Knowing(), CostPolicy(), costs, arms=arms)
    assert one.choose(certain, **FREE) == arms[1]
    assert one.choose(certain, max_nodes=64, max_depth=1) == one.choose(certain, max_nodes=1, max_depth=16) == arms[0]
    assert one.choose(certain, max_nodes=64, max_depth=8) == Arm("lookup", 8, 8)


def test_a_learned_drafter_that_is_never_right_is_looked_at_once_a_block():
    learned = Knowing()
    one = AdaptiveDrafter(learned, CostPolicy(), CHEAP)
    text = [5 * place % 13 for place in range(13)] * 6  # never x, x + 1
    for end in range(BLOCK, len(text)):
        assert not one.signals(text[:end], None).asks_learned
    assert len(learned.asked) == len(range(BLOCK, len(text), BLOCK))
    # Where it comes to be right, it is asked again a block later.
    counting = [*text, *(place % 13 for place in range(24))]
    assert one.signals(counting, None).asks_learned


def test_only_the_context_decides():
    """A drafter that has lived through rounds, and through another text, sees and drafts what a fresh one does."""
    lived = DRAFTERS["adaptive"](MODEL)
    text = [3, 1, 4, 1, 5, 9, 2, 6, *Decoder(MODEL).generate([3, 1, 4, 1, 5, 9, 2, 6], max_new_tokens=30).tokens]
    for end in (9, 11, 12, 20, 24, 25, 26, 38, 22, 23):  # back too, as after a rejected turn
        context = text[:end] if end != 24 else [7, *text[:12]]
        fresh = DRAFTERS["adaptive"](MODEL)
        assert lived.signals(context, None) == fresh.signals(context, None)
        assert draft(lived, context) == draft(DRAFTERS["adaptive"](MODEL), context)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8)], ids=["greedy", "sampled"])
def test_output_is_the_targets_whatever_is_chosen(sampling: Sampling):
    prompt = [3, 1, 4, 1, 5]
    said = Decoder(MODEL, DRAFTERS["adaptive"](MODEL)).generate(prompt, max_new_tokens=40, sampling=sampling, seed=3)
    if sampling == GREEDY:
        assert said.tokens == Decoder(MODEL).generate(prompt, max_new_tokens=40).tokens
    assert len({len(one.tokens) for one in said.rounds}) > 2  # several arms had their turn


def made_places() -> list[Place]:
    """Sure: the deep learned arm gets 4. Unsure: nothing. With a match of 9 the long lookup gets 8."""
    places = []
    for idx in range(60):
        kind = idx % 3
        signals = Signals(0.5, 0.5, 9 if kind == 2 else 0, 0.9 if kind == 0 else 0.1, 0.4 if kind == 0 else 4.0)
        accepted = [0] * len(ARMS)
        if kind == 0:
            accepted[ARMS.index(Arm("learned", 4, 10))] = 4
        if kind == 2:
            accepted[ARMS.index(Arm("lookup", 8, 8))] = 8
        places.append(Place(signals, tuple(accepted)))
    return places


def test_a_router_learns_what_is_accepted(tmp_path: Path):
    places = made_places()
    router = fit_router(places)
    for one in places[:3]:
        assert router.accepted(one.signals, ARMS) == pytest.approx(one.accepted, abs=0.2)
    drafter = AdaptiveDrafter(Knowing(), router, CHEAP)
    chosen = [drafter.choose(one.signals, **FREE) for one in places[:3]]
    assert chosen == [Arm("learned", 4, 10), Arm(), Arm("lookup", 8, 8)]
    router.save(tmp_path / "router.json")
    assert Router.load(tmp_path / "router.json") == router
    with pytest.raises(ValueError, match="fit one to these"):
        router.accepted(places[0].signals, ARMS[:2])


@pytest.mark.parametrize("text", ["[]", "{}", '{"arms": [[1, 2, 3, 4]]}', "no json"])
def test_a_file_that_is_no_router_is_told(text: str, tmp_path: Path):
    (tmp_path / "router.json").write_text(text)
    with pytest.raises(ValueError, match=r"router.json is no router that specbench train-drafter wrote"):
        Router.load(tmp_path / "router.json")


def test_what_would_have_been_accepted_is_counted():
    """A text that counts up, of which `Knowing` gets all that an arm is deep, and the lookup all after 13 tokens."""
    tokens = [place % 13 for place in range(48)]
    labels = torch.tensor([(token + 1) % 13 for token in tokens])
    text = Text(torch.tensor(tokens), torch.zeros(48, 4), labels, 2)
    places = places_of(Knowing(), [text])
    assert [one.accepted for one in places[:1]] == [
        tuple(0 if arm.member != "learned" else min(arm.depth, arm.nodes) for arm in ARMS)
    ]
    lookups = {places[-1].accepted[idx] for idx, arm in enumerate(ARMS) if arm == Arm("lookup", 8, 8)}
    assert lookups == {8}
    # A text that is not what the target would have said tells nothing.
    assert not places_of(Knowing(), [Text(text.tokens, text.states, labels.roll(1), 2)])
    with pytest.raises(ValueError, match="there is no place at which a greedy text goes on long enough"):
        fit_router([])


def test_over_real_heads_states_given_or_computed_are_the_same():
    generator = torch.Generator().manual_seed(1)
    weights = {"ids": torch.arange(13)}
    for idx in range(3):
        weights[f"heads.{idx}.weight"] = torch.randn(16, 32, generator=generator, dtype=torch.float64)
        weights[f"heads.{idx}.bias"] = torch.zeros(16, dtype=torch.float64)
    learned = HeadsDrafter(MODEL, MarkovHeads(HeadsConfig(16, 13, 3, 13), weights), shape=WIDEST)
    context = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    one = AdaptiveDrafter(learned, CostPolicy(), CHEAP, seldom=0.0)
    given = one.signals(context, TargetState(MODEL.states(context[:-1])))
    assert given == AdaptiveDrafter(learned, CostPolicy(), CHEAP, seldom=0.0).signals(context, None)
    law = learned.first_laws(context, range(10, 11), None)[0].exp()
    assert given.sure == pytest.approx(float(law.max()))
    assert json.loads(json.dumps(given.as_vector())) == given.as_vector()
