"""A workload as text: its categories, how many prompts each has, and how long they are. Serves `specbench workload`."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Any

from specbench.models import MODELS, fetched
from specbench.sanitize import plain
from specbench.workloads.chat import has_template, lengths
from specbench.workloads.workload import Workload

MAX_CELL = 40
MAX_NOTE = 300


def listing(workload: Workload, tokenizer: Any = None) -> str:
    """tokenizer: a transformers tokenizer. With one, tokens of first turns as they are sent, by nearest rank."""
    lines = [f"{workload.name}: {len(workload.prompts)} prompts, sha256 {workload.sha256}"]
    notes = list(workload.notes)
    head = ["category", "prompts", "turns"]
    rows = [[name, str(num), _turns(workload, name)] for name, num in workload.categories.items()]
    if tokenizer is not None:
        num_tokens = lengths(workload, tokenizer)
        num_framed = sum(has_template(one, tokenizer) for one in workload.prompts)
        notes.append(f"{num_framed} are sent in the chat template, {len(workload.prompts) - num_framed} as plain text")
        head += ["least", "median", "90 %", "most"]
        for row, name in zip(rows, workload.categories, strict=True):
            of = sorted(num_tokens[one.id] for one in workload.prompts if one.category == name)
            row += [str(of[max(1, ceil(share * len(of))) - 1]) for share in (0.0, 0.5, 0.9, 1.0)]
    lines += [f"note: {plain(note, MAX_NOTE, one_line=True)}" for note in notes]
    return "\n".join([*lines, "", *_table([head, *rows])])


def tokenizer_in(name_or_folder: str) -> Any:
    """A tokenizer of a fetched model or a folder; nothing is fetched. ValueError says what to do."""
    folder = Path(fetched(name_or_folder).path if name_or_folder in MODELS else name_or_folder).expanduser()
    if not folder.is_dir():
        raise ValueError(f"--tokenizer {name_or_folder} is not a folder, nor one of: {', '.join(MODELS)}")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # transformers has one for each way in which a folder is none
        raise ValueError(
            f"--tokenizer {name_or_folder} holds no tokenizer that transformers loads: "
            f"{plain(str(error), MAX_NOTE, one_line=True)}"
        ) from error


def _turns(workload: Workload, category: str) -> str:
    counts = {len(one.turns) for one in workload.prompts if one.category == category}
    return f"{min(counts)}-{max(counts)}" if len(counts) > 1 else f"{min(counts)}"


def _table(rows: list[list[str]]) -> list[str]:
    rows = [[plain(cell, MAX_CELL, one_line=True) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]))
    return lines
