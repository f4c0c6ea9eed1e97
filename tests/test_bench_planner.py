"""bench.planner and `specbench plan`: bytes by hand, formulas against counted and measured ones, what is advised."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from specbench import cli
from specbench.bench.lean import LeanLlama
from specbench.bench.memory import forward_bytes, measured
from specbench.bench.planner import (
    MOST_NODES,
    Load,
    changes,
    config_of,
    largest_tree,
    needs,
    num_weights,
    row_bytes,
    tree_nodes,
)
from specbench.bench.rows import Setting
from specbench.reference.batch_layouts import forward_packed
from specbench.reference.layouts import flatten_tree_mask
from specbench.reference.memory import LiveBytes
from specbench.reference.model import LlamaConfig, tiny_llama
from specbench.tree import DraftTree

CONFIGS = {
    "grouped, wide feed-forward": LlamaConfig(64, 64, 512, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16),
    "large vocabulary": LlamaConfig(8000, 32, 48, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16),
    "many heads": LlamaConfig(31, 32, 48, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=8),
}
# SmolLM2-135M's sizes: 30 layers of 576, 9 heads over 3, inner 1536, one matrix of 49,152 words.
SMOL = LlamaConfig(49_152, 576, 1536, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, tied=True)
LOAD = Load(context=2048, prompt=1024, nodes=8)


@pytest.mark.parametrize(("gamma", "width", "nodes"), [(4, 1, 4), (2, 3, 3 + 9), (3, 2, 2 + 4 + 8)])
def test_a_tree_has_so_many_nodes(gamma: int, width: int, nodes: int) -> None:
    assert tree_nodes(gamma, width) == nodes


def test_weights_and_rows_by_hand() -> None:
    """134,515,008 is what the model's own card and its checkpoint have."""
    assert num_weights(SMOL) == 134_515_008
    assert row_bytes(SMOL, torch.bfloat16) == 30 * 2 * 3 * 64 * 2
    assert row_bytes(SMOL, torch.bfloat16, "int8") == 30 * 2 * 3 * (64 + 4)


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_a_models_own(name: str) -> None:
    model = tiny_llama(CONFIGS[name], seed=0)
    assert num_weights(CONFIGS[name]) == sum(one.numel() for one in model._weights.values())


def test_what_a_load_needs_by_hand() -> None:
    found = needs(SMOL, LOAD)
    assert found.weights == 2 * 134_515_008
    assert found.cache == (2048 + 9) * 23_040
    assert found.logits == 9 * (576 + 2 * 49_152) * 2
    # A mask for each of 3 heads of a group, and the feed-forward's moment, the largest of a layer.
    assert found.prompt == 3 * 1024 * 1024 * 2 + 1024 * (3 * 576 + 4 * 1536 + (4 * 9 + 3 * 3) * 64) * 2
    assert (found.largest, found.peak) == ("prompt", found.weights + found.cache + found.prompt)


