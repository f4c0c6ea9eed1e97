"""specbench.isolation: whatever the target's process does, its claim is a BUG in one sentence and the run goes on.

One run meets every way to die, and the tests look at it. Runs are forked from this process (see `test_plugin.py`).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from test_plugin import forked

from specbench.board import SIZE, Board, NotedCalls
from specbench.isolation import IsolatedSession, Server
from specbench.judge import Failed, RunSession, Skipped, parse_replay
from specbench.loading import TargetError, load_target
from specbench.profiles import Profile
from specbench.record import ClaimRecord, RunRecord, read

ROOT = Path(__file__).resolve().parents[1]
DEADLY = ROOT / "tests" / "hostile" / "deadly.py"
SPEAKING = ROOT / "tests" / "hostile" / "speaking.py"
WRONG = ROOT / "tests" / "targets" / "wrong.py"


@dataclass(frozen=True)
class Ran:
    """code: the exit code. out: stdout and stderr. run: the record, None when none was written. junit: its text."""

    code: int
    out: str
    run: RunRecord | None
    junit: str

    def claim(self, name: str) -> ClaimRecord:
        assert self.run is not None, self.out
        record = self.run.find(name, "tiny-fp64")
        assert record is not None, self.out
        return record


@cache
def suite(*options: str) -> Ran:
    """`pytest suites/consistency --specbench-isolate` without a real model."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "deaths").write_text("0", "ascii")
        arguments = ["suites/consistency", "--specbench-model", "none", "-p", "no:cacheprovider",
                     "-W", "ignore::pytest.PytestAssertRewriteWarning", f"--junitxml={place / 'junit.xml'}",
                     "--hypothesis-profile=quick", "--hypothesis-seed=5", f"--specbench-json={place / 'run.json'}",
                     *options]  # fmt: skip
        code = forked(arguments, place / "out.txt", {"HOSTILE_DEATHS": str(place / "deaths")})
        record, junit = place / "run.json", place / "junit.xml"
        return Ran(
            code,
            (place / "out.txt").read_text(encoding="utf-8"),
            read(record) if record.exists() else None,
            junit.read_text(encoding="utf-8") if junit.exists() else "",
        )


def isolated(target: str, keyword: str, *options: str) -> Ran:
    return suite(
        "--specbench-isolate", "--target", target, "-k", f"({keyword}) and tiny-fp64",
        "--specbench-timeout", "6", "--specbench-memory", "1.5", *options,
    )  # fmt: skip


# every way to die


HOW = "_Decoder.forward_tree() ended its process"
TOO_LONG = (
    "_Decoder.forward_tree() did not return within 6 s: "
    "give --specbench-timeout SECONDS if it needs longer, otherwise it hangs"
)
CLOSED = "the target closed or wrote to files that are not its own, specbench's connection among them"
DEATHS = {
    "tree.mask": (f"{HOW} with exit code 3: a target returns or raises, it does not exit", "exit code 3"),
    "tree.positions": ("the target raised KeyboardInterrupt: by myself", "KeyboardInterrupt: by myself"),
    "tree.attention_weights": (f"{HOW} by SIGSEGV: a crash in native code", f"SIGSEGV ({DEADLY}:"),
    "tree.layers": (f"{HOW} by SIGABRT: a crash in native code", f"SIGABRT ({DEADLY}:"),
    "tree.logits": (
        f"{HOW} by SIGKILL: most likely for want of memory; give --specbench-memory GIB below what this machine has",
        "SIGKILL",
    ),
    "kv.commit": (TOO_LONG, "none"),
    "kv.rollback": (CLOSED, "none"),
    "greedy.walk": (
        "verify() raised RuntimeError: [enforce fail at alloc_cpu.cpp",
        f"RuntimeError ({DEADLY}:",
    ),
    "stop.eos": (
        "_Decoder.generate() ended its process with exit code 9: a target returns or raises, it does not exit",
        "exit code 9",
    ),
    "stop.max_tokens": (
        "_Decoder.generate() ended its process with exit code 0: a target returns or raises, it does not exit",
        "exit code 0",
    ),
}


def deadly() -> Ran:
    tests = (
        "sees_the_prefix or stands_at or attention_mass or every_layer or logits_of_its_own or exactly_the_committed "
        "or nothing_rejected or judged_by or first_end_token or token_limit or nodes_and_root"
    )
    return isolated(f"{DEADLY}:Deadly", tests)


