"""Engines on a sentinel: real ones are EQUAL, a wrong draft that is kept now and then is a BUG, what fails is told."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specbench import cli, engine_run
from specbench.careless import Careless
from specbench.engine_models import AGREEMENT, SentinelModel, as_engines_read
from specbench.engine_run import Result, results_of, run_engine, run_engines, table
from specbench.engines import ENGINES, Answer, Engine, Files, Missing, Mode, Refused, Request, Settings, engine_named
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
    assert one.audit.num_tokens == 900
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
            yield Answer(tuple(tokens), num_drafted=self._num_drafted, num_kept=min(1, self._num_drafted or 0))


@pytest.mark.parametrize(
    ("fake", "verdict", "sentence"),
    [
        (Fake(), EQUAL, "all of 270 tokens in 9 outputs are the program's"),
        (Fake(num_drafted=0), NOT_TESTED, "no draft was verified"),
        (Fake(fails_at=2), BUG, "after 2 answers of 9 it raised RuntimeError: out of slots"),
        (Fake(fails_at=0), BUG, "after 0 answers of 9 it raised RuntimeError: out of slots"),
        (Fake(fails_at=0, why=Refused("no such mode")), NOT_TESTED, "refused: no such mode"),
        (Fake(fails_at=0, why=NotImplementedError()), NOT_TESTED, "refused: NotImplementedError"),
        (Fake(fails_at=1, why=Refused("no more")), BUG, "after 1 answer of 9 it raised no more"),
        (Fake(fails_at=0, why=ValueError("shape")), BUG, "after 0 answers of 9 it raised ValueError: shape"),
        (Fake(fails_at=0, why=ImportError("no quanto")), BUG, "after 0 answers of 9 it raised ImportError: no quanto"),
        (Fake(shift=1, fails_at=2), BUG, "mistakes in 60 tokens in 2 outputs; first: random-1, token 0:"),
    ],
    ids=[
        "right",
        "drafts nothing",
        "fails",
        "fails at once",
        "refuses",
        "is not made",
        "refuses late",
        "bad value",
        "misses a package",
        "wrong before it fails",
    ],
)
def test_a_mode_gets_the_verdict_that_it_has_earned(fake: Fake, verdict: str, sentence: str) -> None:
    (one,) = results_of_modes(fake, "drafting")
    assert one.audit.verdict == verdict
    assert sentence in one.audit.sentence


def test_a_wrong_mode_is_shown_by_its_shortest_request_and_no_token_more() -> None:
    (one,) = results_of_modes(Fake(shift=1), "drafting")
    assert one.smallest.startswith("prompt [16, ")
    assert "(random-1), 1 new token, alone: it gives [" in one.smallest


class Says(Fake):
    """The program's tokens, changed by a function of (request's number, answer) into what it yields."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self._change = change

    def generate(self, files: Files, requests: Sequence[Request], settings: Settings) -> Iterator[Answer]:
        for number, answer in enumerate(super().generate(files, requests, settings)):
            yield from self._change(number, answer)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda at, one: [one] if at < 7 else [], "it gave 7 answers to 9 requests"),
        (lambda at, one: [one, one], "first: random-2, token 0:"),
        (lambda at, one: [one] if at < 8 else [one, one], "it gave more than 9 answers to 9 requests"),
        (lambda at, one: [replace(one, tokens=None) if at == 3 else one], "answer 4: tokens must be a sequence of"),
        (lambda at, one: [replace(one, num_kept=9)], "answer 1: num_kept = 9 must be at most num_drafted = 4"),
    ],
    ids=["too few", "each twice", "one more", "no tokens", "kept more than drafted"],
)
def test_answers_that_are_not_as_asked_are_a_bug(change: Any, sentence: str) -> None:
    (one,) = results_of_modes(Says(change), "drafting")
    assert one.audit.verdict == BUG
    assert sentence in one.audit.sentence


