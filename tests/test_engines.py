"""Engines on a sentinel: real ones are EQUAL, a wrong draft that is kept now and then is a BUG, what fails is told."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from specbench import cli, engine_run
from specbench.careless import Careless
from specbench.engine_models import AGREEMENT, SentinelModel, as_engines_read
from specbench.engine_run import Result, results_of, run_engine, run_engines, table
from specbench.engines import ENGINES, Answer, Engine, Files, Missing, Mode, Request, Settings, engine_named
from specbench.record import BUG, EQUAL, NOT_TESTED
from specbench.reference.sentinel import accepted_lengths, load_program
from specbench.types import Sampling

INSTALLED = {"transformers": "transformers", "llama.cpp": "xllamacpp", "mlx-lm": "mlx_lm"}
ROOT = Path(__file__).resolve().parents[1]


def engine(name: str) -> Engine:
    pytest.importorskip(INSTALLED[name], reason="to run this engine: pip install -e '.[dev]'")
    return engine_named(name)


def results_of_modes(one: Engine, *modes: str, num: int = 30, weights: str = "", **options: Any) -> list[Result]:
    model = SentinelModel(has_law="sampling" in options)
    asked = [weights or one.weights[0]]
    return [*run_engine(one, model, weights=asked, modes=modes or None, max_new_tokens=num, **options)]


@pytest.mark.parametrize("name", INSTALLED)
def test_an_engine_as_installed_is_equal_in_every_mode_that_drafts(name: str) -> None:
    found = [one for one in results_of_modes(engine(name), num=12) if (name, one.mode) not in KNOWN_BUGS]
    assert [(one.mode, one.audit.sentence) for one in found if one.audit.verdict == BUG] == []
    assert found[0].audit.verdict == EQUAL
    drafting = [one for one in found if one.audit.verdict == EQUAL and not one.mode.startswith("plain")]
    assert len(drafting) >= 3
    assert all(one.audit.num_tokens == 9 * 12 for one in drafting)


# docs/engines.md has a reproduction of each.
KNOWN_BUGS = {("transformers", "lookup, static cache"): "IndexError"}


@pytest.mark.parametrize(("name", "mode"), KNOWN_BUGS)
def test_a_known_bug_is_still_there(name: str, mode: str) -> None:
    (one,) = results_of_modes(engine(name), mode)
    assert one.audit.verdict == BUG
    assert KNOWN_BUGS[name, mode] in one.audit.sentence


@pytest.mark.parametrize("weights", ["q8_0", "q4_0"])
def test_rounded_weights_change_nothing(weights: str) -> None:
    found = results_of_modes(engine("llama.cpp"), "draft model", weights=weights)
    assert [one.audit.verdict for one in found] == [EQUAL]


@pytest.mark.parametrize("mode", ["plain", "draft model"])
def test_sampled_tokens_follow_the_law(mode: str) -> None:
    """top_k is taken before the temperature, as llama.cpp does."""
    sampling = Sampling(0.7, top_k=5)
    (one,) = results_of_modes(engine("llama.cpp"), mode, num=100, sampling=sampling)
    assert one.audit.verdict == EQUAL, one.audit.sentence
    assert 800 < one.audit.num_tokens < 900  # the others stand where two tokens tie for the fifth place
    assert one.sampling == "temperature 0.7, top_k 5"


def test_sampled_tokens_of_another_temperature_are_a_bug() -> None:
    class Hotter:
        """llama.cpp, but its temperature is half as high again."""

        requirements, weights, temperature_last = (), ("f32",), True
        modes: Mapping[str, Mode] = {"plain": Mode()}

        def version(self) -> str:
            return "hotter 1"

        def generate(self, files: Files, requests: Sequence[Request], settings: Settings) -> Iterator[Answer]:
            hotter = Settings(settings.mode, settings.weights, temperature=1.5 * settings.temperature)
            return engine("llama.cpp").generate(files, requests, hotter)

    (one,) = results_of_modes(Hotter(), num=200, sampling=Sampling(1.0))
    assert one.audit.verdict == BUG
    assert "do not follow the law" in one.audit.sentence


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("transformers", "fp32"),
        ("llama.cpp", "f32"),
        ("llama.cpp", "f16"),
        ("llama.cpp", "bf16"),
        ("llama.cpp", "q8_0"),
        ("llama.cpp", "q4_0"),
        ("mlx-lm", "bf16"),
    ],
)
def test_a_wrong_draft_that_is_kept_once_in_fifty_rounds_is_counted_each_time(name: str, weights: str) -> None:
    """The engine goes on behind it, as it would: wrong is the draft alone."""
    model = SentinelModel()
    careless = Careless(engine(name), model.program, model.drafter, every=15)
    (one,) = run_engine(careless, model, weights=[weights], max_new_tokens=30)
    assert careless.num_kept >= 4
    assert (one.audit.verdict, one.audit.num_wrong) == (BUG, careless.num_kept)


def test_kept_drafts_are_the_drafters_and_come_once_in_so_many_rounds() -> None:
    """By the program alone: each wrong token is what the drafter says behind the text before it."""
    model = SentinelModel()
    careless = Careless(Fake(), model.program, model.drafter)
    (one,) = run_engine(careless, model, max_new_tokens=200)
    rounds = sum(
        len(lengths) for request in model.requests(200).values() for lengths in [rounds_of(model, request.prompt, 200)]
    )
    assert abs(careless.num_kept - rounds / 50) <= 3
    assert one.audit.num_wrong == careless.num_kept
    assert one.audit.num_tokens == 1_800


def rounds_of(model: SentinelModel, prompt: tuple[int, ...], num: int) -> list[int]:
    lengths = accepted_lengths(model.program, model.drafter, prompt, num_rounds=num, gamma=4)
    ends = [sum(lengths[: idx + 1]) + idx + 1 for idx in range(len(lengths))]
    return lengths[: next(idx for idx, end in enumerate(ends) if end >= num) + 1]


class Fake:
    """Says the program's tokens, or what a test wants instead."""

    requirements: tuple[str, ...] = ()
    weights: tuple[str, ...] = ("fp32",)
    temperature_last = False
    modes: Mapping[str, Mode] = {"plain": Mode(), "drafting": Mode(drafts=True)}

    def __init__(self, *, num_drafted: int | None = 4, fails_at: int = -1, shift: int = 0, why: Any = None) -> None:
        self._num_drafted, self._fails_at, self._shift = num_drafted, fails_at, shift
        self._why = why or RuntimeError("out of\nslots")

    def version(self) -> str:
        return "fake 1"

    def generate(self, files: Files, requests: Sequence[Request], settings: Settings) -> Iterator[Answer]:
        program = load_program(files.target)
        assert load_program(files.drafter).agreement_with(program) == pytest.approx(AGREEMENT, abs=0.01)
        for number, one in enumerate(requests):
            if number == self._fails_at:
                raise self._why
            tokens = program.continuation(one.prompt, one.max_new_tokens)
            tokens[0] = (tokens[0] + self._shift) % 16
            yield Answer(tuple(tokens), num_drafted=self._num_drafted, num_kept=1)


