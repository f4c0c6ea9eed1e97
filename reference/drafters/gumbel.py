"""A model drafter that picks its chain with the noise the target will pick with: the other half of Gumbel coupling.

The draft for absolute position t is argmax q / e_t, e_t the exponential noise of t that the request's coins share
(`verify.chance.SharedNoise`). Each pick has law q, but the same noise serves t again in the next round: only the rule
`gumbel` may judge these drafts without a thought for that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.protocols import Coins, LanguageModel
from specbench.reference.drafters.model import ModelDrafter
from specbench.reference.sampling import probs
from specbench.reference.verify.chance import first_past, noise_of
from specbench.tree import DraftTree, chain
from specbench.types import Sampling


class GumbelDrafter(ModelDrafter):
    """gamma: drafts in a chain. q is cut as the target's law is, which makes matches likelier and costs nothing."""

    def __init__(self, model: LanguageModel, *, gamma: int = 4) -> None:
        super().__init__(model, widths=(1,) * gamma)
        self._gamma = gamma

    def draft(
        self, context: list[int], *, max_nodes: int, max_depth: int, sampling: Sampling, coins: Coins
    ) -> DraftTree:
        """draft_probs: float64 [N, V]; the last node's row is zero, nothing was picked behind it."""
        self._catch_up(context[:-1])
        tokens, laws = [context[-1]], list[Tensor]()
        for place in range(len(context), len(context) + min(self._gamma, max_nodes, max_depth)):
            laws.append(probs(self._session.forward_tree(chain(tokens))[-1], sampling))
            tokens.append(first_past(laws[-1].tolist(), noise_of(coins, place, len(laws[-1]))))
        self._session.truncate(self._session.cache_len)
        laws.append(torch.zeros(self._session.vocab_size, dtype=torch.float64))
        return DraftTree(
            torch.tensor(tokens), torch.arange(-1, len(tokens) - 1), draft_probs=torch.stack(laws), proposal="iid"
        )
