"""specbench.plugin, end to end in processes of their own: exit codes, the one sentence, the table, the record.

Processes are forked from this one, which has imported torch and specbench already: starting afresh costs seconds each.
What depends on a fresh start is tested in a fresh one. A run that several tests look at is made once.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import specbench.judge
from specbench.record import RunRecord, read, table

ROOT = Path(__file__).resolve().parents[1]
WRONG = ROOT / "tests" / "targets" / "wrong.py"
FAULT = "specbench.reference.faults.bank:sibling_leak"


@dataclass(frozen=True)
class Ran:
    """code: the exit code. out: stdout and stderr. run: the record, None when none was written."""

    code: int
    out: str
    run: RunRecord | None

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.out.splitlines()]

    @property
    def has_table(self) -> bool:
        return self.run is not None and table(self.run) in "\n".join(self.lines)


@cache
def suite(*options: str, environment: tuple[tuple[str, str], ...] = ()) -> Ran:
    """`pytest suites/consistency` without a real model."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "run.json"
        arguments = ["suites/consistency", "--specbench-model", "none", "-p", "no:cacheprovider",
                     # Where specbench is installed, pytest finds it imported already: these runs are forked.
                     "-W", "ignore::pytest.PytestAssertRewriteWarning",
                     "--hypothesis-profile=quick", f"--specbench-json={record}", *options]  # fmt: skip
        out = Path(folder) / "out.txt"
        code = forked(arguments, out, dict(environment))
        return Ran(code, out.read_text(encoding="utf-8"), read(record) if record.exists() else None)


