"""Trained drafters that come with the package, and folders of others: which of them fit a target. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

PUBLISHED = "published"  # Medusa, EAGLE, EAGLE-3, speculators: see reference/drafters/published.py
NAMES = {"markov_heads": "heads", "draft_layers": "small-model"}  # by the kind in config.json


def shipped() -> list[Path]:
    """The folders that are shipped, those that draft best first."""
    root = Path(str(files("specbench") / "weights"))
    return [one.parent for name in ("feature", "heads") for one in sorted(root.glob(f"*/{name}/config.json"))]


def trained_for(target: str, folders: Sequence[str] = ()) -> dict[str, str]:
    """Folders by kind of those that fit the target in a folder: the named ones, else the shipped ones. ValueError where
    a named one is of another size, or two are of one kind."""
    sizes = _fields(Path(target))
    found: dict[str, str] = {}
    for folder in [Path(one) for one in folders] or shipped():
        own = _fields(folder)
        kind = kind_of(own)
        given = sizes.get("vocab_size"), sizes.get("hidden_size")
        # Others have their sizes elsewhere, and are held to them when they are loaded.
        wanted = given if kind == PUBLISHED else (own.get("vocab_size"), own.get("hidden_size"))
        if folders and wanted != given:
            raise ValueError(f"{folder} drafts for a target of vocabulary and hidden size {wanted}, not {given}")
        if folders and kind in found:
            raise ValueError(f"{folder} and {found[kind]} are both of kind {kind!r}: name one")
        if wanted == given:
            found.setdefault(kind, str(folder))
    return found


def kind_of(fields: dict[str, Any]) -> str:
    """What `train-drafter --kind` calls it; PUBLISHED for a layout of others."""
    if "kind" not in fields:
        return PUBLISHED
    kind = NAMES.get(str(fields.get("kind")), str(fields.get("kind")))
    if kind == "heads" and not fields.get("conditioned", True):
        return "heads-independent"
    return "feature" if kind == "small-model" and fields.get("reads_features") else kind


def digest_of(folder: str) -> str:
    """The first 16 hex digits of SHA-256 of all that decides what it drafts."""
    found = hashlib.sha256()
    for file in sorted(Path(folder).iterdir()):
        if file.suffix in (".json", ".safetensors") and file.name != "training.safetensors":
            found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()[:16]


def _fields(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no config.json: it must be a folder that specbench train-drafter wrote")
    try:
        fields = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{file} must hold an object, holds a {type(fields).__name__}")
    return fields