@pytest.mark.parametrize("claim", DEATHS)
def test_a_claim_whose_process_dies_is_a_bug_in_one_sentence(claim: str) -> None:
    sentence, actual = DEATHS[claim]
    record = deadly().claim(claim)
    lines = record.message.splitlines()
    assert (record.verdict, lines[0][: len(sentence) + 14]) == ("BUG", f"Misbehaviour: {sentence}")
    assert [line for line in lines if line.startswith(f"  actual    {actual}")], record.message


def test_the_case_in_progress_is_told_with_the_command_that_runs_it_in_isolation() -> None:
    record = deadly().claim("tree.mask")
    command = f"  reproduce specbench check {DEADLY}:Deadly --replay {record.replay} --specbench-isolate"
    assert record.message.splitlines()[-1] == command


def test_the_run_goes_on_to_a_claim_that_holds() -> None:
    assert deadly().claim("cost.rows").verdict == "EQUAL"


def test_a_run_with_deaths_ends_as_one_with_failures_does() -> None:
    ran = deadly()
    assert ran.run is not None
    assert (ran.code, ran.run.ended, "INTERNALERROR" in ran.out) == (1, "finished", False)
    assert not re.search(r"^Traceback", ran.out, re.MULTILINE)


def test_what_a_dying_target_prints_is_cut_and_commands_nothing() -> None:
    ran = deadly()
    assert len(ran.out) < 200_000
    assert not re.search(r"^\s*::", ran.out, re.MULTILINE)


def test_a_lower_claim_that_died_in_another_process_narrows_the_message() -> None:
    assert "tree.mask" in deadly().claim("kv.commit").message.partition("narrower")[2]


# one server for the tests below: starting it costs seconds


FEW = Profile("few", 5, num_real=0, real_prompts=0, real_tokens=0, real_dtypes=())


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.close()


def session(server: Server, target: str, *, timeout: float = 60.0) -> IsolatedSession:
    return IsolatedSession(
        target, model="none", profile=FEW, seed=5, device="cpu", timeout=timeout, memory=2.0, server=server
    )


def failure(judging: Callable[[], object]) -> str:
    with pytest.raises(Failed) as error:
        judging()
    return str(error.value)


def test_a_replay_in_isolation_tells_the_same_story(server: Server) -> None:
    first = session(server, f"{WRONG}:Leaving")
    text = failure(lambda: first.judge("greedy.lossless", "tiny-fp64"))
    case = parse_replay(first.run.claims[-1].replay)[2]
    first.close()
    again = session(server, f"{WRONG}:Leaving")
    assert failure(lambda: again.judge("greedy.lossless", "tiny-fp64", only=case)) == text
    again.close()


def test_an_isolated_run_finds_what_a_run_in_this_process_finds(server: Server) -> None:
    fault = "specbench.reference.faults.bank:sibling_leak"
    apart = session(server, fault)
    here = RunSession(
        load_target(fault), model="none", profile=FEW, seed=5, device="cpu", timeout=0, on_hang=print, naming=True
    )
    texts = [failure(lambda one=one: one.judge("tree.mask", "tiny-fp64")) for one in (apart, here)]  # type: ignore[misc]
    apart.close()
    assert texts[0] == texts[1]


def test_what_is_not_exposed_is_skipped_as_elsewhere(server: Server) -> None:
    one = session(server, f"{WRONG}:VerifierOnly")
    with pytest.raises(Skipped, match=r"give the target generate\(prompt"):
        one.judge("greedy.lossless", "own")
    one.close()


UNUSABLE = {
    f"{WRONG}:RaisesAtOnce": "logits() raised RuntimeError: no weights here",
    f"{WRONG}:Nowhere": f"{WRONG} has no 'Nowhere'",
    f"{DEADLY}:DiesOnImport": "loading it ended its process by SIGSEGV: a crash in native code",
    f"{DEADLY}:HangsOnImport": (
        "loading it did not return within 6 s: give --specbench-timeout SECONDS if it needs longer, otherwise it hangs"
    ),
}


@pytest.mark.parametrize("target", UNUSABLE)
def test_a_target_that_cannot_be_loaded_in_its_process_cannot_be_used(server: Server, target: str) -> None:
    with pytest.raises(TargetError) as error:
        session(server, target, timeout=6.0)
    assert str(error.value).startswith(f"target {target!r}: {UNUSABLE[target]}")


