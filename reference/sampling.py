"""From a row of logits to the law that is drawn from, and from a law to a token: the adapter's level 6 in plain sight.

Penalties, bad words and grammars come before (`processors.py`). The order is that of transformers 5.24's generate:
temperature, top_k, top_p, min_p. All in fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.protocols import Coins
from specbench.reference.verify.chance import inverse_cdf
from specbench.types import Sampling


def probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits: float [V] or [N, V]; returns float64 of the same shape, on the CPU, each row a law.

    A token of logit -inf has probability 0. At temperature 0 all mass is on the lowest id among the maxima, and no cut
    applies. ValueError for NaN, for a row that forbids every token and, at temperatures above 0, for a logit of +inf.
    """
    wide = logits.detach().to(device="cpu", dtype=torch.float64)
    _check(wide, sampling.temperature)
    return _laws(wide, sampling) if len(wide) else wide


def sample(law: Tensor, coins: Coins) -> int:
    """One token by one uniform: the inverse of the law's cumulative sums. law: float64 [V]."""
    return inverse_cdf(law.tolist(), float(coins.uniform(1)))


def _laws(rows: Tensor, sampling: Sampling) -> Tensor:
    largest = rows.amax(dim=-1, keepdim=True)
    if sampling.temperature == 0.0:
        is_first = (rows == largest).cumsum(dim=-1).cumsum(dim=-1) == 1
        return is_first.double()
    rows = (rows - largest) / sampling.temperature  # in this order, so that no temperature makes a logit infinite
    if sampling.top_k is not None:
        rows = rows.where(_among_the_k_largest(rows, sampling.top_k), -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1.0:
        rows = rows.where(_within_the_nucleus(rows, sampling.top_p), -torch.inf)
    if sampling.min_p is not None:
        rows = rows.where(_near_the_largest(rows, sampling.min_p), -torch.inf)
    return rows.softmax(dim=-1)


def _among_the_k_largest(rows: Tensor, top_k: int) -> Tensor:
    """What ties with the k-th largest is kept too, as transformers and vLLM do."""
    kth = min(top_k, rows.shape[-1]) - 1
    return rows >= rows.sort(dim=-1, descending=True).values[..., kth : kth + 1]


def _within_the_nucleus(rows: Tensor, top_p: float) -> Tensor:
    """A token is kept while the more probable ones sum to less than top_p; the first one always is. transformers does
    not say which of equal tokens go first, here the lowest ids do."""
    best = rows.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    is_within = best.values.cumsum(dim=-1) - best.values < top_p
    return torch.zeros_like(is_within).scatter(-1, best.indices, is_within)


def _near_the_largest(rows: Tensor, min_p: float) -> Tensor:
    laws = rows.softmax(dim=-1)
    return laws >= min_p * laws.amax(dim=-1, keepdim=True)


def _check(wide: Tensor, temperature: float) -> None:
    if wide.ndim not in (1, 2):
        raise ValueError(f"logits has shape {list(wide.shape)}, must be [V] or [N, V]")
    if wide.isfinite().all():
        return
    if wide.isnan().any():
        raise ValueError("logits hold NaN, must be numbers or -inf: look at the forward that made them")
    if (wide == -torch.inf).all(dim=-1).any():
        raise ValueError("logits are -inf for every token of a row, must allow one: look at bad_words and grammar")
    if temperature > 0.0 and (wide == torch.inf).any():
        raise ValueError("logits hold +inf, must be finite or -inf where the temperature is above 0")
