"""`specbench server`: a server's verdict, what it says of drafts, and what cannot be judged in a sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_server import Fake, closed, serve, speaks

from specbench import cli, server_command
from specbench.audit import Output, laws_of
from specbench.engines import Answer, Request, Settings
from specbench.engines.server import Server, ServerError
from specbench.reference.model import LlamaConfig, tiny_llama
from specbench.reference.sentinel import Program, Sentinel, export
from specbench.regret import Oracle, audit_ties, plain_in
from specbench.types import Sampling

PROGRAM = Program.seeded(0)
__all__ = ["serve"]  # a fixture


class Scripted:
    """In place of `Server.generate`: what a test wants it to say."""

    drafted: int | None = 4
    shift = 0
    fails_at = -1

    def __call__(
        self, server: Server, requests: Sequence[Request], settings: Settings, *, symbols: str = ""
    ) -> Iterator[Answer]:
        for number, one in enumerate(requests):
            if number == self.fails_at:
                raise ServerError("http://127.0.0.1:1/completion, request 3: the answer was cut off")
            tokens = PROGRAM.continuation(one.prompt, one.max_new_tokens)
            tokens[-1] = (tokens[-1] + self.shift) % 16
            yield Answer(tuple(tokens), num_drafted=self.drafted, num_kept=1)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    one = Scripted()
    monkeypatch.setattr(Server, "generate", lambda *args, **named: one(*args, **named))
    monkeypatch.setattr(Server, "version", lambda self: "served 1 (openai)")
    monkeypatch.setattr(Server, "drafts", lambda self: None)
    return one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(Sentinel(PROGRAM), tmp_path_factory.mktemp("served") / "sentinel")


def said_of(folder: Path | str, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = cli.main(["server", "http://127.0.0.1:1", "--checkpoint", str(folder), "--max-new-tokens", "5", *words])
    out = capsys.readouterr()
    return code, out.out + out.err


def test_right_tokens_are_equal(scripted: Scripted, folder: Path, capsys: Any, tmp_path: Path) -> None:
    code, out = said_of(folder, capsys, "--json", str(tmp_path / "v.json"))
    assert code == 0
    assert "EQUAL       all of 50 tokens in 10 outputs are the program's\n            10 of 40 drafts kept" in out
    assert json.loads((tmp_path / "v.json").read_text())["verdict"] == "EQUAL"


def test_a_wrong_token_is_a_bug(scripted: Scripted, folder: Path, capsys: Any) -> None:
    scripted.shift = 1
    code, out = said_of(folder, capsys)
    assert code == 1
    assert "BUG         10 mistakes in 50 tokens in 10 outputs; first: random-0, token 4:" in out


def test_a_server_that_drafts_nothing_is_not_tested(scripted: Scripted, folder: Path, capsys: Any) -> None:
    scripted.drafted = 0
    assert "NOT TESTED  no draft was verified; all of 50 tokens" in said_of(folder, capsys)[1]
    scripted.drafted = None
    assert "it does not say how many drafts it verified" in said_of(folder, capsys)[1]


def test_what_came_before_an_error_is_judged(scripted: Scripted, folder: Path, capsys: Any) -> None:
    scripted.fails_at = 3
    code, out = said_of(folder, capsys)
    assert code == 2
    assert "NOT TESTED  after 3 answers: http://127.0.0.1:1/completion, request 3: the answer was cut off" in out
    scripted.shift = 1
    assert said_of(folder, capsys)[0] == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--temperature", "1"], "has no law to draw from"),
        (["--api", "rest"], "api = 'rest' must be one of"),
        (["--json", "/nowhere/v.json"], "No such file or directory"),
        (["--dtype", "fp8"], "specbench server: --dtype fp8 must be one of fp32, bf16, fp16"),
        (["--dtype", "fp32"], "--dtype judges the ties of a real model, a sentinel has none: leave it out"),
        (["--plain-url", "http://127.0.0.1:2"], "--plain-url judges the ties of a real model, a sentinel has none"),
        (["--top-p", "0.5"], "--top-p = 0.5 filters draws: give a --temperature, too"),
        (["--retries", "-1"], "--retries = -1 must be an int of at least 0"),
        (["--key-variable", "sk-secret-1"], "--key-variable must be the name of an environment variable, in capitals"),
        (["--max-new-tokens", "9000"], "--max-new-tokens 9000 must be at most 8"),
        (["--checkpoint", "/nonexistent"], "--checkpoint /nonexistent: there is no such folder, must be the folder of"),
        (["--checkpoint", __file__], "test_server_command.py: is a file, must be the folder of a sentinel or of a"),
    ],
)
def test_what_cannot_be_asked_is_a_sentence(
    scripted: Scripted, folder: Path, words: list[str], sentence: str, capsys: Any
) -> None:
    code, out = said_of(folder, capsys, *words)
    assert code == 2
    assert sentence in out


# Servers over HTTP


def asked_of(fake: Fake, folder: Path, capsys: Any, *words: str) -> tuple[int, str]:
    options = ["--checkpoint", str(folder), "--max-new-tokens", "8", "--retries", "0", "--timeout", "2"]
    code = cli.main(["server", fake.url, *options, *words])
    out = capsys.readouterr()
    return code, out.out + out.err


def right(spoil: Any = lambda ids, number: ids) -> Any:
    """As vLLM, where the emitted token leads by 10."""

    def reply(path: str, body: Any, number: int) -> Any:
        found = speaks("vllm", spoil)(path, body, number)
        if body is not None:
            logprobs = found["choices"][0]["logprobs"]
            logprobs["top_logprobs"] = [
                {token: -0.25 if token == said else -10.25 for token in place}
                for said, place in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
            ]
        return found

    return reply


def dies_after(number_of_answers: int, spoil: Any = lambda ids, number: ids) -> Any:
    """As vLLM, until nothing is answered any more, /metrics included."""
    speak, num = right(spoil), [0]

    def reply(path: str, body: Any, number: int) -> Any:
        num[0] += body is not None
        return closed if num[0] > number_of_answers else speak(path, body, number)

    return reply


def test_a_wrong_answer_of_a_server_that_dies_behind_it_is_a_bug(serve: Any, folder: Path, capsys: Any) -> None:
    fake = serve(dies_after(3, lambda ids, number: [0] * len(ids)))
    code, out = asked_of(fake, folder, capsys, "--concurrency", "1")
    assert code == 1
    assert "BUG         " in out and "mistakes in 24 tokens in 3 outputs" in out
    assert "request 3: the server closed the connection without an answer" in out


def test_a_wrong_answer_behind_a_request_that_failed_is_a_bug(
    scripted: Scripted, folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(server: Server, requests: Sequence[Request], settings: Settings, *, symbols: str = "") -> Any:
        error = ServerError("http://127.0.0.1:1/v1/completions, request 0: HTTP 500, must be 200: dead")
        error.later = [(2, Answer((0,) * 5))]
        yield from ()
        raise error

    monkeypatch.setattr(Server, "generate", fails)
    code, out = said_of(folder, capsys)
    assert code == 1
    assert "mistakes in 5 tokens in 1 output; first: random-2" in out


CANNOT: dict[str, tuple[Any, str]] = {
    "dies": (dies_after(3), "after 3 answers: "),
    "wants a key": (lambda path, body, number: (401, "who?"), "HTTP 401, must be 200: who?; name the environment"),
    "wants a key for answers": (
        lambda path, body, number: (404, "") if body is None else (401, "who?"),
        "HTTP 401, must be 200: who?; name the environment variable that holds its key (--key-variable)",
    ),
    "fails": (lambda path, body, number: (500, "boom"), "after 0 answers: "),
    "answers no JSON": (lambda path, body, number: (200, "<html>"), "the body is an HTML page"),
    "has two models": (
        lambda path, body, number: {"data": [{"id": "a"}, {"id": "b"}]},
        "it has 2 models, must be told which (--model): a, b",
    ),
}


@pytest.mark.parametrize("case", CANNOT)
def test_a_server_that_cannot_be_asked_is_exit_code_2(
    serve: Any, folder: Path, case: str, capsys: Any, tmp_path: Path
) -> None:
    reply, sentence = CANNOT[case]
    code, out = asked_of(serve(reply), folder, capsys, "--concurrency", "1", "--json", str(tmp_path / "v.json"))
    assert code == 2
    assert "NOT TESTED  " in out and sentence in out
    written = json.loads((tmp_path / "v.json").read_text())
    assert written["verdict"] == "NOT TESTED" and sentence in written["sentence"]


def test_a_later_run_that_cannot_ask_replaces_the_verdict_of_an_earlier_one(
    serve: Any, folder: Path, capsys: Any, tmp_path: Path
) -> None:
    file, fake = tmp_path / "v.json", serve(right())
    assert asked_of(fake, folder, capsys, "--json", str(file))[0] == 0
    assert json.loads(file.read_text())["verdict"] == "EQUAL"
    fake.close()
    assert asked_of(fake, folder, capsys, "--json", str(file))[0] == 2
    written = json.loads(file.read_text())
    assert written["verdict"] == "NOT TESTED" and "nothing listens there" in written["sentence"]
    assert asked_of(fake, folder, capsys, "--json", str(file), "--dtype", "fp8")[0] == 2
    assert json.loads(file.read_text())["sentence"] == "--dtype fp8 must be one of fp32, bf16, fp16"


def test_a_run_that_is_broken_off_leaves_no_verdict(
    scripted: Scripted, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*args: Any, **named: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "generate", stopped)
    with pytest.raises(KeyboardInterrupt):
        server_command.run(
            cli._parser().parse_args(
                ["server", "http://127.0.0.1:1", "--checkpoint", str(folder), "--json", str(tmp_path / "v.json")]
            )
        )
    assert json.loads((tmp_path / "v.json").read_text())["verdict"] == "NOT TESTED"


def test_counters_that_begin_anew_say_nothing_of_drafts(
    scripted: Scripted, folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.drafted = None
    told = iter([(1_000, 900), (800, 799)])
    monkeypatch.setattr(Server, "drafts", lambda self: next(told))
    code, out = said_of(folder, capsys)
    assert code == 0
    assert "EQUAL" in out and "it does not say how many drafts it verified" in out


def test_logprobs_that_are_none_are_told_and_the_tokens_judged(serve: Any, folder: Path, capsys: Any) -> None:
    def reply(path: str, body: Any, number: int) -> Any:
        found = right()(path, body, number)
        if body is not None:
            found["choices"][0]["logprobs"]["token_logprobs"][0] = float("nan")
        return found

    code, out = asked_of(serve(reply), folder, capsys)
    assert code == 0
    assert "EQUAL       all of 80 tokens" in out
    assert "10 places had logprobs that are none (NaN, above 0): left out" in out


# The law of a sentinel, in either order of temperature and filters


@pytest.fixture(scope="module")
def with_law(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(Sentinel(PROGRAM, has_law=True), tmp_path_factory.mktemp("lawful") / "sentinel")


class Drawn(Scripted):
    """Draws from the law with min_p 0.3 at temperature 2, in llama.cpp's order or in the other."""

    temperature_last = True

    def __call__(
        self, server: Server, requests: Sequence[Request], settings: Settings, *, symbols: str = ""
    ) -> Iterator[Answer]:
        sampling = Sampling(settings.temperature, min_p=settings.min_p)
        laws = laws_of(PROGRAM, sampling, temperature_last=self.temperature_last)
        generator = torch.Generator().manual_seed(0)
        for one in requests:
            text = list(one.prompt)
            for _ in range(one.max_new_tokens):
                state = PROGRAM.states(text)[-1][-1]
                text.append(int(torch.multinomial(laws[state], 1, generator=generator)))
            yield Answer(tuple(text[len(one.prompt) :]), num_drafted=4, num_kept=1)


