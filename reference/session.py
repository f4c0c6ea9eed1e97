"""One sequence on one model: prefill, forward a tree, commit a path, truncate. The reference `TreeModel` (level 3).

It holds the cache and remembers the committed tokens and the last uncommitted forward. It does not choose tokens: that
is the decoder's loop.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from specbench.protocols import LanguageModel
from specbench.reference.kv_cache import RowsLost
from specbench.reference.layouts import flatten_causal
from specbench.reference.steps import STEPS
from specbench.steps import FlatTree, Steps
from specbench.tree import DraftTree
from specbench.types import Taps, as_token_ids

Session = TypeVar("Session", bound="TreeSession")


class TreeSession:
    """Drives `model` through `steps`. Satisfies `specbench.protocols.TreeModel` and, by `logits`, `TargetModel`."""

    reads_dead_rows = False  # storage that holds no row may be NaN and nothing comes of it

    def __init__(
        self,
        model: LanguageModel,
        *,
        steps: Steps = STEPS,
        cache: str = "contiguous",
        keeps_states: bool = False,
        state_layers: Sequence[int] = (),
    ) -> None:
        """keeps_states: of every committed token what its logits were made of, where the model tells it; with
        state_layers, what these layers were given instead."""
        self.steps = steps
        self.model: Any = model
        self._unheard: Any = model
        self._states: _States | None = None
        if keeps_states and hasattr(model, "with_state_sink"):
            self._states, self._state_layers = _States(), tuple(state_layers)
            self.model = self._heard(self.model, self._states)
        self._cache_kind = cache
        self._cache = model.new_cache(cache)
        self._tokens: list[int] = []  # what the committed rows were computed from
        self._pending: tuple[DraftTree, FlatTree, int] | None = None  # the uncommitted forward and its prefix length

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def num_layers(self) -> int:
        return self.model.num_layers

    @property
    def cache_len(self) -> int:
        """Committed rows; rows of an uncommitted forward do not count."""
        return self._pending[2] if self._pending else self._cache.length

    @property
    def states(self) -> Tensor | None:
        """float [cache_len, hidden]: what the logits of the committed tokens were made of, or what `state_layers` were
        given, side by side; None where nobody tells or nothing is committed."""
        return None if self._states is None else self._states.committed

    @property
    def last_flat(self) -> FlatTree | None:
        """The rows of the uncommitted forward, None between rounds."""
        return self._pending[1] if self._pending else None

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Level 0: float [S, V], computed without the cache."""
        return self.model.logits(as_token_ids(tokens, argument="tokens", vocab_size=self.vocab_size))

    def prefill(self, tokens: Sequence[int]) -> None:
        """Start over with `tokens` cached (possibly none)."""
        ids = as_token_ids(tokens, argument="tokens", vocab_size=self.vocab_size)
        self._pending = None
        self._cache.truncate(0)  # the storage stays, with whatever an earlier text left in it
        self._tokens = []
        if self._states is not None:
            self._states.truncate(0)
        self.extend(ids)

    def reset(self) -> None:
        """Drop everything: the next text starts from an empty cache."""
        self.prefill([])

    def abort(self) -> None:
        """Drop an uncommitted forward, if there is one: the round has not been."""
        self.truncate(self.cache_len)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append known tokens to the cache: prefill in chunks, or a drafter catching up with what was committed."""
        ids = as_token_ids(tokens, argument="tokens", vocab_size=self.vocab_size)
        self.truncate(self.cache_len)
        if ids:
            flat = flatten_causal(list(ids), self._cache.length)
            if hasattr(self.model, "encode"):  # nobody reads these rows' logits
                self.model.encode(flat, self._cache)
            else:
                self.steps.forward(self.model, flat, self._cache)
            self._tokens += ids
            if self._states is not None:
                self._states.keep(range(len(ids)))

    def forward_tree(self, tree: DraftTree, *, taps: Taps | None = None) -> Tensor:
        """One verification forward behind the cache. Returns float [N, V]. Replaces an uncommitted forward."""
        as_token_ids(tree.token_list, argument="tree.tokens", vocab_size=self.vocab_size)
        self.truncate(self.cache_len)
        prefix_len = self._cache.length
        flat = self.steps.flatten(tree, prefix_len)
        logits = self.steps.forward(self.model, flat, self._cache, taps=taps)
        self._pending = (tree, flat, prefix_len)
        return logits[flat.row_of_node.to(logits.device)]

    def commit(self, path: Sequence[int]) -> None:
        """Keep the root's row and the rows of `path`; ValueError when nothing is pending or `path` is no path."""
        if self._pending is None:
            raise ValueError("commit() without a forward: call forward_tree(tree) first")
        tree, flat, prefix_len = self._pending
        if not tree.is_path(path):
            raise ValueError(f"path = {list(path)} must run from a child of the root downwards, parent to child")
        self._pending = None
        rows = [int(flat.row_of_node[node]) for node in (0, *path)]
        self.steps.commit(self._cache, prefix_len, rows)
        self._tokens += [tree.token_list[node] for node in (0, *path)]
        if self._states is not None:
            self._states.keep(rows)

    def truncate(self, length: int) -> None:
        """Keep the first `length` committed rows; an uncommitted forward is dropped."""
        if not 0 <= length <= self.cache_len:
            raise ValueError(f"length = {length} must be between 0 and the committed length {self.cache_len}")
        self._pending = None
        self._tokens = self._tokens[:length]
        if self._states is not None:
            self._states.truncate(length)
        try:
            self._cache.truncate(length)
        except RowsLost:  # a sliding cache: what the rows left would read is gone, so all of them are computed again
            self.prefill(self._tokens)

    def fork(self: Session) -> Session:
        """A session of its own behind the same committed tokens; an uncommitted forward stays with this one."""
        twin = copy.copy(self)
        committed = self.cache_len
        twin._pending, twin._tokens = None, list(self._tokens)
        if self._states is not None:
            twin._states = _States(self._states.committed)
            twin.model = self._heard(self.model, twin._states)
        if hasattr(self._cache, "fork"):
            twin._cache = self._cache.fork()
            twin.truncate(committed)
        else:
            twin._cache = self.model.new_cache(self._cache_kind)
            twin.prefill(twin._tokens)
        return twin

    def _heard(self, model: Any, states: _States) -> Any:
        """The model, whose forwards go to `states` too."""
        sink = states.of_forward.append
        return model.with_state_sink(sink, self._state_layers) if self._state_layers else model.with_state_sink(sink)

    def poison(self, value: float) -> None:
        """Overwrites all cache storage that holds no row with `value`: nothing may come of it, NaN included."""
        if hasattr(self._cache, "poison"):
            self._cache.poison(value)

    @property
    def page_size(self) -> int | None:
        """Rows a page of the cache; None when it has no pages."""
        return getattr(self._cache, "page_size", None)

    @property
    def pages_in_use(self) -> int | None:
        """Pages held by this session and its forks, a shared one counted once; None when the cache has no pages."""
        return getattr(self._cache, "pages_in_use", None)

    def kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """Committed keys and values of one layer, each [Hkv, n, D]: all `cache_len` rows, or of a layer with a window
        the last n that a sliding cache holds, at least window - 1 of them."""
        keys, values = self._cache.rows(layer)
        num_pending = self._cache.length - self.cache_len
        num_rows = keys.shape[1] - num_pending
        return keys[:, :num_rows], values[:, :num_rows]

    def kv_bytes(self, num_rows: int) -> int:
        """Bytes that `num_rows` cached rows take over all layers."""
        if hasattr(self._cache, "row_nbytes"):
            return num_rows * self._cache.row_nbytes
        return sum(
            num_rows * one.shape[0] * one.shape[2] * one.element_size()
            for layer in range(self.num_layers)
            for one in self._cache.rows(layer)
        )


class _States:
    """What logits were made of: of the committed tokens, and of the last forward's rows, which may come in pieces."""

    def __init__(self, committed: Tensor | None = None) -> None:
        self.committed = committed
        self.of_forward: list[Tensor] = []

    def keep(self, rows: Sequence[int]) -> None:
        """Commits rows of the last forward."""
        new = torch.cat(self.of_forward)[list(rows)]
        self.of_forward.clear()
        self.committed = new if self.committed is None else torch.cat([self.committed, new])

    def truncate(self, length: int) -> None:
        """Keeps the first `length` committed ones; the last forward is dropped."""
        self.of_forward.clear()
        self.committed = self.committed[:length] if self.committed is not None and length else None
