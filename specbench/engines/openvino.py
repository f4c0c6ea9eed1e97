"""OpenVINO GenAI on the CPU: continuous batching plain, with a draft model, and by prompt lookup.

It is asked and answers by token ids. GGUF files are read by its own reader; folders need optimum-intel as well. Both
become OpenVINO models in a folder next to what they were made of, once. Logprobs are not asked for: it has one a token.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbench.engines.engine import Answer, Files, Missing, Mode, Refused, Request, Settings, configuring

# What the weights are multiplied in; q8_0 and q4_0 stay packed in memory. No q4_1: its reader rounds the minima.
_PRECISIONS = {"f16": "f32", "q8_0": "f32", "q4_0": "f32", "fp32": "f32", "bf16": "bf16"}
_FOLDERS = ("fp32", "bf16")
_KV_BLOCK_LEN = 32  # of the CPU plugin
_NUM_DRAFTS = 4


@dataclass(frozen=True)
class _How:
    """drafts: "model", "lookup" or none. batch: all requests at once. twice: asked before, so that their blocks are in
    the prefix cache. scarce: so few blocks that requests are preempted. kv_cache: as the computation, unless given.
    threshold: a draft model goes on while it is as sure as this. scheduler: attributes of SchedulerConfig."""

    drafts: str = ""
    batch: bool = True
    twice: bool = False
    scarce: bool = False
    kv_cache: str = ""
    threshold: float = 0.0
    scheduler: Mapping[str, Any] = field(default_factory=dict)


_SMALL = {"max_num_batched_tokens": 16}  # prompts are read in several steps, beside other requests' new tokens
_PREFIX = {"enable_prefix_caching": True}
_MODES = {
    "plain": _How(batch=False),
    "plain, batch": _How(),
    "plain, small batches": _How(scheduler=_SMALL),
    "plain, prefix caching": _How(twice=True, scheduler=_PREFIX),
    "plain, preemption": _How(scarce=True),
    "u8 cache": _How(batch=False, kv_cache="u8"),
    "draft model": _How("model", batch=False),
    "draft model, batch": _How("model"),
    "draft model, small batches": _How("model", scheduler=_SMALL),
    "draft model, dynamic": _How("model", batch=False, threshold=0.4),
    "draft model, prefix caching": _How("model", batch=False, twice=True, scheduler=_PREFIX),
    "draft model, preemption": _How("model", scarce=True),
    "draft model, u8 cache": _How("model", batch=False, kv_cache="u8"),
    "prompt lookup": _How("lookup", batch=False),
    "prompt lookup, batch": _How("lookup"),
    "prompt lookup, small batches": _How("lookup", scheduler=_SMALL),
    "prompt lookup, preemption": _How("lookup", scarce=True),
}


class _OpenVino:
    requirements = ("openvino-genai==2026.4.1.0",)
    weights = tuple(_PRECISIONS)
    temperature_last = False
    modes: Mapping[str, Mode] = {
        name: Mode(drafts=bool(how.drafts), as_plain=not how.kv_cache) for name, how in _MODES.items()
    }

    def version(self) -> str:
        try:
            import openvino_genai
        except ImportError:
            raise Missing("pip install openvino-genai") from None
        return f"OpenVINO GenAI {openvino_genai.__version__}"

    def generate(self, files: Files, requests: Sequence[Request], settings: Settings) -> Iterator[Answer]:
        import numpy as np
        import openvino as ov

        how = _MODES[settings.mode]
        pipeline = self._pipeline(files, requests, settings, how)
        ids = [ov.Tensor(np.array([request.prompt], dtype=np.int64)) for request in requests]
        configs = [self._config(files, request, settings, how, i) for i, request in enumerate(requests)]
        answers: list[Answer] = []
        for _ in range(2 if how.twice else 1):
            if how.batch:
                answers = _answers(pipeline.generate(ids, configs))
            else:
                pairs = zip(ids, configs, strict=True)
                answers = [_answers(pipeline.generate([one], [config]))[0] for one, config in pairs]
        yield from answers

    def _pipeline(self, files: Files, requests: Sequence[Request], settings: Settings, how: _How) -> Any:
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        for name, value in how.scheduler.items():
            setattr(scheduler, name, value)
        if how.scarce:  # one and a half times what the longest request fills, with its drafts
            longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
            scheduler.num_kv_blocks = 3 * (longest + _NUM_DRAFTS + _KV_BLOCK_LEN) // (2 * _KV_BLOCK_LEN) + 1
        precision = _PRECISIONS[settings.weights]
        options: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": precision,  # bf16 by default where the CPU has it, and a cache of u8
            "KV_CACHE_PRECISION": how.kv_cache or precision,
            # Packed weights are otherwise met by activations rounded to int8, in some batch shapes and not in others.
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        }
        more: dict[str, Any] = {}
        if how.drafts == "model":
            folder = _converted(files.drafter, files.drafter_gguf, settings.weights)
            more["draft_model"] = openvino_genai.draft_model(folder, "CPU", **options)
        elif how.drafts == "lookup":
            more["prompt_lookup"] = True
        folder = _converted(files.target, files.target_gguf, settings.weights)
        tokenizer = openvino_genai.Tokenizer(folder)
        return openvino_genai.ContinuousBatchingPipeline(folder, tokenizer, scheduler, "CPU", **options, **more)

    def _config(self, files: Files, request: Request, settings: Settings, how: _How, i: int) -> Any:
        import openvino_genai

        ends = _end_tokens(files.target)
        options: dict[str, Any] = {"max_new_tokens": request.max_new_tokens, "ignore_eos": not ends}
        # It wants an end token even when that is to be ignored; BOS is one that a sentinel never says.
        options["eos_token_id"] = min(ends, default=request.prompt[0])
        options["stop_token_ids"] = ends or {request.prompt[0]}
        if settings.temperature:
            options |= {"do_sample": True, "temperature": settings.temperature, "rng_seed": settings.seed + i}
            chosen = {"top_k": settings.top_k, "top_p": settings.top_p, "min_p": settings.min_p}
            options |= {name: value for name, value in chosen.items() if value is not None}
        if how.threshold:
            options["assistant_confidence_threshold"] = how.threshold
        elif how.drafts:
            options["num_assistant_tokens"] = _NUM_DRAFTS
        if how.drafts == "lookup":
            options["max_ngram_size"] = 3
        return openvino_genai.GenerationConfig(**options)


def _answers(results: Sequence[Any]) -> list[Answer]:
    """Of one call. What it counts is of the whole call: it goes to the first answer, the others get 0."""
    answers = []
    for i, result in enumerate(results):
        tokens, counted = tuple(result.m_generation_ids[0]), result.extended_perf_metrics
        if hasattr(counted, "get_num_draft_tokens"):
            num_steps = len(counted.main_model_metrics.raw_metrics.m_durations)
            numbers = (num_steps, counted.get_num_draft_tokens(), counted.get_num_accepted_tokens())
            answers.append(Answer(tokens, *(numbers if i == 0 else (0, 0, 0))))
        else:  # without a draft model it does not tell, but one request's steps that gave tokens can be counted
            forwards = len(result.perf_metrics.raw_metrics.m_batch_sizes) if len(results) == 1 else None
            answers.append(Answer(tokens, num_forwards=forwards))
    return answers


def _end_tokens(folder: Path) -> set[int]:
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ends = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if ends is not None:
            return set(ends if isinstance(ends, list) else [ends])
    return set()


def _converted(folder: Path, gguf: Path, weights: str) -> Path:
    """The OpenVINO model of a folder or a GGUF file, made once; its name holds the time of what it was made of."""
    source = folder if weights in _FOLDERS else gguf
    made = source.parent / f".{source.name}-openvino-{weights}-{source.stat().st_mtime_ns:x}"
    if not made.is_dir():
        with tempfile.TemporaryDirectory(dir=source.parent, prefix=".openvino-") as work:
            model = Path(work) / "model"
            model.mkdir()
            _write_tokenizer(model)
            if weights in _FOLDERS:
                _convert_folder(folder, model)
            else:
                _convert_gguf(gguf, model)
            model.rename(made)
    return made


def _convert_folder(folder: Path, made: Path) -> None:
    try:
        from optimum.exporters.openvino import main_export
        from optimum.intel import OVConfig
    except ImportError:
        # 2.2 wants torchvision, whose wheels do not go with a CPU build of torch.
        raise Refused("folders need `pip install optimum-intel==2.1.0 torch==2.13.0`, GGUF does not") from None
    with configuring():
        main_export(
            str(folder),
            output=made,
            task="text-generation-with-past",
            library_name="transformers",
            convert_tokenizer=False,
            ov_config=OVConfig(dtype="fp32"),  # whatever the folder's format, nothing is rounded
        )


def _convert_gguf(gguf: Path, made: Path) -> None:
    """By loading it: a draft model cannot be a GGUF file, but what was made of one can be saved beside it."""
    import openvino_genai

    link = made / "model.gguf"
    link.symlink_to(gguf.resolve())
    openvino_genai.LLMPipeline(link, openvino_genai.Tokenizer(made), "CPU", enable_save_ov_model=True)
    link.unlink()


def _write_tokenizer(made: Path) -> None:
    """Of single ASCII characters. Only ids are asked, but a pipeline with a draft model has both tokenizers read the
    same text, and its GGUF reader knows no other tokenizer than byte-level BPE."""
    import numpy as np
    import openvino as ov
    from openvino import opset15 as ops
    from openvino_tokenizers.build_tokenizer import build_rwkv_tokenizer

    tokenizer, _ = build_rwkv_tokenizer([f"{code} {chr(code)!r} 1" for code in range(128)])
    ids = tokenizer.get_results()[0].input_value(0)
    mask = ops.broadcast(ops.constant(np.int64(1)), ops.shape_of(ids))
    mask.output(0).tensor.set_names({"attention_mask"})
    tokenizer.add_results([ops.result(mask)])
    ov.save_model(tokenizer, made / "openvino_tokenizer.xml")


ENGINE = _OpenVino()
