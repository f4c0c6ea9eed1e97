"""`specbench engines`: engines that others wrote, each in a process of its own, on sentinels and on real models."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench import models, sampling_options
from specbench.exit_codes import INTERRUPTED
from specbench.record import BUG, NOT_TESTED
from specbench.sanitize import plain as printable

SENTINEL = "sentinel"
UNUSABLE = 2  # a wrong word, or nothing was judged


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
    sampling_options.add(one, count, temperature="on a sentinel with a law (default 0: greedy)")
    one.add_argument(
        "--keep-wrong",
        action="store_true",
        help="keep a wrong draft once in 50 rounds, in every format: its tokens must be a BUG (exit code 0 then)",
    )
    one.add_argument("--max-new-tokens", type=count, default=200, metavar="N", help="of each request (default 200)")
    one.add_argument(
        "--timeout",
        type=count,
        default=600,
        metavar="S",
        help="seconds for one answer (default 600); an engine that answers a batch at once needs the batch's",
    )
    one.add_argument(
        "--load-timeout",
        type=count,
        default=600,
        metavar="S",
        help="seconds more for the first answer of a mode, in which the model is loaded (default 600)",
    )
    one.add_argument("--seed", type=int, default=0, metavar="SEED", help="of the sentinel and the prompts (default 0)")
    one.add_argument("--json", type=Path, metavar="FILE", help="the verdicts as data")
    one.add_argument("--markdown", type=Path, metavar="FILE", help="the verdicts as a page: docs/engines.md")
    one.add_argument(
        "--add", type=Path, action="append", default=[], metavar="FILE", help="--json of an earlier run, onto the page"
    )


def run(args: argparse.Namespace) -> int:
    from specbench.audit import counted
    from specbench.engines.apart import Died

    try:
        before = _checked(args)
        engines, chosen = _planned(args)
    except (models.ModelError, ValueError, OSError, Died) as error:
        return _complain(error)
    found: list[tuple[str, Any]] = []
    is_whole = is_written = True
    with _sigterm_interrupts():
        try:
            for one in _results(args, engines, chosen):
                found.append(one)
        except KeyboardInterrupt:
            is_whole = False
        finally:  # whatever ends the run: what was found is not lost
            is_written = _write(args, before, [result for _, result in found])
    if not is_whole:
        num = f"{counted(len(found), 'mode')} {'was' if len(found) == 1 else 'were'}"
        _complain(f"interrupted: {num} asked before")
        return INTERRUPTED
    code = _code_of(args, [one.name for one in engines], found)
    return code if is_written else UNUSABLE


@dataclass
class _Planned:
    """An engine, with what speaks against asking it; None until its environment is made."""

    name: str
    engine: Any
    left_out: str = ""


def _checked(args: argparse.Namespace) -> list[Any]:
    """The earlier runs of --add. ValueError and OSError for options that cannot be meant."""
    from specbench.engines import ENGINES

    if args.keep_wrong and (args.model or args.temperature or args.mode):
        raise ValueError("--keep-wrong is plain greedy decoding of a sentinel: leave --model, --mode, --temperature")
    for name in args.names:
        if name.removesuffix(":").endswith(".py"):
            file = name.removesuffix(":")
            raise ValueError(f"{name} must say what is yours in it: {file}:ATTRIBUTE, such as {file}:load")
        if name not in ENGINES and ".py:" not in name:
            raise ValueError(models.unknown_name("engine", name, ENGINES))
    if args.env and args.python:
        raise ValueError("--env makes the interpreter that --python would name: give one of them")
    filters = {"--top-k": args.top_k, "--top-p": args.top_p, "--min-p": args.min_p}
    if not args.temperature and (given := [word for word, value in filters.items() if value is not None]):
        raise ValueError(f"without --temperature nothing is drawn, for {', '.join(given)} to filter: give it too")
    before = [_earlier(file) for file in args.add]
    written = [file for file in (args.json, args.markdown) if file is not None]
    for file in written:
        try:
            file.open("a").close()
        except OSError as error:
            raise ValueError(f"cannot write {file}: {error.strerror}") from None
    if len({file.resolve() for file in written}) < len(written):
        raise ValueError(f"{args.json} is named by --json and by --markdown: one would overwrite the other")
    return before


def _earlier(file: Path) -> Any:
    from specbench.engine_run import results_of

    try:
        return results_of(json.loads(file.read_text("utf-8")), f"--add {file}")
    except OSError as error:
        raise ValueError(f"--add {file} cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"--add {file} is not JSON: {error}") from None


def _planned(args: argparse.Namespace) -> tuple[list[_Planned], list[Any]]:
    """Engines and models, all of which can be asked as far as is known before anything runs. ValueError says why not;
    where no engine was named, those that cannot are left out."""
    from specbench.engine_models import RealModel, SentinelModel
    from specbench.engine_run import check
    from specbench.engines import ENGINES
    from specbench.engines.apart import Apart

    sampling, names = sampling_options.sampling_of(args), dict.fromkeys(args.names or ENGINES)
    chosen: list[Any] = [
        SentinelModel(variant=args.variant, has_law=bool(sampling.temperature), seed=args.seed)
        if name == SENTINEL
        else RealModel(name)
        for name in dict.fromkeys(args.model or [SENTINEL])
    ]
    engines = []
    for name in names:
        engine = Apart(name, **_ways(args, args.python or sys.executable))
        one = _Planned(name, None if args.env else engine)
        try:
            for model in chosen:
                if args.keep_wrong and "plain" not in engine.modes:
                    raise ValueError("modes must have 'plain', which --keep-wrong asks")
                check(engine, model, weights=args.weights, modes=args.mode, sampling=sampling)
        except ValueError as error:
            one.left_out = str(error)
            if args.names:
                raise ValueError(f"{name}: {error}") from None
        engines.append(one)
    if all(one.left_out for one in engines):
        raise ValueError(f"{engines[-1].name}: {engines[-1].left_out}")
    return engines, chosen


def _ways(args: argparse.Namespace, python: str) -> dict[str, Any]:
    return {"python": python, "timeout": args.timeout, "load_timeout": args.load_timeout}


def _results(args: argparse.Namespace, engines: Sequence[_Planned], chosen: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Each with its engine's name. What ends one engine is told, and the next is asked."""
    from specbench.careless import Careless
    from specbench.engine_run import run_engines
    from specbench.engines.apart import Apart, Died, environment

    def tell(line: str) -> None:
        print(line, flush=True)

    for one in engines:
        if one.left_out:
            tell(f"{one.name} is left out: {one.left_out}")
            continue
        engine = one.engine
        try:
            if engine is None:
                python = environment(one.name, args.env / Path(one.name.rpartition(":")[0] or one.name).stem, tell=tell)
                engine = Apart(one.name, **_ways(args, python))
        except BrokenPipeError:
            raise
        except (ValueError, OSError, Died) as error:
            _complain(f"{one.name} cannot be installed: {error}")
            continue
        for model in chosen:
            weights, judged = args.weights, engine
            if args.keep_wrong:
                judged = Careless(engine, model.program, model.drafter)
                weights = weights or [kind for kind in engine.weights if kind in model.formats]
            options = {"weights": weights, "modes": args.mode, "sampling": sampling_options.sampling_of(args)}
            try:
                for result in run_engines(
                    {one.name: judged}, model, **options, max_new_tokens=args.max_new_tokens, tell=tell
                ):
                    yield one.name, result
            except BrokenPipeError:
                raise
            except (ValueError, OSError, Died) as error:
                _complain(f"{one.name} on {model.name}: {error}")


