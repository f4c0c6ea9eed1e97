"""Drafters whose model has token ids of its own, and what goes wrong on the way from one vocabulary to the other.

The draft model's id i stands for token i + OFFSET, round the vocabulary. A map is a table of such offsets, or of ids.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specbench.protocols import Cache, LanguageModel
from specbench.reference.drafters.model import ModelDrafter
from specbench.reference.drafters.sampled import SampledDrafter
from specbench.reference.faults.draws import laws_of
from specbench.reference.faults.fault import Fault
from specbench.reference.faults.housing import drafting, shaped
from specbench.steps import FlatTree
from specbench.tree import DraftTree
from specbench.types import Taps

OFFSET = 3
PADDING = 5


class _Unmapped(ModelDrafter):
    def draft(self, context: list[int], **keywords: Any) -> DraftTree:
        tree = super().draft(context, **keywords)
        return DraftTree.of(_own_ids(tree.token_list, self._session.vocab_size), tree.parent_list)


class _OffsetForId(ModelDrafter):
    """The table's entry is taken for the token instead of being added to the id."""

    def draft(self, context: list[int], **keywords: Any) -> DraftTree:
        tree = super().draft(context, **keywords)
        token = OFFSET % self._session.vocab_size
        return DraftTree.of([tree.token_list[0]] + [token] * tree.num_drafts, tree.parent_list)


class _FedBackUnmapped(ModelDrafter):
    """Drafts are handed on as tokens, and read by the draft model's next step as ids."""

    def __init__(self, model: LanguageModel, **keywords: Any) -> None:
        super().__init__(model, **keywords)
        steps, vocab_size = self._session.steps, self._session.vocab_size

        def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
            flat = steps.flatten(tree, prefix_len)
            return replace(flat, tokens=torch.tensor(_own_ids(flat.tokens.tolist(), vocab_size)))

        self._session.steps = replace(steps, flatten=flatten)


class _Padded(ModelDrafter):
    """The head is padded to a round size with rows that no training has touched, and an id beyond the vocabulary is
    taken for the last one."""

    def __init__(self, model: LanguageModel, **keywords: Any) -> None:
        super().__init__(model, **keywords)
        steps = self._session.steps

        def forward(model: LanguageModel, flat: FlatTree, cache: Cache, *, taps: Taps | None = None) -> Tensor:
            logits = steps.forward(model, flat, cache, taps=taps).clone()
            beyond = -logits[:, :PADDING]  # as good as any other noise
            logits[:, -1] = torch.maximum(logits[:, -1], beyond.amax(dim=1))
            return logits

        self._session.steps = replace(steps, forward=forward)


class _NotScattered(SampledDrafter):
    def draft(self, context: list[int], **keywords: Any) -> DraftTree:
        tree = super().draft(context, **keywords)
        return replace(tree, draft_probs=laws_of(tree).roll(-OFFSET, dims=1))


class _PaddingCutOff(SampledDrafter):
    """The softmax is over the padded head; what lies beyond the vocabulary is cut off behind it."""

    def _law(self, logits: Tensor, temperature: float) -> Tensor:
        padded = torch.nn.functional.pad(logits, (0, PADDING))
        return super()._law(padded, temperature)[: len(logits)]


class _SpecialEachRound(ModelDrafter):
    """The text goes through the tokenizer once more each round, which puts its special token in front of it."""

    _num_specials = 0

    def _catch_up(self, tokens: list[int]) -> None:
        super()._catch_up([0] * self._num_specials + tokens)
        self._num_specials += 1


def _own_ids(tokens: list[int], vocab_size: int) -> list[int]:
    """The root stays: it comes from the target."""
    return [tokens[0], *((token - OFFSET) % vocab_size for token in tokens[1:])]


FAULTS = (
    Fault(
        "draft_ids_unmapped",
        "tokenizer/vocab",
        "ids of the draft model's vocabulary are drafted as they are",
        "any draft; the output stays right, only acceptance falls",
        "drafter.tree",
        target=drafting(shaped(_Unmapped, 1, 1), itself=True),
        origin="NVIDIA-NeMo/Automodel#2447",
    ),
    Fault(
        "offset_taken_for_id",
        "tokenizer/vocab",
        "the map's offset is drafted instead of the id with the offset added",
        "any draft; the output stays right, only acceptance falls",
        "drafter.tree",
        target=drafting(shaped(_OffsetForId, 1, 1), itself=True),
    ),
    Fault(
        "fed_back_unmapped",
        "tokenizer/vocab",
        "drafts are mapped on their way out, and the draft model's next step reads another id",
        "a draft of two levels; the output stays right, only acceptance falls",
        "drafter.tree",
        target=drafting(shaped(_FedBackUnmapped, 1, 1), itself=True),
        subtle="depth two",
    ),
    Fault(
        "padded_ids_clamped",
        "tokenizer/vocab",
        "ids of the padded head are let win, and become the last token of the vocabulary",
        "a row in which padding wins",
        "drafter.tree",
        target=drafting(shaped(_Padded, 1, 1, 1), itself=True),
        origin="vllm-project/vllm#35937",
        subtle="a row in which padding wins",
    ),
    Fault(
        "q_not_scattered",
        "tokenizer/vocab",
        "draft_probs are in the order of the draft model's ids, the drafts are tokens",
        "any draw",
        "drafter.law",
        target=drafting(_NotScattered),
    ),
    Fault(
        "q_with_padding_cut_off",
        "tokenizer/vocab",
        "draft_probs are a softmax over the padded head with the padding cut off: they sum to less than one",
        "any draw",
        "drafter.law",
        target=drafting(_PaddingCutOff),
    ),
    Fault(
        "special_token_each_round",
        "tokenizer/vocab",
        "the drafter's text is encoded anew each round, with one more special token in front of it",
        "a second round; the output stays right, only acceptance falls",
        "drafter.state",
        target=drafting(shaped(_SpecialEachRound, 1, 1)),
        subtle="a second round",
    ),
)
