"""examples/github-workflow.yml: it is a workflow, and the command in it runs as it stands there."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from test_plugin import ROOT, forked

import specbench.judge
from specbench import cli
from specbench.record import read

yaml = pytest.importorskip("yaml", reason="pip install pyyaml (transformers brings it)")
SOURCE = ROOT / "examples" / "github-workflow.yml"


def steps() -> list[dict[str, Any]]:
    workflow = yaml.safe_load(SOURCE.read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = workflow["jobs"]["conformance"]["steps"]
    return found


def command() -> list[str]:
    (step,) = [one for one in steps() if one.get("name") == "Judge the decoder"]
    return shlex.split(step["run"])


def test_every_step_uses_an_action_or_runs_a_command() -> None:
    assert [sorted({"uses", "run"} & set(one)) for one in steps()] == [
        ["uses"], ["uses"], ["uses"], ["run"], ["run"], ["uses"],
    ]  # fmt: skip


def test_the_command_runs_as_it_stands_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a right decoder and an empty ledger it holds. Without the real model, which is fetched by the step before."""
    assert specbench.judge.CHECKS
    (tmp_path / "decoder.py").write_text("from specbench.reference.target import ReferenceTarget as Adapter\n")
    (tmp_path / "specbench-ledger.json").write_text(json.dumps({"schema": 1, "entries": []}))
    words = command()
    assert words[:2] == ["specbench", "check"]
    # What `specbench check` hands to pytest, started in a fork of this process and in a folder of its own.
    handed: list[list[str]] = []
    monkeypatch.setattr(pytest, "main", lambda arguments: handed.append(arguments) or 0)
    cli.main(words[1:])
    monkeypatch.undo()
    options = ["--specbench-model=none", "-k", "tiny-fp64 and (plain_decodings or end_token or token_limit)",
               "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]  # fmt: skip
    code = forked([*handed[0], *options], tmp_path / "out.txt", {"GITHUB_ACTIONS": "true"}, folder=tmp_path)
    assert code == 0, (tmp_path / "out.txt").read_text()
    run = read(tmp_path / ".specbench" / "report.json")
    assert (run.ended, run.problems, (tmp_path / "specbench-junit.xml").exists()) == ("finished", [], True)
    assert os.listdir(tmp_path / ".specbench") == ["report.json"]
