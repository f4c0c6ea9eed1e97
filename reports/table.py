"""Tables: the numbers that flow from records into CSV, figures and pages. One table feeds all of them.

A value is a number, a text, or None for what nobody measured; NaN counts as None. CSV keeps every digit, people are
shown few. What comes from a target goes through `sanitize.plain` here; escaping is the business of the page's writer.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbench.sanitize import plain

MISSING = "–"
MAX_TEXT = 300
FORMULAS = ("=", "+", "-", "@")  # a spreadsheet would compute a text that begins so


@dataclass(frozen=True)
class Column:
    """name: in CSV. label: for people, with its unit. digits: behind the point, None for text. suffix: behind a number.
    scale: what a shown number is multiplied by (100 for a share in per cent)."""

    name: str
    label: str
    digits: int | None = None
    suffix: str = ""
    scale: float = 1.0

    @property
    def is_number(self) -> bool:
        return self.digits is not None

    def shown(self, value: Any) -> str:
        if value is None:
            return MISSING
        if self.digits is None:
            return str(value)
        return f"{value * self.scale:,.{self.digits}f}{self.suffix}"


@dataclass(frozen=True)
class Table:
    """rows: mappings from a column's name to its value. marked: rows that stand out, by index. ValueError for a row
    with other names than the columns', and for what is no number where one must be."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Any], ...]
    marked: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        names = sorted(one.name for one in self.columns)
        for idx, row in enumerate(self.rows):
            if sorted(row) != names:
                raise ValueError(f"table {self.name}: row {idx} has {sorted(row)}, must have {names}")
        rows = ({one.name: self._clean(one, row[one.name]) for one in self.columns} for row in self.rows)
        object.__setattr__(self, "rows", tuple(rows))

    def _clean(self, column: Column, value: Any) -> Any:
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            return None
        if not column.is_number:
            words = {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
            return named(words)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"table {self.name}: {column.name} = {plain(repr(value), 60)} must be a number or null")
        return value

    def cells(self, row: Mapping[str, Any]) -> list[str]:
        return [one.shown(row[one.name]) for one in self.columns]

    def as_csv(self) -> str:
        """Every digit; a text that a spreadsheet would compute begins with an apostrophe."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([one.name for one in self.columns])
        writer.writerows([raw(value) for value in row.values()] for row in self.rows)
        return file.getvalue()


def named(words: str) -> str:
    """A text as tables have it."""
    return plain(words, MAX_TEXT, one_line=True)


def raw(value: Any) -> str:
    """As CSV has it."""
    if value is None:
        return ""
    if isinstance(value, str):
        return f"'{value}" if value.startswith(FORMULAS) else value
    return repr(value)


def text(name: str, label: str) -> Column:
    return Column(name, label)


def count(name: str, label: str) -> Column:
    return Column(name, label, 0)


def ratio(name: str, label: str) -> Column:
    return Column(name, label, 2, "×")


def share(name: str, label: str) -> Column:
    return Column(name, label, 1, " %", 100.0)


def milliseconds(name: str, label: str, digits: int = 1) -> Column:
    """Of seconds."""
    return Column(name, f"{label} (ms)", digits, "", 1e3)


def mebibytes(name: str, label: str) -> Column:
    """Of bytes."""
    return Column(name, f"{label} (MiB)", 1, "", 2.0**-20)


def by(rows: Sequence[Mapping[str, Any]], *names: str) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    """Rows by some of their values, in their order."""
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found
