"""Claims about the law of one round, exact: every draft, every coin, and what the target's verifier makes of them.

Toy models give p and q, so that no model is needed and a verifier sees zeros, equal laws and disjoint supports in every
run. A verifier is asked with coins of our choosing; its law is found by going through all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from specbench import claims
from specbench.cases import Case, LawCase, SampledCase
from specbench.claims import Facts, Misbehaviour, Violation
from specbench.law.joint import draft_law, round_law, total_variation
from specbench.law.optimum import best_by_paths
from specbench.law.scripted import CannotTell, law_of
from specbench.law.sequential import LawTest
from specbench.law.toys import START, Drafted, Toy
from specbench.own_bank import OwnBank
from specbench.probe import Probe
from specbench.protocols import Coins, SeededCoins
from specbench.record import ClaimRecord
from specbench.reference.sampling import probs
from specbench.reference.verify import argmax_lowest, rule_for
from specbench.subjects import NotTested, Subject
from specbench.tree import DraftTree
from specbench.types import GREEDY, Sampling, VerifyResult

TOLERANCE = 1e-6  # of a total variation: what a verifier in float32 does to a law, and no fault
GRID = 32  # looks at a coin before its pieces are narrowed down
COIN_BITS = 32  # of a coin: a law is off by some 1e-9, far below TOLERANCE, in two thirds of the runs
GOLDEN = 0.6180339887
MAX_RUNS = 40_000  # of a function, for its law: ten times what a verifier with a coin a decision takes
MAX_SAMPLER_RUNS = 2_000  # a draw takes a coin or two
NUM_DRAWS = 1_000  # where a law cannot be gone through
LAST_COIN = 1.0 - 2.0**-53
# Filters in another order cut this one elsewhere.
TELLING_LAW = tuple(Fraction(hundredths, 100) for hundredths in (0, 35, 25, 20, 11, 9))
Tokens = tuple[int, ...]
Key = TypeVar("Key")


@dataclass(frozen=True)
class Emitted:
    """law: of the tokens that a round emits. accepted: drafts that it keeps, expected. tree: the likeliest draft."""

    law: Mapping[Tokens, float]
    accepted: float
    tree: DraftTree


def check_exact(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """One round behind one text, completed by the target's law: exactly the law of as many tokens as could come. Two
    trees that are verified at once keep their own laws and have nothing to do with each other."""
    _check_law(claims.LawMismatch, subject, case, record)
    assert isinstance(case, LawCase)
    if "verify_batch" in subject.has and case.num_drafts == 1 and case.seed % 2:  # two trees take seconds
        _check_pair(subject, case, record)


def check_params(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """The same under sampling parameters."""
    _check_law(claims.LawUnderParameters, subject, case, record)


def check_bound(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """Expected acceptance against the most that any lossless rule can have; less than the usual rule's is told."""
    assert isinstance(case, LawCase)
    judged_once(subject)
    toy, sampling = Toy(case.vocab_size, case.seed), sampling_of(case)
    emitted = emitted_by(subject.open(case), case, toy, sampling)
    record.num_nodes += case.num_drafts
    best = float(best_by_paths(toy, START, case.parents, case.proposal))
    if emitted.accepted > best + TOLERANCE:
        raise claims.BoundExceeded(
            Facts(
                headline=f"accepts {emitted.accepted:.4f} drafts a round, more than any lossless rule can ({best:.4f})",
                expected=f"at most {best:.4f}",
                actual=f"{emitted.accepted:.4f}",
                source="the largest flow from drafted to emitted paths (arXiv 2502.18779)",
                remark="where more is kept than the laws allow, what is emitted is not the target's law",
                tree=emitted.tree,
            )
        )
    usual = rule_for(emitted.tree)
    accepted = round_law(usual.function, toy, START, case.parents, case.proposal)
    if emitted.accepted < float(accepted.expected_accepted) - TOLERANCE:
        record.note_remark(f"fewer drafts are accepted than by the rule {usual.name}: speed is lost, no token is wrong")


