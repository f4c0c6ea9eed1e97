"""specbench.wire: what crosses, what each way of breaking the schema is called, and verdicts on engines run for real.

Engines are small scripts that start in milliseconds; the compiled one is built from examples/ if there is a compiler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_plugin import suite

from specbench import shim
from specbench.judge import Failed, RunSession
from specbench.loading import TargetError, load_target
from specbench.profiles import profile_named
from specbench.protocols import SeededCoins
from specbench.tree import DraftTree
from specbench.types import GREEDY, NEVER_STOP, Automaton, Generation, Request, Round, Sampling, Stop, VerifyResult
from specbench.wire import MAX_ENGINES, MAX_HANGS, Command, WireAdapter
from specbench.wire_process import EngineHung, RemoteError, WireError

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "wire.md"
SECONDS = 60.0  # for an engine that is going to answer

PRELUDE = """
import json, os, sys, time
def read():
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    return json.loads(line)
def write(line):
    sys.stdout.buffer.write(line if isinstance(line, bytes) else line.encode())
    sys.stdout.buffer.flush()
def say(number, **parts):
    write(json.dumps({"specbench": 1, "id": number, **parts}) + "\\n")
def hello(*methods, **parts):
    say(read()["id"], result={"methods": list(methods), **parts})
"""

# Answers every request with an error that holds its params.
ECHO = """
hello(*"build_from logits generate generate_batch verify draft observe reset".split(), features=FEATURES)
while True:
    request = read()
    say(request["id"], error={"type": "Echo", "message": json.dumps(request["params"])})
