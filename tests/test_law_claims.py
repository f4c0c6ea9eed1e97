"""Claims about laws: the reference holds, and one wrong target for each says the sentence that it should."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from sessions import session_on
from torch import Tensor

from specbench import claims
from specbench.cases import Case, DrafterCase, LawCase, SampledCase
from specbench.checks import CHECKS, accepted, sampled
from specbench.checks.law import completed
from specbench.judge import Skipped
from specbench.law.sequential import joint_cells
from specbench.protocols import Coins
from specbench.record import ClaimRecord
from specbench.reference.decoder import Decoder
from specbench.reference.drafters.sampled import SampledDrafter
from specbench.reference.faults.bank import FAULTS
from specbench.reference.faults.law import Walk, accepting
from specbench.reference.model import LlamaConfig, tiny_llama
from specbench.reference.sampling import probs
from specbench.reference.sampling import sample as drawn_from
from specbench.reference.target import ReferenceTarget
from specbench.reference.verify import CoinChance, SharedNoise, rule_for
from specbench.reference.verify.chance import inverse_cdf
from specbench.subjects import NotTested, Subject
from specbench.tree import DraftTree
from specbench.types import GREEDY, Generation, Request, Sampling, VerifyResult

# Over two tokens (model 5) with a law that is nearly even; over 31 tokens (model 0) in rows.
TEXTS = SampledCase(model=5, max_new_tokens=6, temperature=400, drafter="drawn")
ROWS = SampledCase(max_new_tokens=3, temperature=100, top_k=4, num_rows=3, drafter="drawn")
SEEDS = SampledCase(max_new_tokens=8, drafter="drawn")
KEPT = SampledCase(max_new_tokens=12, drafter="drawn")
OWN = DrafterCase(model=5, prompt=(0, 1), max_nodes=2, max_depth=2, temperature=100, drafter="faulty")
CHAIN = LawCase(vocab_size=3, parents=(-1, 0, 1), seed=4)


class _Verifying(Decoder):
    """Accepts by the usual rules with its own way of deciding."""

    chance: type[CoinChance] = CoinChance

    def verify(
        self, tree: DraftTree, target_logits: Tensor, *, sampling: Sampling = GREEDY, coins: Coins | None = None
    ) -> VerifyResult:
        assert coins is not None
        if sampling.temperature == 0.0:
            return super().verify(tree, target_logits, sampling=sampling)
        q = None if tree.draft_probs is None else tree.draft_probs.tolist()
        return rule_for(tree).verify(tree, probs(target_logits, sampling).tolist(), q, self.chance(coins))


class _AtMost(CoinChance):
    def accept(self, probability: Any) -> bool:
        return float(self._coins.uniform(1)) <= probability


class _Generous(CoinChance):
    def accept(self, probability: Any) -> bool:
        return super().accept(1.5 * probability)


class AcceptsAtCoinZero(_Verifying):
    chance = _AtMost


class AcceptsTooMany(_Verifying):
    chance = _Generous


class ResamplesFromP(_Verifying):
    def verify(self, tree: DraftTree, target_logits: Tensor, **asked: Any) -> VerifyResult:
        result = super().verify(tree, target_logits, **asked)
        last = result.path[-1] if result.path else 0
        p = probs(target_logits, asked["sampling"])[last].tolist()
        return replace(result, bonus_token=inverse_cdf(p, float(asked["coins"].uniform(1))))


class DrawsAtTemperatureZero(Decoder):
    def verify(
        self, tree: DraftTree, target_logits: Tensor, *, sampling: Sampling = GREEDY, coins: Coins | None = None
    ) -> VerifyResult:
        return super().verify(tree, target_logits, sampling=Sampling(temperature=1.0), coins=coins)


class OwnRandomness(Decoder):
    def verify(
        self, tree: DraftTree, target_logits: Tensor, *, sampling: Sampling = GREEDY, coins: Coins | None = None
    ) -> VerifyResult:
        self.number = getattr(self, "number", 0) + 1
        return super().verify(tree, target_logits, sampling=sampling, coins=SharedNoise(self.number))


class AlwaysGreedy(Decoder):
    def accept(self, tree: DraftTree, logits: Tensor, **asked: Any) -> VerifyResult:
        return self.steps.walk(tree, logits)


class CoinsAnewEachRound(Decoder):
    def accept(self, tree: DraftTree, logits: Tensor, **asked: Any) -> VerifyResult:
        return super().accept(tree, logits, **{**asked, "coins": SharedNoise(asked["coins"]._seed)})


class SeedOfItsOwn(Decoder):
    """numbers: the seeds that it takes instead of the request's, one after the other."""

    numbers: Any = itertools.repeat(0)

    def generate(self, prompt: Sequence[int], **asked: Any) -> Generation:
        return super().generate(prompt, **{**asked, "seed": next(self.numbers)})


