"""`--specbench-isolate`: the target runs in a process of its own, and whatever happens to that one, the run goes on.

`IsolatedSession` stands in for `judge.RunSession`. A server (see `worker`) forks workers that judge; a worker that
hangs, exits, crashes or is killed costs the claim in progress, told as a BUG, and is replaced by another one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from specbench import board
from specbench.cases import Case, encode
from specbench.claims import CLAIMS, Facts, Misbehaviour
from specbench.failures import render
from specbench.judge import Failed, Skipped, parse_replay
from specbench.loading import TargetError, check_command
from specbench.profiles import Profile
from specbench.record import BUG, ClaimRecord, RunRecord
from specbench.sanitize import plain
from specbench.worker import EXIT_LOST

MAX_OUTPUT = 65_536  # bytes of what the target printed that are kept, the last ones
MAX_SHOWN = 8_192  # characters of it that are shown with a failure
MAX_ANSWER = 2**26  # bytes
GRACE = 5.0  # seconds in which the server tells how a worker ended
POLL = 0.1  # seconds between two looks at the clock while a worker is busy
# Without any sign of life for so many times the timeout, outside of any call, a worker is stuck in what the target did.
SILENCE = 4
_SERVE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from specbench.worker import main; "


LOST = "the target closed or wrote to files that are not its own, specbench's connection among them"


class Broken(Exception):
    """Judging raised an error of specbench's own; the text is its traceback."""


class IsolatedSession:
    """What `RunSession` is to the plugin, with the target elsewhere. timeout: seconds a call may take, 0 for no limit.
    memory: GiB that its process may allocate, 0 for no limit."""

    def __init__(
        self,
        target: str | None,
        *,
        model: str,
        profile: Profile,
        seed: int,
        device: str,
        timeout: float,
        memory: float,
        server: Server | None = None,
    ) -> None:
        """TargetError when the target cannot be loaded, with the sentence that it would get without isolation.

        server: one that other sessions use as well, one after another, and that whoever made it closes."""
        self._target = target
        self._timeout = timeout
        self._memory = memory
        self._settings = {
            "target": target,
            "model": model,
            "profile": asdict(profile),
            "seed": seed,
            "device": device,
            "memory": memory,
        }
        self._started = time.perf_counter()
        self._clocks: list[dict[str, float]] = []  # of each worker
        self._peak_bytes = 0
        self.current: tuple[str, str] | None = None
        self._server = Server() if server is None else server
        self._is_shared = server is not None
        self._worker: _Worker | None = None
        try:
            started = self._started_worker()
        except _Died as died:
            self._worker = None
            self.close()
            raise TargetError(f"target {target!r}: {died.sentence}") from None
        except BaseException:
            self.close()
            raise
        if "unusable" in started:
            self.close()
            raise TargetError(started["unusable"])
        self.run = RunRecord(**started["run"])
        self.subjects = dict(self.run.models)

    @property
    def current_replay(self) -> str:
        return self._server.board.case

    def judge(self, claim_id: str, subject_name: str, *, only: Case | None = None) -> ClaimRecord:
        """Runs a claim on a subject. Raises Failed or Skipped; the record is kept in any case."""
        self.current = (claim_id, subject_name)
        self._server.board.note_case("")
        started = time.perf_counter()
        record = ClaimRecord(claim_id, subject_name)
        try:
            try:
                answer = self._ask(claim_id, subject_name, only)
                record = ClaimRecord(**answer["record"])
            except _Died as died:
                self._worker = None
                answer = {"failed": self._lost(record, died), "skipped": "", "broke": ""}
        finally:
            record.seconds = record.seconds or time.perf_counter() - started
            self.run.claims.append(record)
            self.current = None
            # Shown by pytest beside a failure, as if the target had printed it here.
            sys.stdout.write(plain(self._server.take_output()[-MAX_SHOWN:], MAX_SHOWN))
        if answer["broke"]:
            raise Broken(plain(answer["broke"], 20_000))
        if answer["failed"]:
            raise Failed(answer["failed"])
        if answer["skipped"]:
            raise Skipped(answer["skipped"])
        return record

    def finish(self) -> RunRecord:
        """Settles what the run as a whole shows, and ends the processes."""
        self.close()
        seconds: Counter[str] = Counter()
        for one in self._clocks:
            seconds.update(one)
        self.run.note_seconds(seconds, total=time.perf_counter() - self._started)
        self.run.ended = "finished"
        self.run.peak_bytes = self._peak_bytes
        return self.run

    def close(self) -> None:
        if not self._is_shared:
            self._server.close()
        elif self._worker is not None:
            self._server.kill(self._worker)
        self._worker = None

    def _ask(self, claim: str, subject: str, only: Case | None) -> dict[str, Any]:
        """What a worker says of a claim. _Died when it does not come to say it."""
        if self._worker is None:
            again = self._started_worker(self.run.claims)
            if "unusable" in again:
                raise _Died(f"the target loaded once and then no more: {again['unusable']}")
        worker = self._worker
        assert worker is not None
        worker.tell({"claim": claim, "subject": subject, "only": encode(only) if only is not None else ""})
        answer = self._answer(f"judging {claim} on {subject}")
        self.run.prompts = answer["prompts"]
        self._clocks[-1] = answer["seconds"]
        self._peak_bytes = max(self._peak_bytes, answer["peak_bytes"])
        if answer["ended"]:
            self._server.kill(worker)
            raise _Died(f"the target raised {answer['ended']}", actual=answer["ended"])
        if answer["broke"] or answer["crowded"]:
            self._server.kill(worker)
            self._worker = None
        return answer

    def _started_worker(self, claims: Sequence[ClaimRecord] = ()) -> dict[str, Any]:
        """What a new worker says once it has loaded the target. claims: judged before, for messages to refer to."""
        self._worker = _Worker(self._server, {**self._settings, "claims": [asdict(one) for one in claims]})
        self._clocks.append({})
        return self._answer("loading it")

    def _answer(self, doing: str) -> dict[str, Any]:
        assert self._worker is not None
        return self._server.wait_for(self._worker, self._timeout, doing)

    def _lost(self, record: ClaimRecord, died: _Died) -> str:
        """The message of a claim whose worker died: a BUG, with the case that was in progress."""
        claim = CLAIMS[record.claim]
        facts = Facts(headline=died.sentence, expected="an answer", actual=died.actual, source="")
        record.verdict, record.replay = BUG, self._server.board.case
        if not record.replay:  # before the first case
            record.message = f"Misbehaviour: {died.sentence}      [claim {claim.id}, level {claim.level}]"
            return record.message
        case = parse_replay(record.replay)[2]
        command = shlex.join([*check_command(self._target), "--replay", record.replay, "--specbench-isolate"])
        record.shrunk_drafts = case.num_drafts
        record.message = render(Misbehaviour(facts), claim, case, subject=record.subject, run=self.run, command=command)
        return record.message


