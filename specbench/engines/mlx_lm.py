"""mlx-lm, on whatever mlx finds (on Linux `mlx[cpu]`): plain, with a draft model, and with a quantised cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from specbench.engines.engine import Answer, Files, Missing


class _MlxLm:
    modes = ("plain", "plain, 8-bit cache", "draft model", "draft model, 8 drafts", "draft model, short prefill")
    formats = ("fp32", "fp16", "bf16")

    def version(self) -> str:
        try:
            import mlx_lm
        except ImportError:
            raise Missing("pip install 'mlx[cpu]' mlx-lm") from None
        return f"mlx-lm {mlx_lm.__version__}"

    def generate(
        self, files: Files, requests: Sequence[tuple[tuple[int, ...], int]], *, mode: str, weights: str
    ) -> Iterator[Answer]:
        import mlx.core as mx
        from mlx_lm.generate import generate_step, speculative_generate_step
        from mlx_lm.utils import load_model

        # Not `load`: it tries the tokenizer on words, and sixteen symbols hold none.
        target: Any = load_model(files.target)[0]
        drafter: Any = load_model(files.drafter)[0] if mode.startswith("draft") else None
        for prompt, num in requests:
            ids = mx.array(prompt)
            if drafter is None:
                options: dict[str, Any] = {"kv_bits": 8, "quantized_kv_start": 0} if "cache" in mode else {}
                said = [int(token) for token, _ in generate_step(ids, target, max_tokens=num, **options)]
                yield Answer(tuple(said[:num]))
                continue
            options = {"num_draft_tokens": 8 if "8 drafts" in mode else 3}
            if "short prefill" in mode:
                options["prefill_step_size"] = 7
            steps = list(speculative_generate_step(ids, target, drafter, max_tokens=num, **options))[:num]
            kept = sum(bool(from_draft) for _, _, from_draft in steps)
            yield Answer(tuple(int(token) for token, _, _ in steps), num_forwards=len(steps) - kept)


ENGINE = _MlxLm()
