"""reference.hf against transformers itself: expected logits, keys and values come from plain forwards."""

from __future__ import annotations

import json
import math
import pickle
import warnings
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, FalconForCausalLM, LlamaForCausalLM, OPTConfig, OPTForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from specbench.protocols import LanguageModel
from specbench.reference.hf import CACHE_KINDS, TAP, HFModel, check_supported, tap_attention
from specbench.reference.hf_tiny import TINY_NAMES, tiny_config
from specbench.reference.hf_types import MODEL_TYPES, TREE_MASK, exact_attention
from specbench.reference.kv_cache import AppendableCache, LayerSpec
from specbench.reference.layouts import LAYOUTS, flatten_causal, flatten_tree_mask
from specbench.steps import FlatTree
from specbench.tree import DraftTree, chain
from specbench.types import Taps

TYPES = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "phi",
    "falcon",
    "bloom",
    "mixtral",
    "deepseek_v2",
    "deepseek_v3",
]
PAIRS = [(one, attention) for one in TYPES for attention in MODEL_TYPES[one].attentions]
EXACT = ["gpt2", "gpt_neox", "phi", "falcon"]  # no data passes through fp32
WINDOWS = {"qwen2": [None, 5], "mistral": [7, 7], "gemma2": [6, None, 6, None], "gemma3_text": [6, None, 6, None]}
PREFIX = [5, 9, 2, 2, 30, 11, 7, 5, 41, 0]

# Two children, three grandchildren each, two leaves each. Siblings 1, 2 and 3, 5 carry the same token, and so do whole
# paths: 1-3-9 and 2-6-15.
PARENTS = [-1, 0, 0, *[1] * 3, *[2] * 3, *[node for node in range(3, 9) for _ in range(2)]]
TOKENS = [7, 3, 3, 1, 2, 1, 1, 40, 7, 12, 7, 3, 28, 33, 33, 12, 19, 20, 4, 4, 25]
TREE = DraftTree(torch.tensor(TOKENS), torch.tensor(PARENTS))
SIDE_PATH = [0, 2, 7, 18]  # rows of the root and of a path off the leftmost branch

every_type = pytest.mark.parametrize("model_type", TYPES)
every_pair = pytest.mark.parametrize(("model_type", "attention"), PAIRS)
windowed_type = pytest.mark.parametrize("model_type", WINDOWS)


@lru_cache
def tiny(model_type: str, attention: str | None = None) -> HFModel:
    return HFModel.tiny(model_type, seed=3, dtype=torch.float64, attention=attention)


def tolerance(model: HFModel) -> float:
    """Of the expected values' standard deviation. 1e-9 where all is fp64 (measured 3e-15). Elsewhere 4 eps of fp32,
    since a norm that casts can turn 1e-16 into 1e-8, and 1e-5 where the softmax itself is fp32 (measured 2e-6)."""
    if model.is_exact:
        return 1e-9
    eager = model.model.config._attn_implementation == "eager"
    return 1e-5 if eager or model.model.config.model_type == "deepseek_v2" else 5e-7


@torch.no_grad()
def plain(model: HFModel, tokens: list[int]) -> Tensor:
    """transformers' own forward on one sequence: float [S, V]."""
    return model.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


