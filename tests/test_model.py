"""reference.model against transformers' Llama on the same weights, and against itself."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers import LlamaConfig as HFLlamaConfig
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral

from specbench.reference.hf import HFModel
from specbench.reference.kv_cache import CACHES
from specbench.reference.layouts import flatten_causal, flatten_tree_mask
from specbench.reference.model import LlamaConfig, LlamaModel, tiny_llama
from specbench.tree import DraftTree
from specbench.types import Taps

FULL = LlamaConfig(
    vocab_size=31, hidden_size=24, intermediate_size=40, num_layers=3, num_heads=4, num_kv_heads=4, head_dim=6
)
GROUPED = replace(FULL, num_heads=6, num_kv_heads=2, head_dim=4)
CONFIGS = {
    "full": FULL,
    "grouped": GROUPED,
    "group3-eps": replace(GROUPED, num_heads=3, num_kv_heads=1, head_dim=8, rms_norm_eps=0.1),
    "multi-query": replace(FULL, num_kv_heads=1),
    "tied": replace(GROUPED, tied=True),
    "head-dim-10": replace(FULL, num_heads=3, num_kv_heads=3, head_dim=10),
    "theta-100": replace(FULL, rope_theta=100.0),
    "one-layer-V2": replace(FULL, num_layers=1, vocab_size=2),
    "window-3": replace(GROUPED, windows=(3, 3, 3)),
    "window-1": replace(FULL, windows=(1, 1, 1)),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
TOKENS = torch.randint(0, 31, (2, 17), generator=torch.Generator().manual_seed(5))
TEXT = [3, 30, 7, 7, 0, 12, 4, 19, 22, 1, 8]


def tokens_for(model: LlamaModel) -> Tensor:
    return TOKENS % model.vocab_size


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.std())


def transformers_twin(folder: Path, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()


@torch.no_grad()
def transformers_logits(folder: Path, tokens: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    return transformers_twin(folder, dtype)(input_ids=tokens, use_cache=False).logits


@pytest.fixture
def without_fp32_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes RMSNorm and rotary angles in fp32 whatever the dtype; here both are computed in fp64."""

    def norm(self, hidden):
        return self.weight * hidden / (hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).sqrt()

    def rotary(self, x, position_ids):
        head_dim = self.config.head_dim
        idx = torch.arange(head_dim // 2, dtype=torch.float64)
        angles = position_ids[..., None] / self.config.rope_parameters["rope_theta"] ** (2 * idx / head_dim)
        return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()

    for module, name in ((modeling_llama, "Llama"), (modeling_mistral, "Mistral")):
        monkeypatch.setattr(getattr(module, f"{name}RMSNorm"), "forward", norm)
        monkeypatch.setattr(getattr(module, f"{name}RotaryEmbedding"), "forward", rotary)


# ---- against transformers


@every_config
def test_logits_equal_transformers_once_its_fp32_casts_are_gone(config, tmp_path, without_fp32_casts):
    model = tiny_llama(config, seed=1)
    model.save(tmp_path)
    expected = transformers_logits(tmp_path, tokens_for(model))
    assert relative_error(model.causal(tokens_for(model)), expected) < 1e-9


@every_config
def test_logits_are_near_transformers_as_it_ships(config, tmp_path):
    model = tiny_llama(config, seed=1)
    model.save(tmp_path)
    expected = transformers_logits(tmp_path, tokens_for(model))
    assert relative_error(model.causal(tokens_for(model)), expected) < 1e-5


def save_biased(folder: Path) -> None:
    """A checkpoint with biases everywhere Llama can have them, written by transformers."""
    config = HFLlamaConfig(
        vocab_size=31,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        mlp_bias=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    twin = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in twin.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) / weight.shape[-1] ** 0.5)
    twin.save_pretrained(folder)


def test_a_checkpoint_with_biases_equals_transformers(tmp_path, without_fp32_casts):
    save_biased(tmp_path)
    expected = transformers_logits(tmp_path, TOKENS)
    assert relative_error(LlamaModel.load(tmp_path).causal(TOKENS), expected) < 1e-9


