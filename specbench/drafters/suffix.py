"""Suffix decoding of arctic-inference: what most often followed the longest known ending, as a tree or a chain.

Its cache is fed as its own engine feeds it: a text's beginning as a prompt, then what was committed as the response.
Its estimates order the drafts and are no law that anything was drawn from, so draft_probs are not given.
"""

from __future__ import annotations

from typing import Any

from specbench.engines import Missing
from specbench.protocols import Coins, LanguageModel
from specbench.tree import DraftTree, root_only
from specbench.types import Sampling

INSTALL = "pip install --no-deps arctic-inference (builds its C++ part; needs cmake, a compiler and numpy)"


class SuffixDrafter:
    """as_tree: several continuations at once. across_texts: answers of earlier requests are looked up too.

    max_factor, max_offset: a draft is at most max_factor * (length of the ending that was found) + max_offset deep.
    least_prob: of a drafted token, by the cache's own estimate.
    """

    def __init__(
        self,
        *,
        gamma: int = 10,
        as_tree: bool = False,
        across_texts: bool = False,
        max_tree_depth: int = 64,
        max_factor: float = 1.0,
        max_offset: float = 0.0,
        least_prob: float = 0.1,
    ) -> None:
        try:
            from arctic_inference.suffix_decoding import SuffixDecodingCache
        except ImportError as error:
            raise Missing(f"{INSTALL}: {error}") from None
        self._new_cache = lambda: SuffixDecodingCache(max_tree_depth, -1 if across_texts else 0)
        self._gamma, self._as_tree, self._max_tree_depth = gamma, as_tree, max_tree_depth
        self._options = {"max_spec_factor": max_factor, "max_spec_offset": max_offset, "min_token_prob": least_prob}
        self.reset()

    def reset(self) -> None:
        self._cache: Any = self._new_cache()
        self._request = 0
        self._text: list[int] = []  # what the cache has of the request

    def draft(
        self, context: list[int], *, max_nodes: int, max_depth: int, sampling: Sampling, coins: Coins
    ) -> DraftTree:
        """Nodes deeper than `max_depth` are cut here: the cache knows a number of nodes and no depth."""
        self._catch_up(context)
        num_drafts = min(self._gamma, max_nodes) if self._as_tree else min(self._gamma, max_nodes, max_depth)
        if num_drafts < 1 or max_depth < 1:
            return root_only(context[-1])  # a number of 0 would mean no limit
        found = self._cache.speculate(
            self._request,
            context[-self._max_tree_depth :],
            max_spec_tokens=num_drafts,
            use_tree_spec=self._as_tree,
            **self._options,
        )
        tree = DraftTree.of([context[-1], *found.token_ids], [-1, *(parent + 1 for parent in found.parents)])
        return cut(tree, max_depth)

    def _catch_up(self, context: list[int]) -> None:
        """Tells the cache what is new; a text that does not go on is another request."""
        known = len(self._text)
        if not known or context[:known] != self._text:
            if known:
                self._cache.stop_request(self._request)
                self._request += 1
            self._cache.start_request(self._request, context)
        elif len(context) > known:
            self._cache.add_active_response(self._request, context[known:])
        self._text = list(context)


def cut(tree: DraftTree, max_depth: int) -> DraftTree:
    """The nodes down to a depth. Their order stays, so that parents still precede children."""
    kept = [node for node in range(tree.num_nodes) if int(tree.depth[node]) <= max_depth]
    place = {node: idx for idx, node in enumerate(kept)} | {-1: -1}
    return DraftTree.of([tree.token_list[node] for node in kept], [place[tree.parent_list[node]] for node in kept])


class Suffix:
    """A target for the claims. "remembering" looks up what earlier requests were answered, as its engine does."""

    drafter_names = ("chain", "tree", "remembering")
    lookup_drafters = ("chain", "tree")

    def build_drafter(self, model: LanguageModel, name: str) -> SuffixDrafter:
        return SuffixDrafter(as_tree=name == "tree", across_texts=name == "remembering")
