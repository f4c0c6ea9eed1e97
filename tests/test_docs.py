"""Every fenced code block of DOCUMENTS is run, here or by .ci/run, or says that it is no code to run.

Unmarked `python` and `bash` blocks are run here, from the root of the checkout. A comment on the line before a block
says otherwise: `<!-- ci: NAME -->` (.ci/run executes it), `<!-- output of: COMMAND -->`, `<!-- example -->`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    name for name in ("README.md", "DEVELOPERS.md", "docs/benchmarks.md", "docs/kernels.md") if (ROOT / name).is_file()
]
RUNNERS = {"python": [sys.executable, "-"], "bash": ["bash", "-euo", "pipefail", "-s"]}
SECONDS = 120


def load_blocks() -> ModuleType:
    """`.ci/blocks.py`, which CI uses to run the marked blocks: one reader of Markdown, not two."""
    spec = importlib.util.spec_from_file_location("ci_blocks", ROOT / ".ci" / "blocks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


ci_blocks = load_blocks()
BLOCKS = {
    f"{name}:{block.line}": block
    for name in DOCUMENTS
    for block in ci_blocks.blocks_of((ROOT / name).read_text("utf-8"))
}


@pytest.mark.parametrize("where", BLOCKS)
def test_code_block_runs_or_says_why_not(where: str) -> None:
    complaint = complaint_about(BLOCKS[where], where.split(":")[0], (ROOT / ".ci" / "run").read_text("utf-8"))
    assert complaint == "", f"{where}: {complaint}"


def test_readme_has_the_two_commands_that_ci_runs() -> None:
    readme = [block.marker for where, block in BLOCKS.items() if where.startswith("README.md")]
    assert [marker for marker in readme if marker.startswith("ci: ")][:2] == ["ci: main-job", "ci: tests"]


COMPLAINTS = {
    "fine": ("```python\nassert True\n```", ""),
    "fails": ("```bash\nexit 3\n```", "exit code 3\n"),
    "no language": (
        "```\ntext\n```",
        "mark it <!-- example --> or <!-- output of: COMMAND -->, or name its language: python, bash",
    ),
    "example": ("<!-- example -->\n```\ntext\n```", ""),
    "output": ("<!-- output of: specbench claims -->\n\n```text\ntree.mask\n```", ""),
    "example that is code": (
        "<!-- example -->\n```python\n1 / 0\n```",
        "a python block is code: run it, or let .ci/run do so with <!-- ci: NAME -->",
    ),
    "run by ci": ("<!-- ci: main-job -->\n```bash\nexit 3\n```", ""),
    "run by nobody": ("<!-- ci: nobody -->\n```bash\nexit 3\n```", ".ci/run has no `block README.md nobody`"),
    "marker of another block": (
        "<!-- example -->\nSome text.\n```\ntext\n```",
        "mark it <!-- example --> or <!-- output of: COMMAND -->, or name its language: python, bash",
    ),
}


@pytest.mark.parametrize("case", COMPLAINTS)
def test_complaint_about_a_code_block(case: str) -> None:
    markdown, complaint = COMPLAINTS[case]
    (block,) = ci_blocks.blocks_of(markdown)
    assert complaint_about(block, "README.md", ci_script="job x 1 block README.md main-job\n") == complaint


def test_block_that_is_never_closed_is_told_by_line() -> None:
    with pytest.raises(ValueError) as caught:
        ci_blocks.blocks_of("one\n```bash\ntwo\n")
    assert str(caught.value) == "line 2: the code block is never closed"


def complaint_about(block: ci_blocks.Block, document: str, ci_script: str) -> str:
    """Runs the block when it is to be run here; "" when all is well."""
    if block.marker.startswith("ci: "):
        call = f"block {document} {block.marker.removeprefix('ci: ')}"
        return "" if f"{call}\n" in ci_script else f".ci/run has no `{call}`"
    if block.marker == "example" or block.marker.startswith("output of: "):
        code = block.language in RUNNERS
        return f"a {block.language} block is code: run it, or let .ci/run do so with <!-- ci: NAME -->" if code else ""
    if block.language not in RUNNERS:
        return f"mark it <!-- example --> or <!-- output of: COMMAND -->, or name its language: {', '.join(RUNNERS)}"
    scripts = Path(sys.executable).parent
    path = os.pathsep.join([str(scripts), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    command = RUNNERS[block.language]
    done = subprocess.run(
        command, input=block.text, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    return "" if done.returncode == 0 else f"exit code {done.returncode}\n{done.stderr[-2000:]}"
