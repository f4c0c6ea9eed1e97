"""One running engine and the lines that go to and come from it: one request, one answer, or one sentence.

An engine that breaks the schema, dies or hangs is ended at once: what it would say next could answer another question.
What requests and answers hold is the business of `wire.py`. POSIX only (process groups, pipes in a selector).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from specbench import shim
from specbench.sanitize import plain

VERSION = shim.VERSION
MAX_LINE = 1 << 28  # bytes of one answer
STDERR_BYTES = 4096  # kept; a sentence shows the last line of them
GRACE = 2.0  # seconds for an engine to end by itself before it is killed


class WireError(RuntimeError):
    """The engine broke the schema or ended. One sentence."""


class EngineHung(WireError):
    """No answer in time; the engine has been killed."""


class RemoteError(WireError):
    """The engine answered with an error object. Its subclasses, made on the spot, are named like the engine's type."""


class Engine:
    """A process that answers requests one after another. timeout: seconds for one answer, 0 for no limit.

    WireError when it cannot be started.
    """

    def __init__(self, argv: Sequence[str], *, timeout: float, max_line: int = MAX_LINE) -> None:
        self._timeout = timeout
        self._max_line = max_line
        self._last_id = 0
        self._received = bytearray()
        self._num_scanned = 0  # bytes of `_received` that are known to hold no line end
        self._stderr_tail = bytearray()
        try:
            self._process = _started(argv)
        except OSError as error:
            raise WireError(f"cannot start {argv[0]!r}: {error.strerror or error}") from error
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._pipes = (self._process.stdin, self._process.stdout, self._process.stderr)
        self._stdin, self._stdout, self._stderr = (pipe.fileno() for pipe in self._pipes)
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def request(self, method: str, params: Mapping[str, Any]) -> Any:
        """The `result` of the answer. RemoteError for an error object, WireError for whatever else happens."""
        try:
            self._check_nothing_unasked()
            self._last_id += 1
            answer = self._answer(self._exchange(_line(self._last_id, method, params), method))
        except BaseException:
            self.kill()
            raise
        if "error" in answer:
            _raise_remote(answer["error"])
        return answer["result"]

    def close(self) -> None:
        """Asks the engine to end, and kills it when it does not."""
        if self.is_running:
            with contextlib.suppress(OSError):
                os.write(self._stdin, _line(self._last_id + 1, "shutdown", {}))
            with contextlib.suppress(OSError):
                self._pipes[0].close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
        self.kill()

    def kill(self) -> None:
        """Ends the engine and its children at once."""
        if self._pipes[1].closed:
            return  # done before: the group's number may be another's by now
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.close()

    def _exchange(self, line: bytes, method: str) -> bytes:
        """Writes one line and reads one, both at once: an engine may print while it is still being written to."""
        deadline = time.monotonic() + self._timeout if self._timeout > 0 else float("inf")
        unsent = memoryview(line)
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            selector.register(self._stderr, selectors.EVENT_READ)
            selector.register(self._stdin, selectors.EVENT_WRITE)
            while (end := self._line_end(method)) is None:
                if time.monotonic() > deadline:
                    raise EngineHung(
                        f"{method} was not answered within {self._timeout:g} s, engine killed: "
                        "give --specbench-timeout SECONDS if it needs longer, otherwise it hangs"
                    )
                ready = [key.fd for key, _ in selector.select(0.2)]
                if not ready and not self.is_running:
                    self._tell_end(method)  # a child of its holds the pipe open
                if self._stderr in ready and not self._read_stderr():
                    selector.unregister(self._stderr)
                if self._stdout in ready and not self._read_stdout():
                    self._tell_end(method)
                if self._stdin in ready:
                    unsent = unsent[self._write(unsent) :]
                    if not unsent:
                        selector.unregister(self._stdin)
        answer = bytes(self._received[:end])
        del self._received[: end + 1]
        self._num_scanned = 0
        if unsent:
            raise WireError(f"{method} was answered before the request was read to its end: {_quoted(answer)}")
        return answer

    def _write(self, unsent: memoryview) -> int:
        """Bytes that are done with. An engine that reads no more has ended or is about to: its stdout says how."""
        try:
            return os.write(self._stdin, unsent[:65536])
        except BrokenPipeError:
            return len(unsent)
        except BlockingIOError:
            return 0

    def _read_stdout(self) -> bool:
        """False at the end of the stream."""
        try:
            part = os.read(self._stdout, 1 << 20)
        except BlockingIOError:
            return True
        self._received += part
        return bool(part)

    def _read_stderr(self) -> bool:
        try:
            part = os.read(self._stderr, 1 << 16)
        except BlockingIOError:
            return True
        self._stderr_tail += part
        del self._stderr_tail[:-STDERR_BYTES]
        return bool(part)

    def _line_end(self, method: str) -> int | None:
        """Where the first line received ends; None when it is not all there."""
        end = self._received.find(b"\n", self._num_scanned)
        self._num_scanned = len(self._received)
        if max(end, self._num_scanned if end < 0 else 0) > self._max_line:
            raise WireError(
                f"{method} was answered by a line of over {self._max_line} bytes: {_quoted(self._received)}"
            )
        return None if end < 0 else end

    def _check_nothing_unasked(self) -> None:
        """No line may lie in the pipe when a question is put."""
        self._read_stdout()
        if b"\n" in self._received:
            line = bytes(self._received).split(b"\n")[0]
            if _envelope(line).get("id") == self._last_id > 0:
                raise WireError(f"request {self._last_id} was answered twice: {_quoted(line)}")
            raise WireError(f"a line that nobody asked for: {_quoted(line)}")

    def _answer(self, line: bytes) -> dict[str, Any]:
        """The line as an answer to the last request."""
        answer = _envelope(line)
        given = answer.get("id")
        if type(given) is int and 0 < given < self._last_id:
            raise WireError(f"request {given} was answered twice: {_quoted(line)}")
        if type(given) is not int or given != self._last_id:
            raise WireError(f"id = {shim.short(given)} must be {self._last_id}, the request's: {_quoted(line)}")
        if ("result" in answer) == ("error" in answer):
            raise WireError(f"an answer must have either result or error: {_quoted(line)}")
        return answer

    def _tell_end(self, method: str) -> NoReturn:
        """How it ended, with the end of what it wrote to stderr."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE)
        unread = True
        while unread:  # bounded: the pipe of a process that has ended, or what one that has not can write meanwhile
            size = len(self._stderr_tail)
            unread = self._read_stderr() and len(self._stderr_tail) > size
        where = f"in the middle of line {_quoted(self._received)}" if self._received else f"during {method}"
        lines = self._stderr_tail.decode("utf-8", "replace").strip().splitlines()
        stderr = f"stderr ends: {plain(lines[-1], 70, one_line=True)}" if lines else "nothing on stderr"
        raise WireError(f"engine {_ending(self._process.poll())} {where}; {stderr}")


def _started(argv: Sequence[str]) -> subprocess.Popen[bytes]:
    with warnings.catch_warnings():
        # Python warns of any code between fork and exec where there are threads; ours is one call into the kernel.
        warnings.simplefilter("ignore", DeprecationWarning)
        return subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # a group of its own, so that its children end with it
            preexec_fn=None if _LIBC is None else _end_with_parent,
        )


# An engine that hangs reads no end of stdin: where the process that asks it is killed, the kernel has to end it. Linux
# counts the end of the thread that started it, which is the main one here.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _line(number: int, method: str, params: Mapping[str, Any]) -> bytes:
    message = {"specbench": VERSION, "id": number, "method": method, "params": params}
    return json.dumps(message, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _envelope(line: bytes) -> dict[str, Any]:
    """The line as a JSON object of our version."""
    try:
        value = json.loads(line.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise WireError(f"a line of stdout is not UTF-8 ({error.reason}): {_quoted(line)}") from error
    except _Constant as error:
        raise WireError(f'{error} is no JSON number (write "nan", "inf", "-inf"): {_quoted(line)}') from error
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise WireError(f"a line of stdout is no JSON object (print to stderr instead): {_quoted(line)}")
    if "specbench" not in value:
        raise WireError(f'a line of stdout has no "specbench": {VERSION} (print to stderr instead): {_quoted(line)}')
    if value["specbench"] != VERSION or isinstance(value["specbench"], bool):
        raise WireError(f"the engine speaks version {shim.short(value['specbench'])}, this specbench {VERSION}")
    return value


class _Constant(ValueError):
    """NaN, Infinity or -Infinity, which Python's reader would take."""


def _no_constant(word: str) -> NoReturn:
    raise _Constant(word)


def _raise_remote(error: Any) -> NoReturn:
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        raise WireError(f"error must be an object with a type and a message, got {shim.short(error)}")
    kind = error.get("type")
    name = kind if isinstance(kind, str) and kind.isidentifier() and len(kind) <= 60 else "RemoteError"
    raise type(name, (RemoteError,), {})(error["message"])


def _ending(code: int | None) -> str:
    if code is None:
        return "closed its stdout"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _quoted(line: bytes | bytearray) -> str:
    """The start of a line, bounded and printable."""
    return repr(plain(bytes(line[:200]).decode("utf-8", "backslashreplace"), 50, one_line=True))
