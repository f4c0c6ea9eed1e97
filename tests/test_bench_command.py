"""specbench bench and compare on a tiny model: files, exit codes, resuming, targets right and wrong."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specbench import bench_command, cli
from specbench.bench.costs import WIDTHS
from specbench.bench.loop import Item
from specbench.bench.rows import Setting, read
from specbench.bench_command import REPORT, ROWS, SUMMARY, Progress, settings_of
from specbench.reference.decoder import Decoder
from specbench.reference.drafters.ngram import NGramDrafter
from specbench.reference.model import LlamaConfig, LlamaModel, tiny_llama

CONFIG = LlamaConfig(31, 32, 48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8)
ITEMS = tuple(
    Item(f"p{idx}", "code", tuple(one)) for idx, one in enumerate([[3, 1, 4, 1, 5], [2, 7, 1, 8, 2], [1, 6, 1, 8, 0]])
)
DRAFTERS = "lookup:2-3,ngram:2:2,early_exit:2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    tiny_llama(CONFIG, seed=5).to(torch.float32).save(path)
    return path


@pytest.fixture(autouse=True)
def _few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model has no tokenizer."""
    monkeypatch.setattr(bench_command, "_items", lambda folder, workload, num_each: (ITEMS, ()))


def bench(folder: Path, out: Path, *words: str) -> int:
    common = ["--model", str(folder), "--dtype", "fp32", "--max-new-tokens", "20", "--repetitions", "1"]
    drafters = [] if "--drafters" in words else ["--drafters", DRAFTERS]
    return cli.main(["bench", *common, *drafters, "--no-memory", "--threads", "1", "--out", str(out), *words])


@pytest.fixture(scope="module")
def done(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("done")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_command, "_items", lambda folder, workload, num_each: (ITEMS, ()))
        assert bench(folder, out) == 0
    return out


def test_rows_summary_and_page_are_written(done: Path) -> None:
    run = read(done / ROWS)
    names = ["plain", "transformers", "lookup 2", "transformers lookup 2", "lookup 3", "transformers lookup 3"]
    names += ["ngram 2x2", "early_exit 2"]
    assert [*run.settings] == names
    assert len(run.rows) == len(names) * len(ITEMS)
    told = json.loads((done / SUMMARY).read_text())
    assert {name: one["verdict"] for name, one in told["settings"].items()} == dict.fromkeys(names, "EQUAL")
    assert all(one["speedup"] for one in told["settings"].values())
    assert (done / REPORT / "index.html").is_file()
    assert len(told["cost"][0]["seconds"]) == len(WIDTHS)
    assert told["definition"]["forward"] == "tiny, lean"


def test_a_run_is_not_overwritten_and_a_whole_one_resumes_to_itself(
    done: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (done / ROWS).read_text()
    assert bench(folder, done) == 2
    assert capsys.readouterr().err == (
        f"specbench: {done / ROWS} is there: name another file, or go on with it by --resume\n"
    )
    assert bench(folder, done, "--resume") == 0
    assert (done / ROWS).read_text() == before


def test_memory_is_measured_setting_by_setting(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, int, str]] = []

    def record(setting: Setting, **options: Any) -> dict[str, Any]:
        asked.append((setting.name, options["num"], options["dtype"]))
        return {"kind": "memory", "setting": setting.name, "bytes": {"peak": 2**21}, "predicted": None, "where": "x"}

    monkeypatch.setattr("specbench.bench.memory.measured", record)
    words = ["bench", "--model", str(folder), "--dtype", "fp32", "--max-new-tokens", "8", "--repetitions", "1"]
    assert cli.main([*words, "--drafters", "ngram:2", "--threads", "1", "--out", str(tmp_path)]) == 0
    assert asked == [(name, 8, "fp32") for name in ("plain", "transformers", "ngram 2")]
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown if line.endswith("  2")] == ["plain", "transformers", "ngram"]


class Right:
    """A target over the same weights, with drafts."""

    def __init__(self) -> None:
        self._decoder = Decoder(tiny_llama(CONFIG, seed=5).to(torch.float32), NGramDrafter(gamma=3))

    def generate(self, prompt: list[int], **options: Any) -> Any:
        return self._decoder.generate(prompt, **options)


class Wrong(Right):
    """Accepts what it should not: every token behind the eighth is another one."""

    def generate(self, prompt: list[int], **options: Any) -> Any:
        tokens = super().generate(prompt, **options).tokens
        return [*tokens[:8], *((one + 1) % 31 for one in tokens[8:])]


class Stuck:
    """Always the same token, plainly and with a drafter: equal to itself, and wrong."""

    def with_drafter(self, drafter: Any) -> Stuck:
        return self

    def generate(self, prompt: list[int], *, max_new_tokens: int, **options: Any) -> list[int]:
        return [7] * max_new_tokens