@pytest.mark.parametrize(
    ("fake", "verdict", "sentence"),
    [
        (Fake(), EQUAL, "all of 270 tokens in 9 outputs are the program's"),
        (Fake(num_drafted=0), NOT_TESTED, "no draft was verified"),
        (Fake(fails_at=2), BUG, "after 2 answers of 9 it raised RuntimeError: out of slots"),
        (Fake(fails_at=0), BUG, "after 0 answers of 9 it raised RuntimeError: out of slots"),
        (Fake(fails_at=0, why=ValueError("no such mode")), NOT_TESTED, "refused: no such mode"),
        (Fake(fails_at=0, why=ImportError("no quanto")), NOT_TESTED, "refused: no quanto"),
        (Fake(shift=1, fails_at=2), BUG, "mistakes in 60 tokens in 2 outputs; first: random-1, token 0:"),
    ],
    ids=["right", "drafts nothing", "fails", "fails at once", "refuses", "misses a package", "wrong before it fails"],
)
def test_a_mode_gets_the_verdict_that_it_has_earned(fake: Fake, verdict: str, sentence: str) -> None:
    (one,) = results_of_modes(fake, "drafting")
    assert one.audit.verdict == verdict
    assert sentence in one.audit.sentence


def test_a_wrong_mode_is_shown_by_its_shortest_request_and_no_token_more() -> None:
    (one,) = results_of_modes(Fake(shift=1), "drafting")
    assert one.smallest.startswith("prompt [16, ")
    assert "(random-1), 1 new tokens, alone: it gives [" in one.smallest


def test_plain_decoding_need_not_draft() -> None:
    assert [one.audit.verdict for one in results_of_modes(Fake(num_drafted=0), "plain")] == [EQUAL]


def test_the_table_shows_that_drafts_were_verified() -> None:
    lines = table(results_of_modes(Fake()))
    assert len(lines) == 4
    assert "| fake 1 | sentinel llama | fp32 | greedy | drafting | EQUAL | 270 | 9 of 36 drafts kept |" in lines[-1]


