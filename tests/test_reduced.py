"""Reduced models: what is rounded and dropped, by hand and by transformers, and that each is a target of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sessions import session_on
from torch import Tensor
from transformers import LlamaForCausalLM

from specbench.judge import Failed
from specbench.reference import autoregressive, reduced_targets
from specbench.reference.decoder import Decoder
from specbench.reference.drafters.by_name import DRAFTERS
from specbench.reference.drafters.model import ModelDrafter
from specbench.reference.faults.bank import FAULTS
from specbench.reference.model import LlamaConfig, LlamaModel, tiny_llama
from specbench.reference.recurrent import Recurrence, tiny_hybrid
from specbench.reference.reduced import Int8Matrix, ReducedLlama, Reduction
from specbench.tree import DraftTree

CONFIG = LlamaConfig(31, 32, 48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8)
MODEL = tiny_llama(CONFIG, seed=0)
PROMPT = [3, 1, 4, 1, 5]
TREE = DraftTree.of([5, 7, 9, 2, 2, 8], [-1, 0, 0, 1, 1, 3])
REDUCTIONS = {
    "int8 weights": Reduction(weights=True),
    "int8 weights and activations": Reduction(weights=True, activations=True),
    "sparse": Reduction(keep=12),
    "all": Reduction(weights=True, activations=True, keep=12),
}
every_reduction = pytest.mark.parametrize("name", REDUCTIONS)


def test_a_matrix_is_kept_in_steps_of_its_rows() -> None:
    """Steps 2/127, 1 where all is zero, 0.254/127 = 0.002; 1 / (2/127) = 63.5 goes to the even 64."""
    kept = Int8Matrix.of(
        torch.tensor([[1.0, -2.0, 0.01], [0.0, 0.0, 0.0], [0.254, 0.002, -0.0029]], dtype=torch.float64)
    )
    assert kept.codes.tolist() == [[64, -127, 1], [0, 0, 0], [127, 1, -1]]
    torch.testing.assert_close(kept.steps[:, 0], torch.tensor([2 / 127, 1.0, 0.002], dtype=torch.float64))


def rounded_by_hand(model: LlamaModel) -> LlamaModel:
    """An ordinary model whose matrices were rounded."""
    weights = dict(model._weights)
    for key, matrix in weights.items():
        if key.startswith("model.layers.") and matrix.ndim == 2:
            steps = matrix.abs().max(dim=1).values / 127
            weights[key] = torch.stack([step * (row / step).round() for row, step in zip(matrix, steps, strict=True)])
    return LlamaModel(model.config, weights)


def test_int8_weights_compute_what_the_rounded_matrices_compute() -> None:
    reduced = ReducedLlama.of(MODEL, REDUCTIONS["int8 weights"])
    expected = rounded_by_hand(MODEL).logits(PROMPT)
    torch.testing.assert_close(reduced.logits(PROMPT), expected, rtol=0, atol=1e-12)
    assert (expected - MODEL.logits(PROMPT)).abs().max() > 1e-3


def test_activations_are_the_largest_of_each_row(tmp_path: Path) -> None:
    """transformers' model, of whose last matrix's inputs all but twelve a row are set to zero."""
    MODEL.save(tmp_path)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)

    def cut(module: torch.nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        order = given[0].abs().argsort(dim=-1, descending=True)
        return (given[0].scatter(-1, order[..., 12:], 0.0),)

    for layer in theirs.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(cut)
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    reduced = ReducedLlama.of(MODEL, REDUCTIONS["sparse"])
    torch.testing.assert_close(reduced.logits(PROMPT), expected, rtol=0, atol=1e-5)
    assert (expected - MODEL.logits(PROMPT)).abs().max() > 1e-3


def test_a_row_is_rounded_to_steps_of_its_own() -> None:
    """Beside a row of 100 a row of 2 has steps of 2/127: 1 is 64 of them (63.5 goes to the even one), 0.01 is one."""
    model = ReducedLlama.of(MODEL, Reduction(activations=True))
    given = torch.tensor([[2.0, 1.0, -0.01], [100.0, 0.0, 0.3]], dtype=torch.float64)
    codes = torch.tensor([[127, 64, -1], [127, 0, 0]]) * torch.tensor([[2 / 127], [100 / 127]], dtype=torch.float64)
    torch.testing.assert_close(model._rounded(given), codes, rtol=0, atol=1e-15)


def test_rows_are_rounded_before_every_matrix_of_a_layer() -> None:
    class Rounded(LlamaModel):
        def _linear(self, x: Tensor, name: str) -> Tensor:
            rows = [step * (row / step).round() for row in x[0] for step in [row.abs().max() / 127]]
            return super()._linear(torch.stack(rows)[None], name)

    expected = Rounded(CONFIG, MODEL._weights).logits(PROMPT)
    reduced = ReducedLlama.of(MODEL, Reduction(activations=True))
    torch.testing.assert_close(reduced.logits(PROMPT), expected, rtol=0, atol=1e-12)
    assert (expected - MODEL.logits(PROMPT)).abs().max() > 1e-3


def test_int8_matrices_take_a_byte_a_number() -> None:
    half = MODEL.to(torch.float16)
    reduced = ReducedLlama.of(half, Reduction(weights=True))
    layers = sum(one.numel() for key, one in half._weights.items() if "_proj" in key)
    rows = sum(len(one) for key, one in half._weights.items() if "_proj" in key)
    others = sum(2 * one.numel() for key, one in half._weights.items() if "_proj" not in key)
    assert reduced.num_bytes == layers + 4 * rows + others


# ---- a target of its own


@every_reduction
def test_a_tree_has_the_logits_of_one_by_one_decoding(name: str) -> None:
    model = ReducedLlama.of(MODEL, REDUCTIONS[name])
    decoder = Decoder(model)
    decoder.prefill(PROMPT[:-1])
    found, expected = decoder.forward_tree(TREE), autoregressive.score_tree(model, PROMPT[:-1], TREE).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@every_reduction
@pytest.mark.parametrize("drafter", ["self_chain", "self_tree", "early_exit", "ngram"])
@pytest.mark.parametrize("cache", ["contiguous", "int8", "fp8"])
def test_output_is_its_own_plain_decoding(name: str, drafter: str, cache: str) -> None:
    model = ReducedLlama.of(MODEL, REDUCTIONS[name])
    plain = model.with_codec("" if cache == "contiguous" else cache)
    said = Decoder(model, DRAFTERS[drafter](model), cache=cache).generate(PROMPT, max_new_tokens=6)
    assert said.tokens == autoregressive.generate(plain, PROMPT, max_new_tokens=6).tokens
    # A drafter that is the target itself is always right, also where rows are rounded in the cache.
    if drafter.startswith("self") and cache == "contiguous":
        assert all(len(one.path) == 3 for one in said.rounds[:-1])


def test_outputs_of_reduced_models_are_not_the_whole_models() -> None:
    """Else the tests above could not tell whose plain decoding they are held to."""
    said = {name: autoregressive.generate(ReducedLlama.of(MODEL, one), PROMPT, max_new_tokens=12).tokens
            for name, one in REDUCTIONS.items()}  # fmt: skip
    whole = autoregressive.generate(MODEL, PROMPT, max_new_tokens=12).tokens
    assert whole not in (said["sparse"], said["all"])


@every_reduction
def test_a_reduced_model_drafts_for_the_whole_one(name: str) -> None:
    drafter = ModelDrafter(ReducedLlama.of(MODEL, REDUCTIONS[name]), widths=(1, 1, 1))
    said = Decoder(MODEL, drafter).generate(PROMPT, max_new_tokens=8)
    assert said.tokens == autoregressive.generate(MODEL, PROMPT, max_new_tokens=8).tokens


TARGETS: dict[str, Callable[[], Decoder]] = {
    "int8": reduced_targets.int8,
    "int8_rows": reduced_targets.int8_rows,
    "sparse": reduced_targets.sparse,
}


@pytest.mark.parametrize("name", TARGETS)
def test_claims_hold_on_its_own_model(name: str) -> None:
    session = session_on(TARGETS[name](), name=name, make=TARGETS[name])
    claims = ("tree.logits", "tree.noninterference", "kv.commit", "greedy.lossless")
    assert {claim: session.judge(claim, "own").verdict for claim in claims} == dict.fromkeys(claims, "EQUAL")


@pytest.mark.parametrize("fault", ["int8_step_of_forward", "activations_of_forward"])
def test_what_is_decided_over_a_forward_is_caught(fault: str) -> None:
    session = session_on(FAULTS[fault].make(), name=fault, seed=7, make=FAULTS[fault].make)
    for claim in ("tree.logits", "tree.noninterference", "greedy.lossless"):
        with pytest.raises(Failed):
            session.judge(claim, "own")


@every_reduction
def test_twins_are_reduced_too(name: str) -> None:
    model = ReducedLlama.of(MODEL, REDUCTIONS[name])
    narrow = model.to(torch.float32)
    assert (narrow.dtype, narrow.reduction) == (torch.float32, REDUCTIONS[name])
    torch.testing.assert_close(narrow.logits(PROMPT)[0].double(), model.logits(PROMPT)[0], rtol=0, atol=0.5)
    short = model.first_layers(2)
    torch.testing.assert_close(
        short.logits(PROMPT),
        ReducedLlama.of(MODEL.first_layers(2), REDUCTIONS[name]).logits(PROMPT),
        rtol=0,
        atol=1e-12,
    )
    assert model.with_codec("int8").first_layers(2)._codec == "int8"


# ---- bad input


def test_what_cannot_be_reduced_is_refused(tmp_path: Path) -> None:
    for keep in (0, 49):
        with pytest.raises(ValueError, match=f"keep = {keep} must be between 1 and 48"):
            ReducedLlama.of(MODEL, Reduction(keep=keep))
    hybrid = tiny_hybrid(CONFIG, Recurrence(layers=(0,)), seed=0)
    with pytest.raises(ValueError, match="tiny hybrid 0 is a HybridModel, must be a LlamaModel to be reduced"):
        ReducedLlama.of(hybrid, Reduction(weights=True))
    with pytest.raises(ValueError, match="a reduced model has no checkpoint format"):
        ReducedLlama.of(MODEL, Reduction(weights=True)).save(tmp_path)
    with pytest.raises(ValueError, match="num_layers = 4 must be between 1 and 3"):
        ReducedLlama.of(MODEL, Reduction(weights=True)).first_layers(4)
