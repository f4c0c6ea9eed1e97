"""The other side of `isolation`: a server that has everything imported and forks workers, each judging one target.

The server itself runs nothing: forking a process whose OpenMP threads have run is undefined, so all judging is done in
workers. It holds one worker at a time, tells how it ended, and leaves nothing behind when whoever started it is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import resource
import select
import signal
import socket
import sys
import traceback
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import transformers.models.auto.modeling_auto
import transformers.models.gemma3.modeling_gemma3
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama  # noqa: F401, what the tiny banks need: once here, not in each worker

from specbench.board import Board, NotedCalls
from specbench.cases import decode
from specbench.claims import Misbehaviour
from specbench.judge import Failed, RunSession, Skipped
from specbench.loading import Target, load_target
from specbench.probe import first_line, type_name
from specbench.profiles import Profile
from specbench.record import ClaimRecord
from specbench.reference.target import ReferenceTarget

GIB = 2**30
EXIT_LOST = 70  # EX_SOFTWARE: the connection is gone
PR_SET_PDEATHSIG = 1


def main(control_fd: int, board_fd: int) -> NoReturn:
    """Serves until the control socket closes. Requests: {"fork": settings} and {"kill": true}; answers: {"pid": ...}
    with the worker's end of a connection beside it, then {"status": ...} once the worker has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started us decides when the run ends
    ended, ended_in = os.pipe()
    os.set_blocking(ended_in, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(ended_in)
    with socket.socket(fileno=control_fd) as control:
        worker, heard = 0, b""
        while True:
            ready, _, _ = select.select([control_fd, ended], [], [])
            if ended in ready:
                os.read(ended, 512)
                status = _status_of(worker)
                if status is not None:
                    _kill_group(worker)  # what the target has started and left
                    os.waitpid(worker, 0)
                    worker = 0
                    tell(control, {"status": status})
            if control_fd in ready:
                received = control.recv(65_536)
                if not received:
                    if worker:
                        _kill_group(worker)
                    os._exit(0)  # nothing here needs to be put in order, and doing so takes seconds
                *requests, heard = (heard + received).split(b"\n")
                for request in map(json.loads, requests):
                    if "fork" in request:
                        worker = _fork(request["fork"], control, board_fd, ended_in)
                    elif worker:
                        _kill_group(worker)


def tell(control: socket.socket, answer: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """One JSON line, file descriptors beside it."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        socket.send_fds(control, [json.dumps(answer).encode() + b"\n"], list(fds))


def _fork(settings: dict[str, Any], control: socket.socket, board_fd: int, ended_in: int) -> int:
    ours, theirs = socket.socketpair()
    server = os.getpid()
    worker = os.fork()
    if worker == 0:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.close(ended_in)
            os.setpgid(0, 0)
            _die_with(server)
            control.close()
            theirs.close()
            _work(Connection(ours.detach()), Board(board_fd), settings)
        finally:
            os._exit(EXIT_LOST)
    with contextlib.suppress(OSError):  # whichever of the two comes first
        os.setpgid(worker, worker)
    tell(control, {"pid": worker}, (theirs.fileno(),))
    ours.close()
    theirs.close()
    return worker


def _work(connection: Connection, board: Board, settings: dict[str, Any]) -> NoReturn:
    """Answers until the parent closes the connection: first what the run's record starts with, then claim by claim."""
    if settings["memory"] > 0:
        limit = int(settings["memory"] * GIB)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a target that crashes on purpose would fill the disk
    faulthandler.enable(all_threads=False)
    try:
        session = _open(board, settings)
    except BaseException as error:
        _send(connection, {"unusable": _why_unusable(error, settings["target"])})
        os._exit(0)
    _send(connection, {"run": asdict(session.run)})
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)
        _send(connection, _judged(session, request))


def _open(board: Board, settings: dict[str, Any]) -> RunSession:
    watchdog = NotedCalls(board)
    name = settings["target"]
    target = Target("specbench.reference", ReferenceTarget(), is_reference=True)
    if name:
        with watchdog.guard("loading it"):
            target = load_target(name, timeout=0.0, on_hang=print)
    session = RunSession(
        target,
        model=settings["model"],
        profile=Profile(**{**settings["profile"], "real_dtypes": tuple(settings["profile"]["real_dtypes"])}),
        seed=settings["seed"],
        device=settings["device"],
        timeout=0,
        on_hang=print,
        watchdog=watchdog,
        naming=True,
    )
    session.run.claims = [ClaimRecord(**one) for one in settings["claims"]]
    return session


def _why_unusable(error: BaseException, name: str) -> str:
    """The sentence that the plugin says when the target is loaded in its own process."""
    if isinstance(error, Misbehaviour):
        return f"target {name!r}: {error}"
    if isinstance(error, ValueError):
        return str(error)
    if isinstance(error, OSError):
        return f"the model cannot be loaded: {first_line(error)}"
    return f"target {name!r}: {type_name(error)} while it was loaded: {first_line(error)}"


def _judged(session: RunSession, request: dict[str, Any]) -> dict[str, Any]:
    """failed, skipped: the text of what `RunSession.judge` raised. ended: a KeyboardInterrupt or the like, which is not
    the user's here. broke: the traceback of an error of ours. crowded: a failure left little memory for the rest."""
    outcome = {"failed": "", "skipped": "", "ended": "", "broke": ""}
    only = decode(request["only"]) if request["only"] else None
    try:
        session.judge(request["claim"], request["subject"], only=only)
    except Failed as failed:
        outcome["failed"] = str(failed)
    except Skipped as skipped:
        outcome["skipped"] = str(skipped)
    except (MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit) as error:
        outcome["ended"] = f"{type_name(error)}: {first_line(error)}"
    except BaseException as error:
        outcome["broke"] = "".join(traceback.format_exception(error))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    run = session.finish()
    return {
        **outcome,
        "record": asdict(run.claims[-1]),
        "prompts": run.prompts,
        "seconds": session.clock.seconds,
        "peak_bytes": run.peak_bytes,
        "crowded": bool(outcome["failed"]) and _is_crowded(),
    }


def _is_crowded() -> bool:
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[5])
    except OSError:
        return False
    return limit != resource.RLIM_INFINITY and 2 * pages * resource.getpagesize() > limit


def _send(connection: Connection, answer: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(answer).encode())


def _status_of(worker: int) -> int | None:
    """How a worker ended, as `os.waitstatus_to_exitcode` says it, or None while it runs. It stays to be waited for."""
    if not worker:
        return None
    info = os.waitid(os.P_PID, worker, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def _kill_group(worker: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)


def _die_with(server: int) -> None:
    """Linux ends us when the server dies; elsewhere the closed connection does, once a call of the target is over."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(EXIT_LOST)
