"""Loads a workload by name, from a file or folder, or from the hub. Data is read; code beside it is never run.

What needs `datasets` (the hub, folders, Parquet) imports it then. Whatever goes wrong is a ValueError of one sentence.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, TextIO

from specbench.models import unknown_name
from specbench.sanitize import plain
from specbench.workloads.layouts import LAYOUTS, Row, layout_for, prompts_of
from specbench.workloads.workload import Workload

OWN, HOSTILE = "specbench", "hostile"
SHIPPED = {OWN: "prompts.jsonl", HOSTILE: "hostile.jsonl"}
HUBS = {one.name: one.hub for one in LAYOUTS if one.hub is not None}
HUB_SECONDS = 10  # until its first answer
MAX_REASON = 300  # characters of what a library says

# Where a row stands, for messages, and the row.
Rows = Iterator[tuple[str, Row]]


def load(
    name_or_path: str | Path = OWN, *, layout: str | None = None, config: str | None = None, split: str | None = None
) -> Workload:
    """Our own prompts (no name), those on which nobody guesses well ("hostile"), a known data set by its name, a
    file, a folder, or a hub id (`owner/name`).

    layout: a name of LAYOUTS; None tells it from the columns. config, split: of a hub id or folder that has several.
    ValueError when it cannot be had, is empty, or fits no layout.
    """
    name = str(name_or_path)
    path = Path(name).expanduser()
    source = ", ".join(part for part in (name, config, split) if part)
    if (config or split) and (name in SHIPPED or path.is_file()):
        raise ValueError(f"{name} has neither configs nor splits: leave config and split out")
    if name in SHIPPED:
        layout, source = layout or OWN, "written for specbench, Apache-2.0"
        rows = _jsonl(files("specbench.workloads") / SHIPPED[name])
    elif name in HUBS:
        hub = HUBS[name]
        layout, config, split = layout or name, config or hub.config, split or hub.split
        source = ", ".join(part for part in (hub.id, config, split) if part)
        rows = _hub(hub.id, config, split)
    elif path.is_dir():
        rows = _folder(path, config, split)
    elif path.is_file():
        rows = _file(path)
    elif name.count("/") == 1 and name[0] not in "./~" and _reader_for(path) is None:
        rows = _hub(name, config, split)
    elif name in (one.name for one in LAYOUTS):
        raise ValueError(f"{name} has no place on the hub that is known here: name its file, and layout {name}")
    elif "/" in name or path.suffix:
        raise ValueError(f"there is no file or folder {name}")
    else:
        raise ValueError(unknown_name("workload", name, [*SHIPPED, *HUBS, "a file or folder", "a hub id (owner/name)"]))
    try:
        first = next(rows, None)
        if first is None:
            raise ValueError("there are no rows")
        chosen = layout_for([str(column) for column in first[1]], layout)
        prompts, notes = prompts_of(chosen, itertools.chain([first], rows), source)
    except (ValueError, OSError, EOFError, zlib.error) as error:  # the last two: a damaged .gz
        raise ValueError(f"{source}: {error}") from error
    return Workload(name if name in SHIPPED else chosen.name, prompts, notes)


def _file(path: Path) -> Rows:
    reader = _reader_for(path)
    if reader is None:
        raise ValueError(f"{path} ends like no file that can be read: {', '.join(_READERS)}, most of them also as .gz")
    return reader(path)


def _reader_for(path: Path) -> Callable[[Path], Rows] | None:
    return _READERS.get(path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix)


def _open(path: Any) -> TextIO:
    """A path, or a file inside the package. utf-8-sig: Windows' editors put a mark at the beginning."""
    if path.name.endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="\n")
    found: TextIO = path.open("r", encoding="utf-8-sig", newline="\n")
    return found


def _lines(path: Any) -> Iterator[tuple[str, str]]:
    """Not split at separators inside a text, such as U+2028. Blank lines are skipped."""
    with _open(path) as file:
        try:
            for num, line in enumerate(file, start=1):
                if line.strip():
                    yield f"line {num}", line.rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"the file is not UTF-8 text ({error.reason})") from error


def _jsonl(path: Any) -> Rows:
    for where, line in _lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} is not JSON: {error}") from error
        yield where, _object(row, where)


def _json(path: Path) -> Rows:
    with _open(path) as file:
        try:
            found = json.load(file)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the file is not JSON: {error}") from error
    if not isinstance(found, list):
        raise ValueError(f"the file must hold a list of objects, not {type(found).__name__}")
    for num, row in enumerate(found, start=1):
        yield f"row {num}", _object(row, f"row {num}")


def _object(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"{where} must be an object, not {type(row).__name__}")
    return row


def _csv(path: Path) -> Rows:
    with _open(path) as file:
        try:
            reader = csv.DictReader(file, strict=True)
            for row in reader:
                where = f"line {reader.line_num}"
                if None in row or None in row.values():
                    raise ValueError(f"{where} has not as many cells as the first line")
                yield where, row
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"the file cannot be read as CSV: {error}") from error


def _text(path: Path) -> Rows:
    for where, line in _lines(path):
        yield where, {"text": line}


def _parquet(path: Path) -> Rows:
    from pyarrow import parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except Exception as error:  # pyarrow has a type for each of many kinds of damage
        raise ValueError(f"the file cannot be read as Parquet: {_reason(error)}") from error
    for num, row in enumerate(rows, start=1):
        yield f"row {num}", row


_READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
    ".txt": _text,
    ".raw": _text,  # WikiText's own endings
    ".tokens": _text,
}


def _folder(path: Path, config: str | None, split: str | None) -> Rows:
    """What `save_to_disk` wrote, or a folder of data files, such as a clone of a hub's repository."""
    import datasets

    try:
        if not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
            found, split = datasets.load_dataset(str(path), config, split=split), None
        elif config is None:
            found = datasets.load_from_disk(str(path))
        else:
            raise ValueError("what save_to_disk wrote has no configs")
    except Exception as error:
        raise ValueError(f"the folder cannot be read: {_reason(error)}") from error
    yield from _rows_of(found, split)


def _hub(hub_id: str, config: str | None, split: str | None) -> Rows:
    """One short question first: without a network, `datasets` would try again and again for half a minute."""
    import datasets
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    why = ""
    try:
        HfApi().dataset_info(hub_id, timeout=HUB_SECONDS)
    except OfflineModeIsEnabled:
        why = ": HF_HUB_OFFLINE is set, and it is not in the cache; name a file or folder instead"
    except HfHubHTTPError as error:
        raise ValueError(f"the hub refuses it: {_reason(error)}") from error
    except Exception as error:  # the HTTP library's, which huggingface_hub has changed before
        instead = "name a file or folder instead, or set HF_HUB_OFFLINE=1 if it was loaded before"
        raise ValueError(f"the hub cannot be reached ({_reason(error)}): {instead}") from error
    try:
        found = datasets.load_dataset(hub_id, config, split=split)
    except Exception as error:
        raise ValueError(f"{_reason(error)}{why}") from error
    yield from _rows_of(found)


def _rows_of(found: Any, split: str | None = None) -> Rows:
    """found: a Dataset, or several by their split."""
    if isinstance(found, dict):
        split = next(iter(found)) if split is None and len(found) == 1 else split
        if split not in found:
            raise ValueError(f"there are the splits {', '.join(found)}: name one of them")
        found = found[split]
    elif split is not None:
        raise ValueError("it is one split without a name: leave split out")
    for num, row in enumerate(found, start=1):
        yield f"row {num}", row


def _reason(error: Exception) -> str:
    return plain(str(error) or type(error).__name__, MAX_REASON, one_line=True).rstrip(".")
