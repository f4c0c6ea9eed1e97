"""The oracle: its fast form equals its naive one, and both say what transformers says."""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specbench.protocols import LanguageModel
from specbench.reference.autoregressive import NodeScores, generate, prefix_scores, score_tree, score_tree_naive
from specbench.reference.hf import HFModel
from specbench.reference.model import LlamaConfig, tiny_llama
from specbench.tree import DraftTree, chain, root_only
from specbench.types import Stop

CONFIG = LlamaConfig(
    vocab_size=23, hidden_size=24, intermediate_size=32, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=4
)
# eager attention softmaxes in fp32, so HF models are driven with sdpa here.
MODELS = ["reference", "llama", "gpt2", "gemma3_text"]
every_model = pytest.mark.parametrize("name", MODELS)


@lru_cache
def model_named(name: str) -> LanguageModel:
    if name == "reference":
        return tiny_llama(CONFIG, seed=0)
    return HFModel.tiny(name, seed=0, dtype=torch.float64)


def random_case(seed: int, vocab_size: int) -> tuple[list[int], DraftTree]:
    """A prefix of 0 to 9 tokens and a tree of 1 to 20 nodes."""
    generator = random.Random(seed)
    prefix = [generator.randrange(vocab_size) for _ in range(generator.randrange(10))]
    parents = [-1, *(generator.randrange(node) for node in range(1, generator.randint(1, 20)))]
    return prefix, DraftTree.of([generator.randrange(vocab_size) for _ in parents], parents)


def largest_error(actual: NodeScores, expected: NodeScores) -> float:
    """Over logits and every layer's k, v, attention output and hidden state, relative to the scale of each."""
    pairs = [(actual.logits, expected.logits)]
    for one, other in zip(actual.layers, expected.layers, strict=True):
        pairs += [(getattr(one, name), getattr(other, name)) for name in ("k", "v", "attention_output", "hidden_state")]
    assert all(one.shape == other.shape for one, other in pairs)
    return max(float((one - other).abs().max() / other.pow(2).mean().sqrt()) for one, other in pairs)


@every_model
@pytest.mark.parametrize("seed", range(12))
def test_the_fast_tree_oracle_equals_the_naive_one(name, seed):
    model = model_named(name)
    prefix, tree = random_case(seed, model.vocab_size)
    assert largest_error(score_tree(model, prefix, tree), score_tree_naive(model, prefix, tree)) < 1e-9


ODD_TREES = {
    "root": root_only(3),
    "chain": chain([3, 3, 3, 3, 3]),
    "star": DraftTree.of([3, 1, 2, 1], [-1, 0, 0, 0]),
    "ragged": DraftTree.of([3, 1, 2, 1, 5, 6], [-1, 0, 0, 2, 3, 4]),
}


@pytest.mark.parametrize("prefix", [[], [4], [0, 0, 0]], ids=["P0", "P1", "P3"])
@pytest.mark.parametrize("tree", ODD_TREES.values(), ids=ODD_TREES)
def test_the_fast_oracle_equals_the_naive_one_on_odd_trees(tree, prefix):
    model = model_named("reference")
    assert largest_error(score_tree(model, prefix, tree), score_tree_naive(model, prefix, tree)) < 1e-9


@every_model
def test_scores_of_a_tree_have_one_row_a_node(name):
    model = model_named(name)
    scores = score_tree(model, [1, 2], DraftTree.of([3, 4, 5, 6], [-1, 0, 0, 1]))
    assert scores.logits.shape == (4, model.vocab_size) and len(scores.layers) == model.num_layers
    for tap in scores.layers:
        assert tap.k.shape == tap.v.shape and tap.k.shape[1] == 4
        assert tap.attention_output.shape == tap.hidden_state.shape and tap.hidden_state.shape[0] == 4


def test_nodes_of_equal_text_have_equal_scores():
    """Nodes 1-3 and 2-4 spell the same; tokens behind and beside them differ."""
    scores = score_tree(model_named("reference"), [1, 2], DraftTree.of([3, 4, 4, 5, 5, 6], [-1, 0, 0, 1, 2, 3]))
    assert (scores.logits[[1, 3]] - scores.logits[[2, 4]]).abs().max() < 1e-9


