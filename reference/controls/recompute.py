"""No compaction: a tree's rows are dropped and the accepted tokens computed again, at once or with the next tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specbench.reference.batch import BatchSteps
from specbench.reference.batch_layouts import RaggedModel
from specbench.reference.controls.control import Control
from specbench.reference.decoder import Decoder
from specbench.reference.kv_cache import AppendableCache
from specbench.reference.layouts import flatten_causal
from specbench.reference.target import ReferenceTarget
from specbench.steps import CommitStep, FlatTree
from specbench.tree import DraftTree
from specbench.types import Taps


class _AtOnce(Decoder):
    """A commit is a forward of the accepted tokens, as a prompt's piece."""

    def commit(self, path: Sequence[int]) -> None:
        tokens = _accepted(self, path)
        self.abort()
        self.extend(tokens)


class _NextRound(Decoder):
    """Committed tokens that the cache lacks are rows of the next forward, in front of its tree. Whoever looks at the
    cache itself has them computed first."""

    @property
    def cache_len(self) -> int:
        """Committed rows, those that are still to be computed again among them."""
        return len(self._tokens)

    def commit(self, path: Sequence[int]) -> None:
        tokens = _accepted(self, path)
        self.abort()
        self._tokens = [*self._tokens, *tokens]

    def forward_tree(self, tree: DraftTree, *, taps: Taps | None = None) -> Tensor:
        self.abort()
        num_cached = self._cache.length
        flat = _behind(self._tokens[num_cached:], num_cached, self.steps.flatten(tree, len(self._tokens)))
        logits = self.steps.forward(self.model, flat, self._cache, taps=taps)
        self._pending = (tree, flat, len(self._tokens))
        return logits[flat.row_of_node.to(logits.device)]

    def extend(self, tokens: Sequence[int]) -> None:
        self.abort()
        self._catch_up()
        super().extend(tokens)

    def truncate(self, length: int) -> None:
        tokens = self._tokens[: max(length, 0)]
        super().truncate(min(length, self._cache.length) if length <= len(self._tokens) else length)
        self._tokens = tokens

    def kv(self, layer: int) -> tuple[Tensor, Tensor]:
        self._catch_up()
        return super().kv(layer)

    @property
    def pages_in_use(self) -> int | None:
        self._catch_up()
        return super().pages_in_use

    def _catch_up(self) -> None:
        missing = self._tokens[self._cache.length :]
        if missing:
            self.steps.forward(self.model, flatten_causal(missing, self._cache.length), self._cache)


def _accepted(decoder: Decoder, path: Sequence[int]) -> list[int]:
    """The tokens of the root and of `path`; ValueError as `TreeSession.commit` has it."""
    if decoder._pending is None:
        raise ValueError("commit() without a forward: call forward_tree(tree) first")
    tree = decoder._pending[0]
    if not tree.is_path(path):
        raise ValueError(f"path = {list(path)} must run from a child of the root downwards, parent to child")
    return [tree.token_list[node] for node in (0, *path)]


def _behind(tokens: list[int], prefix_len: int, flat: FlatTree) -> FlatTree:
    """The rows of `tokens`, causal, and then those of `flat`, which see all of them."""
    known = flatten_causal(tokens, prefix_len)
    num_known, num_rows = known.num_rows, known.num_rows + flat.num_rows
    mask = torch.ones(num_rows, num_rows, dtype=torch.bool)
    mask[:num_known] = False
    mask[:num_known, :num_known] = known.mask
    mask[num_known:, num_known:] = flat.mask
    return FlatTree(
        tokens=torch.cat([known.tokens, flat.tokens]),
        position_ids=torch.cat([known.position_ids, flat.position_ids]),
        mask=mask,
        node_of_row=torch.cat([torch.zeros(num_known, dtype=torch.int64), flat.node_of_row]),
        row_of_node=flat.row_of_node + num_known,
    )


def _recomputing_batch(steps: BatchSteps) -> BatchSteps:
    """The accepted tokens of all rows are one forward more."""
    last: tuple[RaggedModel, list[FlatTree]]

    def forward(model: RaggedModel, blocks: Sequence[FlatTree], caches: Sequence[AppendableCache]) -> list[Tensor]:
        nonlocal last
        last = model, list(blocks)
        return steps.forward(model, blocks, caches)

    def commit_again(
        commit: CommitStep,
        caches: Sequence[AppendableCache],
        prefix_lens: Sequence[int],
        kept: Sequence[Sequence[int]],
    ) -> None:
        model, blocks = last
        again = []
        for cache, block, prefix_len, rows in zip(caches, blocks, prefix_lens, kept, strict=True):
            cache.truncate(prefix_len)
            again.append(flatten_causal(block.tokens[list(rows)].tolist(), prefix_len))
        steps.forward(model, again, caches)

    return replace(steps, forward=forward, commit=commit_again)


CONTROLS = (
    Control(
        "recompute_at_commit",
        "the rows of a tree are dropped, and the accepted tokens are forwarded again at the commit",
        "a token's row is the same in a tree and behind its text; it is computed twice, which costs time alone",
        lambda: ReferenceTarget(plant_batch=_recomputing_batch, decoder=_AtOnce),
    ),
    Control(
        "recompute_in_next_round",
        "the rows of a tree are dropped, and the accepted tokens are forwarded again in front of the next tree",
        "the next tree sees them in its own forward as it would in the cache; they are computed twice, which costs "
        "time alone",
        lambda: ReferenceTarget(decoder=_NextRound),
    ),
)
