"""`specbench engines`: engines that others wrote, each in a process of its own, on sentinels and on real models."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specbench import models
from specbench.exit_codes import INTERRUPTED
from specbench.record import BUG

SENTINEL = "sentinel"


def add_options(one: argparse.ArgumentParser, count: Any) -> None:
    """count: reads a number of at least 1."""
    one.add_argument(
        "names", nargs="*", metavar="NAME", help="of the engine, or ./file.py:ATTRIBUTE of your own; none: all"
    )
    one.add_argument(
        "--model",
        action="append",
        metavar="MODEL",
        help="sentinel (default), or a real one: smollm2, or a folder of safetensors; may be repeated",
    )
    one.add_argument(
        "--variant", default="llama", help="of the sentinel: llama (default), gqa, tied, window, qwen2, gemma"
    )
    one.add_argument(
        "--env", type=Path, metavar="DIR", help="install each engine into an environment of its own in DIR"
    )
    one.add_argument("--python", metavar="PYTHON", help="an interpreter that has the engine (default: this one)")
    one.add_argument(
        "--mode", action="append", metavar="MODE", help="one way to decode; may be repeated (default: all)"
    )
    one.add_argument("--weights", action="append", metavar="FORMAT", help="fp32, bf16, q8_0 ...; may be repeated")
    one.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="on a sentinel with a law (default 0: greedy)"
    )
    one.add_argument("--top-k", type=count, metavar="K", help="at a temperature")
    one.add_argument("--top-p", type=float, metavar="P", help="at a temperature")
    one.add_argument("--min-p", type=float, metavar="P", help="at a temperature")
    one.add_argument(
        "--keep-wrong",
        action="store_true",
        help="keep a wrong draft once in 50 rounds, in every format: all must be BUG (exit code 0 then)",
    )
    one.add_argument("--max-new-tokens", type=count, default=200, metavar="N", help="of each request (default 200)")
    one.add_argument("--timeout", type=count, default=600, metavar="S", help="seconds for one answer (default 600)")
    one.add_argument("--seed", type=int, default=0, metavar="SEED", help="of the sentinel and the prompts (default 0)")
    one.add_argument("--json", type=Path, metavar="FILE", help="the verdicts as data")
    one.add_argument("--markdown", type=Path, metavar="FILE", help="the verdicts as a page: docs/engines.md")
    one.add_argument(
        "--add", type=Path, action="append", default=[], metavar="FILE", help="--json of an earlier run, onto the page"
    )


def run(args: argparse.Namespace) -> int:
    from specbench.engine_run import Result, page, results_of

    found: list[Result] = []
    before, is_whole = [], True
    try:
        for file in args.add:
            before.append(results_of(json.loads(file.read_text("utf-8")), str(file)))
        for file in (args.json, args.markdown):
            if file is not None:
                file.open("a").close()
        for one in _results(args, lambda line: print(line, flush=True)):
            found.append(one)
    except KeyboardInterrupt:
        is_whole = False
    except (ValueError, OSError) as error:
        print(f"specbench engines: {error}", file=sys.stderr)
        return 2
    command = shlex.join(["specbench", *_words(args)])
    if args.json:
        data = {"schema": 1, "command": command, "engines": [one.as_fields() for one in found]}
        args.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    if args.markdown:
        args.markdown.write_text(page([*before, (command, found)]), encoding="utf-8")
    if not is_whole:
        return INTERRUPTED
    wrong = [one for one in found if (one.audit.verdict == BUG) != args.keep_wrong]
    return int(bool(wrong))


def _results(args: argparse.Namespace, tell: Any) -> Iterator[Any]:
    from specbench.careless import Careless
    from specbench.engine_models import RealModel, SentinelModel
    from specbench.engine_run import run_engines
    from specbench.engines import ENGINES
    from specbench.engines.apart import Apart, environment
    from specbench.types import Sampling

    names: Sequence[str] = args.names or [*ENGINES]
    if args.keep_wrong and (args.model or args.temperature or args.mode):
        raise ValueError("--keep-wrong is plain greedy decoding of a sentinel: leave --model, --mode, --temperature")
    for name in names:
        if name not in ENGINES and ".py:" not in name:
            raise ValueError(models.unknown_name("engine", name, ENGINES))
    if args.env and args.python:
        raise ValueError("--env makes the interpreter that --python would name: give one of them")
    sampling = Sampling(args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p)
    chosen: list[Any] = []
    for name in args.model or [SENTINEL]:
        if name == SENTINEL:
            has_law = bool(sampling.temperature)
            chosen.append(SentinelModel(variant=args.variant, has_law=has_law, seed=args.seed))
        else:
            chosen.append(RealModel(name))
    for name in names:
        python = args.python or sys.executable
        if args.env:
            try:
                python = environment(name, args.env / Path(name).stem, tell=tell)
            except ValueError as error:
                tell(f"{name} cannot be installed: {error}")
                continue
        engine = Apart(name, python=python, timeout=args.timeout)
        for model in chosen:
            weights = args.weights
            judged: Any = engine
            if args.keep_wrong:
                judged = Careless(engine, model.program, model.drafter)
                weights = weights or [one for one in engine.weights if one in model.formats]
            yield from run_engines(
                {name: judged},
                model,
                weights=weights,
                modes=args.mode,
                sampling=sampling,
                max_new_tokens=args.max_new_tokens,
                tell=tell,
            )


def _words(args: argparse.Namespace) -> list[str]:
    """The command without what it writes."""
    words = ["engines", *args.names]
    for option, values in (("--model", args.model), ("--mode", args.mode), ("--weights", args.weights)):
        words += [word for one in values or () for word in (option, one)]
    words += ["--keep-wrong"] * args.keep_wrong
    for option in ("variant", "env", "python", "temperature", "top_k", "top_p", "min_p", "max_new_tokens", "seed"):
        value = getattr(args, option)
        if value not in (None, _DEFAULTS.get(option)):
            words += [f"--{option.replace('_', '-')}", str(value)]
    return words


_DEFAULTS = {"variant": "llama", "temperature": 0.0, "max_new_tokens": 200, "seed": 0}
