"""An engine in a process of its own: what it says comes through, and what happens to it ends nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
import time
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
from specbench.engines.engine import Answer, Missing, Mode, Refused

RAISED = {
    "raises": IndexError("row 7 of 7"),
    "refuses late": Refused("no more than two"),
    "bad value": ValueError("shapes (4,5) (3,)"),
    "leaves": SystemExit(0),
    "says nothing": MemoryError(),
    "half letters": RuntimeError("bad \\udc80 byte | `x`"),
}
AT_ONCE = {
    "refuses": Refused("no such drafts here"),
    "is not made": NotImplementedError("later"),
    "bad value at once": ValueError("shapes (4,5) (3,)"),
}
MODES = ("plain", "noisy", "dies", "hangs", "exits", "misses a package", "slow to load", *RAISED, *AT_ONCE)

class Own:
    requirements = ()
    weights = ("fp32",)
    temperature_last = False
    modes = {name: Mode() for name in MODES}

    def version(self):
        return "own 1"

    def generate(self, files, requests, settings):
        assert "torch" not in sys.modules and not hasattr(sys.modules["specbench"], "__version__")
        if settings.mode in AT_ONCE:
            raise AT_ONCE[settings.mode]
        if settings.mode == "slow to load":
            time.sleep(1.5)
        program = json.loads((files.target / "sentinel.json").read_text())["program"]
        for number, one in enumerate(requests):
            if number == 2 and settings.mode in RAISED:
                raise RAISED[settings.mode]
            if number == 2 and settings.mode == "misses a package":
                import nowhere_xyz
            if number == 2 and settings.mode == "dies":
                print("assertion failed: rows == 3", file=sys.stderr, flush=True)
                os.abort()
            if number == 2 and settings.mode == "exits":
                os._exit(0)
            if number == 2 and settings.mode == "hangs":
                os.system("sleep 60 &")
                open(__file__ + ".hangs", "w").close()
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
            new = tuple(tokens[len(one.prompt):])
            yield Answer(new, logprobs=tuple(((token, -0.5), ((token + 1) % 16, -11.5)) for token in new))

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
        ("refuses", NOT_TESTED, "refused: no such drafts here"),
        ("is not made", NOT_TESTED, "refused: NotImplementedError: later"),
        ("refuses late", BUG, "after 2 answers of 9 it raised no more than two"),
        ("bad value", BUG, "after 2 answers of 9 it raised ValueError: shapes (4,5) (3,)"),
        ("bad value at once", BUG, "after 0 answers of 9 it raised ValueError: shapes (4,5) (3,)"),
        ("misses a package", BUG, "after 2 answers of 9 it raised ModuleNotFoundError: No module named 'nowhere_xyz'"),
        ("leaves", BUG, "after 2 answers of 9 it raised SystemExit: 0"),
        ("says nothing", BUG, "after 2 answers of 9 it raised MemoryError"),
        ("half letters", BUG, "after 2 answers of 9 it raised RuntimeError: bad \\udc80 byte | `x`"),
        ("dies", BUG, "it ended its process: it was ended by SIGABRT: assertion failed: rows == 3"),
        ("exits", BUG, "after 2 answers of 9 it ended its process: it exited with 0"),
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
    (token,) = answer.tokens
    assert answer.logprobs == (((token, -0.5), ((token + 1) % 16, -11.5)),)


def test_an_engine_that_is_not_installed_says_how(own: str) -> None:
    with pytest.raises(Missing, match=r"^pip install gone$"):
        Apart(f"{own}:GONE").version()


def test_an_interpreter_that_is_none_is_named(own: str) -> None:
    with pytest.raises(RuntimeError, match=r"^/nowhere/python, asked about .*:ENGINE, cannot be run: No such"):
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
        ("1 / 0", "x", "mine.py raised ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", "x", "mine.py raised SystemExit: 3"),
        ("import os; os._exit(5)", "x", "ended its process: it exited with 5"),
        ("def x(:", "x", "mine.py raised SyntaxError: invalid syntax"),
        ("class x:\n    weights = ('fp32',)", "x", "mine.py:x is a class, must be an engine itself: ENGINE = x()"),
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


ENGINE = """
from specbench.engines.engine import Answer, Mode

class Odd:
    requirements, weights, temperature_last = (), ("fp32",), False
    modes = {"plain": Mode(), "drafts": Mode(drafts=True)}
    def version(self): return "odd | 1"
    def generate(self, files, requests, settings):
        for one in requests: yield Answer((1,) * one.max_new_tokens)