"""


def command(code: str, **options: Any) -> Command:
    """An engine that runs `code` behind the prelude."""
    return Command([sys.executable, "-I", "-S", "-c", PRELUDE + code], **{"timeout": SECONDS, **options})


@pytest.fixture
def start() -> Iterator[Callable[..., WireAdapter]]:
    commands = []

    def run(code: str, **options: Any) -> WireAdapter:
        commands.append(command(code, **options))
        return commands[-1].adapter()

    yield run
    for one in commands:
        one.close()


def echo(call: Callable[[], Any]) -> Any:
    """The params that the engine was sent."""
    with pytest.raises(RemoteError) as caught:
        call()
    return json.loads(str(caught.value))


def generate(adapter: WireAdapter, prompt: list[int] | None = None) -> Any:
    return adapter.generate(prompt or [1], max_new_tokens=2, sampling=GREEDY, stop=NEVER_STOP, seed=0)


def verify(adapter: WireAdapter) -> Any:
    return adapter.verify(DraftTree.of([1, 2], [-1, 0]), torch.zeros(2, 3), sampling=GREEDY, coins=SeededCoins(0))


# what crosses


def test_sampling_and_stop_are_sent_with_every_field_of_their_types(start: Callable[..., WireAdapter]) -> None:
    params = echo(lambda: generate(start(ECHO.replace("FEATURES", "[]"))))
    sent = [list(params["sampling"]), list(params["stop"])]
    assert sent == [[one.name for one in dataclasses.fields(kind)] for kind in (Sampling, Stop)]


def test_the_values_of_sampling_and_stop_arrive(start: Callable[..., WireAdapter]) -> None:
    sampling = Sampling(temperature=0.7, top_k=3, bad_words=((1, 2),), grammar=Automaton((((0, 0), (1, 0)),)))
    request = Request((1, 2), 3, sampling, Stop((4,), ((5, 6),), 1), 9)
    adapter = start(ECHO.replace("FEATURES", "[]"))
    (params,) = echo(lambda: adapter.generate_batch([request]))["requests"]
    assert (params["prompt"], params["max_new_tokens"], params["seed"]) == ([1, 2], 3, 9)
    assert params["stop"] == {"eos_token_ids": [4], "stop_sequences": [[5, 6]], "min_new_tokens": 1}
    kept = ("temperature", "top_k", "bad_words", "grammar")
    assert [params["sampling"][name] for name in kept] == [0.7, 3, [[1, 2]], {"transitions": [[[0, 0], [1, 0]]]}]


def test_a_callable_is_refused_by_the_name_of_its_field(start: Callable[..., WireAdapter]) -> None:
    adapter = start(ECHO.replace("FEATURES", "[]"))
    sampling = Sampling(processors=(lambda text, logits: logits,))
    with pytest.raises(WireError) as caught:
        adapter.generate([1], max_new_tokens=1, sampling=sampling, stop=NEVER_STOP, seed=0)
    assert (
        str(caught.value) == "sampling.processors[0] is a function, which JSON lines cannot carry: judge it in process"
    )


NUMBERS = [
    [0.1, -0.0, 5e-324, 1.7976931348623157e308],
    [float("nan"), float("inf"), float("-inf"), 1 / 3],
]


@pytest.mark.parametrize("features", ["[]", "['base64']"])
def test_logits_reach_the_engine_bit_for_bit(features: str, start: Callable[..., WireAdapter]) -> None:
    logits = torch.tensor(NUMBERS, dtype=torch.float64)
    adapter = start(ECHO.replace("FEATURES", features))
    tree = DraftTree.of([1, 2], [-1, 0])
    params = echo(lambda: adapter.verify(tree, logits, sampling=GREEDY, coins=SeededCoins(0)))
    assert isinstance(params["target_logits"], dict) == ("base64" in features)
    arrived = torch.tensor(shim.read_matrix(params["target_logits"], "it"), dtype=torch.float64)
    assert torch.equal(arrived.view(torch.int64), logits.view(torch.int64))


@pytest.mark.parametrize("use_base64", [False, True])
def test_logits_come_back_bit_for_bit(use_base64: bool, start: Callable[..., WireAdapter]) -> None:
    logits = torch.tensor(NUMBERS, dtype=torch.float64)
    matrix = json.dumps(shim.write_matrix(logits, use_base64=use_base64))
    adapter = start(f"hello('logits')\nsay(read()['id'], result={{'logits': json.loads({matrix!r})}})\nread()")
    assert torch.equal(adapter.logits([1, 2]).view(torch.int64), logits.view(torch.int64))


def test_a_tree_crosses_with_its_draft_probs(start: Callable[..., WireAdapter]) -> None:
    probs = torch.tensor([[0.25, 0.75], [0.5, 0.5]], dtype=torch.float32)
    tree = DraftTree(torch.tensor([1, 0]), torch.tensor([-1, 0]), probs, "iid")
    adapter = start(ECHO.replace("FEATURES", "[]"))
    params = echo(lambda: adapter.verify(tree, torch.zeros(2, 2), sampling=GREEDY, coins=SeededCoins(0)))
    assert params["tree"] == {
        "tokens": [1, 0],
        "parents": [-1, 0],
        "draft_probs": [[0.25, 0.75], [0.5, 0.5]],
        "proposal": "iid",
    }


def test_four_uniforms_are_sent_for_each_node(start: Callable[..., WireAdapter]) -> None:
    adapter = start(ECHO.replace("FEATURES", "[]"))
    sent = [echo(lambda: verify(adapter))["uniforms"]]
    sent += [
        echo(lambda: adapter.draft([1], max_nodes=2, max_depth=2, sampling=GREEDY, coins=SeededCoins(0)))["uniforms"]
    ]
    assert sent == [SeededCoins(0).uniform(num).tolist() for num in (8, 12)]


def test_an_answer_becomes_our_types(start: Callable[..., WireAdapter]) -> None:
    one = {"tokens": [1, 2], "parents": [-1, 0], "path": [1], "bonus_token": 0, "emitted": [2, 0], "prefix_len": 0,
           "num_rows": 2, "mask_bytes": 4}  # fmt: skip
    answers = [
        {"tokens": [2, 0], "finish_reason": "length", "rounds": [one]},
        {"tokens": [2, 0]},
        {"path": [1], "bonus_token": 0},
        {"tokens": [1, 0], "parents": [-1, 0], "draft_probs": [[1, 0], [0.5, 0.5]], "proposal": "iid"},
    ]
    adapter = start(
        f"hello('generate', 'verify', 'draft')\nfor one in json.loads({json.dumps(answers)!r}): "
        "say(read()['id'], result=one)\nread()"
    )
    got = [generate(adapter), generate(adapter), verify(adapter)]
    got += [adapter.draft([1], max_nodes=2, max_depth=2, sampling=GREEDY, coins=SeededCoins(0))]
    assert got == [
        Generation((2, 0), "length", (Round((1, 2), (-1, 0), (1,), 0, (2, 0), 0, 2, 4),)),
        [2, 0],
        VerifyResult((1,), 0),
        DraftTree(torch.tensor([1, 0]), torch.tensor([-1, 0]), torch.tensor([[1, 0], [0.5, 0.5]]).double(), "iid"),
    ]


def test_a_method_that_the_engine_does_not_list_is_no_attribute(start: Callable[..., WireAdapter]) -> None:
    adapter = start(
        "hello('verify', dtype='bf16', vocab_size=7, checkpoint='folder', features=['penalties', 'base64'])\nread()"
    )
    assert [hasattr(adapter, name) for name in ("verify", "generate", "build_from", "hello")] == [True] + [False] * 3
    assert (adapter.dtype, adapter.vocab_size, adapter.checkpoint, adapter.features) == (
        "bf16", 7, "folder", ("penalties",),
    )  # fmt: skip


# engines that break the schema: what hello or the first verify is answered with, and the sentence

HELLO = "hello('verify')\n"
SENTENCES = {
    "garbage": (
        HELLO + "read(); write('Segmentation fault at 0x0\\n'); read()",
        "a line of stdout is no JSON object (print to stderr instead): 'Segmentation fault at 0x0'",
    ),
    "banner before hello": (
        "write('Loading model...\\n'); hello('verify'); read()",
        "a line of stdout is no JSON object (print to stderr instead): 'Loading model...'",
    ),
    "list": (
        HELLO + "read(); write('[1, 2]\\n'); read()",
        "a line of stdout is no JSON object (print to stderr instead): '[1, 2]'",
    ),
    "deep nesting": (
        HELLO + "read(); write('[' * 100000 + '\\n'); read()",
        f"a line of stdout is no JSON object (print to stderr instead): '{'[' * 47}...'",
    ),
    "other JSON logs": (
        HELLO + 'read(); write(\'{"level": "info"}\\n\'); read()',
        'a line of stdout has no "specbench": 1 (print to stderr instead): \'{"level": "info"}\'',
    ),
    "other version": (
        'write(\'{"specbench": 2, "id": 1, "result": {}}\\n\'); read()',
        "the engine speaks version 2, this specbench 1",
    ),
    "version true": (
        'write(\'{"specbench": true, "id": 1, "result": {}}\\n\'); read()',
        "the engine speaks version True, this specbench 1",
    ),
    "not UTF-8": (
        HELLO + "read(); write(b'\\xff\\xfe\\n'); read()",
        "a line of stdout is not UTF-8 (invalid start byte): '\\\\xff\\\\xfe'",
    ),
    "terminal escapes": (
        HELLO + "read(); write(b'\\x1b[2J\\n'); read()",
        "a line of stdout is no JSON object (print to stderr instead): '\\\\x1b[2J'",
    ),
    "bare NaN": (
        HELLO + 'read(); write(\'{"specbench": 1, "id": 2, "result": NaN}\\n\'); read()',
        'NaN is no JSON number (write "nan", "inf", "-inf"): \'{"specbench": 1, "id": 2, "result": NaN}\'',
    ),
    "wrong id": (
        HELLO + "read(); say(7, result=None); read()",
        'id = 7 must be 2, the request\'s: \'{"specbench": 1, "id": 7, "result": null}\'',
    ),
    "id as text": (
        HELLO + "read(); say('2', result=None); read()",
        'id = \'2\' must be 2, the request\'s: \'{"specbench": 1, "id": "2", "result": null}\'',
    ),
    "answered twice": (
        "number = read()['id']; say(number, result={'methods': ['verify']}); say(number, result=3); read(); read()",
        'request 1 was answered twice: \'{"specbench": 1, "id": 1, "result": 3}\'',
    ),
    "neither result nor error": (
        HELLO + "read(); say(2); read()",
        'an answer must have either result or error: \'{"specbench": 1, "id": 2}\'',
    ),
    "malformed error": (
        HELLO + "read(); say(2, error='bad'); read()",
        "error must be an object with a type and a message, got 'bad'",
    ),
    "dies with words": (
        HELLO + "read(); sys.stderr.write('CUDA error:\\nout of memory\\n'); sys.exit(3)",
        "engine ended with exit code 3 during verify; stderr ends: out of memory",
    ),
    "dies in silence": (
        HELLO + "read(); os._exit(0)",
        "engine ended with exit code 0 during verify; nothing on stderr",
    ),
    "aborts": (HELLO + "read(); os.abort()", "engine was ended by SIGABRT during verify; nothing on stderr"),
    "dies mid-answer": (
        HELLO + 'read(); write(\'{"specbench": 1, "id"\'); sys.exit(1)',
        'engine ended with exit code 1 in the middle of line \'{"specbench": 1, "id"\'; nothing on stderr',
    ),
    "closes stdout": (
        HELLO + "read(); os.close(1); sys.stdin.read()",
        "engine closed its stdout during verify; nothing on stderr",
    ),
    "gone before the question": (
        HELLO + "os._exit(5)",
        "engine ended with exit code 5 during verify; nothing on stderr",
    ),
    "a child keeps stdout open": (
        HELLO + "read()\nif os.fork(): os._exit(6)\ntime.sleep(600)",
        "engine ended with exit code 6 during verify; nothing on stderr",
    ),
    "result of another kind": (
        HELLO + "read(); say(2, result=[1]); read()",
        "verify: result must be an object, got [1]",
    ),
    "misspelt field": (
        HELLO + "read(); say(2, result={'path': [], 'bonus': 1}); read()",
        "verify: the result has no 'bonus_token'; did you mean it by 'bonus'?",
    ),
    "node as float": (
        HELLO + "read(); say(2, result={'path': [1.0], 'bonus_token': 1}); read()",
        "verify: path[0] must be an int of 64 bits, got 1.0",
    ),
    "huge token": (
        HELLO + "read(); say(2, result={'path': [], 'bonus_token': 1 << 70}); read()",
        "verify: bonus_token must be an int of 64 bits, got 1180591620717411303424",
    ),
    "path as text": (
        HELLO + "read(); say(2, result={'path': '1', 'bonus_token': 1}); read()",
        "verify: path must be a list of ints, got '1'",
    ),
    "error object": (
        HELLO + "read(); say(2, error={'type': 'RuntimeError', 'message': 'out of memory'}); read()",
        "out of memory",
    ),
    "unknown method in hello": (
        "hello('verfy'); read()",
        "hello: unknown method 'verfy'; did you mean verify?",
    ),
    "no methods in hello": ("say(read()['id'], result={}); read()", "hello: the result has no 'methods'"),
    "unknown dtype in hello": (
        "hello('verify', dtype='float'); read()",
        "hello: dtype = 'float' must be one of fp64, fp32, bf16, fp16",
    ),
    "processors in hello": (
        "hello('verify', features=['processors']); read()",
        "hello: features names processors, which are callables and cannot cross the wire",
    ),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_a_broken_schema_is_told_in_one_sentence(name: str) -> None:
    code, sentence = SENTENCES[name]
    one = command(code)
    with pytest.raises(WireError) as caught:
        verify(one.adapter())
    one.close()
    assert str(caught.value) == sentence


def test_the_type_of_an_error_object_is_the_name_of_the_exception(start: Callable[..., WireAdapter]) -> None:
    adapter = start(HELLO + "say(read()['id'], error={'type': 'OutOfPages', 'message': 'no'})\nread()")
    with pytest.raises(RemoteError) as caught:
        verify(adapter)
    assert type(caught.value).__name__ == "OutOfPages"


def test_a_giant_line_is_cut_off_while_it_is_being_written() -> None:
    one = command(HELLO + "read()\nwhile True: write('x' * 65536)", max_line=1 << 20)
    with pytest.raises(WireError) as caught:
        verify(one.adapter())
    one.close()
    assert str(caught.value) == f"verify was answered by a line of over {1 << 20} bytes: '{'x' * 47}...'"


def test_a_hang_ends_the_engine_its_children_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "child"
    code = HELLO + f"read()\nchild = os.fork()\nif child: open({str(file)!r}, 'w').write(str(child))\ntime.sleep(600)"
    one = command(code, timeout=2.0)
    adapter = one.adapter()
    with pytest.raises(EngineHung) as caught:
        verify(adapter)
    assert str(caught.value) == (
        "verify was not answered within 2 s, engine killed: "
        "give --specbench-timeout SECONDS if it needs longer, otherwise it hangs"
    )
    until(lambda: is_dead(int(file.read_text())))


def test_a_hanging_engine_ends_with_the_process_that_asks_it(tmp_path: Path) -> None:
    """Killed from outside, as an isolated run ends a worker, that process can end nothing itself."""
    file = tmp_path / "engine"
    asking, report = os.fork(), f"open({str(file)!r}, 'w').write(str(os.getpid()) + '.')"
    if asking == 0:
        with contextlib.suppress(BaseException):
            verify(command(HELLO + f"read(); {report}; time.sleep(600)").adapter())
        os._exit(1)
    until(lambda: file.exists() and file.read_text().endswith("."))
    os.kill(asking, signal.SIGKILL)
    os.waitpid(asking, 0)
    until(lambda: is_dead(int(file.read_text()[:-1])))


def is_dead(process: int) -> bool:
    """Gone, or ended and not yet collected by init."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def until(condition: Callable[[], bool]) -> None:
    """Returns once the condition holds; fails when it never does."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_megabytes_on_stderr_do_not_stop_an_engine(start: Callable[..., WireAdapter]) -> None:
    adapter = start(
        HELLO + "read(); sys.stderr.write('x' * (1 << 22)); say(2, result={'path': [], 'bonus_token': 1})\nread()"
    )
    assert verify(adapter) == VerifyResult((), 1)


def test_a_request_larger_than_any_pipe_is_read_while_the_engine_prints(start: Callable[..., WireAdapter]) -> None:
    """Writing all of it before reading anything would wait for ever."""
    adapter = start(
        "hello('verify', features=['base64'])\nsys.stderr.write('y' * (1 << 20))\nrequest = read()\n"
        "say(2, result={'path': [], 'bonus_token': len(request['params']['target_logits']['base64'])})\nread()"
    )
    result = adapter.verify(DraftTree.of([1], [-1]), torch.zeros(1, 300_000), sampling=GREEDY, coins=SeededCoins(0))
    assert result.bonus_token == 300_000 * 8 * 4 // 3


# crashes, instances

# Writes a line when it starts; crashes on prompt [13]; else answers with the checkpoint it was built from.
COUNTING = """
with open(FILE, "a") as file:
    file.write("started\\n")
