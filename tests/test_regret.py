"""EQUAL, NOISE and BUG on a model with real margins: the bound, the rates, and who is accused and who is not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from specbench.audit import Output
from specbench.engine_models import ended
from specbench.record import BUG, EQUAL, NOISE, NOT_TESTED
from specbench.reference.model import LlamaConfig, LlamaModel, tiny_llama
from specbench.regret import ALPHA, Oracle, Place, Plain, audit_ties, bound_of, plain_of, rate_evidence

PROMPTS = [tuple(torch.randint(64, (12,), generator=torch.Generator().manual_seed(one)).tolist()) for one in range(8)]
NUM = 40
NOISE_SCALE = 0.05  # of a logit


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16
    )
    tiny_llama(config, seed=3, dtype=torch.float32).save(folder)
    return Oracle(folder)


class Noisy:
    """Plain decoding whose logits are off by normal errors. seed: of them. draft_every: keeps the token of rank
    `rank` each so many rounds."""

    def __init__(self, oracle: Oracle, seed: int, *, scale: float = NOISE_SCALE, draft_every: int = 0, rank: int = 1):
        self._oracle, self._scale, self._every, self._rank = oracle, scale, draft_every, rank
        self._generator = torch.Generator().manual_seed(seed)
        self._made = 0

    def answer(self, prompt: Sequence[int]) -> tuple[tuple[int, ...], list[list[tuple[int, float]]]]:
        tokens: list[int] = []
        told = []
        for _ in range(NUM):
            row = self._oracle.rows(prompt, [*tokens, 0])[-1]
            row = row + self._scale * torch.randn(len(row), generator=self._generator, dtype=torch.float64)
            self._made += 1
            is_kept = self._every and self._made % self._every == 0
            best = row.topk(3).indices.tolist()
            tokens.append(best[self._rank if is_kept else 0])
            logprobs = row.log_softmax(-1)
            told.append([(one, float(logprobs[one])) for one in best[:2]])
        return tuple(tokens), told


def outputs_of(engine: Noisy, mode: str) -> list[Output]:
    answers = [engine.answer(prompt) for prompt in PROMPTS]
    return [
        Output(prompt, tokens, f"prompt {idx}", mode, NUM, tuple(tuple(one) for one in told))
        for idx, (prompt, (tokens, told)) in enumerate(zip(PROMPTS, answers, strict=True))
    ]


@cache
def plain_shapes(oracle: Oracle) -> tuple[list[Output], Plain]:
    """The first shape's outputs, and what four of them show."""
    shapes = [outputs_of(Noisy(oracle, seed), "plain") for seed in range(4)]
    return shapes[0], plain_of(oracle, [one for some in shapes for one in some], None)


def test_errors_are_those_of_the_difference_of_two_logits(oracle: Oracle) -> None:
    _, plain = plain_shapes(oracle)
    assert len(plain.errors) == 4 * len(PROMPTS) * NUM
    assert plain.source == "its own logprobs"
    assert plain.rms == pytest.approx(NOISE_SCALE * math.sqrt(2), rel=0.05)


def test_a_regret_is_the_oracles_best_logit_minus_that_of_the_token(oracle: Oracle) -> None:
    prompt = PROMPTS[0]
    row = oracle.rows(prompt, [5])[0]
    (place,) = oracle.places(prompt, [5])
    ordered = sorted(range(64), key=lambda token: -float(row[token]))
    assert (place.best, place.second) == (ordered[0], ordered[1])
    assert place.regret == pytest.approx(float(row.max() - row[5]), abs=1e-12)
    assert place.margin == pytest.approx(float(row[ordered[0]] - row[ordered[1]]), abs=1e-12)
    assert oracle.places(prompt, [64])[0].regret == math.inf


