"""Decoders that leave something behind when a sequence is cut, forked, fed in pieces or dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from specbench.protocols import Cache
from specbench.reference.caches.contiguous import ContiguousCache
from specbench.reference.caches.preallocated import PreallocatedCache
from specbench.reference.decoder import Decoder
from specbench.reference.faults.fault import Fault
from specbench.reference.faults.housing import CacheTarget
from specbench.reference.layouts import flatten_causal
from specbench.reference.target import ReferenceTarget
from specbench.steps import FlatTree, Steps
from specbench.tree import DraftTree
from specbench.types import Taps, num_common

PIECE = 4  # tokens that a prefill encodes at a time, or rows of a block of a prefix cache


class _AbortForgetsOnly(Decoder):
    """The dropped round is no longer pending, its rows stay in the cache."""

    def abort(self) -> None:
        self._pending = None


class _AbortTrimsTheLastBlock(Decoder):
    """As many rows go as the forward before had: the count is renewed by a commit."""

    _num_now = _num_before = 0

    def forward_tree(self, tree: DraftTree, *, taps: Taps | None = None) -> Tensor:
        logits = super().forward_tree(tree, taps=taps)
        assert self.last_flat is not None
        self._num_before, self._num_now = self._num_now, self.last_flat.num_rows
        return logits

    def abort(self) -> None:
        if self._pending is not None:
            length = max(0, self._cache.length - (self._num_before or self._num_now))
            self._pending, self._tokens = None, self._tokens[:length]
            self._cache.truncate(length)


class _AbortMovesPositions(Decoder):
    """The counter that positions are counted from went on with the forward and is not set back."""

    def abort(self) -> None:
        if self._pending is not None:
            flatten, num_rows = self.steps.flatten, self._pending[1].num_rows
            self.steps = replace(self.steps, flatten=lambda tree, prefix_len: flatten(tree, prefix_len + num_rows))
        super().abort()


def _mask_of_the_aborted(steps: Steps) -> Steps:
    """A round's mask is built at its first forward and let go by its commit; smaller trees take a corner of it."""
    held: list[Tensor] = []

    def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
        flat = steps.flatten(tree, prefix_len)
        if not held or len(held[0]) < flat.num_rows:
            held[:] = [flat.mask]
        return replace(flat, mask=held[0][: flat.num_rows, : flat.num_rows])

    def commit(cache: Cache, prefix_len: int, rows: Sequence[int]) -> None:
        held.clear()
        steps.commit(cache, prefix_len, rows)

    return replace(steps, flatten=flatten, commit=commit)


class _ChunksFromZero(Decoder):
    """Every piece of a prompt is encoded as if it were the first."""

    def extend(self, tokens: Sequence[int]) -> None:
        self.abort()
        if tokens:
            self.steps.forward(self.model, flatten_causal(list(tokens), 0), self._cache)
            self._tokens += tokens


class _LaterPiecesLate(Decoder):
    """Positions of a piece are counted from behind the next free row."""

    def extend(self, tokens: Sequence[int]) -> None:
        self.abort()
        if tokens:
            start = self._cache.length + (self._cache.length > 0)
            self.steps.forward(self.model, flatten_causal(list(tokens), start), self._cache)
            self._tokens += tokens


class _BoundaryTwice(Decoder):
    """A piece begins with the last token of the one before."""

    def extend(self, tokens: Sequence[int]) -> None:
        self.abort()
        super().extend([*self._tokens[-1:], *tokens] if tokens else tokens)


class _LastOfAPieceLost(Decoder):
    """A prompt is encoded in pieces; what is left over behind them must be two tokens to count as one."""

    def extend(self, tokens: Sequence[int]) -> None:
        for start in range(0, len(tokens), PIECE):
            piece = tokens[start : start + PIECE]
            if start == 0 or len(piece) > 1:
                super().extend(piece)


class _PrefixCache(Decoder):
    """A prefill keeps the rows of the text before, as far as it takes the two for one text."""

    def prefill(self, tokens: Sequence[int]) -> None:
        self.abort()
        num_known = self.num_known(list(tokens))
        self.truncate(num_known)
        self.extend(tokens[num_known:])

    def num_known(self, tokens: list[int]) -> int:
        """How many rows are kept: those of the tokens that both texts begin with."""
        return num_common(self._tokens, tokens)


class _HitOneTooLong(_PrefixCache):
    """The first token that differs is taken for known, where any is."""

    def num_known(self, tokens: list[int]) -> int:
        num_known = super().num_known(tokens)
        return min(num_known + (num_known > 0), len(tokens), self.cache_len)


