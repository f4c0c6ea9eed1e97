"""What engines are run on, as files and as requests: a sentinel, or a real model that drafts for itself in 4 bits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch

from specbench import models
from specbench.audit import Output, requests_for
from specbench.engines import Files, Request
from specbench.prompts import encode, load_prompts
from specbench.reference.sentinel import (
    BOS,
    DTYPES,
    GGUF_TYPES,
    GGUF_VARIANTS,
    SYMBOLS,
    VARIANTS,
    Program,
    Sentinel,
    export,
    export_gguf,
    quantised,
)

AGREEMENT = 0.6  # of a sentinel's drafter: it is refused often enough
NUM_UNUSED = 3  # tokens more: transformers tells other vocabularies by their sizes
DRAFTER_BITS = 4  # of a real model's drafter
NUM_PROMPTS = 8  # of the shipped ones, for a real model


class SentinelModel:
    """variant: one of VARIANTS. has_law: sampled requests have an exact law then."""

    def __init__(self, *, variant: str = "llama", has_law: bool = False, seed: int = 0) -> None:
        if variant not in VARIANTS:
            raise ValueError(models.unknown_name("variant", variant, VARIANTS))
        self.program = Program.seeded(seed)
        self.formats = (*DTYPES, *GGUF_TYPES)
        self.variant, self.has_law, self._seed = variant, has_law, seed
        # Where a law is judged both share their states, and what a refusal leaves must show.
        self.drafter = self.program.with_cut_laws() if has_law else self.program.drafter(AGREEMENT, seed=seed)
        self.name = f"sentinel {variant}" + " with a law" * has_law

    def requests(self, max_new_tokens: int) -> dict[str, Request]:
        """Without the empty prompt, which engines refuse."""
        asked = sentinel_requests(self.program, max_new_tokens=max_new_tokens, seed=self._seed)
        return {name: one for name, one in asked.items() if one.text}

    def write(self, folder: Path, weights: str) -> Files:
        """Only what an engine reads that asks for this format of the weights."""
        if weights not in self.formats:
            raise ValueError(f"a sentinel is not written as {weights}")
        if self.has_law and weights.startswith("q"):
            raise ValueError(f"{weights} rounds the table of a law: sample from weights that hold it exactly")
        files = _files(folder, SYMBOLS)
        for program, where, gguf in (
            (self.program, files.target, files.target_gguf),
            (self.drafter, files.drafter, files.drafter_gguf),
        ):
            one = Sentinel(program, self.variant, self.has_law)
            # bf16 is a format of both; what no GGUF can hold is written as a folder alone.
            if weights in GGUF_TYPES and (weights not in DTYPES or self.variant in GGUF_VARIANTS):
                export_gguf(one, gguf, kind=weights)
            if weights in DTYPES:
                export(one, where, dtype=weights)
        if weights in DTYPES:
            order = [*reversed(range(BOS))]
            other = Sentinel(self.drafter.renamed(order), self.variant, self.has_law)
            symbols = "".join(SYMBOLS[one] for one in order)
            export(other, files.other_drafter, dtype=weights, symbols=symbols, num_unused=NUM_UNUSED)
        return files


def sentinel_requests(program: Program, *, max_new_tokens: int, seed: int) -> dict[str, Request]:
    """`audit.requests_for` by name, as engines are asked."""
    asked = requests_for(program, SYMBOLS, max_new_tokens=max_new_tokens, seed=seed)
    return {one.name: Request(one.prompt, one.text, one.max_new_tokens) for one in asked}


class RealModel:
    """name: as `models.find_model` takes it; safetensors only. The drafter is the model itself, rounded to 4 bits."""

    has_law = False

    def __init__(self, name: str, *, num_prompts: int = NUM_PROMPTS) -> None:
        found = models.fetched(name)
        self.name, self.folder = found.name, Path(found.path)
        self._gguf = _gguf_of(name, self.folder)
        self.gguf_format = self._gguf[0]
        self.formats = (*DTYPES, self.gguf_format)
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)
        config = json.loads((self.folder / "config.json").read_text("utf-8"))
        self.vocab_size = int(config["vocab_size"])
        ends = config.get("eos_token_id")
        self.ends = tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)
        self._num_prompts = num_prompts

    def requests(self, max_new_tokens: int) -> dict[str, Request]:
        """Shipped prompts of every category in turn, those whose text is read as the same tokens again."""
        categories: dict[str, list[Any]] = {}
        for one in load_prompts():
            categories.setdefault(one.category, []).append(one)
        found: dict[str, Request] = {}
        for one in chain.from_iterable(zip_longest(*reversed(categories.values()))):
            if one is None or len(found) == self._num_prompts:
                continue
            ids = encode(one, self._tokenizer)
            text = self._tokenizer.decode(ids)
            if self._tokenizer(text)["input_ids"] == ids:
                found[one.id] = Request(tuple(ids), text, max_new_tokens)
        return found

    def write(self, folder: Path, weights: str) -> Files:
        """ValueError for a format in which the weights are not exactly known."""
        files = _files(folder, "")
        if weights in DTYPES:
            self._write_rounded(files.target, DTYPES[weights], bits=None)
            self._write_rounded(files.drafter, DTYPES[weights], bits=DRAFTER_BITS)
            return files
        kind, gguf = self._gguf
        if weights != kind:
            raise ValueError(f"{self.name} as {weights}: its weights in that format are not known")
        shutil.copyfile(gguf, files.target_gguf)
        _requantise(gguf, files.drafter_gguf)
        self._write_rounded(files.target, torch.float32, bits=None)  # what the oracle reads
        return files

    def _write_rounded(self, where: Path, dtype: torch.dtype, *, bits: int | None) -> None:
        from safetensors.torch import load_file, save_file

        where.mkdir()
        for file in self.folder.iterdir():
            if file.suffix not in (".safetensors", ".gguf"):
                shutil.copyfile(file, where / file.name)
        for file in self.folder.glob("*.safetensors"):
            weights = load_file(file)
            if bits is not None:
                matrices = {name: one.float() for name, one in weights.items() if one.dim() == 2}
                weights |= quantised(matrices, bits)
            save_file({name: one.to(dtype) for name, one in weights.items()}, where / file.name, {"format": "pt"})
        config = json.loads((where / "config.json").read_text("utf-8"))
        config = as_engines_read(config, str(dtype).removeprefix("torch."))
        (where / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def as_engines_read(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """A config.json for weights of another dtype. rope_theta stands where transformers before 5 wrote it too: mlx-lm
    looks there alone, and takes 10,000 where it finds nothing."""
    changed = config | {key: dtype for key in ("dtype", "torch_dtype") if key in config}
    if theta := (config.get("rope_parameters") or {}).get("rope_theta"):
        changed.setdefault("rope_theta", theta)
    return changed


def ended(output: Output, ends: Sequence[int]) -> Output:
    """A text that ended early, with the first end token behind it where the engine left it out."""
    if output.max_new_tokens is None or len(output.tokens) >= output.max_new_tokens or not ends:
        return output
    if output.tokens and output.tokens[-1] in ends:
        return output
    # The place of the end has no logprobs then: an empty one keeps the others in step.
    logprobs = (*output.logprobs, ()) if output.logprobs else ()
    return replace(output, tokens=(*output.tokens, ends[0]), logprobs=logprobs, end_implied=True)


def _files(folder: Path, symbols: str) -> Files:
    folder.mkdir()
    return Files(
        target=folder / "target",
        drafter=folder / "drafter",
        other_drafter=folder / "other-drafter",
        target_gguf=folder / "target.gguf",
        drafter_gguf=folder / "drafter.gguf",
        symbols=symbols,
    )


def _gguf_of(name: str, folder: Path) -> tuple[str, Path]:
    """The file whose dequantised weights are those of the folder, and its kind."""
    if name not in models.MODELS:
        return "none", folder
    model = models.MODELS[name]
    return model.quantisation.lower(), folder / Path(model.gguf_member).name


def _requantise(source: Path, target: Path) -> None:
    """A GGUF file with the same fields whose matrices are rounded to q4_0 once more."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for name, one in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = one.types[0]
        inner = one.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, one.contents(), kind, sub_type=inner)
    small = gguf.GGMLQuantizationType.Q4_0
    for one in reader.tensors:
        if len(one.shape) < 2 or one.name == "token_embd.weight":
            writer.add_tensor(one.name, one.data, raw_dtype=one.tensor_type)
            continue
        values = gguf.dequantize(one.data, one.tensor_type)
        writer.add_tensor(one.name, gguf.quantize(values, small), raw_dtype=small)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
