"""Faults of the round loop: numbers and drafts of an earlier round or request, rows read too late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from specbench.reference.decoder import Decoder, DecodingSession
from specbench.reference.faults.fault import Fault
from specbench.reference.target import ReferenceTarget
from specbench.reference.verify import threshold_walk
from specbench.steps import FlatTree, Steps, WalkStep
from specbench.tree import DraftTree, root_only
from specbench.types import NEVER_STOP, Generation, Round, Stop, VerifyResult


def _base_never_falls(steps: Steps) -> Steps:
    base = 0

    def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
        nonlocal base
        flat = steps.flatten(tree, prefix_len)
        base = max(base, prefix_len)
        return replace(flat, position_ids=flat.position_ids - prefix_len + base)

    return replace(steps, flatten=flatten)


class _DraftsKept(Decoder):
    """The next round's drafts are made ahead, and those left over when a request ends are the next one's first."""

    _ahead: DraftTree | None = None

    def round(self, context: list[int], **keywords: Any) -> tuple[Round, str | None]:
        one, finish_reason = super().round(context, **keywords)
        if finish_reason is not None:
            asked = {name: keywords[name] for name in ("sampling", "coins")}
            self._ahead = self.draft_round([*context, *one.emitted], num_remaining=2, **asked)
        return one, finish_reason

    def draft_round(self, context: list[int], **asked: Any) -> DraftTree:
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return super().draft_round(context, **asked)
        return DraftTree.of([context[-1], *ahead.token_list[1:]], ahead.parent_list)


class _OddRoundsSwap(Decoder):
    """Drafts go through two buffers in turn. A new request starts writing at the first again, reading goes on."""

    _writes = _reads = 0
    _buffers: tuple[DraftTree | None, DraftTree | None] = (None, None)

    def reset(self) -> None:
        super().reset()
        self._writes = 0

    def draft_round(self, context: list[int], **asked: Any) -> DraftTree:
        buffers = list(self._buffers)
        buffers[self._writes % 2] = super().draft_round(context, **asked)
        drafted = buffers[self._reads % 2] or root_only(context[-1])
        self._buffers = buffers[0], buffers[1]
        self._writes, self._reads = self._writes + 1, self._reads + 1
        return drafted


class _RootStaleAfterPlain(Decoder):
    """The root of a round is what the last round with drafts has said; a plain step does not put it down."""

    _root: int | None = None

    def draft_round(self, context: list[int], **asked: Any) -> DraftTree:
        tree, root = super().draft_round(context, **asked), self._root
        if not tree.num_drafts:
            self._root = root if root is not None else context[-1]
            return tree
        self._root = None
        return tree if root is None else DraftTree.of([root, *tree.token_list[1:]], tree.parent_list)


class _LimitOfLastRequest(Decoder):
    """The token count is set anew only by a request that asks for more than the one before."""

    _limit = 0

    def generate(self, prompt: Sequence[int], *, max_new_tokens: int, **keywords: Any) -> Generation:
        self._limit = max(self._limit, max_new_tokens)
        return super().generate(prompt, max_new_tokens=self._limit, **keywords)


class _LeastLengthCountsOn(Decoder):
    """Tokens of earlier requests count towards the least length."""

    _num_said = 0

    def generate(self, prompt: Sequence[int], *, stop: Stop = NEVER_STOP, **keywords: Any) -> Generation:
        stop = replace(stop, min_new_tokens=max(0, stop.min_new_tokens - self._num_said))
        answer = super().generate(prompt, stop=stop, **keywords)
        self._num_said += len(answer.tokens)
        return answer


class _LaterTurnsGoOn(Decoder):
    """From the second turn on a session knows end tokens only."""

    def session(self) -> DecodingSession:
        self.reset()
        return _Forgetful(self)


class _Forgetful(DecodingSession):
    def generate(self, prompt: Sequence[int], *, stop: Stop = NEVER_STOP, **keywords: Any) -> Generation:
        return super().generate(prompt, stop=Stop(stop.eos_token_ids) if self.text else stop, **keywords)


class _ThresholdOfOwnRow(Decoder):
    """Under threshold acceptance a draft's probability is read from its own row."""

    def with_threshold(self, threshold: float) -> Any:
        return Decoder(self.model, self._drafter, steps=replace(self.steps, walk=_own_row(threshold_walk(threshold))))


def _own_row(walk: WalkStep) -> WalkStep:
    def walk_on_own_rows(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
        # Each node is given the row of its first child, so that a parent is read where the child should be.
        rows = [(tree.children(node) or [node])[0] for node in range(tree.num_nodes)]
        return walk(tree, target_logits[rows])

    return walk_on_own_rows


FAULTS = (
    Fault(
        "positions_never_fall",
        "loop-state-stale",
        "positions go on from the longest text so far, after a cut or a new prompt too",
        "a shorter text after a longer one",
        "kv.machine",
        _base_never_falls,
        subtle="a shorter text after a longer one",
    ),
    Fault(
        "threshold_own_row",
        "row-self",
        "the threshold rule reads a draft's probability one row too late",
        "any draft near the threshold",
        "threshold.consistency",
        target=lambda: ReferenceTarget(decoder=_ThresholdOfOwnRow),
    ),
    Fault(
        "later_turns_go_on",
        "eos/stop/max-length",
        "the second turn of a session ignores stop sequences and the least length",
        "a second turn with a stop sequence",
        "stop.resume",
        target=lambda: ReferenceTarget(decoder=_LaterTurnsGoOn),
        subtle="a second turn with a stop sequence",
    ),
    Fault(
        "drafts_kept",
        "loop-state-stale",
        "drafts made ahead are kept when a request ends, and are the first ones of the next request",
        "a second request; the output stays right, only acceptance falls",
        "greedy.repeatable",
        target=lambda: ReferenceTarget(decoder=_DraftsKept),
        subtle="a second request; the output stays right",
    ),
    Fault(
        "odd_rounds_swap",
        "loop-state-stale",
        "of two buffers for drafts, reading goes on where the last request stopped and writing starts at the first",
        "a request behind one with an odd number of rounds",
        "greedy.repeatable",
        target=lambda: ReferenceTarget(decoder=_OddRoundsSwap),
        subtle="an odd number of rounds in the request before",
    ),
    Fault(
        "root_stale_after_plain",
        "loop-state-stale",
        "behind a plain step the root is still the one of the step before",
        "drafts behind a plain step",
        "greedy.lossless",
        target=lambda: ReferenceTarget(decoder=_RootStaleAfterPlain),
        subtle="a plain step, then drafts",
    ),
    Fault(
        "limit_of_last_request",
        "loop-state-stale",
        "a shorter request is given the limit of the longest one before it",
        "a shorter request after a longer one",
        "greedy.repeatable",
        target=lambda: ReferenceTarget(decoder=_LimitOfLastRequest),
        subtle="a shorter request after a longer one",
    ),
    Fault(
        "least_length_counts_on",
        "loop-state-stale",
        "tokens of earlier requests count towards the least length",
        "an earlier request, and an end token before the least length",
        "stop.min_tokens",
        target=lambda: ReferenceTarget(decoder=_LeastLengthCountsOn),
        subtle="an earlier request, and a least length",
    ),
)
