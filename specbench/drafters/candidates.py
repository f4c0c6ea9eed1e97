"""A candidate generator of transformers as our `Drafter`: its code unchanged, asked as `generate` asks it.

A generator belongs to one text. It goes on where the new context is what it returned last, cut somewhere, and one more
token, since that is all that its decoder ever asks; any other context gets a new generator, as a new request does.
Its draws come from the global generator, which is seeded from the coins for the call and put back after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from specbench.protocols import Coins
from specbench.tree import DraftTree, chain, root_only
from specbench.types import Sampling, VerifyResult

# (context int64 [1, S], what `generate` would be asked for) -> a candidate generator for that text
Make = Callable[[Tensor, GenerationConfig], Any]


class CandidateDrafter:
    """vocab_size: of the target, over which draft_probs are laid out.

    num_beyond: how far max_length may lie behind the last draft; transformers' generators leave room for the target's
    own token, but for the one between tokenizers, which does not.
    """

    def __init__(self, make: Make, *, vocab_size: int, num_beyond: int = 1) -> None:
        self._make = make
        self._vocab_size = vocab_size
        self._num_beyond = num_beyond
        self.reset()

    def reset(self) -> None:
        self._generator: Any = None
        self._sampling: Sampling | None = None
        self._asked: list[int] = []  # the context of its last answer
        self._returned: list[int] = []  # that and the drafts behind it
        self._num_open = 0  # drafts that nobody has told the outcome of

    def draft(
        self, context: list[int], *, max_nodes: int, max_depth: int, sampling: Sampling, coins: Coins
    ) -> DraftTree:
        """draft_probs: float32 [N, V] where drafts are drawn: the softmax of the generator's own logits, which is the
        law that it drew from and the one that transformers verifies with; the last row is zero."""
        num_drafts = min(max_nodes, max_depth)
        self._num_open = 0
        if num_drafts < 1:
            return root_only(context[-1])
        ids = torch.tensor([context])
        max_length = len(context) + num_drafts + self._num_beyond
        with SeededBy(coins, num_drafts):
            if not self._goes_on(context, sampling):
                self.reset()
                self._generator = self._make(ids, generation_config(sampling, max_length))
            self._generator.main_model_max_length = max_length  # as near as the end of the text may be
            candidates, logits = self._generator.get_candidates(ids)
        self._sampling, self._asked, self._returned = sampling, list(context), candidates[0].tolist()
        drafts = self._returned[len(context) :]
        self._num_open = len(drafts)
        tree = chain([context[-1], *drafts])
        if not drafts or sampling.temperature == 0.0:
            return tree
        rows = torch.zeros(tree.num_nodes, self._vocab_size)
        rows[:-1] = logits[0].softmax(dim=-1)
        return DraftTree(tree.tokens, tree.parents, draft_probs=rows, proposal="iid")

    def observe(self, result: VerifyResult) -> None:
        """Tells the generator how many drafts matched, of which some learn how many to draft."""
        if self._num_open:
            scores = torch.zeros(1, self._num_open + 1, 1)  # they look at its length alone
            ids = torch.tensor([self._returned[: len(self._asked) + len(result.path)] + [result.bonus_token]])
            self._generator.update_candidate_strategy(ids, scores, len(result.path))
        self._num_open = 0

    def _goes_on(self, context: list[int], sampling: Sampling) -> bool:
        known = context[:-1]
        is_next = len(context) > len(self._asked) and known == self._returned[: len(known)]
        return self._generator is not None and sampling == self._sampling and is_next


def generation_config(sampling: Sampling, max_length: int) -> GenerationConfig:
    """What `generate` makes of the same request. top_k = 0 and top_p = 1.0 are no cut; None would be its defaults."""
    if sampling.temperature == 0.0:
        return GenerationConfig(do_sample=False, max_length=max_length, min_length=0)
    return GenerationConfig(
        min_length=0,
        do_sample=True,
        temperature=sampling.temperature,
        top_k=sampling.top_k or 0,
        top_p=1.0 if sampling.top_p is None else sampling.top_p,
        min_p=sampling.min_p,
        max_length=max_length,
    )


class SeededBy:
    """Around code that draws from torch's global generator: a function of the coins, and the state is as before.

    One coin more than drafts are taken: a harness that finds a coin a draft takes each for the draw's own uniform.
    """

    def __init__(self, coins: Coins, num_drafts: int) -> None:
        self._uniforms = coins.uniform(num_drafts + 1)

    def __enter__(self) -> None:
        self._state = torch.get_rng_state()
        seed = 0
        for one in self._uniforms.tolist():
            seed = (seed * 1_000_003 + int(one * 2**53)) % 2**63
        torch.default_generator.manual_seed(seed)

    def __exit__(self, *error: object) -> None:
        torch.set_rng_state(self._state)