def test_a_prompt_in_pieces_takes_a_piece() -> None:
    """128 rows behind 896: masks of 128 x 1024, and 128 rows' states."""
    found = needs(SMOL, replace(LOAD, chunk=128))
    assert found.prompt == 3 * 128 * 1024 * 2 + 128 * (3 * 576 + 4 * 1536 + (4 * 9 + 3 * 3) * 64) * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_formula_of_a_batch_is_within_a_fifth_of_what_is_counted(name: str, dtype: torch.dtype) -> None:
    """The forward of packed rows, its logits by node and joined, as a round of a batch has them."""
    config = CONFIGS[name]
    model = LeanLlama.of(tiny_llama(config, seed=0).to(dtype))
    for batch, num_nodes, prefix_len in product((2, 8), (1, 16, 64), (0, 100, 1000)):
        tree = DraftTree.of([0] * num_nodes, [-1] + [(node - 1) // 2 for node in range(1, num_nodes)])
        caches = [model.new_cache("preallocated") for _ in range(batch)]
        rows = torch.zeros(config.num_kv_heads, prefix_len, config.head_dim, dtype=dtype)
        for cache, layer in product(caches, range(config.num_layers)):
            cache.append(layer, rows, rows)
        blocks = [flatten_tree_mask(tree, prefix_len)] * batch
        forward_packed(model, blocks, caches)  # the caches grow now
        for cache in caches:
            cache.truncate(prefix_len)
        with LiveBytes() as live:
            computed = forward_packed(model, blocks, caches)
            by_node = [one[block.row_of_node] for one, block in zip(computed, blocks, strict=True)]
            joined = torch.cat(by_node)
        found = max(forward_bytes(config, rows=num_nodes, prefix=prefix_len, dtype=dtype, batch=batch))
        assert 0.8 <= found / live.peak <= 1.2, (batch, num_nodes, prefix_len, len(joined))


def test_the_plan_is_what_a_process_of_its_own_takes(tmp_path: Path) -> None:
    """A tree whose logits decide: what decoding added to the process, and what bench predicts beside it."""
    config = LlamaConfig(40_000, 128, 64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=64, tied=True)
    tiny_llama(config, seed=0).to(torch.float32).save(tmp_path)
    setting, prompt = Setting("deep", drafter="lookup", gamma=60), [*range(3, 70)] * 3
    found = measured(setting, folder=str(tmp_path), dtype="fp32", prompt=prompt, num=100, threads=1)
    load = Load(context=len(prompt) + 100, prompt=len(prompt) - 1, nodes=60, dtype=torch.float32)
    plan = needs(config, load)
    predicted = {name: found["predicted"][name] for name in ("weights", "cache", "logits", "working")}
    assert predicted == {name: getattr(plan, name) for name in predicted}
    assert 0.5 * plan.working <= found["bytes"]["working"] <= plan.working + 32 * 2**20


def test_the_largest_tree_fits_and_one_node_more_does_not() -> None:
    memory = needs(SMOL, replace(LOAD, nodes=300)).peak
    most = largest_tree(SMOL, LOAD, memory)
    assert most is not None
    assert needs(SMOL, replace(LOAD, nodes=most)).peak <= memory < needs(SMOL, replace(LOAD, nodes=most + 1)).peak
    assert most >= 300


def test_the_ends_of_the_search() -> None:
    plain = needs(SMOL, replace(LOAD, nodes=0)).peak
    assert (largest_tree(SMOL, LOAD, plain - 1), largest_tree(SMOL, LOAD, plain)) == (None, 0)
    assert largest_tree(SMOL, LOAD, 2**50) == MOST_NODES


def test_changes_take_less_and_are_those_that_bear_on_the_load() -> None:
    load = Load(context=4096, prompt=1024, nodes=tree_nodes(4, 4), dtype=torch.float32)
    found = changes(SMOL, load, gamma=4, width=4)
    names = {one.what for one in found}
    assert names == {
        "k 2 in place of 4", "a chain (k 1), gamma 4", "gamma 2 in place of 4", "bf16", "a cache of int8",
        "context 2048 in place of 4096",
    }  # fmt: skip
    peaks = [one.peak for one in found]
    assert peaks == sorted(peaks) and peaks[-1] < needs(SMOL, load).peak
    assert found[0].what == "bf16"


def test_a_long_prompt_is_advised_to_come_in_pieces_and_a_batch_to_be_smaller() -> None:
    alone = {one.what for one in changes(SMOL, Load(context=8192, prompt=8000, nodes=4))}
    batch = {one.what for one in changes(SMOL, Load(context=8192, prompt=8000, nodes=4, batch=8))}
    assert {"the prompt in pieces of 512", "the prompt in pieces of 128"} <= alone
    assert "batch 4 in place of 8" in batch and not any("pieces" in one for one in batch)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"context": 0}, "context = 0 must be >= 1"),
        ({"prompt": 4096}, "prompt = 4096 must be <= 2048 (context: prompt and answer)"),
        ({"nodes": -1}, "nodes = -1 and chunk = 0 must be >= 0"),
        ({"cache": "int4"}, "cache = 'int4' must be '' or one of int8, fp8"),
    ],
)
def test_an_impossible_load_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        replace(LOAD, **fields)
    assert str(refused.value) == message


def test_another_type_of_model_is_refused() -> None:
    with pytest.raises(ValueError, match="x: model_type = 'mixtral' must be one of llama, mistral, qwen2"):
        config_of({"model_type": "mixtral"}, name="x")


# The command.

FIELDS = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    return tmp_path / "config.json"


def test_what_fits_is_told(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(file), "--memory", "4", "--context", "2048", "--prompt", "1024", "--gamma", "8"]
    assert cli.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "weights       256.6 MiB  134,515,008 numbers"
    assert lines[3] == "cache          45.2 MiB  1 x 2057 rows of 23,040 bytes"
    assert lines[-1].startswith("It fits. The largest tree that does has ")


def test_what_does_not_fit_exits_with_one_and_says_what_to_change(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(file.parent), "--dtype", "fp32", "--memory", "0.5", "--k", "4", "--draft-model", str(file)]
    assert cli.main(words) == 1
    out = capsys.readouterr().out
    assert "It does not fit, and neither does plain decoding.\nOne thing changed, and the peak then:\n" in out
    assert "drafter " in out and "bf16" in out


def test_what_is_free_here_is_asked_for(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(file), "--context", "16"]) in (0, 1)
    assert "\nfree " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no", "is not JSON"),
        ("[]", "must hold an object, as a model's config.json does"),
        ("{}", "model_type = None must be one of llama, mistral"),
        ('{"model_type": "gpt2"}', "model_type = 'gpt2' must be one of llama, mistral"),
    ],
)
def test_what_is_no_such_model_gets_a_sentence(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(text)
    assert cli.main(["plan", str(tmp_path / "config.json"), "--memory", "1"]) == 2
    said = capsys.readouterr().err
    assert message in said and said.startswith("specbench: ") and said.count("\n") == 1
