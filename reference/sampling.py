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
    for kept in (_among_the_k_largest, _within_the_nucleus, _near_the_largest):
        row = row.where(kept(row, sampling), -torch.inf)
    return row.softmax(dim=-1)


def _among_the_k_largest(row: Tensor, sampling: Sampling) -> Tensor:
    """What ties with the k-th largest is kept too, as transformers and vLLM do."""
    k = len(row) if sampling.top_k is None else min(sampling.top_k, len(row))
    return row >= row.sort(descending=True).values[k - 1]


def _within_the_nucleus(row: Tensor, sampling: Sampling) -> Tensor:
    """A token is kept while the more probable ones sum to less than top_p; the first one always is. transformers does
    not say which of equal tokens go first, here the lowest ids do."""
    kept = torch.ones_like(row, dtype=torch.bool)
    if sampling.top_p is not None and sampling.top_p < 1.0:
        best = row.softmax(dim=-1).sort(descending=True, stable=True)
        kept[best.indices] = best.values.cumsum(dim=0) - best.values < sampling.top_p
    return kept


def _near_the_largest(row: Tensor, sampling: Sampling) -> Tensor:
    law = row.softmax(dim=-1)
    return law >= (sampling.min_p or 0.0) * law.max()


def _check(wide: Tensor, temperature: float) -> None:
    if wide.ndim not in (1, 2):
        raise ValueError(f"logits has shape {list(wide.shape)}, must be [V] or [N, V]")
    if wide.isnan().any():
        raise ValueError("logits hold NaN, must be numbers or -inf: look at the forward that made them")
    if (wide == -torch.inf).all(dim=-1).any():
        raise ValueError("logits are -inf for every token of a row, must allow one: look at bad_words and grammar")
    if temperature > 0.0 and (wide == torch.inf).any():
        raise ValueError("logits hold +inf, must be finite or -inf where the temperature is above 0")
