"""suites/benchmark under pytest: --benchmark runs it and nothing else, the gate marks its rows, runs are compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specbench.bench.rows import Row
from specbench.suites.benchmark.decoding.test_decoding import repetitions

ROOT = Path(__file__).resolve().parents[1]
TARGETS = """
import torch
from specbench.reference.decoder import Decoder
from specbench.reference.drafters.ngram import NGramDrafter
from specbench.reference.model import tiny_llama
from specbench.suites.benchmark.decoding.test_decoding import TINY

class Right:
    def __init__(self, drafter=NGramDrafter(gamma=3)):
        self._decoder = Decoder(tiny_llama(TINY, seed=0).to(torch.float32), drafter)
    def generate(self, prompt, **options):
        return self._decoder.generate(prompt, **options)
    def with_drafter(self, drafter):
        return Right(drafter)

class Wrong(Right):
    def generate(self, prompt, **options):
        tokens = super().generate(prompt, **options).tokens
        return [*tokens[:8], *((one + 1) % 256 for one in tokens[8:])]
"""


def pytest_run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """In a folder that has a test of its own."""
    (folder / "test_theirs.py").write_text("def test_it(benchmark):\n    raise AssertionError('not asked for')\n")
    (folder / "targets.py").write_text(TARGETS)
    command = [sys.executable, "-m", "pytest", "-p", "specbench.plugin", "-p", "no:cacheprovider", *words]
    # These tests may run in a worker of xdist, under which nothing is timed.
    env = {name: one for name, one in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    env |= {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


WORDS = ("--benchmark", "--specbench-model", "none", "-k", "test_decoding", "--benchmark-autosave")


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(scope="module")
def first(where: Path) -> subprocess.CompletedProcess[str]:
    return pytest_run(where, *WORDS, "--specbench-target", "./targets.py:Wrong")


def saved(where: Path, num: int) -> dict[str, dict[str, Any]]:
    """What pytest-benchmark saved of a run, by name."""
    (file,) = where.glob(f".benchmarks/*/{num:04}_*.json")
    return {one["name"]: one for one in json.loads(file.read_text())["benchmarks"]}


def test_the_option_runs_the_suite_from_anywhere_and_nothing_else(first: subprocess.CompletedProcess[str]) -> None:
    assert "1 failed, 6 passed" in first.stdout, first.stdout + first.stderr
    assert "test_theirs" not in first.stdout
    assert first.returncode == 1


def test_a_wrong_target_is_marked_and_has_no_speedup(first: subprocess.CompletedProcess[str], where: Path) -> None:
    rows = saved(where, 1)
    names = ("plain", "transformers", "lookup_4", "transformers_lookup_4", "ngram_4", "target_plain", "target")
    assert set(rows) == {f"test_decoding[{one}]" for one in names}
    told = {name: one["extra_info"] for name, one in rows.items()}
    wrong = told.pop("test_decoding[target]")
    assert (wrong["verdict"], wrong["unverified"], wrong["speedup"]) == ("BUG", True, None)
    assert {(one["verdict"], one["unverified"]) for one in told.values()} == {("EQUAL", False)}
    assert all(one["speedup"]["n"] == one["num_prompts"] == 8 for one in told.values())
    assert all(one["num_tokens"] == 8 * 12 and one["acceptance_length"] >= 1 for one in told.values())
    assert told[f"test_decoding[{wrong['baseline'].replace(' ', '_')}]"]["speedup"]["value"] == 1.0


def test_a_later_run_is_compared_with_the_saved_one(first: subprocess.CompletedProcess[str], where: Path) -> None:
    words = [*WORDS, "--specbench-target", "./targets.py:Right", "--benchmark-compare"]
    done = pytest_run(where, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_decoding[target] (0001_" in done.stdout and "test_decoding[target] (NOW)" in done.stdout
    assert saved(where, 2)["test_decoding[target]"]["extra_info"]["verdict"] == "EQUAL"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("-n", "2"), "suites/benchmark takes times one after the other, in one process: leave out xdist's -n"),
        (("-p", "no:benchmark"), "--benchmark needs pytest-benchmark: leave out -p no:benchmark"),
    ],
    ids=["xdist", "no pytest-benchmark"],
)
def test_what_would_not_measure_is_refused(words: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    done = pytest_run(tmp_path, "--benchmark", *words)
    assert (done.returncode, done.stderr) == (4, f"ERROR: {sentence}\n\n"), done.stdout + done.stderr


def test_a_target_that_does_not_generate_ends_the_run_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("class V:\n    def verify(self, tree, target_logits, *, sampling, coins): ...\n")
    words = ["--benchmark", "--specbench-model", "none", "-k", "test_decoding", "--specbench-target", "./other.py:V"]
    done = pytest_run(tmp_path, *words)
    assert done.returncode == 4
    assert "has no generate(prompt, *, max_new_tokens, sampling, stop, seed) to measure" in done.stdout


def test_a_repetition_is_seconds_a_token_over_all_prompts() -> None:
    """(2 - 0.5) and (5 - 0.5) seconds for 3 - 1 and 5 - 1 tokens."""
    sizes = {"a": (3, 2.0), "b": (5, 5.0)}
    rows = [Row(name, "x", name, "code", 0, 7, (1,) * num, total, 0.5) for name, (num, total) in sizes.items()]
    assert repetitions(rows) == [1.0]