@pytest.mark.parametrize(("name", "code", "verdict"), [("Right", 0, "EQUAL"), ("Wrong", 1, "BUG"), ("Stuck", 1, "BUG")])
def test_a_target_is_gated_as_our_own_decoder_is(
    name: str, code: int, verdict: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "a_target", sys.modules[__name__])
    words = ["--target", f"a_target:{name}", "--drafters", "ngram:2"]
    assert bench(folder, tmp_path, *words) == code
    told = json.loads((tmp_path / SUMMARY).read_text())["settings"]["target"]
    assert (told["verdict"], told["speedup"] is None) == (verdict, verdict == "BUG")


def test_sampled_settings_are_timed_and_have_no_speedup(folder: Path, tmp_path: Path) -> None:
    """Their laws are judged elsewhere, and the rows say that they were not here."""
    words = ["--temperature", "0.7", "--drafters", "lookup:2,early_exit:2"]
    assert bench(folder, tmp_path, *words) == 0
    told = json.loads((tmp_path / SUMMARY).read_text())["settings"]
    names = ("plain", "transformers", "lookup 2", "transformers lookup 2", "early_exit 2")
    found = {name: (one["verdict"], one["law_checked"], one["speedup"]) for name, one in told.items()}
    assert found == dict.fromkeys(names, ("NOT TESTED", False, None))
    assert all(one["num_tokens"] == 20 * len(ITEMS) for one in told.values())


def test_trees_written_out_as_paths_are_measured_too(folder: Path, tmp_path: Path) -> None:
    assert bench(folder, tmp_path, "--drafters", "ngram:3:2", "--layout", "path_batch") == 0
    run = read(tmp_path / ROWS)
    assert (run.settings["ngram 3x2"].layout, run.gates["ngram 3x2"].verdict) == ("path_batch", "EQUAL")


def test_a_ladder_has_its_trees_as_paths_too(folder: Path, tmp_path: Path) -> None:
    words = ["--model", str(folder), "--dtype", "fp32", "--max-new-tokens", "6", "--repetitions", "1", "--no-memory"]
    assert cli.main(["bench", "--preset", "ladder", *words, "--threads", "1", "--out", str(tmp_path)]) == 0
    settings = read(tmp_path / ROWS).settings
    assert [*settings] == [
        *("plain", "transformers", "ngram 4", "early_exit 3", "early_exit 3x2", "early_exit 3x2 as paths")
    ]
    assert settings["early_exit 3x2 as paths"] == replace(
        settings["early_exit 3x2"], name="early_exit 3x2 as paths", layout="path_batch"
    )
    assert '<section id="ladder"' in (tmp_path / bench_command.REPORT / "index.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--drafters", "lokup:2"], "unknown drafter 'lokup': did you mean lookup?"),
        (["--drafters", "model:2"], "--draft-model"),
        (["--target", "a_target:ITEMS"], "has none of the methods that specbench calls"),
    ],
)
def test_what_cannot_be_measured_is_told_before_anything_is(
    words: list[str], message: str, folder: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "a_target", sys.modules[__name__])
    assert bench(folder, tmp_path, *words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / ROWS).exists()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("lookup:4", (("lookup", 4, 1),)),
        ("ngram:2-3:2,early_exit:1", (("ngram", 2, 2), ("ngram", 3, 2), ("early_exit", 1, 1))),
    ],
)
def test_drafters_are_named_with_gammas_and_widths(text: str, found: tuple[Any, ...]) -> None:
    assert bench_command._drafters(text) == found


@pytest.mark.parametrize("text", ["lookup", "lookup:", "lookup:0", "lookup:a", "lookup:1:2:3", "lookup:3-2"])
def test_a_wrong_list_of_drafters_gets_one_sentence(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["bench", "--drafters", text])
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith(f"specbench bench: argument --drafters: {text!r} ")


def test_a_batch_is_gated_text_by_text(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two of the three prompts at once: one row a repetition, whose tokens are both texts'."""
    words = ["--batch", "2", "--drafters", "ngram:2,early_exit:2:2", "--max-new-tokens", "40"]
    assert bench(folder, tmp_path, *words) == 0
    assert "1 of 3 prompts fill no batch of 2 and are left out" in capsys.readouterr().err
    run = read(tmp_path / ROWS)
    assert [*run.settings] == ["plain", "ngram 2", "early_exit 2x2"]
    both = tuple(token for one in run.others["plain"] for token in one["tokens"])
    assert {one.tokens for one in run.rows} == {both}
    assert {(name, one.verdict, one.num_outputs) for name, one in run.gates.items()} == {
        (name, "EQUAL", 2) for name in run.settings
    }
    row = run.of("ngram 2")[0]
    assert (row.first_rounds, row.first_tokens) == (2, sum(one.emitted for one in row.rounds[:2]))
    assert sum(one.emitted for one in row.rounds) == len(both)
    told = json.loads((tmp_path / SUMMARY).read_text())
    assert "16" in told["cost"][0]["seconds"] and told["settings"]["ngram 2"]["speedup"]["decode"]["n"] == 1
    assert " --batch 2" in told["command"]


def test_a_batch_larger_than_the_prompts_or_of_a_target_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "a_target", sys.modules[__name__])
    assert bench(folder, tmp_path, "--batch", "4") == 2
    assert capsys.readouterr().err == (
        "specbench: --batch 4 needs as many prompts, there are 3: ask for more by --prompts\n"
    )
    assert bench(folder, tmp_path, "--batch", "2", "--target", "a_target:Right") == 2
    assert capsys.readouterr().err == "specbench: --batch is our own decoder's: leave --target out\n"