class AnotherSeedEachTime(SeedOfItsOwn):
    numbers = itertools.count()


class OneSeedForAllRows(Decoder):
    def _generate_batch(self, requests: Sequence[Request], **asked: Any) -> list[Generation]:
        return super()._generate_batch([replace(one, seed=requests[0].seed) for one in requests], **asked)


class FirstRowsTemperature(Decoder):
    def _generate_batch(self, requests: Sequence[Request], **asked: Any) -> list[Generation]:
        return super()._generate_batch([replace(one, sampling=requests[0].sampling) for one in requests], **asked)


class ParentsRow(SampledDrafter):
    """q of a node is handed on as that of its children."""

    def draft(self, context: list[int], **asked: Any) -> DraftTree:
        tree = super().draft(context, **asked)
        assert tree.draft_probs is not None
        return replace(tree, draft_probs=tree.draft_probs[[max(parent, 0) for parent in tree.parent_list]])


class NucleusFirst:
    """A sampler that cuts by top_p before it applies the temperature."""

    vocab_size = 4

    def probs(self, logits: Tensor, sampling: Sampling) -> Tensor:
        cut = probs(logits, Sampling(temperature=1.0, top_p=sampling.top_p)) > 0
        return probs(logits.where(cut, -torch.inf), replace(sampling, top_p=None))

    def sample(self, law: Tensor, coins: Coins) -> int:
        return drawn_from(law, coins)


class NearBeforeNucleus(NucleusFirst):
    """A sampler that cuts by min_p before top_p."""

    def probs(self, logits: Tensor, sampling: Sampling) -> Tensor:
        cut = probs(logits, replace(sampling, top_p=None)) > 0
        return probs(logits.where(cut, -torch.inf), replace(sampling, min_p=None))


class StrictSums(NucleusFirst):
    """A sampler that looks for the first cumulative sum at or above the uniform: a uniform of 0 draws token 0."""

    def probs(self, logits: Tensor, sampling: Sampling) -> Tensor:
        return probs(logits, sampling)

    def sample(self, law: Tensor, coins: Coins) -> int:
        return int((law.cumsum(0) < float(coins.uniform(1))).sum().clamp(max=len(law) - 1))


class BeyondTheColumns(Decoder):
    def verify(self, tree: DraftTree, target_logits: Tensor, **keywords: Any) -> VerifyResult:
        return VerifyResult((), 99)


def check(claim: str, target: Any, case: Case) -> ClaimRecord:
    """A claim on one case, in the first column of a target."""
    subject = next(iter(session_on(target).subjects.values()))
    assert isinstance(subject, Subject)
    record = ClaimRecord(claim, subject.name)
    CHECKS[claim](subject, case, record)
    return record


HOLDS: dict[str, Case] = {
    "greedy.temperature_zero": CHAIN,
    "law.exact": CHAIN,
    "law.params": replace(CHAIN, temperature=70, top_k=2, top_p=80, min_p=10),
    "law.support": CHAIN,
    "law.acceptance_bound": CHAIN,
    "law.joint": TEXTS,
    "law.rows": ROWS,
    "law.accepted": KEPT,
    "law.seed": SEEDS,
    "law.q": replace(OWN, drafter="sampled_iid"),
}


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled, "NUM_TEXTS", 200)
    monkeypatch.setattr(sampled, "NUM_BATCHES", 100)
    monkeypatch.setattr(accepted, "NUM_TEXTS", 60)


@pytest.mark.parametrize("claim", HOLDS)
@pytest.mark.usefixtures("few_draws")
def test_the_reference_holds(claim: str) -> None:
    check(claim, ReferenceTarget(), HOLDS[claim])


def _sampler() -> Any:
    class Right(NucleusFirst):
        def probs(self, logits: Tensor, sampling: Sampling) -> Tensor:
            return probs(logits, sampling)

    return Right()