class _HitRoundedUp(_PrefixCache):
    """A block of rows is kept when its first one is known."""

    def num_known(self, tokens: list[int]) -> int:
        return min(-(-super().num_known(tokens) // PIECE) * PIECE, len(tokens), self.cache_len)


class _BlocksByThemselves(_PrefixCache):
    """A block of two rows is known by its own two tokens, not by those before it."""

    def num_known(self, tokens: list[int]) -> int:
        ends = range(2, min(len(tokens), len(self._tokens)) + 1, 2)
        return max((end for end in ends if self._tokens[end - 2 : end] == tokens[end - 2 : end]), default=0)


class _DraftsPublished(Decoder):
    """Rows of a forward that was not committed are found again by a prompt with their tokens in their order."""

    _published: Sequence[int] = ()

    def forward_tree(self, tree: DraftTree, *, taps: Taps | None = None) -> Tensor:
        logits = super().forward_tree(tree, taps=taps)
        assert self.last_flat is not None
        self._published = [*self._tokens, *self.last_flat.tokens.tolist()]
        return logits

    def commit(self, path: Sequence[int]) -> None:
        super().commit(path)
        self._published = list(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        super().extend(tokens)
        self._published = list(self._tokens)

    def prefill(self, tokens: Sequence[int]) -> None:
        num_known = num_common(self._published, list(tokens))
        self._pending, self._tokens = None, list(tokens[:num_known])
        assert isinstance(self._cache, PreallocatedCache)
        self._cache._lengths = [num_known] * self.num_layers  # rows behind a cut are still in the buffer
        self.extend(tokens[num_known:])


class _BackToThePrompt(Decoder):
    """A round that accepts nothing goes back to what was known before the rounds, and its own root."""

    _num_known = 0

    def extend(self, tokens: Sequence[int]) -> None:
        super().extend(tokens)
        self._num_known = self.cache_len

    def commit(self, path: Sequence[int]) -> None:
        super().commit(path)
        if not path:
            self.truncate(min(self._num_known + 1, self.cache_len))


class _ZeroIsNoLength(Decoder):
    """`if length:` stands where `if length is not None:` should."""

    def truncate(self, length: int) -> None:
        if length:
            super().truncate(length)
        else:
            self._pending, self._tokens = None, []


class _OneCutAtATime(Decoder):
    """A cut is noted as done until rows are added; the next one is taken for the same."""

    _is_cut = False

    def truncate(self, length: int) -> None:
        if self._is_cut and self._pending is None:
            return
        self._is_cut = length < self.cache_len
        super().truncate(length)

    def commit(self, path: Sequence[int]) -> None:
        self._is_cut = False
        super().commit(path)

    def extend(self, tokens: Sequence[int]) -> None:
        self._is_cut = False
        super().extend(tokens)


class _DropsOneTooMany(Decoder):
    """An uncommitted forward is dropped with the last committed row."""

    def truncate(self, length: int) -> None:
        is_dropping = self._pending is not None and length == self.cache_len
        super().truncate(max(0, length - 1) if is_dropping else length)


class _PlainStepKeepsForward(Decoder):
    """A round without drafts has nothing to roll back, and forgets that one with drafts may still lie there."""

    def forward_tree(self, tree: DraftTree, *, taps: Taps | None = None) -> Tensor:
        if tree.num_nodes == 1:
            self._pending = None
        return super().forward_tree(tree, taps=taps)


class _ForkShares(Decoder):
    """A fork is given the cache itself instead of one with the same rows."""

    def fork(self) -> _ForkShares:
        twin = super().fork()
        twin._cache = self._cache
        return twin


class _LastLayerShared(PreallocatedCache):
    """A fork copies the buffers of every layer but the last."""

    def fork(self) -> _LastLayerShared:
        twin = super().fork()
        twin._parts[-1] = self._parts[-1]
        return twin


class _FirstLayerNotCut(PreallocatedCache):
    """A cut begins with the second layer."""

    def truncate(self, length: int) -> None:
        first = self._lengths[0]
        super().truncate(length)
        self._lengths[0] = first if length else 0


class _ValuesNotCut(ContiguousCache):
    """A cut drops keys; values stay, new ones go behind them, and as many are read as there are keys."""

    def truncate(self, length: int) -> None:
        values = self._values
        super().truncate(length)
        self._values = values if length else self._values

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        super().append(layer, k, v)
        return self.rows(layer)

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = super().rows(layer)
        return keys, values[:, : keys.shape[1]]


class _ResetKeepsRows(Decoder):
    """The text is forgotten, the cache is not."""

    def reset(self) -> None:
        self._pending, self._tokens = None, []


class _TimesZero(PreallocatedCache):
    """The first row beyond the length takes part in every read, times zero."""

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = super().rows(layer)
        beyond = self._parts[layer][1][:, self._lengths[layer]]  # [H, Dv]
        return keys, values + 0.0 * beyond[:, None]


class _DecoderTarget(ReferenceTarget):
    """The reference target with another decoder. kind: the only cache kind that is offered, None for all."""

    def __init__(self, decoder: type[Decoder], kind: str | None = None) -> None:
        super().__init__(decoder=decoder)
        if kind is not None:
            self.cache_kinds = (kind,)


FAULTS = (
    Fault(
        "abort_forgets_only",
        "abort-path",
        "an aborted round leaves its rows in the cache",
        "a forward that is dropped before its commit",
        "kv.abort",
        target=lambda: _DecoderTarget(_AbortForgetsOnly),
        origin="raullenchai/Rapid-MLX#1464",
    ),
    Fault(
        "abort_trims_the_last_block",
        "abort-path",
        "an aborted round gives up as many rows as the forward before it had",
        "an abort behind a round of another size",
        "kv.abort",
        target=lambda: _DecoderTarget(_AbortTrimsTheLastBlock, "contiguous"),
        subtle="an abort in a second round of another size",
    ),
    Fault(
        "abort_moves_positions",
        "abort-path",
        "an aborted round's rows go, the counter of positions stays advanced by them",
        "a round behind an aborted one",
        "kv.abort",
        target=lambda: _DecoderTarget(_AbortMovesPositions),
    ),
    Fault(
        "mask_of_the_aborted",
        "abort-path",
        "an aborted round's mask is used by the next forward that fits into it",
        "an aborted tree of another shape that is no smaller",
        "kv.abort",
        _mask_of_the_aborted,
        subtle="an aborted tree of another shape, at least as large",
    ),
    Fault(
        "chunks_from_zero",
        "chunked-prefill/prefix-cache",
        "positions of a prompt's later pieces start from zero again",
        "a second piece, or a kept prefix",
        "kv.chunked",
        target=lambda: _DecoderTarget(_ChunksFromZero),
        origin="huggingface/transformers#43082",
        kin="positions_of_pieces",
    ),
    Fault(
        "later_pieces_one_late",
        "chunked-prefill/prefix-cache",
        "positions of a prompt's later pieces start one too late",
        "a second piece, or a kept prefix",
        "kv.chunked",
        target=lambda: _DecoderTarget(_LaterPiecesLate),
        subtle="a second piece",
        kin="positions_of_pieces",
    ),
    Fault(
        "boundary_row_twice",
        "chunked-prefill/prefix-cache",
        "a piece of a prompt begins with the last token of the piece before",
        "a second piece, or a kept prefix",
        "kv.chunked",
        target=lambda: _DecoderTarget(_BoundaryTwice),
        subtle="a second piece",
    ),
    Fault(
        "last_of_a_piece_lost",
        "chunked-prefill/prefix-cache",
        "a prompt is encoded four tokens at a time, and a last piece of one token is left out",
        "a prompt, or a piece of one, of 5, 9, 13 ... tokens",
        "kv.chunked",
        target=lambda: _DecoderTarget(_LastOfAPieceLost),
        subtle="a length one beyond a whole number of pieces",
    ),
    Fault(
        "prefix_hit_one_too_long",
        "chunked-prefill/prefix-cache",
        "a prompt that begins like the text before keeps that one's first differing row too",
        "a prompt behind a text that shares its beginning",
        "kv.chunked",
        target=lambda: _DecoderTarget(_HitOneTooLong, "contiguous"),
        subtle="a warm run: two texts with a common beginning",
        kin="prefix_hit_too_long",
    ),
    Fault(
        "prefix_hit_rounded_up",
        "chunked-prefill/prefix-cache",
        "a prompt that begins like the text before keeps whole blocks of four rows, of which the last is half known",
        "a prompt behind a text that shares a beginning of 1, 2, 3, 5, 6 ... tokens",
        "kv.chunked",
        target=lambda: _DecoderTarget(_HitRoundedUp, "contiguous"),
        subtle="a common beginning that ends inside a block",
        kin="prefix_hit_too_long",
    ),
    Fault(
        "blocks_known_by_themselves",
        "chunked-prefill/prefix-cache",
        "blocks of a prompt are known by their own tokens, whatever stood before them",
        "two texts with equal blocks behind different beginnings",
        "kv.chunked",
        target=lambda: _DecoderTarget(_BlocksByThemselves, "contiguous"),
        origin="vllm-project/aibrix#2330",
        subtle="equal tokens at equal places behind another beginning",
    ),
    Fault(
        "drafts_published",
        "chunked-prefill/prefix-cache",
        "rows of an uncommitted forward are kept for a later prompt that spells their tokens",
        "a prompt that spells a dropped tree row by row, siblings included",
        "kv.chunked",
        target=lambda: _DecoderTarget(_DraftsPublished, "preallocated"),
        subtle="a later prompt equal to a dropped tree laid flat",
    ),
    Fault(
        "back_to_the_prompt",
        "kv-not-rolled-back",
        "a round that accepts nothing rolls the cache back to the prompt and its own root",
        "accept count 0 in a second round",
        "kv.commit",
        target=lambda: _DecoderTarget(_BackToThePrompt),
        subtle="a second round that accepts nothing",
    ),
    Fault(
        "zero_is_no_length",
        "kv-not-rolled-back",
        "a cut to no rows at all is taken for none asked",
        "a cut to nothing, or a dropped forward on an empty cache",
        "kv.rollback",
        target=lambda: _DecoderTarget(_ZeroIsNoLength),
        subtle="a cut to length 0",
    ),
    Fault(
        "one_cut_at_a_time",
        "kv-not-rolled-back",
        "of two cuts without rows between them the second is taken for the first",
        "two cuts in a row",
        "kv.rollback",
        target=lambda: _DecoderTarget(_OneCutAtATime),
        subtle="two cuts in a row",
    ),
    Fault(
        "plain_step_keeps_the_forward",
        "kv-not-rolled-back",
        "a plain step does not drop the uncommitted forward before it",
        "a forward with drafts, not committed, then one without",
        "kv.machine",
        target=lambda: _DecoderTarget(_PlainStepKeepsForward),
        subtle="a plain step behind an uncommitted forward",
    ),
    Fault(
        "first_layer_not_cut",
        "kv-not-rolled-back",
        "a cut leaves the first layer as it was",
        "a cut, or a forward that is dropped",
        "kv.rollback",
        target=lambda: CacheTarget("preallocated", _FirstLayerNotCut),
        subtle="one layer only",
        kin="part_not_cut",
    ),
    Fault(
        "values_not_cut",
        "kv-not-rolled-back",
        "a cut drops keys and leaves values, so that new values lie behind old ones",
        "a cut, or a forward that is dropped, and rows behind it",
        "kv.rollback",
        target=lambda: CacheTarget("contiguous", _ValuesNotCut),
        subtle="values only, and rows behind the cut",
        kin="part_not_cut",
    ),
    Fault(
        "drops_one_too_many",
        "kv-off-by-one",
        "an uncommitted forward is dropped together with the last committed row",
        "a dropped forward behind a prefix",
        "kv.rollback",
        target=lambda: _DecoderTarget(_DropsOneTooMany),
    ),
    Fault(
        "fork_shares_the_cache",
        "kv-slot/page-mapping",
        "two sequences behind one prefix write to one cache",
        "a fork and a round in either",
        "kv.fork",
        target=lambda: _DecoderTarget(_ForkShares),
        origin="raullenchai/Rapid-MLX#196",
        kin="fork_shares_storage",
    ),
    Fault(
        "fork_shares_the_last_layer",
        "kv-slot/page-mapping",
        "a fork copies the buffers of every layer but the last",
        "a fork and unlike rounds in both",
        "kv.fork",
        target=lambda: CacheTarget("preallocated", _LastLayerShared),
        subtle="one layer only",
        kin="fork_shares_storage",
    ),
    Fault(
        "reset_keeps_rows",
        "kv-not-rolled-back",
        "a reset forgets the text and leaves its rows in the cache",
        "a reset behind at least one committed row",
        "kv.pages",
        target=lambda: _DecoderTarget(_ResetKeepsRows),
    ),
    Fault(
        "dead_row_times_zero",
        "mask-prefix/padding",
        "a row beyond the length is read and multiplied by zero, though dead rows are declared never to be read",
        "NaN in a dead row",
        "kv.dead_rows",
        target=lambda: CacheTarget("preallocated", _TimesZero),
        origin="vllm-project/vllm#47305",
        subtle="dead rows that hold NaN",
    ),
)
