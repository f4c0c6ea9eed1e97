"""transformers' prompt lookup: what followed the last tokens the first time that they stood in the text.

The generator keeps no state, so each call makes its own. It heeds max_length only where a single token is left, so the
budget is given as the number of tokens to look up.
"""

from __future__ import annotations

import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from specbench.protocols import Coins, LanguageModel
from specbench.tree import DraftTree, chain, root_only
from specbench.types import Sampling


class PromptLookupDrafter:
    """gamma: prompt_lookup_num_tokens of `generate`. max_ngram: its max_matching_ngram_size."""

    def __init__(self, *, gamma: int = 10, max_ngram: int = 2) -> None:
        self._gamma, self._max_ngram = gamma, max_ngram

    def draft(
        self, context: list[int], *, max_nodes: int, max_depth: int, sampling: Sampling, coins: Coins
    ) -> DraftTree:
        num_drafts = min(self._gamma, max_nodes, max_depth)
        if num_drafts < 1:
            return root_only(context[-1])
        generator = PromptLookupCandidateGenerator(
            num_output_tokens=num_drafts,
            max_matching_ngram_size=self._max_ngram,
            max_length=len(context) + num_drafts + 1,
        )
        candidates, _ = generator.get_candidates(torch.tensor([context]))
        return chain(candidates[0, len(context) - 1 :].tolist())


class PromptLookup:
    """A target for the claims."""

    drafter_names = ("lookup",)
    lookup_drafters = drafter_names

    def build_drafter(self, model: LanguageModel, name: str) -> PromptLookupDrafter:
        return PromptLookupDrafter(gamma=4)