@pytest.mark.parametrize(
    ("api", "version", "temperature_last", "code"),
    [
        ("llama.cpp", "a server of unknown version (llama.cpp)", True, 0),
        ("llama.cpp", "a server of unknown version (llama.cpp)", False, 1),
        ("openai", "llama.cpp b1 (openai)", True, 0),
        ("openai", "vLLM 1 (openai)", True, 1),
        ("openai", "vLLM 1 (openai)", False, 0),
        ("openai", "a server of unknown version (openai)", True, 0),
        ("openai", "a server of unknown version (openai)", False, 0),
    ],
)
def test_the_order_of_temperature_and_filters_is_that_of_the_server_asked(
    scripted: Scripted,
    with_law: Path,
    api: str,
    version: str,
    temperature_last: bool,
    code: int,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = Drawn()
    drawn.temperature_last = temperature_last
    monkeypatch.setattr(Server, "generate", lambda *args, **named: drawn(*args, **named))
    monkeypatch.setattr(Server, "version", lambda self: version)
    words = ["--api", api, "--temperature", "2", "--min-p", "0.3", "--max-new-tokens", "60"]
    assert said_of(with_law, capsys, *words)[0] == code


# Real models


def test_a_real_model_is_judged_by_greedy_tokens_alone(scripted: Scripted, tmp_path: Path, capsys: Any) -> None:
    code, out = said_of(tmp_path, capsys, "--dtype", "fp32", "--temperature", "1")
    assert code == 2
    assert "a real model is judged by its greedy tokens" in out


def test_a_real_model_needs_plain_decoding_to_be_judged_by(scripted: Scripted, tmp_path: Path, capsys: Any) -> None:
    code, out = said_of(tmp_path, capsys)
    assert code == 2
    assert "give --plain-url, the same server without drafts, or --dtype" in out


def test_a_server_without_plain_decoding_is_judged_by_our_forward_in_its_dtype(tmp_path: Path) -> None:
    """Right bf16 decoding, in bf16 weights that the folder holds as fp32, and the same with a kept draft."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16
    )
    tiny_llama(config, seed=3, dtype=torch.float32).save(tmp_path / "m")
    oracle = Oracle(tmp_path / "m", weights=torch.bfloat16)
    served = tiny_llama(config, seed=3, dtype=torch.float32).to(torch.bfloat16)
    outputs = []
    for idx in range(6):
        prompt = tuple(torch.randint(64, (9,), generator=torch.Generator().manual_seed(idx)).tolist())
        tokens: list[int] = []
        for _ in range(40):
            tokens.append(int(served.logits([*prompt, *tokens])[-1].argmax()))
        outputs.append(Output(prompt, tuple(tokens), f"prompt {idx}", "served"))
    plain = plain_in(oracle, outputs, torch.bfloat16)
    assert len(plain.errors) == len(plain.places) == 4 * 240
    right = audit_ties(oracle, plain, outputs, [], weights="bf16")
    assert right.verdict == "NOISE"
    kept = [Output(one.prompt, (*one.tokens[:20], 63, *one.tokens[21:]), one.name, "served") for one in outputs]
    assert audit_ties(oracle, plain, kept, [], weights="bf16").verdict == "BUG"
    leaked = [replace(one, tokens=(*one.tokens[:20], -1, *one.tokens[21:])) for one in outputs]
    assert audit_ties(oracle, plain, leaked, [], weights="bf16").verdict == "BUG"


def test_a_verdict_is_written_without_infinities(tmp_path: Path) -> None:
    """JSON has none, and the regret of what is no token is one."""
    server_command._write(tmp_path / "v.json", {"facts": {"worst": math.inf, "by_margin": [(1, math.nan)]}})
    assert json.loads((tmp_path / "v.json").read_text())["facts"] == {"worst": None, "by_margin": [[1, None]]}