def _code_of(args: argparse.Namespace, names: Sequence[str], found: Sequence[tuple[str, Any]]) -> int:
    """1 for what is wrong, 2 where that could not be found out, with a sentence."""
    from specbench.engine_run import FAILURE, TOKENS

    judged = {name for name, one in found if one.audit.verdict != NOT_TESTED}
    without = [name for name in names if name not in judged] if args.names or not judged else []
    for name in without:
        _complain(f"nothing of {name} was judged")
    failed = [one for _, one in found if one.because == FAILURE]
    for one in failed:
        _complain(f"{one.engine}, {one.mode}: {one.audit.sentence}")
    if args.keep_wrong:
        wrong = [one for _, one in found if one.audit.verdict not in (BUG, NOT_TESTED)]
        unseen = [one for _, one in found if one.audit.verdict == NOT_TESTED or one.because != TOKENS]
        for one in unseen:
            _complain(f"{one.engine}, {one.weights}: it was not the wrong draft that was seen: {one.audit.sentence}")
        return 1 if wrong else UNUSABLE if without or unseen else 0
    is_wrong = any(one.audit.verdict == BUG for _, one in found)
    return 1 if is_wrong else UNUSABLE if without or failed else 0


def _write(args: argparse.Namespace, before: Sequence[Any], found: Sequence[Any]) -> bool:
    """Whether all could be written. What cannot is told, and the other file is written."""
    from specbench.engine_run import page

    command = shlex.join(["specbench", *_words(args)])
    data = {"schema": 1, "command": command, "engines": [one.as_fields() for one in found]}
    texts: list[tuple[Path | None, Callable[[], str]]] = [
        (args.json, lambda: json.dumps(data, indent=2) + "\n"),
        (args.markdown, lambda: page([*before, (command, found)])),
    ]
    is_written = True
    for file, text in texts:
        if file is not None:
            try:
                file.write_text(text(), encoding="utf-8", errors="backslashreplace")
            except OSError as error:
                is_written = False
                _complain(f"cannot write {file}: {error.strerror}")
    return is_written


def _complain(what: object) -> int:
    said = f"{what.filename}: {what.strerror}" if isinstance(what, OSError) and what.filename else str(what)
    print(f"specbench engines: {printable(said, 2_000, one_line=True)}", file=sys.stderr)
    return UNUSABLE


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """As Ctrl-C does, so that the engine's process is ended and the results are written."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread, which alone hears signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _words(args: argparse.Namespace) -> list[str]:
    """The command without what it writes."""
    words = ["engines", *args.names]
    for option, values in (("--model", args.model), ("--mode", args.mode), ("--weights", args.weights)):
        words += [word for one in dict.fromkeys(values or ()) for word in (option, one)]
    words += ["--keep-wrong"] * args.keep_wrong
    for option in ("variant", "env", "python", "temperature", "top_k", "top_p", "min_p", "max_new_tokens", "seed"):
        value = getattr(args, option)
        if value not in (None, _DEFAULTS.get(option)):
            words += [f"--{option.replace('_', '-')}", str(value)]
    return words


_DEFAULTS = {"variant": "llama", "temperature": 0.0, "max_new_tokens": 200, "seed": 0}