def test_biases_survive_saving(tmp_path):
    """The config once did not announce them, and a reader drops what is not announced."""
    save_biased(tmp_path / "theirs")
    model = LlamaModel.load(tmp_path / "theirs")
    model.save(tmp_path / "ours")
    assert relative_error(LlamaModel.load(tmp_path / "ours").causal(TOKENS), model.causal(TOKENS)) < 1e-12


@torch.no_grad()
@pytest.mark.parametrize("name", ["full", "grouped", "multi-query"])
def test_keys_values_and_hidden_states_equal_transformers(name, tmp_path, without_fp32_casts):
    model = tiny_llama(CONFIGS[name], seed=1)
    model.save(tmp_path)
    out = transformers_twin(tmp_path)(input_ids=TOKENS, use_cache=True, output_hidden_states=True)
    taps = Taps()
    model.causal(TOKENS, taps=taps)
    errors = []
    for layer, tap in enumerate(taps.layers):
        theirs = out.past_key_values.layers[layer]
        errors += [relative_error(tap.k, theirs.keys), relative_error(tap.v, theirs.values)]
        if layer + 1 < model.num_layers:  # transformers norms the last one
            errors.append(relative_error(tap.hidden_state, out.hidden_states[layer + 1]))
    assert max(errors) < 1e-9 and len(errors) == 3 * model.num_layers - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("seed", range(3))
def test_error_in_low_precision_is_at_most_twice_that_of_transformers(dtype, seed, tmp_path):
    """Both against fp64 on the rounded weights; 4 eps for errors that happen to be tiny."""
    model = tiny_llama(GROUPED, seed=seed).to(dtype)
    model.save(tmp_path)
    exact = model.to(torch.float64).causal(TOKENS)
    theirs = (transformers_logits(tmp_path, TOKENS, dtype).double() - exact).pow(2).mean().sqrt()
    ours = (model.causal(TOKENS).double() - exact).pow(2).mean().sqrt()
    assert ours <= 2 * theirs + 4 * torch.finfo(dtype).eps * exact.std()


# ---- saving and loading


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["grouped", "tied"])
def test_saving_and_loading_loses_nothing(name, dtype, tmp_path):
    """Weights are compared, not logits: where a matrix lies in memory moves the last bit of a product."""
    model = tiny_llama(CONFIGS[name], seed=4, dtype=dtype)
    model.save(tmp_path / "once")
    loaded = LlamaModel.load(tmp_path / "once", dtype=dtype)
    loaded.save(tmp_path / "twice")
    once, twice = (load_file(tmp_path / folder / "model.safetensors") for folder in ("once", "twice"))
    assert loaded.config == model.config
    assert once.keys() == twice.keys() and all(torch.equal(once[key], twice[key]) for key in once)


@pytest.mark.parametrize("name", ["grouped", "tied"])
def test_a_loaded_model_computes_what_the_saved_one_does(name, tmp_path):
    model = tiny_llama(CONFIGS[name], seed=4)
    model.save(tmp_path)
    assert relative_error(LlamaModel.load(tmp_path).causal(TOKENS), model.causal(TOKENS)) < 1e-12


def test_loading_widens_to_fp64_unless_told(tmp_path):
    model = tiny_llama(FULL, seed=4, dtype=torch.bfloat16)
    model.save(tmp_path)
    loaded = LlamaModel.load(tmp_path)
    assert loaded.dtype == torch.float64
    assert relative_error(loaded.causal(TOKENS), model.to(torch.float64).causal(TOKENS)) < 1e-12


def test_a_loaded_model_is_named_after_its_folder(tmp_path):
    tiny_llama(FULL, seed=4).save(tmp_path / "llama-tiny")
    assert LlamaModel.load(tmp_path / "llama-tiny").name == "llama-tiny"