def test_the_oracle_is_the_forward_of_transformers(oracle: Oracle) -> None:
    """A second implementation; its norms and rotations are fp32, hence the 1e-5."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(oracle._folder, dtype=torch.float64)
    text = [*PROMPTS[1], 3, 4]
    right = model(torch.tensor([text])).logits[0, -3:]
    assert (oracle.rows(PROMPTS[1], [3, 4, 5]) - right).abs().max() < 1e-5


@pytest.mark.parametrize("seed", range(10, 16))
def test_plain_decoding_of_another_shape_is_noise_and_never_a_bug(oracle: Oracle, seed: int) -> None:
    reference, plain = plain_shapes(oracle)
    outputs = outputs_of(Noisy(oracle, seed), "plain, batch")
    audit = audit_ties(oracle, plain, outputs, reference)
    assert audit.verdict == NOISE
    assert audit.facts["worst_regret"] < audit.facts["bound"] < 1.5


def test_the_same_tokens_are_equal(oracle: Oracle) -> None:
    reference, plain = plain_shapes(oracle)
    outputs = [replace(one, mode="draft model") for one in reference]
    audit = audit_ties(oracle, plain, outputs, reference)
    assert (audit.verdict, audit.num_tokens) == (EQUAL, len(PROMPTS) * NUM)


def test_a_draft_that_is_kept_once_in_fifty_rounds_is_a_bug(oracle: Oracle) -> None:
    reference, plain = plain_shapes(oracle)
    outputs = outputs_of(Noisy(oracle, 20, draft_every=50, rank=2), "draft model")
    audit = audit_ties(oracle, plain, outputs, reference, weights="bf16")
    assert audit.verdict == BUG
    assert "beyond the bound of" in audit.sentence
    assert "ulps)" in audit.sentence


def test_small_regrets_that_come_too_often_are_a_bug(oracle: Oracle) -> None:
    """The second best is taken wherever it is closer than any bound: each by itself would pass for noise."""

    class Sloppy(Noisy):
        def answer(self, prompt: Sequence[int]) -> tuple[tuple[int, ...], list[list[tuple[int, float]]]]:
            tokens: list[int] = []
            for _ in range(NUM):
                best = self._oracle.rows(prompt, [*tokens, 0])[-1].topk(2)
                is_close = float(best.values[0] - best.values[1]) < 0.3
                tokens.append(int(best.indices[1 if is_close else 0]))
            return tuple(tokens), []

    reference, plain = plain_shapes(oracle)
    outputs = outputs_of(Sloppy(oracle, 0), "draft model")
    audit = audit_ties(oracle, plain, outputs, reference)
    assert audit.facts["worst_regret"] < audit.facts["bound"]
    assert audit.verdict == BUG
    assert "more often than if its errors were 1.5 times plain decoding's" in audit.sentence


def test_right_tokens_with_wrong_logprobs_are_a_bug(oracle: Oracle) -> None:
    reference, plain = plain_shapes(oracle)
    wrong = tuple(((best, 0.0), (second, -9.0)) for (best, _), (second, _) in reference[0].logprobs)
    audit = audit_ties(oracle, plain, [replace(reference[0], logprobs=wrong), *reference[1:]], reference)
    assert audit.verdict == BUG
    assert "its logprobs are" in audit.sentence


def test_an_engine_with_other_weights_is_not_accused_but_not_tested(oracle: Oracle) -> None:
    shapes = [outputs_of(Noisy(oracle, seed, scale=1.5), "plain") for seed in range(2)]
    plain = plain_of(oracle, [one for some in shapes for one in some], None)
    audit = audit_ties(oracle, plain, shapes[0], shapes[0])
    assert audit.verdict == NOT_TESTED
    assert "it reads the checkpoint otherwise" in audit.sentence


@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps"])
def test_an_engine_that_misreads_the_config_is_not_tested(oracle: Oracle, key: str) -> None:
    """Its regrets would stay far below a bound taken from its own errors: mlx-lm's on a folder that transformers 5
    wrote, whose rope_theta it did not find."""
    folder = oracle._folder
    right = LlamaModel.load(folder, dtype=torch.float32)
    model = LlamaModel(replace(right.config, **{key: {"rope_theta": 100.0, "rms_norm_eps": 1.0}[key]}), right._weights)

    class Misread(Noisy):
        def answer(self, prompt: Sequence[int]) -> tuple[tuple[int, ...], list[list[tuple[int, float]]]]:
            tokens, told = [], []
            for _ in range(NUM):
                row = model.logits([*prompt, *tokens])[-1].double().log_softmax(-1)
                best = row.topk(2).indices.tolist()
                tokens.append(best[0])
                told.append([(one, float(row[one])) for one in best])
            return tuple(tokens), told

    outputs = outputs_of(Misread(oracle, 0), "plain")
    audit = audit_ties(oracle, plain_of(oracle, outputs, torch.float32), outputs, outputs)
    assert audit.verdict == NOT_TESTED
    assert "it reads the checkpoint otherwise" in audit.sentence


def test_without_logprobs_our_forward_in_its_dtype_shows_the_errors(oracle: Oracle) -> None:
    reference, shown = plain_shapes(oracle)
    hidden = [replace(one, logprobs=()) for one in reference]
    plain = plain_of(oracle, hidden, torch.bfloat16)
    assert plain.source == "our forward in its dtype"
    assert len(plain.errors) == 4 * len(PROMPTS) * NUM
    assert 1e-3 < plain.rms < 0.2
    none = plain_of(oracle, hidden, None)
    assert audit_ties(oracle, none, reference, reference).verdict == NOT_TESTED
    assert len(shown.errors) > 0


def test_blocks_behind_a_cache_are_the_same_forward(oracle: Oracle) -> None:
    errors = oracle.own_errors(PROMPTS[0], tuple(range(20)), torch.float64)
    assert len(errors) == 4 * 20
    assert max(errors) < 1e-12


def test_the_bound_is_above_what_normal_errors_reach() -> None:
    """One in 1e9 of |N(0, 1)| is above 6.1: so many tokens, at the rate that a run may be accused by mistake."""
    for seed in range(20):
        errors = torch.randn(500, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).abs().tolist()
        assert 6.1 < bound_of(errors, 1_000) < 20


def test_the_bound_is_above_what_exponential_errors_reach() -> None:
    """Its quantile is ln(1e9) = 20.7, and the tail of the errors says so, with what it may be mistaken by."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        errors = torch.empty(1_000, dtype=torch.float64).exponential_(generator=generator).tolist()
        assert 20.7 < bound_of(errors, 1_000) < 40