built = "nothing"
while True:
    request = read()
    method, params = request["method"], request.get("params")
    if method == "hello":
        result = {"methods": ["build_from", "generate", "draft", "reset"]}
    elif method == "build_from":
        built, result = params["checkpoint"], None
    elif method == "draft":
        result = {"tokens": [params["context"][-1]], "parents": [-1]}
    elif params.get("prompt") == [13]:
        sys.exit(9)
    else:
        result = {"tokens": [int(built)]}
    say(request["id"], result=result)
"""


@pytest.fixture
def counted(tmp_path: Path, start: Callable[..., WireAdapter]) -> tuple[WireAdapter, Callable[[], int]]:
    """An adapter, and how many engines were started for it."""
    file = tmp_path / "starts"
    adapter = start(COUNTING.replace("FILE", repr(str(file))))
    return adapter, lambda: len(file.read_text().splitlines())


def test_an_engine_that_crashed_is_started_afresh_and_built_again(counted: Any) -> None:
    adapter, num_starts = counted
    built = adapter.build_from("5", None)
    with pytest.raises(WireError):
        generate(built, [13])
    assert (generate(built), num_starts()) == ([5], 2)


def test_the_engine_of_an_adapter_that_is_gone_serves_the_next_one(counted: Any) -> None:
    adapter, num_starts = counted
    for name in ("1", "2", "3"):
        built = adapter.build_from(name, None)
        assert generate(built) == [int(name)]
        del built
        gc.collect()
    assert num_starts() == 1


def test_adapters_that_live_at_the_same_time_do_not_disturb_each_other(counted: Any) -> None:
    adapter, num_starts = counted
    built = [adapter.build_from(name, None) for name in ("1", "2", "3")]
    assert ([generate(one) for one in built], num_starts()) == ([[1], [2], [3]], MAX_ENGINES)


def test_one_adapter_too_many_takes_the_engine_used_longest_ago_and_gives_it_back(counted: Any) -> None:
    adapter, num_starts = counted
    built = [adapter.build_from(str(number), None) for number in range(MAX_ENGINES + 1)]
    assert ([generate(one) for one in built], num_starts()) == ([[0], [1], [2], [3]], MAX_ENGINES)


def test_a_drafter_whose_state_was_lost_says_so(counted: Any) -> None:
    adapter, _ = counted
    first = adapter.build_from("0", None)
    first.draft([1], max_nodes=1, max_depth=1, sampling=GREEDY, coins=SeededCoins(0))
    others = [adapter.build_from(str(number), None) for number in range(MAX_ENGINES)]
    with pytest.raises(WireError) as caught:
        first.draft([1], max_nodes=1, max_depth=1, sampling=GREEDY, coins=SeededCoins(0))
    assert str(caught.value) == f"only {MAX_ENGINES} drafters with a state can live at once, and this one is too old"
    assert len(others) == MAX_ENGINES


def test_another_adapter_of_a_command_has_an_engine_that_was_never_asked(counted: Any) -> None:
    adapter, num_starts = counted
    another = adapter._command.adapter()
    assert (num_starts(), another._lease is adapter._lease) == (2, False)


def test_engines_without_an_adapter_end_when_another_one_starts(counted: Any) -> None:
    adapter, num_starts = counted
    engines = []
    for _ in range(MAX_ENGINES + 1):
        engines.append(adapter._command.adapter()._lease.engine)
        gc.collect()
    assert ([one.is_running for one in engines], num_starts()) == ([False] * MAX_ENGINES + [True], MAX_ENGINES + 2)


def test_an_engine_that_goes_on_hanging_is_reported_once_it_is_enough() -> None:
    sentences: list[str] = []
    one = command(HELLO + "read(); time.sleep(600)", timeout=2.0, on_hang=sentences.append)
    adapter = one.adapter()
    for number in range(1, MAX_HANGS + 1):
        with pytest.raises(EngineHung):
            verify(adapter)
        assert len(sentences) == (number >= MAX_HANGS)


def test_closing_ends_the_engine_that_ignores_shutdown() -> None:
    one = command(HELLO + "while True: time.sleep(600)")
    adapter = one.adapter()
    assert adapter._lease is not None
    one.close()
    assert not adapter._lease.engine.is_running


# loading

LOADING = {
    "cmd:": "names no command: write 'cmd: ./engine --option'",
    "cmd: ./nothing-here --jsonl": "cannot start './nothing-here': No such file or directory",
    "cmd: 'unfinished": "the command cannot be split into words: No closing quotation",
    f"cmd: {sys.executable} -c pass": "engine ended with exit code 0 during hello; nothing on stderr",
    f"cmd: {sys.executable} {shim.__file__} nothing_here:Adapter": (
        "hello raised ModuleNotFoundError: No module named 'nothing_here'"
    ),
}


@pytest.mark.parametrize("name", LOADING)
def test_a_command_that_is_no_engine_is_told_in_one_sentence(name: str) -> None:
    with pytest.raises(TargetError) as caught:
        load_target(name)
    joint = " " if name == "cmd:" else ": "
    assert str(caught.value) == f"target {name!r}{joint}{LOADING[name]}"


def test_the_option_runs_a_target_in_another_interpreter(tmp_path: Path) -> None:
    """The interpreter sees no package at all, and the target's own prints do not disturb the answers."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    file = tmp_path / "mine.py"
    file.write_text("print('hello')\n" + (ROOT / "examples" / "ngram_engine.py").read_text("utf-8"))
    ran = suite("--target", f"{file}:Engine", "--specbench-python", str(python), "-k", "the_output_is_plain")
    assert ran.run is not None, ran.out
    assert (ran.code, ran.run.verdict_of("greedy.lossless"), ran.run.target) == (
        0, "EQUAL", f"cmd: {python} {shim.__file__} {file}:Engine",
    )  # fmt: skip


