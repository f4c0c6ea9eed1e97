"""A real model's greedy tokens against an oracle that reads the same text: EQUAL, NOISE or BUG.

Each token has a regret, the oracle's best logit minus its own. Rounding alone can explain it up to a bound that comes
from the errors which plain decoding of the same engine shows, and only as often as plain decoding shows it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specbench.audit import Audit, Output, counted, no_tokens
from specbench.banks import load_checkpoint
from specbench.law.sequential import ALPHA
from specbench.protocols import LanguageModel
from specbench.record import BUG, EQUAL, NOISE, NOT_TESTED
from specbench.reference.layouts import flatten_causal

TAIL = 0.1  # the share of the errors that the bound is drawn from
FEWEST_ERRORS = 200
MOST_TEXTS = 32  # whose logits are kept: 25 MB each at 64 tokens of 49,152
ERROR_FACTOR = 1.5  # a mode may err this many times as far as plain decoding, in other shapes than its own
BIN_EDGES = (0.5, 1.0, 2.0, 4.0)  # of margins, in root mean squares of plain decoding's errors
MISREAD = 5.0  # plain decoding that errs so many times as far as rounding to bf16 does reads another model
ROUNDED_TEXTS = 2  # on which that rounding is measured
ULPS = {"fp32": 2.0**-23, "f32": 2.0**-23, "fp16": 2.0**-10, "f16": 2.0**-10, "bf16": 2.0**-7}


@dataclass(frozen=True)
class Place:
    """One emitted token and what the oracle holds of its place. Logits are float64 of the engine's own weights."""

    token: int
    best: int
    second: int
    logit: float
    margin: float
    regret: float


@dataclass(frozen=True)
class Plain:
    """What plain decoding shows. errors: of the difference between the two best logits, one a place. places: of all
    its shapes. rounding: the root mean square of such errors of our own forward in bf16 (that the checkpoint is read
    otherwise than the engine reads it shows beside them). source: who shows the errors."""

    errors: tuple[float, ...]
    places: tuple[Place, ...]
    rounding: float
    source: str

    @property
    def rms(self) -> float:
        return root_mean_square(self.errors)


def root_mean_square(errors: Sequence[float]) -> float:
    return math.sqrt(sum(one * one for one in errors) / max(1, len(errors)))


