"""Parameters, seeds and rows of a batch that reach a part of the sampled decoding only, or the wrong part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specbench.cases import LawCase
from specbench.protocols import Coins, Drafter
from specbench.reference.batch import BatchRow, BatchSteps, Draw
from specbench.reference.decoder import Decoder
from specbench.reference.drafters.sampled import SampledDrafter
from specbench.reference.faults.draws import laws_of
from specbench.reference.faults.fault import Fault
from specbench.reference.faults.housing import drafting
from specbench.reference.faults.law import CHAIN, Walk, accepting, fault_of, off_by
from specbench.reference.sampling import probs
from specbench.reference.steps import STEPS
from specbench.reference.target import ReferenceTarget
from specbench.reference.verify import SharedNoise
from specbench.reference.verify.chance import Law
from specbench.reference.verify.laws import normalised, ratio
from specbench.steps import Steps
from specbench.tree import DraftTree
from specbench.types import GREEDY, Generation, Sampling, VerifyResult

PLAIN = Sampling(temperature=1.0)
LITTLE = 0.01  # the temperature that stands for zero

# What the total variations in the records belong to: a drawn draft under parameters that cut its toy's laws.
_ONE = LawCase(vocab_size=3, seed=482, parents=(-1, 0), proposal="iid")
COLD = replace(_ONE, temperature=50)
TOP_K = replace(_ONE, top_k=2)
TOP_P = replace(_ONE, top_p=70)
MIN_P = replace(_ONE, min_p=40)
COLD_TOP_P = replace(_ONE, temperature=50, top_p=70)
TOP_K_TOP_P = replace(_ONE, top_k=2, top_p=50)
TIED = replace(TOP_K, seed=8)


def _warm(sampling: Sampling) -> Sampling:
    return replace(sampling, temperature=1.0)


def _uncut(sampling: Sampling) -> Sampling:
    return replace(sampling, top_k=None, top_p=None, min_p=None)


def _partly(part: str, change: Callable[[Sampling], Sampling]) -> type[Walk]:
    """A walk one of whose laws (`p`, `p_rest`, `p_bonus`) is made by other parameters."""

    class Partly(Walk):
        def __init__(self, tree: DraftTree, target_logits: Tensor, sampling: Sampling, coins: Coins) -> None:
            super().__init__(tree, target_logits, sampling, coins)
            setattr(self, part, self.laws(target_logits, change(sampling)).tolist())

    return Partly


def _by(laws: Callable[[Tensor, Sampling], Tensor]) -> type[Walk]:
    """A walk whose laws all are made that way. laws: logits float [N, V] -> float64 [N, V]."""

    class By(Walk):
        def laws(self, target_logits: Tensor, sampling: Sampling) -> Tensor:
            return laws(target_logits, sampling)

    return By


def _changed(change: Callable[[Sampling], Sampling]) -> type[Walk]:
    return _by(lambda logits, sampling: probs(logits, change(sampling)))


def _top_p_first(at: Callable[[Sampling], Sampling]) -> Callable[[Tensor, Sampling], Tensor]:
    """top_p before all else, over the law that `at` asks for."""

    def laws(logits: Tensor, sampling: Sampling) -> Tensor:
        first = replace(_uncut(at(sampling)), top_p=sampling.top_p)
        cut = logits.double().where(probs(logits, first) > 0, -torch.inf)
        return probs(cut, replace(sampling, top_p=None))

    return laws


def _one_more(sampling: Sampling) -> Sampling:
    return replace(sampling, top_k=sampling.top_k and sampling.top_k + 1)


def _exactly_k(logits: Tensor, sampling: Sampling) -> Tensor:
    k = min(sampling.top_k or logits.shape[-1], logits.shape[-1])
    best = logits.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    kept = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, best, True)
    return probs(logits.where(kept, -torch.inf), replace(sampling, top_k=None))


def _crossing_cut(logits: Tensor, sampling: Sampling) -> Tensor:
    """The token whose probability brings the sum past top_p is dropped too; the first one never is."""
    rows = probs(logits, replace(sampling, top_p=None, min_p=None))
    best = rows.sort(dim=-1, descending=True, stable=True)
    small = best.values.cumsum(dim=-1) <= (sampling.top_p or 1.0) + 1e-12
    small[..., 0] = True
    kept = torch.zeros_like(small).scatter(-1, best.indices, small)
    return probs(logits.where(kept, -torch.inf), replace(sampling, top_p=None))


def _min_p_absolute(logits: Tensor, sampling: Sampling) -> Tensor:
    rows = probs(logits, replace(sampling, min_p=None))
    kept = (rows >= (sampling.min_p or 0.0)) | (rows == rows.amax(dim=-1, keepdim=True))
    return probs(logits.where(kept, -torch.inf), replace(sampling, min_p=None))


def _not_renormalised(logits: Tensor, sampling: Sampling) -> Tensor:
    return probs(logits, _uncut(sampling)) * (probs(logits, sampling) > 0)


def _first_row_only(logits: Tensor, sampling: Sampling) -> Tensor:
    return torch.cat([probs(logits[:1], sampling), probs(logits[1:], PLAIN)])


def _whole_degrees(logits: Tensor, sampling: Sampling) -> Tensor:
    return probs(logits, replace(sampling, temperature=float(int(sampling.temperature))))


class _QTempered(Walk):
    """What q was drawn from already had the temperature."""

    def __init__(self, tree: DraftTree, target_logits: Tensor, sampling: Sampling, coins: Coins) -> None:
        super().__init__(tree, target_logits, sampling, coins)
        self.q = [list(normalised([one ** (1 / sampling.temperature) for one in row])) for row in self.q]


class _QFiltered(Walk):
    """q is cut to what the filters leave of p, though drafts were drawn from all of it."""

    def proposed(self, child: int, q: Law) -> Law:
        law = super().proposed(child, q)
        cut = [draft * (target > 0) for draft, target in zip(law, self.p[self.parent(child)], strict=True)]
        return normalised(cut) if self.q and any(cut) else law


class _ZeroClamped(Decoder):
    """A temperature of zero becomes a small one, and tokens are drawn."""

    def accept(
        self, tree: DraftTree, logits: Tensor, *, sampling: Sampling, coins: Coins | None, root_place: int = 0
    ) -> VerifyResult:
        clamped = replace(sampling, temperature=max(sampling.temperature, LITTLE))
        return super().accept(tree, logits, sampling=clamped, coins=coins or SharedNoise(0), root_place=root_place)


class _SoftAtZero(Decoder):
    """At zero drafts are judged by p at temperature 1, and the argmax is only taken behind them."""

    def accept(
        self, tree: DraftTree, logits: Tensor, *, sampling: Sampling, coins: Coins | None, root_place: int = 0
    ) -> VerifyResult:
        if sampling.temperature:
            return super().accept(tree, logits, sampling=sampling, coins=coins, root_place=root_place)
        kept = _partly("p", lambda greedy: PLAIN)(tree, logits, GREEDY, coins or SharedNoise(0))
        return kept.result()


class _TopPFirst(Decoder):
    def probs(self, logits: Tensor, sampling: Sampling) -> Tensor:
        return _top_p_first(_warm)(logits, sampling) if sampling.temperature else probs(logits, sampling)


class _SeedZero(Decoder):
    def generate(self, prompt: Sequence[int], *, seed: int = 0, **rest: Any) -> Generation:
        return super().generate(prompt, seed=0, **rest)


class _TwiceAsOften(Walk):
    def chance(self, p: float, q: float) -> float:
        return min(1.0, 2.0 * ratio(p, q))


class _RightWhenAsked(Decoder):
    """Whose level 2 is another code path than that of its rounds."""

    def verify(
        self, tree: DraftTree, target_logits: Tensor, *, sampling: Sampling = GREEDY, coins: Coins | None = None
    ) -> VerifyResult:
        if sampling.temperature == 0.0:
            return super().verify(tree, target_logits, sampling=sampling, coins=coins)
        assert coins is not None
        return STEPS.sample(tree, target_logits, sampling=sampling, coins=coins)


class _Replayed:
    """Coins that begin again with the first ones that were ever tossed of them."""

    def __init__(self, coins: Coins, tossed: list[float]) -> None:
        self._coins, self._tossed, self._num = coins, tossed, 0

    def uniform(self, num: int) -> Tensor:
        while len(self._tossed) < self._num + num:
            self._tossed.append(float(self._coins.uniform(1)))
        self._num += num
        return torch.tensor(self._tossed[self._num - num : self._num], dtype=torch.float64)


def _own_generator(steps: Steps) -> Steps:
    own = SharedNoise(0)

    def sample(tree: DraftTree, target_logits: Tensor, **rest: Any) -> VerifyResult:
        return steps.sample(tree, target_logits, **{**rest, "coins": own})

    return replace(steps, sample=sample)


def _each_round_again(steps: Steps) -> Steps:
    held: list[Coins] = []
    tossed: list[float] = []

    def sample(tree: DraftTree, target_logits: Tensor, *, coins: Coins, **rest: Any) -> VerifyResult:
        if not held or held[0] is not coins:
            held[:], tossed[:] = [coins], []
        return steps.sample(tree, target_logits, coins=_Replayed(coins, tossed), **rest)

    return replace(steps, sample=sample)


def _drafters_coins(steps: Steps) -> Steps:
    """The verifier begins with the very coins that drew the drafts."""
    tossed: list[float] = []

    def draft(drafter: Drafter, context: list[int], *, coins: Coins, **rest: Any) -> DraftTree:
        tossed.clear()
        return steps.draft(drafter, context, coins=_Replayed(coins, tossed), **rest)

    def sample(tree: DraftTree, target_logits: Tensor, *, coins: Coins, **rest: Any) -> VerifyResult:
        spent = list(tossed)
        tossed.clear()
        return steps.sample(tree, target_logits, coins=_Replayed(coins, spent), **rest)

    return replace(steps, draft=draft, sample=sample)


def _coins_for_all_rows(steps: BatchSteps) -> BatchSteps:
    def sample(
        draws: Sequence[Draw], trees: Sequence[DraftTree], flat_logits: Tensor, cu_nodes: Sequence[int]
    ) -> list[VerifyResult]:
        tossed: list[float] = []
        first = draws[0].coins
        assert first is not None
        return steps.sample(
            [replace(one, coins=_Replayed(first, tossed)) for one in draws], trees, flat_logits, cu_nodes
        )

    return replace(steps, sample=sample)


def _seed_of_row_zero(steps: BatchSteps) -> BatchSteps:
    def join(active: list[BatchRow], joining: list[BatchRow]) -> list[BatchRow]:
        for row in joining:
            row.coins = SharedNoise([*active, *joining][0].request.seed)
        return steps.join(active, joining)

    return replace(steps, join=join)


def _neighbours_parameters(steps: BatchSteps) -> BatchSteps:
    def sample(
        draws: Sequence[Draw], trees: Sequence[DraftTree], flat_logits: Tensor, cu_nodes: Sequence[int]
    ) -> list[VerifyResult]:
        shifted = [*draws[1:], draws[0]]
        moved = [replace(one, sampling=other.sampling) for one, other in zip(draws, shifted, strict=True)]
        return steps.sample(moved, trees, flat_logits, cu_nodes)

    return replace(steps, sample=sample)


def _rows_from_the_first(steps: BatchSteps) -> BatchSteps:
    def sample(
        draws: Sequence[Draw], trees: Sequence[DraftTree], flat_logits: Tensor, cu_nodes: Sequence[int]
    ) -> list[VerifyResult]:
        return [draw(tree, flat_logits[: tree.num_nodes]) for draw, tree in zip(draws, trees, strict=True)]

    return replace(steps, sample=sample)


def _to_the_shortest(steps: BatchSteps) -> BatchSteps:
    """All rows keep as many drafts as the shortest; those that lose some have their next token drawn anew."""

    def sample(
        draws: Sequence[Draw], trees: Sequence[DraftTree], flat_logits: Tensor, cu_nodes: Sequence[int]
    ) -> list[VerifyResult]:
        results = steps.sample(draws, trees, flat_logits, cu_nodes)
        least = min(len(one.path) for one in results)
        cut: list[VerifyResult] = []
        for draw, one, start in zip(draws, results, cu_nodes, strict=False):
            path = one.path[:least]
            if len(one.path) > least:
                root = DraftTree.of([0], [-1])
                one = replace(one, bonus_token=draw(root, flat_logits[[start + (path or (0,))[-1]]]).bonus_token)
            cut.append(VerifyResult(path, one.bonus_token))
        return cut

    return replace(steps, sample=sample)


class _Sorted(SampledDrafter):
    """Draws without replacement and hands siblings on by falling probability."""

    def _draws(self, q: Tensor, num: int, coins: Coins) -> list[int]:
        return sorted(super()._draws(q, num, coins), key=lambda token: -float(q[token]))


class _Smoothed(SampledDrafter):
    def draft(self, context: list[int], **keywords: Any) -> DraftTree:
        tree = super().draft(context, **keywords)
        rows = laws_of(tree) + 0.02
        return replace(tree, draft_probs=rows / rows.sum(dim=-1, keepdim=True))


_ONE_SIDE, _ROWS, _RNG = "sampling-params-one-side", "batch-cross-talk", "rng/seed"
_WARM = "a temperature other than 1"


def _params(kind: type[Walk], name: str, sentence: str, needs: str, **more: Any) -> Fault:
    return fault_of(kind, name, _ONE_SIDE, sentence, needs, "law.params", subtle=needs, **more)


def _batch(plant: Callable[[BatchSteps], BatchSteps]) -> Callable[[], ReferenceTarget]:
    return lambda: ReferenceTarget(plant_batch=plant)


def _decoder(kind: type[Decoder]) -> Callable[[], ReferenceTarget]:
    return lambda: ReferenceTarget(decoder=kind)


FAULTS = (
    _params(
        *(_partly("p", _warm), "temperature_not_on_acceptance"),
        "drafts are judged at temperature 1, corrections and bonus are drawn at the one asked for",
        _WARM,
        **off_by(0.0929293, COLD),
    ),
    _params(
        *(_partly("p_rest", _warm), "temperature_not_on_residual"),
        "the residual is taken at temperature 1, drafts are judged at the one asked for",
        _WARM,
        **off_by(0.0266667, COLD),
    ),
    _params(
        *(_partly("p_bonus", _warm), "temperature_not_on_bonus"),
        "the bonus token is drawn at temperature 1",
        _WARM,
        **off_by(0.0872480, COLD),
    ),
    _params(
        *(_partly("p", lambda one: replace(one, top_k=None)), "top_k_not_on_acceptance"),
        "drafts are judged without top_k, corrections and bonus are drawn with it",
        "top_k that cuts",
        **off_by(0.1818182, TOP_K),
    ),
    _params(
        *(_partly("p_rest", lambda one: replace(one, top_p=None)), "top_p_not_on_residual"),
        "the residual is taken without top_p",
        "top_p that cuts",
        **off_by(0.0444444, TOP_P),
    ),
    _params(
        *(_partly("p", lambda one: replace(one, min_p=None)), "min_p_not_on_acceptance"),
        "drafts are judged without min_p",
        "min_p that cuts",
        **off_by(0.1818182, MIN_P),
    ),
    _params(
        *(_partly("p_bonus", _uncut), "filters_not_on_bonus"),
        "the bonus token is drawn without top_k, top_p and min_p",
        "a filter that cuts",
        **off_by(0.0974026, TOP_K),
    ),
    _params(
        *(_by(_first_row_only), "parameters_on_first_row"),
        "the sampling parameters are applied to the root's row, and to none of the drafts'",
        "parameters, and an accepted draft",
        **off_by(0.0974026, TOP_K),
    ),
    _params(
        *(_by(_top_p_first(_warm)), "top_p_before_temperature"),
        "top_p is cut before the temperature is applied",
        "top_p and a temperature other than 1",
        kin="filters in another order",
        **off_by(0.0600000, COLD_TOP_P),
    ),
    _params(
        *(_by(_top_p_first(lambda one: one)), "top_p_before_top_k"),
        "top_p is cut before top_k, over the whole law",
        "top_k and top_p that cut",
        kin="filters in another order",
        **off_by(0.5353535, TOP_K_TOP_P),
    ),
    _params(
        *(_changed(_one_more), "top_k_one_more"),
        "one token more is kept than top_k says",
        "top_k that cuts",
        **off_by(0.2792208, TOP_K),
    ),
    _params(
        *(_by(_exactly_k), "top_k_without_ties"),
        "what ties with the k-th largest is dropped",
        "a tie at top_k",
        **off_by(0.3333333, TIED),
    ),
    _params(
        *(_by(_crossing_cut), "top_p_below"),
        "the token that brings the sum to top_p is dropped",
        "top_p that cuts",
        **off_by(0.4444444, TOP_P),
    ),
    _params(
        *(_by(_min_p_absolute), "min_p_absolute"),
        "min_p is a least probability, not a share of the largest one",
        "min_p that cuts",
        **off_by(0.4444444, MIN_P),
    ),
    _params(
        *(_changed(lambda one: replace(one, temperature=one.temperature**2)), "temperature_twice"),
        "logits are divided by the temperature twice",
        _WARM,
        kin="another temperature",
        **off_by(0.1455095, COLD),
    ),
    _params(
        *(_changed(lambda one: replace(one, temperature=1 / one.temperature)), "temperature_multiplied"),
        "logits are multiplied by the temperature",
        _WARM,
        kin="another temperature",
        **off_by(0.2577824, COLD),
    ),
    _params(
        *(_by(_not_renormalised), "filtered_not_renormalised"),
        "what the filters leave of p is not made a law again before drafts are judged by it",
        "a filter that cuts",
        **off_by(0.0444444, TOP_K),
    ),
    fault_of(
        *(_QTempered, "temperature_on_q_again", "q-not-matching"),
        "the verifier applies the temperature to draft_probs, which name what drafts were drawn from",
        *("a drawn draft at a temperature other than 1", "law.params"),
        subtle=_WARM,
        **off_by(0.0346667, COLD),
    ),
    fault_of(
        *(_QFiltered, "filters_on_q", "q-not-matching"),
        "the verifier cuts draft_probs to what the filters leave of p, though drafts were drawn from all of q",
        *("a drawn draft, and a filter that cuts", "law.params"),
        subtle="a filter that cuts",
        **off_by(0.2222222, TOP_K),
    ),
    fault_of(
        *(_by(_whole_degrees), "temperature_of_whole_degrees", "greedy-vs-sampling"),
        "the temperature is read as a whole number: below 1 rows are greedy",
        *("a temperature below 1", "law.params"),
        subtle="a temperature below 1",
        **off_by(0.4444444, COLD),
    ),
    fault_of(
        *(_by(lambda logits, sampling: probs(logits, sampling).bfloat16().double()), "p_in_half", "dtype/precision"),
        "p is kept in bf16 and does not sum to one",
        "any draft",
        subtle="a total variation below what samples show",
        **off_by(0.0004325, CHAIN),
    ),
    fault_of(
        *(_by(lambda logits, sampling: probs(logits.clamp(min=-10.0), sampling)), "logits_clamped", "dtype/precision"),
        "logits are clamped to at least -10, so that forbidden tokens have a little probability",
        "a token of probability zero",
        subtle="a total variation below what samples show",
        **off_by(0.0000297, CHAIN),
    ),
    Fault(
        "zero_temperature_clamped",
        "greedy-vs-sampling",
        "a temperature of zero becomes a hundredth, and tokens are drawn",
        "a near tie",
        "greedy.temperature_zero",
        target=_decoder(_ZeroClamped),
        subtle="a coin just below 1",
    ),
    Fault(
        "soft_acceptance_at_zero",
        "greedy-vs-sampling",
        "at temperature zero drafts are judged by the soft p, and only what follows them is the argmax",
        "a draft that is not the argmax",
        "greedy.temperature_zero",
        target=_decoder(_SoftAtZero),
    ),
    Fault(
        "sampler_top_p_first",
        "sampling-params-one-side",
        "the sampler cuts top_p before it applies the temperature",
        "top_p and a temperature other than 1",
        "sampler.law",
        target=_decoder(_TopPFirst),
        subtle="top_p and a temperature other than 1",
    ),
    Fault(
        "seed_ignored",
        _RNG,
        "every generation is made with seed 0",
        "two seeds",
        "law.seed",
        target=_decoder(_SeedZero),
        origin="vllm-project/vllm#6034",
    ),
    Fault(
        "verifier_own_generator",
        _RNG,
        "the verifier draws from a generator of its own, which the seed does not reach",
        "the same seed twice",
        "law.seed",
        _own_generator,
        subtle="a second generation",
    ),
    Fault(
        "rounds_keep_twice_p",
        "accept-rule/residual-wrong",
        "rounds keep a draft with probability 2 p/q; the verifier that can be asked alone is another one, and right",
        "a whole generation",
        "law.accepted",
        target=lambda: ReferenceTarget(accepting(_TwiceAsOften), decoder=_RightWhenAsked),
        subtle="a whole generation; each part alone is right",
    ),
    Fault(
        "coins_each_round_again",
        _RNG,
        "every round is decided by the coins of the first one",
        "a second round",
        "law.joint",
        _each_round_again,
        subtle="the law of two rounds together",
    ),
    Fault(
        "drafters_coins_again",
        _RNG,
        "drafts are judged by the coins that drew them",
        "a drafter that draws",
        "law.joint",
        _drafters_coins,
        subtle="a drafter that draws",
    ),
    Fault(
        "coins_for_all_rows",
        _RNG,
        "in every round all rows of a batch are decided by the first one's coins",
        "two rows",
        "law.rows",
        target=_batch(_coins_for_all_rows),
        subtle="two rows together; each has the right law",
        kin="rows share their coins",
    ),
    Fault(
        "seed_of_row_zero",
        _RNG,
        "the rows of a batch have the seed of the first one",
        "two rows with seeds of their own",
        "law.rows",
        target=_batch(_seed_of_row_zero),
        subtle="two rows together; each has the right law",
        kin="rows share their coins",
    ),
    Fault(
        "neighbours_parameters",
        _ROWS,
        "a row is sampled with the parameters of the next one",
        "two rows with different parameters",
        "law.rows",
        target=_batch(_neighbours_parameters),
        subtle="two rows with different parameters",
    ),
    Fault(
        "sampled_by_first_rows_logits",
        _ROWS,
        "every row is sampled by the logits that begin the flattened batch",
        "two rows with different texts",
        "law.rows",
        target=_batch(_rows_from_the_first),
    ),
    Fault(
        "sampled_to_the_shortest",
        "batch-raggedness",
        "all rows keep as many drafts as the shortest one; those that lose some have their next token drawn anew",
        "two rows with unlike accept counts",
        "law.exact",
        target=_batch(_to_the_shortest),
        subtle="unlike accept counts; greedy rows stay right",
    ),
    Fault(
        "siblings_sorted",
        "q-not-matching",
        "siblings that were drawn without replacement are handed on by falling probability",
        "two siblings drawn without replacement",
        "law.q",
        target=drafting(lambda model: _Sorted(model, proposal="without_replacement")),
        subtle="two siblings",
    ),
    Fault(
        "q_smoothed",
        "q-not-matching",
        "a little is added to every entry of draft_probs, so that nothing divides by zero",
        "any drawn draft",
        "law.q",
        target=drafting(_Smoothed),
    ),
)
