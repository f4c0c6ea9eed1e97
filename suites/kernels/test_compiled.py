"""Kernels compile for GPUs that are not here. `.ci/full` compiles all; here one is, and its table is read."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "specbench.kernels.compiled", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_a_kernel_is_compiled_and_its_cost_told(target: str) -> None:
    told = run("mask", "--target", target)
    assert (told.returncode, told.stderr) == (0, "")
    cells = [one.strip() for one in told.stdout.splitlines()[-1].strip("|").split("|")]
    assert cells[:2] == ["mask, 256 nodes", target]
    assert 8 <= int(cells[2]) <= 255 and int(cells[3]) == 0


def test_a_name_that_nothing_has_is_told() -> None:
    told = run("nothing")
    assert (told.returncode, told.stderr) == (2, "no specialisation has nothing in its name\n")