def test_a_folder_with_pickled_weights_only_is_refused(tmp_path):
    tiny_llama(FULL, seed=4).save(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        LlamaModel.load(tmp_path)


def change_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


SCALED = {
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


@pytest.mark.parametrize("rope_type", SCALED)
def test_a_scaled_rotary_embedding_is_refused(rope_type, tmp_path):
    tiny_llama(FULL, seed=4).save(tmp_path)
    change_config(tmp_path, **SCALED[rope_type])
    message = f"{tmp_path}: rope_type = '{rope_type}' must be 'default'; load this checkpoint by reference.hf"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        LlamaModel.load(tmp_path)


def test_another_model_type_is_refused(tmp_path):
    tiny_llama(FULL, seed=4).save(tmp_path)
    change_config(tmp_path, model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    message = f"{tmp_path}: model_type = 'qwen2' must be 'llama' or 'mistral'; other types load through reference.hf"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        LlamaModel.load(tmp_path)


def test_another_activation_is_refused(tmp_path):
    tiny_llama(FULL, seed=4).save(tmp_path)
    change_config(tmp_path, hidden_act="gelu")
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path))}: hidden_act = 'gelu' must be 'silu'$"):
        LlamaModel.load(tmp_path)


def test_the_rope_theta_of_a_checkpoint_is_read(tmp_path):
    tiny_llama(CONFIGS["theta-100"], seed=4).save(tmp_path)
    assert LlamaModel.load(tmp_path).config.rope_theta == 100.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads = 4 must be a multiple of num_kv_heads = 3"),
        ({"head_dim": 5}, "head_dim = 5 must be even (rotary embedding turns pairs)"),
    ],
)
def test_a_shape_that_no_forward_fits_is_refused(fields, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        replace(FULL, **fields)


# ---- against itself


@every_config
@pytest.mark.parametrize("split", [[11], [1] * 11, [4, 7], [1, 9, 1]], ids=str)
def test_a_forward_in_pieces_behind_a_cache_equals_the_causal_one(config, split):
    model = tiny_llama(config, seed=2)
    text = [token % model.vocab_size for token in TEXT]
    cache = model.new_cache()
    pieces = []
    for size in split:
        start = cache.length
        pieces.append(model.forward(flatten_causal(text[start : start + size], start), cache))
    assert relative_error(torch.cat(pieces), model.logits(text)) < 1e-9


def test_a_forward_leaves_the_keys_and_values_of_a_causal_one_in_the_cache():
    model, taps = tiny_llama(GROUPED, seed=2), Taps()
    cache = model.new_cache()
    model.forward(flatten_causal(TEXT[:4], 0), cache)
    model.forward(flatten_causal(TEXT[4:], 4), cache)
    model.causal(torch.tensor([TEXT]), taps=taps)
    errors = [
        relative_error(cached, plain[0])
        for layer, tap in enumerate(taps.layers)
        for cached, plain in zip(cache.rows(layer), (tap.k, tap.v), strict=True)
    ]
    assert max(errors) < 1e-9 and len(errors) == 6


@every_config
def test_a_causal_forward_never_looks_ahead(config):
    model = tiny_llama(config, seed=3)
    text = [token % model.vocab_size for token in TEXT]
    before = model.logits(text)
    for idx in range(len(text)):
        changed = list(text)
        changed[idx] = (text[idx] + 1) % model.vocab_size
        after = model.logits(changed)
        # With a window a change is handed on by window - 1 rows a layer.
        end = idx + 1 + sum(window - 1 for window in config.windows) if config.windows else len(text)
        assert torch.equal(after[:idx], before[:idx]), f"a change at {idx} moved an earlier row"
        assert (after[idx:end] != before[idx:end]).any(dim=1).all(), f"a change at {idx} left a later row as it was"
        assert torch.equal(after[end:], before[end:]), f"a change at {idx} was seen past the windows"


def test_a_batched_causal_forward_equals_each_sequence_alone():
    model = tiny_llama(GROUPED, seed=3)
    alone = torch.stack([model.logits(tokens.tolist()) for tokens in TOKENS])
    assert relative_error(model.causal(TOKENS), alone) < 1e-9


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_the_first_layers_are_the_model_with_fewer_layers(num_layers, tmp_path):
    """The expected model is read from a checkpoint whose config names fewer layers."""
    model = tiny_llama(GROUPED, seed=3)
    model.save(tmp_path)
    change_config(tmp_path, num_hidden_layers=num_layers)
    expected = LlamaModel.load(tmp_path).causal(TOKENS)
    assert relative_error(model.first_layers(num_layers).causal(TOKENS), expected) < 1e-12


@pytest.mark.parametrize("num_layers", [0, 4])
def test_a_cut_outside_the_model_is_refused(num_layers):
    with pytest.raises(ValueError, match=f"^num_layers = {num_layers} must be between 1 and 3$"):
        tiny_llama(GROUPED, seed=3).first_layers(num_layers)


def test_taps_of_a_cached_forward_say_what_each_row_may_see():
    model, taps = tiny_llama(GROUPED, seed=3), Taps()
    cache = model.new_cache()
    model.forward(flatten_causal([1, 2], 0), cache)
    model.forward(flatten_tree_mask(DraftTree.of([3, 4, 5], [-1, 0, 0]), 2), cache, taps=taps)
    assert taps.mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]
    assert (taps.position_ids.tolist(), taps.node_of_row.tolist()) == ([2, 3, 3], [0, 1, 2])