@pytest.mark.parametrize("text", ["", "128,", "1", "a", "64,64"])
def test_a_wrong_list_of_lengths_gets_one_sentence(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "--context", text])
    told = f"{text!r} must be different numbers >= 2, comma-separated, such as 128,1024"
    assert capsys.readouterr().err == f"specbench bench: argument --context: {told}\n"


class Letters:
    """A tokenizer of bytes, without a template."""

    eos_token_id, chat_template = 0, None

    @classmethod
    def from_pretrained(cls, folder: str, **options: Any) -> Letters:
        return cls()

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [one % 31 for one in text.encode()]}


def test_prompts_of_a_length_are_of_that_length_and_its_category(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And are gated as all others are; the lengths' own speed-ups are those of categories."""
    monkeypatch.setattr("transformers.AutoTokenizer", Letters)
    assert bench(folder, tmp_path, "--context", "16,48", "--prompts", "2", "--drafters", "ngram:2") == 0
    run = read(tmp_path / ROWS)
    assert {(one.category, one.num_prompt) for one in run.rows} == {("16 tokens", 16), ("48 tokens", 48)}
    told = json.loads((tmp_path / SUMMARY).read_text())
    assert {name: num for name, (_, num) in told["settings"]["ngram 2"]["speedup"]["categories"].items()} == {
        "16 tokens": 2, "48 tokens": 2,
    }  # fmt: skip
    assert told["command"].endswith("--context 16,48 --drafters ngram:2:1 --dtype fp32")


def test_a_length_beyond_the_models_positions_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("transformers.AutoTokenizer", Letters)
    assert bench(folder, tmp_path, "--context", "16,9000") == 2
    assert capsys.readouterr().err == "specbench: --context 9000 must be < 8192, the positions that the model has\n"


def test_progress_is_shown_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Progress()(1, 10, "plain on p0")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    ticks = iter([0.0, 0.0, 60.0])
    monkeypatch.setattr("specbench.bench_command.time.monotonic", lambda: next(ticks))
    shown = Progress()
    shown(5, 15, "plain on p0")
    shown(10, 15, "lookup 2 on p0")
    shown.end()
    assert "10/15 rows, 1.0 min left: lookup 2 on p0" in capsys.readouterr().err


def _copied(done: Path, out: Path, factor: float) -> Path:
    """The run with one setting's decoding slowed."""
    out.mkdir()
    lines = []
    for line in (done / ROWS).read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "row" and record["setting"] == "lookup 2":
            record["seconds"] = record["first_seconds"] + factor * (record["seconds"] - record["first_seconds"])
        lines.append(json.dumps(record))
    (out / ROWS).write_text("\n".join(lines) + "\n")
    return out


def test_compare_exits_with_one_on_a_regression(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same, slower = _copied(done, tmp_path / "same", 1.0), _copied(done, tmp_path / "slower", 1.5)
    assert cli.main(["compare", str(done), str(same)]) == 0
    assert cli.main(["compare", str(done / ROWS), str(slower)]) == 1
    assert "lookup 2               slower  0.67x [0.67, 0.67], 3" in capsys.readouterr().out


def test_compare_refuses_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_text("no\n")
    assert cli.main(["compare", str(tmp_path / "x"), str(tmp_path / "x")]) == 2
    assert capsys.readouterr().err == f"specbench: {tmp_path / 'x'} is not a file of rows: line 1 is no JSON\n"


def test_a_model_that_is_lean_is_the_one_that_is_loaded(folder: Path) -> None:
    """What the rows were measured on says so by its name."""
    from specbench.bench.sides import load_own

    own = load_own(str(folder), torch.float32)
    assert isinstance(own, LlamaModel) and own.name == "tiny, lean"


def test_a_preset_takes_the_trained_drafters_that_there_are() -> None:
    def names(*words: str, trained: tuple[str, ...] = ("heads",)) -> list[str]:
        parser = argparse.ArgumentParser()
        bench_command.add_options(parser, int)
        settings = settings_of(parser.parse_args(words), has_target=False, has_plain_target=False, trained=trained)
        return [one.name for one in settings if one.side == "own"]

    assert names("--preset", "laptop")[-3:] == ["heads 4x2", "adaptive 16", "router 16"]
    assert names("--preset", "laptop", trained=()) == names("--preset", "laptop")[:-3]
    assert names("--preset", "quick") == ["plain", "lookup 4", "ngram 4"]
    assert names("--drafters", "ngram:2") == ["plain", "ngram 2"]