@pytest.mark.parametrize(
    ("change", "smallest"),
    [
        (lambda at, one: [replace(one, tokens=one.tokens[:-1])], "prompt [16, 9] (random-1), 30 new tokens, alone: it"),
        (
            lambda at, one: [replace(one, tokens=(*one.tokens, 3))],
            "prompt [16, 9] (random-1), 30 new tokens, alone: it",
        ),
        (lambda at, one: [replace(one, tokens=one.tokens[: 30 - at])], "no single request fails by itself"),
    ],
    ids=["short", "long", "short behind others"],
)
def test_the_smallest_case_of_a_wrong_length_is_a_request_alone(change: Any, smallest: str) -> None:
    (one,) = results_of_modes(Says(change), "drafting")
    assert one.smallest.startswith(smallest)


def test_an_engine_that_answers_otherwise_each_time_is_told_from_one_that_fails_in_batches() -> None:
    calls = iter(range(100))

    def change(at: int, one: Answer) -> list[Answer]:
        """Right when it is asked for the second time, and wrong again behind the first token."""
        call = next(calls)
        return [one if call in (9, 10) else replace(one, tokens=(one.tokens[0], *one.tokens[:-1]))]

    (one,) = results_of_modes(Says(change), "drafting")
    assert "30 new tokens, alone: it is not deterministic: it gives [" in one.smallest


def test_tokens_a_forward_are_those_that_were_emitted() -> None:
    """Though it is judged no further than its first token that is no symbol."""
    odd = Says(lambda at, one: [Answer((*one.tokens[:9], -1, *one.tokens[10:]), num_forwards=15)])
    (one,) = results_of_modes(odd, "plain")
    assert (one.drafting, one.tokens) == ("2.00 tokens a forward", "270 (90 judged)")


@pytest.mark.parametrize(("kept", "text"), [(2, "18 of 36 drafts kept"), (None, "36 drafts verified")])
def test_kept_drafts_are_shown_where_they_are_known(kept: int | None, text: str) -> None:
    (one,) = results_of_modes(Says(lambda at, one: [replace(one, num_kept=kept)]), "drafting")
    assert one.drafting == text


def test_a_fault_of_ours_ends_the_judgement_of_one_mode(
    fakes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = engine_run.audit_outputs

    def fails(program: Any, outputs: Any, *args: Any, **options: Any) -> Any:
        if outputs[0].mode == "plain":
            raise KeyError("of ours")
        return judge(program, outputs, *args, **options)

    monkeypatch.setattr("specbench.engine_run.audit_outputs", fails)
    assert cli.main(["engines", "transformers", "--max-new-tokens", "5"]) == 2
    told = capsys.readouterr()
    assert (
        "plain                      NOT TESTED  specbench failed to judge it, please report this: KeyError" in told.out
    )
    assert "drafting                   EQUAL" in told.out
    assert "specbench failed to judge it" in told.err


def test_what_an_engine_says_does_not_end_a_cell_of_the_table() -> None:
    (one,) = results_of_modes(Fake(fails_at=0, why=RuntimeError("a | `b`\n<c> \udc80")), "plain")
    assert r"it raised RuntimeError: a \| \`b\` \<c> \\udc80 | 0 |" in table([one])[-1]


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
        (["transformers", "--json", "/nowhere/e.json"], "cannot write /nowhere/e.json: No such file or directory"),
        (["transformers", "--add", "/nowhere/e.json"], "--add /nowhere/e.json cannot be read: No such file"),
        (["transformers", "--add", str(ROOT / "README.md")], "README.md is not JSON: Expecting value"),
        (["transformers", "--add", str(ROOT / ".ci" / "half.json")], "half.json cannot be read"),
        (["transformers", "--top-k", "3", "--min-p", "0.1"], "nothing is drawn, for --top-k, --min-p to filter"),
        (["transformers", "--mode", "fast"], "transformers: mode = 'fast' must be one of plain; drafting"),
        (["transformers", "vlm", "--mode", "plain"], "unknown engine 'vlm'"),
        (["mine.py"], "mine.py must say what is yours in it: mine.py:ATTRIBUTE, such as mine.py:load"),
        (["mine.py:"], "mine.py: must say what is yours in it: mine.py:ATTRIBUTE, such as mine.py:load"),
    ],
)
def test_a_wrong_word_is_one_sentence(
    fakes: dict[str, Any], words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["engines", *words]) == 2
    told = capsys.readouterr()
    assert sentence in told.err
    assert told.out == ""  # nothing ran


