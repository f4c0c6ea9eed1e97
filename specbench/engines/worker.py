"""One engine in this process, for a parent in another: a job on stdin, answers on stdout, a JSON value a line.

Run as a script by any interpreter, which needs the engine and nothing of ours: `python worker.py MODULE`, or
`./file.py:ATTRIBUTE`. With "about" or "version" behind it, only that is told.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = Path(__file__).resolve().parent


def main(words: list[str]) -> int:
    # Beside this file lie others that are named like engines, and `specbench` itself imports what may not be here.
    sys.path[:] = [one for one in sys.path if Path(one or ".").resolve() != _HERE]
    for name, folder in (("specbench", _HERE.parent), ("specbench.engines", _HERE)):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(folder)]
    # An engine may print whatever it likes, also from C.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    own = import_module("specbench.engines.own")
    place = words[0]
    try:
        engine = own.engine_in(place) if ".py:" in place else import_module(f"specbench.engines.{place}").ENGINE
    except ValueError as error:
        tell(wrong=str(error))
        return 0
    if "about" in words[1:]:
        tell(about=own.about(engine))
    elif _has_version(engine, tell) and "version" not in words[1:]:
        _answer(engine, json.load(sys.stdin), tell)
    return 0


def _has_version(engine: Any, tell: Callable[..., None]) -> bool:
    from specbench.engines.engine import Missing

    try:
        version = engine.version()
    except Missing as missing:
        tell(missing=str(missing))
    except BaseException as error:
        tell(wrong=f"version() {_raised(error)}")
    else:
        if isinstance(version, str) and version:
            tell(version=version)
            return True
        tell(wrong=f"version() gave {version!r}, must be its name and version, a str")
    return False


def _answer(engine: Any, job: dict[str, Any], tell: Callable[..., None]) -> None:
    from specbench.engines.answers import Malformed, each
    from specbench.engines.engine import REFUSALS, Files, Refused, Request, Settings

    symbols = job["files"].pop("symbols")
    files = Files(**{name: Path(value) for name, value in job["files"].items()}, symbols=symbols)
    requests = [Request(tuple(one["prompt"]), one["text"], one["max_new_tokens"]) for one in job["requests"]]
    try:
        for answer in each(engine.generate(files, requests, Settings(**job["settings"]))):
            tell(answer=asdict(answer))
    except Malformed as wrong:
        tell(malformed=str(wrong))
    except REFUSALS as error:
        tell(refused=str(error) if isinstance(error, Refused) else _raised(error).removeprefix("raised "))
    except BaseException as error:  # an engine may raise anything, and end its process by sys.exit
        tell(raised=_raised(error))
    else:
        tell(end=True)


def _raised(error: BaseException) -> str:
    return f"raised {type(error).__name__}: {error}" if str(error) else f"raised {type(error).__name__}"


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # some engines' threads do not end by themselves