@torch.no_grad()
def plain_cache(model: HFModel, tokens: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of a plain forward, per layer, each [Hkv, S, D]; all rows, since the cache knows no window."""
    cache = DynamicCache()
    model.model(torch.tensor([tokens]), use_cache=True, **{model._cache_argument: cache})
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def plain_tree(model: HFModel, prefix: list[int], tree: DraftTree) -> Tensor:
    """float [N, V]: for each node, the last row of a plain forward on the prefix and the node's path."""
    return torch.stack([plain(model, prefix + tree.path_tokens(node))[-1] for node in range(tree.num_nodes)])


def prefilled(model: HFModel, tokens: list[int], kind: str = "contiguous") -> AppendableCache:
    cache = model.new_cache(kind)
    if tokens:
        model.forward(flatten_causal(tokens, 0), cache)
    return cache


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    error = float((actual - expected).abs().max() / expected.std())
    assert error <= tolerance, f"off by {error:.1e} of the expected values' standard deviation"


def num_hooks(model: HFModel) -> int:
    return sum(len(module._forward_hooks) for module in model.model.modules())


@every_pair
@pytest.mark.parametrize("prefix_len", [0, 1, len(PREFIX)], ids=lambda length: f"P{length}")
def test_each_node_gets_the_logits_of_a_plain_forward_on_its_path(model_type, attention, prefix_len):
    """P10 reaches across Gemma's window of 6; P0 is a tree behind an empty cache."""
    model = tiny(model_type, attention)
    cache = prefilled(model, PREFIX[:prefix_len])
    logits = model.forward(flatten_tree_mask(TREE, prefix_len), cache)
    assert_close(logits, plain_tree(model, PREFIX[:prefix_len], TREE), tolerance(model))


@every_pair
def test_the_round_after_committing_a_side_branch_is_right(model_type, attention):
    model = tiny(model_type, attention)
    cache = prefilled(model, PREFIX)
    model.forward(flatten_tree_mask(TREE, len(PREFIX)), cache)
    cache.commit(len(PREFIX), SIDE_PATH)
    committed = PREFIX + [TOKENS[row] for row in SIDE_PATH]
    logits = model.forward(flatten_tree_mask(TREE.with_token(0, 22), len(committed)), cache)
    assert_close(logits, plain_tree(model, committed, TREE.with_token(0, 22)), tolerance(model))


@every_type
@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_layouts_of_a_tree_give_the_plain_logits(model_type, layout):
    model = tiny(model_type)
    flat = LAYOUTS[layout](TREE, len(PREFIX))
    logits = model.forward(flat, prefilled(model, PREFIX))
    assert_close(logits[flat.row_of_node], plain_tree(model, PREFIX, TREE), tolerance(model))


@every_type
def test_a_chain_deeper_than_the_window_is_right(model_type):
    model = tiny(model_type)
    deep = chain(PREFIX)
    logits = model.forward(flatten_tree_mask(deep, 0), model.new_cache())
    assert_close(logits, plain(model, PREFIX), tolerance(model))


class Windowless(HFModel):
    """The fault that a 4-D mask invites: sliding layers get the full mask."""

    def _within(self, mask: Tensor, position_ids: Tensor, window: int | None) -> Tensor:
        return mask


class RowWindow(HFModel):
    """A window counted in rows: siblings push what a node must see out of it."""

    def _within(self, mask: Tensor, position_ids: Tensor, window: int | None) -> Tensor:
        return super()._within(mask, torch.arange(mask.shape[1])[-len(position_ids) :], window)


class RowPositions(HFModel):
    """Rows stand where they lie in the cache, not at their depth."""

    def _run(self, flat: FlatTree, mask: Tensor, cache: AppendableCache) -> Tensor:
        rows = torch.arange(mask.shape[1])[-flat.num_rows :]
        return super()._run(FlatTree(flat.tokens, rows, flat.mask, flat.node_of_row, flat.row_of_node), mask, cache)


class RowAlibi(HFModel):
    """ALiBi as transformers counts it, by rows."""

    def _alibi_mask(self, mask: Tensor, position_ids: Tensor) -> Tensor:
        return self._additive(mask)


PLANTED = [
    *[(Windowless, one) for one in WINDOWS],
    *[(RowWindow, one) for one in WINDOWS],
    *[(RowPositions, one) for one in TYPES if one != "gpt2"],
    (RowAlibi, "bloom"),
]


@pytest.mark.parametrize(("fault", "model_type"), PLANTED, ids=lambda one: getattr(one, "__name__", one))
def test_a_wrong_mask_or_position_is_noticed(fault, model_type):
    """4-D masks replace the window that transformers would apply: Mistral and Gemma logits were off by .14 to .38."""
    model = tiny(model_type)
    logits = fault(model.model).forward(flatten_tree_mask(TREE, len(PREFIX)), prefilled(model, PREFIX))
    error = float((logits - plain_tree(model, PREFIX, TREE)).abs().max())
    assert error > 1e-2, f"off by {error:.1e} only"


def test_learned_positions_by_row_are_noticed():
    model = tiny("gpt2")
    flat = flatten_tree_mask(TREE, len(PREFIX))
    logits = RowPositions(model.model).forward(flat, prefilled(model, PREFIX))
    assert (logits - plain_tree(model, PREFIX, TREE)).abs().max() > 1e-2


@pytest.mark.parametrize("kind", CACHE_KINDS)
@pytest.mark.parametrize("model_type", ["mistral", "gpt_neox", "deepseek_v3", "bloom"])
def test_every_cache_kind_gives_the_plain_logits_before_and_after_a_commit(model_type, kind):
    """Unused storage is NaN: nothing of it may reach the logits."""
    model = tiny(model_type)
    cache = prefilled(model, PREFIX, kind)
    cache.poison(float("nan"))
    logits = model.forward(flatten_tree_mask(TREE, len(PREFIX)), cache)
    assert_close(logits, plain_tree(model, PREFIX, TREE), tolerance(model))
    cache.commit(len(PREFIX), SIDE_PATH)
    cache.poison(float("nan"))
    committed = PREFIX + [TOKENS[row] for row in SIDE_PATH]
    logits = model.forward(flatten_causal([22], len(committed)), cache)
    assert_close(logits, plain(model, [*committed, 22])[-1:], tolerance(model))


def test_a_latent_cache_shows_one_head_of_latents_and_one_of_rotary_keys():
    """Not the heads that attention sees: 4 of 10 key and 8 value numbers are made from 10 + 4 cached ones."""
    model = tiny("deepseek_v3")
    keys, values = prefilled(model, PREFIX).rows(1)
    assert model.cache_spec.layers == (LayerSpec(1, 10, 4),) * 2
    assert (list(keys.shape), list(values.shape)) == ([1, 10, 10], [1, 10, 4])


@every_pair
def test_commit_keeps_the_keys_and_values_of_a_plain_forward(model_type, attention):
    model = tiny(model_type, attention)
    cache = prefilled(model, PREFIX)
    model.forward(flatten_tree_mask(TREE, len(PREFIX)), cache)
    cache.commit(len(PREFIX), SIDE_PATH)
    expected = plain_cache(model, PREFIX + [TOKENS[row] for row in SIDE_PATH])
    assert cache.length == len(PREFIX) + len(SIDE_PATH)
    for layer, (keys, values) in enumerate(expected):
        assert_close(cache.rows(layer)[0], keys, tolerance(model))
        assert_close(cache.rows(layer)[1], values, tolerance(model))


@every_type
def test_truncate_keeps_the_first_rows_and_frees_the_others(model_type):
    model = tiny(model_type)
    cache = prefilled(model, PREFIX)
    before = [cache.rows(layer) for layer in range(model.num_layers)]
    cache.truncate(4)
    for layer, (keys, values) in enumerate(before):
        assert torch.equal(cache.rows(layer)[0], keys[:, :4])
        assert torch.equal(cache.rows(layer)[1], values[:, :4])
    spec = model.cache_spec
    assert cache.length == 4
    assert cache.nbytes == 4 * sum(one.num_heads * (one.key_dim + one.value_dim) for one in spec.layers) * 8


@every_type
def test_decoding_goes_on_rightly_after_truncating_to_nothing(model_type):
    model = tiny(model_type)
    cache = prefilled(model, PREFIX)
    cache.truncate(0)
    assert_close(model.forward(flatten_causal([4, 8], 0), cache), plain(model, [4, 8]), tolerance(model))


def test_a_new_cache_is_empty_and_its_rows_have_their_shape():
    cache = tiny("llama").new_cache()
    assert (cache.length, cache.nbytes, list(cache.rows(2)[1].shape)) == (0, 0, [2, 0, 12])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cache: cache.truncate(-1), "length = -1 must be between 0 and the cache length 10"),
        (lambda cache: cache.truncate(11), "length = 11 must be between 0 and the cache length 10"),
        (lambda cache: cache.commit(11, []), "prefix_len = 11 must be between 0 and the cache length 10"),
        (lambda cache: cache.commit(-1, []), "prefix_len = -1 must be between 0 and the cache length 10"),
        (lambda cache: cache.commit(8, [0, 2]), "rows[1] = 2 must be >= 0 and < 2 (rows behind the prefix)"),
        (lambda cache: cache.commit(8, [-1]), "rows[0] = -1 must be >= 0 and < 2 (rows behind the prefix)"),
    ],
)
def test_cache_refuses_rows_it_does_not_hold_and_stays_as_it_was(call, message):
    cache = prefilled(tiny("llama"), PREFIX)
    with pytest.raises(ValueError) as refusal:
        call(cache)
    assert str(refusal.value) == message
    assert cache.length == len(PREFIX)


