"""Models that keep a state instead of rows: the tree forward against the plain loop, and rolling the state back."""

from __future__ import annotations

import math

import pytest
import torch

from specbench.reference import autoregressive
from specbench.reference.kv_cache import CACHES, QUANTISED
from specbench.reference.layouts import LAYOUTS, flatten_causal, flatten_path_batch, flatten_tree_mask
from specbench.reference.model import LlamaConfig
from specbench.reference.recurrent import Recurrence, parent_rows, tiny_hybrid
from specbench.reference.session import TreeSession
from specbench.reference.steps import STEPS
from specbench.steps import Steps
from specbench.tree import DraftTree, root_only
from specbench.types import Taps

CONFIG = LlamaConfig(
    vocab_size=13, hidden_size=16, intermediate_size=24, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4
)
RECURRENCE = Recurrence(layers=(0, 2))
MODEL = tiny_hybrid(CONFIG, RECURRENCE, seed=0)
PREFIX = [1, 2, 3, 4, 5, 6, 7]
# 2-3-2 with branches that go on from the last sibling.
TREE = DraftTree.of([8, 3, 4, 3, 9, 4, 5, 5], [-1, 0, 0, 1, 2, 2, 5, 6])
every_kind = pytest.mark.parametrize("kind", CACHES)


def steps(layout: str) -> Steps:
    return Steps(**{**vars(STEPS), "flatten": LAYOUTS[layout]})


def oracle(kind: str):
    return MODEL.with_codec(kind) if kind in QUANTISED else MODEL


def test_the_recurrence_is_the_formula():
    """One layer, two rows, written out with scalars."""
    one = Recurrence(layers=(0,), inner=1, key_dim=1, value_dim=1, kernel=2)
    config = LlamaConfig(5, 2, 4, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2)
    model, taps = tiny_hybrid(config, one, seed=1), Taps()
    model.causal(torch.tensor([[3, 1]]), taps=taps)
    weight = {key.rpartition("recurrence.")[2]: value for key, value in model._weights.items()}
    window, memory, memories = 0.0, 0.0, []
    for token in (3, 1):
        x = model._norm(model._embedding[token], "model.layers.0.input_layernorm.weight")
        entered = float(weight["in_proj.weight"][0] @ x)
        convolved = window * float(weight["conv.weight"][0, 0]) + entered * float(weight["conv.weight"][1, 0])
        mixed = convolved / (1 + math.exp(-convolved))
        decay = 1 / (1 + math.exp(-float(weight["decay_proj.weight"][0] @ x)))
        key, value = (mixed * float(weight[f"{name}_proj.weight"]) for name in "kv")
        key, value = (one / math.sqrt(1 + one * one) for one in (key, value))
        memory, window = decay * memory + (1 - decay) * key * value, entered
        memories.append(memory)
    assert taps.layers[0].k.flatten().tolist() == pytest.approx(memories, abs=1e-12)


@every_kind
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_cached", [0, 1, 7])
def test_every_node_is_plain_decoding_of_its_own_path(kind, layout, num_cached):
    session = TreeSession(MODEL, steps=steps(layout), cache=kind)
    session.prefill(PREFIX[:num_cached])
    expected = autoregressive.score_tree_naive(oracle(kind), PREFIX[:num_cached], TREE)
    torch.testing.assert_close(session.forward_tree(TREE), expected.logits, rtol=0, atol=1e-11)