@pytest.mark.parametrize(
    ("asked", "sentence"), [({"modes": ["fast"]}, "mode = 'fast'"), ({"weights": ["int3"]}, "weights = 'int3'")]
)
def test_unknown_words_are_named(asked: dict[str, list[str]], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence} must be one of "):
        list(run_engine(Fake(), SentinelModel(), **asked, max_new_tokens=3))


def test_what_a_sentinel_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^sentinel llama has no law that sampled tokens could be held against"):
        list(run_engine(Fake(), SentinelModel(), sampling=Sampling(1.0), max_new_tokens=3))
    with pytest.raises(ValueError, match=r"^q4_0 rounds the table of a law"):
        SentinelModel(has_law=True).write(tmp_path / "a", "q4_0")
    with pytest.raises(ValueError, match=r"^unknown variant 'lama': did you mean llama"):
        SentinelModel(variant="lama")


def test_an_engine_that_is_not_there_is_a_line_and_no_more() -> None:
    class Absent(Fake):
        def version(self) -> str:
            raise Missing("pip install absent")

    lines: list[str] = []
    found = run_engines(
        {"absent": Absent()}, SentinelModel(), weights=None, modes=None, max_new_tokens=3, tell=lines.append
    )
    assert list(found) == []
    assert lines[0].startswith("absent is not installed: pip install absent; or let ")


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    known: dict[str, Any] = {name: Fake() for name in ENGINES}
    monkeypatch.setattr("specbench.engines.apart.Apart", lambda name, **_: known[name])
    return known


def test_the_command_prints_and_writes_what_it_found(
    fakes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes["transformers"] = Fake(shift=1)
    data, page = tmp_path / "e.json", tmp_path / "e.md"
    words = ["engines", "transformers", "--mode", "plain", "--max-new-tokens", "5"]
    assert cli.main([*words, "--json", str(data)]) == 1
    assert cli.main(["engines", "llama.cpp", "--add", str(data), "--markdown", str(page)]) == 0
    assert [one["verdict"] for one in json.loads(data.read_text())["engines"]] == [BUG]
    text = page.read_text()
    assert text.startswith(engine_run.PAGE)
    assert "## `specbench engines transformers --mode plain --max-new-tokens 5`" in text
    assert "smallest case: prompt [16, " in text
    assert "## `specbench engines llama.cpp`" in text
    command, results = results_of(json.loads(data.read_text()), "e.json")
    assert (command, [one.audit.verdict for one in results]) == (
        "specbench engines transformers --mode plain --max-new-tokens 5",
        [BUG],
    )
    capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["vlm"], "unknown engine 'vlm'"),
        (["transformers", "--env", "a", "--python", "b"], "--env makes the interpreter"),
        (["transformers", "--model", "./nowhere"], "./nowhere is not a folder"),
        (["transformers", "--variant", "lama"], "unknown variant 'lama'"),
        (["transformers", "--temperature", "-1"], "temperature = -1.0"),
        (["transformers", "--json", "/nowhere/e.json"], "No such file or directory"),
        (["transformers", "--add", "/nowhere/e.json"], "No such file or directory"),
    ],
)
def test_a_wrong_word_is_one_sentence(
    fakes: dict[str, Any], words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["engines", *words]) != 0
    assert sentence in capsys.readouterr().err


def test_the_page_is_one_that_the_command_writes() -> None:
    text = (ROOT / "docs" / "engines.md").read_text("utf-8")
    assert text.startswith(engine_run.PAGE)
    assert text.splitlines()[text.splitlines().index(table([])[0]) + 1] == table([])[1]


def test_the_command_shows_that_a_kept_draft_is_seen(fakes: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["engines", "transformers", "--keep-wrong"]) == 0
    assert "a wrong draft kept once in 50 rounds BUG         14 mistakes in 1800 tokens" in capsys.readouterr().out
    assert cli.main(["engines", "transformers", "--keep-wrong", "--max-new-tokens", "5"]) == 1
    assert cli.main(["engines", "transformers", "--keep-wrong", "--model", "smollm2"]) == 2
    assert "leave --model, --mode, --temperature" in capsys.readouterr().err


def test_rope_theta_stands_where_older_readers_look() -> None:
    """transformers 5 writes it into rope_parameters alone; a layer's own (Gemma's) has no one place to stand in."""
    written = {"dtype": "float32", "rope_parameters": {"rope_theta": 100_000.0, "rope_type": "default"}}
    assert as_engines_read(written, "bfloat16") == {**written, "dtype": "bfloat16", "rope_theta": 100_000.0}
    by_layer = {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}
    assert as_engines_read(by_layer, "bfloat16") == by_layer
