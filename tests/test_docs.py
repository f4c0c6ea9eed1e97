"""Every fenced code block of DOCUMENTS is run, here or by .ci/run, or says that it is no code to run.

Unmarked `python` and `bash` blocks are run here, from the root of the checkout. A comment on the line before a block
says otherwise: `<!-- ci: NAME -->` (.ci/run executes it), `<!-- output of: COMMAND -->`, `<!-- example -->`,
`<!-- session -->` (Python that goes on from the session's blocks before it; what it prints is the block behind it,
marked `<!-- printed -->`), `<!-- smoke: WORDS -->` (run with WORDS added, on a tiny model in place of smollm2).
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("README.md", "DEVELOPERS.md", "docs/benchmarks.md", "docs/kernels.md", "docs/ladder.md")
DOCUMENTS = [name for name in NAMES if (ROOT / name).is_file()]
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


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that a command can take for smollm2, whose words are few."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from specbench.reference.model import LlamaConfig, tiny_llama

    words = ["?", *"the a of and to in is it that for you . , : what how write this one as be".split()]
    config = LlamaConfig(len(words), 32, 48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8)
    folder = tmp_path_factory.mktemp("docs") / "tiny"
    tiny_llama(config, seed=5).to(torch.float32).save(folder)
    inner = Tokenizer(models.WordLevel({word: idx for idx, word in enumerate(words)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("where", BLOCKS)
def test_code_block_runs_or_says_why_not(where: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    block = BLOCKS[where]
    if block.marker.startswith("smoke: "):
        block = smoke(block, request.getfixturevalue("tiny_model"), tmp_path)
    complaint = complaint_about(block, where.split(":")[0], (ROOT / ".ci" / "run").read_text("utf-8"))
    assert complaint == "", f"{where}: {complaint}"


def smoke(block: ci_blocks.Block, model: Path, folder: Path) -> ci_blocks.Block:
    """The block's command on a tiny model, with its marker's words added; OUT is a folder to write to."""
    text = block.text.rstrip("\n").replace("smollm2", str(model)) + " " + block.marker.removeprefix("smoke: ")
    return ci_blocks.Block(block.line, block.language, "", text.replace("OUT", str(folder / "out")) + "\n")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_session_prints_what_it_is_said_to(name: str) -> None:
    blocks = [block for where, block in BLOCKS.items() if where.startswith(f"{name}:")]
    scope: dict[str, object] = {}
    for block, printed in zip(blocks, [*blocks[1:], None], strict=True):
        if block.marker == "session":
            with contextlib.redirect_stdout(io.StringIO()) as said:
                exec(compile(block.text, f"{name}:{block.line}", "exec"), scope)
            expected = printed.text if printed is not None and printed.marker == "printed" else ""
            assert said.getvalue() == expected, f"{name}:{block.line}"


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
    "a session's": ("<!-- session -->\n```python\n1 / 0\n```", ""),  # it is run by a test of its own
    "a session in another language": ("<!-- session -->\n```bash\nexit 3\n```", "a session is python"),
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
    if block.marker == "session":
        return "" if block.language == "python" else "a session is python"
    if block.marker in ("example", "printed") or block.marker.startswith("output of: "):
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