def test_one_file_is_not_both_reports(
    fakes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = str(tmp_path / "same")
    assert cli.main(["engines", "transformers", "--json", same, "--markdown", same]) == 2
    assert "same is named by --json and by --markdown" in capsys.readouterr().err


def test_an_earlier_run_that_is_not_utf8_is_named(
    fakes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "e.json").write_bytes(b"\xff\xfe")
    assert cli.main(["engines", "transformers", "--add", str(tmp_path / "e.json")]) == 2
    assert "e.json is not JSON: 'utf-8' codec" in capsys.readouterr().err


def test_a_mode_that_is_named_twice_runs_once(fakes: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["engines", *2 * ["transformers"], *2 * ["--mode", "plain"], "--max-new-tokens", "5"]) == 0
    assert capsys.readouterr().out.count("EQUAL") == 1


def test_what_ends_one_engine_does_not_end_the_next(
    fakes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(Fake):
        def version(self) -> str:
            raise ValueError("version() raised RuntimeError: none")

    class Absent(Fake):
        def version(self) -> str:
            raise Missing("pip install absent")

    fakes["transformers"], fakes["mlx-lm"], data = Broken(), Absent(), tmp_path / "e.json"
    words = ["engines", "transformers", "mlx-lm", "llama.cpp", "--mode", "plain", "--json", str(data)]
    assert cli.main([*words, "--max-new-tokens", "5"]) == 2
    told = capsys.readouterr()
    assert "transformers on sentinel llama: version() raised RuntimeError: none" in told.err
    assert "nothing of transformers was judged" in told.err
    assert "nothing of mlx-lm was judged" in told.err
    assert [one["verdict"] for one in json.loads(data.read_text())["engines"]] == [EQUAL]


@pytest.mark.parametrize(
    ("fake", "code"),
    [(Fake(fails_at=0, why=Refused("not here")), 2), (Fake(num_drafted=0), 0), (Fake(fails_at=0), 1)],
    ids=["nothing is judged", "one mode of two", "a bug"],
)
def test_the_exit_code_is_0_only_where_something_was_judged(
    fake: Fake, code: int, fakes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    fakes["transformers"] = fake
    assert cli.main(["engines", "transformers", "--max-new-tokens", "5"]) == code
    assert ("nothing of transformers was judged" in capsys.readouterr().err) == (code == 2)


@pytest.mark.parametrize(
    "why", [RuntimeError("dies"), Refused("not here")], ids=["a crash is no catch", "nothing is asked"]
)
def test_a_wrong_draft_must_be_seen_by_its_tokens(
    why: Exception, fakes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    fakes["transformers"] = Fake(fails_at=0, why=why)
    assert cli.main(["engines", "transformers", "--keep-wrong"]) == 2
    assert "it was not the wrong draft that was seen: " in capsys.readouterr().err


def test_the_page_is_one_that_the_command_writes() -> None:
    text = (ROOT / "docs" / "engines.md").read_text("utf-8")
    assert text.startswith(engine_run.PAGE)
    assert text.splitlines()[text.splitlines().index(table([])[0]) + 1] == table([])[1]


def test_the_engines_that_the_page_shows_are_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="to run these engines: pip install -e '.[dev]'")
    blocks = re.findall(r"^```python\n(.*?)^```$", engine_run.PAGE, re.DOTALL | re.MULTILINE)
    file = tmp_path / "mine.py"
    file.write_text("\n\n".join(blocks))
    words = [f"{file}:load", f"{file}:ENGINE", "--mode", "drafter", "--max-new-tokens", "3"]
    assert cli.main(["engines", *words]) == 0
    assert capsys.readouterr().out.count("drafter                    EQUAL") == 2


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