odd = Odd()
"""


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("del Odd.requirements", "it has no requirements, which must be a tuple of what pip installs for it, () for"),
        ("Odd.weights = 'fp32'", "weights = 'fp32' must be a tuple of the formats that it reads"),
        ("Odd.weights = ()", "weights = () must be a tuple of the formats that it reads"),
        ("Odd.weights = ('int4',)", "sentinel llama is not written as int4: weights must be one of bf16; "),
        ("Odd.modes = ['plain']", "modes = ['plain'] must be a dict of names to Mode"),
        ("Odd.modes = {}", "modes = {} must be a dict of names to Mode"),
        ("Odd.modes = {'plain': None}", "modes = {'plain': None} must be a dict of names to Mode"),
        ("Odd.temperature_last = 1", "temperature_last = 1 must be True or False"),
        ("Odd.generate = 3", "generate = 3 must be a function of (files, requests, settings)"),
        ("del Odd.version", "it has no version, which must be a function"),
        ("Odd.version = lambda self: 1.5", "version() gave 1.5, must be its name and version, a str"),
        ("Odd.version = lambda self: 1 / 0", "version() raised ZeroDivisionError: division by zero"),
    ],
)
def test_what_an_engine_lacks_is_said_in_a_sentence(
    change: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd.py").write_text(f"{ENGINE}\n{change}\n")
    assert cli.main(["engines", f"{tmp_path / 'odd.py'}:odd", "--max-new-tokens", "2"]) == 2
    assert sentence in capsys.readouterr().err


def test_an_engine_without_plain_decoding_is_refused_where_that_is_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd.py").write_text(f"{ENGINE}\ndel Odd.modes['plain']\n")
    assert cli.main(["engines", f"{tmp_path / 'odd.py'}:odd", "--keep-wrong"]) == 2
    assert "modes must have 'plain', which --keep-wrong asks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("python", "sentence"),
    [
        ("/nowhere/python", ", cannot be run: No such file or directory"),
        ("/bin/true", ", ended its process: it exited with 0"),
        ("/", ", cannot be run: Permission denied"),
        ("/bin/echo", ", wrote a line that is no answer: "),
    ],
)
@pytest.mark.parametrize("name", ["transformers", "own"])
def test_an_interpreter_that_is_none_is_a_sentence(
    python: str, sentence: str, name: str, own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{own}:ENGINE" if name == "own" else name
    assert cli.main(["engines", name, "--python", python]) == 2
    assert f"{python}, asked about {name}{sentence}" in capsys.readouterr().err


def test_a_file_may_import_what_lies_beside_it_and_only_where_it_runs(tmp_path: Path) -> None:
    (tmp_path / "beside_odd.py").write_text("NAME = 'beside 1'")
    (tmp_path / "odd.py").write_text(f"import beside_odd\n{ENGINE}\nOdd.version = lambda self: beside_odd.NAME\n")
    assert Apart(f"{tmp_path / 'odd.py'}:odd").version() == "beside 1"
    assert "beside_odd" not in sys.modules


def test_the_model_may_load_longer_than_an_answer_may_take(own: str) -> None:
    assert result_of(own, "slow to load", timeout=1).audit.verdict == EQUAL
    engine = Apart(f"{own}:ENGINE", timeout=1, load_timeout=0)
    (one,) = run_engine(engine, SentinelModel(), modes=["slow to load"], max_new_tokens=2)
    assert one.audit.sentence == "after 0 answers of 9 it gave no answer within 1 s, so it was ended"


def test_a_run_that_is_told_to_end_keeps_what_it_found_and_ends_the_engine(own: str, tmp_path: Path) -> None:
    """The engine hangs in its second mode, and has started a process of its own."""
    data = tmp_path / "e.json"
    words = ["engines", f"{own}:ENGINE", "--mode", "plain", "--mode", "hangs", "--json", str(data)]
    command = [sys.executable, "-m", "specbench.cli", *words, "--max-new-tokens", "2"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while not Path(f"{own}.hangs").exists():
        time.sleep(0.05)
    (worker,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.terminate()
    assert process.wait(60) == 2
    assert "interrupted: 1 mode was asked before" in process.stderr.read()
    assert [one["mode"] for one in json.loads(data.read_text())["engines"]] == ["plain"]
    assert not Path(f"/proc/{worker}").exists()


def test_a_reader_that_leaves_takes_no_result_with_it(own: str, tmp_path: Path) -> None:
    data = tmp_path / "e.json"
    words = f"engines {own}:ENGINE --mode plain --mode noisy --max-new-tokens 2 --json {data}"
    line = f"{sys.executable} -m specbench.cli {words} | head -n 2 > /dev/null; exit ${{PIPESTATUS[0]}}"
    assert subprocess.run(["bash", "-c", line]).returncode == 141
    assert "plain" in [one["mode"] for one in json.loads(data.read_text())["engines"]]


def test_what_was_found_is_written_wherever_it_can_be(
    own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder of --json vanishes while the engine runs; its last words hold half a letter and Markdown's marks."""
    gone, page = tmp_path / "gone", tmp_path / "e.md"
    gone.mkdir()
    text = OWN.replace(
        "def generate(self",
        f"def generate(self, *given):\n        import shutil; "
        f"shutil.rmtree({str(gone)!r}, ignore_errors=True)\n        yield from self.rest(*given)\n\n"
        "    def rest(self",
    )
    Path(own).write_text(text)
    words = ["engines", f"{own}:ENGINE", "--mode", "half letters", "--max-new-tokens", "2"]
    assert cli.main([*words, "--json", str(gone / "e.json"), "--markdown", str(page)]) == 2
    assert f"cannot write {gone / 'e.json'}: No such file or directory" in capsys.readouterr().err
    assert r"it raised RuntimeError: bad \\udc80 byte \| \`x\`" in page.read_text("utf-8")
