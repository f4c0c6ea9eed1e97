"""An engine in a process of its own: what it says comes through, and what happens to it ends nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path
from zipfile import ZipFile

import pytest

from specbench import cli
from specbench.engine_models import SentinelModel
from specbench.engine_run import Result, run_engine
from specbench.engines import Missing
from specbench.engines.apart import Apart, environment
from specbench.record import BUG, EQUAL, NOT_TESTED

OWN = """
import json, os, sys, time
from specbench.engines.engine import Answer, Missing, Mode

class Own:
    requirements = ()
    weights = ("fp32",)
    temperature_last = False
    modes = {name: Mode() for name in ("plain", "noisy", "raises", "refuses", "dies", "hangs", "exits", "goes on")}

    def version(self):
        return "own 1"

    def generate(self, files, requests, settings):
        assert "torch" not in sys.modules and not hasattr(sys.modules["specbench"], "__version__")
        program = json.loads((files.target / "sentinel.json").read_text())["program"]
        for number, one in enumerate(requests):
            if number == 2 and settings.mode == "raises":
                raise IndexError("row 7 of 7")
            if number == 2 and settings.mode == "refuses":
                raise ValueError("no more than two")
            if number == 2 and settings.mode == "dies":
                print("assertion failed: rows == 3", file=sys.stderr, flush=True)
                os.abort()
            if number == 2 and settings.mode == "exits":
                os._exit(0)
            if number == 2 and settings.mode == "hangs":
                os.system("sleep 60 &")
                time.sleep(60)
            if settings.mode == "noisy":
                print("loading", "x" * 100_000, flush=True)
                os.write(1, b"from C\\n")
            rows, tokens = [list(one.prompt)], list(one.prompt)
            for _ in range(one.max_new_tokens):
                states = tokens
                for layer, table in enumerate(program["tables"]):
                    states = [
                        state if state == 16 else table[state][states[max(0, at - 2**layer)]]
                        for at, state in enumerate(states)
                    ]
                tokens = [*tokens, states[-1]]
            yield Answer(tuple(tokens[len(one.prompt):]), logprobs=(((1, -0.5), (2, -11.5)),))

class Gone(Own):
    def version(self):
        raise Missing("pip install gone")

ENGINE, GONE = Own(), Gone()
"""


MINE = """
import json

def program_of(folder):
    tables = json.loads((folder / "sentinel.json").read_text())["program"]["tables"]

    def next_token(states):
        for layer, table in enumerate(tables):
            states = [
                state if state == 16 else table[state][states[max(0, at - 2**layer)]] for at, state in enumerate(states)
            ]
        return states[-1]

    return next_token

def load(target, drafter):
    right, draft = program_of(target), drafter and program_of(drafter)

    def generate(prompt, num):
        tokens = list(prompt)
        for at in range(num):
            tokens.append((draft if draft and at % 7 == 6 else right)(tokens))
        return tokens[len(prompt):]

    return generate
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def result_of(own: str, mode: str, *, timeout: float = 60) -> Result:
    engine = Apart(f"{own}:ENGINE", timeout=timeout)
    (one,) = run_engine(engine, SentinelModel(), modes=[mode], max_new_tokens=2)
    return one


@pytest.mark.parametrize("mode", ["plain", "noisy"])
def test_answers_come_through_whatever_else_is_printed(own: str, mode: str) -> None:
    one = result_of(own, mode)
    assert (one.engine, one.audit.verdict, one.audit.num_tokens) == ("own 1", EQUAL, 18)


@pytest.mark.parametrize(
    ("mode", "verdict", "sentence"),
    [
        ("raises", BUG, "after 2 answers of 9 it raised IndexError: row 7 of 7"),
        ("refuses", NOT_TESTED, "refused: ValueError: no more than two"),
        ("dies", BUG, "it ended its process: it was ended by SIGABRT: assertion failed: rows == 3"),
        ("exits", BUG, "after 2 answers of 9 it gave 2 answers to 9 requests"),
    ],
)
def test_the_end_of_a_mode_is_told(own: str, mode: str, verdict: str, sentence: str) -> None:
    one = result_of(own, mode)
    assert one.audit.verdict == verdict
    assert sentence in one.audit.sentence


def test_a_mode_that_hangs_is_ended_with_all_that_it_has_started(own: str) -> None:
    one = result_of(own, "hangs", timeout=1)
    assert one.audit.verdict == BUG
    assert "it gave no answer within 1 s, so it was ended" in one.audit.sentence
    assert one.seconds < 30


def test_logprobs_come_through(own: str, tmp_path: Path) -> None:
    from specbench.engines import Request, Settings

    files = SentinelModel().write(tmp_path / "files", "fp32")
    (answer,) = Apart(f"{own}:ENGINE").generate(files, [Request((16, 3), "3", 1)], Settings("plain", "fp32"))
    assert answer.logprobs == (((1, -0.5), (2, -11.5)),)


def test_an_engine_that_is_not_installed_says_how(own: str) -> None:
    with pytest.raises(Missing, match=r"^pip install gone$"):
        Apart(f"{own}:GONE").version()


def test_an_interpreter_that_is_none_is_named(own: str) -> None:
    with pytest.raises(RuntimeError, match=r"^/nowhere/python cannot be run: No such file"):
        Apart(f"{own}:ENGINE", python="/nowhere/python").version()


def test_an_environment_is_made_once_and_holds_what_it_should(own: str, tmp_path: Path) -> None:
    wheel = tmp_path / "tiny_engine-1-py3-none-any.whl"
    with ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_engine.py", "")
        archive.writestr("tiny_engine-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-engine\nVersion: 1\n")
        archive.writestr(
            "tiny_engine-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_engine-1.dist-info/RECORD", "")
    (tmp_path / "own.py").write_text(OWN.replace("requirements = ()", f"requirements = ({str(wheel)!r},)"))
    told: list[str] = []
    python = environment(f"{own}:ENGINE", tmp_path / "env", tell=told.append)
    assert environment(f"{own}:ENGINE", tmp_path / "env", tell=told.append) == python
    assert [line.split(" -m ")[1].split()[0] for line in told] == ["venv", "pip"]
    assert subprocess.run([python, "-c", "import tiny_engine"]).returncode == 0
    assert Apart(f"{own}:ENGINE", python=python).version() == "own 1"


def test_an_environment_that_cannot_be_filled_says_why(own: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN.replace("requirements = ()", "requirements = ('./nowhere.whl',)"))
    with pytest.raises(ValueError, match=r"-m pip install .*nowhere.whl failed with 1: ERROR: "):
        environment(f"{own}:ENGINE", tmp_path / "env", tell=lambda line: None)


def test_a_folder_that_is_no_environment_is_left_alone(own: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is there and no virtual environment"):
        environment(f"{own}:ENGINE", tmp_path)


def test_a_plain_callable_is_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong behind its drafter in one token of seven, right without."""
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    assert cli.main(["engines", f"{file}:load", "--max-new-tokens", "30"]) == 1
    out = capsys.readouterr().out
    assert "plain                      EQUAL" in out
    assert "drafter                    BUG" in out


@pytest.mark.parametrize(
    ("text", "attribute", "sentence"),
    [
        ("x = 3", "x", "must be an engine"),
        ("x = 3", "y", "has no 'y'"),
        ("1 / 0", "x", "raised ZeroDivisionError on import"),
        (None, "x", "there is no file"),
    ],
)
def test_a_file_that_holds_no_engine_is_refused(
    text: str | None, attribute: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    assert cli.main(["engines", f"{tmp_path / 'mine.py'}:{attribute}"]) == 2
    assert sentence in capsys.readouterr().err
