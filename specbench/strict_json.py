"""JSON that strangers wrote: read whole or refused in one sentence. Size before parsing, no floats, no duplicate keys.

What may stand in a file is the business of its reader (`ledger`, `case_files`); here nothing is run, and nothing is
looked up.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

MAX_INT_DIGITS = 18


def read_json(path: Path, *, max_bytes: int) -> Any:
    """What the file holds: dicts, lists, strings, ints, true, false and null. ValueError says what is wrong with it."""
    if not path.is_file():  # a folder, or a device or pipe that never ends
        raise ValueError("there is no such file" if not path.exists() else "this is no regular file")
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
    except OSError as error:
        raise ValueError(f"the file cannot be read: {error.strerror}") from error
    if len(raw) > max_bytes:
        raise ValueError(f"the file has more than {max_bytes} bytes")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the file is not UTF-8 text (byte {error.start})") from error
    try:
        return json.loads(
            text, parse_int=_int, parse_float=_no_float, parse_constant=_no_constant, object_pairs_hook=_dict
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"the file is not JSON: line {error.lineno} column {error.colno}: {error.msg}") from error
    except RecursionError:
        raise ValueError("the file is nested too deeply") from None


def _dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:40]!r} stands twice in one object")
        found[key] = value
    return found


def _int(text: str) -> int:
    if len(text) > MAX_INT_DIGITS:
        raise ValueError(f"a number has {len(text)} digits, at most {MAX_INT_DIGITS} are read")
    return int(text)


def _no_float(text: str) -> NoReturn:
    raise ValueError(f"{text[:20]} must be a whole number")


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} must be a whole number")
