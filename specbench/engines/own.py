"""An engine of one's own, from a file: an object like `Engine`, or a function that loads folders and gives a callable.

The file is imported by the interpreter that runs it, once to see its modes and once for each mode; what is slow to
import belongs inside its functions.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specbench.engines.answers import Malformed
from specbench.engines.engine import Answer, Engine, Files, Mode, Refused, Request, Settings

Generate = Callable[[list[int], int], Sequence[int]]
Load = Callable[[Path, "Path | None"], Generate]
_MUST_BE = {
    "requirements": "a tuple of what pip installs for it, () for nothing",
    "weights": 'a tuple of the formats that it reads, such as ("fp32",)',
    "modes": 'a dict of names to Mode, such as {"plain": Mode(), "drafts": Mode(drafts=True)}',
    "temperature_last": "True or False: whether top_k, top_p and min_p look at the law of temperature 1",
    "version": "a function that gives its name and version",
    "generate": "a function of (files, requests, settings) that yields Answers",
}
_WANTED = f"must be an engine ({', '.join(_MUST_BE)}), or a function"


class CallableEngine:
    """load(target, drafter): folders of safetensors, drafter None for plain decoding. It gives generate(prompt, num):
    the new tokens behind a list of token ids, greedily, `num` of them or up to an end token."""

    requirements: tuple[str, ...] = ()
    weights: tuple[str, ...] = ("fp32", "bf16", "fp16")
    temperature_last = False
    modes: Mapping[str, Mode] = {"plain": Mode(), "drafter": Mode(drafts=True)}

    def __init__(self, load: Load, name: str) -> None:
        self._load, self._name = load, name

    def version(self) -> str:
        return self._name

    def generate(self, files: Files, requests: Sequence[Request], settings: Settings) -> Iterator[Answer]:
        if settings.temperature:
            raise Refused("a plain callable is asked for greedy tokens only: write an engine to be sampled from")
        generate: Any = self._load(files.target, None if settings.mode == "plain" else files.drafter)
        if not callable(generate):
            raise Malformed(f"{self._name}(target, drafter) must give a function of (prompt, num), not {generate!r}")
        for one in requests:
            said = generate(list(one.prompt), one.max_new_tokens)
            yield Answer(tuple(said) if isinstance(said, Iterator) else said)


def engine_in(place: str) -> Engine:
    """place: `./file.py:ATTRIBUTE`. ValueError says what is wrong with it."""
    file, _, attribute = place.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"{place}: there is no file {file}")
    spec = importlib.util.spec_from_file_location(f"specbench_engine_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.resolve().parent))  # for the files beside it, as a script has it
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # sys.exit too: a script that was not written to be imported
        told = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise ValueError(f"{place}: on import {file} raised {told}") from error
    if not hasattr(module, attribute):
        raise ValueError(f"{place}: {file} has no {attribute!r}")
    found: Any = getattr(module, attribute)
    has = [name for name in _MUST_BE if hasattr(found, name)]
    if not has and callable(found):
        return CallableEngine(found, f"{path.name}:{attribute}")
    if not has:
        raise ValueError(f"{place} {_WANTED} load(target, drafter) that gives generate(prompt, num)")
    if isinstance(found, type):
        raise ValueError(f"{place} is a class, must be an engine itself: ENGINE = {attribute}(), and name ENGINE")
    if wrong := next((name for name in _MUST_BE if not _is_right(name, getattr(found, name, None))), None):
        is_there = f"{wrong} = {getattr(found, wrong)!r}"[:80] if wrong in has else f"it has no {wrong}, which"
        raise ValueError(f"{place}: {is_there} must be {_MUST_BE[wrong]}")
    engine: Engine = found
    return engine


def about(engine: Engine) -> dict[str, Any]:
    """What is known before it runs, as JSON."""
    modes = {name: {"drafts": bool(one.drafts), "as_plain": bool(one.as_plain)} for name, one in engine.modes.items()}
    known = {"requirements": [*engine.requirements], "weights": [*engine.weights], "modes": modes}
    return known | {"temperature_last": engine.temperature_last}


def _is_right(name: str, value: Any) -> bool:
    if name in ("requirements", "weights"):
        is_list = isinstance(value, (tuple, list)) and all(isinstance(one, str) for one in value)
        return is_list and bool(value or name == "requirements")
    if name == "modes":
        if not isinstance(value, Mapping) or not value or not all(isinstance(one, str) for one in value):
            return False
        return all(hasattr(one, "drafts") and hasattr(one, "as_plain") for one in value.values())
    return isinstance(value, bool) if name == "temperature_last" else callable(value)
