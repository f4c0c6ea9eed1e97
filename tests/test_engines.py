"""Engines on a sentinel: real ones are EQUAL, a wrong draft that is kept now and then is a BUG, what fails is told."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from specbench import cli, engine_run
from specbench.audit import Output, audit_greedy, requests_for
from specbench.engine_run import AGREEMENT, Result, run_engine, table
from specbench.engines import ENGINES, Answer, Engine, Files, Missing, engine_named
from specbench.record import BUG, EQUAL, NOT_TESTED
from specbench.reference.sentinel import SYMBOLS, Program, Sentinel, export, export_gguf, load_program

PROGRAM = Program.seeded(0)
INSTALLED = {"transformers": "transformers", "llama.cpp": "xllamacpp", "mlx-lm": "mlx_lm"}


def engine(name: str) -> Engine:
    pytest.importorskip(INSTALLED[name], reason="to run this engine: pip install -e '.[dev]'")
    return engine_named(name)


def results_of(one: Engine, *modes: str, num: int = 30, weights: str = "") -> list[Result]:
    asked = [weights or one.formats[0]]
    return list(run_engine(one, weights=asked, modes=modes or one.modes, max_new_tokens=num, seed=0))


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_as_installed_is_equal_in_every_mode_that_drafts(name: str) -> None:
    found = results_of(engine(name))
    assert [one.audit.verdict for one in found if one.audit.verdict == BUG] == []
    assert found[0].audit.verdict == EQUAL
    drafting = [one for one in found if one.audit.verdict == EQUAL and not one.mode.startswith("plain")]
    assert len(drafting) >= 3
    assert all(one.audit.num_tokens == 9 * 30 for one in drafting)


@pytest.mark.parametrize("weights", ["q8_0", "q4_0"])
def test_rounded_weights_change_nothing(weights: str) -> None:
    assert [one.audit.verdict for one in results_of(engine("llama.cpp"), "draft model", weights=weights)] == [EQUAL]


@pytest.mark.parametrize(
    ("name", "weights"),
    [("transformers", "fp32"), ("llama.cpp", "f16"), ("llama.cpp", "q4_0"), ("mlx-lm", "bf16")],
)
def test_a_wrong_draft_that_is_kept_now_and_then_is_counted_each_time(name: str, weights: str, tmp_path: Path) -> None:
    """The engine goes on behind it, as it would: wrong is the draft alone, once in 40 tokens."""
    one, drafter = engine(name), PROGRAM.drafter(AGREEMENT, seed=0)
    files = Files(tmp_path / "t", tmp_path / "d", tmp_path / "t.gguf", tmp_path / "d.gguf")
    if name == "llama.cpp":
        export_gguf(Sentinel(PROGRAM), files.target_gguf, kind=weights)
    else:
        export(Sentinel(PROGRAM), files.target, dtype=weights)
    texts = {
        request.name: [*request.prompt] for request in requests_for(PROGRAM, SYMBOLS, max_new_tokens=1, seed=0)[3:6]
    }
    starts, num_kept = {name: len(text) for name, text in texts.items()}, 0
    for _ in range(3):
        asked = [(tuple(text), 40) for text in texts.values()]
        for text, answer in zip(texts.values(), one.generate(files, asked, mode="plain", weights=weights), strict=True):
            text += answer.tokens
            wrong = drafter.next_token(text)
            if wrong != PROGRAM.next_token(text):
                text.append(wrong)
                num_kept += 1
    assert num_kept >= 2
    outputs = [Output(tuple(text[: starts[name]]), tuple(text[starts[name] :])) for name, text in texts.items()]
    (audit,) = audit_greedy(PROGRAM, outputs)
    assert (audit.verdict, audit.num_wrong) == (BUG, num_kept)


class Fake:
    """Says the program's tokens, or what a test wants instead."""

    modes: tuple[str, ...] = ("plain", "drafting")
    formats: tuple[str, ...] = ("fp32",)

    def __init__(self, *, num_drafted: int | None = 4, fails_at: int = -1, shift: int = 0) -> None:
        self._num_drafted, self._fails_at, self._shift = num_drafted, fails_at, shift

    def version(self) -> str:
        return "fake 1"

    def generate(
        self, files: Files, requests: Sequence[tuple[tuple[int, ...], int]], *, mode: str, weights: str
    ) -> Iterator[Answer]:
        program = load_program(files.target)
        assert load_program(files.drafter).agreement_with(program) == pytest.approx(AGREEMENT, abs=0.01)
        for number, (prompt, num) in enumerate(requests):
            if number == self._fails_at:
                raise RuntimeError("out of\nslots")
            tokens = program.continuation(prompt, num)
            tokens[0] = (tokens[0] + self._shift) % 16
            yield Answer(tuple(tokens), num_drafted=self._num_drafted, num_kept=1)


