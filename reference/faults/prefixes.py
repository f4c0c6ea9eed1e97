"""Prefix caches between requests: rows of an earlier text that are found again, or taken for found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from specbench.reference.decoder import Decoder, DecodingSession
from specbench.reference.faults.fault import Fault
from specbench.reference.faults.rewrite import rewrite, rows_behind
from specbench.reference.kv_cache import AppendableCache
from specbench.reference.target import ReferenceTarget
from specbench.types import Generation


class _SimilarPromptReused(Decoder):
    """A request whose prompt is as long as the last one and begins like it finds its rows in the cache."""

    _last: tuple[int, ...] = ()

    def generate(self, prompt: Sequence[int], **keywords: Any) -> Generation:
        last, self._last = self._last, tuple(prompt)
        if len(prompt) == len(last) and tuple(prompt[:1]) == last[:1] and self.cache_len >= len(prompt) - 1:
            self.truncate(len(prompt) - 1)
        else:
            self.prefill(prompt[:-1])
        return DecodingSession(self).generate(prompt, **keywords)


class _WholePromptFound(Decoder):
    """A prompt that is cached to its last token keeps that one's row too, and the root is encoded once more."""

    def generate(self, prompt: Sequence[int], **keywords: Any) -> Generation:
        if self._tokens[: len(prompt)] != list(prompt):
            return super().generate(prompt, **keywords)
        self.truncate(len(prompt))
        return DecodingSession(self).generate(prompt, **keywords)


class _LongerTextFound(Decoder):
    """A prompt that begins the cached text is served behind all of it."""

    def generate(self, prompt: Sequence[int], **keywords: Any) -> Generation:
        if self._tokens[: len(prompt) - 1] != list(prompt[:-1]):
            return super().generate(prompt, **keywords)
        return DecodingSession(self).generate(prompt, **keywords)


class _OverwrittenRowsFound(Decoder):
    """Prompts are remembered, and their rows are looked for where other requests have written since."""

    _known: frozenset[tuple[int, ...]] = frozenset()

    def generate(self, prompt: Sequence[int], **keywords: Any) -> Generation:
        known, self._known = self._known, self._known | {tuple(prompt)}
        if tuple(prompt) not in known or self.cache_len < len(prompt) - 1:
            return super().generate(prompt, **keywords)
        self.truncate(len(prompt) - 1)
        return DecodingSession(self).generate(prompt, **keywords)


class _UnverifiedRowsFound(Decoder):
    """Rows are published before the accepted path is gathered: under its tokens stand the first rows of the block."""

    _published: AppendableCache | None = None

    def commit(self, path: Sequence[int]) -> None:
        prefix_len, cache, rows = self.cache_len, cast(AppendableCache, self._cache), self._published
        block = rows_behind(cache, prefix_len) if _holds_rows_only(cache) else None
        if block is not None and (rows is None or rows.length != prefix_len):
            rows = cache.fork()  # a new text: what its prompt has cached is right
        super().commit(path)
        if block is not None and rows is not None:
            rewrite(rows, prefix_len, [(k[:, : len(path) + 1], v[:, : len(path) + 1]) for k, v in block])
            self._published = rows

    def generate(self, prompt: Sequence[int], **keywords: Any) -> Generation:
        rows, self._published = self._published, None
        if rows is None or list(prompt[:-1])[: len(self._tokens)] != self._tokens:
            return super().generate(prompt, **keywords)
        self._cache = rows
        return DecodingSession(self).generate(prompt, **keywords)


def _holds_rows_only(cache: AppendableCache) -> bool:
    """One of ours, and without states, which are not put anywhere as rows are."""
    return hasattr(cache, "spec") and not any(one.is_state for one in cache.spec.layers)


class _LastTokenTakenForCached(Decoder):
    """A text that went on behind an answer is encoded from behind the answer's last token, which has no row yet."""

    _answered: tuple[int, ...] = ()
    _skips_one = False

    def generate(self, prompt: Sequence[int], **keywords: Any) -> Generation:
        known = self._answered
        if known and len(prompt) > len(known) and tuple(prompt[: len(known)]) == known:
            self._skips_one = True
            answer = DecodingSession(self).generate(prompt, **keywords)
        else:
            answer = super().generate(prompt, **keywords)
        self._answered = (*prompt, *answer.tokens) if answer.tokens else ()
        return answer

    def extend(self, tokens: Sequence[int]) -> None:
        super().extend(tokens[1:] if self._skips_one else tokens)
        self._skips_one = False


FAULTS = (
    Fault(
        "similar_prompt_reused",
        "chunked-prefill/prefix-cache",
        "a prompt of the same length and the same first token is taken for the one that is cached",
        "two prompts that differ in a later token",
        "greedy.repeatable",
        target=lambda: ReferenceTarget(decoder=_SimilarPromptReused),
        origin="vllm-project/aibrix#2329",
        subtle="two prompts of one length that begin alike",
    ),
    Fault(
        "whole_prompt_found",
        "chunked-prefill/prefix-cache",
        "a prompt that is cached to its last token is not cut back by one, and its root is encoded twice",
        "the same prompt twice in a row",
        "greedy.repeatable",
        target=lambda: ReferenceTarget(decoder=_WholePromptFound),
        origin="lablup/mlxcel#1760",
        subtle="the same prompt again, cached whole",
        kin="prefix_hit_length",
    ),
    Fault(
        "longer_text_found",
        "chunked-prefill/prefix-cache",
        "a prompt that begins the cached text goes on behind all of it",
        "a prompt that begins the text before it",
        "greedy.repeatable",
        target=lambda: ReferenceTarget(decoder=_LongerTextFound),
        kin="prefix_hit_length",
    ),
    Fault(
        "overwritten_rows_found",
        "chunked-prefill/prefix-cache",
        "a prompt served before is found in the cache, although another request has written there since",
        "a prompt, another one, and the first again",
        "greedy.repeatable",
        target=lambda: ReferenceTarget(decoder=_OverwrittenRowsFound),
        subtle="another request in between",
    ),
    Fault(
        "unverified_rows_found",
        "chunked-prefill/prefix-cache",
        "rows are published before the accepted path is gathered, and found by a request behind the answer",
        "a request behind an answer whose last path was not the first rows of its block",
        "greedy.repeatable",
        target=lambda: ReferenceTarget(decoder=_UnverifiedRowsFound),
        subtle="a request that goes on behind an answer, accepted off the leftmost path",
    ),
    Fault(
        "last_token_taken_for_cached",
        "chunked-prefill/prefix-cache",
        "a request that goes on behind an answer is encoded from behind the answer's last token, which is not cached",
        "a request behind an answer, with a token of its own",
        "greedy.repeatable",
        target=lambda: ReferenceTarget(decoder=_LastTokenTakenForCached),
        origin="ikawrakow/ik_llama.cpp#1661",
        subtle="a request that goes on behind an answer",
    ),
)