def test_what_an_isolated_target_prints_commands_nothing(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    one = session(server, f"{SPEAKING}:Injects")
    failure(lambda: one.judge("greedy.lossless", "tiny-fp64"))
    one.close()
    printed = capsys.readouterr().out
    assert "pwned" in printed
    assert not COMMANDS.search(printed)


def test_a_process_that_stands_still_between_calls_is_ended_too(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = session(server, "specbench.reference.target:reference")
    worker = one._worker
    assert worker is not None
    much_later = time.monotonic() + 300
    with monkeypatch.context() as patch:
        patch.setattr("specbench.isolation.time.monotonic", lambda: much_later)
        with pytest.raises(Exception, match="judging it stood still for 240 s outside of any call: the target left"):
            server._check_time(worker, 60.0, "judging it")
    assert _ends(worker.pid)


# texts, without isolation too


COMMANDS = re.compile(r"^\s*::|##[a-z]*\[|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2028]", re.MULTILINE)


def speaking() -> Ran:
    return suite("--target", f"{SPEAKING}:Injects", "-k", "plain_decodings and tiny-fp64", "-rA")


def test_a_target_commands_neither_terminals_nor_ci_services() -> None:
    assert speaking().code == 1
    assert "pwned" in speaking().out
    assert not COMMANDS.search(speaking().out)


def test_what_a_target_says_leaves_junit_well_formed() -> None:
    cases = list(ElementTree.fromstring(speaking().junit).iter("testcase"))
    assert [len(one.findall("failure")) for one in cases] == [1]


def test_the_sentence_shows_what_was_tried() -> None:
    sentence = "generate() raised Err ::error::pwned\\x1b[31m: : :error file=app.py,line=1::pwned"
    assert speaking().claim("greedy.lossless").message.startswith(f"Misbehaviour: {sentence}")


def test_an_option_that_isolation_cannot_use_ends_with_exit_code_4() -> None:
    ran = suite("--specbench-isolate", "--specbench-memory=-1")
    sentence = "ERROR: --specbench-memory -1 must be >= 0 and < 2**30 (GiB; 0 for no limit)"
    assert (ran.code, [line for line in ran.out.splitlines() if line.startswith("ERROR")]) == (4, [sentence])


# nothing stays behind


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_nothing_outlives_a_run_that_is_ended(number: signal.Signals, tmp_path: Path) -> None:
    """The target says by a file that it is in its call, and would stay there for an hour."""
    target = tmp_path / "waiting.py"
    target.write_text(
        "import os, pathlib, time\n"
        "from specbench.reference.decoder import Decoder\n"
        "class Waits(Decoder):\n"
        "    def verify(self, *args, **keywords):\n"
        f"        pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "        time.sleep(3600)\n"
        "class Target:\n"
        "    def build(self, model, drafter):\n"
        "        return Waits(model, drafter)\n"
    )
    run = os.fork()
    if run == 0:
        code = forked_arguments(target, tmp_path)
        os._exit(code)
    worker = _appears(tmp_path / "pid")
    os.kill(run, number)
    _, status = os.waitpid(run, 0)
    assert os.waitstatus_to_exitcode(status) == (2 if number == signal.SIGINT else -number)
    assert _ends(worker)


def forked_arguments(target: Path, folder: Path) -> int:
    try:
        file = os.open(folder / "out.txt", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.chdir(ROOT)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return int(pytest.main(
            ["suites/consistency", "--specbench-isolate", "--target", f"{target}:Target", "--specbench-model", "none",
             "-p", "no:cacheprovider", "-k", "judged_by and tiny-fp64", f"--specbench-json={folder / 'run.json'}"]
        ))  # fmt: skip
    finally:
        sys.stdout.flush()


def _appears(file: Path) -> int:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if file.exists() and (text := file.read_text()):
            return int(text)
        time.sleep(0.05)
    raise AssertionError(f"{file} did not appear")


def _ends(process: int) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            if "State:\tZ" not in Path(f"/proc/{process}/status").read_text("ascii"):
                time.sleep(0.05)
                continue
        return True
    return False


# the board


def test_the_board_tells_another_reader_which_call_of_which_case_is_in_progress() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        written, seen = Board(file.fileno()), Board(file.fileno())
        calls = NotedCalls(written)
        calls.note_case("tree.mask@own@TreeCase")
        with calls.guard("Decoder.generate()"):
            inside = (seen.case, seen.call[1])
        assert (inside, seen.call[1]) == (("tree.mask@own@TreeCase", "Decoder.generate()"), "")
