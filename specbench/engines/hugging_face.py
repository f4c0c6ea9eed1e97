"""transformers: `generate` as installed, plain, with an assistant model, by prompt lookup, and by early exit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from specbench.engines.engine import Answer, Files, Missing
from specbench.reference.sentinel import DTYPES


class _Transformers:
    modes = ("plain", "assistant", "assistant, constant", "lookup", "early exit", "static cache")
    formats = ("fp32", "fp16", "bf16")

    def version(self) -> str:
        try:
            import transformers
        except ImportError:
            raise Missing("pip install transformers") from None
        return f"transformers {transformers.__version__}"

    def generate(
        self, files: Files, requests: Sequence[tuple[tuple[int, ...], int]], *, mode: str, weights: str
    ) -> Iterator[Answer]:
        import torch
        from transformers import AutoModelForCausalLM

        def load(folder: Any) -> Any:
            return AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[weights])

        target, options = load(files.target), self._options(mode)
        if mode.startswith("assistant"):
            options["assistant_model"] = load(files.drafter)
            if mode == "assistant, constant":  # every draft is made and verified, however unsure
                config = options["assistant_model"].generation_config
                config.num_assistant_tokens, config.assistant_confidence_threshold = 4, 0.0
                config.num_assistant_tokens_schedule = "constant"
        calls = [0]

        def count(*_: Any) -> None:
            calls[0] += 1

        (target.model if mode != "early exit" else target.model.layers[-1]).register_forward_hook(count)
        for prompt, num in requests:
            calls[0] = 0
            ids = torch.tensor([prompt])
            out = target.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num, do_sample=False, **options
            )
            yield Answer(tuple(out[0, len(prompt) :].tolist()), num_forwards=calls[0])

    def _options(self, mode: str) -> dict[str, Any]:
        options: dict[str, dict[str, Any]] = {
            "lookup": {"prompt_lookup_num_tokens": 4},
            "early exit": {"assistant_early_exit": 3},
            "static cache": {"cache_implementation": "static"},
        }
        return dict(options.get(mode, {}))


ENGINE = _Transformers()
