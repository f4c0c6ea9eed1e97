"""The exact joint law of what a decoder emits: drafts drawn from q, verified, and drafted again, over toy models.

One round's law depends on its context alone, so it is enumerated once a context, drafts first, then what the rule makes
of each; equal outcomes are merged. Nothing is sampled, and with fractions nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, TypeVar

from specbench.law.enumeration import Enumeration, outcomes
from specbench.law.toys import START, Context, Drafted, Drafting, Parents, Toy, draft
from specbench.reference.verify.chance import RuleFn

Tokens = tuple[int, ...]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class RoundLaw:
    """P of the tokens that one round emits: accepted drafts and the one behind them."""

    emitted: Mapping[Tokens, Any]

    @cached_property
    def expected_accepted(self) -> Any:
        return sum(weight * (len(tokens) - 1) for tokens, weight in self.emitted.items())


@lru_cache(maxsize=1024)
def round_law(verify: RuleFn, toy: Toy, context: Context, shape: Parents, drafting: Drafting) -> RoundLaw:
    emitted: dict[Tokens, Any] = {}
    if drafting == "race":  # its noise is looked at again by the rule, so that both belong to one enumeration
        drawn = outcomes(lambda chance: _said(verify, draft(toy, context, shape, drafting, chance), chance))
        for weight, tokens in drawn:
            _add(emitted, tokens, weight)
        return RoundLaw(emitted)
    for drafted, draft_weight in draft_law(toy, context, shape, drafting):
        for weight, tokens in outcomes(partial(_said, verify, drafted)):
            _add(emitted, tokens, draft_weight * weight)
    return RoundLaw(emitted)


@lru_cache(maxsize=256)
def draft_law(toy: Toy, context: Context, shape: Parents, drafting: Drafting) -> tuple[tuple[Drafted, Any], ...]:
    """Every tree that may be drafted, and its probability."""
    drawn = outcomes(lambda chance: draft(toy, context, shape, drafting, chance))
    return tuple((drafted, weight) for weight, drafted in drawn)


def joint_law(
    verify: RuleFn, toy: Toy, shape: Parents, drafting: Drafting, num_tokens: int, *, num_rounds: int | None = None
) -> dict[Tokens, Any]:
    """P of the first `num_tokens` tokens behind START, over as many rounds as they take.

    num_rounds: plain draws from p complete the text after that many rounds.
    """
    law: dict[Tokens, Any] = {}
    texts: dict[Tokens, Any] = {(): 1}
    num_done = 0
    while texts:
        longer: dict[Tokens, Any] = {}
        for text, weight in texts.items():
            context = START + text
            if num_rounds is not None and num_done >= num_rounds:
                following: Mapping[Tokens, Any] = {(token,): mass for token, mass in enumerate(toy.p(context)) if mass}
            else:
                following = round_law(verify, toy, context, shape, drafting).emitted
            for tokens, mass in following.items():
                said = (text + tokens)[:num_tokens]
                _add(law if len(said) == num_tokens else longer, said, weight * mass)
        texts = longer
        num_done += 1
    return law


def target_law(toy: Toy, num_tokens: int) -> dict[Tokens, Any]:
    """P of the same tokens under plain decoding."""
    law: dict[Tokens, Any] = {(): 1}
    for _ in range(num_tokens):
        law = {
            (*text, token): weight * mass
            for text, weight in law.items()
            for token, mass in enumerate(toy.p(START + text))
            if mass
        }
    return law


def total_variation(law: Mapping[Key, Any], other: Mapping[Key, Any]) -> Any:
    """Half the sum of all differences: the largest difference in the probability of any event."""
    differences = [abs(law.get(key, 0) - other.get(key, 0)) for key in {**law, **other}]
    return sum(differences) / 2


def _said(verify: RuleFn, drafted: Drafted, chance: Enumeration) -> Tokens:
    result = verify(drafted.tree, drafted.target_probs, drafted.draft_probs, chance)
    return (*drafted.tokens(result.path), result.bonus_token)


def _add(law: dict[Tokens, Any], tokens: Tokens, weight: Any) -> None:
    law[tokens] = law[tokens] + weight if tokens in law else weight