class Oracle:
    """The model of a folder in float64, over whole texts. The last texts it has seen cost nothing.

    weights: rounded to this dtype before, as the engine does that loads them so.
    """

    def __init__(self, folder: str | Path, *, weights: torch.dtype | None = None) -> None:
        self._folder, self._weights = folder, weights
        self._models: dict[torch.dtype, LanguageModel] = {}
        self._seen: OrderedDict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = OrderedDict()

    @property
    def vocab_size(self) -> int:
        return self._model(torch.float64).vocab_size

    def unreadable(self, output: Output) -> int | None:
        """The place of its first token outside of the vocabulary, behind which nothing can be computed."""
        return next((at for at, token in enumerate(output.tokens) if not 0 <= token < self.vocab_size), None)

    def rows(self, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """float64 [len(tokens), V]: row i judges token i."""
        key = tuple(prompt), tuple(tokens)
        if key not in self._seen:
            self._seen[key] = self._forward(torch.float64, [*prompt, *tokens[:-1]], len(tokens))
            if len(self._seen) > MOST_TEXTS:
                self._seen.popitem(last=False)
        return self._seen[key]

    def places(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[Place]:
        if not tokens:
            return []
        rows = self.rows(prompt, tokens)
        best = rows.topk(2, dim=-1)
        return [
            Place(
                token=token,
                best=int(ids[0]),
                second=int(ids[1]),
                logit=float(top[0]),
                margin=float(top[0] - top[1]),
                regret=float(top[0] - row[token]) if 0 <= token < len(row) else math.inf,
            )
            for token, row, ids, top in zip(tokens, rows, best.indices, best.values, strict=True)
        ]

    def shown_errors(self, output: Output) -> list[float]:
        """Of the logits' difference between the first two tokens that the engine tells of each place."""
        if not output.tokens or len(output.logprobs) != len(output.tokens):
            return []
        errors = []
        for row, told in zip(self.rows(output.prompt, output.tokens), output.logprobs, strict=True):
            if len(told) > 1 and all(0 <= token < len(row) for token, _ in told[:2]):
                (one, mine), (other, its) = told[:2]
                errors.append(abs((mine - its) - float(row[one] - row[other])))
        return errors

    def own_errors(self, prompt: Sequence[int], tokens: Sequence[int], dtype: torch.dtype) -> list[float]:
        """The same of our forward in another dtype."""
        right = self.rows(prompt, tokens)
        return [error for rows in self.own_rows(prompt, tokens, dtype) for error in _errors(rows, right)]

    def own_rows(self, prompt: Sequence[int], tokens: Sequence[int], dtype: torch.dtype) -> Iterator[Tensor]:
        """Like `rows`, of our forward in another dtype, in four shapes: whole, in blocks of 32 and of 5, one by one."""
        for block in (0, 32, 5, 1):
            yield self._forward(dtype, [*prompt, *tokens[:-1]], len(tokens), block=block)

    @torch.no_grad()
    def _forward(self, dtype: torch.dtype, text: list[int], num: int, *, block: int = 0) -> Tensor:
        """The last `num` rows; in blocks of that many tokens behind what comes before them, 0: all at once."""
        model = self._model(dtype)
        if not block:
            return model.logits(text)[-num:].double()
        cache, parts, split = model.new_cache(), [], len(text) - num + 1
        for start, end in pairwise([0, *range(split, len(text), block), len(text)]):
            parts.append(model.forward(flatten_causal(text[start:end], start), cache).double())
            cache.commit(start, range(end - start))
        return torch.cat(parts)[-num:]

    def _model(self, dtype: torch.dtype) -> LanguageModel:
        if dtype not in self._models:
            rounded = self._weights if self._weights is not None and dtype == torch.float64 else dtype
            model: Any = load_checkpoint(str(self._folder), rounded)
            self._models[dtype] = model if rounded == dtype else model.to(dtype)
        return self._models[dtype]


def plain_of(oracle: Oracle, outputs: Sequence[Output], dtype: torch.dtype | None) -> Plain:
    """Of an engine's plain decoding in all its shapes.

    dtype: of our own forward, whose errors stand in where the engine shows none; None where there is none like it.
    """
    outputs = [one for one in outputs if oracle.unreadable(one) is None]
    places = [place for one in outputs for place in oracle.places(one.prompt, one.tokens)]
    texts = [one for one in dict.fromkeys((one.prompt, one.tokens) for one in outputs) if one[1]]
    errors = [error for one in outputs for error in oracle.shown_errors(one)]
    if len(errors) < FEWEST_ERRORS and dtype is not None:
        errors = [error for one in texts for error in oracle.own_errors(*one, dtype)]
        return Plain(tuple(errors), tuple(places), root_mean_square(errors), "our forward in its dtype")
    rounded = [error for one in texts[:ROUNDED_TEXTS] for error in oracle.own_errors(*one, torch.bfloat16)]
    return Plain(tuple(errors), tuple(places), root_mean_square(rounded), "its own logprobs")


def plain_in(oracle: Oracle, outputs: Sequence[Output], dtype: torch.dtype) -> Plain:
    """What our own forward in that dtype shows on the texts of an engine that cannot be asked to decode plainly: its
    errors, and how often its best token is not the oracle's."""
    errors: list[float] = []
    places: list[Place] = []
    for one in outputs:
        if not one.tokens or oracle.unreadable(one) is not None:
            continue
        right, judged = oracle.rows(one.prompt, one.tokens), oracle.places(one.prompt, one.tokens)
        for rows in oracle.own_rows(one.prompt, one.tokens, dtype):
            errors += _errors(rows, right)
            best = rows.argmax(dim=-1)
            regrets = right.max(dim=-1).values - right.gather(-1, best[:, None])[:, 0]
            pairs = zip(judged, best.tolist(), regrets.tolist(), strict=True)
            places += [replace(place, token=token, regret=regret) for place, token, regret in pairs]
    return Plain(tuple(errors), tuple(places), root_mean_square(errors), "our forward in its dtype")


def bound_of(errors: Sequence[float], num_tokens: int, *, alpha: float = ALPHA) -> float:
    """What no error of `num_tokens` exceeds but with probability `alpha`, if the tail is no heavier than exponential.

    The largest tenth of the errors is taken for an exponential tail, its mean three standard errors higher than seen.
    Errors of rounding fall off faster (they are sums), so that this errs on the side of calling things noise.
    """
    ordered = sorted(errors)
    start = int(len(ordered) * (1 - TAIL))
    threshold, above = ordered[start], [one - ordered[start] for one in ordered[start:]]
    mean = sum(above) / len(above) * (1 + 3 / math.sqrt(len(above)))
    return threshold + mean * max(0.0, math.log(TAIL * max(1, num_tokens) / alpha))


def rate_evidence(plain: Sequence[tuple[int, int]], mode: Sequence[tuple[int, int]]) -> float:
    """Log of an e-value against: in no bin of margins is a mode's rate above plain decoding's.

    plain, mode: for each bin (times the oracle's token was left, places). The numerator is a mixture over both rates
    (Krichevsky & Trofimov 1981), the denominator the largest likelihood under the null: the ratio may be looked at
    after every token, and reaches 1 / alpha with probability alpha at most (universal inference, Wasserman et al.,
    arXiv 1912.11436).
    """
    return sum(
        _log_mixture(*before) + _log_mixture(*now) - _log_supremum(before, now)
        for before, now in zip(plain, mode, strict=True)
    )


def audit_ties(
    oracle: Oracle, plain: Plain, outputs: Sequence[Output], reference: Sequence[Output], *, weights: str = ""
) -> Audit:
    """The verdict on one mode of an engine. reference: what its plain decoding answered to the same requests.

    EQUAL: the same tokens. NOISE: other ones, each within the bound, and no more of them than plain decoding has.
    weights: the format, for the size of a last place.
    """
    mode = outputs[0].mode if outputs else ""
    num_tokens = sum(len(one.tokens) for one in outputs)
    if not num_tokens:
        return no_tokens(mode, len(outputs))
    for one in outputs:
        if (at := oracle.unreadable(one)) is not None:
            what = f"{one.name}, token {at}: {one.tokens[at]}, must be 0 to {oracle.vocab_size - 1} (the vocabulary)"
            return Audit(mode, BUG, len(outputs), num_tokens, 1, what)
    long = [one for one in outputs if one.max_new_tokens is not None and len(one.tokens) > one.max_new_tokens]
    if long:
        what = f"{long[0].name} has {len(long[0].tokens)} tokens, must have at most {long[0].max_new_tokens}"
        return Audit(mode, BUG, len(outputs), num_tokens, len(long), what)
    if len(plain.errors) < FEWEST_ERRORS:
        what = (
            f"only {len(plain.errors)} errors of plain decoding are known, {FEWEST_ERRORS} are needed for a bound: ask "
            "for more tokens"
        )
        return Audit(mode, NOT_TESTED, len(outputs), num_tokens, 0, what)
    if plain.rms > MISREAD * plain.rounding:
        what = (
            f"plain decoding is {plain.rms:.2g} off the oracle, and rounding to bf16 only {plain.rounding:.2g}: it "
            "reads the checkpoint otherwise (weights, positions such as rope_theta, a quantised computation), so that "
            "nothing can be told of its drafts"
        )
        return Audit(mode, NOT_TESTED, len(outputs), num_tokens, 0, what)
    bound = bound_of(plain.errors, num_tokens)
    found = [(one, oracle.places(one.prompt, one.tokens)) for one in outputs]
    beyond = [
        (place.regret, f"{_where(one, at)}: {_told(place, weights)}")
        for one, places in found
        for at, place in enumerate(places)
        if place.regret > bound
    ]
    places = [place for _, some in found for place in some]
    left, worst = [one for one in places if one.regret > 0], max(places, key=lambda one: one.regret)
    same = {one.prompt: one.tokens for one in reference}
    num_equal = sum(same.get(one.prompt) == one.tokens for one in outputs)
    rates = _rates(places, plain.rms), _rates(plain.places, plain.rms / ERROR_FACTOR)
    evidence = rate_evidence(rates[1], rates[0])
    facts = {
        "bound": bound,
        "bound_from": plain.source,
        "plain_rms_error": plain.rms,
        "worst_regret": worst.regret,
        "num_left": len(left),
        "plain_left": sum(one.regret > 0 for one in plain.places),
        "plain_tokens": len(plain.places),
        "num_equal": num_equal,
        "log_e_value_of_rates": evidence,
        "by_margin": [{"plain": before, "mode": now} for now, before in zip(*rates, strict=True)],
    }
    left_by = (
        f"{len(left)} of {num_tokens} tokens are not the oracle's (plain decoding: {facts['plain_left']} of "
        f"{len(plain.places)}), the largest regret is {worst.regret:.2g} of {bound:.2g} allowed"
    )
    shown = max((error for one in outputs for error in oracle.shown_errors(one)), default=0.0)
    facts["worst_shown_error"] = shown
    if shown > bound and not beyond:
        beyond.append((shown, f"its logprobs are {shown:.2g} off the oracle's"))
    if beyond:
        beyond.sort(reverse=True)
        what = f"{counted(len(beyond), 'token')} of {num_tokens} beyond the bound of {bound:.2g}"
        return Audit(mode, BUG, len(outputs), num_tokens, len(beyond), f"{what}; {beyond[0][1]}", facts)
    if evidence >= -math.log(ALPHA):
        often = f"more often than if its errors were {ERROR_FACTOR:g} times plain decoding's (e-value e^{evidence:.0f})"
        what = f"{left_by}; that is {often}"
        return Audit(mode, BUG, len(outputs), num_tokens, len(left), what, facts)
    if num_equal == len(outputs):
        what = f"all {num_tokens} tokens are plain decoding's; {left_by}"
        return Audit(mode, EQUAL, len(outputs), num_tokens, 0, what, facts)
    what = f"{num_equal} of {len(outputs)} outputs are plain decoding's; {left_by}"
    return Audit(mode, NOISE, len(outputs), num_tokens, 0, what, facts)


def _errors(rows: Tensor, right: Tensor) -> list[float]:
    """Of the difference between the two best logits. Both float64 [S, V]."""
    difference = (rows - right).gather(-1, right.topk(2, dim=-1).indices)
    return (difference[:, 0] - difference[:, 1]).abs().tolist()


def _rates(places: Sequence[Place], rms: float) -> list[tuple[int, int]]:
    counts = [[0, 0] for _ in range(len(BIN_EDGES) + 1)]
    for one in places:
        at = sum(one.margin >= edge * rms for edge in BIN_EDGES)
        counts[at][0] += one.regret > 0
        counts[at][1] += 1
    return [(left, num) for left, num in counts]


def _where(one: Output, at: int) -> str:
    if one.end_implied and at == len(one.tokens) - 1:
        return f"{one.name} ended after {at} tokens of {one.max_new_tokens}, as if there stood"
    return f"{one.name}, token {at}"


def _told(place: Place, weights: str) -> str:
    text = f"{place.token}, regret {place.regret:.2g}; "
    text += f"oracle: {place.best}, then {place.second}, margin {place.margin:.2g}"
    if weights in ULPS and place.logit:
        ulp = ULPS[weights] * 2.0 ** math.floor(math.log2(abs(place.logit)))
        text += f" ({place.margin / ulp:.3g} ulps)"
    return text


def _log_mixture(hits: int, num: int) -> float:
    """Of a Bernoulli sequence under Beta(1/2, 1/2)."""
    half = 0.5
    return math.lgamma(hits + half) + math.lgamma(num - hits + half) - math.lgamma(num + 1) - 2 * math.lgamma(half)


def _log_supremum(plain: tuple[int, int], mode: tuple[int, int]) -> float:
    (hits, num), (more, places) = plain, mode
    if more * num <= hits * places:  # the frequencies themselves obey the null
        return _log_likelihood(hits, num) + _log_likelihood(more, places)
    return _log_likelihood(hits + more, num + places)


def _log_likelihood(hits: int, num: int) -> float:
    """The largest of a Bernoulli sequence."""
    return sum(part * math.log(part / num) for part in (hits, num - hits) if part)