def test_the_option_needs_a_python_target() -> None:
    sentence = "--specbench-python needs --specbench-target: what to run in that interpreter"
    assert f"ERROR: {sentence}" in suite("--specbench-python", "python3").lines


def test_a_command_is_not_run_in_another_interpreter() -> None:
    sentence = "--specbench-python is for Python targets; 'cmd: ./engine' is a command already"
    assert f"ERROR: {sentence}" in suite("--specbench-python", "python3", "--target", "cmd: ./engine").lines


# verdicts on engines that run


def judged(name: str, claim: str, *, timeout: float = SECONDS) -> RunSession:
    """The run after one claim was judged, whether it holds or not."""
    session = RunSession(
        load_target(name, timeout=timeout),
        model="none",
        profile=profile_named("quick"),
        seed=3,
        device="cpu",
        timeout=0.0,
        on_hang=print,
    )
    with contextlib.suppress(Failed):
        session.judge(claim, next(iter(session.subjects)))
    return session


def compiled(folder: Path, source: str) -> str:
    """The target's name. The compiler is the one CI machines have; without one the test says how to get it."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler here: install gcc or clang to judge examples/verify_engine.c")
    (folder / "engine.c").write_text(source)
    words = [compiler, "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(folder / "engine"), str(folder / "engine.c")]
    subprocess.run(words, check=True, capture_output=True)
    return f"cmd: {folder / 'engine'}"


VERIFY_ENGINE = (ROOT / "examples" / "verify_engine.c").read_text("utf-8")


def test_the_verifier_in_c_is_equal(tmp_path: Path) -> None:
    session = judged(compiled(tmp_path, VERIFY_ENGINE), "greedy.walk")
    assert (session.run.verdict_of("greedy.walk"), session.run.claims[0].num_cases) == (
        "EQUAL",
        profile_named("quick").max_examples + 142,  # every small walk besides
    )


def test_a_verifier_in_c_that_judges_a_draft_by_its_own_row_is_a_bug(tmp_path: Path) -> None:
    right = "int judge = parent;"
    assert VERIFY_ENGINE.count(right) == 1
    session = judged(compiled(tmp_path, VERIFY_ENGINE.replace(right, "int judge = node;")), "greedy.walk")
    (record,) = session.run.claims
    first, *rest = record.message.splitlines()
    assert (record.verdict, first[:38]) == ("BUG", "WalkMismatch: node 1 is not accepted, "), record.message
    assert any(line.startswith("  reproduce specbench check 'cmd: ") for line in rest)


def test_a_decoder_in_another_interpreter_is_judged_on_its_own_model() -> None:
    name = f"cmd: {sys.executable} -S {shim.__file__} {ROOT / 'examples' / 'ngram_engine.py'}:Engine"
    session = judged(name, "greedy.lossless")
    assert session.run.verdict_of("greedy.lossless") == "EQUAL"
    assert session.run.models == {"own": "the target's own model, oracle: its own logits()"}


FOREIGN = """
from types import SimpleNamespace
import numpy, json, os
print("built by hand")

