"""A trained drafter from its folder, whatever its kind: what `specbench train-drafter` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specbench.protocols import Drafter
from specbench.reference.drafters.growth import BestFirst, Shape, Static
from specbench.reference.drafters.heads import HeadsDrafter, MarkovHeads
from specbench.reference.drafters.layers import KIND, DraftLayers, LayersDrafter

NUM_NODES = 12  # drafts in a tree where no shape is given


def load_drafter(folder: str | Path, target: Any, *, shape: Shape | None = None) -> Drafter:
    """target: the model that it was trained for. shape: None for the tree of `NUM_NODES` drafts that is accepted
    furthest by the accuracies in training.json, for independent heads, else best first. ValueError says what does not
    fit."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: it must be a folder that specbench train-drafter wrote")
    kind = json.loads((folder / "config.json").read_text("utf-8")).get("kind")
    if kind == KIND:
        return LayersDrafter(target, DraftLayers.read(folder), shape=shape or BestFirst(NUM_NODES))
    heads = MarkovHeads.load(folder)
    if shape is None:
        shape = BestFirst(NUM_NODES)
        told = folder / "training.json"
        if not heads.config.conditioned and told.is_file():
            shape = Static.best(json.loads(told.read_text("utf-8"))["accuracies"], num_nodes=NUM_NODES)
    return HeadsDrafter(target, heads, shape=shape)
