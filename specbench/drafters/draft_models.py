"""Draft models for a real target, made of its own weights: its first layers, its weights rounded, other token ids.

No smaller model with SmolLM2's tokenizer can be had offline. Each is an ordinary folder of safetensors with a
tokenizer, made on first use.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

GROUP = 32  # weights that share a scale


class DraftModels:
    """target: a folder of a Llama with a tokenizer. work: where the folders go."""

    def __init__(self, target: str | Path, work: str | Path) -> None:
        self.target = Path(target)
        self._work = Path(work)

    def first_layers(self, num_layers: int) -> Path:
        """The target's first layers, its last norm and its head."""

        def make(model: PreTrainedModel) -> PreTrainedModel:
            model.model.layers = model.model.layers[:num_layers]
            model.config.num_hidden_layers = num_layers
            if getattr(model.config, "layer_types", None):
                model.config.layer_types = model.config.layer_types[:num_layers]
            return model

        return self._made(f"first-{num_layers}", make)

    def rounded(self, bits: int) -> Path:
        """Every matrix rounded to 2^bits - 1 steps, symmetric about 0, with a scale for each 32 weights of a row."""

        def make(model: PreTrainedModel) -> PreTrainedModel:
            with torch.no_grad():
                for one in model.parameters():
                    if one.ndim == 2:
                        one.copy_(round_weights(one, bits))
            return model

        return self._made(f"rounded-{bits}", make)

    def other_ids(self, num_layers: int) -> Path:
        """The first layers with the ids of all ordinary tokens turned around: another vocabulary of the same words."""
        source = self.first_layers(num_layers)
        folder = self._work / f"other-ids-{num_layers}"
        if folder.exists():
            return folder
        model = AutoModelForCausalLM.from_pretrained(source, use_safetensors=True)
        tokenizer = AutoTokenizer.from_pretrained(source)
        special = {int(one) for one in tokenizer.added_tokens_decoder}
        size = model.config.vocab_size
        ordinary = [one for one in range(size) if one not in special]
        new_id = dict(zip(ordinary, reversed(ordinary), strict=True))
        order = torch.tensor([new_id.get(one, one) for one in range(size)])  # an involution: old to new is new to old
        with torch.no_grad():
            # A set: tied, the two are one tensor, and turned around twice it would be as before.
            for weight in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
                weight.copy_(weight[order].clone())
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        written = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        vocab = written["model"]["vocab"]
        written["model"]["vocab"] = {token: new_id.get(idx, idx) for token, idx in vocab.items()}
        (folder / "tokenizer.json").write_text(json.dumps(written, ensure_ascii=False), encoding="utf-8")
        return folder

    def load(self, folder: Path | None = None) -> PreTrainedModel:
        """In fp32; None loads the target."""
        place = self.target if folder is None else folder
        options: dict[str, Any] = {"use_safetensors": True, "trust_remote_code": False}
        return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **options).eval()

    @property
    def vocab_size(self) -> int:
        return int(AutoConfig.from_pretrained(self.target, trust_remote_code=False).vocab_size)

    def _made(self, name: str, make: Callable[[PreTrainedModel], PreTrainedModel]) -> Path:
        folder = self._work / name
        if not folder.exists():
            make(self.load()).save_pretrained(folder)
            AutoTokenizer.from_pretrained(self.target, trust_remote_code=False).save_pretrained(folder)
        return folder


def round_weights(weights: Tensor, bits: int) -> Tensor:
    """weights: float [rows, columns]. Each group of 32 columns on a grid of 2^bits - 1 steps about 0."""
    rows, columns = weights.shape
    groups = torch.nn.functional.pad(weights, (0, -columns % GROUP)).reshape(rows, -1, GROUP)
    largest = 2 ** (bits - 1) - 1
    scale = groups.abs().amax(dim=-1, keepdim=True) / largest
    steps = (groups / scale.where(scale > 0, 1.0)).round()
    return (steps * scale).reshape(rows, -1)[:, :columns]
