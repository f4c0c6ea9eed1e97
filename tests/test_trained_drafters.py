"""Drafters that read the target's hidden states: their laws by hand, their shapes, and that no state goes stale."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specbench.protocols import SeededCoins
from specbench.reference import autoregressive
from specbench.reference.decoder import Decoder
from specbench.reference.drafters.growth import BestFirst, Static, grow
from specbench.reference.drafters.heads import HeadsConfig, HeadsDrafter, MarkovHeads
from specbench.reference.drafters.layers import DraftLayers, LayersConfig, LayersDrafter
from specbench.reference.hf import HFModel
from specbench.reference.model import LlamaConfig, tiny_llama
from specbench.reference.session import TreeSession
from specbench.tree import DraftTree, chain, root_only
from specbench.types import GREEDY, TargetState

CONFIG = LlamaConfig(
    vocab_size=13, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4
)
MODEL = tiny_llama(CONFIG, seed=0)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
IDS = torch.tensor([1, 2, 3, 5, 8, 9, 12])


def heads(*, conditioned: bool = True, num_heads: int = 3, seed: int = 0) -> MarkovHeads:
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = {"ids": IDS}
    for idx in range(num_heads):
        weights[f"heads.{idx}.weight"] = numbers(16, 32 if conditioned else 16)
        weights[f"heads.{idx}.bias"] = numbers(16)
    return MarkovHeads(HeadsConfig(16, 13, num_heads, len(IDS), conditioned), weights)


def layers(*, reads_features: bool = True, num_layers: int = 1, seed: int = 0) -> DraftLayers:
    config = LayersConfig(16, 24, num_layers, 4, 2, 4, 13, len(IDS), reads_features)
    return DraftLayers.untrained(config, IDS, seed=seed).converted(torch.float64)


DRAFTERS = {
    "independent": lambda shape: HeadsDrafter(MODEL, heads(conditioned=False), shape=shape),
    "conditioned": lambda shape: HeadsDrafter(MODEL, heads(), shape=shape),
    "feature": lambda shape: LayersDrafter(MODEL, layers(), shape=shape),
    "small model": lambda shape: LayersDrafter(MODEL, layers(reads_features=False, num_layers=2), shape=shape),
}
SHAPES = {"widths": Static.widths(2, 2, 1), "best": BestFirst(num_nodes=6, depth=3, beam=3, width=3)}
every_drafter = pytest.mark.parametrize("name", DRAFTERS)
every_shape = pytest.mark.parametrize("shape", SHAPES)


def draft(drafter, context: list[int], *, max_nodes: int = 64, max_depth: int = 16, state: TargetState | None = None):
    return drafter.draft(
        context, max_nodes=max_nodes, max_depth=max_depth, sampling=GREEDY, coins=SeededCoins(0), target_state=state
    )


# ---- growth


class Table:
    """The same law at every node: log-probabilities by column."""

    def __init__(self, *probs: float, ids: Tensor | None = None) -> None:
        self.ids, self._row = ids, torch.tensor(probs, dtype=torch.float64).log()

    def __call__(self, tokens, parents, level) -> Tensor:
        return self._row.expand(len(level), -1)


def test_a_static_tree_takes_tokens_by_rank():
    tree = grow(7, Table(0.2, 0.5, 0.3), Static(((0,), (2,), (0, 1))), max_nodes=9, max_depth=9)
    assert tree == DraftTree.of([7, 1, 0, 2], [-1, 0, 0, 1])


def test_widths_are_a_static_tree():
    assert Static.widths(2, 1).paths == ((0,), (1,), (0, 0), (1, 0))


def test_the_best_tree_by_accuracies():
    """0.6, then 0.6 x 0.5 = 0.3 before the sibling's 0.2, then 0.2; 0.6 x 0.2 = 0.12 before 0.2 x 0.5 = 0.1."""
    best = Static.best([[0.6, 0.2], [0.5, 0.2]], num_nodes=4)
    assert best.paths == ((0,), (0, 0), (1,), (0, 1))


def test_best_first_keeps_the_highest_scores():
    """Scores: .5 .3 .2, below .5: .25 .15 .1, below .3: .15 .09 .06. The best five: .5 .3 .25 .2 and, of .15 and .15,
    the one that stands first."""
    shape = BestFirst(num_nodes=5, depth=2, beam=2, width=3)
    tree = grow(7, Table(0.5, 0.3, 0.2), shape, max_nodes=9, max_depth=9)
    assert tree == DraftTree.of([7, 0, 1, 2, 0, 1], [-1, 0, 0, 0, 1, 1])


def test_best_first_stops_at_its_least_score():
    shape = BestFirst(num_nodes=9, depth=3, beam=2, width=3, least_score=math.log(0.24))
    assert grow(7, Table(0.5, 0.3, 0.2), shape, max_nodes=9, max_depth=9) == DraftTree.of([7, 0, 1, 0], [-1, 0, 0, 1])


