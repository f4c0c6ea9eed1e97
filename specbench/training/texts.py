"""What a target writes when it is asked, and what it computes over that: shards on disk, made one by one, resumable.

texts-0000.safetensors: tokens int32, all texts one behind the other, cu_tokens int64 [n + 1], starts int64 [n] (the
first token of the answer). states-0000.safetensors beside it: states float16 [sum, H], what the logits at each token
are made of, labels int32 [sum], the token of the largest logit. A shard that is there is not made again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Progress = Callable[[str, int, int], None]  # what, how many of it are done, how many there are


@dataclass(frozen=True)
class Text:
    """tokens: int64 [S]. states: float [S, H] and labels: int64 [S], of a target (see above). start: of the answer."""

    tokens: Tensor
    states: Tensor
    labels: Tensor
    start: int


def write_texts(
    model: Any,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    *,
    num_new: int,
    eos_token_ids: Sequence[int],
    pad_token_id: int,
    temperatures: Sequence[float] = (0.0, 0.7),
    batch: int = 32,
    seed: int = 0,
    first_shard: int = 0,
    progress: Progress = lambda *told: None,
) -> int:
    """model: a transformers causal LM. Each batch is answered at the next of `temperatures`; answers end behind their
    first end token. first_shard: the number of the first file. Returns how many shards there are."""
    order = sorted(range(len(prompts)), key=lambda idx: (len(prompts[idx]), idx))  # little padding in a batch
    groups = [order[first : first + batch] for first in range(0, len(order), batch)]
    for number, group in enumerate(groups, start=first_shard):
        file = folder / f"texts-{number:04}.safetensors"
        if not file.is_file():
            temperature = temperatures[number % len(temperatures)]
            asked = [list(prompts[idx]) for idx in group]
            texts = _answered(model, asked, num_new, temperature, eos_token_ids, pad_token_id, seed + number)
            shard = {
                "tokens": torch.tensor([token for text in texts for token in text], dtype=torch.int32),
                "cu_tokens": torch.tensor([0, *torch.tensor([len(text) for text in texts]).cumsum(0).tolist()]),
                "starts": torch.tensor([len(one) for one in asked]),
            }
            save_whole(file, shard)
        progress("texts", number + 1 - first_shard, len(groups))
    return len(groups)


@torch.no_grad()
def _answered(
    model: Any,
    prompts: list[list[int]],
    num_new: int,
    temperature: float,
    eos_token_ids: Sequence[int],
    pad_token_id: int,
    seed: int,
) -> list[list[int]]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad_token_id] * (longest - len(one)) + one for one in prompts])
    mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # transformers draws from the global generator
        out = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=num_new,
            eos_token_id=list(eos_token_ids) or None,
            pad_token_id=pad_token_id,
            **({"do_sample": False} | sampling),
        )
    texts = []
    for prompt, row in zip(prompts, out[:, longest:].tolist(), strict=True):
        ends = [idx for idx, token in enumerate(row) if token in eos_token_ids]
        texts.append(prompt + (row[: ends[0] + 1] if ends else row))
    return texts


@torch.no_grad()
def write_states(target: Any, folder: Path, *, progress: Progress = lambda *told: None) -> None:
    """target: a model with `states` and `head`, as `reference.model.LlamaModel`, over every shard of texts."""
    files = sorted(folder.glob("texts-*.safetensors"))
    for number, file in enumerate(files):
        made = file.with_name(file.name.replace("texts", "states"))
        if not made.is_file():
            found = [(states, (states @ target.head.T).argmax(-1)) for states in map(target.states, _tokens(file))]
            shard = {
                "states": torch.cat([states for states, _ in found]).to(torch.float16),
                "labels": torch.cat([labels for _, labels in found]).to(torch.int32),
            }
            save_whole(made, shard)
        progress("states", number + 1, len(files))


def read_texts(folder: Path) -> Iterator[Text]:
    """Every text whose states have been written. ValueError where there is none."""
    from safetensors.torch import load_file

    num = 0
    for file in sorted(folder.glob("states-*.safetensors")):
        own, texts = load_file(file), load_file(file.with_name(file.name.replace("states", "texts")))
        bounds = texts["cu_tokens"].tolist()
        for (first, end), start in zip(pairwise(bounds), texts["starts"].tolist(), strict=True):
            num += 1
            rows = slice(first, end)
            yield Text(texts["tokens"][rows].long(), own["states"][rows].float(), own["labels"][rows].long(), start)
    if not num:
        raise ValueError(f"{folder} holds no states-*.safetensors: write_texts and write_states come first")


def answers(folder: Path, num_shards: int) -> list[list[int]]:
    """What was answered, in the tokens of the first shards."""
    found = []
    for number in range(num_shards):
        file = folder / f"texts-{number:04}.safetensors"
        found += [text[start:] for text, start in zip(_tokens(file), _starts(file), strict=True)]
    return found


def frequent_ids(texts: Sequence[Text], *, num_ids: int, vocab_size: int) -> Tensor:
    """int64 [num_ids] ascending: the tokens that the target chose most often, and where it chose fewer the lowest ids,
    which byte-pair tokenizers give to what is frequent."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for one in texts:
        counts += torch.bincount(one.labels[one.start - 1 :], minlength=vocab_size)
    order = counts.sort(descending=True, stable=True).indices
    return order[: min(num_ids, vocab_size)].sort().values


def _tokens(file: Path) -> list[list[int]]:
    from safetensors.torch import load_file

    texts = load_file(file)
    bounds, tokens = texts["cu_tokens"].tolist(), texts["tokens"].tolist()
    return [tokens[first:end] for first, end in pairwise(bounds)]


def _starts(file: Path) -> list[int]:
    from safetensors.torch import load_file

    return load_file(file)["starts"].tolist()


def save_whole(file: Path, tensors: dict[str, Tensor]) -> None:
    """Whole or not at all: a run that is stopped leaves no half of a file."""
    from safetensors.torch import save_file

    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    save_file(tensors, unfinished)
    os.replace(unfinished, file)
