"""Decoders that are right and forward more rows than they must."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specbench.protocols import Cache, LanguageModel
from specbench.reference.decoder import Decoder
from specbench.reference.faults.fault import Fault
from specbench.reference.layouts import flatten_causal
from specbench.reference.target import ReferenceTarget
from specbench.steps import Emission, FlatTree, Steps
from specbench.tree import DraftTree, chain
from specbench.types import Generation, Round, Taps, VerifyResult

BLOCK = 4


def _dry_run(steps: Steps) -> Steps:
    def forward(model: LanguageModel, flat: FlatTree, cache: Cache, *, taps: Taps | None = None) -> Tensor:
        model.forward(flatten_causal(flat.tokens.tolist(), 0), model.new_cache())  # for its side effects
        return steps.forward(model, flat, cache, taps=taps)

    return replace(steps, forward=forward)


def _padded(steps: Steps) -> Steps:
    """A block is filled up to a power of two with rows that see themselves only."""

    def forward(model: LanguageModel, flat: FlatTree, cache: Cache, *, taps: Taps | None = None) -> Tensor:
        num_rows, prefix_len = flat.num_rows, cache.length
        padding = 2 ** (num_rows - 1).bit_length() - num_rows
        if taps is not None or not padding:
            return steps.forward(model, flat, cache, taps=taps)
        filled = FlatTree(
            tokens=torch.nn.functional.pad(flat.tokens, (0, padding)),
            position_ids=torch.nn.functional.pad(flat.position_ids, (0, padding), value=prefix_len),
            mask=torch.block_diag(flat.mask, torch.eye(padding)).bool(),
            node_of_row=torch.nn.functional.pad(flat.node_of_row, (0, padding)),
            row_of_node=flat.row_of_node,
        )
        logits = steps.forward(model, filled, cache)
        cache.truncate(prefix_len + num_rows)
        return logits[:num_rows]

    return replace(steps, forward=forward)


class _PromptTwice(Decoder):
    """Once for the logits behind it, once for the cache."""

    def generate(self, prompt: Sequence[int], **keywords: Any) -> Generation:
        self.prefill(prompt)
        return super().generate(prompt, **keywords)


class _PrefixEachRound(Decoder):
    def round(self, context: list[int], **keywords: Any) -> tuple[Round, str | None]:
        self.prefill(context[:-1])
        return super().round(context, **keywords)


class _RebuiltAfterRejection(Decoder):
    """Where a draft was refused, the cache is dropped instead of cut."""

    def round(self, context: list[int], **keywords: Any) -> tuple[Round, str | None]:
        one, reason = super().round(context, **keywords)
        if len(one.path) < int(DraftTree.of(one.tokens, one.parents).depth.max()):
            self.prefill([*context, *one.emitted][:-1])
        return one, reason


class _AgainAfterRejection(Decoder):
    """The row of the correction is computed by a second forward of the tree."""

    def decide(
        self, tree: DraftTree, target_logits: Tensor, context: Sequence[int], **keywords: Any
    ) -> tuple[VerifyResult, Emission]:
        result, emission = super().decide(tree, target_logits, context, **keywords)
        if len(result.path) < int(tree.depth.max()):
            self.forward_tree(tree)
        return result, emission


class _PlaceholdersVerified(Decoder):
    """The block has one size: without drafts it is verified full of copies of the root, and then the root alone."""

    def forward_tree(self, tree: DraftTree, *, taps: Taps | None = None) -> Tensor:
        if not tree.num_drafts:
            super().forward_tree(chain(tree.token_list * BLOCK))
        return super().forward_tree(tree, taps=taps)


class _BeyondTheLimit(Decoder):
    """As many levels are drafted and verified as ever, however few tokens are left to emit."""

    def draft_round(self, context: list[int], *, num_remaining: int, **named: Any) -> DraftTree:
        del num_remaining
        return super().draft_round(context, num_remaining=self._max_depth + 1, **named)


def _decoder(kind: type[Decoder]) -> Callable[[], ReferenceTarget]:
    return lambda: ReferenceTarget(decoder=kind)


FAULTS = (
    Fault(
        "encoded_twice",
        "performance",
        "every forward is run once more on an empty cache",
        "any forward",
        "cost.rows",
        _dry_run,
    ),
    Fault(
        "padded_to_power_of_two",
        "performance",
        "the rows of every forward are filled up to a power of two",
        "a forward of another size",
        "cost.rows",
        _padded,
        subtle="a size that is no power of two",
    ),
    Fault(
        "prompt_encoded_twice",
        "performance",
        "the prompt is encoded once for the logits behind it and once for the cache",
        "a prompt of some tokens",
        "cost.rows",
        target=_decoder(_PromptTwice),
        kin="prefix encoded again",
    ),
    Fault(
        "prefix_encoded_each_round",
        "performance",
        "each round drops the cache and encodes the whole prefix again",
        "a second round",
        "cost.rows",
        target=_decoder(_PrefixEachRound),
        subtle="a second round",
        kin="prefix encoded again",
    ),
    Fault(
        "rebuilt_after_rejection",
        "performance",
        "where a draft was refused, the cache is dropped instead of cut, and the prefix encoded again",
        "a refused draft",
        "cost.rows",
        target=_decoder(_RebuiltAfterRejection),
        subtle="a rejection",
        kin="prefix encoded again",
    ),
    Fault(
        "verified_again_after_rejection",
        "performance",
        "the correction's row comes from a second forward of the whole tree",
        "a refused draft",
        "cost.rows",
        target=_decoder(_AgainAfterRejection),
        subtle="a rejection",
    ),
    Fault(
        "placeholders_verified",
        "performance",
        "a round without drafts verifies a block of placeholders all the same, beside the plain step",
        "a round without drafts",
        "cost.rows",
        target=_decoder(_PlaceholdersVerified),
        origin="vllm-project/vllm#52762",
        subtle="a round without drafts",
    ),
    Fault(
        "drafts_beyond_the_limit",
        "performance",
        "as many levels are drafted and verified as ever, however few tokens are left to emit",
        "a draft deeper than what is left of max_new_tokens",
        "drafter.self_draft",
        target=_decoder(_BeyondTheLimit),
        subtle="a last round",
    ),
)
