"""Faults of the round loop: buffers and numbers of an earlier round, rows encoded twice, rows read one too late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specbench.protocols import Cache, LanguageModel
from specbench.reference.decoder import Decoder, DecodingSession
from specbench.reference.faults.fault import Fault
from specbench.reference.layouts import flatten_causal
from specbench.reference.target import ReferenceTarget
from specbench.reference.verify import threshold_walk
from specbench.steps import FlatTree, Steps, WalkStep
from specbench.tree import DraftTree
from specbench.types import NEVER_STOP, Generation, Stop, Taps, VerifyResult


def _stale_mask(steps: Steps) -> Steps:
    buffer = torch.zeros(0, 0, dtype=torch.bool)

    def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
        nonlocal buffer
        flat = steps.flatten(tree, prefix_len)
        size = max(len(buffer), flat.num_rows)
        grown = torch.zeros(size, size, dtype=torch.bool)
        grown[: len(buffer), : len(buffer)] = buffer
        grown[: flat.num_rows, : flat.num_rows] |= flat.mask  # what an earlier, larger tree let see is still set
        buffer = grown
        return replace(flat, mask=buffer[: flat.num_rows, : flat.num_rows].clone())

    return replace(steps, flatten=flatten)


def _base_never_falls(steps: Steps) -> Steps:
    base = 0

    def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
        nonlocal base
        flat = steps.flatten(tree, prefix_len)
        base = max(base, prefix_len)
        return replace(flat, position_ids=flat.position_ids - prefix_len + base)

    return replace(steps, flatten=flatten)


def _dry_run(steps: Steps) -> Steps:
    def forward(model: LanguageModel, flat: FlatTree, cache: Cache, *, taps: Taps | None = None) -> Tensor:
        model.forward(flatten_causal(flat.tokens.tolist(), 0), model.new_cache())  # for its side effects
        return steps.forward(model, flat, cache, taps=taps)

    return replace(steps, forward=forward)


class _SimilarPromptReused(Decoder):
    """A request whose prompt is as long as the last one and begins like it finds its rows in the cache."""

    _last: tuple[int, ...] = ()

    def generate(self, prompt: Sequence[int], **keywords: Any) -> Generation:
        last, self._last = self._last, tuple(prompt)
        if len(prompt) == len(last) and tuple(prompt[:1]) == last[:1] and self.cache_len >= len(prompt) - 1:
            self.truncate(len(prompt) - 1)
        else:
            self.prefill(prompt[:-1])
        return DecodingSession(self).generate(prompt, **keywords)


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
        "mask_buffer_stale",
        "static-buffer-stale",
        "the mask buffer keeps what an earlier, larger tree let see",
        "a smaller tree after a larger one",
        "greedy.repeatable",
        _stale_mask,
    ),
    Fault(
        "positions_never_fall",
        "loop-state-stale",
        "positions go on from the longest text so far, after a cut or a new prompt too",
        "a shorter text after a longer one",
        "kv.machine",
        _base_never_falls,
    ),
    Fault(
        "encoded_twice",
        "performance",
        "every forward is run once more on an empty cache",
        "any forward",
        "cost.rows",
        _dry_run,
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
        "similar_prompt_reused",
        "chunked-prefill/prefix-cache",
        "a prompt of the same length and the same first token is taken for the one that is cached",
        "two prompts that differ in a later token",
        "greedy.repeatable",
        target=lambda: ReferenceTarget(decoder=_SimilarPromptReused),
    ),
    Fault(
        "later_turns_go_on",
        "eos/stop/max-length",
        "the second turn of a session ignores stop sequences and the least length",
        "a second turn with a stop sequence",
        "stop.resume",
        target=lambda: ReferenceTarget(decoder=_LaterTurnsGoOn),
    ),
)
