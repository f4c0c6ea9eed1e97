"""Prompt lookup: the last few tokens have occurred before, so propose what followed them then.

No model, no state. Longest n-gram first, most recent occurrence first; several occurrences make a tree.
"""

from __future__ import annotations

from specbench.protocols import Coins
from specbench.reference.drafters.trie import TrieBuilder
from specbench.tree import DraftTree
from specbench.types import Sampling


class NGramDrafter:
    """gamma: draft depth. width: distinct continuations of the whole context's tail that share the tree."""

    def __init__(self, *, gamma: int = 4, width: int = 1, max_ngram: int = 3) -> None:
        for name, value in (("gamma", gamma), ("width", width), ("max_ngram", max_ngram)):
            if value < 1:
                raise ValueError(f"{name} = {value} must be >= 1")
        self._gamma, self._width, self._max_ngram = gamma, width, max_ngram

    def draft(
        self, context: list[int], *, max_nodes: int, max_depth: int, sampling: Sampling, coins: Coins
    ) -> DraftTree:
        depth = min(self._gamma, max_depth)
        trie = TrieBuilder(context[-1], max_nodes=max_nodes)
        found: list[list[int]] = []
        for size in range(min(self._max_ngram, len(context) - 1), 0, -1):
            tail = context[-size:]
            for start in range(len(context) - size - 1, -1, -1):
                if len(found) == self._width:
                    return trie.tree()
                after = context[start + size : start + size + depth]
                if context[start : start + size] == tail and not any(one[: len(after)] == after for one in found):
                    found.append(after)
                    trie.add(after)
        return trie.tree()
