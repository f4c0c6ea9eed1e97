"""reference.streaming: equal to `LlamaModel` in fp64 without its tree masks, and never more than a layer in memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specbench.banks import Bank, _is_streamed
from specbench.compare import max_error, scale_of
from specbench.reference import autoregressive
from specbench.reference.memory import LiveBytes, streamed_bytes
from specbench.reference.model import LlamaConfig, LlamaModel, tiny_llama
from specbench.reference.recurrent import Recurrence, tiny_hybrid
from specbench.reference.streaming import StreamedOracle
from specbench.tree import DraftTree
from specbench.types import Taps

GROUPED = LlamaConfig(31, 32, 48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8)
CONFIGS = {
    "grouped": GROUPED,
    "multi-query": LlamaConfig(29, 24, 32, num_layers=2, num_heads=3, num_kv_heads=1, head_dim=10),
    "tied": replace(GROUPED, num_kv_heads=4, tied=True),
    "all layers slide": replace(GROUPED, windows=(4, 4, 4)),
    "every other layer slides": replace(GROUPED, windows=(5, None, 5)),
    "theta 500": replace(GROUPED, rope_theta=500.0),
}
PREFIX = [(7 * place + place * place) % 29 for place in range(23)]
# Two children everywhere at first, then a chain; tokens repeat among siblings.
TREE = DraftTree.of([3, 9, 9, 4, 1, 1, 8, 2, 2], [-1, 0, 0, 1, 1, 2, 3, 6, 7])


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return max_error(actual, expected) / scale_of(expected)


@pytest.mark.parametrize("prefix_len", [0, 1, 23])
@pytest.mark.parametrize("name", CONFIGS)
def test_nodes_score_as_by_the_model(name: str, prefix_len: int) -> None:
    model = tiny_llama(CONFIGS[name], seed=1)
    right = autoregressive.score_tree_naive(model, PREFIX[:prefix_len], TREE)
    mine = StreamedOracle(model, block_rows=5).score_tree(PREFIX[:prefix_len], TREE)
    assert relative(mine.logits, right.logits) < 1e-12


@pytest.mark.parametrize("field", ["k", "v", "attention_output", "hidden_state"])
@pytest.mark.parametrize("name", ["grouped", "every other layer slides"])
def test_every_layer_of_a_node_is_as_by_the_model(name: str, field: str) -> None:
    model = tiny_llama(CONFIGS[name], seed=1)
    right = autoregressive.score_tree_naive(model, PREFIX, TREE)
    mine = StreamedOracle(model, block_rows=5).score_tree(PREFIX, TREE)
    errors = [relative(getattr(a, field), getattr(b, field)) for a, b in zip(mine.layers, right.layers, strict=True)]
    assert (len(errors), max(errors) < 1e-12) == (3, True)


@pytest.mark.parametrize("block_rows", [1, 5, 23, 100])
def test_a_text_scores_alike_in_blocks_of_any_size(block_rows: int) -> None:
    model = tiny_llama(CONFIGS["every other layer slides"], seed=2)
    assert relative(StreamedOracle(model, block_rows=block_rows).logits(PREFIX), model.logits(PREFIX)) < 1e-12


def test_a_batch_of_texts_is_tapped_as_by_the_model() -> None:
    model = tiny_llama(GROUPED, seed=3)
    batch = torch.tensor([PREFIX, PREFIX[::-1]])
    right, mine = Taps(), Taps()
    errors = [relative(StreamedOracle(model, block_rows=5).causal(batch, taps=mine), model.causal(batch, taps=right))]
    for one, two in zip(mine.layers, right.layers, strict=True):
        for field in ("k", "v", "attention_output", "hidden_state"):
            errors.append(relative(getattr(one, field), getattr(two, field)))
    assert (len(errors), max(errors) < 1e-12) == (13, True)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_codec_rounds_keys_and_values_as_in_the_model(kind: str) -> None:
    model = tiny_llama(GROUPED, seed=3).with_codec(kind)
    assert relative(StreamedOracle(model).logits(PREFIX), model.logits(PREFIX)) < 1e-12


def test_a_codec_can_be_chosen_later() -> None:
    model = tiny_llama(GROUPED, seed=3)
    one = StreamedOracle(model).with_codec("int8").logits(PREFIX)
    assert relative(one, model.with_codec("int8").logits(PREFIX)) < 1e-12


def test_the_beginning_of_a_trunk_is_the_trunk_of_the_beginning() -> None:
    oracle = StreamedOracle(tiny_llama(CONFIGS["every other layer slides"], seed=2), block_rows=5)
    short = oracle.score_behind(oracle.trunk(PREFIX).first(11), TREE)
    assert relative(short.logits, oracle.score_tree(PREFIX[:11], TREE).logits) < 1e-12


def saved(model: LlamaModel, folder: Path, *, num_shards: int = 0) -> Path:
    """A checkpoint folder; num_shards: split into so many files with an index, in one for 0."""
    model.save(folder)
    if num_shards:
        (folder / "model.safetensors").unlink()
        names = sorted(model._weights)
        weight_map = {name: f"model-{idx % num_shards:05}.safetensors" for idx, name in enumerate(names)}
        for file_name in set(weight_map.values()):
            part = {name: model._weights[name].contiguous() for name in names if weight_map[name] == file_name}
            save_file(part, folder / file_name)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("num_shards", [0, 3])
@pytest.mark.parametrize("name", ["grouped", "tied", "all layers slide"])
def test_a_checkpoint_scores_as_the_model_that_was_saved(name: str, num_shards: int, tmp_path: Path) -> None:
    model = tiny_llama(CONFIGS[name], seed=4)
    mine = StreamedOracle(saved(model, tmp_path, num_shards=num_shards)).score_tree(PREFIX, TREE)
    assert relative(mine.logits, autoregressive.score_tree_naive(model, PREFIX, TREE).logits) < 1e-12


def test_biases_are_read(tmp_path: Path) -> None:
    plain = tiny_llama(GROUPED, seed=4)
    biases = {
        name.replace(".weight", ".bias"): weight.sum(dim=1) for name, weight in plain._weights.items() if "proj" in name
    }
    model = LlamaModel(GROUPED, {**plain._weights, **biases})
    assert relative(StreamedOracle(saved(model, tmp_path)).logits(PREFIX), model.logits(PREFIX)) < 1e-12


def test_weights_are_those_of_the_target_rounded_as_it_rounds_them(tmp_path: Path) -> None:
    """bf16 weights in fp64: far from the fp64 weights, equal to the rounded ones."""
    model = tiny_llama(GROUPED, seed=4)
    mine = StreamedOracle(saved(model, tmp_path), torch.bfloat16).logits(PREFIX)
    rounded = model.to(torch.bfloat16).to(torch.float64).logits(PREFIX)
    assert (relative(mine, rounded) < 1e-12, relative(mine, model.logits(PREFIX)) > 1e-4) == (True, True)


BIG = LlamaConfig(1000, 512, 1376, num_layers=8, num_heads=8, num_kv_heads=8, head_dim=64)
TEXT = [(31 * place) % 1000 for place in range(300)]


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """26 million weights in bf16: 52 MB on disk, 210 MB in fp64."""
    return saved(tiny_llama(BIG, seed=5).to(torch.bfloat16), tmp_path_factory.mktemp("big"), num_shards=2)


def test_a_checkpoint_takes_a_layer_of_memory_and_the_rows(big: Path) -> None:
    """Less than the formula says, and less than a quarter of the weights in fp64, which 8 layers share."""
    with LiveBytes() as live:
        StreamedOracle(big).logits(TEXT)
    formula = streamed_bytes(BIG, num_rows=len(TEXT), block_rows=64, stored=torch.bfloat16)
    assert (0.6 * formula < live.peak <= formula, live.peak < 210e6 / 4) == (True, True)


def test_a_tree_takes_no_more_memory_than_a_text_of_as_many_rows(big: Path) -> None:
    with LiveBytes() as live:
        StreamedOracle(big).score_tree(TEXT[:-9], TREE)
    assert live.peak <= streamed_bytes(BIG, num_rows=len(TEXT), block_rows=64, stored=torch.bfloat16)


def test_no_scores_of_all_rows_against_all_rows_are_formed() -> None:
    """What grows with the square of the text would be 8 heads x 300 x 300."""
    model = tiny_llama(replace(GROUPED, num_heads=8), seed=5)
    with LiveBytes() as live:
        StreamedOracle(model, block_rows=10).logits(PREFIX * 20)
    assert live.largest[torch.float64] <= 8 * 8 * 10 * len(PREFIX * 20)


REFUSED = {
    "no folder": "no folder",
    "empty": "must hold model.safetensors",
    "pickle": "pytorch_model.bin, a pickle, which may run code",
    "shard elsewhere": "'../model.safetensors', which must be a file beside it",
    "other type": "model_type = 'gpt2' must be 'llama' or 'mistral'",
    "other rope": "rope_type = 'linear' must be 'default'",
    "no config": "config.json cannot be read",
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_folder_that_cannot_be_judged_is_refused_in_a_sentence(what: str, tmp_path: Path) -> None:
    folder = saved(tiny_llama(GROUPED, seed=4), tmp_path / "model")
    weights, config = folder / "model.safetensors", folder / "config.json"
    if what == "no folder":
        folder = tmp_path / "absent"
    if what in ("empty", "pickle"):
        weights.unlink()
    if what == "pickle":
        (folder / "pytorch_model.bin").write_bytes(b"x")
    if what == "shard elsewhere":
        index = {"weight_map": {"lm_head.weight": "../model.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if what == "other type":
        config.write_text(json.dumps({"model_type": "gpt2"}))
    if what == "other rope":
        scaling = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
        config.write_text(json.dumps(json.loads(config.read_text()) | scaling))
    if what == "no config":
        config.unlink()
    with pytest.raises(ValueError) as caught:
        StreamedOracle(folder)
    assert REFUSED[what] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    model = tiny_llama(GROUPED, seed=4)
    partly = {name: one for name, one in model._weights.items() if "layers.1.mlp.up" not in name}
    saved(model, tmp_path)
    save_file(partly, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no weights named model.layers.1.mlp.up_proj.weight"):
        StreamedOracle(tmp_path).logits([1])


def test_a_model_with_other_layers_is_refused() -> None:
    hybrid = tiny_hybrid(GROUPED, Recurrence(layers=(0,)), seed=0)
    with pytest.raises(ValueError, match="is a HybridModel: only LlamaModel itself is computed here"):
        StreamedOracle(hybrid)


def test_a_large_checkpoint_gets_the_streaming_oracle(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """210 MB in fp64: held under the default limit of 4 GiB, streamed under one of 0.1."""
    by_default = _is_streamed(str(big))
    monkeypatch.setenv("SPECBENCH_ORACLE_GIB", "0.1")
    oracle = Bank.widened(str(big), torch.bfloat16)
    Bank._widest.clear()
    assert (by_default, type(oracle)) == (False, StreamedOracle)


def test_the_limit_must_be_a_number(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBENCH_ORACLE_GIB", "much")
    with pytest.raises(ValueError, match="SPECBENCH_ORACLE_GIB = 'much' must be a number of GiB"):
        _is_streamed(str(big))