def test_taps_of_a_cached_forward_have_the_documented_shapes():
    model, taps = tiny_llama(GROUPED, seed=3), Taps()
    cache = model.new_cache()
    model.forward(flatten_causal([1, 2], 0), cache)
    model.forward(flatten_causal([3, 4, 5], 2), cache, taps=taps)
    tap = taps.layers[1]
    assert tap.k.shape == tap.v.shape == (2, 3, 4)  # [Hkv, M, D]
    assert tap.attention_weights.shape == (6, 3, 5)  # [Hq, M, P+M]
    assert tap.attention_output.shape == tap.hidden_state.shape == (3, 24)  # [M, hidden]


def test_attention_weights_are_zero_where_masked_and_sum_to_one():
    model, taps = tiny_llama(GROUPED, seed=3), Taps()
    model.causal(torch.tensor([TEXT]), taps=taps)
    for tap in taps.layers:
        assert torch.equal(tap.attention_weights, tap.attention_weights.tril())
        assert (tap.attention_weights.sum(-1) - 1).abs().max() < 1e-12


def test_the_same_seed_makes_the_same_model_and_another_seed_another():
    logits = [tiny_llama(GROUPED, seed=seed).causal(TOKENS) for seed in (1, 1, 2)]
    assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])


def test_making_a_tiny_model_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    tiny_llama(GROUPED, seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_to_rounds_every_weight_and_changes_no_other():
    model = tiny_llama(GROUPED, seed=1)
    narrow = model.to(torch.bfloat16)
    assert (narrow.dtype, model.dtype, narrow.config) == (torch.bfloat16, torch.float64, model.config)
    assert torch.equal(narrow.to(torch.float64).to(torch.bfloat16).causal(TOKENS), narrow.causal(TOKENS))


def test_windows_that_no_checkpoint_type_has_are_not_saved(tmp_path):
    message = "windows = (3, None, 3) must be equal to be saved: no Llama-like type has others"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        tiny_llama(replace(FULL, windows=(3, None, 3)), seed=1).save(tmp_path)


def test_the_windows_of_a_checkpoint_are_read(tmp_path):
    tiny_llama(CONFIGS["window-3"], seed=1).save(tmp_path)
    assert LlamaModel.load(tmp_path).config == CONFIGS["window-3"]


def test_a_window_changes_what_is_computed():
    """Otherwise agreement with transformers would say nothing about windows."""
    plain, sliding = (tiny_llama(config, seed=1) for config in (GROUPED, CONFIGS["window-3"]))
    moved = (plain.causal(TOKENS) - sliding.causal(TOKENS)).abs().amax(dim=-1)[0]
    assert float(moved[:3].max()) < 1e-12 and float(moved[3:].min()) > 1e-2


def test_a_tied_model_reads_out_through_its_embedding(tmp_path):
    tiny_llama(CONFIGS["tied"], seed=1).save(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")


def test_an_unknown_cache_kind_is_refused_with_the_known_ones():
    message = "cache kind 'paged' is unknown: choose one of " + ", ".join(sorted(CACHES))
    with pytest.raises(ValueError, match=f"^{message}$"):
        tiny_llama(GROUPED, seed=1).new_cache("paged")


def test_a_cache_that_this_forward_cannot_fill_is_refused():
    message = "cache is a ContiguousCache of other rows, must be from this model's new_cache()"
    cache = HFModel.tiny("llama", seed=0, dtype=torch.float64).new_cache()
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        tiny_llama(GROUPED, seed=1).forward(flatten_causal([1], 0), cache)