@every_type
def test_a_tapped_forward_gives_the_untapped_logits(model_type):
    model = tiny(model_type)
    flat = flatten_tree_mask(TREE, len(PREFIX))
    tapped = model.forward(flat, prefilled(model, PREFIX), taps=Taps())
    assert_close(tapped, model.forward(flat, prefilled(model, PREFIX)), tolerance(model))


@every_type
def test_a_tapped_causal_forward_gives_the_untapped_logits(model_type):
    model = tiny(model_type)
    tokens = torch.tensor([PREFIX, PREFIX[::-1]])
    assert_close(model.causal(tokens, taps=Taps()), model.causal(tokens), tolerance(model))


@every_type
def test_tapped_inputs_are_the_rows_positions_and_mask_of_the_tree(model_type):
    model, taps = tiny(model_type), Taps()
    small = DraftTree(torch.tensor([7, 3, 3, 1]), torch.tensor([-1, 0, 0, 2]))
    model.forward(flatten_tree_mask(small, 2), prefilled(model, PREFIX[:2]), taps=taps)
    assert taps.node_of_row.tolist() == [0, 1, 2, 3]
    assert taps.position_ids.tolist() == [2, 3, 3, 4]
    assert taps.mask.int().tolist() == [
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 1, 0],
        [1, 1, 1, 0, 1, 1],
    ]


