"""How an outsider plugs in: structural protocols, nothing to inherit and nothing to register.

Each protocol is one adapter level; a target may satisfy several. `LanguageModel` and `Cache` are not levels: they are
what the reference decoder drives, so that one decoder runs over our own model and over transformers models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from specbench.steps import FlatTree
from specbench.tree import DraftTree
from specbench.types import Generation, Sampling, Stop, Taps, VerifyResult


@runtime_checkable
class TargetModel(Protocol):
    """Level 0: the weights as the target has them, asked one sequence at a time."""

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """tokens: S ids. Returns float [S, V]; row i predicts token i + 1, computed from tokens 0..i only."""
        ...


@runtime_checkable
class Generator(Protocol):
    """Level 1: a whole decoder.

    Optional: `generate_batch(requests: list[Request])`, one answer per request as `generate` gives it; `session()`, an
    object whose `generate` appends its prompt to the text so far and goes on (penalties and stop rules count that
    turn's output alone); `features`, a tuple that names what is honoured in `sampling` and `stop` (see
    `loading.FEATURES`).
    """

    def generate(
        self, prompt: list[int], *, max_new_tokens: int, sampling: Sampling, stop: Stop, seed: int
    ) -> Sequence[int] | Generation:
        """Returns the new tokens, prompt excluded, an end token included; or a `Generation` with per-round records."""
        ...


@runtime_checkable
class Verifier(Protocol):
    """Level 2: the acceptance rule alone.

    Optional: `features` with the word `sampling`, where temperatures above 0 are honoured; `proposals`, the kinds of
    drafts it is made for (all three where it names none), and `only_chains = True`; `verify_batch(trees, flat_logits,
    cu_nodes, *, sampling, coins)` for B trees at once, flat_logits float [sum N, V], cu_nodes int64 [B+1] where each
    tree's rows begin and end; returns B results.
    """

    def verify(self, tree: DraftTree, target_logits: Tensor, *, sampling: Sampling, coins: Coins) -> VerifyResult:
        """target_logits: float [N, V], row i follows node i (it judges the children of i, never i itself). V is that of
        the call: claims about rules bring small vocabularies of their own, whatever `vocab_size` says."""
        ...


@runtime_checkable
class TreeModel(Protocol):
    """Level 3: the model and its cache, driven round by round.

    Invariant I1: between rounds the cache holds exactly the committed tokens but the root. `forward_tree` may also take
    `taps: Taps | None = None` and fill it; the claims about masks, positions and layers need that.

    Optional: `extend(tokens)` appends known tokens to the cache (chunked prefill, the next turn); `fork()` returns a
    second instance with the same committed prefix, independent from then on; `abort()` drops an uncommitted forward;
    `reset()` drops everything; `poison(value)` overwrites what must never be read (dead rows, free slots, buffers), and
    `reads_dead_rows = False` declares that not even 0 x garbage is formed, so that the value may be NaN; ints
    `pages_in_use` and `page_size` where the cache has pages.
    """

    @property
    def cache_len(self) -> int:
        """Committed rows in the cache."""
        ...

    def prefill(self, tokens: list[int]) -> None:
        """Drop whatever is cached, then cache `tokens` (the prompt without its last token; may be empty)."""
        ...

    def forward_tree(self, tree: DraftTree) -> Tensor:
        """One verification forward behind the cache. Returns float [N, V], row i follows node i."""
        ...

    def commit(self, path: list[int]) -> None:
        """Keep the rows of the root and of the nodes in `path`, in order, of the last forward; drop its other rows."""
        ...

    def truncate(self, length: int) -> None:
        """Keep the first `length` committed rows; rows of an uncommitted forward are dropped too."""
        ...

    def kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """The committed keys and values of one layer, each [Hkv, cache_len, D]; an int `num_layers` counts them.

        A layer with a sliding window W may show its last rows only, at least min(cache_len, W - 1) of them.
        """
        ...


@runtime_checkable
class TreeAttention(Protocol):
    """Level 4: the attention of one layer over draft trees. A bare function with this signature is a target too.

    Options it takes by name, and is asked for where it does: `cu_nodes` int32 [B+1], where the rows of each tree begin
    and end (without it B is 1), with `max_nodes`, the rows of the largest; `page_table` int32 [B, pages], then k and v
    are [num_pages, T, Hkv, D]; `window`, how many positions a row sees, its own included (a node stands at P + its
    depth); `soft_cap`, `alibi_slopes` float [Hq]; `k_scale` and `v_scale` float [B, S, Hkv] or [num_pages, T, Hkv],
    then k and v are int8 or fp8 codes; `num_splits` of the prefix. score = scale * q . k, capped, then biased.

    Optional attributes: `features`, of "any_order" (parents may stand behind their children), "unused_rows" (a parent
    of -2 marks a row without a node) and "strides" (inputs need not be contiguous); `dtypes`, of "fp64", "fp32",
    "bf16" and "fp16", all where it names none; `head_dims`, `groups` (query heads a key head), `page_sizes`, `codes`
    ("int8", "fp8"): those it can do; `reads_dead_rows = True` where rows behind the last one are multiplied by zero;
    `only_fixed_shapes = True` where every new shape costs a compilation.
    """

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, parents: Tensor, prefix_lens: Tensor, scale: float
    ) -> Tensor | tuple[Tensor, Tensor]:
        """q: [R, Hq, D], the rows of all trees one behind the other. k, v: [B, S, Hkv, D] in q's dtype; rows 0..P-1 of
        a sequence are its prefix, rows P..P+N-1 its tree's nodes, what lies behind is dead. Query head h reads key head
        h // (Hq / Hkv). parents: int32 [R], node numbers within a row's own tree, -1 for its root. prefix_lens:
        int32 [B], P of each sequence.

        Returns out [R, Hq, D] in q's dtype, or out and lse [R, Hq] in fp32 or wider: the natural logarithm of the
        summed exponentials of a row's scores. No input is written to.
        """
        ...


@runtime_checkable
class Drafter(Protocol):
    """Level 5: proposes a tree for a context. May hold a cache of its own, keyed by the context it is given.

    Optional: `observe(result: VerifyResult)` is told after each round what was accepted; `reset()` forgets all texts.
    With `reads_target_state = True` the decoder passes `target_state: TargetState` where it has it; a drafter that is
    not given one must come to the same drafts by itself. `state_layers`, a tuple of layers counted from 0, asks for
    what these are given instead of the last state. Siblings that were drawn stand in the order of the draws.
    """

    def draft(
        self, context: list[int], *, max_nodes: int, max_depth: int, sampling: Sampling, coins: Coins
    ) -> DraftTree:
        """context: all committed tokens, the last one the root. At most `max_nodes` drafts, `max_depth` deep."""
        ...


@runtime_checkable
class Sampler(Protocol):
    """Level 6: from logits to a law, and from a law to a token."""

    def probs(self, logits: Tensor, sampling: Sampling) -> Tensor:
        """logits: float [V], penalties and bans done. Returns float [V], what `sampling` makes of them."""
        ...

    def sample(self, probs: Tensor, coins: Coins) -> int:
        """probs: float [V]. Returns a token, drawn with as many coins as it takes."""
        ...


class Coins(Protocol):
    """Where randomness comes from: a seeded generator or scripted uniforms."""

    def uniform(self, num: int) -> Tensor:
        """float64 [num] in [0, 1)."""
        ...


class SeededCoins:
    """Coins from a seeded CPU generator."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def uniform(self, num: int) -> Tensor:
        return torch.rand(num, generator=self._generator, dtype=torch.float64)


