"""Any model of the target's vocabulary as drafter: top-k of its own law, level by level.

`self_drafter` uses the target itself or its first layers. The tree is fixed in shape (k per level); choosing it by
score is a later drafter's business.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbench.protocols import Coins, LanguageModel
from specbench.reference.drafters.trie import TrieBuilder
from specbench.reference.model import LlamaModel
from specbench.reference.session import TreeSession
from specbench.tree import DraftTree
from specbench.types import Sampling, num_common


class ModelDrafter:
    """Drafts with `model`. widths[d] is the number of children per node at depth d; len(widths) is gamma.

    first_ranks[d] skips that many of the most probable tokens at depth d (cyclic): a runner-up is what a lossy rule may
    let pass and a lossless one must not.

    Keeps a cache of the committed context only: rows of drafted nodes are dropped after every draft, so whatever was
    accepted is encoded again from committed tokens and no rejected row can linger.
    """

    def __init__(
        self, model: LanguageModel, *, widths: Sequence[int] = (1, 1, 1, 1), first_ranks: Sequence[int] = (0,)
    ) -> None:
        if not widths or min(widths) < 1:
            raise ValueError(f"widths = {tuple(widths)} must name at least one level, each >= 1")
        self._session = TreeSession(model)
        self._widths = tuple(widths)
        self._first_ranks = tuple(first_ranks)
        self._cached: list[int] = []

    def draft(
        self, context: list[int], *, max_nodes: int, max_depth: int, sampling: Sampling, coins: Coins
    ) -> DraftTree:
        self._catch_up(context[:-1])
        tree = self._grow(context[-1], max_nodes=max_nodes, max_depth=max_depth)
        self._session.truncate(self._session.cache_len)
        return tree

    def _grow(self, root: int, *, max_nodes: int, max_depth: int) -> DraftTree:
        """The tree behind what is cached. Leaves the rows of its inner nodes uncommitted in the session."""
        trie = TrieBuilder(root, max_nodes=max_nodes)
        level = [0]
        for depth, width in enumerate(self._widths[:max_depth]):
            first = self._first_ranks[depth % len(self._first_ranks)]
            tree = trie.tree()
            logits = self._session.forward_tree(tree)
            children: list[int] = []
            for node in level:
                # Stable descending order puts the lowest token id first among ties, as the verifier's rule does.
                best = logits[node].sort(descending=True, stable=True).indices[first : first + width].tolist()
                children.extend(child for token in best if (child := trie.child(node, token)) is not None)
            level = children
        return trie.tree()

    def _catch_up(self, tokens: list[int]) -> None:
        """Cache exactly `tokens`: keep the common prefix, drop the rest, encode what is new."""
        num_kept = num_common(self._cached, tokens)
        self._session.truncate(num_kept)
        self._cached = self._cached[:num_kept]  # true even when the next line raises
        self._session.extend(tokens[num_kept:])
        self._cached = list(tokens)


def self_drafter(
    model: LlamaModel, *, num_layers: int | None = None, widths: Sequence[int] = (1, 1, 1, 1)
) -> ModelDrafter:
    """The target as its own drafter (every draft is accepted), or its first `num_layers` layers only."""
    return ModelDrafter(model if num_layers is None else model.first_layers(num_layers), widths=widths)