def visible_by_hand(tree: DraftTree, prefix_len: int, window: int | None) -> Tensor:
    """bool [N, P+N], entry by entry: the prefix and the node's path, as far back as the window reaches."""
    mask = torch.zeros(tree.num_nodes, prefix_len + tree.num_nodes, dtype=torch.bool)
    for node in range(tree.num_nodes):
        seen = [*range(prefix_len), *(prefix_len + one for one in tree.path_to(node))]
        mask[node, seen if window is None else seen[-window:]] = True
    return mask


@every_type
def test_tapped_weights_sum_to_one_on_the_mask_and_are_exactly_zero_off_it(model_type):
    model, taps = tiny(model_type), Taps()
    model.forward(flatten_tree_mask(TREE, len(PREFIX)), prefilled(model, PREFIX), taps=taps)
    windows = WINDOWS.get(model_type, [None] * model.num_layers)
    assert list(model.layer_windows) == windows
    for layer, window in enumerate(windows):
        visible = visible_by_hand(TREE, len(PREFIX), window)
        weights = taps.layers[layer].attention_weights
        assert weights.shape == (model.num_heads, TREE.num_nodes, len(PREFIX) + TREE.num_nodes)
        assert bool((weights[:, ~visible] == 0.0).all())
        assert bool((weights[:, visible] > 0.0).all())
        assert float((weights.sum(dim=-1) - 1.0).abs().max()) < (1e-6 if model_type == "bloom" else 1e-12)


@every_type
def test_tapped_keys_and_values_are_the_rows_the_forward_cached(model_type):
    model, taps, cache = tiny(model_type), Taps(), prefilled(tiny(model_type), PREFIX)
    model.forward(flatten_tree_mask(TREE, len(PREFIX)), cache, taps=taps)
    for layer in range(model.num_layers):
        assert torch.equal(taps.layers[layer].k, cache.rows(layer)[0][:, len(PREFIX) :])
        assert torch.equal(taps.layers[layer].v, cache.rows(layer)[1][:, len(PREFIX) :])


