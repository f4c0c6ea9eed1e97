"""Acceptance in sampled generations: never more than a lossless rule can have, whatever a level-2 verifier says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from specbench import claims
from specbench.cases import Case, SampledCase
from specbench.checks.law import judged_once, sampling_of
from specbench.checks.sampled import ALPHA, FALSE_ALARM, Wavering, judged, wavering_over
from specbench.claims import Facts
from specbench.law.betting import BoundTest, most_kept
from specbench.record import ClaimRecord
from specbench.reference.sampling import probs
from specbench.subjects import NotTested, Subject
from specbench.tree import DraftTree
from specbench.types import Generation, Round, Sampling

NUM_TEXTS = 250  # a case, of some ten rounds each
SHAPES = ((1,), (2,), (1, 1))  # widths of drafts
WARMER = 3.0
DEVIATIONS = 4  # that the share of kept drafts is below the usual rule's, to be told as lost speed


class Remembering(Wavering):
    """Keeps what it drafted, from the model's law at a higher temperature: many tokens are a little too likely in it,
    so that a test that keeps too many has much to keep."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.drafted: list[DraftTree] = []

    def _law(self, logits: Tensor, temperature: float) -> Tensor:
        return probs(logits, Sampling(temperature=WARMER * temperature))

    def draft(self, context: list[int], **asked: Any) -> DraftTree:
        self.drafted.append(super().draft(context, **asked))
        return self.drafted[-1]


def check_accepted(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """The same request with one seed after the other; a bet on each round that has drafts."""
    assert isinstance(case, SampledCase)
    judged_once(subject)
    drafter = wavering_over(subject, case, SHAPES, kind=Remembering)
    assert isinstance(drafter, Remembering)
    sampling, test, single = sampling_of(case), BoundTest(alpha=ALPHA), BoundTest(alpha=ALPHA)
    probe = subject.open(case, drafter=drafter)
    for num in range(NUM_TEXTS):
        drafter.drafted.clear()
        generation = probe.generate(
            case.prompt, max_new_tokens=case.max_new_tokens, sampling=sampling, seed=case.seed + num
        )
        tokens = judged(claims.KeepsTooMany, generation, case, case.max_new_tokens)
        laws = probs(subject.rows(case, [*case.prompt, *tokens]), sampling)
        record.num_tokens += len(tokens)
        record.num_rounds += len(generation.rounds)
        for place, tree, one in drafted_rounds(generation, drafter.drafted, len(case.prompt)):
            q = tree.draft_probs
            assert q is not None
            num_drafts = len(tree.children(0))
            bound = most_kept(laws[place - 1], q[0], num_drafts, tree.proposal)
            for each in (test, single) if num_drafts == 1 else (test,):
                each.note(bool(one.path), bound)
        if test.is_rejected:
            raise claims.KeepsTooMany(
                Facts(
                    headline=f"{test.num_kept} of {test.num_rounds} rounds keep a draft behind the root, more than any "
                    f"lossless rule can (e-value {math.exp(min(test.log_e_value, 700)):.1e})",
                    expected=f"at most {test.expected / test.num_rounds:.3f} of them, expected",
                    actual=f"{test.num_kept / test.num_rounds:.3f}",
                    source="the largest flow from drafts to the oracle's law, summed over the rounds (arXiv "
                    "2502.18779); bets against it (arXiv 2010.09686)",
                    remark=f"seeds {case.seed} to {case.seed + num}; false alarms at most {FALSE_ALARM:g} a run",
                )
            )
    if not test.num_rounds:
        raise NotTested("none of its rounds has drafts")
    record.note_remark(
        f"{100 * test.num_kept / test.num_rounds:.1f} % of {test.num_rounds} rounds keep a first draft, at most "
        f"{100 * test.expected / test.num_rounds:.1f} % can be; {100 * test.detectable_excess():.1f} % more would have "
        "shown as often as not"
    )
    if single.num_kept < single.expected - DEVIATIONS * single.num_rounds**0.5 / 2:
        record.note_remark(
            f"of single drafts {single.num_kept} in {single.num_rounds} are kept, {single.expected:.0f} could be: "
            "speed is lost, no token is wrong"
        )


def drafted_rounds(
    generation: Generation, drafted: list[DraftTree], num_prompt: int
) -> Iterator[tuple[int, DraftTree, Round]]:
    """Rounds with drafts: how many tokens stood before each, what the drafter gave for it, and what became of it.

    NotTested where it is not plain which draft is whose. To leave such generations out instead would choose among
    them: a target that drafts again after a refusal would be left with those that refuse nothing.
    """
    rounds = [one for one in generation.rounds if len(one.tokens) > 1]
    trees = [one for one in drafted if one.num_drafts]
    emitted = tuple(token for one in generation.rounds for token in one.emitted)
    if len(rounds) != len(trees) or emitted != generation.tokens:
        raise NotTested(
            "its rounds cannot be told from one another: it must ask its drafter once a round, verify what it gets, "
            "and report each round's drafts and tokens"
        )
    by_round = iter(trees)
    place = num_prompt
    for one in generation.rounds:
        if len(one.tokens) > 1:
            yield place, next(by_round), one
        place += len(one.emitted)
