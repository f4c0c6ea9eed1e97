"""One engine in this process, for a parent in another: a job on stdin, answers on stdout, a JSON value a line.

Run as a script by any interpreter, which needs the engine and nothing of ours: `python worker.py MODULE`, or
`./file.py:ATTRIBUTE`. With "version" behind it, only that is told.
"""

from __future__ import annotations

import json
import os
import sys
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

    from specbench.engines.engine import REFUSALS, Files, Missing, Request, Settings

    own = import_module("specbench.engines.own")
    place = words[0]
    engine = own.engine_in(place) if ".py:" in place else import_module(f"specbench.engines.{place}").ENGINE
    try:
        tell(version=engine.version())
    except Missing as missing:
        tell(missing=str(missing))
        return 0
    if "version" in words[1:]:
        return 0
    job = json.load(sys.stdin)
    symbols = job["files"].pop("symbols")
    files = Files(**{name: Path(value) for name, value in job["files"].items()}, symbols=symbols)
    requests = [Request(tuple(one["prompt"]), one["text"], one["max_new_tokens"]) for one in job["requests"]]
    try:
        for answer in engine.generate(files, requests, Settings(**job["settings"])):
            tell(answer=asdict(answer))
    except REFUSALS as error:
        tell(refused=f"{type(error).__name__}: {error}")
        return 0
    except Exception as error:  # an engine may raise anything
        tell(raised=f"{type(error).__name__}: {error}")
        return 0
    tell(end=True)
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # some engines' threads do not end by themselves
