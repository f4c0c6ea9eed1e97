"""Folders of trained drafters (config.json, model.safetensors), and whether a drafter and its state fit a target."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from specbench.types import TargetState

Config = TypeVar("Config")


def states_of(target: Any, context: Sequence[int], given: TargetState | None, *, layers: Sequence[int] = ()) -> Tensor:
    """float [S, hidden] of all tokens of a context but the last, or float [S, len(layers) * hidden], what these layers
    were given; computed where they are not given. ValueError where they belong to another context."""
    if given is None:
        return target.layer_inputs(context[:-1], layers) if layers else target.states(context[:-1])
    if len(given.hidden) != len(context) - 1:
        raise ValueError(
            f"target_state.hidden has {len(given.hidden)} rows, must have {len(context) - 1} (a context of "
            f"{len(context)} tokens, the root not computed)"
        )
    return given.hidden


def check_fits(target: Any, hidden_size: int, vocab_size: int) -> None:
    """ValueError unless a drafter was made for a target of these sizes."""
    given = tuple(target.embedding.shape)
    if given != (vocab_size, hidden_size):
        raise ValueError(
            f"the drafter is made for a target of {vocab_size} tokens and hidden size {hidden_size}, must fit this "
            f"one's {given[0]} and {given[1]}: train one with specbench train-drafter"
        )


def check_ids(ids: Tensor, vocab_size: int) -> None:
    """ValueError unless ids are ascending tokens of the vocabulary."""
    if ids.dtype != torch.int64 or not len(ids) or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise ValueError(f"ids must be int64 from 0 to {vocab_size - 1} (the target's tokens)")
    if not (ids[1:] > ids[:-1]).all():
        raise ValueError("ids must be in ascending order, each once")


def check_weights(name: str, weights: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]) -> None:
    """ValueError unless there are these tensors and no others."""
    for key, shape in shapes.items():
        if key not in weights:
            raise ValueError(f"{name}: {key} is missing, must have shape {list(shape)}")
        if tuple(weights[key].shape) != shape:
            raise ValueError(f"{name}: {key} has shape {list(weights[key].shape)}, must have {list(shape)}")
    if others := set(weights) - set(shapes):
        raise ValueError(f"{name}: {', '.join(sorted(others))} must not be there")


def save_weights(folder: Path, fields: dict[str, Any], weights: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: one.contiguous().cpu() for key, one in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", "utf-8")


def converted(
    weights: dict[str, Tensor], dtype: torch.dtype, device: str | torch.device | None = None
) -> dict[str, Tensor]:
    """The same tensors in another dtype, "ids" but for the device as they are."""
    return {key: one.to(device=device, dtype=None if key == "ids" else dtype) for key, one in weights.items()}


def load_weights(folder: str | Path, *, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The fields of config.json and the tensors of model.safetensors. ValueError where they are of another kind."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    fields = read_fields(folder)
    if fields.get("kind") != kind:
        raise ValueError(f"{folder}: config.json says kind = {fields.get('kind')!r}, must be {kind!r}")
    try:
        return fields, load_file(Path(folder) / "model.safetensors")
    except SafetensorError as error:
        raise ValueError(f"{folder}: model.safetensors cannot be read: {error}") from None


def made(kind: Callable[..., Config], fields: dict[str, Any], folder: str | Path) -> Config:
    """The config of a drafter's folder. ValueError where a field is missing, unknown or no size."""
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"{folder}: config.json does not fit: {str(error).partition(') ')[2] or error}") from None


def read_fields(folder: str | Path) -> dict[str, Any]:
    """config.json of a folder that has all that a drafter's folder has."""
    for name in ("config.json", "model.safetensors"):
        if not (Path(folder) / name).is_file():
            raise ValueError(f"{folder} has no {name}: it must be a folder that specbench train-drafter wrote")
    try:
        fields = json.loads((Path(folder) / "config.json").read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{folder}: config.json is no JSON: {error}") from None
    return fields if isinstance(fields, dict) else {"kind": fields}
