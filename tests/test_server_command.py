"""`specbench server`: a server's verdict, what it says of drafts, and what cannot be judged in a sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specbench import cli
from specbench.audit import Output
from specbench.engines import Answer, Request, Settings
from specbench.engines.server import Server, ServerError
from specbench.reference.model import LlamaConfig, tiny_llama
from specbench.reference.sentinel import Program, Sentinel, export
from specbench.regret import Oracle, audit_ties, plain_in

PROGRAM = Program.seeded(0)


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
    assert code == 0
    assert "NOT TESTED  after 3 answers: http://127.0.0.1:1/completion, request 3: the answer was cut off" in out
    scripted.shift = 1
    assert said_of(folder, capsys)[0] == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--temperature", "1"], "has no law to draw from"),
        (["--api", "rest"], "api = 'rest' must be one of"),
        (["--json", "/nowhere/v.json"], "No such file or directory"),
    ],
)
def test_what_cannot_be_asked_is_a_sentence(
    scripted: Scripted, folder: Path, words: list[str], sentence: str, capsys: Any
) -> None:
    code, out = said_of(folder, capsys, *words)
    assert code == 2
    assert sentence in out


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
