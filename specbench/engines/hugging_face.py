"""transformers: `generate` as installed, plain in several shapes, and with each kind of candidates that it knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specbench.engines.engine import Answer, Files, Missing, Mode, Refused, Request, Settings, configuring

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_BATCH = 4
_OPTIONS: Mapping[str, dict[str, Any]] = {
    "plain, split prefill": {"prefill_chunk_size": 7},
    "plain, static cache": {"cache_implementation": "static"},
    "quantised cache": {
        "cache_implementation": "quantized",
        "cache_config": {"backend": "quanto", "nbits": 4, "q_group_size": 64, "residual_length": 16},
    },
    "lookup": {"prompt_lookup_num_tokens": 4},
    "lookup, static cache": {"prompt_lookup_num_tokens": 4, "cache_implementation": "static"},
    "early exit": {"assistant_early_exit": 3},
}


class _Transformers:
    requirements = ("torch==2.13.0", "transformers==5.24.0", "optimum-quanto==0.2.7")
    weights = tuple(_DTYPES)
    temperature_last = False
    modes: Mapping[str, Mode] = {
        "plain": Mode(),
        "plain, batch": Mode(),
        "plain, split prefill": Mode(),
        "plain, static cache": Mode(),
        "quantised cache": Mode(as_plain=False),
        "assistant": Mode(drafts=True),
        "assistant, constant": Mode(drafts=True),
        "assistant, other tokenizer": Mode(drafts=True),
        "lookup": Mode(drafts=True),
        "lookup, static cache": Mode(drafts=True),
        "early exit": Mode(drafts=True),
    }

    def version(self) -> str:
        try:
            import transformers
        except ImportError:
            raise Missing("pip install torch transformers") from None
        return f"transformers {transformers.__version__}"

    def generate(self, files: Files, requests: Sequence[Request], settings: Settings) -> Iterator[Answer]:
        import torch
        from transformers import AutoModelForCausalLM

        def load(folder: Path) -> Any:
            dtype = getattr(torch, _DTYPES[settings.weights])
            with configuring():
                return AutoModelForCausalLM.from_pretrained(
                    folder, dtype=dtype, use_safetensors=True, trust_remote_code=False
                )

        mode = settings.mode
        if mode == "quantised cache" and find_spec("optimum.quanto" if find_spec("optimum") else "optimum") is None:
            raise Refused("a quantised cache needs a package that is not installed: pip install optimum-quanto")
        target = load(files.target)
        options = dict(_OPTIONS.get(mode, {})) | _sampling(settings)
        if mode.startswith("assistant"):
            options |= _assistant(files, load, mode)
        calls = [0]

        def count(*_: Any) -> None:
            calls[0] += 1

        # With early exit the drafts come from the same layers, but not from the last.
        (target.model.layers[-1] if mode == "early exit" else target.model).register_forward_hook(count)
        num_together = _BATCH if mode == "plain, batch" else 1
        for start in range(0, len(requests), num_together):
            some = requests[start : start + num_together]
            calls[0] = 0
            torch.manual_seed(settings.seed + start)
            ids, mask = _padded(some)
            said = target.generate(
                torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                max_new_tokens=max(one.max_new_tokens for one in some),
                return_dict_in_generate=True,
                output_logits=True,
                **options,
            )
            for row, request in enumerate(some):
                tokens = said.sequences[row, len(ids[0]) :].tolist()[: request.max_new_tokens]
                tokens = _until_end(tokens, target.generation_config.eos_token_id)
                rows = [step[row] for step in said.logits[: len(tokens)]]
                forwards = calls[0] if num_together == 1 else None
                yield Answer(tuple(tokens), num_forwards=forwards, logprobs=_told(rows, tokens))


def _sampling(settings: Settings) -> dict[str, Any]:
    if not settings.temperature:
        return {"do_sample": False}
    options = {"do_sample": True, "temperature": settings.temperature, "top_k": settings.top_k or 0}
    return options | {name: one for name in ("top_p", "min_p") if (one := getattr(settings, name)) is not None}


def _assistant(files: Files, load: Any, mode: str) -> dict[str, Any]:
    is_other = mode.endswith("other tokenizer")
    if is_other and not files.symbols:
        raise Refused("needs a drafter of another vocabulary, which only a sentinel has here")
    assistant = load(files.other_drafter if is_other else files.drafter)
    options: dict[str, Any] = {"assistant_model": assistant}
    if mode == "assistant, constant":  # every draft is made and verified, however unsure
        config = assistant.generation_config
        config.num_assistant_tokens, config.assistant_confidence_threshold = 4, 0.0
        config.num_assistant_tokens_schedule = "constant"
    if is_other:
        from transformers import AutoTokenizer

        for name, folder in (("tokenizer", files.target), ("assistant_tokenizer", files.other_drafter)):
            options[name] = AutoTokenizer.from_pretrained(folder)
            # A sentinel's refuses what is none of its symbols, and it is tried on a space.
            options[name].backend_tokenizer.model.unk_token = options[name].bos_token
    return options


def _padded(requests: Sequence[Request]) -> tuple[list[list[int]], list[list[int]]]:
    """Ids and mask, padded on the left with whatever is masked there."""
    longest = max(len(one.prompt) for one in requests)
    gaps = [longest - len(one.prompt) for one in requests]
    ids = [[0] * gap + list(one.prompt) for gap, one in zip(gaps, requests, strict=True)]
    return ids, [[0] * gap + [1] * (longest - gap) for gap in gaps]


def _until_end(tokens: list[int], ends: int | list[int] | None) -> list[int]:
    """In a batch padding follows the end."""
    found = {ends} if isinstance(ends, int) else set(ends or ())
    last = next((place for place, token in enumerate(tokens) if token in found), len(tokens))
    return tokens[: last + 1]


def _told(rows: Sequence[Any], tokens: Sequence[int]) -> tuple[tuple[tuple[int, float], ...], ...]:
    places = []
    for row, token in zip(rows, tokens, strict=False):
        logprobs = row.double().log_softmax(dim=-1)
        told = dict.fromkeys([*logprobs.topk(2).indices.tolist(), token])
        places.append(tuple((one, float(logprobs[one])) for one in told))
    return tuple(places) if len(places) == len(tokens) else ()


ENGINE = _Transformers()