@every_shape
@pytest.mark.parametrize(("max_nodes", "max_depth"), [(0, 3), (1, 3), (4, 3), (9, 1), (9, 0)])
def test_budgets_hold(shape, max_nodes, max_depth):
    tree = grow(7, Table(0.5, 0.3, 0.2), SHAPES[shape], max_nodes=max_nodes, max_depth=max_depth)
    assert tree.num_drafts <= max_nodes and int(tree.depth.max()) <= max_depth
    assert tree.num_drafts == min(max_nodes, tree.num_drafts if max_depth else 0)


def test_of_equal_probabilities_the_first_column_comes_first_and_none_of_probability_zero():
    law = Table(0.0, 0.5, 0.5, 0.0, ids=torch.tensor([10, 20, 30, 40]))
    assert grow(7, law, Static.widths(4), max_nodes=9, max_depth=9) == DraftTree.of([7, 20, 30], [-1, 0, 0])


@pytest.mark.parametrize("paths", [((),), ((0, 0),), ((0,), (-1,))])
def test_paths_that_are_no_tree_are_refused(paths):
    with pytest.raises(ValueError, match="paths holds"):
        Static(paths)


# ---- laws


def naive_heads(hidden: Tensor, path: list[int], one: MarkovHeads) -> Tensor:
    """float64 [V']: the law of the token behind a path that begins with the root."""
    state = hidden
    for idx, token in enumerate(path):
        seen = hidden if not one.config.conditioned else torch.cat([state, MODEL.embedding[token]])
        inner = one.weights[f"heads.{idx}.weight"] @ seen + one.weights[f"heads.{idx}.bias"]
        state = (state if one.config.conditioned else hidden) + inner * torch.sigmoid(inner)
    return (MODEL.head[IDS] @ state).softmax(-1)


def naive_layers(path: list[int], context: list[int], one: DraftLayers) -> Tensor:
    """The same of layers: the whole text forwarded at once, guesses in place of features behind the root."""
    features = list(MODEL.states(context[:-1]))
    text = [*context, *path[1:]]
    while True:
        embedded, before = MODEL.embedding[text[1 : len(features) + 1]], torch.stack(features)
        given = torch.cat([embedded, before], dim=-1) @ one.own["fc.weight"].T if one.sizes.reads_features else embedded
        mix = one._mix_causal(torch.arange(len(features)), None)
        out = one._through_layers(given[None], mix, None)[0, -1]
        if len(features) == len(text) - 1:
            return (MODEL.head[IDS] @ out).softmax(-1)
        features.append(out)


@every_drafter
def test_each_node_has_the_likeliest_children_of_its_path(name):
    one = {
        "independent": heads(conditioned=False),
        "conditioned": heads(),
        "feature": layers(),
        "small model": layers(reads_features=False, num_layers=2),
    }[name]
    tree = draft(DRAFTERS[name](Static.widths(2, 2, 1)), PROMPT)
    hidden = MODEL.states(PROMPT[:-1])[-1]
    assert tree.num_nodes == 11
    for node in range(tree.num_nodes):
        children = [tree.token_list[child] for child in tree.children(node)]
        path = list(tree.path_tokens(node))
        law = naive_layers(path, PROMPT, one) if isinstance(one, DraftLayers) else None
        if law is None and len(path) <= one.config.num_heads:
            law = naive_heads(hidden, path, one)
        if children:
            assert children == IDS[law.argsort(descending=True)[: len(children)]].tolist()


# ---- state


@every_drafter
@every_shape
@pytest.mark.parametrize("accept", [0, 1, 2])
def test_what_was_accepted_changes_no_later_draft(name, shape, accept):
    """A drafter that has lived through rounds drafts what a fresh one does; the states it is given are the target's."""
    session = TreeSession(MODEL, keeps_states=True)
    lived, context = DRAFTERS[name](SHAPES[shape]), list(PROMPT)
    session.prefill(context[:-1])
    for _ in range(4):
        tree = draft(lived, context, state=TargetState(session.states))
        assert tree == draft(DRAFTERS[name](SHAPES[shape]), context)
        session.forward_tree(tree)
        path = next((one[1 : accept + 1] for one in tree.paths() if len(one) > accept), [])
        session.commit(path)
        context += [*(tree.token_list[node] for node in path), 11]
    torch.testing.assert_close(session.states, MODEL.states(context[:-1]), rtol=0, atol=1e-12)


def test_a_drafter_goes_back_to_an_earlier_text():
    lived = DRAFTERS["feature"](SHAPES["widths"])
    draft(lived, [*PROMPT, 7, 7])
    assert draft(lived, [*PROMPT, 8]) == draft(DRAFTERS["feature"](SHAPES["widths"]), [*PROMPT, 8])


def test_states_follow_forks_truncation_and_pieces():
    session = TreeSession(MODEL, keeps_states=True)
    session.prefill(PROMPT[:3])
    session.extend(PROMPT[3:6])
    twin = session.fork()
    session.forward_tree(chain([1, 2]))
    session.truncate(2)
    twin.extend([7])
    torch.testing.assert_close(session.states, MODEL.states(PROMPT[:2]), rtol=0, atol=1e-12)
    torch.testing.assert_close(twin.states, MODEL.states([*PROMPT[:6], 7]), rtol=0, atol=1e-12)


