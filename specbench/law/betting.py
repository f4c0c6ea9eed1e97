"""Does a black box keep more drafts than any lossless rule can? Bets on its rounds, to be looked at at any time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specbench.tree import Proposal

SHARES = (0.05, 0.15, 0.4, 0.8)  # of what is owned, staked on each round: small ones find small excesses


class BoundTest:
    """Null: given all rounds before, the chance that a round keeps its first draft is at most that round's bound.

    For each share s a fortune starts at 1 and is multiplied by 1 - s where no draft is kept and by 1 - s + s / bound
    where one is: under the null it is not expected to grow, nor is the average of several. The chance that the average
    ever reaches 1 / alpha is at most alpha (Ville; Waudby-Smith & Ramdas, arXiv 2010.09686).
    """

    def __init__(self, *, alpha: float) -> None:
        if not 0 < alpha < 1:
            raise ValueError(f"alpha = {alpha} must be in (0, 1)")
        self.alpha = alpha
        self.num_rounds = self.num_kept = 0
        self.expected = 0.0  # the sum of the bounds
        self._variance = 0.0
        self._logs = [0.0] * len(SHARES)
        self._largest = -math.inf

    def note(self, is_kept: bool, bound: float) -> None:
        """bound: in [0, 1]."""
        self.num_rounds += 1
        self.num_kept += is_kept
        self.expected += bound
        self._variance += bound * (1 - bound)
        for idx, share in enumerate(SHARES):
            if not is_kept:
                self._logs[idx] += math.log1p(-share)
            else:
                self._logs[idx] += math.log(1 - share + share / bound) if bound > 0 else math.inf
        self._largest = max(self._largest, self.log_e_value)

    @property
    def log_e_value(self) -> float:
        most = max(self._logs)
        if math.isinf(most):
            return most
        return most + math.log(sum(math.exp(one - most) for one in self._logs) / len(SHARES))

    @property
    def is_rejected(self) -> bool:
        """Whether the e-value has reached 1 / alpha after any round."""
        return self._largest >= -math.log(self.alpha)

    @property
    def most_excess(self) -> float:
        """What a rule that keeps a draft in every round would exceed the bounds by, on average; 0 before the first."""
        return 1 - self.expected / self.num_rounds if self.num_rounds else 0.0

    def detectable_excess(self) -> float:
        """About the smallest excess over the bounds that these rounds would have shown as often as not: what the best
        stake makes of it reaches 1 / alpha (to second order in the excess); inf before the first round."""
        if not self._variance:
            return math.inf
        goal = math.log(len(SHARES) / self.alpha)
        return math.sqrt(2 * goal * self._variance) / self.num_rounds


def most_kept(p: Tensor, q: Tensor, num_drafts: int, proposal: Proposal) -> float:
    """A bound on the chance that a lossless rule keeps one of a node's drafts.

    p, q: float64 [V], the target's law and the drafter's. num_drafts: drawn from q as `proposal` says, one after the
    other. By transport (arXiv 2502.18779) no rule keeps more than p(H) + 1 - P(all drafts in H), whatever the set H;
    taken is the least of it over the sets of tokens that q is fondest of beside p. For one draft that is the sum of
    min(p, q). Two drafts without replacement at most: ValueError for more.
    """
    order = torch.where(q > 0, p / q, torch.inf).argsort()
    p_inside, q_inside = p[order].cumsum(0), q[order].cumsum(0)
    if proposal == "iid" or num_drafts == 1:
        all_inside = q_inside**num_drafts
    elif num_drafts == 2:
        fondest = q[order]
        # P(the first is i, the second in H) = q_i (q(H) - q_i) / (1 - q_i), summed over i in H.
        weight = torch.where(fondest < 1, fondest / (1 - fondest).clamp_min(1e-300), 0.0)
        all_inside = q_inside * weight.cumsum(0) - (weight * fondest).cumsum(0)
    else:
        raise ValueError(f"num_drafts = {num_drafts} must be at most 2 without replacement")
    return min(1.0, float((p_inside + 1 - all_inside).min()))
