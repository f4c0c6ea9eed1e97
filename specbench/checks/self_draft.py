"""The claim that a target which drafts for itself accepts everything: what the output cannot show, acceptance does.

A decoder stays lossless when its drafter reads a stale cache or stands at a wrong position; only drafts get worse. With
the target as its own drafter the right draft is known: every one is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from specbench import claims
from specbench.cases import OWN_DRAFTERS, Case, GenerationCase
from specbench.checks.generation import make_drafter, rounds_of
from specbench.checks.noise import token_bound
from specbench.claims import Facts
from specbench.compare import regret
from specbench.loading import EXPOSE
from specbench.protocols import Coins, Drafter
from specbench.record import ClaimRecord
from specbench.subjects import NotTested, Subject
from specbench.tree import DraftTree
from specbench.types import Round, Sampling, VerifyResult


def check_self_draft(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """Every round accepts as deep as it drafted, but for rounds that the script spoilt and a last one that the limit
    cuts. A refused draft is excused where its regret under the oracle is below the noise of plain decoding; one that
    lies deeper than there are tokens left to emit is not."""
    assert isinstance(case, GenerationCase)
    if subject.codec(case):  # rounded keys and values make the target another model than its drafter's
        case = replace(case, cache="contiguous")
    spoilt: set[int] = set()
    if "build" in subject.has:
        drafter = _Spoiling(
            _self_drafter(subject, case), [one.accept for one in case.rounds], subject.vocab_size(case.model)
        )
        probe, spoilt = subject.open(case, drafter=drafter), drafter.spoilt
    elif "drafter_checkpoint" in subject.has:
        probe = subject.open(case, drafts_itself=True)
    else:
        raise NotTested(f"{EXPOSE['build']}; or {EXPOSE['drafter_checkpoint']}")
    generation = probe.generate(case.prompt, max_new_tokens=case.max_new_tokens)
    rounds = rounds_of(generation, case)
    record.num_rounds += len(rounds)
    record.num_nodes += sum(len(one.tokens) - 1 for one in rounds)
    text, num_drafted = list(case.prompt), 0
    for number, one in enumerate(rounds, start=1):
        tree = DraftTree.of(one.tokens, one.parents)
        deepest = int(tree.depth.max())
        num_drafted += deepest
        num_remaining = len(case.prompt) + case.max_new_tokens - len(text)
        if deepest > num_remaining:
            _beyond(one, tree, number, num_remaining)
        refused = tree.children(one.path[-1] if one.path else 0)
        if refused and len(text) not in spoilt and deepest < num_remaining:
            _judge_refusal(subject, case, record, text, one, number)
        text += one.emitted
    if not num_drafted and case.max_new_tokens > 4:
        raise NotTested(f"no round of {len(rounds)} held a draft, though the target drafts for itself: let it draft")


class _Spoiling:
    """A drafter whose first rounds are accepted down to a chosen level only: one level deeper every token is wrong.

    The drafter behind it goes on as if its own draft had been refused there, so whatever state refusals leave in it
    shows in the rounds after the script. spoilt: lengths of the contexts of such rounds.
    """

    def __init__(self, drafter: Drafter, levels: Sequence[int], vocab_size: int) -> None:
        self._drafter = drafter
        self._levels = list(levels)
        self._vocab_size = vocab_size
        self.spoilt: set[int] = set()

    def draft(
        self, context: list[int], *, max_nodes: int, max_depth: int, sampling: Sampling, coins: Coins
    ) -> DraftTree:
        tree = self._drafter.draft(context, max_nodes=max_nodes, max_depth=max_depth, sampling=sampling, coins=coins)
        if not self._levels:
            return tree
        level, tokens = self._levels.pop(0), list(tree.token_list)
        for node in range(tree.num_nodes):
            if int(tree.depth[node]) != level or not tree.children(node):
                continue
            drafted = {tree.token_list[child] for child in tree.children(node)}
            wrong = next((one for one in range(self._vocab_size) if one not in drafted), None)
            if wrong is None:
                return tree  # every token of a tiny vocabulary is drafted: none is surely wrong
            for child in tree.children(node):
                tokens[child] = wrong
        if tokens != tree.token_list:
            self.spoilt.add(len(context))
        return DraftTree.of(tokens, tree.parent_list)

    def observe(self, result: VerifyResult) -> None:
        observe = getattr(self._drafter, "observe", None)
        if observe is not None:
            observe(result)


def _self_drafter(subject: Subject, case: GenerationCase) -> Drafter:
    """The one a case names: ours over the target's model, or the target's own over the same."""
    if case.drafter in OWN_DRAFTERS:
        own = subject.self_drafters
        place = OWN_DRAFTERS.index(case.drafter)
        if place >= len(own):
            raise NotTested(
                "let the target declare self_drafters, those of its drafter_names that draft like the model"
            )
        made: Drafter = subject.build_drafter(own[place], subject.bank.model(case.model))
        return made
    drafter = make_drafter(subject, case)
    assert drafter is not None
    return drafter


def _beyond(one: Round, tree: DraftTree, number: int, num_remaining: int) -> NoReturn:
    deepest = int(tree.depth.max())
    raise claims.SelfDraftRejected(
        Facts(
            headline=f"round {number} verifies drafts {deepest} levels deep, with {num_remaining} tokens left to emit",
            expected=f"at most {num_remaining} levels",
            actual=f"{deepest} levels, {len(one.emitted)} tokens emitted",
            source="max_new_tokens: what lies deeper is never emitted, whatever is accepted",
            tree=tree,
        )
    )


def _judge_refusal(
    subject: Subject,
    case: GenerationCase,
    record: ClaimRecord,
    text: list[int],
    one: Round,
    number: int,
) -> None:
    tree = DraftTree.of(one.tokens, one.parents)
    last = one.path[-1] if one.path else 0
    drafted = [tree.token_list[child] for child in tree.children(last)]
    said = [*text, *(tree.token_list[node] for node in one.path)]
    oracle = subject.rows(case, said)[len(case.prompt) - 1 :]
    bound = token_bound(subject, case, case.prompt, [*said[len(case.prompt) :], one.bonus_token], oracle)
    margin = min(regret(oracle[-1], token) for token in drafted)
    if margin <= bound.value:
        record.num_ties += 1
        return
    depth = len(one.path) + 1
    raise claims.SelfDraftRejected(
        Facts(
            headline=f"round {number} refuses the self-draft at depth {depth} of {int(tree.depth.max())}",
            expected=f"all {int(tree.depth.max())} levels accepted",
            actual=f"{len(one.path)} accepted, then {one.bonus_token} instead of {drafted}",
            source="the target as its own drafter",
            remark=f"drafted {margin:.2g} below the target's own choice (not a tie: bound {bound})",
            tree=tree,
            notes={**dict.fromkeys(one.path, "accepted"), **dict.fromkeys(tree.children(last), "refused")},
        )
    )
