"""Acceptance in sampled generations: never more than a lossless rule can have, whatever a level-2 verifier says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from specbench import claims
from specbench.cases import Case, SampledCase
from specbench.checks.law import sampling_of
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
    if subject.bank.name != "tiny-fp64":
        raise NotTested("what coins decide is the same in every precision: judged in tiny-fp64")
    drafter = wavering_over(subject, case, SHAPES, kind=Remembering)
    assert isinstance(drafter, Remembering)
    sampling = sampling_of(case)
    # Siblings have a fortune of their own: what is wrong with them alone would be lost among single drafts.
    tests = {name: BoundTest(alpha=ALPHA / 3) for name in ("", "single", "siblings")}
    test, single = tests[""], tests["single"]
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
            for name in ("", "single" if num_drafts == 1 else "siblings"):
                tests[name].note(bool(one.path), bound)
        rejected = next((name for name, each in tests.items() if each.is_rejected), None)
        if rejected is not None:
            found, which = (
                tests[rejected],
                {"": "", "single": "with one draft ", "siblings": "with siblings "}[rejected],
            )
            raise claims.KeepsTooMany(
                Facts(
                    headline=f"{found.num_kept} of {found.num_rounds} rounds {which}keep a draft behind the root, more "
                    f"than any lossless rule can (e-value {math.exp(min(found.log_e_value, 700)):.1e})",
                    expected=f"at most {found.expected / found.num_rounds:.3f} of them, expected",
                    actual=f"{found.num_kept / found.num_rounds:.3f}",
                    source="the largest flow from drafts to the oracle's law, summed over the rounds (arXiv "
                    "2502.18779); bets against it (arXiv 2010.09686)",
                    remark=f"seeds {case.seed} to {case.seed + num}; false alarms at most {FALSE_ALARM:g} a run",
                )
            )
    if test.detectable_excess() > test.most_excess:
        raise NotTested(f"its texts hold {test.num_rounds} rounds with drafts, too few to tell")
    record.note_remark(
        f"{100 * test.num_kept / test.num_rounds:.1f} % of {test.num_rounds} rounds keep a first draft, at most "
        f"{100 * test.expected / test.num_rounds:.1f} % can be; {100 * test.detectable_excess():.1f} % more would have "
        "shown as often as not"
    )
    if single.num_kept < single.expected - DEVIATIONS * single.num_rounds**0.5 / 2:
        record.note_remark(
            f"of single drafts {single.num_kept} in {single.num_rounds} are kept, {single.expected:.0f} could be: "
            "speed is lost"
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
    shapes = [(tuple(one.token_list), tuple(one.parent_list)) for one in trees]
    if emitted != generation.tokens or shapes != [(one.tokens, one.parents) for one in rounds]:
        raise NotTested(
            f"its rounds cannot be told from one another: in one text it was given {len(trees)} drafts and reports "
            f"{len(rounds)} rounds with drafts. It must ask its drafter once a round, verify what it gets and no other "
            "draft, and report each round's drafts and tokens"
        )
    by_round = iter(trees)
    place = num_prompt
    for one in generation.rounds:
        if len(one.tokens) > 1:
            yield place, next(by_round), one
        place += len(one.emitted)
