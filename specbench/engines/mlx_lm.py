"""mlx-lm, on whatever mlx finds (on Linux `mlx[cpu]`): plain, with a draft model, and with a quantised cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specbench.engines.engine import Answer, Files, Missing, Mode, Request, Settings, configuring

_PREFILL_STEPS = {
    "plain, short prefill": 7,
    "plain, prefill of 1": 1,
    "plain, prefill of 64": 64,
    "draft model, short prefill": 7,
}


class _MlxLm:
    requirements = ("mlx[cpu]==0.32.4", "mlx-lm==0.32.2")
    weights = ("fp32", "fp16", "bf16")
    temperature_last = True
    modes: Mapping[str, Mode] = {
        "plain": Mode(),
        "plain, short prefill": Mode(),
        "plain, prefill of 1": Mode(),
        "plain, prefill of 64": Mode(),
        "8-bit cache": Mode(as_plain=False),
        "draft model": Mode(drafts=True),
        "draft model, 8 drafts": Mode(drafts=True),
        "draft model, short prefill": Mode(drafts=True),
        "draft model, 8-bit cache": Mode(drafts=True, as_plain=False),
    }

    def version(self) -> str:
        try:
            import mlx_lm
        except ImportError:
            raise Missing("pip install 'mlx[cpu]' mlx-lm") from None
        return f"mlx-lm {mlx_lm.__version__}"

    def generate(self, files: Files, requests: Sequence[Request], settings: Settings) -> Iterator[Answer]:
        import mlx.core as mx
        from mlx_lm.generate import generate_step, speculative_generate_step
        from mlx_lm.sample_utils import make_sampler
        from mlx_lm.utils import load_model

        # Not `load`: it tries the tokenizer on words, and sixteen symbols hold none.
        mode = settings.mode
        with configuring():
            target, config = load_model(files.target)
            drafter: Any = load_model(files.drafter)[0] if mode.startswith("draft") else None
        ends = config.get("eos_token_id")
        options: dict[str, Any] = {"prefill_step_size": _PREFILL_STEPS.get(mode, 512)}
        if mode.endswith("8-bit cache"):
            options |= {"kv_bits": 8, "quantized_kv_start": 0}
        if settings.temperature:
            options["sampler"] = make_sampler(
                settings.temperature, settings.top_p or 0.0, settings.min_p or 0.0, top_k=settings.top_k or 0
            )
        for number, request in enumerate(requests):
            mx.random.seed(settings.seed + number)
            ids, num = mx.array(request.prompt), request.max_new_tokens
            if drafter is None:
                steps: Any = ((*one, None) for one in generate_step(ids, target, max_tokens=num, **options))
            else:
                drafts = 8 if "8 drafts" in mode else 3
                steps = speculative_generate_step(
                    ids, target, drafter, max_tokens=num, num_draft_tokens=drafts, **options
                )
            tokens: list[int] = []
            places: list[tuple[tuple[int, float], ...]] = []
            num_kept = 0
            for token, logprobs, from_draft in steps:
                if len(tokens) == num:
                    break
                tokens.append(int(token))
                places.append(_told(mx, logprobs, int(token)))
                num_kept += bool(from_draft)
                if tokens[-1] in (ends if isinstance(ends, list) else [ends]):
                    break
            forwards = None if drafter is None else len(tokens) - num_kept
            yield Answer(tuple(tokens), num_forwards=forwards, logprobs=tuple(places))


def _told(mx: Any, logprobs: Any, token: int) -> tuple[tuple[int, float], ...]:
    row = logprobs.astype(mx.float32)
    best = mx.argpartition(-row, 2)[:2].tolist()
    return tuple((one, float(row[one])) for one in dict.fromkeys([*best, token]))


ENGINE = _MlxLm()
