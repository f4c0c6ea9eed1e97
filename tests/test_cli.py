"""specbench.cli: each command is a thin call, and every wrong word gets one sentence with near matches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import specbench
from specbench import claim_list, cli, models
from specbench.claims import CLAIMS, Claim
from specbench.loading import EXPOSE


@pytest.fixture
def pytest_args(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What `check` would have started pytest with."""
    calls: list[list[str]] = []

    def record(args: list[str]) -> int:
        calls.append(args)
        return 1

    monkeypatch.setattr(pytest, "main", record)
    return calls


def exit_of(argv: list[str]) -> int:
    """The exit code, whether argparse left or main returned."""
    try:
        return cli.main(argv)
    except SystemExit as left:
        return int(left.code or 0)


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_of(["--version"]) == 0
    assert capsys.readouterr().out == f"specbench {specbench.__version__}\n"


KNOWN = (
    "Known: check, soak, faults, controls, law, claims, architectures, model, sentinel, engines, server, drafters, "
    "exits, workload, train-drafter, bench, compare, diagnose, plan, report"
)
MESSAGES = {
    "chek mod:A": (
        2,
        f"specbench: unknown command 'chek': did you mean check? {KNOWN}\n",
    ),
    "train": (2, f"specbench: unknown command 'train': did you mean train-drafter? {KNOWN}\n"),
    "model fech smollm2": (2, "specbench model: unknown command 'fech': did you mean fetch? Known: fetch, path\n"),
    "model fetch": (2, "specbench model fetch: the following arguments are required: NAME\n"),
    "model fetch smolm2": (1, "specbench: unknown model 'smolm2': did you mean smollm2? Known: smollm2\n"),
    "model path smolm2": (1, "specbench: unknown model 'smolm2': did you mean smollm2? Known: smollm2\n"),
    "model path smollm2": (1, "specbench: smollm2 is not fetched: run `specbench model fetch smollm2`\n"),
    "model path smollm2 --forse": (2, "specbench model path: unrecognized arguments: --forse\n"),
}


@pytest.mark.parametrize("line", MESSAGES)
def test_wrong_command_line_gets_one_sentence(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    code, message = MESSAGES[line]
    assert (exit_of(line.split()), capsys.readouterr().err) == (code, message)


@pytest.mark.parametrize("line", ["claims", "model path FOLDER"])
def test_a_reader_that_has_left_is_no_traceback(line: str, tmp_path: Path) -> None:
    """`specbench claims | head -3`: a long text breaks the pipe in print, a short one when it is flushed."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    words = [str(tmp_path) if one == "FOLDER" else one for one in line.split()]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "specbench.cli", *words], env={**os.environ, "PYTHONUNBUFFERED": ""},
            cwd=Path(specbench.__file__).parents[1], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120,
        )  # fmt: skip
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (cli.READER_LEFT, "")


@pytest.mark.parametrize(("line", "prog"), [("", "specbench"), ("model", "specbench model")])
def test_command_without_its_word_prints_the_usage(line: str, prog: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_of(line.split()) == 2
    assert capsys.readouterr().out.startswith(f"usage: {prog} [-h]")


def test_model_path_prints_the_folder_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert exit_of(["model", "path", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"


@pytest.mark.parametrize("force", [False, True])
def test_model_fetch_hands_its_words_to_fetch(force: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, bool]] = []
    monkeypatch.setattr(models, "fetch", lambda name, *, force: calls.append((name, force)))
    assert exit_of(["model", "fetch", "smollm2"] + ["--force"] * force) == 0
    assert calls == [("smollm2", force)]


def test_check_is_pytest_on_the_consistency_suite_and_the_claims_about_kernels(pytest_args: list[list[str]]) -> None:
    assert exit_of(["check", "./mine.py:Adapter"]) == 1
    suite = ["-p", "specbench.plugin", "--pyargs", "specbench.suites.consistency", cli.KERNEL_CLAIMS]
    assert pytest_args == [[*suite, "--specbench-target", "./mine.py:Adapter"]]


def test_check_without_a_target_judges_the_reference(pytest_args: list[list[str]]) -> None:
    """What the last line of a failure of the reference itself says to run."""
    exit_of(["check", "--replay", "x"])
    assert pytest_args == [["-p", "specbench.plugin", "--pyargs", cli.SUITE, "--specbench-replay", "x"]]


def test_check_passes_the_replay_and_everything_else_on(pytest_args: list[list[str]]) -> None:
    exit_of("check mod:A --replay 7Wc:3.-1.0 -k greedy --hypothesis-profile=quick -x".split())
    tail = "--specbench-target mod:A --specbench-replay 7Wc:3.-1.0 -k greedy --hypothesis-profile=quick -x".split()
    assert pytest_args[0][5:] == tail


LISTED = {
    "tree.mask": Claim("tree.mask", 3, "let a node attend to its own path only", ("tree", "taps"), "the mask builder"),
    "progress": Claim("progress", 1, "emit at least one token every round", ("generate",), "the round loop"),
}


@pytest.fixture
def two_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_list, "CLAIMS", LISTED)


@pytest.mark.usefixtures("two_claims")
def test_claims_are_listed_with_level_must_sentence_and_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_of(["claims"]) == 0
    assert capsys.readouterr().out == (
        "tree.mask  level 3  let a node attend to its own path only  [needs tree, taps]\n"
        "progress   level 1  emit at least one token every round  [needs generate]\n"
    )


@pytest.mark.usefixtures("two_claims")
def test_claims_as_markdown_say_what_each_need_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_of(["claims", "--markdown"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| claim | level | a correct decoder must | needs |",
        "|---|---|---|---|",
        "| `tree.mask` | 3 | let a node attend to its own path only | tree, taps |",
        "| `progress` | 1 | emit at least one token every round | generate |",
        "",
        f"- `tree`: {EXPOSE['tree']}",
        f"- `taps`: {EXPOSE['taps']}",
        f"- `generate`: {EXPOSE['generate']}",
    ]


@pytest.mark.usefixtures("two_claims")
def test_claims_as_json_hold_what_each_need_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_of(["claims", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert (listed["schema"], listed["claims"][1]) == (
        1,
        {
            "id": "progress",
            "level": 1,
            "must": "emit at least one token every round",
            "needs": {"generate": EXPOSE["generate"]},
            "look_at": "the round loop",
        },
    )


@pytest.mark.parametrize("form", ["as_text", "as_markdown", "as_json"])
def test_every_claim_is_in_every_list_with_its_must_sentence(form: str) -> None:
    text = getattr(claim_list, form)()
    assert [one.id for one in CLAIMS.values() if one.id not in text or one.must not in text] == []


def test_every_need_says_what_to_expose() -> None:
    assert {need for one in CLAIMS.values() for need in one.needs} - set(EXPOSE) == set()
