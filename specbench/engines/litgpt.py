"""LitGPT on the CPU: `litgpt.generate.base` plain, and `litgpt.generate.speculative_decoding` with a draft model.

The latter's `generate` is asked as it is; its `speculative_decoding`, which is one round, is asked in a loop of ours as
well, so that what only the former does wrong is told apart. Llamas only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specbench.engines.engine import Answer, Files, Missing, Mode, Refused, Request, Settings

_PRECISIONS = {"fp32": "32-true", "bf16": "bf16-true", "fp16": "16-true"}
_BATCHES = {"plain, batch of 1": 1, "plain, batch of 2": 2, "plain, batch of 4": 4}
_ROUNDS = {"draft model, rounds of 1": 1, "draft model, rounds of 4": 4, "draft model, rounds of 8": 8}
_NUM_DRAFTS = 4


class _LitGpt:
    requirements = ("torch==2.13.0", "litgpt==0.5.13")
    weights = tuple(_PRECISIONS)
    temperature_last = False
    modes: Mapping[str, Mode] = {
        "plain": Mode(),
        **{name: Mode() for name in _BATCHES},
        "draft model": Mode(drafts=True),
        **{name: Mode(drafts=True) for name in _ROUNDS},
    }

    def version(self) -> str:
        from importlib.metadata import PackageNotFoundError, version

        try:
            return f"LitGPT {version('litgpt')}"
        except PackageNotFoundError:
            raise Missing("pip install litgpt") from None

    def generate(self, files: Files, requests: Sequence[Request], settings: Settings) -> Iterator[Answer]:
        import torch

        if settings.min_p is not None:
            raise Refused("it has no min_p")
        room = max(len(one.prompt) + one.max_new_tokens for one in requests)
        batch = _BATCHES.get(settings.mode, 1)
        target, ends = _loaded(files.target, settings.weights, room, batch)
        drafter = _loaded(files.drafter, settings.weights, room, 1)[0] if self.modes[settings.mode].drafts else None
        sampling = {"temperature": settings.temperature, "top_k": settings.top_k}
        sampling["top_p"] = 1.0 if settings.top_p is None else settings.top_p
        verified: list[int] = []  # rows of each forward of the target

        def count(_: Any, args: Any, options: Any) -> None:
            verified.append((args[0] if args else options["idx"]).shape[1])

        target.register_forward_pre_hook(count, with_kwargs=True)
        for i, request in enumerate(requests):
            verified.clear()
            torch.manual_seed(settings.seed + i)
            prompt = torch.tensor(request.prompt)
            if drafter is None:
                tokens = _plain(target, prompt, request, ends, sampling, batch if settings.mode in _BATCHES else None)
                yield Answer(tokens, num_forwards=len(verified))
                continue
            if settings.mode in _ROUNDS:
                tokens = _in_rounds(drafter, target, prompt, request, ends, sampling, _ROUNDS[settings.mode])
            else:
                tokens = _as_it_is(drafter, target, prompt, request, ends, sampling)
            num_rounds = len(verified) - 1  # the first is the prompt's
            num_drafted = sum(verified[1:]) - num_rounds
            yield Answer(tokens, len(verified), num_drafted, max(0, len(tokens) - len(verified)))


def _plain(
    target: Any, prompt: Any, request: Request, ends: list[int], sampling: dict[str, Any], batch: int | None
) -> tuple[int, ...]:
    """batch: the prompt so many times at once; prompts of several lengths it does not take."""
    from litgpt.generate.base import batched_generate_fn, generate_fn

    options = {"include_prompt": False, "include_eos": True, "stop_tokens": tuple([end] for end in ends)}
    length = len(request.prompt) + request.max_new_tokens
    if batch is None:
        said = list(generate_fn(target, prompt, length, **sampling, **options))
    else:
        prompts = prompt.repeat(batch, 1)
        said = [row[0] for row in batched_generate_fn(target, prompts, length, sample_args=sampling, **options)]
    return tuple(int(token) for token in said if token is not None)


def _as_it_is(
    drafter: Any, target: Any, prompt: Any, request: Request, ends: list[int], sampling: dict[str, Any]
) -> tuple[int, ...]:
    from litgpt.generate.speculative_decoding import generate

    length = len(request.prompt) + request.max_new_tokens
    options = {"include_prompt": False, "stop_tokens": tuple([end] for end in ends), "speculative_k": _NUM_DRAFTS}
    tokens, _ = generate(drafter, target, prompt, length, **sampling, **options)
    return tuple(tokens.flatten().tolist())


def _in_rounds(
    drafter: Any, target: Any, prompt: Any, request: Request, ends: list[int], sampling: dict[str, Any], k: int
) -> tuple[int, ...]:
    """The loop of its `generate`, with the first token, and until an end token."""
    import torch
    from litgpt.generate.speculative_decoding import next_token, speculative_decoding

    with torch.inference_mode():
        num_read = len(request.prompt)
        for model in (drafter, target):
            first = next_token(model, torch.arange(num_read), prompt.view(1, -1), num_read, **sampling)
        tokens = [int(first)]
        while len(tokens) < request.max_new_tokens and tokens[-1] not in ends:
            num_left = request.max_new_tokens - len(tokens)
            new = speculative_decoding(
                drafter,
                target,
                torch.tensor(tokens[-1:]),
                torch.tensor([num_read]),
                num_read + 1,
                min(k, num_left),
                **sampling,
            ).tolist()
            num_read += len(new)
            last = next((place for place, token in enumerate(new) if token in ends), len(new))
            tokens += new[: last + 1]
    return tuple(tokens[: request.max_new_tokens])


def _loaded(folder: Path, weights: str, room: int, batch: int) -> tuple[Any, list[int]]:
    """As its own conversion and `setup_model` do; that conversion knows models by their names only."""
    import lightning
    import torch
    from litgpt.config import Config
    from litgpt.generate.speculative_decoding import setup_model
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
    from safetensors.torch import load_file

    read = json.loads((folder / "config.json").read_text("utf-8"))
    if read["model_type"] != "llama" or read.get("rope_scaling"):
        raise Refused("only a Llama without scaled rotary frequencies is read here")
    rotary = read.get("rope_parameters") or read
    config = Config(
        name=folder.name,
        block_size=max(room, read["max_position_embeddings"]),
        vocab_size=read["vocab_size"],
        padded_vocab_size=read["vocab_size"],
        n_layer=read["num_hidden_layers"],
        n_head=read["num_attention_heads"],
        n_query_groups=read["num_key_value_heads"],
        n_embd=read["hidden_size"],
        head_size=read.get("head_dim") or read["hidden_size"] // read["num_attention_heads"],
        intermediate_size=read["intermediate_size"],
        norm_eps=read["rms_norm_eps"],
        rope_base=rotary["rope_theta"],
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
    )
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=_PRECISIONS[weights])
    model: Any = setup_model(config, room, fabric)
    states: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        copy_weights_hf_llama(config, {}, states, load_file(file))
    model.load_state_dict(states)
    dtype = next(model.parameters()).dtype
    model.set_kv_cache(batch_size=batch, device=torch.device("cpu"), dtype=dtype)
    ends = read.get("eos_token_id")
    return model, ends if isinstance(ends, list) else [] if ends is None else [ends]


ENGINE = _LitGpt()
