"""Growing a draft tree token by token, siblings unique, within a node budget."""

from __future__ import annotations

from collections.abc import Sequence

from specbench.tree import DraftTree


class TrieBuilder:
    """Starts at the root; `child` finds or makes a node, `tree` freezes what has grown."""

    def __init__(self, root_token: int, *, max_nodes: int) -> None:
        self._tokens, self._parents = [root_token], [-1]
        self._max_nodes = max_nodes
        self._nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node

    def child(self, parent: int, token: int) -> int | None:
        """The child of `parent` that carries `token`, made if need be; None when the budget is spent."""
        if (parent, token) not in self._nodes:
            if len(self._tokens) > self._max_nodes:
                return None
            self._nodes[parent, token] = len(self._tokens)
            self._tokens.append(token)
            self._parents.append(parent)
        return self._nodes[parent, token]

    def add(self, tokens: Sequence[int]) -> None:
        """A path of tokens below the root, as far as the budget goes."""
        node = 0
        for token in tokens:
            child = self.child(node, token)
            if child is None:
                return
            node = child

    def tree(self) -> DraftTree:
        return DraftTree.of(self._tokens, self._parents)
