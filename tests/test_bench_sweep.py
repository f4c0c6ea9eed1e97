"""bench.sweep and memory: predictions by hand, the knee, the sentences, and formulas that are counted."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import pytest
import torch

from specbench.bench.lean import LeanLlama
from specbench.bench.memory import lean_bytes, measured, predicted
from specbench.bench.metrics import Interval, RoundCounts
from specbench.bench.rows import Setting
from specbench.bench.sweep import Candidate, Costs, knee, recommendation
from specbench.bench.sweep import predicted as predicted_seconds
from specbench.costs import cost_of
from specbench.reference.layouts import flatten_tree_mask
from specbench.reference.memory import LiveBytes
from specbench.reference.model import LlamaConfig, tiny_llama
from specbench.tree import DraftTree

COSTS = Costs(forward={1: 1.0, 2: 1.1, 4: 1.5}, draft=0.1, host=0.05)
# Three rounds of a chain 4 deep: 3 accepted, none, and nothing drafted.
ROUNDS = [RoundCounts(4, 4, 3, 4), RoundCounts(4, 4, 0, 1), RoundCounts(0, 0, 0, 1)]


@pytest.mark.parametrize(("rows", "seconds"), [(1, 1.0), (2, 1.1), (3, 1.3), (4, 1.5), (5, 1.7), (8, 2.3)])
def test_a_forward_costs_what_lies_on_the_line_between_measured_widths(rows: int, seconds: float) -> None:
    assert COSTS.forward_of(rows) == pytest.approx(seconds)


@pytest.mark.parametrize(("last", "seconds"), [(1.45, 2.55), (0.9, 0.9)], ids=["up", "down"])
def test_neighbouring_widths_do_not_decide_what_wide_forwards_cost(last: float, seconds: float) -> None:
    """16 and 17 rows are apart by noise; the line goes from 8 rows on, by 0.05 a row, and never downwards."""
    assert cost_of({1: 0.9, 8: 1.0, 16: 1.5, 17: last}, 39) == pytest.approx(seconds, abs=0.01)


def test_one_measured_width_is_all_that_is_known() -> None:
    assert Costs({3: 2.0}, 0.0, 0.0).forward_of(9) == 2.0


@pytest.mark.parametrize(
    ("gamma", "seconds", "tokens"),
    [
        (1, 2 * (1.1 + 0.1 + 0.05) + 1.05, 2 + 1 + 1),
        (2, 2 * (1.3 + 0.2 + 0.05) + 1.05, 3 + 1 + 1),
        (4, 2 * (1.7 + 0.4 + 0.05) + 1.05, 4 + 1 + 1),
        (9, 2 * (1.7 + 0.4 + 0.05) + 1.05, 4 + 1 + 1),  # nothing deeper was recorded
    ],
)
def test_a_shorter_draft_is_predicted_by_cutting_the_rounds(gamma: int, seconds: float, tokens: int) -> None:
    assert predicted_seconds(ROUNDS, COSTS, gamma) == pytest.approx(seconds / tokens)


def test_nothing_is_predicted_without_rounds() -> None:
    assert math.isnan(predicted_seconds([], COSTS, 2))


def test_the_knee_is_the_smallest_gamma_that_the_best_does_not_beat() -> None:
    """1.30 lies inside of the best one's interval [1.25, 1.45], 1.20 does not."""
    curve = {
        1: Interval(1.10, 1.05, 1.15, 9),
        2: Interval(1.20, 1.10, 1.40, 9),
        4: Interval(1.30, 1.20, 1.40, 9),
        8: Interval(1.35, 1.25, 1.45, 9),
        16: Interval(1.10, 1.00, 1.20, 9),
    }
    assert knee(curve) == 4


def test_the_knee_of_points_without_intervals_is_the_best() -> None:
    curve = {gamma: Interval(value, math.nan, math.nan, 1) for gamma, value in {1: 1.2, 2: 1.3, 4: 1.25}.items()}
    assert knee(curve) == 2


def test_a_curve_without_points_has_no_knee() -> None:
    with pytest.raises(ValueError, match="has no knee"):
        knee({})


def candidate(value: float, low: float, high: float, name: str = "lookup 4") -> Candidate:
    return Candidate(name, Interval(value, low, high, 16), 1.5, draft_share=0.02, host_share=0.01, cost_ratio=1.12)


WHY = "1.50 tokens a forward, a forward of its rows costs 1.12 of a plain one, drafting takes 2% of the time, "
WHY += "the host 1%."
NAN = math.nan


@pytest.mark.parametrize(
    ("candidates", "sentence"),
    [
        (
            [candidate(1.2, 1.1, 1.3), candidate(1.3, 1.2, 1.4, "ngram 5")],
            f"Use ngram 5: 1.30x [1.20, 1.40] (n = 16) the speed of plain; {WHY}",
        ),
        (
            [candidate(1.1, 0.9, 1.3)],
            "lookup 4 is the fastest at 1.10x [0.90, 1.30] (n = 16) of plain, which these prompts do not tell apart "
            f"from 1; {WHY}",
        ),
        (
            [candidate(0.8, 0.7, 0.9)],
            f"Decode plainly (plain): the best setting, lookup 4, is 0.80x [0.70, 0.90] (n = 16) as fast; {WHY}",
        ),
        (
            [candidate(NAN, NAN, NAN)],
            "No setting has both passed the gate and been timed, so none can be recommended.",
        ),
    ],
    ids=["use", "not told apart", "plainly", "none"],
)
def test_the_recommendation_is_one_sentence(candidates: list[Candidate], sentence: str) -> None:
    assert recommendation(candidates, baseline="plain") == sentence


