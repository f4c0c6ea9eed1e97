"""specbench exits: counted by cut models, laid out, refused where there is nothing to count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specbench import cli
from specbench import exits as study
from specbench.reference.exits import Exit, exits
from specbench.reference.hf import HFModel
from specbench.reference.model import LlamaConfig, tiny_llama

CONFIG = LlamaConfig(31, 32, 48, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8)
MODEL = tiny_llama(CONFIG, seed=0)
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]


@pytest.mark.parametrize("first", [0, 6])
def test_layers_are_counted_as_a_model_that_is_cut_there(first: int) -> None:
    said = MODEL.logits(TEXT)[first:].argmax(dim=-1).tolist()
    for one in exits(MODEL, TEXT, first=first):
        laws = MODEL.first_layers(one.layers).logits(TEXT)[first:].softmax(dim=-1)
        rows = list(zip(laws, said, strict=True))
        right = [int(law.argmax()) == token for law, token in rows]
        sure = [float(law.max()) > 0.9 for law, _ in rows]
        assert one == Exit(
            one.layers,
            rows=len(rows),
            equal=sum(right),
            among_five=sum(token in law.argsort(descending=True)[:5].tolist() for law, token in rows),
            sure=sum(sure),
            sure_equal=sum(both == (True, True) for both in zip(sure, right, strict=True)),
        )


def test_the_last_layer_says_what_it_says() -> None:
    found = exits(MODEL, TEXT)
    assert [one.layers for one in found] == [1, 2, 3, 4]
    assert (found[-1].equal, found[-1].among_five) == (15, 15)
    assert 0 < found[2].equal < 15
    assert [one.layers for one in exits(MODEL.first_layers(1), TEXT)] == [1]


def test_counts_add_up() -> None:
    assert Exit(2, 10, 4, 7, 3, 2) + Exit(2, 5, 5, 5, 1, 1) == Exit(2, 15, 9, 12, 4, 3)


def test_rows_behind_the_text_are_refused() -> None:
    with pytest.raises(ValueError, match=r"first = 15 must be between 0 and 14 \(rows of the text\)"):
        exits(MODEL, TEXT, first=15)


def test_table_has_shares_and_counts() -> None:
    assert study.table([Exit(1, 200, 50, 100, 0, 0), Exit(2, 200, 200, 200, 80, 80)]).splitlines()[2:] == [
        "| 1 | 25.0 % (50/200) | 50.0 % (100/200) | 0.0 % (0/200) | - |",
        "| 2 | 100.0 % (200/200) | 100.0 % (200/200) | 40.0 % (80/200) | 100.0 % (80/80) |",
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exits") / "tiny"
    MODEL.to(torch.float32).save(path)
    words = {word: idx for idx, word in enumerate(["?", *"the a of and to in is it that for you".split()])}
    inner = Tokenizer(models.WordLevel(words, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?").save_pretrained(path)
    return path


def test_command_prints_the_table_and_writes_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["exits", str(folder), "--prompts", "1", "--max-new-tokens", "5", "--markdown", str(tmp_path / "exits.md")]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert f"| 4 | 100.0 % ({6 * 5}/{6 * 5}) |" in said  # six categories
    assert (tmp_path / "exits.md").read_text("utf-8") in said


def test_command_says_what_it_cannot_read(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    HFModel.tiny("gpt2", seed=0, dtype=torch.float32).model.save_pretrained(tmp_path / "gpt2")
    MODEL.save(tmp_path / "bare")
    messages = {
        "gpt2": "is run as a HFModel: the layers of Llama and Mistral alone are read",
        "bare": "has no tokenizer, which the shipped prompts need: save one into the folder",
    }
    for name, message in messages.items():
        capsys.readouterr()
        assert cli.main(["exits", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err == f"specbench: {tmp_path / name} {message}\n"
