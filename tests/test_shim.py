"""specbench.shim: what an adapter behind it sees, what it may return, and that nothing but answers reaches stdout."""

from __future__ import annotations

import ast
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specbench import shim

FILE = Path(str(shim.__file__))
SECONDS = 60


def talk(folder: Path, adapter: str, *requests: str, file: Path = FILE) -> tuple[list[Any], str]:
    """The answers to requests, and stderr. The interpreter sees no installed package."""
    (folder / "mine.py").write_text(adapter)
    words = [sys.executable, "-S", "-I", str(file), f"{folder / 'mine.py'}:Adapter"]
    done = subprocess.run(
        words, input="".join(f"{one}\n" for one in requests), capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def asked(method: str, number: int = 1, **params: Any) -> str:
    return json.dumps({"specbench": 1, "id": number, "method": method, "params": params})


def called(adapter: Any, method: str, **params: Any) -> Any:
    """The result, in this process."""
    return shim._Server(lambda: adapter).answer(method, params)


GENERATE = {"prompt": [1], "max_new_tokens": 2, "sampling": {}, "stop": {}, "seed": 0}
VERIFY = {
    "tree": {"tokens": [1, 2, 0], "parents": [-1, 0, 1], "draft_probs": None, "proposal": "deterministic"},
    "target_logits": [[0.5, "-inf"], ["nan", 1], [2, 3.5]],
    "sampling": {"temperature": 0.0},
    "uniforms": [0.25, 0.75],
}


# the file


def test_it_is_written_in_python_3_8() -> None:
    ast.parse(FILE.read_text("utf-8"), feature_version=(3, 8))


def test_it_imports_the_standard_library_only() -> None:
    names = set()
    for node in ast.walk(ast.parse(FILE.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {one.name.split(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).split(".")[0])
    assert names <= sys.stdlib_module_names


def test_a_copy_of_the_one_file_is_enough(tmp_path: Path) -> None:
    copy = shutil.copy(FILE, tmp_path / "shim.py")
    answers, _ = talk(tmp_path, "class Adapter:\n    vocab_size = 5", asked("hello"), file=Path(copy))
    assert answers[0]["result"]["vocab_size"] == 5


def test_a_wrong_command_line_is_told_and_ends_with_2() -> None:
    done = subprocess.run([sys.executable, str(FILE)], capture_output=True, text=True, timeout=SECONDS)
    usage = "usage: shim.py package.module:attribute or ./file.py:attribute\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", usage)


# stdin and stdout


PRINTING = """
import os, subprocess, sys
print("on import")
class Adapter:
    def reset(self):
        print("by print")
        sys.__stdout__.write("by the first stdout\\n")
        sys.__stdout__.flush()
        os.write(1, b"by a C library\\n")
        subprocess.run(["echo", "by a child"])
"""


def test_whatever_the_adapter_prints_goes_to_stderr(tmp_path: Path) -> None:
    answers, said = talk(tmp_path, PRINTING, asked("reset"))
    assert answers == [{"specbench": 1, "id": 1, "result": None}]
    wanted = ["by a C library", "by a child", "by print", "by the first stdout", "on import"]
    assert sorted(said.splitlines()) == wanted


def test_an_adapter_that_reads_stdin_takes_no_request_away(tmp_path: Path) -> None:
    adapter = "import sys\nclass Adapter:\n    def logits(self, tokens): return [[len(sys.stdin.read())]]"
    answers, _ = talk(tmp_path, adapter, asked("logits", 1, tokens=[1]), asked("logits", 2, tokens=[1]))
    assert [shim.read_matrix(one["result"]["logits"], "it") for one in answers] == [[[0.0]], [[0.0]]]


def test_it_ends_in_silence_when_nobody_reads_its_answers(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Adapter:\n    vocab_size = 5")
    words = [sys.executable, "-S", "-I", "-W", "error", str(FILE), f"{tmp_path / 'mine.py'}:Adapter"]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    process.stdout.close()
    _, said = process.communicate(asked("hello") + "\n", timeout=SECONDS)
    assert (process.returncode, said) == (0, "")


def test_serve_answers_for_an_object_of_ones_own_code(tmp_path: Path) -> None:
    shutil.copy(FILE, tmp_path / "shim_copy.py")
    code = "from shim_copy import serve\nclass Mine:\n    vocab_size = 3\nserve(Mine())\n"
    (tmp_path / "run.py").write_text(code)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "run.py")], input=asked("hello") + "\n", capture_output=True, text=True
    )
    assert json.loads(done.stdout)["result"]["name"] == "Mine"


# errors

