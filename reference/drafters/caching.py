"""A model drafter that keeps the rows of its accepted drafts, as drafters in engines do: state that can go wrong.

`observe` tells it which of its nodes were accepted; their rows are committed and never computed again. What it is not
told it finds out from the next context, so it is right without `observe` too, only slower.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbench.protocols import Coins, LanguageModel
from specbench.reference.drafters.model import ModelDrafter
from specbench.tree import DraftTree
from specbench.types import Sampling, VerifyResult


class CachingDrafter(ModelDrafter):
    """Drafts what `ModelDrafter` drafts."""

    def __init__(self, model: LanguageModel, *, widths: Sequence[int] = (1, 1, 1)) -> None:
        super().__init__(model, widths=widths)
        self._drafted: DraftTree | None = None  # the tree whose inner nodes have rows behind the cached ones

    def draft(
        self, context: list[int], *, max_nodes: int, max_depth: int, sampling: Sampling, coins: Coins
    ) -> DraftTree:
        self._drafted = None
        self._catch_up(context[:-1])
        tree = self._grow(context[-1], max_nodes=max_nodes, max_depth=max_depth)
        if self._session.last_flat is not None:
            self._drafted = tree
        return tree

    def observe(self, result: VerifyResult) -> None:
        """Keeps the rows of the root and of the accepted nodes, as far as they were computed: the deepest drafts were
        never read, so after a full accept the last one is encoded with the next context."""
        tree, self._drafted = self._drafted, None
        if tree is None:
            return  # a round without a draft: the next context tells
        assert self._session.last_flat is not None
        num_rows = self._session.last_flat.num_rows
        kept = [node for node in result.path if node < num_rows]
        self._session.commit(kept)
        self._cached += [tree.token_list[node] for node in (0, *kept)]

    def reset(self) -> None:
        self._drafted = None
        self._session.reset()
        self._cached = []
