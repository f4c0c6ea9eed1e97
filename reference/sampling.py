"""From a row of logits to the law that is drawn from, and from a law to a token: the adapter's level 6 in plain sight.

Penalties, bad words and grammars come before (`processors.py`). The order is that of transformers 5.24's generate:
temperature, top_k, top_p, min_p. All in fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.protocols import Coins
from specbench.reference.verify.chance import inverse_cdf
from specbench.reference.verify.greedy import argmax_lowest
from specbench.types import Sampling


def probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits: float [V] or [N, V]; returns float64 of the same shape, on the CPU, each row a law.

    A token of logit -inf has probability 0. At temperature 0 all mass is on the lowest id among the maxima, and no cut
    applies. ValueError for NaN, for a row that forbids every token and, at temperatures above 0, for a logit of +inf.
    """
    wide = logits.detach().to(device="cpu", dtype=torch.float64)
    _check(wide, sampling.temperature)
    if wide.ndim == 2:
        return torch.stack([_law(row, sampling) for row in wide]) if len(wide) else wide
    return _law(wide, sampling)


def sample(law: Tensor, coins: Coins) -> int:
    """One token by one uniform: the inverse of the law's cumulative sums. law: float64 [V]."""
    return inverse_cdf(law.tolist(), float(coins.uniform(1)))


def _law(row: Tensor, sampling: Sampling) -> Tensor:
    if sampling.temperature == 0.0:
        law = torch.zeros_like(row)
        law[argmax_lowest(row)] = 1.0
        return law
    row = (row - row.max()) / sampling.temperature  # in this order, so that no temperature makes a logit infinite
    if sampling.top_k is not None:
        row = row.where(_among_the_k_largest(row, sampling.top_k), -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1.0:
        row = row.where(_within_the_nucleus(row, sampling.top_p), -torch.inf)
    if sampling.min_p is not None:
        row = row.where(_near_the_largest(row, sampling.min_p), -torch.inf)
    return row.softmax(dim=-1)


def _among_the_k_largest(row: Tensor, top_k: int) -> Tensor:
    """What ties with the k-th largest is kept too, as transformers and vLLM do."""
    return row >= row.sort(descending=True).values[min(top_k, len(row)) - 1]


def _within_the_nucleus(row: Tensor, top_p: float) -> Tensor:
    """A token is kept while the more probable ones sum to less than top_p; the first one always is. transformers does
    not say which of equal tokens go first, here the lowest ids do."""
    kept = torch.empty_like(row, dtype=torch.bool)
    best = row.softmax(dim=-1).sort(descending=True, stable=True)
    kept[best.indices] = best.values.cumsum(dim=0) - best.values < top_p
    return kept


def _near_the_largest(row: Tensor, min_p: float) -> Tensor:
    law = row.softmax(dim=-1)
    return law >= min_p * law.max()


def _check(wide: Tensor, temperature: float) -> None:
    if wide.ndim not in (1, 2):
        raise ValueError(f"logits has shape {list(wide.shape)}, must be [V] or [N, V]")
    if wide.isnan().any():
        raise ValueError("logits hold NaN, must be numbers or -inf: look at the forward that made them")
    if (wide == -torch.inf).all(dim=-1).any():
        raise ValueError("logits are -inf for every token of a row, must allow one: look at bad_words and grammar")
    if temperature > 0.0 and (wide == torch.inf).any():
        raise ValueError("logits hold +inf, must be finite or -inf where the temperature is above 0")
