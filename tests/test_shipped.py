"""Trained drafters that are shipped: what the card says of them, and which one is taken for which target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specbench.bench.sides import ADAPTIVE, UNTRAINED
from specbench.reference.drafters.adaptive import ARMS, Router
from specbench.reference.drafters.folders import made
from specbench.reference.drafters.heads import HeadsConfig, MarkovHeads
from specbench.reference.drafters.trained import ROUTER
from specbench.shipped import digest_of, kind_of, shipped, trained_for

CARD = Path("specbench/weights/README.md")
MOST_MB = 12.0


def target(folder: Path, vocab_size: int = 49152, hidden_size: int = 576) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size, "hidden_size": hidden_size}))
    return str(folder)


def drafter(folder: Path, **fields: object) -> str:
    folder.mkdir()
    sizes = {"vocab_size": 49152, "hidden_size": 576, "kind": "markov_heads", "conditioned": True}
    (folder / "config.json").write_text(json.dumps(sizes | fields))
    (folder / "model.safetensors").write_bytes(b"weights of " + folder.name.encode())
    return str(folder)


def test_what_is_shipped_is_small_half_precision_and_loads() -> None:
    folders = shipped()
    assert folders
    assert sum(file.stat().st_size for one in folders for file in one.iterdir()) < MOST_MB * 1e6
    for folder in folders:
        weights = load_file(folder / "model.safetensors")
        assert {one.dtype for key, one in weights.items() if key != "ids"} == {torch.float16}
        assert all(bool(one.isfinite().all()) for one in weights.values())
        assert Router.load(folder / ROUTER).arms == ARMS


def test_the_card_says_what_training_found() -> None:
    """Command and accuracies, as training.json has them."""
    card = CARD.read_text("utf-8")
    for folder in shipped():
        told = json.loads((folder / "training.json").read_text("utf-8"))
        assert told["command"] in card
        for row in told["accuracies"]:
            assert f"| {row[0]:.3f} | {sum(row[:3]):.3f} | {sum(row):.3f} |" in card


def test_the_shipped_one_is_taken_for_a_target_of_its_sizes(tmp_path: Path) -> None:
    assert set(trained_for(target(tmp_path / "smollm2"))) == {
        kind_of(json.loads((one / "config.json").read_text())) for one in shipped()
    }
    assert trained_for(target(tmp_path / "other", hidden_size=512)) == {}
    assert "heads" in trained_for(target(tmp_path / "smollm2")) and MarkovHeads.load(
        trained_for(target(tmp_path / "smollm2"))["heads"]
    )


def test_named_folders_come_instead(tmp_path: Path) -> None:
    heads = drafter(tmp_path / "mine")
    features = drafter(tmp_path / "features", kind="draft_layers", reads_features=True)
    small = drafter(tmp_path / "small", kind="draft_layers", reads_features=False)
    independent = drafter(tmp_path / "independent", conditioned=False)
    folder = target(tmp_path / "target")
    (eagle := tmp_path / "eagle").mkdir()
    (eagle / "config.json").write_text(json.dumps({"speculators_model_type": "eagle"}))
    assert trained_for(folder, [str(eagle)]) == {"published": str(eagle)}
    assert trained_for(folder, [heads, features, small, independent]) == {
        "heads": heads,
        "feature": features,
        "small-model": small,
        "heads-independent": independent,
    }
    before = digest_of(heads)
    assert before != digest_of(features)
    (Path(heads) / "router.json").write_text("another")
    assert digest_of(heads) != before  # it decides what is drafted too
    with pytest.raises(ValueError, match=r"mine and .*mine are both of kind 'heads': name one"):
        trained_for(folder, [heads, heads])
    with pytest.raises(
        ValueError, match=r"drafts for a target of vocabulary and hidden size \(49152, 576\), not \(31, 576\)"
    ):
        trained_for(target(tmp_path / "tiny", vocab_size=31), [heads])
    with pytest.raises(ValueError, match=r"has no config.json: it must be a folder that specbench train-drafter wrote"):
        trained_for(folder, [str(tmp_path / "nowhere")])


@pytest.mark.parametrize("text", ["[1]", "no json"])
def test_a_config_that_is_none_is_told(text: str, tmp_path: Path) -> None:
    (Path(folder := drafter(tmp_path / "mine")) / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"mine/config.json (must hold an object|is no JSON)"):
        trained_for(target(tmp_path / "target"), [folder])
    with pytest.raises(ValueError, match=r"mine: config.json (says kind|is no JSON)"):
        MarkovHeads.load(folder)


def test_a_config_that_does_not_fit_and_weights_that_are_none_are_told(tmp_path: Path) -> None:
    folder = drafter(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"mine: config.json does not fit: missing 2 required positional arguments"):
        made(HeadsConfig, {"hidden_size": 8, "vocab_size": 9}, folder)
    with pytest.raises(ValueError, match=r"mine: config.json does not fit: .*unexpected keyword argument 'size'"):
        made(HeadsConfig, {"size": 8}, folder)
    with pytest.raises(ValueError, match=r"mine: model.safetensors cannot be read"):
        MarkovHeads.load(folder)


@pytest.mark.parametrize("name", ["heads", *ADAPTIVE])
def test_a_drafter_that_is_not_there_is_told(name: str) -> None:
    from specbench.bench.rows import Setting

    with pytest.raises(ValueError, match=f"the drafter '{name}' needs a trained one for this target"):
        UNTRAINED.make(Setting("x", drafter=name, gamma=4), model=None)  # type: ignore[arg-type]