@pytest.mark.parametrize(
    ("fake", "verdict", "sentence"),
    [
        (Fake(), EQUAL, "all of 270 tokens in 9 outputs are the program's"),
        (Fake(num_drafted=0), NOT_TESTED, "no draft was verified"),
        (Fake(fails_at=2), NOT_TESTED, "it raised RuntimeError: out of"),
        (Fake(fails_at=0), NOT_TESTED, "it raised RuntimeError: out of"),
        (Fake(shift=1, fails_at=2), BUG, "mistakes in 60 tokens in 2 outputs; first: random-1, token 0:"),
    ],
    ids=["right", "drafts nothing", "fails", "fails at once", "wrong before it fails"],
)
def test_a_mode_gets_the_verdict_that_it_has_earned(fake: Fake, verdict: str, sentence: str) -> None:
    (one,) = results_of(fake, "drafting")
    assert one.audit.verdict == verdict
    assert sentence in one.audit.sentence


def test_plain_decoding_need_not_draft() -> None:
    assert [one.audit.verdict for one in results_of(Fake(num_drafted=0), "plain")] == [EQUAL]


def test_the_table_shows_that_drafts_were_verified() -> None:
    lines = table(results_of(Fake()))
    assert len(lines) == 4
    assert "| fake 1 | fp32 | drafting | EQUAL | 270 | 9 of 36 drafts kept |" in lines[-1]


@pytest.mark.parametrize(
    ("asked", "sentence"), [({"mode": "fast"}, "mode = 'fast'"), ({"weights": "int3"}, "weights = 'int3'")]
)
def test_unknown_words_are_named(asked: dict[str, str], sentence: str) -> None:
    words = {"modes": [asked.get("mode", "plain")], "weights": [asked.get("weights", "fp32")]}
    with pytest.raises(ValueError, match=f"^{sentence} must be one of "):
        list(run_engine(Fake(), **words, max_new_tokens=3, seed=0))


def test_the_command_prints_and_writes_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Absent(Fake):
        def version(self) -> str:
            raise Missing("pip install absent")

    fakes: dict[str, Any] = {"transformers": Fake(shift=1), "llama.cpp": Absent(), "mlx-lm": Absent()}
    monkeypatch.setattr("specbench.engines.engine_named", fakes.__getitem__)
    data, page = tmp_path / "e.json", tmp_path / "e.md"
    words = ["engines", "--mode", "plain", "--max-new-tokens", "5", "--json", str(data), "--markdown", str(page)]
    assert cli.main(words) == 1
    out = capsys.readouterr().out
    assert "llama.cpp is not installed: pip install absent" in out
    assert [one["verdict"] for one in json.loads(data.read_text())["engines"]] == [BUG]
    assert page.read_text().startswith(engine_run.PAGE)
    assert cli.main(["engines", "vlm"]) == 2
    assert "unknown engine 'vlm'" in capsys.readouterr().err


def test_the_page_is_one_that_the_command_writes() -> None:
    text = (Path(__file__).resolve().parents[1] / "docs" / "engines.md").read_text("utf-8")
    assert text.startswith(engine_run.PAGE)
    assert text.splitlines()[text.splitlines().index(table([])[0]) + 1] == table([])[1]