@every_drafter
@every_shape
@pytest.mark.parametrize("cache", ["contiguous", "paged_4"])
def test_generations_are_plain_decoding(name, shape, cache):
    decoder = Decoder(MODEL, DRAFTERS[name](SHAPES[shape]), cache=cache)
    answer = decoder.generate(PROMPT, max_new_tokens=12)
    assert answer.tokens == autoregressive.generate(MODEL, PROMPT, max_new_tokens=12).tokens
    assert any(len(one.tokens) > 1 for one in answer.rounds)


def test_the_decoder_hands_over_the_states_it_has():
    seen: list[TargetState | None] = []

    class Listening(HeadsDrafter):
        def draft(self, context, *, target_state=None, **named):
            seen.append(target_state)
            expected = MODEL.states(context[:-1])
            torch.testing.assert_close(target_state.hidden, expected, rtol=0, atol=1e-12)
            return super().draft(context, target_state=target_state, **named)

    Decoder(MODEL, Listening(MODEL, heads(), shape=SHAPES["best"])).generate(PROMPT, max_new_tokens=8)
    assert len(seen) > 1


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gemma2", "falcon"])
def test_a_transformers_model_tells_its_states(model_type):
    model = HFModel.tiny(model_type, seed=1, dtype=torch.float64)
    session = TreeSession(model, keeps_states=True)
    session.prefill(PROMPT[:-1])
    logits = session.forward_tree(chain([PROMPT[-1], 3]))
    session.commit([1])
    states = model.states([*PROMPT, 3])
    torch.testing.assert_close(session.states, states, rtol=0, atol=1e-5)
    made = states[-1] @ model.head.T
    if (cap := getattr(model.model.config, "final_logit_softcapping", None)) is not None:
        made = cap * torch.tanh(made / cap)
    torch.testing.assert_close(made, logits[-1], rtol=0, atol=1e-4)
    assert model.embedding.shape == model.head.shape


# ---- bad input


def test_states_of_another_context_are_refused():
    with pytest.raises(ValueError, match=r"target_state.hidden has 3 rows, must have 7 \(a context of 8 tokens"):
        draft(DRAFTERS["conditioned"](SHAPES["best"]), PROMPT, state=TargetState(torch.zeros(3, 16)))


def test_a_context_of_one_token_gets_no_draft():
    for name in DRAFTERS:
        assert draft(DRAFTERS[name](SHAPES["best"]), [4]) == root_only(4)


def test_weights_come_back_from_a_folder(tmp_path: Path):
    heads().save(tmp_path / "heads", dtype=torch.float64)
    layers().write(tmp_path / "layers", dtype=torch.float64)
    again = {
        "conditioned": HeadsDrafter(MODEL, MarkovHeads.load(tmp_path / "heads"), shape=SHAPES["best"]),
        "feature": LayersDrafter(MODEL, DraftLayers.read(tmp_path / "layers"), shape=SHAPES["best"]),
    }
    for name, one in again.items():
        assert draft(one, PROMPT) == draft(DRAFTERS[name](SHAPES["best"]), PROMPT)


def test_what_does_not_fit_is_refused(tmp_path: Path):
    good = heads()
    with pytest.raises(ValueError, match=r"heads: heads.1.bias is missing, must have shape \[16\]"):
        MarkovHeads(good.config, {key: one for key, one in good.weights.items() if key != "heads.1.bias"})
    with pytest.raises(ValueError, match=r"heads: heads.0.weight has shape \[2, 2\], must have \[16, 32\]"):
        MarkovHeads(good.config, good.weights | {"heads.0.weight": torch.zeros(2, 2)})
    with pytest.raises(ValueError, match="heads: other must not be there"):
        MarkovHeads(good.config, good.weights | {"other": torch.zeros(1)})
    with pytest.raises(ValueError, match="ids must be in ascending order, each once"):
        MarkovHeads(
            good.config, good.weights | {"ids": IDS.flip(0)[[1, 0, 2, 3, 4, 5, 6]].sort().values[[0, 0, 2, 3, 4, 5, 6]]}
        )
    with pytest.raises(ValueError, match=r"ids must be int64 from 0 to 12"):
        MarkovHeads(good.config, good.weights | {"ids": IDS + 5})
    other = tiny_llama(LlamaConfig(11, 16, 24, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4), seed=0)
    with pytest.raises(
        ValueError, match=r"made for a target of 13 tokens and hidden size 16, must fit this one's 11 and 16"
    ):
        HeadsDrafter(other, good, shape=SHAPES["best"])
    with pytest.raises(ValueError, match=r"has no config.json: it must be a folder that specbench train-drafter wrote"):
        MarkovHeads.load(tmp_path)
    layers().write(tmp_path)
    with pytest.raises(ValueError, match=r"config.json says kind = 'draft_layers', must be 'markov_heads'"):
        MarkovHeads.load(tmp_path)