# Memory.

CONFIGS = {
    "grouped, wide feed-forward": LlamaConfig(64, 64, 512, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16),
    "large vocabulary": LlamaConfig(8000, 32, 48, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16),
    "many heads": LlamaConfig(31, 32, 48, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=8),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_lean_formula_is_within_a_fifth_of_what_is_counted(name: str, dtype: torch.dtype) -> None:
    """Without logits, and with them gathered by node as a session does."""
    config = CONFIGS[name]
    model = LeanLlama.of(tiny_llama(config, seed=0).to(dtype))
    for num_nodes, prefix_len in product((1, 16, 64, 200), (0, 100, 1000)):
        tree = DraftTree.of([0] * num_nodes, [-1] + [(node - 1) // 2 for node in range(1, num_nodes)])
        flat = flatten_tree_mask(tree, prefix_len)
        cache = model.new_cache("preallocated")
        rows = torch.zeros(config.num_kv_heads, prefix_len, config.head_dim, dtype=dtype)
        for layer in range(config.num_layers):
            cache.append(layer, rows, rows)
        with LiveBytes() as live:
            model.encode(flat, cache)
            inside = live.peak
            cache.truncate(prefix_len)
            live.restart()
            logits = model.forward(flat, cache)
            logits = logits[flat.row_of_node]
        layer_bytes, end_bytes = lean_bytes(config, rows=num_nodes, prefix=prefix_len, dtype=dtype)
        whole = max(layer_bytes, end_bytes)
        assert 0.8 <= layer_bytes / inside <= 1.2 and 0.8 <= whole / live.peak <= 1.2, (num_nodes, prefix_len)


def test_weights_and_cache_are_predicted_to_the_byte() -> None:
    config = CONFIGS["large vocabulary"]
    model = LeanLlama.of(tiny_llama(config, seed=0).to(torch.float32))
    found = predicted(model, context=50, rows=5, prompt=20)
    assert found is not None
    # 2 matrices of 8000 x 32, 3 norms of 32 twice and once; a layer: q and o 32 x 32, k and v 16 x 32, three 48 x 32.
    numbers = 2 * 8000 * 32 + 32 + 2 * (2 * 32 + 2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32)
    assert found["weights"] == 4 * numbers
    assert found["cache"] == 50 * 2 * 2 * 16 * 4  # rows, layers, keys and values, numbers, bytes


def test_peak_memory_is_that_of_a_process_of_its_own(tmp_path: Path) -> None:
    """Weights of 20 MB, and a tree whose logits are 20 MB: both show in what the process held."""
    config = LlamaConfig(40_000, 128, 64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=64, tied=True)
    tiny_llama(config, seed=0).to(torch.float32).save(tmp_path)
    setting = Setting("deep", drafter="lookup", gamma=60)
    prompt = [*range(3, 70)] * 3
    found = measured(setting, folder=str(tmp_path), dtype="fp32", prompt=prompt, num=100, threads=1)
    bytes_, formula = found["bytes"], found["predicted"]
    assert (found["kind"], found["setting"]) == ("memory", "deep")
    assert bytes_["loaded"] - bytes_["imported"] >= formula["weights"] >= 20_000_000
    assert formula["working"] == formula["logits"] == 61 * (128 + 2 * 40_000) * 4
    assert 0.5 * formula["working"] <= bytes_["working"] <= formula["working"] + 32 * 2**20


def test_peak_memory_of_a_batch_has_a_cache_and_logits_for_each_text(tmp_path: Path) -> None:
    config = LlamaConfig(40_000, 128, 64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=64, tied=True)
    tiny_llama(config, seed=0).to(torch.float32).save(tmp_path)
    setting = Setting("both", drafter="lookup", gamma=30, batch=2)
    prompt = [*range(3, 40)] * 2
    found = measured(setting, folder=str(tmp_path), dtype="fp32", prompt=prompt, num=60, threads=1)
    bytes_, formula = found["bytes"], found["predicted"]
    # The prompts' logits, of 73 rows each, three times over; rows of 1 layer, keys and values, 64 numbers.
    assert formula["cache"] == 2 * (74 + 60 + 31) * 2 * 64 * 4
    assert formula["working"] == 2 * 73 * (128 + 3 * 40_000) * 4 + formula["cache"]
    assert 0.4 * formula["working"] <= bytes_["working"] <= formula["working"] + 32 * 2**20


def test_a_process_that_fails_is_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="measures the memory of plain ended with 1: "):
        measured(Setting("plain"), folder=str(tmp_path), dtype="fp32", prompt=[1, 2], num=4, threads=1)
