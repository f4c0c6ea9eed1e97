"""The decoder with every kernel in it: the same tokens, logits and cache rows as the reference's."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specbench.compare import max_error
from specbench.kernels.launch import CannotRun
from specbench.kernels.steps import commit, forward, kernel_steps, sample_by, walk
from specbench.kernels.tree_mask import pack_mask
from specbench.protocols import LanguageModel, SeededCoins
from specbench.reference.caches.contiguous import ContiguousCache
from specbench.reference.drafters.by_name import DRAFTERS
from specbench.reference.drafters.sampled import SampledDrafter
from specbench.reference.hf import HFModel
from specbench.reference.hf_types import MODEL_TYPES, exact_attention
from specbench.reference.layouts import flatten_tree_mask
from specbench.reference.model import LlamaConfig, LlamaModel, tiny_llama
from specbench.reference.recurrent import Recurrence, tiny_hybrid
from specbench.reference.sampling import probs
from specbench.reference.session import TreeSession
from specbench.reference.steps import STEPS
from specbench.suites.kernels import DEVICE
from specbench.suites.kernels.cases import SampleCase
from specbench.suites.kernels.decoder import KernelTarget
from specbench.suites.kernels.rounds import GROUPED, SIZES, WINDOWED
from specbench.tree import PROPOSALS, DraftTree, Proposal
from specbench.types import Request, Sampling

HYBRID = tiny_hybrid(LlamaConfig(**SIZES, num_kv_heads=2, head_dim=4), Recurrence(layers=(1,)), seed=3)
MODELS = {"grouped": GROUPED, "windowed": WINDOWED, "hybrid": HYBRID}
PREFIX = [1, 2, 3, 4, 5, 6, 7]
TREE = DraftTree.of([8, 3, 4, 3, 9, 4, 5, 5], [-1, 0, 0, 1, 2, 2, 5, 6])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("cache", ["preallocated", "paged_4", "int8"])
def test_two_rounds_leave_the_same_logits_and_rows(model: str, cache: str) -> None:
    assert two_rounds_differ(MODELS[model].to(torch.float64, DEVICE), MODELS[model], cache) <= 1e-11


@pytest.mark.parametrize("model_type", [one for one in MODEL_TYPES if MODEL_TYPES[one].takes_attention])
def test_a_transformers_model_attends_by_the_kernel(model_type: str) -> None:
    """What passes through fp32 turns 1e-16 into 1e-7; a wrong mask, window, cap or scale is off by 1e-2 and more."""
    model = HFModel.tiny(model_type, seed=3, dtype=torch.float64, attention=exact_attention(model_type))
    error = two_rounds_differ(HFModel(copy.deepcopy(model.model).to(DEVICE)), model, "paged_4")
    assert error <= (1e-11 if model.is_exact else 2e-6)


def two_rounds_differ(model: LanguageModel, right_model: LanguageModel, cache: str) -> float:
    """The largest difference of logits and of cache rows."""
    mine = TreeSession(model, steps=kernel_steps(STEPS, device=DEVICE), cache=cache)
    right = TreeSession(right_model, cache=cache)
    errors = []
    for session in (mine, right):
        session.prefill(PREFIX)
    for path in ([2, 5, 6, 7], [1, 3]):
        errors.append(max_error(mine.forward_tree(TREE).cpu(), right.forward_tree(TREE)))
        for session in (mine, right):
            session.commit(path)
        for layer in range(right.num_layers):
            pairs = zip(mine.kv(layer), right.kv(layer), strict=True)
            errors += [max_error(one.cpu(), other) for one, other in pairs]
    return max(errors)


def test_a_fork_keeps_its_pages_when_the_other_commits() -> None:
    """Rows are moved in place, and a page may be shared."""
    session = TreeSession(GROUPED, steps=kernel_steps(STEPS, device=DEVICE), cache="paged_4")
    session.prefill(PREFIX)
    twin = session.fork()
    before = [one.clone() for one in twin.kv(0)]
    session.forward_tree(TREE)
    session.commit([2, 5])
    assert all(torch.equal(one, other) for one, other in zip(twin.kv(0), before, strict=True))


@pytest.mark.parametrize("model", ["grouped", "windowed"])
@pytest.mark.parametrize("batch_layout", ["packed", "left_padded"])
def test_whole_generations_and_batches_are_plain_decoding(model: str, batch_layout: str) -> None:
    one = MODELS[model]
    target = KernelTarget()
    decoder = target.build(one, DRAFTERS["self_tree"](one), batch_layout=batch_layout)
    plain = target.build(one, None)
    prompts = ([3, 1, 4], [5, 9, 2, 6, 5, 3])
    right = [plain.generate(prompt, max_new_tokens=4).tokens for prompt in prompts]
    assert [decoder.generate(prompt, max_new_tokens=4).tokens for prompt in prompts] == right
    batch = decoder.generate_batch([Request(tuple(prompt), 4) for prompt in prompts])
    assert [answer.tokens for answer in batch] == right


@pytest.mark.parametrize("proposal", PROPOSALS)
@pytest.mark.parametrize("cut", [{}, {"top_k": 5, "top_p": 0.9}], ids=["whole", "cut"])
def test_acceptance_at_a_temperature_takes_the_coins_that_the_rule_takes(
    proposal: Proposal, cut: dict[str, Any]
) -> None:
    sampling = Sampling(temperature=1.5, **cut)
    step = kernel_steps(STEPS, device=DEVICE, probs=probs).sample
    for seed in range(4):
        case = SampleCase(((-1, 0, 0, 1),), 17, proposal, 3, (150,), "fp64", seed)
        ((tree,), (logits, q, _)) = case.drafts, case.tensors
        tree = replace(tree, draft_probs=None if q is None else q.nan_to_num())
        mine, rule = SeededCoins(seed), SeededCoins(seed)
        found = step(tree, logits.to(DEVICE), sampling=sampling, coins=mine)
        assert found == STEPS.sample(tree, logits, sampling=sampling, coins=rule)
        assert float(mine.uniform(1)) == float(rule.uniform(1))  # as many were taken


def test_a_sampled_generation_is_that_of_the_rule() -> None:
    drafter = SampledDrafter(GROUPED)
    answers = [
        KernelTarget(sampling=one)
        .build(GROUPED, drafter)
        .generate([3, 1], max_new_tokens=4, sampling=Sampling(temperature=1.5), seed=1)
        for one in (True, False)
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("model", ["grouped", "windowed"])
def test_a_mask_is_packed_once_a_forward(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[Tensor] = []

    def counted(mask: Tensor) -> Tensor:
        packed.append(mask)
        return pack_mask(mask)

    monkeypatch.setattr("specbench.kernels.steps.pack_mask", counted)
    session = TreeSession(MODELS[model], steps=kernel_steps(STEPS, device=DEVICE), cache="preallocated")
    session.forward_tree(TREE)
    session.commit([])
    session.forward_tree(DraftTree.of([8, 3, 4], [-1, 0, 0]))
    assert [tuple(one.shape) for one in packed] == [(8, 8), (3, 3)]


def test_a_tree_of_drawn_drafts_without_their_law_is_refused() -> None:
    tree = DraftTree(torch.tensor([1, 2]), torch.tensor([-1, 0]), proposal="iid")
    with pytest.raises(ValueError, match="draft_probs is None, must be q where drafts are drawn"):
        sample_by(probs)(tree, torch.zeros(2, 5), sampling=Sampling(temperature=1.0), coins=SeededCoins(0))


def test_what_has_no_kernel_is_refused() -> None:
    flat = flatten_tree_mask(TREE, 0)
    with pytest.raises(CannotRun, match=r"commit_kv cannot run on a ContiguousCache: its rows cannot be moved"):
        commit(ContiguousCache(GROUPED.cache_spec), 0, [0])
    with pytest.raises(CannotRun, match=r"tree_attention cannot run in a object: give it with_attention\(attention\)"):
        forward(object(), flat, GROUPED.new_cache())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="target logits hold NaN"):
        walk(TREE, torch.full((8, 13), torch.nan, device=DEVICE))


def test_a_long_run_of_known_tokens_is_computed_in_pieces() -> None:
    model: LlamaModel = tiny_llama(LlamaConfig(5, 4, 4, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=4), seed=4)
    tokens = torch.randint(5, (1100,), generator=torch.Generator().manual_seed(0)).tolist()
    mine = TreeSession(model.to(torch.float64, DEVICE), steps=kernel_steps(STEPS, device=DEVICE), cache="preallocated")
    right = TreeSession(model, cache="preallocated")
    for session in (mine, right):
        session.prefill(tokens)
    one = DraftTree.of([3, 1], [-1, 0])
    torch.testing.assert_close(mine.forward_tree(one).cpu(), right.forward_tree(one), rtol=0, atol=1e-11)