def test_the_token_that_pads_short_paths_changes_nothing():
    """Padding is token 0: a path of real zeros beside a short one must not move it."""
    model = model_named("reference")
    alone = score_tree(model, [1], DraftTree.of([3, 4], [-1, 0]))
    beside = score_tree(model, [1], DraftTree.of([3, 4, 0, 0, 0], [-1, 0, 0, 2, 3]))
    assert (alone.logits - beside.logits[:2]).abs().max() < 1e-9


@every_model
def test_scores_of_a_prefix_are_those_of_a_chain(name):
    model, text = model_named(name), [5, 1, 1, 8, 0, 2]
    assert largest_error(prefix_scores(model, text), score_tree_naive(model, [], chain(text))) < 1e-9


@every_model
def test_logits_of_a_node_are_the_last_row_of_its_text_forwarded_alone(name):
    model = model_named(name)
    prefix, tree = random_case(7, model.vocab_size)
    scores = score_tree(model, prefix, tree)
    expected = torch.stack([model.logits([*prefix, *tree.path_tokens(node)])[-1] for node in range(tree.num_nodes)])
    assert (scores.logits - expected).abs().max() < 1e-9 * expected.std()


# ---- generation


def transformers_generate(folder: Path, prompt: list[int], max_new_tokens: int, **more: object) -> tuple[int, ...]:
    twin = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    tokens = torch.tensor([prompt])
    # An explicit mask: transformers would take a 0 in the prompt for padding.
    out = twin.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        pad_token_id=0,
        **more,
    )
    return tuple(out[0, len(prompt) :].tolist())


@pytest.mark.parametrize("seed", range(4))
def test_generation_equals_transformers_generate(seed, tmp_path):
    model = tiny_llama(CONFIG, seed=seed)
    model.save(tmp_path)
    prompt = [seed, 7, 3, 22]
    assert generate(model, prompt, max_new_tokens=40).tokens == transformers_generate(tmp_path, prompt, 40)


def test_generation_stops_where_transformers_does(tmp_path):
    model = tiny_llama(CONFIG, seed=0)
    model.save(tmp_path)
    plain = generate(model, [1, 2], max_new_tokens=20).tokens
    eos = [plain[9], plain[14]]
    theirs = transformers_generate(tmp_path, [1, 2], 20, eos_token_id=eos)
    ours = generate(model, [1, 2], max_new_tokens=20, stop=Stop(tuple(eos)))
    assert (ours.tokens, ours.finish_reason) == (theirs, "eos")


def test_generation_is_the_argmax_of_a_whole_forward_each_time():
    model = model_named("reference")
    text = [3, 1]
    for _ in range(12):
        text.append(int(model.logits(text)[-1].argmax()))
    assert generate(model, [3, 1], max_new_tokens=12).tokens == tuple(text[2:])


def test_the_end_token_is_emitted_and_nothing_after_it():
    model = model_named("reference")
    plain = generate(model, [3, 1], max_new_tokens=12).tokens
    first = plain.index(plain[5])
    stopped = generate(model, [3, 1], max_new_tokens=12, stop=Stop((plain[5],)))
    assert (stopped.tokens, stopped.finish_reason) == (plain[: first + 1], "eos")


def test_an_end_token_in_the_prompt_does_not_stop():
    model = model_named("reference")
    plain = generate(model, [3, 1], max_new_tokens=6)
    unused = next(token for token in range(23) if token not in plain.tokens)
    assert len(generate(model, [unused, 1], max_new_tokens=1, stop=Stop((unused, 1))).tokens) == 1


def test_the_last_allowed_token_may_be_the_end_token():
    model = model_named("reference")
    plain = generate(model, [3, 1], max_new_tokens=1).tokens
    assert generate(model, [3, 1], max_new_tokens=1, stop=Stop(plain)).finish_reason == "eos"


@pytest.mark.parametrize("max_new_tokens", [0, 1, 7])
def test_generation_without_an_end_token_has_the_asked_length(max_new_tokens):
    generation = generate(model_named("reference"), [3], max_new_tokens=max_new_tokens)
    assert (len(generation.tokens), generation.finish_reason) == (max_new_tokens, "length")


def test_plain_generation_records_no_rounds():
    assert generate(model_named("reference"), [3], max_new_tokens=3).rounds == ()


def test_tiny_models_do_not_fall_silent():
    """Greedy output of the toy models must vary, or lossless tests would compare constants."""
    outputs = [generate(tiny_llama(CONFIG, seed=seed), [1, 2, 3], max_new_tokens=24).tokens for seed in range(4)]
    assert len(set(outputs)) == 4 and all(len(set(output)) >= 4 for output in outputs)
