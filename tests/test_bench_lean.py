"""bench.lean: the same logits, rows and tokens as the reference forward, with fewer operators, and refusals by name."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specbench.bench.lean import LeanLlama
from specbench.reference.decoder import Decoder
from specbench.reference.drafters.ngram import NGramDrafter
from specbench.reference.layouts import LAYOUTS, flatten_causal
from specbench.reference.model import LlamaConfig, LlamaModel, tiny_llama
from specbench.tree import DraftTree
from specbench.types import Taps

CONFIGS = {
    "grouped": LlamaConfig(61, 48, 80, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=8),
    "tied, one key head": LlamaConfig(
        61, 32, 48, num_layers=2, num_heads=4, num_kv_heads=1, head_dim=12, tied=True, rope_theta=500.0
    ),
    "a head each": LlamaConfig(61, 32, 48, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8, rms_norm_eps=1e-3),
}
TREES = {
    "root": DraftTree.of([5], [-1]),
    "chain": DraftTree.of([5, 7, 9, 11], [-1, 0, 1, 2]),
    "tree": DraftTree.of([5, 7, 9, 7, 11, 3, 60], [-1, 0, 0, 1, 1, 2, 5]),
}
PREFIX = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def pair(name: str, dtype: torch.dtype = torch.float64) -> tuple[LlamaModel, LeanLlama]:
    return tiny_llama(CONFIGS[name], seed=3).to(dtype), LeanLlama.of(tiny_llama(CONFIGS[name], seed=3).to(dtype))


@pytest.mark.parametrize("prefix_len", [0, 1, 9])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_cached_rows_are_the_references(name: str, tree: str, layout: str, prefix_len: int) -> None:
    """torch's norm and attention stay in fp64 there, so that only the order of sums differs."""
    found = []
    for model in pair(name):
        cache = model.new_cache("preallocated")
        if prefix_len:
            model.forward(flatten_causal(PREFIX[:prefix_len], 0), cache)
        logits = model.forward(LAYOUTS[layout](TREES[tree], prefix_len), cache)
        found.append([logits, *(part for layer in range(model.num_layers) for part in cache.rows(layer))])
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_rows_without_logits_are_the_same_rows() -> None:
    _, lean = pair("grouped")
    caches = [lean.new_cache(), lean.new_cache()]
    lean.forward(flatten_causal(PREFIX, 0), caches[0])
    lean.encode(flatten_causal(PREFIX, 0), caches[1])
    assert all(torch.equal(a, b) for a, b in zip(caches[0].rows(2), caches[1].rows(2), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("drafter", [None, NGramDrafter(gamma=4, width=2)], ids=["plain", "lookup"])
def test_decoding_says_what_the_reference_says(drafter: NGramDrafter | None, dtype: torch.dtype) -> None:
    texts = [
        Decoder(model, drafter, cache="preallocated").generate(PREFIX, max_new_tokens=30).tokens
        for model in pair("grouped", dtype)
    ]
    assert texts[0] == texts[1]


def test_error_in_bf16_is_at_most_twice_the_references() -> None:
    """Against fp64 on the rounded weights, pooled over the rows."""
    reference, lean = pair("grouped", torch.bfloat16)
    right = reference.to(torch.float64).logits(PREFIX)
    errors = [
        (model.forward(flatten_causal(PREFIX, 0), model.new_cache()).double() - right).pow(2).mean().sqrt()
        for model in (reference, lean)
    ]
    assert errors[1] <= 2 * errors[0]


def test_the_first_layers_are_those_of_the_reference() -> None:
    reference, lean = pair("grouped")
    flat = flatten_causal(PREFIX, 0)
    cut = [model.first_layers(2) for model in (reference, lean)]
    logits = [model.forward(flat, model.new_cache()) for model in cut]
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-12)


def test_weights_are_held_once() -> None:
    """The checkpoint's names are views of the joined matrices."""
    _, lean = pair("grouped")
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in lean._weights.values()}
    assert sum(storages.values()) == sum(one.numel() * one.element_size() for one in lean._weights.values())


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.num += 1
        return func(*args, **(kwargs or {}))


def test_a_token_takes_fewer_operators_than_the_references() -> None:
    """What it is for, counted: no clock is asked."""
    nums = []
    for model in pair("grouped"):
        cache = model.new_cache("preallocated")
        model.forward(flatten_causal(PREFIX, 0), cache)
        flat = flatten_causal([7], len(PREFIX))
        with _Operators() as counted:
            model.forward(flat, cache)
        nums.append(counted.num)
    assert nums[1] <= 0.6 * nums[0], nums


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            tiny_llama(LlamaConfig(31, 32, 48, 2, 2, 1, 8, windows=(8, 8)), seed=0),
            "tiny llama 0 has sliding windows, which LeanLlama does not compute: use the model itself",
        ),
        (
            LlamaModel(
                CONFIGS["grouped"],
                tiny_llama(CONFIGS["grouped"], seed=0)._weights
                | {"model.layers.0.self_attn.q_proj.bias": torch.ones(48)},
                name="biased",
            ),
            "biased has biases, which LeanLlama does not compute: use the model itself",
        ),
    ],
    ids=["windows", "biases"],
)  # fmt: skip
def test_what_it_does_not_compute_is_refused(model: LlamaModel, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        LeanLlama.of(model)
    assert str(refused.value) == message


def test_taps_are_refused() -> None:
    _, lean = pair("grouped")
    with pytest.raises(ValueError, match="taps are not filled by LeanLlama"):
        lean.forward(flatten_causal(PREFIX, 0), lean.new_cache(), taps=Taps())


def test_a_capacity_is_that_of_preallocated_caches_alone() -> None:
    lean = pair("grouped")[1].with_capacity(12)
    assert (lean.new_cache("preallocated").capacity, type(lean.new_cache()).__name__) == (12, "ContiguousCache")
    with pytest.raises(ValueError, match="exceed capacity 12"):
        lean.encode(flatten_causal([1] * 13, 0), lean.new_cache("preallocated"))
