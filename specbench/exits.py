"""`specbench exits`: how often each layer of a model already says what the last one says, on texts that it writes.

A study, nothing more: see `reference.exits`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import add
from pathlib import Path

import torch

from specbench.banks import encoded_prompts, load_checkpoint
from specbench.prompts import load_prompts
from specbench.reference.decoder import Decoder
from specbench.reference.exits import SURE, Exit, exits
from specbench.reference.model import LlamaModel
from specbench.types import Stop

COLUMNS = ("layers", "its word is the last layer's", "the last layer's is among its five", "it is sure", "and right")
DEFINITIONS = (
    "layers: how many are computed before the last norm and the output matrix. Rows: those that a plain greedy answer "
    f"is drawn from, answer by answer. sure: of its rows, those where its word has a probability above {SURE:g}; and "
    "right: of these, those where it is the last layer's."
)


def survey(
    folder: str | Path,
    *,
    dtype: torch.dtype,
    num_each: int,
    max_new_tokens: int,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Exit]:
    """Over `num_each` shipped prompts of each category. ValueError for a model whose layers cannot be read, or without
    a tokenizer."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = load_checkpoint(str(folder), dtype)
    if not isinstance(model, LlamaModel):
        raise ValueError(f"{folder} is run as a {type(model).__name__}: the layers of Llama and Mistral alone are read")
    prompts, ends = encoded_prompts(str(folder))
    if not prompts:
        raise ValueError(f"{folder} has no tokenizer, which the shipped prompts need: save one into the folder")
    decoder, found = Decoder(model), list[list[Exit]]()
    for name, prompt in _chosen(prompts, num_each):
        tell(name)
        said = decoder.generate(list(prompt), max_new_tokens=max_new_tokens, stop=Stop(eos_token_ids=ends)).tokens
        found.append(exits(model, [*prompt, *said[:-1]], first=len(prompt) - 1))
    return [reduce(add, some) for some in zip(*found, strict=True)]


def _chosen(prompts: Sequence[tuple[str, tuple[int, ...]]], num_each: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    category_of, counts = {one.id: one.category for one in load_prompts()}, dict[str, int]()
    for name, prompt in prompts:
        category = category_of.get(name, "")
        counts[category] = counts.get(category, 0) + 1
        if counts[category] <= num_each:
            yield name, prompt


def table(found: Sequence[Exit]) -> str:
    """Markdown, the shallowest first."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"| {' | '.join('---' for _ in COLUMNS)} |"]
    for one in found:
        cells = [
            str(one.layers),
            _share(one.equal, one.rows),
            _share(one.among_five, one.rows),
            _share(one.sure, one.rows),
            _share(one.sure_equal, one.sure),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _share(num: int, of: int) -> str:
    return f"{100 * num / of:.1f} % ({num}/{of})" if of else "-"
