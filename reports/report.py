"""Recorded files in, a folder out: index.html, summary.md, data/*.csv, figures/*.svg and *.png. No torch, no network.

What a file is, its content tells. The same files give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specbench import record
from specbench.bench import rows
from specbench.reports import bench, kernels, page, sections
from specbench.reports.bench import Headline
from specbench.reports.sections import Section
from specbench.reports.theme import style

KINDS = (
    "rows of `specbench bench` or of the kernels' benchmark (JSON lines), `specbench engines --json`, `specbench law "
    "--lossiness FILE.json` or a consistency run's .specbench/report.json"
)
ROWS = "rows.jsonl"  # of a folder that `specbench bench` wrote
HTML, MARKDOWN, DATA, FIGURES = "index.html", "summary.md", "data", "figures"


def write(files: Sequence[Path], folder: Path) -> Path:
    """The page of one or several recordings; rows of a benchmark come first. Of several runs of it the page is about
    the newest, and draws what changed. A folder stands for its ROWS. Returns the page's path.

    ValueError for a file that cannot be read, is none of KINDS or of whose kind there is another, and for a folder that
    holds other things than an earlier report. OSError where something cannot be written.
    """
    _check(folder)
    headline, found = read(files)
    title = "specbench report"
    eyebrow = " · ".join([title, *(file.name for file in files)])
    texts = {  # the page first, by which the folder is known as ours if what follows is interrupted
        HTML: page.html(headline, found, title=title, eyebrow=eyebrow),
        MARKDOWN: page.markdown(headline, found, title=title),
    }
    images: dict[str, bytes] = {}
    for one in found:
        for table in [*one.tables, *one.folded, *(drawing.table for drawing in one.drawings)]:
            texts[f"{DATA}/{table.name}.csv"] = table.as_csv()
        for drawing in one.drawings:
            texts[f"{FIGURES}/{drawing.name}.svg"] = drawing.svg
            if drawing.png is not None:
                images[f"{FIGURES}/{drawing.name}.png"] = drawing.png
    for name in (DATA, FIGURES):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for pattern in (f"{DATA}/*.csv", f"{FIGURES}/*.svg", f"{FIGURES}/*.png"):
        for old in folder.glob(pattern):
            old.unlink()
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    for name, image in images.items():
        (folder / name).write_bytes(image)
    return folder / HTML


def read(files: Sequence[Path]) -> tuple[Headline, list[Section]]:
    """The headline is the benchmark's, or where there is none, what the first of the others found."""
    found, studies = list[Section](), dict[Path, bench.Study]()
    for file in files:
        with _naming(file):
            one = _read(file / ROWS if file.is_dir() else file)
            if isinstance(one, bench.Study):
                if any(one.run == other.run for other in studies.values()):
                    raise ValueError("this run was named before")
                studies[file] = one
                continue
        if one.id in (other.id for other in found):
            raise ValueError(f"{file} is a second recording of one kind ({one.id}): a report takes one of each")
        found.append(one)
    if not studies:
        return Headline(f"{found[0].title} {found[0].finding}"), found
    newest = max(studies, key=lambda file: _started(studies[file]))
    with _naming(newest):
        headline, own = bench.headline(studies[newest]), sections.of_bench(studies[newest])
        past = sections.of_history(sorted(studies.values(), key=_started)) if len(studies) > 1 else None
    return headline, [*own, *([past] if past else []), *found]


def _started(study: bench.Study) -> str:
    return str(study.run.header["started"])


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """In the report's style; a ValueError names the file."""
    try:
        with style():
            yield
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        said = str(error)
        raise ValueError(said if str(file) in said else f"{file}: {said}") from None


def _read(file: Path) -> bench.Study | Section:
    """A benchmark's rows as a study, for there may be several."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"this is no UTF-8 text: expected {KINDS}") from None
    data = _object(text) or _object(text.partition("\n")[0])
    if data.get("kind") == "header":
        return bench.Study(rows.read(file))
    if "row" in data:
        return sections.of_kernels(kernels.rows_of(text))
    if "curves" in data:
        return sections.of_lossiness(data)
    if "engines" in data:
        return sections.of_engines(data)
    if "claims" in data and "target" in data:
        return sections.of_consistency(record.read(file))
    raise ValueError(f"this is no recording: expected {KINDS}")


def _object(text: str) -> dict[str, Any]:
    """The one JSON object that the text is; empty for anything else."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _check(folder: Path) -> None:
    """Nothing of other people is overwritten."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} must be a folder")
    if folder.is_dir() and any(folder.iterdir()):
        index = folder / HTML
        if not index.is_file() or page.MARK not in index.read_text(encoding="utf-8", errors="replace")[:200]:
            raise ValueError(f"{folder} holds other things than an earlier report: name a new or empty folder by --out")