def test_rates_as_plain_decodings_are_no_evidence() -> None:
    """The null's own worst case, 600 runs that look again and again: none reaches the e-value that accuses."""
    generator = torch.Generator().manual_seed(0)
    for rate in (0.01, 0.1, 0.4):
        plain = int(torch.rand(400, generator=generator).lt(rate).sum())
        for _ in range(200):
            left = torch.rand(300, generator=generator).lt(rate).cumsum(0)
            worst = max(rate_evidence([(plain, 400)], [(int(left[num - 1]), num)]) for num in range(20, 301, 20))
            assert worst < -math.log(ALPHA)


def test_errors_half_as_large_again_are_no_evidence() -> None:
    """What other shapes may do to a right engine: a wider normal error at margins of every size."""
    generator = torch.Generator().manual_seed(1)

    def places(scale: float, num: int) -> list[Place]:
        margins = torch.rand(num, generator=generator) * 6
        errors = scale * torch.randn(num, generator=generator)
        pairs = zip(margins.tolist(), errors.tolist(), strict=True)
        return [Place(0, 0, 1, 10.0, margin, margin if error > margin else 0.0) for margin, error in pairs]

    from specbench.regret import ERROR_FACTOR, _rates

    for _ in range(50):
        plain, mode = _rates(places(1.0, 2_000), 1.0 / ERROR_FACTOR), _rates(places(1.5, 2_000), 1.0)
        assert rate_evidence(plain, mode) < -math.log(ALPHA)
    assert rate_evidence(plain, _rates(places(3.0, 2_000), 1.0)) > -math.log(ALPHA)


@pytest.mark.parametrize(
    ("plain", "mode", "is_seen"),
    [
        ((10, 1000), (40, 300), True),
        ((0, 1000), (20, 300), True),
        ((10, 1000), (6, 300), False),
        ((0, 0), (9, 9), False),
    ],
)
def test_rates_above_it_are(plain: tuple[int, int], mode: tuple[int, int], is_seen: bool) -> None:
    assert (rate_evidence([plain], [mode]) >= -math.log(ALPHA)) is is_seen


def test_the_evidence_is_a_ratio_of_likelihoods_by_hand() -> None:
    """None of one plain token, one of one of the mode. Mixture: 1/2 * 1/2. Under the null p (1 - p) is largest at 1/2:
    1/4. The ratio is 1. The other way round the null's best is 1, and the ratio 1/4."""
    assert rate_evidence([(0, 1)], [(1, 1)]) == pytest.approx(0.0, abs=1e-9)
    assert rate_evidence([(1, 1)], [(0, 1)]) == pytest.approx(math.log(0.25), abs=1e-9)


def test_a_place_keeps_what_the_report_says() -> None:
    place = Place(token=3, best=5, second=3, logit=16.5, margin=0.25, regret=0.25)
    from specbench.regret import _told

    assert _told(place, "bf16") == "3, regret 0.25; oracle: 5, then 3, margin 0.25 (2 ulps)"


def test_more_tokens_than_asked_for_are_a_bug(oracle: Oracle) -> None:
    reference, plain = plain_shapes(oracle)
    outputs = [replace(one, max_new_tokens=NUM - 1) for one in reference]
    audit = audit_ties(oracle, plain, outputs, reference)
    assert (audit.verdict, audit.num_wrong) == (BUG, len(PROMPTS))
    assert f"prompt 0 has {NUM} tokens, must have at most {NUM - 1}" in audit.sentence


@pytest.mark.parametrize("token", [-1, 64])
def test_a_token_outside_of_the_vocabulary_is_a_bug_and_no_crash(oracle: Oracle, token: int) -> None:
    reference, plain = plain_shapes(oracle)
    broken = replace(reference[2], tokens=(*reference[2].tokens[:7], token, *reference[2].tokens[8:]))
    audit = audit_ties(oracle, plain, [*reference[:2], broken], reference)
    assert (audit.verdict, audit.sentence) == (BUG, f"prompt 2, token 7: {token}, must be 0 to 63 (the vocabulary)")
    assert len(plain_of(oracle, [*reference, broken], None).places) == len(PROMPTS) * NUM


def test_a_text_that_ends_early_is_told_as_one(oracle: Oracle) -> None:
    reference, plain = plain_shapes(oracle)
    cut = replace(reference[0], tokens=reference[0].tokens[:9], logprobs=())
    worst = min(range(64), key=lambda token: float(oracle.rows(cut.prompt, [*cut.tokens, 0])[-1][token]))
    audit = audit_ties(oracle, plain, [ended(cut, [worst])], reference)
    assert audit.verdict == BUG
    assert f"prompt 0 ended after 9 tokens of {NUM}, as if there stood: {worst}" in audit.sentence