RAISING = """
import sys
class Adapter:
    def generate(self, prompt, **options): raise RuntimeError("out of pages\\nsecond line")
    def reset(self): sys.exit(3)
"""
ERRORS = {
    "an exception": (asked("generate", **GENERATE), 1, "RuntimeError", "out of pages\nsecond line"),
    "an exit": (asked("reset"), 1, "SystemExit", "3"),
    "another version": (
        '{"specbench": 2, "id": 4, "method": "hello"}', 4, "ValueError", "this shim speaks version 1, got 2",
    ),
    "no JSON": ("hello?", None, "JSONDecodeError", "Expecting value: line 1 column 1 (char 0)"),
    "a list": ("[1]", None, "TypeError", "list indices must be integers or slices, not str"),
    "no id": ('{"specbench": 1}', None, "KeyError", "'id'"),
    "an unknown method": (
        asked("prefill"), 1, "ValueError", f"unknown method 'prefill'; known: {', '.join(shim.METHODS)}",
    ),
    "a method that is not there": (
        asked("logits", tokens=[1]), 1, "AttributeError", "'Adapter' object has no attribute 'logits'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_what_goes_wrong_is_an_error_object_and_the_next_request_is_answered(name: str, tmp_path: Path) -> None:
    request, number, kind, message = ERRORS[name]
    answers, _ = talk(tmp_path, RAISING, request, asked("shutdown", 9))
    error = answers[0]["error"]
    assert (answers[0]["id"], error["type"], error["message"]) == (number, kind, message)
    assert answers[1] == {"specbench": 1, "id": 9, "result": None}


def test_an_error_says_where_it_was_raised_and_stderr_has_the_traceback(tmp_path: Path) -> None:
    answers, said = talk(tmp_path, RAISING, asked("generate", **GENERATE))
    assert (answers[0]["error"]["where"], "Traceback" in said) == (f"{tmp_path / 'mine.py'}:4", True)


NAMES = {
    "Adapter": (ValueError, "'Adapter' must be package.module:attribute or ./file.py:attribute"),
    "./nothing.py:Adapter": (FileNotFoundError, "there is no file ./nothing.py"),
    "json:JSONDecodr": (AttributeError, "json has no 'JSONDecodr'; did you mean JSONDecoder?"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_name_is_told(name: str) -> None:
    kind, message = NAMES[name]
    with pytest.raises(kind) as caught:
        shim.find(name)
    assert str(caught.value) == message


# what the adapter sees


class Recorder:
    """Keeps what it is called with."""

    def generate(self, prompt: Any, **options: Any) -> list[int]:
        self.seen = {"prompt": prompt, **options}
        return []

    def verify(self, tree: Any, target_logits: Any, **options: Any) -> tuple[list[int], int]:
        self.seen = {"tree": tree, "target_logits": target_logits, **options}
        return [], 0

    def observe(self, result: Any) -> None:
        self.seen = result


def test_sampling_and_stop_have_the_attributes_of_our_types() -> None:
    adapter = Recorder()
    sampling = {"temperature": 0.0, "bad_words": [[1, 2]], "grammar": {"transitions": [[[0, 0]]]}}
    called(adapter, "generate", **{**GENERATE, "sampling": sampling, "stop": {"eos_token_ids": [3]}})
    seen = adapter.seen
    assert (seen["prompt"], seen["sampling"].bad_words, seen["stop"].eos_token_ids) == ([1], ((1, 2),), (3,))
    assert seen["sampling"].grammar.transitions == (((0, 0),),)


def test_the_tree_has_the_attributes_of_our_type() -> None:
    adapter = Recorder()
    called(adapter, "verify", **VERIFY)
    tree = adapter.seen["tree"]
    assert (tree.tokens, tree.parents, tree.num_nodes, tree.num_drafts) == ([1, 2, 0], [-1, 0, 1], 3, 2)
    assert (tree.depth, tree.children(0), tree.path_to(2), tree.draft_probs) == ([0, 1, 2], [1], [0, 1, 2], None)


def test_logits_are_lists_of_floats() -> None:
    adapter = Recorder()
    called(adapter, "verify", **VERIFY)
    rows = adapter.seen["target_logits"]
    assert (rows[0], math.isnan(rows[1][0]), rows[1][1:], rows[2]) == ([0.5, -math.inf], True, [1.0], [2.0, 3.5])
    assert {type(value) for row in rows for value in row} == {float}


@pytest.mark.parametrize(("arrays", "kind", "float64", "int64"), [
    ("numpy", np.ndarray, np.float64, np.int64), ("torch", torch.Tensor, torch.float64, torch.int64),
])  # fmt: skip
def test_an_adapter_may_ask_for_arrays(arrays: str, kind: type, float64: Any, int64: Any) -> None:
    adapter = Recorder()
    adapter.wire_arrays = arrays  # type: ignore[attr-defined]
    called(adapter, "verify", **VERIFY)
    seen = adapter.seen
    values = [seen["target_logits"], seen["tree"].tokens, seen["coins"].uniform(2)]
    assert [isinstance(one, kind) for one in values] == [True] * 3
    assert [one.dtype for one in values] == [float64, int64, float64]


def test_coins_are_handed_out_in_order_and_end() -> None:
    coins = shim.Coins([0.25, 0.5, 0.75], "lists")
    assert (coins.uniform(1), coins.uniform(2)) == ([0.25], [0.5, 0.75])
    with pytest.raises(ValueError) as caught:
        coins.uniform(1)
    assert str(caught.value) == "4 uniforms were drawn, the request holds 3 (docs/wire.md)"


def test_observe_is_told_a_result() -> None:
    adapter = Recorder()
    called(adapter, "observe", path=[1, 2], bonus_token=3)
    assert adapter.seen == SimpleNamespace(path=(1, 2), bonus_token=3, num_accepted=2, acceptance_length=3)


def test_a_drafter_without_reset_is_made_afresh_where_a_class_was_named() -> None:
    class Counting:
        num_made = 0

        def __init__(self) -> None:
            Counting.num_made += 1

        def draft(self, context: Any, **options: Any) -> Any:
            return SimpleNamespace(tokens=[self.num_made], parents=[-1])

    server = shim._Server(lambda: Counting)
    assert server.answer("hello", {})["methods"] == ["draft", "reset"]
    server.answer("reset", {})
    draft = {"context": [0], "max_nodes": 1, "max_depth": 1, "sampling": {}, "uniforms": []}
    assert server.answer("draft", draft)["tokens"] == [2]


def test_what_build_from_returns_answers_from_then_on() -> None:
    class Built(Recorder):
        vocab_size = 7

    server = shim._Server(lambda: SimpleNamespace(build_from=lambda checkpoint, drafter_checkpoint: Built()))
    assert server.answer("hello", {})["methods"] == ["build_from"]
    said = server.answer("build_from", {"checkpoint": "folder", "drafter_checkpoint": None})
    assert (said["methods"], said["vocab_size"]) == (["generate", "verify", "observe"], 7)
    assert server.answer("generate", dict(GENERATE)) == {"tokens": []}


# what the adapter returns

RETURNED = {
    "list": [1, 2],
    "tuple": (1, 2),
    "array": np.array([1, 2]),
    "tensor": torch.tensor([1, 2]),
    "generation": SimpleNamespace(tokens=torch.tensor([1, 2]), finish_reason=None, rounds=()),
}


@pytest.mark.parametrize("name", RETURNED)
def test_tokens_may_come_in_any_sequence(name: str) -> None:
    adapter = SimpleNamespace(generate=lambda prompt, **options: RETURNED[name])
    assert called(adapter, "generate", **GENERATE) == {"tokens": [1, 2]}


def test_rounds_may_be_objects_or_dictionaries() -> None:
    rounds = [{"path": (1,), "bonus_token": 2}, SimpleNamespace(path=torch.tensor([1]), bonus_token=2)]
    out = SimpleNamespace(tokens=[2, 2], finish_reason="length", rounds=rounds)
    adapter = SimpleNamespace(generate=lambda prompt, **options: out)
    wanted = {"path": [1], "bonus_token": 2}
    assert called(adapter, "generate", **GENERATE) == {
        "tokens": [2, 2], "finish_reason": "length", "rounds": [wanted, wanted],
    }  # fmt: skip


def test_a_declared_torch_dtype_is_said_in_our_words() -> None:
    assert called(SimpleNamespace(dtype=torch.bfloat16), "hello")["dtype"] == "bf16"


# numbers

MATRICES = {
    "no list": ("text", "it must be a list of rows, got 'text'"),
    "no row": ([1.0], "it[0] must be a list of numbers, got 1.0"),
    "ragged": ([[1.0], [1.0, 2.0]], "it[1] has 2 numbers, must have 1 as the first row"),
    "no number": ([[1.0, "one"]], 'it[0][1] must be a number or "nan", "inf", "-inf", got \'one\''),
    "null": ([[None]], 'it[0][0] must be a number or "nan", "inf", "-inf", got None'),
    "bool": ([[True]], 'it[0][0] must be a number or "nan", "inf", "-inf", got True'),
    "no shape": ({"base64": ""}, "it.shape must be two ints >= 0, got None"),
    "short": ({"base64": "AAAA", "shape": [1, 1]}, "it.base64 holds 3 bytes, must hold 8 x 1 x 1"),
}


@pytest.mark.parametrize("name", MATRICES)
def test_what_is_no_matrix_is_told_by_its_place(name: str) -> None:
    value, message = MATRICES[name]
    with pytest.raises(ValueError) as caught:
        shim.read_matrix(value, "it")
    assert str(caught.value) == message


def test_base64_is_little_endian_float64_in_row_order() -> None:
    """1.0 is 0x3FF0000000000000."""
    written = shim.write_matrix([[1.0], [0.0]], use_base64=True)
    assert written == {"base64": "AAAAAAAA8D8AAAAAAAAAAA==", "shape": [2, 1]}


@pytest.mark.parametrize("rows", [[], [[]], [[1.5, -2.0]]], ids=["no rows", "no columns", "one row"])
@pytest.mark.parametrize("use_base64", [False, True])
def test_a_matrix_of_any_shape_reads_back(rows: list[list[float]], use_base64: bool) -> None:
    assert shim.read_matrix(json.loads(json.dumps(shim.write_matrix(rows, use_base64=use_base64))), "it") == rows
