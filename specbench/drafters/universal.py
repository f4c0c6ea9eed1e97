"""transformers' draft models of another tokenizer: what `generate` takes for `assistant_tokenizer`.

Greedy requests go through text: drafts are decoded and tokenised again. Sampled ones go through a table of the tokens
that both vocabularies spell alike, the assistant's head cut down to those; its law then lies on the target's ids.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.candidate_generator import (
    AssistantToTargetTranslator,
    AssistedCandidateGeneratorDifferentTokenizers,
    UniversalSpeculativeDecodingGenerator,
)

from specbench.drafters.assisted import with_schedule
from specbench.drafters.candidates import CandidateDrafter
from specbench.drafters.toys import other_symbols, symbols, tiny_model, tokenizer
from specbench.protocols import Coins, LanguageModel
from specbench.tree import DraftTree
from specbench.types import Sampling, VerifyResult


class UniversalDrafter:
    """prune: cut the assistant's head, as `generate` does; without it the other tokens are forbidden by a processor."""

    def __init__(
        self,
        assistant: PreTrainedModel,
        assistant_tokenizer: PreTrainedTokenizerBase,
        target_tokenizer: PreTrainedTokenizerBase,
        *,
        vocab_size: int,
        gamma: int = 4,
        prune: bool = True,
    ) -> None:
        tokenizers = {"target_tokenizer": target_tokenizer, "assistant_tokenizer": assistant_tokenizer}
        whole = with_schedule(assistant, gamma, "constant")

        def through_text(ids: Tensor, config: GenerationConfig) -> AssistedCandidateGeneratorDifferentTokenizers:
            kwargs = {"attention_mask": torch.ones_like(ids)}
            return AssistedCandidateGeneratorDifferentTokenizers(
                ids, whole, generation_config=config, model_kwargs=kwargs, **tokenizers
            )

        def through_table(ids: Tensor, config: GenerationConfig) -> UniversalSpeculativeDecodingGenerator:
            # Cutting the head changes the model for good, so each generator cuts one of its own.
            own = copy.deepcopy(whole) if prune else whole
            translator = AssistantToTargetTranslator(
                target_tokenizer, assistant_tokenizer, vocab_size, own, assistant_prune_lm_head=prune
            )
            kwargs = {"attention_mask": torch.ones_like(ids)}
            return UniversalSpeculativeDecodingGenerator(
                ids, own, generation_config=config, model_kwargs=kwargs, atm_translator=translator, **tokenizers
            )

        self._greedy = CandidateDrafter(through_text, vocab_size=vocab_size, num_beyond=0)
        self._sampled = CandidateDrafter(through_table, vocab_size=vocab_size)

    def draft(
        self, context: list[int], *, max_nodes: int, max_depth: int, sampling: Sampling, coins: Coins
    ) -> DraftTree:
        drafter = self._greedy if sampling.temperature == 0.0 else self._sampled
        return drafter.draft(context, max_nodes=max_nodes, max_depth=max_depth, sampling=sampling, coins=coins)

    def observe(self, result: VerifyResult) -> None:
        self._greedy.observe(result)
        self._sampled.observe(result)

    def reset(self) -> None:
        self._greedy.reset()
        self._sampled.reset()


class Universal:
    """A target for the claims: what `generate` does."""

    _prunes = True

    def build_drafter(self, model: LanguageModel) -> UniversalDrafter:
        spelt = tuple(other_symbols(model.vocab_size))
        return UniversalDrafter(
            tiny_model(len(spelt)),
            tokenizer(spelt),
            tokenizer(tuple(symbols(model.vocab_size))),
            vocab_size=model.vocab_size,
            prune=self._prunes,
        )


class Unpruned(Universal):
    """A target for the claims: the same generators with the assistant's head left whole."""

    _prunes = False