class RacingSampler:
    """A coin for every token: too many to go through. The law is right."""

    vocab_size = 4
    lead = 1.0

    def probs(self, logits: Tensor, sampling: Sampling) -> Tensor:
        return probs(logits, sampling)

    def sample(self, law: Tensor, coins: Coins) -> int:
        times = -torch.log1p(-coins.uniform(len(law))) / law
        times[0] /= self.lead
        return int(torch.where(law > 0, times, torch.inf).argmin())


class HastySampler(RacingSampler):
    """Token 0 runs twice as fast."""

    lead = 2.0


class ShyNucleus(RacingSampler):
    """The token that crosses top_p is dropped."""

    def probs(self, logits: Tensor, sampling: Sampling) -> Tensor:
        law, cut = probs(logits, sampling), probs(logits, sampling)
        if sampling.top_p is not None and int((law > 0).sum()) > 1:
            cut[int(torch.where(law > 0, law, torch.inf).argmin())] = 0.0
        return cut / cut.sum()


def test_a_sampler_that_races_is_judged_by_its_draws() -> None:
    case = replace(HOLDS["law.params"], vocab_size=4)
    record = check("sampler.law", RacingSampler(), case)
    assert any("draws of each law were judged instead" in one for one in record.remarks)
    with pytest.raises(claims.SamplerMismatch, match="does not draw from its law"):
        check("sampler.law", HastySampler(), LawCase(vocab_size=4))
    with pytest.raises(claims.SamplerMismatch, match=r"probs\(\) gives token"):
        check("sampler.law", ShyNucleus(), LawCase(vocab_size=4, top_p=80))


def test_a_sampler_alone_is_judged() -> None:
    check("sampler.law", _sampler(), replace(HOLDS["law.params"], vocab_size=4))


WRONG: dict[str, tuple[str, Any, Case, type[claims.Violation], str]] = {
    "always greedy": (
        *("law.joint", ReferenceTarget(decoder=AlwaysGreedy), TEXTS, claims.JointLawMismatch),
        "40 sampled texts of 6 tokens do not follow the joint law of the target",
    ),
    "coins anew each round": (
        *("law.joint", ReferenceTarget(decoder=CoinsAnewEachRound), TEXTS, claims.JointLawMismatch),
        "sampled texts of 6 tokens do not follow the joint law of the target",
    ),
    "seed ignored in every text": (
        *("law.joint", ReferenceTarget(decoder=SeedOfItsOwn), TEXTS, claims.JointLawMismatch),
        "20 sampled texts of 6 tokens do not follow the joint law of the target",
    ),
    "seed ignored": (
        *("law.seed", ReferenceTarget(decoder=SeedOfItsOwn), SEEDS, claims.SeedIgnored),
        "16 other seeds give the text of seed 0: by chance with probability",
    ),
    "another seed each time": (
        *("law.seed", ReferenceTarget(decoder=AnotherSeedEachTime), SEEDS, claims.SeedIgnored),
        "seed 0, asked again, gives another text",
    ),
    "rows share coins": (
        *("law.rows", ReferenceTarget(decoder=OneSeedForAllRows), ROWS, claims.RowsDepend),
        "rows 0 and 1 of 3 depend on each other over",
    ),
    "rows share parameters": (
        *("law.rows", ReferenceTarget(decoder=FirstRowsTemperature), replace(ROWS, top_k=0), claims.RowsDepend),
        "row 2 of 3 does not follow the law of its own prompt over",
    ),
    "q of the wrong row": (
        *("law.q", ReferenceTarget(drafters={"faulty": lambda model: ParentsRow(model, widths=(1, 1))}), OWN),
        claims.DraftedLawMismatch,
        "drafts of 'faulty', judged by the target's own verifier at temperature 1: the law of 3 tokens is off by a "
        "total variation of",
    ),
    "resamples from p": (
        *("law.exact", ReferenceTarget(decoder=ResamplesFromP), CHAIN, claims.LawMismatch),
        "iid drafts: the law of 3 tokens is off by a total variation of",
    ),
    "resamples from p under parameters": (
        *("law.params", ReferenceTarget(decoder=ResamplesFromP), HOLDS["law.params"], claims.LawUnderParameters),
        "iid drafts: the law of 3 tokens is off by a total variation of",
    ),
    "accepts at coin 0": (
        *("law.support", ReferenceTarget(decoder=AcceptsAtCoinZero), CHAIN, claims.ImpossibleToken),
        r"where the target gives it no probability \(coins 0\)",
    ),
    "accepts too many": (
        *("law.acceptance_bound", ReferenceTarget(decoder=AcceptsTooMany), CHAIN, claims.BoundExceeded),
        "drafts a round, more than any lossless rule can",
    ),
    "rounds accept too many": (
        *("law.accepted", FAULTS["rounds_keep_twice_p"].make(), KEPT, claims.KeepsTooMany),
        "rounds with one draft keep a draft behind the root, more than any lossless rule can",
    ),
    "draws at temperature 0": (
        *("greedy.temperature_zero", ReferenceTarget(decoder=DrawsAtTemperatureZero), CHAIN, claims.TemperatureZero),
        "at temperature 0 token . follows node 0, whose argmax is",
    ),
    "min_p before the nucleus": (
        *("sampler.law", NearBeforeNucleus(), LawCase(vocab_size=4, top_p=62, min_p=50), claims.SamplerMismatch),
        r"probs\(\) gives token . .*, which is not what the sampling parameters ask for",
    ),
    "a uniform of 0 draws token 0": (
        *("sampler.law", StrictSums(), LawCase(vocab_size=4), claims.SamplerMismatch),
        r"sample\(\) draws token 0 of no probability \(coin 0\)",
    ),
    "a token beyond the columns": (
        *("law.exact", ReferenceTarget(decoder=BeyondTheColumns), CHAIN, claims.Misbehaviour),
        r"verify\(\) must return a bonus_token < 3 \(columns of target_logits\), got 99",
    ),
    "nucleus before temperature": (
        *("sampler.law", NucleusFirst(), LawCase(vocab_size=4, seed=2, temperature=200, top_p=60)),
        claims.SamplerMismatch,
        r"probs\(\) gives token . .*, which is not what the sampling parameters ask for",
    ),
}