# Accepted nothing, one off the first, all of the deepest path; then another round, then a cut.
@every_kind
@pytest.mark.parametrize("path", [[], [2], [2, 5], [2, 5, 6, 7], [1, 3]], ids=str)
@pytest.mark.parametrize("num_cut", [0, 1, 2, 6])
def test_the_state_after_a_commit_is_that_of_the_committed_tokens(kind, path, num_cut):
    session = TreeSession(MODEL, cache=kind)
    session.prefill(PREFIX)
    committed = list(PREFIX)
    for _ in range(2):
        session.forward_tree(TREE)
        session.commit(path)
        committed += [TREE.token_list[node] for node in (0, *path)]
    committed = committed[: len(committed) - num_cut]
    session.truncate(len(committed))
    right = autoregressive.prefix_scores(oracle(kind), committed)
    for layer, tap in enumerate(right.layers):
        for actual, expected in zip(session.kv(layer), (tap.k, tap.v), strict=True):
            torch.testing.assert_close(actual[:, -1], expected[:, -1], rtol=0, atol=1e-11)
    expected = autoregressive.score_tree_naive(oracle(kind), committed, root_only(6)).logits
    torch.testing.assert_close(session.forward_tree(root_only(6)), expected, rtol=0, atol=1e-11)


def test_a_ring_keeps_a_few_snapshots_only():
    session = TreeSession(MODEL, cache="ring")
    session.prefill([1])
    for _ in range(20):
        session.forward_tree(root_only(2))
        session.commit([])
    assert session.kv(0)[0].shape[1] < 10 and session.kv(1)[0].shape[1] == 21


def test_a_fork_has_a_state_of_its_own():
    session = TreeSession(MODEL)
    session.prefill(PREFIX)
    twin = session.fork()
    session.forward_tree(TREE)
    session.commit([2, 5])
    expected = autoregressive.score_tree_naive(MODEL, PREFIX, TREE).logits
    torch.testing.assert_close(twin.forward_tree(TREE), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (flatten_tree_mask(TREE, 3).mask, [None, 0, 0, 1, 2, 2, 5, 6]),
        # Paths 0-1-3, 0-2-4 and 0-2-5-6-7, each written out whole.
        (flatten_path_batch(TREE, 3).mask, [None, 0, 1, None, 3, 4, None, 6, 7, 8, 9]),
        (flatten_causal([1, 2, 3], 5).mask, [None, 0, 1]),
    ],
    ids=["tree_mask", "path_batch", "causal"],
)
def test_a_rows_parent_is_read_off_the_mask(mask, expected):
    assert parent_rows(mask) == expected


def test_a_recurrent_layer_taps_no_attention():
    session, taps = TreeSession(MODEL), Taps()
    session.forward_tree(TREE, taps=taps)
    assert [tap.attention_weights is None for tap in taps.layers] == [True, False, True]
    assert all(tap.attention_output is not None and tap.k is not None for tap in taps.layers)


def test_a_recurrent_state_is_never_quantised():
    session = TreeSession(MODEL, cache="int8")
    session.prefill(PREFIX)
    right = autoregressive.prefix_scores(MODEL, PREFIX).layers[0]  # before any attention
    torch.testing.assert_close(session.kv(0)[0], right.k, rtol=0, atol=1e-12)


def test_a_recurrent_layer_reads_its_parent_and_itself():
    assert MODEL.layer_windows == (2, None, 2)


def test_the_first_layers_of_a_hybrid_are_one():
    short = MODEL.first_layers(1)
    session = TreeSession(short)
    session.prefill(PREFIX)
    expected = autoregressive.score_tree_naive(short, PREFIX, TREE).logits
    torch.testing.assert_close(session.forward_tree(TREE), expected, rtol=0, atol=1e-11)


def test_states_are_kept_in_the_models_dtype():
    session = TreeSession(MODEL.to(torch.bfloat16))
    session.prefill(PREFIX)
    assert session.kv(0)[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda path: MODEL.save(path), "a hybrid toy has no checkpoint format: save a LlamaModel"),
        (lambda path: Recurrence(layers=(0,), kernel=1), "kernel = 1 must be >= 2"),
        (lambda path: MODEL.rows(torch.zeros(1, 1), torch.zeros(1), None), "a model with recurrent layers has no rows"),
    ],
    ids=["save", "kernel", "rows"],
)
def test_what_a_hybrid_cannot_do_is_refused(call, message, tmp_path):
    with pytest.raises(ValueError, match=f"^{message}"):
        call(tmp_path)
