"""A trained drafter from its folder, whatever its kind: what `specbench train-drafter` wrote, or others published."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specbench.protocols import Drafter
from specbench.reference.drafters.adaptive import ARMS, AdaptiveDrafter, CostPolicy, Costs, Router
from specbench.reference.drafters.folders import read_fields
from specbench.reference.drafters.fused import KIND as FUSED
from specbench.reference.drafters.fused import FusedLayers
from specbench.reference.drafters.growth import BestFirst, Shape, Static
from specbench.reference.drafters.heads import HeadsDrafter, MarkovHeads
from specbench.reference.drafters.layers import KIND, DraftLayers, LayersDrafter
from specbench.reference.drafters.published import is_published, read_published

NUM_NODES = 12  # drafts in a tree where no shape is given
ROUTER = "router.json"
WIDEST = BestFirst(max(one.nodes for one in ARMS), depth=max(one.depth for one in ARMS if one.member == "learned"))


def load_drafter(folder: str | Path, target: Any, *, shape: Shape | None = None) -> Drafter:
    """target: the model that it was trained for. shape: None for the tree of `NUM_NODES` drafts that is accepted
    furthest by the accuracies in training.json, for independent heads, else best first. ValueError says what does not
    fit."""
    if is_published(folder):
        return load_published(folder, target, shape=shape)
    kinds: dict[Any, type[DraftLayers]] = {KIND: DraftLayers, FUSED: FusedLayers}
    if (layers := kinds.get(read_fields(folder).get("kind"))) is not None:
        return LayersDrafter(target, layers.read(folder), shape=shape or BestFirst(NUM_NODES))
    heads = MarkovHeads.load(folder)
    if shape is None:
        shape = BestFirst(NUM_NODES)
        told = Path(folder) / "training.json"
        if not heads.config.conditioned and told.is_file():
            shape = Static.best(json.loads(told.read_text("utf-8"))["accuracies"], num_nodes=NUM_NODES)
    return HeadsDrafter(target, heads, shape=shape)


def load_adaptive(
    folder: str | Path, target: Any, costs: Callable[[Any], Costs], *, routed: bool = False
) -> AdaptiveDrafter:
    """An adaptive drafter over the drafter of a folder. costs: what its arms cost over that drafter. routed: by the
    router that was fitted beside it, else by the cost model. ValueError where the folder has none."""
    file = Path(folder) / ROUTER
    if routed and not file.is_file():
        raise ValueError(f"{folder} has no {ROUTER}: train the drafter with longer texts, or take the cost model")
    policy = Router.load(file) if routed else CostPolicy()
    learned = load_drafter(folder, target, shape=WIDEST)
    return AdaptiveDrafter(learned, policy, costs(learned))


def load_published(folder: str | Path, target: Any, *, shape: Shape | None = None, pickles: bool = False) -> Drafter:
    """A drafter in a layout of Medusa, EAGLE, EAGLE-3 or speculators. pickles: read .bin and .pt too, of tensors alone.
    ValueError says what does not fit, and which part of it is computed in another way than here."""
    drafter = read_published(folder, target, pickles=pickles)
    if isinstance(drafter, MarkovHeads):
        return HeadsDrafter(target, drafter, shape=shape or BestFirst(NUM_NODES))
    return LayersDrafter(target, drafter, shape=shape or BestFirst(NUM_NODES))
