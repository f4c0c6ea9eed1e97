"""An engine of one's own, from a file: an object like `Engine`, or a function that loads folders and gives a callable.

The file is imported before its engine runs, to see its modes; what is slow to import belongs inside its functions.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specbench.engines.engine import Answer, Engine, Files, Mode, Request, Settings

Generate = Callable[[list[int], int], Sequence[int]]
Load = Callable[[Path, "Path | None"], Generate]
_WANTED = "must be an engine (requirements, weights, modes, temperature_last, version, generate), or a function"


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
            raise ValueError("a plain callable is asked for greedy tokens only: write an engine to be sampled from")
        generate = self._load(files.target, None if settings.mode == "plain" else files.drafter)
        for one in requests:
            said = generate(list(one.prompt), one.max_new_tokens)
            tokens = tuple(said)
            if any(isinstance(token, bool) or not isinstance(token, int) for token in tokens):
                raise TypeError(f"{self._name} answered {tokens[:3]!r}..., must be a sequence of ints")
            yield Answer(tokens)


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
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{place}: {file} raised {type(error).__name__} on import: {error}") from error
    if not hasattr(module, attribute):
        raise ValueError(f"{place}: {file} has no {attribute!r}")
    found: Any = getattr(module, attribute)
    missing = [name for name in ("weights", "modes", "version", "generate") if not hasattr(found, name)]
    if not missing:
        engine: Engine = found
        return engine
    if len(missing) < 4 or not callable(found):
        raise ValueError(f"{place} {_WANTED} load(target, drafter) -> generate(prompt, num)")
    return CallableEngine(found, f"{path.name}:{attribute}")
