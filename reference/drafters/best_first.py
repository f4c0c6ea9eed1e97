"""A model drafter that grows where its own law says the target will go: the likeliest paths under a node budget.

Level by level the likeliest `width` nodes are given their `width` likeliest children; of all nodes that were seen the
`num_nodes` of the largest path probability are drafted, as EAGLE-2 does (Li et al., arXiv 2406.16858). A node is never
likelier than its parent, so that what is kept is a tree.
"""

from __future__ import annotations

from specbench.protocols import LanguageModel
from specbench.reference.drafters.model import ModelDrafter
from specbench.tree import DraftTree


class BestFirstDrafter(ModelDrafter):
    """gamma: levels at most. width: nodes that grow at each of them, and children that each is given."""

    def __init__(self, model: LanguageModel, *, gamma: int = 4, width: int = 4, num_nodes: int = 16) -> None:
        if num_nodes < 1:
            raise ValueError(f"num_nodes = {num_nodes} must be >= 1 (drafts)")
        super().__init__(model, widths=(width,) * gamma)
        self._num_nodes = num_nodes

    def _grow(self, root: int, *, max_nodes: int, max_depth: int) -> DraftTree:
        tokens, parents, scores = [root], [-1], [0.0]  # score: the log of the path's probability
        level = [0]
        for width in self._widths[:max_depth]:
            logits = self._session.forward_tree(DraftTree.of(tokens, parents))
            children: list[int] = []
            for node in sorted(level, key=lambda one: -scores[one])[:width]:
                # Stable descending order puts the lowest token id first among ties, as the verifier's rule does.
                best = logits[node].double().log_softmax(dim=-1).sort(descending=True, stable=True)
                for log_prob, token in zip(best.values[:width].tolist(), best.indices[:width].tolist(), strict=True):
                    children.append(len(tokens))
                    tokens.append(token)
                    parents.append(node)
                    scores.append(scores[node] + min(0.0, log_prob))  # rounding may leave a probability above one
            level = children
        budget = min(self._num_nodes, max_nodes)
        drafts = sorted(range(1, len(tokens)), key=lambda node: -scores[node])[:budget]
        kept = [0, *sorted(drafts)]  # in the order of making, so that parents precede children
        place = {node: idx for idx, node in enumerate(kept)}
        return DraftTree.of([tokens[node] for node in kept], [place.get(parents[node], -1) for node in kept])
