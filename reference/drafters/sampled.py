"""A model drafter that draws its drafts: at each node one child after the other from the model's own law.

It names that law in `draft_probs`, which a verifier needs to accept draws losslessly. Siblings stand in the order in
which they were drawn. The coins are its only randomness: one uniform a draw, turned into a token by the inverse of q's
cumulative sums. top_k and top_p of the target are left to the verifier: q is what was truly drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specbench.protocols import Coins, LanguageModel
from specbench.reference.drafters.model import ModelDrafter
from specbench.reference.sampling import probs
from specbench.reference.verify.chance import inverse_cdf
from specbench.tree import DraftTree, Proposal
from specbench.types import Sampling


class SampledDrafter(ModelDrafter):
    """widths[d]: draws per node at depth d. proposal: "iid" keeps a token that was drawn twice as two siblings;
    "without_replacement" draws no token twice, and fewer where q has no more."""

    def __init__(self, model: LanguageModel, *, widths: Sequence[int] = (2, 1, 1), proposal: Proposal = "iid") -> None:
        if proposal == "deterministic":
            raise ValueError("proposal = 'deterministic' must be iid or without_replacement: this drafter draws")
        super().__init__(model, widths=widths)
        self._proposal: Proposal = proposal

    def draft(
        self, context: list[int], *, max_nodes: int, max_depth: int, sampling: Sampling, coins: Coins
    ) -> DraftTree:
        """draft_probs: float64 [N, V]; rows of nodes from which nothing was drawn are zero."""
        self._catch_up(context[:-1])
        tokens, parents, level = [context[-1]], [-1], [0]
        laws: dict[int, Tensor] = {}
        for width in self._widths[:max_depth]:
            if not level or len(tokens) > max_nodes:
                break
            logits = self._session.forward_tree(DraftTree.of(tokens, parents))
            children: list[int] = []
            for node in level:
                laws[node] = self._law(logits[node], sampling.temperature)
                for token in self._draws(laws[node], min(width, max_nodes + 1 - len(tokens)), coins):
                    children.append(len(tokens))
                    tokens.append(token)
                    parents.append(node)
            level = children
        self._session.truncate(self._session.cache_len)
        rows = torch.zeros(len(tokens), self._session.vocab_size, dtype=torch.float64)
        for node, q in laws.items():
            rows[node] = q
        return DraftTree(torch.tensor(tokens), torch.tensor(parents), draft_probs=rows, proposal=self._proposal)

    def _law(self, logits: Tensor, temperature: float) -> Tensor:
        return probs(logits, Sampling(temperature=temperature))

    def _draws(self, q: Tensor, num: int, coins: Coins) -> list[int]:
        left = q.clone()
        drawn: list[int] = []
        while len(drawn) < num and bool(left.any()):
            drawn.append(inverse_cdf(left.tolist(), float(coins.uniform(1))))
            if self._proposal == "without_replacement":
                left[drawn[-1]] = 0.0
        return drawn