class DraftsTwice(Decoder):
    """Asks its drafter again before each round, which is its own affair."""

    def draft_round(self, context: list[int], **asked: Any) -> DraftTree:
        super().draft_round(context, **asked)
        return super().draft_round(context, **asked)


@pytest.mark.usefixtures("few_draws")
def test_rounds_that_cannot_be_told_apart_are_not_bet_on() -> None:
    """Not even those that can: a right target would be accused where what is left has been chosen."""
    with pytest.raises(NotTested, match=r"it was given .* drafts and reports .* rounds with drafts"):
        check("law.accepted", ReferenceTarget(decoder=DraftsTwice), KEPT)


@pytest.mark.usefixtures("few_draws")
def test_what_is_kept_and_what_could_be_is_told_on_a_pass() -> None:
    record = check("law.accepted", ReferenceTarget(), KEPT)
    assert re.search(r"rounds keep a first draft, at most [\d.]+ % can be; [\d.]+ % more would", record.remarks[0])
    assert not any("speed is lost" in one for one in record.remarks)


class OwnDrafts(Decoder):
    """Prefers a draft of its own, from the target's law itself, and verifies it rightly."""

    def draft_round(self, context: list[int], **asked: Any) -> DraftTree:
        given = super().draft_round(context, **asked)
        if not given.num_drafts:
            return given
        q = probs(self.model.logits(context)[-1], asked["sampling"])
        token = inverse_cdf(q.tolist(), float(asked["coins"].uniform(1)))
        return DraftTree(
            torch.tensor([context[-1], token]),
            torch.tensor([-1, 0]),
            draft_probs=torch.stack([q, torch.zeros_like(q)]),
            proposal="iid",
        )


@pytest.mark.usefixtures("few_draws")
def test_drafts_of_its_own_are_not_bet_on() -> None:
    with pytest.raises(NotTested, match="verify what it gets and no other draft"):
        check("law.accepted", ReferenceTarget(decoder=OwnDrafts), KEPT)


class FirstOfTwo(Walk):
    """Keeps the first of two siblings always, and judges single drafts rightly."""

    def keeps(self, child: int, p: Any, q: Any) -> bool:
        return (len(self.tree.children(0)) == 2 and child == 1) or super().keeps(child, p, q)


def test_siblings_are_bet_on_apart() -> None:
    with pytest.raises(claims.KeepsTooMany, match="rounds with siblings keep a draft behind the root"):
        check("law.accepted", ReferenceTarget(accepting(FirstOfTwo)), KEPT)