# Not Bloom, whose attention adds the residual, nor the MLA types, whose cache holds no values.
@pytest.mark.parametrize("model_type", [one for one in TYPES if one not in ("bloom", "deepseek_v2", "deepseek_v3")])
def test_tapped_attention_output_is_the_projection_of_weights_times_values(model_type):
    model, taps, cache = tiny(model_type), Taps(), prefilled(tiny(model_type), PREFIX)
    model.forward(flatten_tree_mask(TREE, len(PREFIX)), cache, taps=taps)
    place = MODEL_TYPES[model_type]
    projections = {"gpt2": "c_proj", "gpt_neox": "dense", "phi": "dense", "falcon": "dense"}
    project = f"{place.layers}.1.{place.attention}.{projections.get(model_type, 'o_proj')}"
    values = cache.rows(1)[1]
    group = model.num_heads // len(values)
    mixed = [taps.layers[1].attention_weights[head] @ values[head // group] for head in range(model.num_heads)]
    with torch.no_grad():
        expected = model.model.get_submodule(project)(torch.cat(mixed, dim=-1))
    assert_close(taps.layers[1].attention_output, expected, 1e-9)


def test_a_soft_cap_squeezes_scores_before_they_are_masked():
    """By hand: scores 0, 4 and a hidden one; with a cap of 2 they are 0 and 2 tanh 2."""
    query, keys = torch.tensor([[[[2.0]]]]), torch.tensor([[[[0.0], [2.0], [50.0]]]])
    mask = torch.tensor([[[[0.0, 0.0, torch.finfo(torch.float32).min]]]])
    _, weights = tap_attention(None, query, keys, keys, mask, scaling=1.0, softcap=2.0)
    expected = torch.tensor([0.0, 2.0 * math.tanh(2.0)]).softmax(dim=0)
    assert torch.allclose(weights[0, 0, 0], torch.tensor([*expected, 0.0]))


@every_type
def test_causal_taps_are_the_hidden_states_that_transformers_reports(model_type):
    """The last layer is left out: transformers reports it after the final norm."""
    model, taps, tokens = tiny(model_type), Taps(), torch.tensor([PREFIX, PREFIX[::-1]])
    model.causal(tokens, taps=taps)
    with torch.no_grad():
        reported = model.model(input_ids=tokens, output_hidden_states=True).hidden_states
    assert len(taps.layers) == model.num_layers == len(reported) - 1
    for layer in range(model.num_layers - 1):
        assert_close(taps.layers[layer].hidden_state, reported[layer + 1], tolerance(model))


@every_type
def test_causal_taps_are_the_weights_that_transformers_reports(model_type):
    """1e-5 because transformers reports weights from eager attention only, whose softmax is fp32."""
    model, taps, tokens = tiny(model_type), Taps(), torch.tensor([PREFIX, PREFIX[::-1]])
    model.causal(tokens, taps=taps)
    with torch.no_grad():
        reported = tiny(model_type, "eager").model(input_ids=tokens, output_attentions=True).attentions
    for layer in range(model.num_layers):
        assert_close(taps.layers[layer].attention_weights, reported[layer], 1e-5)


@every_type
def test_causal_taps_hold_the_keys_and_values_of_each_sequence(model_type):
    model, taps, tokens = tiny(model_type), Taps(), torch.tensor([PREFIX, PREFIX[::-1]])
    model.causal(tokens, taps=taps)
    for row in range(2):
        for layer, (keys, values) in enumerate(plain_cache(model, tokens[row].tolist())):
            assert_close(taps.layers[layer].k[row], keys, tolerance(model))
            assert_close(taps.layers[layer].v[row], values, tolerance(model))


@every_pair
@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
def test_a_tapped_forward_leaves_the_model_as_it_was(model_type, attention, raises):
    model = HFModel.tiny(model_type, seed=3, dtype=torch.float64, attention=attention)
    before, name, hooks = plain(model, PREFIX), model.name, num_hooks(model)
    flat = flatten_tree_mask(TREE, 0)
    if raises:
        bad = FlatTree(flat.tokens, flat.position_ids, flat.mask[:, :-1], flat.node_of_row, flat.row_of_node)
        with pytest.raises(RuntimeError):
            model.forward(bad, model.new_cache(), taps=Taps())
    else:
        model.forward(flat, model.new_cache(), taps=Taps())
    assert model.model.config._attn_implementation == attention
    assert (model.name, num_hooks(model)) == (name, hooks)
    assert torch.equal(plain(model, PREFIX), before)


def written_out(q, k, v, block_mask, q_positions, k_positions, *, window, scale, soft_cap=None):
    """Row by row: which keys it sees, and the softmax over them."""
    num_rows, num_keys = q.shape[2], k.shape[2]
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    for head in range(q.shape[1]):
        of = head * k.shape[1] // q.shape[1]
        for row in range(num_rows):
            left = num_keys - num_rows
            seen = [key for key in range(num_keys) if key < left or block_mask[row, key - left]]
            seen = [key for key in seen if window is None or q_positions[row] - k_positions[key] < window]
            scores = k[0, of, seen] @ q[0, head, row] * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            out[0, head, row] = scores.softmax(-1) @ v[0, of, seen]
    return out


def sees_all(q, k, v, block_mask, *others, **named):
    return written_out(q, k, v, torch.ones_like(block_mask), *others, **named)


@pytest.mark.parametrize("model_type", [one for one in TYPES if MODEL_TYPES[one].takes_attention])
def test_somebody_elses_attention_takes_the_place_of_transformers_own(model_type):
    model, flat, logits = tiny(model_type, exact_attention(model_type)), flatten_tree_mask(TREE, len(PREFIX)), {}
    for name, attention in (("own", None), ("fused", written_out), ("wrong", sees_all)):
        taps = Taps()
        logits[name] = model.with_attention(attention).forward(flat, prefilled(model, PREFIX), taps=taps)
        assert [one.attention_output is None for one in taps.layers] == [False] * model.num_layers
        assert [one.attention_weights is None for one in taps.layers] == [attention is not None] * model.num_layers
    assert_close(logits["fused"], logits["own"], tolerance(model))
    assert float((logits["wrong"] - logits["own"]).abs().max()) > 1e-2
    assert model.model.config._attn_implementation == exact_attention(model_type)


@pytest.mark.parametrize("model_type", ["falcon", "bloom"])
def test_a_type_that_looks_no_attention_up_is_refused(model_type):
    with pytest.raises(ValueError, match=r"computes attention in its own code, must look it up in transformers'"):
        tiny(model_type).with_attention(written_out)


@every_type
def test_plain_forwards_stay_causal_even_under_the_tap_attention(model_type):
    """An attention registered without a mask function made plain forwards silently non-causal, off by .37."""
    model = HFModel.tiny(model_type, seed=3, dtype=torch.float64)
    expected = plain(model, PREFIX)
    model.model.config._attn_implementation = TAP
    assert_close(plain(model, PREFIX), expected, tolerance(tiny(model_type)))


@every_type
def test_no_forward_warns(model_type):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = HFModel.tiny(model_type, seed=0, dtype=torch.float64)
        cache = prefilled(model, PREFIX)
        model.forward(flatten_tree_mask(TREE, len(PREFIX)), cache, taps=Taps())
        model.causal(torch.tensor([PREFIX]), taps=Taps())
        model.logits(PREFIX)


@every_type
def test_stepping_gives_the_rows_of_a_plain_forward(model_type):
    model = tiny(model_type)
    assert_close(model.stepped(PREFIX), plain(model, PREFIX), tolerance(model))


@every_type
def test_logits_are_those_of_a_plain_forward(model_type):
    model: LanguageModel = tiny(model_type)
    assert torch.equal(model.logits(PREFIX), plain(tiny(model_type), PREFIX))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@every_type
def test_logits_come_in_the_dtype_of_the_model(model_type, dtype):
    model = HFModel.tiny(model_type, seed=0, dtype=dtype)
    cache = prefilled(model, PREFIX)
    assert model.forward(flatten_tree_mask(TREE, len(PREFIX)), cache).dtype == model.dtype == dtype
    assert cache.rows(0)[0].dtype == dtype


@every_type
def test_one_seed_is_one_model_and_leaves_the_global_generator_alone(model_type):
    state = torch.random.get_rng_state()
    wide, again, narrow, other = (
        HFModel.tiny(model_type, seed=seed, dtype=dtype).model.state_dict()
        for seed, dtype in [(1, torch.float64), (1, torch.float64), (1, torch.bfloat16), (2, torch.float64)]
    )
    assert torch.equal(torch.random.get_rng_state(), state)
    for key, weight in wide.items():
        assert torch.equal(weight, again[key])
        assert torch.equal(weight.to(narrow[key].dtype), narrow[key])
        assert not torch.equal(weight, other[key])


@every_type
def test_greedy_output_of_a_tiny_model_varies(model_type):
    """Of the seed that the banks use: a text of one token would hide every mistake of the walk."""
    model, tokens = HFModel.tiny(model_type, seed=0, dtype=torch.float64), [1]
    for _ in range(40):
        tokens.append(int(plain(model, tokens)[-1].argmax()))
    assert len(set(tokens)) >= 5


def test_the_facts_about_a_model_are_those_of_its_config():
    model = tiny("gemma3_text")
    assert model.name == "transformers gemma3_text sdpa"
    assert (model.vocab_size, model.num_layers, model.num_heads) == (53, 4, 4)
    assert model.cache_spec.layers == (LayerSpec(2, 16, 16),) * 4
    assert tiny("gpt2").cache_spec.layers[0] == LayerSpec(4, 8, 8)
    assert tiny("falcon").cache_spec.layers[0] == LayerSpec(1, 8, 8)


def test_only_types_without_a_cast_to_fp32_are_exact():
    assert [one for one in TYPES if tiny(one, exact_attention(one)).is_exact] == [one for one in TYPES if one in EXACT]
    assert not tiny("gpt2", "eager").is_exact
    assert not HFModel.tiny("gpt2", seed=0, dtype=torch.float32).is_exact


UNSUPPORTED = (
    f"model_type = 'opt' must be one of {', '.join(MODEL_TYPES)}, the types whose tree mask is known; test this model "
    "through an adapter of yours that has the methods of specbench.protocols.TreeModel"
)
OPT = OPTConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, ffn_dim=8)


def test_an_unsupported_model_is_refused():
    with pytest.raises(ValueError) as refusal:
        HFModel(OPTForCausalLM(OPT))
    assert str(refusal.value) == UNSUPPORTED


def test_an_unsupported_checkpoint_is_refused_before_its_weights_are_sought(tmp_path):
    OPT.save_pretrained(tmp_path)
    with pytest.raises(ValueError) as refusal:
        HFModel.load(tmp_path, dtype=torch.float64)
    assert str(refusal.value) == UNSUPPORTED


def test_falcon_with_alibi_is_refused_with_the_reason():
    with pytest.raises(ValueError) as refusal:
        HFModel.tiny("falcon-alibi", seed=0, dtype=torch.float64)
    assert str(refusal.value).startswith(
        "alibi = True is refused: transformers' Falcon counts ALiBi's distances in rows of the cache, and takes from a "
        "mask only what to hide, so siblings would shift the bias of every row behind them; test this model"
    )


def test_falcon_takes_from_a_mask_only_what_to_hide():
    """The reason of the refusal. Bloom is told positions by what its mask adds; Falcon throws that away."""
    model = FalconForCausalLM._from_config(tiny_config("falcon-alibi"), dtype=torch.float64).eval()
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    mask = torch.zeros(1, 4, 5, 5, dtype=torch.float64).masked_fill(~torch.ones(5, 5).tril().bool(), -1e9)
    moved = mask + torch.rand(5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits = []
    for additive in (mask, moved):
        model.config._attn_implementation = TREE_MASK
        ALL_MASK_ATTENTION_FUNCTIONS[TREE_MASK] = lambda *sizes, additive=additive, **named: additive
        with torch.no_grad():
            logits.append(model(input_ids=tokens, use_cache=False).logits)
        del ALL_MASK_ATTENTION_FUNCTIONS[TREE_MASK]
    with pytest.raises(ValueError, match="too many values to unpack"):
        model(input_ids=tokens, attention_mask=mask)
    assert torch.equal(*logits)


def test_rotary_frequencies_that_follow_the_length_are_refused():
    with pytest.raises(ValueError, match="rope_type = 'dynamic' is refused: its frequencies change with the length"):
        HFModel.tiny("llama-dynamic", seed=0, dtype=torch.float64)


def test_dynamic_frequencies_make_cached_keys_depend_on_the_length_of_the_forward():
    """The reason of the refusal: a key cached early is not the one a longer text would have."""
    config = tiny_config("llama-dynamic")
    config.max_position_embeddings = 8
    model = LlamaForCausalLM._from_config(config, dtype=torch.float64).eval()
    keys = []
    for length in (6, 12):
        cache = DynamicCache()
        with torch.no_grad():
            argument = {HFModel(tiny("llama").model)._cache_argument: cache}
            model(input_ids=torch.arange(length)[None], use_cache=True, **argument)
        keys.append(cache.layers[0].keys[0, :, :6])
    assert (keys[0] - keys[1]).abs().max() > 1e-3


@pytest.mark.parametrize("key", ["use_bidirectional_attention", "is_causal"])
def test_a_model_that_looks_ahead_is_refused(key):
    """EmbeddingGemma has the type gemma3_text but lets tokens look ahead."""
    config = tiny_config("gemma3_text")
    setattr(config, key, key != "is_causal")
    with pytest.raises(ValueError, match=f"{key} = (True|False) must be (True|False): such a model cannot decode"):
        check_supported(config, "sdpa")


def test_layers_that_attend_in_another_way_are_refused():
    config = tiny_config("qwen2")
    config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(
        ValueError, match=r"layer_types\[1\] = 'chunked_attention' must be one of full_attention, sliding"
    ):
        check_supported(config, "sdpa")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: HFModel.tiny("t5", seed=0, dtype=torch.float64),
            f"name = 't5' must be one of {', '.join(TINY_NAMES)}",
        ),
        (
            lambda: HFModel.tiny("llama", seed=0, dtype=torch.float64, attention="flash_attention_2"),
            "attention = 'flash_attention_2' must be one of sdpa, eager for model_type = 'llama' (others take no 4-D "
            "mask, or leave a soft-cap out)",
        ),
        (
            lambda: tiny("llama").new_cache("ring"),
            "cache kind 'ring' is unknown: choose one of contiguous, preallocated, paged_1, paged_4, paged_16",
        ),
        (
            lambda: tiny("llama").forward(flatten_causal([1], 0), object()),
            "cache is a object, must be from this model's new_cache()",
        ),
        (
            lambda: tiny("llama").forward(flatten_causal([1], 0), tiny("gpt2").new_cache()),
            "cache is a ContiguousCache of other rows, must be from this model's new_cache()",
        ),
        (lambda: tiny("llama").logits([]), "tokens is empty, must hold at least one token"),
        (lambda: tiny("llama").logits([0, 61]), "tokens[1] = 61 must be >= 0 and < 61 (the vocabulary)"),
        (
            lambda: tiny("gpt2").forward(flatten_causal([1], 512), tiny("gpt2").new_cache()),
            "position_ids holds 512, must be < 512 (learned positions)",
        ),
    ],
    ids=["type", "attention", "cache-kind", "cache", "other-cache", "empty", "token", "position"],
)
def test_wrong_arguments_are_refused_by_name(call, message):
    with pytest.raises(ValueError) as refusal:
        call()
    assert str(refusal.value) == message