class Adapter:
    def build_from(self, checkpoint, drafter_checkpoint):
        self.checkpoint = checkpoint
        assert drafter_checkpoint is None and os.path.exists(os.path.join(checkpoint, "config.json"))
        return Decoder(checkpoint)

class Decoder:
    def __init__(self, checkpoint):
        from specbench.reference.decoder import Decoder
        from specbench.reference.model import LlamaModel
        import torch
        self.decoder = Decoder(LlamaModel.load(checkpoint, dtype=torch.float32))

    def generate(self, prompt, *, max_new_tokens, sampling, stop, seed):
        return self.decoder.generate(prompt, max_new_tokens=max_new_tokens)
"""


def test_an_engine_that_builds_from_folders_is_judged_on_the_tiny_checkpoints(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{FOREIGN}")
    session = judged(f"cmd: {sys.executable} {shim.__file__} {file}:Adapter", "stop.max_tokens")
    assert list(session.subjects)[:2] == ["tiny-fp64", "tiny-fp32"]
    assert session.run.verdict_of("stop.max_tokens") in ("EQUAL", "NOISE"), session.run.claims[0].message


def test_an_engine_that_hangs_on_every_question_ends_the_run_as_a_hang_does(tmp_path: Path) -> None:
    """A failing case is looked at again and again; after some hangs the run leaves, its table and record written."""
    file = tmp_path / "engine.py"
    file.write_text(PRELUDE + "hello('verify', 'generate', vocab_size=9)\nread()\ntime.sleep(600)\n")
    two = ("-k", "judged_by or every_round_emits")
    ran = suite("--target", f"cmd: {sys.executable} -I -S {file}", "--specbench-timeout", "2", *two)
    assert ran.run is not None, ran.out
    assert (ran.code, ran.has_table, ran.run.verdict_of("greedy.walk")) == (7, True, "BUG")
    assert ran.run.ended == (
        "hung: generate was not answered within 2 s, engine killed: "
        "give --specbench-timeout SECONDS if it needs longer, otherwise it hangs"
    )


def test_an_engine_that_dies_is_a_bug_and_the_run_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "engine.py"
    file.write_text(PRELUDE + "hello('verify', vocab_size=9)\nread()\nsys.exit(3)\n")
    session = judged(f"cmd: {sys.executable} -I -S {file}", "greedy.walk")
    (record,) = session.run.claims
    assert (record.verdict, record.message.splitlines()[0].partition("      [")[0]) == (
        "BUG",
        "Misbehaviour: verify() raised WireError: engine ended with exit code 3 during verify; nothing on stderr",
    )


# the page


def page_blocks() -> dict[str, str]:
    """Blocks of docs/wire.md by their marker."""
    spec = importlib.util.spec_from_file_location("ci_blocks_of_wire", ROOT / ".ci" / "blocks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return {one.marker: one.text for one in module.blocks_of(PAGE.read_text("utf-8"))}


def page_talk() -> list[tuple[Any, Any]]:
    """Requests and answers of the page's example, line breaks inside them joined."""
    text = page_blocks()["wire: talk"].replace("\n    ", " ")
    lines = [json.loads(line[3:]) for line in text.splitlines()]
    assert [line[:3] for line in text.splitlines()] == ["-> ", "<- "] * (len(lines) // 2)
    return list(zip(lines[::2], lines[1::2], strict=True))


def test_the_shim_answers_the_requests_of_the_page_as_the_page_says(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(page_blocks()["wire: adapter"])
    requests = "".join(json.dumps(request) + "\n" for request, _ in page_talk())
    words = [sys.executable, "-I", "-S", str(shim.__file__), f"{tmp_path / 'mine.py'}:Adapter"]
    done = subprocess.run(words, input=requests, capture_output=True, text=True, timeout=SECONDS)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for one in answers:
        one.get("error", {}).pop("where", None)
    assert (done.returncode, answers) == (0, [answer for _, answer in page_talk()])


class EvenCoins:
    """Uniforms in equal steps, as on the page."""

    def uniform(self, num: int) -> torch.Tensor:
        return torch.arange(num, dtype=torch.float64) / num


def test_we_send_the_requests_of_the_page(tmp_path: Path) -> None:
    """An engine that plays the page: it answers a request with the page's answer, and tells when it is another one."""
    (tmp_path / "talk.json").write_text(json.dumps(page_talk()))
    one = command(
        f"for request, answer in json.load(open({str(tmp_path / 'talk.json')!r})):\n"
        "    got = read()\n"
        "    if got != request: sys.exit('not the request of the page: ' + json.dumps(got))\n"
        "    write(json.dumps(answer) + '\\n')\n"
        f"open({str(tmp_path / 'ended')!r}, 'w').close()"
    )
    adapter = one.adapter()
    coins = EvenCoins()
    stop = Stop((0,), ((1, 1),))
    said = [adapter.generate([0, 1], max_new_tokens=2, sampling=GREEDY, stop=stop, seed=7)]
    logits = torch.tensor([[0.1, -torch.inf, 1.0], [3.0, 0.0, 1.0]], dtype=torch.float64)
    said += [adapter.verify(DraftTree.of([1, 2], [-1, 0]), logits, sampling=GREEDY, coins=coins)]
    adapter.observe(VerifyResult((1,), 0))
    said += [adapter.draft([0, 1, 2, 0], max_nodes=1, max_depth=1, sampling=GREEDY, coins=coins)]
    with pytest.raises(RemoteError) as caught:
        adapter.generate([0], max_new_tokens=1, sampling=Sampling(temperature=0.5), stop=NEVER_STOP, seed=0)
    one.close()
    assert said == [Generation((2, 2), "length"), VerifyResult((1,), 0), DraftTree.of([0, 2], [-1, 0])]
    assert (type(caught.value).__name__, os.path.exists(tmp_path / "ended")) == ("ValueError", True)


def test_the_page_lists_every_method_with_its_parameters() -> None:
    rows = [line.split("|")[1:3] for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `")]
    table = {name.strip(" `"): tuple(params.replace("`", "").replace(" ", "").split(",")) for name, params in rows}
    assert table == {name: params or ("",) for name, params in shim.METHODS.items()}
