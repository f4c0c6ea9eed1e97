"""Is this black box's law the known one? Draws over many contexts, an e-value that may be looked at after every draw.

Nothing here runs a model: whoever has the laws notes the tokens. `python -m specbench.law.sequential` measures how many
draws a deviation takes and how often a right law is accused.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

ALPHA = 1e-6
NULL_TV = 0.003
# The alternatives are Dirichlet laws around p: an average over how far from it they lie.
CONCENTRATIONS = (16.0, 128.0, 1024.0, 8192.0)
EVEN_SHARE = 0.001  # of their mean that is spread evenly, so that no token is ruled out
NUM_SIMULATIONS = 400


class LawTest:
    """Null: in every context the law lies within total variation `null_tv` of the known one.

    laws: for each context a sequence of probabilities; their lengths may differ. alpha: the probability, over all the
    draws ever made and all looks at them, of rejecting although the null holds. For a suite of K tests give each
    alpha / K; e-values of tests on the same draws may be averaged instead, whatever their dependence.

    Why it is valid: let n be the counts in one context and m(n) the likelihood of the draws averaged over Dirichlet
    laws. For each law r, m(n) / r(n) is a martingale that starts at 1 if r is the truth. The e-value m(n) / sup r(n),
    the supremum over all r in the ball, is never above any of them, so the chance that it ever reaches 1 / alpha is at
    most alpha (Ville). Draws are independent given the past, whichever context is drawn from next, so that products of
    the contexts' martingales M are martingales too, and so are products of w M + 1 - w. Three of those are averaged:
    w = 1 (all contexts a little wrong), 1/2 (half of them wrong) and 1 / number of contexts (one wrong).

    Sources: Lindon & Malek (arXiv 2011.03567), Ramdas et al. (arXiv 2210.01948).
    """

    def __init__(self, laws: Sequence[Sequence[float]], *, alpha: float = ALPHA, null_tv: float = NULL_TV) -> None:
        if not laws:
            raise ValueError("laws is empty: a test needs at least one context")
        for idx, law in enumerate(laws):
            if min(law, default=-1) < 0 or not math.isclose(sum(law), 1, abs_tol=1e-6):
                raise ValueError(f"laws[{idx}] sums to {sum(law)}, must be probabilities that sum to 1")
        if not 0 < alpha < 1 or not 0 <= null_tv < 1:
            raise ValueError(f"alpha = {alpha} must be in (0, 1) and null_tv = {null_tv} in [0, 1)")
        self.alpha = alpha
        self.null_tv = null_tv
        self._sizes = torch.tensor([len(law) for law in laws])
        self._laws = torch.zeros(len(laws), int(self._sizes.max()), dtype=torch.float64)
        for idx, law in enumerate(laws):
            self._laws[idx, : len(law)] = torch.tensor(list(law), dtype=torch.float64) / sum(law)
        self._counts = torch.zeros_like(self._laws)
        self._was_rejected = False

    def note(self, context_idx: int, token: int, *, num: int = 1) -> None:
        """`token` was drawn in that context, `num` times."""
        if not 0 <= token < self._sizes[context_idx]:
            raise ValueError(f"token = {token} must be in [0, {self._sizes[context_idx]}), context {context_idx}")
        self._counts[context_idx, token] += num

    @property
    def num_draws(self) -> int:
        return int(self._counts.sum())

    def frequencies(self, context_idx: int) -> Tensor:
        """float64 [V]: how often each token was drawn in that context, as shares."""
        counts = self._counts[context_idx, : int(self._sizes[context_idx])]
        return counts / counts.sum().clamp(min=1)

    @property
    def log_e_value(self) -> float:
        return float(combined(log_e_values(self._counts, self._laws, self._sizes, self.null_tv)))

    @property
    def e_value(self) -> float:
        """Evidence against the null now; inf above what a float holds."""
        log_e_value = self.log_e_value
        return math.exp(log_e_value) if log_e_value < 700 else math.inf

    @property
    def is_rejected(self) -> bool:
        """Whether the e-value has reached 1 / alpha at any look, this one included."""
        self._was_rejected |= self.log_e_value >= -math.log(self.alpha)
        return self._was_rejected

    def detectable_tv(self, power: float = 0.5) -> float:
        """The smallest total variation that these numbers of draws would have shown with that probability; else inf.

        All contexts with draws in them are that far off, each in the direction that is hardest to see: the one of least
        relative entropy, which raises a set of about half of p's mass evenly and lowers the rest. Simulated, and judged
        by the last look alone.
        """
        drawn = self._counts.sum(-1) > 0
        laws, sizes, nums = self._laws[drawn], self._sizes[drawn], self._counts[drawn].sum(-1)
        generator = torch.Generator().manual_seed(0)

        def is_seen(distance: float) -> bool:
            planted = torch.stack([hardest_direction(law, distance) for law in laws])
            counts = multinomial_counts(planted, nums, NUM_SIMULATIONS, generator)
            evidence = combined(log_e_values(counts, laws, sizes, self.null_tv))
            return float((evidence >= -math.log(self.alpha)).double().mean()) >= power

        low, high = self.null_tv, 1.0
        if not drawn.any() or not is_seen(high):
            return math.inf
        while high - low > 0.01 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if is_seen(middle) else (middle, high)
        return high


def log_e_values(counts: Tensor, laws: Tensor, sizes: Tensor, null_tv: float) -> Tensor:
    """counts: float64 [..., C, V]. laws: float64 [C, V], padded with zeros behind `sizes`, int64 [C]. -> [..., C]."""
    mean = (1 - EVEN_SHARE) * laws + EVEN_SHARE / sizes[:, None]
    marginals = []
    for concentration in CONCENTRATIONS:
        prior = concentration * mean  # sums to the concentration over the vocabulary; behind it nothing is counted
        terms = torch.lgamma(prior + counts) - torch.lgamma(prior)
        total = torch.tensor(concentration, dtype=torch.float64)
        marginals.append(terms.sum(-1) + torch.lgamma(total) - torch.lgamma(total + counts.sum(-1)))
    marginal = torch.stack(marginals).logsumexp(0) - math.log(len(CONCENTRATIONS))
    return marginal - log_supremum(counts, laws, null_tv)


def log_supremum(counts: Tensor, laws: Tensor, radius: float) -> Tensor:
    """The largest log-likelihood of the counts among laws within total variation `radius` of p. -> [...]

    By its Lagrangian the best law is p, raised to t f where that is more and lowered to s f where that is less, f the
    frequencies: what is raised sums to the radius, and so does what is lowered. Both sums are maxima over sets of
    tokens, attained by those that lead in the order of p / f, which gives t and s as a minimum and a maximum.
    """
    num = counts.sum(-1, keepdim=True)
    frequencies = counts / num.clamp(min=1)
    laws = laws.expand_as(counts)
    ratio = torch.where(counts > 0, laws / frequencies, math.inf)
    order = ratio.argsort(-1)
    p, f = laws.gather(-1, order), frequencies.gather(-1, order)
    raised = ((radius + p.cumsum(-1)) / f.cumsum(-1)).nan_to_num(math.inf).amin(-1, keepdim=True)
    p_behind, f_behind = (part.flip(-1).cumsum(-1) for part in (p, f))
    excess = (p_behind - radius).clamp(min=0)
    lowered = torch.where(excess > 0, excess / f_behind, 0.0).amax(-1, keepdim=True)
    best = torch.maximum(frequencies * raised, torch.minimum(laws, frequencies * lowered.clamp(max=1e300)))
    is_inside = (frequencies - laws).abs().sum(-1, keepdim=True) <= 2 * radius
    return torch.xlogy(counts, torch.where(is_inside, frequencies, best)).sum(-1)


def combined(log_values: Tensor) -> Tensor:
    """log of the average of three products over contexts: [..., C] -> [...]. See `LawTest`."""
    num_contexts = log_values.shape[-1]
    products = []
    for share in (1.0, 0.5, 1 / num_contexts):
        hedge = torch.full_like(log_values, math.log1p(-share) if share < 1 else -math.inf)
        products.append(torch.logaddexp(log_values + math.log(share), hedge).sum(-1))
    return torch.stack(products).logsumexp(0) - math.log(len(products))


def joint_cells(tokens: Sequence[int], sizes: Sequence[int]) -> int:
    """Several draws as one of prod(sizes): the last token counts fastest, as in `joint_law`."""
    cell = 0
    for token, size in zip(tokens, sizes, strict=True):
        if not 0 <= token < size:
            raise ValueError(f"token = {token} must be in [0, {size}), the range of its place")
        cell = cell * size + token
    return cell


def joint_law(laws: Sequence[Sequence[float]]) -> list[float]:
    """The law of independent draws (rows of a batch, rounds, seeds) over the cells of `joint_cells`."""
    return [math.prod(probabilities) for probabilities in product(*laws)]


def hardest_direction(law: Tensor, distance: float) -> Tensor:
    """A law at that total variation from p, or as far as its direction goes, with little relative entropy to it.

    law: float64 [V]. Greedy: tokens from the likeliest on are taken while their mass stays below (1 - distance) / 2.
    """
    is_raised = torch.zeros_like(law, dtype=torch.bool)
    mass = 0.0
    for token in law.argsort(descending=True).tolist():
        if mass + law[token] <= (1 - distance) / 2 + 1e-12:
            is_raised[token] = True
            mass += float(law[token])
    if not is_raised.any():
        is_raised[law.argmin()] = True
        mass = float(law.min())
    distance = min(distance, 1 - mass)
    up = (mass + distance) / mass * law if mass > 0 else torch.full_like(law, distance / int(is_raised.sum()))
    return torch.where(is_raised, up, law * (1 - distance / (1 - mass) if mass < 1 else 1.0))


def multinomial_counts(laws: Tensor, nums: Tensor, num_runs: int, generator: torch.Generator) -> Tensor:
    """laws: float64 [C, V]; nums: [C] draws each. -> float64 [num_runs, C, V], by one binomial after another."""
    left = nums.double().expand(num_runs, -1).clone()
    mass = torch.ones(len(laws), dtype=torch.float64)
    counts = []
    for token in range(laws.shape[-1]):
        share = torch.where(mass > 0, laws[:, token] / mass, 0.0).clamp(0, 1)
        share = share if token < laws.shape[-1] - 1 else torch.ones_like(share)
        counts.append(torch.binomial(left, share.expand_as(left), generator=generator))
        left = left - counts[-1]
        mass = mass - laws[:, token]
    return torch.stack(counts, -1)


def draws_to_catch(
    law: Tensor, truth: Tensor, *, num_runs: int, most: int, look_every: int, seed: int, alpha: float, null_tv: float
) -> list[float]:
    """How many draws each of `num_runs` tests took to reject, one context; inf where `most` were not enough."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.zeros(num_runs, 1, len(law), dtype=torch.float64)
    taken = torch.full((num_runs,), math.inf)
    for num in range(look_every, most + 1, look_every):
        counts = counts + multinomial_counts(truth[None], torch.tensor([look_every]), num_runs, generator)
        evidence = combined(log_e_values(counts, law[None], torch.tensor([len(law)]), null_tv))
        taken[(evidence >= -math.log(alpha)) & taken.isinf()] = num
        if not taken.isinf().any():
            break
    return taken.tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=16)
    parser.add_argument("--runs", type=int, default=200, help="for each deviation")
    parser.add_argument("--right-runs", type=int, default=1000, help="with the right law")
    parser.add_argument("--right-draws", type=int, default=20_000, help="in each of them")
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    law = torch.randn(args.vocab, generator=generator, dtype=torch.float64).softmax(-1)
    options = {"alpha": ALPHA, "null_tv": NULL_TV}
    print(f"V = {args.vocab}, alpha = {ALPHA}, null: a ball of total variation {NULL_TV}, a look every 10 draws")
    for distance in (0.44, 0.15, 0.06, 0.03):
        for name, truth in (
            ("hardest direction", hardest_direction(law, distance)),
            ("one token to another", moved(law, distance)),
        ):
            taken = draws_to_catch(law, truth, num_runs=args.runs, most=100_000, look_every=10, seed=1, **options)
            ordered = sorted(taken)
            print(
                f"TV {distance:.2f}, {name:21s} median {ordered[len(ordered) // 2]:8,.0f} draws, "
                f"99 % by {ordered[int(0.99 * len(ordered))]:8,.0f} ({args.runs} runs)"
            )
    for name, truth in (("the law itself", law), ("the edge of the ball", hardest_direction(law, NULL_TV))):
        taken = draws_to_catch(
            law, truth, num_runs=args.right_runs, most=args.right_draws, look_every=10, seed=2, **options
        )
        alarms = sum(math.isfinite(one) for one in taken)
        print(f"{name}: {alarms} alarms in {args.right_runs:,} runs of {args.right_draws:,} draws")


def moved(law: Tensor, distance: float) -> Tensor:
    """Mass taken evenly from the likeliest tokens that hold it, given to the least likely one."""
    moved_law = law.clone()
    left = distance
    for token in law.argsort(descending=True).tolist():
        taken = min(left, float(moved_law[token]))
        moved_law[token] -= taken
        left -= taken
    moved_law[law.argmin()] += distance - left
    return moved_law


if __name__ == "__main__":
    main()