class Cache(Protocol):
    """Keys and values of one sequence. `length` counts the rows that reads return; storage behind it is the kind's."""

    @property
    def length(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes of storage held now, over all layers."""
        ...

    def commit(self, prefix_len: int, rows: Sequence[int]) -> None:
        """Keep the first `prefix_len` rows, then rows `prefix_len + r` for r in `rows`, in order; drop the rest."""
        ...

    def truncate(self, length: int) -> None:
        """Keep the first `length` rows. ValueError when there are fewer."""
        ...

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [Hkv, length, D]."""
        ...


class LanguageModel(Protocol):
    """Weights that the reference decoder can drive: ours (`reference.model`) or transformers' (`reference.hf`).

    Optional: `encode(flat, cache)`, which is `forward` for rows whose logits nobody reads, as in prefill.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def new_cache(self, kind: str = "contiguous") -> Cache:
        """An empty cache of the named kind; ValueError lists the kinds this model supports."""
        ...

    def forward(self, flat: FlatTree, cache: Cache, *, taps: Taps | None = None) -> Tensor:
        """Computes the M rows of `flat` behind the cache and appends their keys and values. Returns float [M, V]."""
        ...

    def causal(self, tokens: Tensor, *, taps: Taps | None = None) -> Tensor:
        """tokens: int64 [B, S], whole sequences, no cache. Returns float [B, S, V]; taps get a leading B dimension."""
        ...

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Level 0: float [S, V]."""
        ...
