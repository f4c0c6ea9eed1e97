"""Counting rounds by the cell of states they fall into, on the subjects whose cache kinds are varied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from specbench.banks import TinyBank
from specbench.cases import Case
from specbench.coverage import coverage_table, empty_cells, key, shape_of
from specbench.record import ClaimRecord
from specbench.subjects import Subject
from specbench.types import DTYPES


def note_round(record: ClaimRecord, subject: Subject, case: Case, parents: Sequence[int], num_accepted: int) -> None:
    """One round of a case. A bank of one cache kind says nothing about kinds, and is left out."""
    shape = shape_of(parents, num_accepted)
    if shape is not None and _varies_kinds(subject):
        record.note_cell(key(shape, case.cache, _label(subject)))


def coverage_lines(records: Sequence[ClaimRecord], subjects: Sequence[Subject], *, whole_table: bool) -> list[str]:
    """What of the table was reached; nothing where a target shows no rounds or takes no cache kind."""
    varied = [one for one in subjects if _varies_kinds(one)]
    counts: Counter[str] = Counter()
    for record in records:
        counts.update(record.rounds_by_cell)
    if not counts or not varied:
        return []
    caches = list(dict.fromkeys(kind for one in varied for kind in one.cache_kinds))
    dtypes = [_label(one) for one in varied]
    empty = empty_cells(counts, caches, dtypes)
    total = len(empty_cells({}, caches, dtypes))
    line = f"coverage (accept length x width x depth x cache kind x dtype): {total - len(empty)} of {total} cells"
    if empty:
        line += f"; empty: {', '.join(empty[:3])}{f' and {len(empty) - 3} more' if len(empty) > 3 else ''}"
    return [line, *(coverage_table(counts, caches, dtypes) if whole_table else [])]


def _varies_kinds(subject: Subject) -> bool:
    return len(subject.cache_kinds) > 1 and isinstance(subject.bank, TinyBank)


def _label(subject: Subject) -> str:
    return next(label for label, dtype in DTYPES.items() if dtype == subject.bank.dtype)