def check_support(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """Coins at both ends of [0, 1), alone and mixed, on every draft: what is kept and what is emitted can happen."""
    assert isinstance(case, LawCase)
    judged_once(subject)
    toy, sampling = Toy(case.vocab_size, case.seed), sampling_of(case)
    probe = subject.open(case)
    for drafted, _ in drafts_of(case, toy):
        tree, logits = as_asked(drafted, padding=case.seed % 3)
        p = probs(logits, sampling)
        for script in ((0.0,), (LAST_COIN,), (0.0, LAST_COIN), (LAST_COIN, 0.0), (0.0, 0.0, LAST_COIN)):
            result = verified(probe, tree, logits, sampling, _Repeating(script))
            record.num_nodes += tree.num_drafts
            for node, token in _steps(tree, result):
                if float(p[node, token]) <= 0.0:
                    _impossible(tree, node, token, script)


def check_temperature_zero(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """The argmax is followed whatever coins say, and whatever the drafts were drawn from."""
    assert isinstance(case, LawCase)
    judged_once(subject)
    toy = Toy(case.vocab_size, case.seed)
    probe = subject.open(case)
    for drafted, _ in drafts_of(case, toy):
        tree, logits = as_asked(drafted)
        for script in ((0.0,), (LAST_COIN,), (0.5, 0.25, 0.75)):
            result = verified(probe, tree, logits, GREEDY, _Repeating(script))
            record.num_nodes += tree.num_drafts
            for node, token in _steps(tree, result):
                best = argmax_lowest(logits[node])
                if token != best:
                    raise claims.TemperatureZero(
                        Facts(
                            headline=f"at temperature 0 token {token} follows node {node}, whose argmax is {best} "
                            f"({tree.proposal} drafts, coins {_named(script)})",
                            expected=str(best),
                            actual=str(token),
                            source="the row of the node",
                            tree=tree,
                        )
                    )
            last = result.path[-1] if result.path else 0
            if any(tree.token_list[child] == result.bonus_token for child in tree.children(last)):
                raise claims.TemperatureZero(
                    Facts(
                        headline=f"at temperature 0 a draft below node {last} is refused, and its token "
                        f"{result.bonus_token} is emitted: acceptance is lost",
                        expected="the draft is accepted",
                        actual=f"path {list(result.path)}",
                        source="the row of the node",
                        tree=tree,
                    )
                )


def check_sampler(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """The law of a row with ties, zeros and large logits, and the law of the draws from it."""
    assert isinstance(case, LawCase)
    judged_once(subject)
    sampling, probe = sampling_of(case), subject.open(case)
    toy = Toy(case.vocab_size, case.seed)
    for row in (*(logits_of(toy.p(context)) for context in (START, (0, 1), (1, 0))), logits_of(TELLING_LAW)):
        right, law = probs(row, sampling), probe.probs(row, sampling)
        off = float((law - right).abs().max())
        if not off <= TOLERANCE:
            token = int((law - right).abs().argmax())
            _wrong_sampler(f"probs() gives token {token} {float(law[token]):.6g}", right, law)
        padded = torch.cat([torch.zeros(1), right, torch.zeros(1)])
        for coin in (0.0, LAST_COIN):
            token = probe.sample(padded, _Repeating((coin,)))
            if token >= len(padded) or float(padded[token]) == 0.0:
                _wrong_sampler(
                    f"sample() draws token {token} of no probability (coin {_named((coin,))})", padded, padded
                )
        if sampling.temperature:
            _check_draws(probe, right, case.seed, record)


def _check_draws(probe: Probe, law: Tensor, seed: int, record: ClaimRecord) -> None:
    """sample() must draw from the law float64 [V]: exactly, or as far as many draws tell where coins are too many."""
    try:
        drawn = exact_law(lambda coins: probe.sample(law, coins), max_runs=MAX_SAMPLER_RUNS)
    except NotTested:
        test, coins = LawTest([law.tolist()]), SeededCoins(seed)
        for _ in range(NUM_DRAWS):
            test.note(0, probe.sample(law, coins))
        if test.is_rejected:
            found = test.frequencies(0)
            headline = f"sample() does not draw from its law ({NUM_DRAWS} draws, e-value {test.e_value:.1e})"
            _wrong_sampler(headline, law, found)
        record.note_remark(
            f"sample() takes too many coins to go through them all: {NUM_DRAWS} draws of each law were judged instead"
        )
        return
    found = torch.tensor([drawn.get(token, 0.0) for token in range(len(law))], dtype=torch.float64)
    token = int((found - law).abs().argmax())
    if float((found - law).abs().max()) > TOLERANCE:
        _wrong_sampler(f"sample() draws token {token} with probability {float(found[token]):.6g}", law, found)


def emitted_by(probe: Probe, case: LawCase, toy: Toy, sampling: Sampling, *, grid: int = GRID) -> Emitted:
    """What a verifier makes of every draft of a case. grid: looks at a coin."""
    law: dict[Tokens, float] = {}
    accepted, likeliest = 0.0, (0.0, DraftTree.of([0], [-1]))
    for number, (drafted, weight) in enumerate(drafts_of(case, toy)):
        tree, logits = as_asked(drafted)
        # What one draft's looks fall between, another's may hit.
        shift = (GOLDEN * (1 + number + 5 * case.seed)) % 1.0
        for result, mass in exact_law(
            lambda coins, tree=tree, logits=logits: verified(probe, tree, logits, sampling, coins),
            grid=grid,
            shift=shift,
        ).items():
            text = (*drafted.tokens(result.path), result.bonus_token)
            law[text] = law.get(text, 0.0) + float(weight) * mass
            accepted += float(weight) * mass * len(result.path)
        likeliest = max(likeliest, (float(weight), tree), key=lambda one: one[0])
    return Emitted(law, accepted, likeliest[1])


def exact_law(function: Any, *, grid: int = GRID, shift: float = 0.5, max_runs: int = MAX_RUNS) -> Mapping[Any, float]:
    """The law of a function of coins; NotTested where it is not to be had."""
    try:
        return law_of(function, grid=grid, max_runs=max_runs, coin_bits=COIN_BITS, shift=shift)
    except CannotTell as reason:
        raise NotTested(f"the law of this target cannot be found by going through its coins: {reason}") from None


def verified(probe: Probe, tree: DraftTree, logits: Tensor, sampling: Sampling, coins: Coins) -> VerifyResult:
    """What a verifier answers. Misbehaviour when its token is no column of the logits float [N, V]."""
    result = probe.verify(tree, logits, sampling=sampling, coins=coins)
    if result.bonus_token >= logits.shape[1]:
        raise Misbehaviour(
            Facts(
                headline=f"verify() must return a bonus_token < {logits.shape[1]} (columns of target_logits), got "
                f"{result.bonus_token}",
                expected=f"a token < {logits.shape[1]}",
                actual=str(result.bonus_token),
                source="the logits that it was given",
                tree=tree,
            )
        )
    return result


def drafts_of(case: LawCase, toy: Toy) -> tuple[tuple[Drafted, Fraction], ...]:
    """Every draft of a case and its probability."""
    return draft_law(toy, START, case.parents, case.proposal)


def as_asked(drafted: Drafted, *, padding: int = 0) -> tuple[DraftTree, Tensor]:
    """The tree with its q, and logits float64 [N, V + padding] whose softmax is p; padding columns are -inf."""
    logits = torch.stack([logits_of(row) for row in drafted.target_probs])
    empty = torch.full((len(logits), padding), -math.inf, dtype=torch.float64)
    tree = drafted.tree
    if drafted.draft_probs is not None:
        q = torch.tensor([[float(one) for one in row] for row in drafted.draft_probs], dtype=torch.float64)
        q = torch.cat([q, torch.zeros_like(empty)], dim=1)
        tree = DraftTree(tree.tokens, tree.parents, draft_probs=q, proposal=tree.proposal)
    return tree, torch.cat([logits, empty], dim=1)


def logits_of(law: tuple[Fraction, ...]) -> Tensor:
    """float64 [V], -inf where the law is zero."""
    return torch.tensor([math.log(one) if one else -math.inf for one in law], dtype=torch.float64)


def sampling_of(case: LawCase | SampledCase) -> Sampling:
    return Sampling(
        temperature=case.temperature / 100,
        top_k=case.top_k or None,
        top_p=None if case.top_p == 100 else case.top_p / 100,
        min_p=case.min_p / 100 or None,
    )


def judged_once(subject: Subject) -> None:
    """A rule knows no model: it is judged in one column."""
    if subject.bank.name != "tiny-fp64" and not isinstance(subject.bank, OwnBank):
        raise NotTested("acceptance rules know no model and no precision of one: they are judged in tiny-fp64")


def laws_of(
    subject: Subject, case: LawCase, *, grid: int = GRID
) -> tuple[Emitted, dict[Tokens, float], dict[Tokens, float]]:
    """What a verifier emits, its law completed to texts of one length, and the target's law of these."""
    toy, sampling = Toy(case.vocab_size, case.seed), sampling_of(case)
    emitted = emitted_by(subject.open(case), case, toy, sampling, grid=grid)
    num_tokens, row_behind = max(map(len, emitted.law)), rows_of(toy, sampling)
    return emitted, completed(emitted.law, row_behind, num_tokens), completed({(): 1.0}, row_behind, num_tokens)


def _check_law(violation: type[Violation], subject: Subject, case: Case, record: ClaimRecord) -> None:
    assert isinstance(case, LawCase)
    judged_once(subject)
    emitted, actual, right = laws_of(subject, case)
    record.num_nodes += case.num_drafts
    num_tokens = max(map(len, right))
    distance = float(total_variation(actual, right))
    if distance > TOLERANCE:
        worst = _worst(actual, right)
        raise violation(
            Facts(
                headline=f"{case.proposal} drafts: the law of {num_tokens} token{'s' * (num_tokens > 1)} is off by a "
                f"total variation of {distance:.3g}",
                expected=f"{right.get(worst, 0.0):.6f} for {list(worst)}",
                actual=f"{actual.get(worst, 0.0):.6f}",
                source="the product of the target's own laws",
                remark=f"every draft and every coin gone through; {emitted.accepted:.3f} drafts accepted a round",
                tree=emitted.tree,
            )
        )


def _check_pair(subject: Subject, case: LawCase, record: ClaimRecord) -> None:
    sampling, probe = sampling_of(case), subject.open(case)
    pair = [as_asked(drafts_of(case, Toy(case.vocab_size, seed))[0][0]) for seed in (case.seed, case.seed + 1)]
    trees, logits = [one[0] for one in pair], [one[1] for one in pair]
    alone = [
        exact_law(lambda coins, idx=idx: verified(probe, trees[idx], logits[idx], sampling, coins)) for idx in (0, 1)
    ]
    together = exact_law(
        lambda coins: tuple(probe.verify_batch(trees, logits, sampling=sampling, coins=coins)), grid=GRID // 2
    )
    record.num_nodes += 2
    right = {(one, two): mass * other for one, mass in alone[0].items() for two, other in alone[1].items()}
    distance = float(total_variation(together, right))
    if distance > TOLERANCE:
        worst = _worst(together, right)
        raise claims.LawMismatch(
            Facts(
                headline=f"two trees that are verified at once are not verified as alone: their joint law is off by a "
                f"total variation of {distance:.3g}",
                expected=f"{right.get(worst, 0.0):.6f} for {_pair_named(worst)}",
                actual=f"{together.get(worst, 0.0):.6f}",
                source="the product of their laws, each tree verified alone",
                tree=trees[0],
            )
        )


def _worst(law: Mapping[Key, float], right: Mapping[Key, float]) -> Key:
    """The outcome in which two laws differ most."""
    return max({**law, **right}, key=lambda one: abs(law.get(one, 0.0) - right.get(one, 0.0)))


def _pair_named(pair: Sequence[VerifyResult]) -> str:
    return " and ".join(f"path {list(one.path)}, token {one.bonus_token}" for one in pair)


def completed(
    law: Mapping[Tokens, float], row_behind: Callable[[Tokens], Sequence[float]], num_tokens: int
) -> dict[Tokens, float]:
    """Texts of `num_tokens` tokens: what a law begins with, and plain draws behind it. row_behind: the law of the token
    that follows a text."""
    whole: dict[Tokens, float] = {}
    todo = list(law.items())
    while todo:
        text, mass = todo.pop()
        if len(text) >= num_tokens:
            whole[text] = whole.get(text, 0.0) + mass
            continue
        todo += [((*text, token), mass * one) for token, one in enumerate(row_behind(text)) if one]
    return whole


def rows_of(toy: Toy, sampling: Sampling) -> Callable[[Tokens], Sequence[float]]:
    """The toy's law behind each text, after all sampling parameters."""

    @cache
    def row_behind(text: Tokens) -> list[float]:
        row: list[float] = probs(logits_of(toy.p((*START, *text))), sampling).tolist()
        return row

    return row_behind


class _Repeating:
    """Coins that come in a fixed order, again and again."""

    def __init__(self, script: tuple[float, ...]) -> None:
        self._script = script
        self._num_drawn = 0

    def uniform(self, num: int) -> Tensor:
        drawn = [self._script[(self._num_drawn + idx) % len(self._script)] for idx in range(num)]
        self._num_drawn += num
        return torch.tensor(drawn, dtype=torch.float64)


def _steps(tree: DraftTree, result: VerifyResult) -> Iterator[tuple[int, int]]:
    """Each node on the path and the token that was emitted behind it."""
    nodes = [0, *result.path]
    yield from zip(nodes, [*(tree.token_list[node] for node in result.path), result.bonus_token], strict=True)


def _named(script: tuple[float, ...]) -> str:
    return ", ".join("1 - 2^-53" if one == LAST_COIN else f"{one:g}" for one in script)


def _impossible(tree: DraftTree, node: int, token: int, script: tuple[float, ...]) -> NoReturn:
    raise claims.ImpossibleToken(
        Facts(
            headline=f"token {token} is emitted behind node {node}, where the target gives it no probability "
            f"(coins {_named(script)})",
            expected="a token of probability above 0",
            actual=f"token {token}",
            source="the row of the node after all sampling parameters",
            tree=tree,
        )
    )


def _wrong_sampler(what: str, right: Tensor, found: Tensor) -> NoReturn:
    raise claims.SamplerMismatch(
        Facts(
            headline=f"{what}, which is not what the sampling parameters ask for",
            expected=", ".join(f"{one:.6g}" for one in right.tolist()),
            actual=", ".join(f"{one:.6g}" for one in found.tolist()),
            source="temperature, top_k, top_p and min_p in this order (reference.sampling)",
        )
    )
