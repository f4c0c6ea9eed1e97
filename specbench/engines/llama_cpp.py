"""llama.cpp in this process, through the package xllamacpp: its server's slots, draft model and n-gram modes.

It is asked by text, as its completion endpoint is: a sentinel's tokens are single characters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from specbench.engines.engine import Answer, Files, Missing
from specbench.reference.sentinel import GGUF_TYPES, SYMBOLS

_NGRAMS = {
    "n-gram": "NGRAM_SIMPLE",
    "n-gram map k": "NGRAM_MAP_K",
    "n-gram map k4v": "NGRAM_MAP_K4V",
    "n-gram mod": "NGRAM_MOD",
    "n-gram cache": "NGRAM_CACHE",
}
_NUM_SLOTS = 4


class _LlamaCpp:
    modes = ("plain", "plain, 4 slots", "draft model", "draft model, 4 slots", *_NGRAMS)
    formats = tuple(GGUF_TYPES)

    def version(self) -> str:
        try:
            import xllamacpp
        except ImportError:
            raise Missing("pip install xllamacpp gguf") from None
        from importlib.metadata import version

        return f"llama.cpp (xllamacpp {version(xllamacpp.__name__)})"

    def generate(
        self, files: Files, requests: Sequence[tuple[tuple[int, ...], int]], *, mode: str, weights: str
    ) -> Iterator[Answer]:
        import xllamacpp

        slots = _NUM_SLOTS if mode.endswith("slots") else 1
        params = xllamacpp.CommonParams()
        params.model.path = str(files.target_gguf)
        params.n_ctx, params.n_parallel = 2_048 * slots, slots
        params.cpuparams.n_threads, params.warmup = 1, False
        kinds = xllamacpp.common_speculative_type
        if mode.startswith("draft model"):
            params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
            params.speculative.draft.mparams.path = str(files.drafter_gguf)
        elif mode in _NGRAMS:
            params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{_NGRAMS[mode]}")]
            # Shorter patterns than the defaults: a prompt's continuation of some forty tokens is all that repeats.
            for one in ("ngram_simple", "ngram_map_k", "ngram_map_k4v"):
                getattr(params.speculative, one).size_n, getattr(params.speculative, one).size_m = 4, 8
            params.speculative.ngram_mod.n_match = 8
            params.speculative.ngram_mod.n_min, params.speculative.ngram_mod.n_max = 2, 8
        server = xllamacpp.Server(params)

        def ask(request: tuple[tuple[int, ...], int]) -> Answer:
            prompt, num = request
            text = "".join(SYMBOLS[token] for token in prompt[1:])
            said: Any = server.handle_completions({"prompt": text, "max_tokens": num, "temperature": 0.0})
            timings, written = said.get("timings", {}), said["choices"][0]["text"]
            tokens = tuple(SYMBOLS.find(one) for one in written)
            return Answer(tokens, num_drafted=timings.get("draft_n", 0), num_kept=timings.get("draft_n_accepted", 0))

        with ThreadPoolExecutor(slots) as pool:
            yield from pool.map(ask, requests)


ENGINE = _LlamaCpp()
