"""mistral.rs on the CPU, plain and with a draft model: the last release of its package that takes one.

Later releases (0.8.4 to 0.9.5) draft by MTP heads alone. It is asked and answers by text, so sentinels only.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specbench.engines.engine import Answer, Files, Missing, Mode, Refused, Request, Settings

_DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_OPTIONS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "plain, prompt by 16": {"prompt_chunksize": 16},
    "plain, prompt by 64": {"prompt_chunksize": 64},
    "plain, no prefix cache": {"prefix_cache_n": 0},
    "draft model": {"speculative_gamma": 4},
    "draft model, 1 draft": {"speculative_gamma": 1},
    "draft model, 8 drafts": {"speculative_gamma": 8},
    "draft model, prompt by 16": {"speculative_gamma": 4, "prompt_chunksize": 16},
}


class _MistralRs:
    requirements = ("mistralrs==0.6.0",)
    weights = tuple(_DTYPES)
    temperature_last = False
    modes: Mapping[str, Mode] = {name: Mode(drafts="speculative_gamma" in one) for name, one in _OPTIONS.items()}

    def version(self) -> str:
        try:
            import mistralrs
        except ImportError:
            raise Missing("pip install mistralrs==0.6.0") from None
        from importlib.metadata import version

        return f"mistral.rs {version(mistralrs.__name__)}"

    def generate(self, files: Files, requests: Sequence[Request], settings: Settings) -> Iterator[Answer]:
        from mistralrs import Architecture, CompletionRequest, ModelDType, Runner, Which

        if not files.symbols:
            raise Refused("it answers by text, which gives the tokens of a sentinel only")
        with tempfile.TemporaryDirectory() as work:

            def which(folder: Path) -> Any:
                dtype = getattr(ModelDType, _DTYPES[settings.weights])
                copy = _readable(folder, Path(work) / folder.name)
                return Which.Plain(model_id=str(copy), arch=Architecture.Llama, dtype=dtype)

            options = dict(_OPTIONS[settings.mode])
            if self.modes[settings.mode].drafts:
                options["which_draft"] = which(files.drafter)
            # No seed: on the CPU the runner refuses one. Its generator always starts at the same state.
            runner = _asked(Runner, which=which(files.target), **options)
            for request in requests:
                asked = CompletionRequest(
                    prompt=request.text,
                    model="",
                    max_tokens=request.max_new_tokens,
                    temperature=settings.temperature,
                    top_k=settings.top_k,
                    top_p=settings.top_p,
                    min_p=settings.min_p,
                )
                text = _asked(runner.send_completion_request, asked).choices[0].text
                # In every mode it writes one token more than it is asked for.
                yield Answer(tuple(files.symbols.find(one) for one in text)[: request.max_new_tokens])


def _asked(call: Any, *args: Any, **options: Any) -> Any:
    """Whatever goes wrong in there is a ValueError, with a trace of its own behind the first line."""
    try:
        return call(*args, **options)
    except ValueError as error:
        raise RuntimeError(str(error).splitlines()[0]) from None


def _readable(folder: Path, copy: Path) -> Path:
    """The folder without what it cannot read: an end token of null, and a decoder that only joins symbols. A byte-level
    one does the same to ASCII."""
    copy.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer_config.json"):
        (copy / name).symlink_to((folder / name).resolve())
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    tokenizer["decoder"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return copy


ENGINE = _MistralRs()
