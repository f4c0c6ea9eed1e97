"""int8 and fp8 rows: how far they are off, that scales travel, and that cache and oracle round alike."""

from __future__ import annotations

import pytest
import torch

from specbench.banks import TinyBank
from specbench.cases import TreeCase
from specbench.checks.noise import calibration, pooled_rms, worst_row_rms
from specbench.clock import Clock
from specbench.loading import Target
from specbench.reference import autoregressive
from specbench.reference.kv_cache import CACHES, QUANTISED, CacheSpec
from specbench.reference.model import LlamaConfig, round_trip, tiny_llama
from specbench.reference.session import TreeSession
from specbench.reference.target import ReferenceTarget
from specbench.subjects import Subject
from specbench.tree import DraftTree
from specbench.types import DTYPES, Taps
from specbench.watchdog import Watchdog

CONFIG = LlamaConfig(
    vocab_size=13, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4
)
every_codec = pytest.mark.parametrize("kind", QUANTISED)


def through_cache(kind: str, x: torch.Tensor) -> torch.Tensor:
    """x: [H, M, D], written to a cache and read back."""
    spec = CacheSpec.uniform(num_layers=1, num_heads=x.shape[0], head_dim=x.shape[2], dtype=x.dtype)
    return CACHES[kind](spec).append(0, x, -x)[0]


# By hand: largest 254, so a step is 2; 3 lies between 1 and 2 steps and rounds to the even one.
def test_int8_rounds_to_whole_steps():
    x = torch.tensor([[[254.0, 3.0, -5.1, 0.9]]], dtype=torch.float64)
    assert through_cache("int8", x).flatten().tolist() == [254.0, 4.0, -6.0, 0.0]


# Largest 448, so the scale is 1: between 16 and 32 numbers lie 2 apart, below 2^-6 they lie 2^-9 apart.
def test_fp8_rounds_to_four_significant_bits():
    x = torch.tensor([[[448.0, 17.2, -27.0, 2.6 * 2**-9]]], dtype=torch.float64)
    assert through_cache("fp8", x).flatten().tolist() == [448.0, 18.0, -28.0, 3 * 2**-9]


@every_codec
def test_a_row_of_zeros_stays_one(kind):
    assert torch.equal(through_cache(kind, torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


@every_codec
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_cache_and_oracle_round_alike(kind, dtype):
    """Both are written out; over 40,000 numbers of many magnitudes neither differs in a bit."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 500, 20, generator=generator, dtype=torch.float64)
    x = (x * 10.0 ** torch.randint(-3, 3, (4, 500, 20), generator=generator)).to(dtype)
    assert torch.equal(through_cache(kind, x), round_trip(kind, x))


@every_codec
def test_a_row_that_has_been_rounded_stays_as_it_is(kind):
    x = round_trip(kind, torch.randn(2, 50, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    torch.testing.assert_close(round_trip(kind, x), x, rtol=1e-14, atol=0)


@every_codec
def test_scales_move_with_their_rows(kind):
    """Rows a thousand times larger than their neighbours: another row's scale would be seen."""
    x = torch.tensor([1.0, 1000.0, 0.001, 5.0, 200.0])[None, :, None] * torch.tensor([1.0, -0.5, 0.25])
    cache = CACHES[kind](CacheSpec.uniform(num_layers=1, num_heads=1, head_dim=3, dtype=torch.float32))
    cache.append(0, x, -x)
    twin = cache.fork()
    cache.commit(1, [3, 1])
    twin.truncate(2)
    kept = round_trip(kind, x[:, [0, 4, 2]])
    assert torch.equal(cache.rows(0)[0], kept) and torch.equal(cache.rows(0)[1], -kept)
    assert torch.equal(twin.rows(0)[0], round_trip(kind, x[:, :2]))


@every_codec
def test_a_tree_over_a_quantised_cache_is_plain_decoding_of_the_rounded_model(kind):
    """The newest rows are read back rounded as well, or a row in a tree and a row by itself would differ."""
    model = tiny_llama(CONFIG, seed=3)
    session = TreeSession(model, cache=kind)
    tree, taps = DraftTree.of([3, 4, 5, 6, 7], [-1, 0, 0, 2, 3]), Taps()
    session.prefill([1, 2, 8, 9, 1, 4])
    logits = session.forward_tree(tree, taps=taps)
    expected = autoregressive.score_tree_naive(model.with_codec(kind), [1, 2, 8, 9, 1, 4], tree)
    torch.testing.assert_close(logits, expected.logits, rtol=0, atol=1e-11)
    for tap, right in zip(taps.layers, expected.layers, strict=True):
        torch.testing.assert_close((tap.k, tap.v), (right.k, right.v), rtol=0, atol=1e-11)


@every_codec
def test_rounding_moves_logits_far_more_than_fp64_does(kind):
    """Otherwise the oracle of the plain model would do, and faults in scales could hide in it."""
    model = tiny_llama(CONFIG, seed=3)
    text = [1, 2, 8, 9, 1, 4]
    assert float((model.with_codec(kind).logits(text) - model.logits(text)).abs().max()) > 1e-3


def subject(label: str) -> Subject:
    target = Target("reference", ReferenceTarget())
    bank = TinyBank(label, DTYPES[label])
    return Subject(target, bank, clock=Clock(), watchdog=Watchdog(0, lambda sentence: None))


@every_codec
@pytest.mark.parametrize(("label", "rounds"), [("fp64", True), ("fp32", False), ("bf16", False)])
def test_the_oracle_rounds_in_fp64_only(kind, label, rounds):
    """In a lower precision a value at a step's edge falls to either side: there the steps are noise, measured."""
    one, case = subject(label), TreeCase(cache=kind)
    wide = one.bank.wide(0)
    assert torch.equal(one.oracle(case).logits([1, 2, 3]), wide.logits([1, 2, 3])) != rounds
    assert torch.equal(one.oracle(TreeCase()).logits([1, 2, 3]), wide.logits([1, 2, 3]))


@every_codec
def test_plain_decoding_steps_through_the_same_codec(kind):
    """Else a quantised target would be excused nothing in fp32, where its rounding is all the noise there is."""
    one = subject("fp32")
    errors = [calibration(one, TreeCase(cache=cache)).rms for cache in ("contiguous", "ring", kind)]
    assert errors[0] == errors[1] and errors[2] > 1000 * errors[0]


def test_the_worst_row_speaks_for_a_quantised_calibration():
    actual = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert worst_row_rms(actual, torch.zeros(2, 2), row_dim=0) == pytest.approx((25 / 2) ** 0.5)
    assert pooled_rms(actual, torch.zeros(2, 2), row_dim=0) == pytest.approx((25 / 4) ** 0.5)


def test_a_codec_stays_with_the_model_in_another_dtype():
    model = tiny_llama(CONFIG, seed=3).with_codec("int8")
    assert torch.equal(model.to(torch.float64).logits([1, 2]), model.logits([1, 2]))
    assert not torch.equal(model.logits([1, 2]), model.with_codec("").logits([1, 2]))


def test_an_unknown_codec_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"^codec 'int4' is unknown: choose one of int8, fp8, or '' for none$"):
        tiny_llama(CONFIG, seed=3).with_codec("int4")