class _Died(Exception):
    """A worker is gone. sentence: what happened, in which call, and what to do. actual: the same in a word or two."""

    def __init__(self, sentence: str, *, actual: str = "none") -> None:
        super().__init__(sentence)
        self.sentence = plain(sentence, 600, one_line=True)
        self.actual = plain(actual, 300, one_line=True)


class _Worker:
    """One forked process and the connection to it. settings: see `worker`."""

    def __init__(self, server: Server, settings: dict[str, Any]) -> None:
        self.pid, fd = server.fork(settings)
        self.connection = Connection(fd)

    def tell(self, request: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # how it ended, the server says
            self.connection.send_bytes(json.dumps(request).encode())


class Server:
    """The fork server, its control socket, the board, and the pipe that all its output goes to."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="specbench-board-")  # noqa: SIM115, open as long as the server is
        self._file.truncate(board.SIZE)
        self.board = board.Board(self._file.fileno())
        self._control, theirs = socket.socketpair()
        self._output, output = os.pipe()
        os.set_blocking(self._output, False)
        self._printed = b""
        self._heard = b""
        self._fds: list[int] = []
        serve = f"{_SERVE}main({theirs.fileno()}, {self._file.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", serve, json.dumps(sys.path)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(theirs.fileno(), self._file.fileno()),
            start_new_session=True,  # Ctrl-C is ours to hear: we end the worker and write the report
        )
        theirs.close()
        os.close(output)

    def fork(self, settings: dict[str, Any]) -> tuple[int, int]:
        """Process id of a new worker and our end of its connection."""
        self.board.note_case("")
        self.board.note_call("")
        self._control.sendall(json.dumps({"fork": settings}).encode() + b"\n")
        while True:
            answer = self._hear()
            if answer is None:
                raise _Died(f"the server that forks its process could not be started{self._last_words()}")
            if "pid" in answer:
                return int(answer["pid"]), self._fds.pop(0)

    def kill(self, worker: _Worker) -> None:
        """Ends a worker and everything that it has started."""
        with contextlib.suppress(OSError):
            self._control.sendall(b'{"kill": true}\n')
        worker.connection.close()
        while (answer := self._hear()) is not None and "status" not in answer:
            pass

    def wait_for(self, worker: _Worker, timeout: float, doing: str) -> dict[str, Any]:
        """The worker's next answer. _Died, with the sentence, when it ends or hangs before it gives one."""
        connection = worker.connection
        while True:
            ready, _, _ = select.select([connection.fileno(), self._control.fileno(), self._output], [], [], POLL)
            if self._output in ready:
                self._drain()
            if connection.fileno() in ready:
                try:
                    answer = json.loads(connection.recv_bytes(MAX_ANSWER))
                    if isinstance(answer, dict):
                        return answer
                except (EOFError, OSError, ValueError):
                    pass
                # Mostly it has ended, and the server is about to say how.
                if b"\n" in self._heard or select.select([self._control.fileno()], [], [], GRACE)[0]:
                    raise self._end_of(self._hear())
                self.kill(worker)
                raise _Died(LOST)
            if self._control.fileno() in ready:
                raise self._end_of(self._hear())
            if timeout > 0:
                self._check_time(worker, timeout, doing)

    def take_output(self) -> str:
        """What was printed since the last time, the end of it."""
        self._drain()
        text, self._printed = self._printed.decode("utf-8", "replace"), b""
        return text

    def close(self) -> None:
        """Ends the server, which ends its worker."""
        if self._process.poll() is None:
            self._control.close()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            os.close(self._output)

    def _check_time(self, worker: _Worker, timeout: float, doing: str) -> None:
        since, call = self.board.call
        now = time.monotonic()
        if call and now - since > timeout:
            self.kill(worker)
            raise _Died(
                f"{call} did not return within {timeout:g} s: "
                "give --specbench-timeout SECONDS if it needs longer, otherwise it hangs"
            )
        if not call and now - self.board.last_sign > SILENCE * timeout:
            self.kill(worker)
            raise _Died(
                f"{doing} stood still for {SILENCE * timeout:g} s outside of any call: "
                "the target left something behind that blocks, or --specbench-timeout SECONDS is too short"
            )

    def _end_of(self, answer: dict[str, Any] | None) -> _Died:
        """The sentence for a worker that ended by itself."""
        who = self._who()
        self._drain()
        if answer is None:
            return _Died(f"{who}, and the server that forked it{self._last_words()}")
        status = int(answer["status"])
        if status == EXIT_LOST:
            return _Died(LOST)
        if status >= 0:
            advice = "a target returns or raises, it does not exit"
            return _Died(f"{who} with exit code {status}: {advice}", actual=f"exit code {status}")
        name = signal.Signals(-status).name
        if status == -signal.SIGKILL:
            advice = "most likely for want of memory; give --specbench-memory GIB below what this machine has"
            return _Died(f"{who} by {name}: {advice}", actual=name)
        # What faulthandler has printed: the innermost Python frame first.
        frames = re.findall(r'File "([^"\n]{1,200})", line (\d+)', self._printed.decode("utf-8", "replace"))
        frames.sort(key=lambda frame: "/lib/python" in frame[0])  # the target's own lines before those it called
        where = f" ({frames[0][0]}:{frames[0][1]})" if frames else ""
        return _Died(f"{who} by {name}: a crash in native code", actual=f"{name}{where}")

    def _who(self) -> str:
        call = self.board.call[1]
        return f"{call} ended its process" if call else "the target's process ended outside of any call"

    def _hear(self) -> dict[str, Any] | None:
        """The server's next line, waited for; None when it is gone. File descriptors are kept in order."""
        while b"\n" not in self._heard:
            try:
                received, fds, _, _ = socket.recv_fds(self._control, 65_536, 4)
            except OSError:
                return None
            if not received:
                return None
            self._heard += received
            self._fds += fds
        line, _, self._heard = self._heard.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(64):  # not to the end: it may print faster than we read
                self._printed = (self._printed + os.read(self._output, MAX_OUTPUT))[-MAX_OUTPUT:]

    def _last_words(self) -> str:
        self._drain()
        lines = self._printed.decode("utf-8", "replace").strip().splitlines()
        return f": {plain(lines[-1], 200, one_line=True)}" if lines else ""
