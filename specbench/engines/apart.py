"""An engine in a process of its own: a crash, a hang or a clash of packages there ends one mode and nothing else."""

from __future__ import annotations

import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from specbench.engines import ENGINES, engine_named
from specbench.engines.answers import Malformed, checked
from specbench.engines.engine import Answer, Files, Missing, Mode, Refused, Request, Settings
from specbench.engines.own import about
from specbench.sanitize import plain

_WORKER = Path(__file__).with_name("worker.py")
START_TIMEOUT = 300.0  # seconds until the engine has been imported
LOAD_TIMEOUT = 600.0  # seconds more for the first answer, in which the model is loaded
_GRACE = 10.0  # seconds for an end after the last line
_LONGEST_VERSION = 100  # characters
_TAIL = 300  # characters of what it said on stderr


class Died(RuntimeError):
    """The engine raised, or its process ended or was ended, before it had answered; the text says how, behind "it"."""


class Apart:
    """`Engine` over a process for each mode. python: an interpreter that has the engine, and need have nothing of ours.
    timeout: seconds for one answer; load_timeout: so many more for the first of a mode.

    ValueError and `Died` say why an engine of one's own cannot be had.
    """

    def __init__(
        self,
        name: str,
        *,
        python: str = sys.executable,
        timeout: float = 600.0,
        load_timeout: float = LOAD_TIMEOUT,
    ) -> None:
        self._name, self._python, self._timeout, self._load_timeout = name, python, timeout, load_timeout
        told: Mapping[str, Any] = self._told("about") if ".py:" in name else about(engine_named(name))
        self.requirements: tuple[str, ...] = tuple(told["requirements"])
        self.weights: tuple[str, ...] = tuple(told["weights"])
        self.modes: Mapping[str, Mode] = {one: Mode(**fields) for one, fields in told["modes"].items()}
        self.temperature_last: bool = told["temperature_last"]
        self._version = ""

    def version(self) -> str:
        if not self._version:
            self._version = plain(str(self._told("version")), _LONGEST_VERSION, one_line=True)
        return self._version

    def generate(self, files: Files, requests: Sequence[Request], settings: Settings) -> Iterator[Answer]:
        job = {
            "files": {name: str(value) for name, value in asdict(files).items()},
            "requests": [asdict(one) for one in requests],
            "settings": asdict(settings),
        }
        number = 0
        for fields in self._talk([], job):
            if "answer" in fields:
                number += 1
                yield _read(fields["answer"], number)

    def _told(self, what: str) -> Any:
        try:
            for fields in self._talk([what], None):
                if what in fields:
                    return fields[what]
        except Died as error:
            raise Died(f"{self._python}, asked about {self._name}, {error}") from None
        raise Died(f"{self._python}, asked about {self._name}, told something else")

    def _talk(self, words: list[str], job: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
        command = [self._python, str(_WORKER), ENGINES.get(self._name, self._name), *words]
        with tempfile.TemporaryFile() as said:
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, start_new_session=True
                )
            except OSError as error:
                raise Died(f"cannot be run: {error.strerror}") from None
            try:
                lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
                assert process.stdin is not None and process.stdout is not None
                threading.Thread(target=_feed, args=(process.stdin, job), daemon=True).start()
                threading.Thread(target=_drain, args=(process.stdout, lines), daemon=True).start()
                yield from self._lines(process, lines, said)
            finally:
                _end(process)

    def _lines(
        self, process: subprocess.Popen[bytes], lines: queue.SimpleQueue[bytes], said: IO[bytes]
    ) -> Iterator[dict[str, Any]]:
        seconds, is_started = START_TIMEOUT, False
        while True:
            try:
                line = lines.get(timeout=seconds)
            except queue.Empty:
                what = "answer" if is_started else "sign of life"
                raise Died(f"gave no {what} within {seconds:.0f} s, so it was ended") from None
            if not line:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE)
                raise Died(_how_it_died(process.returncode, said))
            fields = _fields(line)
            if "missing" in fields:
                raise Missing(fields["missing"])
            if "wrong" in fields:
                raise ValueError(fields["wrong"])
            if "refused" in fields:
                raise Refused(fields["refused"])
            if "malformed" in fields:
                raise Malformed(fields["malformed"])
            if "raised" in fields:
                raise Died(fields["raised"])
            if "end" in fields:
                return
            seconds = self._timeout + (0.0 if is_started else self._load_timeout)
            is_started = True
            yield fields


def environment(name: str, folder: Path, *, tell: Any = print) -> str:
    """The interpreter of a virtual environment in `folder` that holds the engine; made and filled where it is not."""
    python, wanted = folder / "bin" / "python", Apart(name).requirements
    done = folder / "specbench-installed.txt"
    if done.is_file() and done.read_text("utf-8").split("\n") == list(wanted):
        return str(python)
    if folder.exists() and not python.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is there and no virtual environment: name a new folder")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    commands = [
        *([] if python.exists() else [[sys.executable, "-m", "venv", str(folder)]]),
        *([[*pip, *wanted]] if wanted else []),
    ]
    for command in commands:
        tell(f"$ {shlex.join(command)}")
        # A quieter pip would not say what is wrong.
        heard = {name: value for name, value in os.environ.items() if name != "PIP_QUIET"}
        ended = subprocess.run(command, capture_output=True, text=True, env=heard)
        if ended.returncode:
            why = (ended.stderr.strip() or ended.stdout.strip() or "it said nothing").splitlines()[-1]
            raise ValueError(f"{shlex.join(command)} failed with {ended.returncode}: {why}")
    done.write_text("\n".join(wanted), encoding="utf-8")
    return str(python)


def _feed(stream: IO[bytes], job: dict[str, Any] | None) -> None:
    with suppress(OSError), stream:  # it may end before it has read; how it ended is told elsewhere
        stream.write(json.dumps(job).encode())


def _drain(stream: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(b"")


def _end(process: subprocess.Popen[bytes]) -> None:
    """With all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _how_it_died(code: int | None, said: IO[bytes]) -> str:
    said.seek(0)
    words = said.read().decode("utf-8", "replace").strip().splitlines()
    last = f": {words[-1][-_TAIL:]}" if words else ""
    if code is None:
        return f"closed the pipe of its answers{last}"
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
    return f"ended its process: it {how}{last}"


def _fields(line: bytes) -> dict[str, Any]:
    """Of a line of the worker's: where the interpreter is none, anything may come."""
    with suppress(ValueError, RecursionError):
        fields = json.loads(line)
        if isinstance(fields, dict):
            return fields
    said = plain(line.decode("utf-8", "replace"), _TAIL, one_line=True).strip()
    raise Died(f"wrote a line that is no answer: {said}")


def _read(fields: Any, number: int) -> Answer:
    try:
        answer = Answer(**fields)
    except TypeError:
        raise Died(f"wrote an answer {number} that has other fields") from None
    return checked(answer, number)