def forked(arguments: list[str], out: Path, environment: dict[str, str], *, folder: Path = ROOT) -> int:
    """pytest in a child of this process, stdout and stderr in a file. Returns the exit code."""
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(300)  # ends a child that hangs
            file = os.open(out, os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(file, 1)
            os.dup2(file, 2)
            sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", closefd=False)
            sys.stderr = sys.__stderr__ = os.fdopen(2, "w", encoding="utf-8", closefd=False)
            for name in ("CI", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
                os.environ.pop(name, None)
            os.environ |= {"COLUMNS": "200", **environment}
            os.chdir(folder)
            code = int(pytest.main(arguments))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        finally:
            os._exit(99)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def test_the_processes_below_start_with_what_they_need() -> None:
    assert specbench.judge.CHECKS


def on(target: str, keyword: str, *options: str, subject: str = "tiny-fp64", **keywords: Any) -> Ran:
    """One claim's test on one subject."""
    return suite("--target", target, "-k", f"{keyword} and {subject}", *options, **keywords)


def usage_error(ran: Ran, sentence: str) -> None:
    """Exit code 4, the sentence alone, nothing judged."""
    assert [line for line in ran.lines if line.startswith("ERROR")] == [f"ERROR: {sentence}"], ran.out
    assert not re.search(r"Traceback|INTERNALERROR|\.py:\d|(?m:^E  )", ran.out), ran.out
    assert (ran.code, ran.run) == (4, None)


# user errors


def test_a_wrong_target_ends_with_exit_code_4_and_its_sentence() -> None:
    usage_error(
        suite("--target", "specbench.reference.targt:reference"),
        "target 'specbench.reference.targt:reference': "
        "there is no module 'specbench.reference.targt'; did you mean target?",
    )


def test_a_process_of_ones_own_says_the_same(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "suites/consistency", "--target", "nowhere.py:Adapter", "-q"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr.strip()) == (
        4,
        "ERROR: target 'nowhere.py:Adapter': there is no file nowhere.py; the folder has conftest.py",
    )


def test_a_wrong_target_is_told_even_when_one_test_is_named() -> None:
    """Parametrisation fails there first: pytest would say that the test does not exist."""
    node = "suites/consistency/test_tree.py::test_a_row_sees_the_prefix_and_its_own_path[tiny-fp64]"
    usage_error(
        suite(node, "--target", "./nothing.py:Adapter"),
        "target './nothing.py:Adapter': there is no file nothing.py; the folder has conftest.py",
    )


def test_a_target_that_raises_at_its_first_question_ends_with_exit_code_4() -> None:
    usage_error(
        suite("--target", f"{WRONG}:RaisesAtOnce"),
        f"target '{WRONG}:RaisesAtOnce': logits() raised RuntimeError: no weights here",
    )


def test_a_model_that_does_not_exist_ends_with_exit_code_4() -> None:
    usage_error(
        suite("--specbench-model", "smolm2"),
        "unknown model 'smolm2': did you mean smollm2? Known: smollm2",
    )


def test_an_unknown_claim_in_require_ends_with_exit_code_4_and_a_near_match() -> None:
    usage_error(
        suite("--specbench-require", "tree.mask,greedy.wlak"),
        "--specbench-require: no claim or level 'greedy.wlak'; did you mean greedy.walk?",
    )


WRONG_OPTIONS = {
    "--hypothesis-profile=stndard": (
        "--hypothesis-profile: unknown profile 'stndard': did you mean standard? Known: quick, standard, thorough"
    ),
    "--hypothesis-seed=abc": "--hypothesis-seed 'abc' must be a whole number >= 0 and < 2**64",
    "--hypothesis-seed=-1": "--hypothesis-seed '-1' must be a whole number >= 0 and < 2**64",
    "--specbench-timeout=-1": "--specbench-timeout -1 must be >= 0 and finite (seconds; 0 for no limit)",
    "--specbench-timeout=nan": "--specbench-timeout nan must be >= 0 and finite (seconds; 0 for no limit)",
    "--specbench-memory=inf": "--specbench-memory inf must be >= 0 and < 2**30 (GiB; 0 for no limit)",
    "--specbench-memory=4": "--specbench-memory needs --specbench-isolate: it limits the target's own process",
    "--specbench-require=": "--specbench-require is empty: it must name claims (globs allowed) or levels",
}


@pytest.mark.parametrize("option", WRONG_OPTIONS)
def test_an_option_with_a_wrong_value_ends_with_exit_code_4_and_says_what_it_must_be(option: str) -> None:
    ran = suite(option)
    if "profile" in option:  # further profiles are whatever this environment has registered
        (line,) = (one for one in ran.lines if one.startswith("ERROR"))
        assert line.startswith(f"ERROR: {WRONG_OPTIONS[option]}, "), ran.out
        usage_error(ran, line.removeprefix("ERROR: "))
    else:
        usage_error(ran, WRONG_OPTIONS[option])


PROFILE_OF_THEIRS = """
from hypothesis import settings
def pytest_configure():
    settings.register_profile("theirs", max_examples=3)
"""


def test_a_profile_that_a_conftest_registers_while_pytest_is_configured_is_known(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(PROFILE_OF_THEIRS)
    done = elsewhere(tmp_path, "--hypothesis-profile=theirs")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_malformed_replay_ends_with_exit_code_4() -> None:
    usage_error(
        suite("--specbench-replay", "tree.mask@tiny-fp64@TreeCase,prompt=x"),
        "replay string: prompt holds 'x', must be a whole number",
    )


def test_a_replay_for_another_subject_ends_with_exit_code_4_and_lists_those_of_the_run() -> None:
    usage_error(
        suite("--specbench-replay", "tree.mask@tiny-fp8@TreeCase"),
        "--specbench-replay: no subject 'tiny-fp8' in this run; "
        "it has tiny-fp64, hf-fp64, hf-tolerant, hf-eager, tiny-fp32, tiny-bf16, tiny-fp16",
    )


# targets that misbehave


MISBEHAVING = {
    "Raising": ("plain_decodings", "generate() raised RuntimeError: CUDA error: device-side assert", "greedy.lossless"),
    "WrongShape": (
        "logits_of_its_own",
        "forward_tree() must return shape [1, 31], got shape [1, 1, 31]",
        "tree.logits",
    ),
    "NaN": (
        "logits_of_its_own",
        "forward_tree() must return numbers, got nan at [0, 1] (1 such entries)",
        "tree.logits",
    ),
}


@pytest.mark.parametrize("name", MISBEHAVING)
def test_a_misbehaving_target_ends_with_exit_code_1_one_sentence_and_the_table(name: str) -> None:
    keyword, sentence, claim = MISBEHAVING[name]
    ran = on(f"{WRONG}:{name}", keyword)
    first = f"Misbehaviour: {sentence}"
    assert [line.partition("      [claim")[0] for line in ran.lines if line.startswith("Misbehaviour")] == [first], (
        ran.out
    )
    assert "Traceback" not in ran.out and "hypothesis/core.py" not in ran.out
    assert ran.run is not None
    assert (ran.code, ran.has_table, ran.run.verdict_of(claim), ran.run.ended) == (1, True, "BUG", "finished")


def test_a_target_that_hangs_ends_with_exit_code_7_the_table_and_the_record() -> None:
    ran = on(f"{WRONG}:Sleeping", "(plain_decodings or judged_by)", "--specbench-timeout", "2")
    sentence = (
        "_SleepingDecoder.generate() did not return within 2 s: "
        "give --specbench-timeout SECONDS if it needs longer, otherwise it hangs"
    )
    replay = "greedy.lossless@tiny-fp64@GenerationCase,rounds=0:-1:0,eos_idx=0"
    assert ran.lines[-3:] == [
        f"greedy.lossless on tiny-fp64: {sentence}",
        f"while judging --replay {replay}",
        "leaving with exit code 7",
    ], ran.out
    assert ran.run is not None
    verdicts = {one.claim: one.verdict for one in ran.run.claims}
    assert (ran.code, ran.has_table, ran.run.ended) == (7, True, f"hung: {sentence}")
    assert verdicts == {"greedy.walk": "EQUAL", "greedy.lossless": "BUG"}


def test_what_was_judged_before_a_target_ends_the_process_is_on_disk() -> None:
    """Nothing can run after os._exit, so the record is written claim by claim."""
    ran = on(f"{WRONG}:Leaving", "(plain_decodings or judged_by)")
    assert ran.run is not None
    assert (ran.code, ran.run.ended) == (3, "in progress")
    assert {one.claim: one.verdict for one in ran.run.claims} == {"greedy.walk": "EQUAL"}


def test_a_target_that_hangs_at_its_first_question_ends_with_exit_code_7_too() -> None:
    ran = suite("--target", f"{WRONG}:HangsAtOnce", "--specbench-timeout", "1")
    assert ran.lines[-2:] == [
        f"target '{WRONG}:HangsAtOnce': HangsAtOnce.logits() did not return within 1 s: "
        "give --specbench-timeout SECONDS if it needs longer, otherwise it hangs",
        "leaving with exit code 7",
    ], ran.out
    assert ran.code == 7


# verdicts and gates


def test_not_tested_is_a_skip_with_its_sentence_and_passes_without_a_gate() -> None:
    ran = on(f"{WRONG}:VerifierOnly", "(judged_by or plain_decodings)", "-rs", subject="own")
    assert ran.run is not None
    assert "NOT TESTED: give the target generate(prompt, *, max_new_tokens, sampling, stop, seed) (level 1)" in ran.out
    assert (ran.code, ran.run.verdict_of("greedy.walk"), ran.run.verdict_of("greedy.lossless")) == (
        0, "EQUAL", "NOT TESTED",
    )  # fmt: skip


def test_require_makes_not_tested_fail_and_says_so() -> None:
    ran = on(
        f"{WRONG}:VerifierOnly", "(judged_by or plain_decodings)", "--specbench-require", "greedy.l*", subject="own"
    )
    assert ran.code == 1
    assert (
        "NOT TESTED, but --specbench-require asks for greedy.lossless: "
        "give the target generate(prompt, *, max_new_tokens, sampling, stop, seed) (level 1)"
    ) in ran.lines
    assert "required, but NOT TESTED on any subject: greedy.lossless" in ran.lines


def test_require_fails_a_run_that_left_the_claim_out() -> None:
    """Otherwise a gate would rot when somebody narrows the run by -k."""
    ran = on(f"{WRONG}:VerifierOnly", "judged_by", "--specbench-require", "greedy.walk,progress", subject="own")
    assert (ran.code, "required, but NOT TESTED on any subject: progress" in ran.lines) == (1, True), ran.out


# replay


def test_a_replay_reproduces_the_failure_word_for_word_and_runs_nothing_else() -> None:
    first = on(FAULT, "sees_the_prefix", "--hypothesis-seed=5")
    assert first.run is not None
    (record,) = first.run.claims
    again = suite("--target", FAULT, "--specbench-replay", record.replay, "--hypothesis-seed=5")
    assert again.run is not None
    (replayed,) = again.run.claims
    assert (again.code, replayed.message, record.message in "\n".join(again.lines)) == (1, record.message, True)
    assert (replayed.claim, replayed.subject) == ("tree.mask", "tiny-fp64")


# the record


def leak(*options: str, **keywords: Any) -> Ran:
    return on(FAULT, "(sees_the_prefix or logits_of_its_own)", "--hypothesis-seed=9", *options, **keywords)


def test_the_record_holds_what_the_table_shows() -> None:
    ran = leak()
    assert ran.run is not None
    assert (ran.has_table, [(one.claim, one.subject) for one in ran.run.claims]) == (
        True,
        [("tree.mask", "tiny-fp64"), ("tree.logits", "tiny-fp64")],
    )


def test_a_failure_narrows_to_the_lower_claim_that_failed_before() -> None:
    assert "  narrower  tree.mask FAILS: look at the mask builder first" in leak().lines


def facts(ran: Ran) -> list[dict[str, object]]:
    """What must not depend on anything but the seed."""
    assert ran.run is not None
    names = ("claim", "subject", "verdict", "num_cases", "num_nodes", "num_rounds", "num_tokens", "replay", "message")
    return [{name: getattr(one, name) for name in names} for one in ran.run.claims]


def test_equal_seeds_give_equal_records_whether_or_not_it_is_ci() -> None:
    """With CI set, Hypothesis would derandomise: the seed would be ignored, and the profile's own settings with it."""
    assert facts(leak(environment=(("CI", "true"),))) == facts(leak())


def test_another_seed_draws_other_cases_in_ci() -> None:
    both = [on(FAULT, "judged_by", f"--hypothesis-seed={seed}", environment=(("CI", "true"),)) for seed in (9, 10)]
    (first,), (second,) = map(facts, both)
    # 12 drawn ones and every small walk
    assert (first["verdict"], first["num_cases"], second["num_cases"]) == ("EQUAL", 154, 154)
    assert first["num_nodes"] != second["num_nodes"]


def test_the_seed_is_printed_with_the_option_that_repeats_it() -> None:
    assert (
        f"specbench 0.1.0   target {FAULT}   profile quick   seed 9 (repeat with --hypothesis-seed=9)" in leak().lines
    )


# elsewhere


PROJECT = """
import sys
def test_it():
    assert "torch" not in sys.modules
    assert "specbench.judge" not in sys.modules
"""


def elsewhere(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """A project that has nothing to do with us, in an environment that has our plugin."""
    (folder / "test_theirs.py").write_text(PROJECT)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "specbench.plugin", *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def test_the_plugin_does_nothing_in_a_project_of_others(tmp_path: Path) -> None:
    done = elsewhere(tmp_path)
    # Where specbench is installed, pytest itself lists it among the plugins.
    said = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("plugins: ")]
    assert (done.returncode, "specbench" in "\n".join(said)) == (0, False), done.stdout
    assert not (tmp_path / ".specbench").exists()


def test_require_fails_a_run_in_which_nothing_was_judged(tmp_path: Path) -> None:
    done = elsewhere(tmp_path, "--specbench-require", "greedy.walk")
    assert done.returncode == 1
    assert "required, but NOT TESTED on any subject: greedy.walk" in done.stdout