@pytest.mark.parametrize("name", ["block", "traversal", "k_seq", "chain"])
def test_a_round_without_drafts_suits_every_rule(name: str) -> None:
    """The last round of a text has none, where nothing is left to draft for."""
    config = LlamaConfig(31, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
    decoder = Decoder(tiny_llama(config, seed=0), None).with_rule(name)
    generation = decoder.generate([0, 1], max_new_tokens=4, sampling=Sampling(temperature=1.0), seed=1)
    assert len(generation.tokens) == 4


class KeepsTooFew(Walk):
    def chance(self, p: float, q: float) -> float:
        return super().chance(p, q) / 2


@pytest.mark.usefixtures("few_draws")
def test_drafts_that_a_rule_leaves_lying_are_told_as_lost_speed() -> None:
    record = check("law.accepted", ReferenceTarget(accepting(KeepsTooFew)), KEPT)
    assert any(one.endswith("could be: speed is lost") for one in record.remarks)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_target_is_told_in_one_sentence(name: str) -> None:
    claim, target, case, violation, sentence = WRONG[name]
    with pytest.raises(violation, match=sentence):
        check(claim, target, case)


def test_a_verifier_of_chosen_drafts_is_asked_no_other() -> None:
    class OnlyChosen(ReferenceTarget):
        proposals = ("deterministic",)

        def build(self, model: Any, drafter: Any, **keywords: Any) -> Decoder:
            return _Noting(model, drafter)

    class _Noting(Decoder):
        seen: ClassVar[set[str]] = set()

        def verify(self, tree: DraftTree, target_logits: Tensor, **asked: Any) -> VerifyResult:
            self.seen.add(tree.proposal)
            return super().verify(tree, target_logits, **asked)

    session_on(OnlyChosen()).judge("law.support", "tiny-fp64")
    assert _Noting.seen == {"deterministic"}


def test_a_law_that_cannot_be_found_is_not_tested() -> None:
    with pytest.raises(Skipped, match="the law of this target cannot be found by going through its coins: it answers"):
        session_on(ReferenceTarget(decoder=OwnRandomness)).judge("law.exact", "tiny-fp64")


def test_own_drafts_are_not_tested_over_a_large_vocabulary() -> None:
    with pytest.raises(Skipped, match="over a vocabulary of two tokens"):
        session_on(ReferenceTarget()).judge("law.q", "tiny-fp64", only=replace(OWN, model=0, drafter="sampled_iid"))


class Halves:
    """A model whose next token is 0 or 1 after a 0, each as likely, and 1 alone after a 1."""

    def causal(self, tokens: Tensor) -> Tensor:
        rows = torch.tensor([[0.0, 0.0], [-torch.inf, 0.0]], dtype=torch.float64)
        return rows[tokens]


def test_the_law_of_texts_is_the_product_along_each() -> None:
    texts = sampled.text_law(Halves(), (0,), Sampling(temperature=1.0), 2)  # type: ignore[arg-type]
    assert {one.tokens: one.mass for one in texts} == {(0, 0): 0.25, (0, 1): 0.25, (1, 1): 0.5}


def test_places_lie_in_the_middle_of_a_tokens_stretch() -> None:
    texts = sampled.text_law(Halves(), (0,), Sampling(temperature=1.0), 2)  # type: ignore[arg-type]
    assert [one.places for one in texts] == [(0.25, 0.25), (0.25, 0.75), (0.75, 0.5)]


def test_a_text_without_probability_has_a_cell_without_probability() -> None:
    texts = sampled.text_law(Halves(), (0,), Sampling(temperature=1.0), 2)  # type: ignore[arg-type]
    (cells,) = sampled.partitions_of(texts)
    assert cells.law[cells.cell((1, 0))] == 0.0


def test_a_round_is_completed_by_what_p_goes_on_with() -> None:
    rows = {(): [0.5, 0.5], (0,): [0.5, 0.5], (1,): [0.0, 1.0]}
    law = completed({(0,): 0.4, (1, 1): 0.5, (1, 0): 0.1}, rows.__getitem__, 2)
    assert law == {(1, 0): 0.1, (0, 0): 0.2, (0, 1): 0.2, (1, 1): 0.5}
    assert completed({(): 1.0}, rows.__getitem__, 2) == {(0, 0): 0.25, (0, 1): 0.25, (1, 1): 0.5}


def test_coins_used_twice_fall_into_few_cells() -> None:
    """One coin for four tokens of eight that are equally likely: all in the lower half, or all in the upper one."""
    law = [sampled.Text((one,) * 4, 1 / 8, ((one + 0.5) / 8,) * 4) for one in range(8)]
    cells = sampled.by_places(law)
    assert {cells.cell(one.tokens) for one in law} == {joint_cells([half] * 4, [2] * 4) for half in (0, 1)}
