"""llama.cpp in this process, through the package xllamacpp: its server's slots, draft model and n-gram modes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from specbench.engines.engine import Answer, Files, Missing, Mode, Refused, Request, Settings

_NGRAMS = {
    "n-gram": "NGRAM_SIMPLE",
    "n-gram map k": "NGRAM_MAP_K",
    "n-gram map k4v": "NGRAM_MAP_K4V",
    "n-gram mod": "NGRAM_MOD",
    "n-gram cache": "NGRAM_CACHE",
}
_NUM_SLOTS = 4
_CONTEXT = 2_048  # tokens a slot


class _LlamaCpp:
    requirements = ("xllamacpp==2026.10.11549",)
    weights = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")
    temperature_last = True
    modes: Mapping[str, Mode] = {
        "plain": Mode(),
        "plain, 4 slots": Mode(),
        "plain, split prefill": Mode(),
        "plain, no flash attention": Mode(),
        "q8_0 cache": Mode(as_plain=False),
        "draft model": Mode(drafts=True),
        "draft model, 4 slots": Mode(drafts=True),
        "draft model, q8_0 cache": Mode(drafts=True, as_plain=False),
        **{name: Mode(drafts=True) for name in _NGRAMS},
    }

    def version(self) -> str:
        try:
            import xllamacpp
        except ImportError:
            raise Missing("pip install xllamacpp") from None
        from importlib.metadata import version

        return f"llama.cpp (xllamacpp {version(xllamacpp.__name__)})"

    def generate(self, files: Files, requests: Sequence[Request], settings: Settings) -> Iterator[Answer]:
        import xllamacpp

        if not files.target_gguf.is_file():
            raise Refused("there is no GGUF file of this variant of the sentinel")
        slots = _NUM_SLOTS if settings.mode.endswith("slots") else 1
        server = xllamacpp.Server(_params(files, settings.mode, slots))
        sampling: dict[str, Any] = {
            "temperature": settings.temperature,
            # Its own values where a request has none are 40, 0.95 and 0.05.
            "top_k": settings.top_k or 0,
            "top_p": 1.0 if settings.top_p is None else settings.top_p,
            "min_p": settings.min_p or 0.0,
        }

        def ask(numbered: tuple[int, Request]) -> Answer:
            number, request = numbered
            asked = {"prompt": list(request.prompt), "max_tokens": request.max_new_tokens, **sampling}
            asked |= {"seed": settings.seed + number, "logprobs": 2, "verbose": True, "return_tokens": True}
            said: Any = server.handle_completions(asked)
            if "choices" not in said:
                raise RuntimeError(f"it answered {str(said)[:200]}")
            timings, choice = said.get("timings", {}), said["choices"][0]
            tokens = tuple(said["__verbose"]["tokens"])
            places = (choice.get("logprobs") or {}).get("content", [])
            logprobs = tuple(_told(one) for one in places) if len(places) == len(tokens) else ()
            drafted, kept = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
            return Answer(tokens, num_drafted=drafted, num_kept=kept, logprobs=logprobs)

        with ThreadPoolExecutor(slots) as pool:
            yield from pool.map(ask, enumerate(requests))


def _params(files: Files, mode: str, slots: int) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(files.target_gguf)
    params.n_ctx, params.n_parallel = _CONTEXT * slots, slots
    params.cpuparams.n_threads, params.warmup = 1, False
    # A prompt that is continued from another's rows has other shapes; here it is computed anew.
    params.cache_prompt = False
    if mode == "plain, split prefill":
        params.n_batch = params.n_ubatch = 32
    if mode == "plain, no flash attention":
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if mode.endswith("cache") and "q8_0" in mode:
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_Q8_0
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
    return params


def _told(place: Any) -> tuple[tuple[int, float], ...]:
    told = {one["id"]: float(one["logprob"]) for one in [*place.get("top_logprobs", []), place]}
    return tuple(told.items())


ENGINE = _LlamaCpp()