@every_type
def test_a_saved_checkpoint_loads_as_the_same_model(model_type, tmp_path):
    tiny(model_type).model.save_pretrained(tmp_path)
    loaded = HFModel.load(tmp_path, dtype=torch.float64, attention="eager")
    assert loaded.name == f"transformers {model_type} eager"
    for key, weight in tiny(model_type).model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[key], weight)
    assert_close(loaded.logits(PREFIX), plain(tiny(model_type, "eager"), PREFIX), tolerance(loaded))


class Bomb:
    """Unpickling it writes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return Path.write_text, (self.marker, "unpickled")


@pytest.mark.parametrize("armed", [False, True], ids=["weights", "bomb"])
def test_a_checkpoint_of_pickles_alone_is_refused_unopened(armed, tmp_path):
    tiny("llama").model.config.save_pretrained(tmp_path)
    marker = tmp_path / "marker"
    if armed:
        (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(marker)))
    else:
        torch.save(tiny("llama").model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        HFModel.load(tmp_path, dtype=torch.float64)
    assert not marker.exists()


def test_code_shipped_with_a_checkpoint_is_never_run(tmp_path):
    tiny("llama").model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "shipped.Config", "AutoModelForCausalLM": "shipped.Model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    marker = tmp_path / "marker"
    (tmp_path / "shipped.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Config: pass\nclass Model: pass\n")
    loaded = HFModel.load(tmp_path, dtype=torch.float64)
    assert type(loaded.model).__name__ == "LlamaForCausalLM"
    assert not marker.exists()
