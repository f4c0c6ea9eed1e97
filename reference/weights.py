"""Weights by name, read when they are asked for and kept by nobody: from a folder of safetensors, or from tensors held.

Files are never loaded whole: safetensors tells where a tensor lies. Formats that may run code are refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor

INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


class Weights(Protocol):
    """Tensors of a checkpoint by name, in the dtype in which they are stored."""

    def __contains__(self, name: str) -> bool: ...

    def tensor(self, name: str) -> Tensor:
        """The whole tensor. ValueError when there is none of that name."""
        ...

    def block(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop`, the last one excluded."""
        ...

    def rows(self, name: str, indices: Sequence[int]) -> Tensor:
        """The named rows, one for each index."""
        ...


class HeldWeights:
    """Tensors that are in memory anyway."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> Tensor:
        if name not in self:
            raise ValueError(f"the model has no weights named {name}")
        return self._tensors[name].cpu()

    def block(self, name: str, start: int, stop: int) -> Tensor:
        return self._tensors[name][start:stop].cpu()

    def rows(self, name: str, indices: Sequence[int]) -> Tensor:
        return self._tensors[name][list(indices)].cpu()


class StoredWeights:
    """A folder with model.safetensors, or shards and their index. ValueError for any other folder."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._file_of = self._files()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def tensor(self, name: str) -> Tensor:
        with safe_open(self._file(name), framework="pt") as file:
            return file.get_tensor(name)

    def block(self, name: str, start: int, stop: int) -> Tensor:
        with safe_open(self._file(name), framework="pt") as file:
            return file.get_slice(name)[start:stop]

    def rows(self, name: str, indices: Sequence[int]) -> Tensor:
        with safe_open(self._file(name), framework="pt") as file:
            stored = file.get_slice(name)
            by_index = {index: stored[index : index + 1] for index in set(indices)}
        return torch.cat([by_index[index] for index in indices])

    @property
    def num_numbers(self) -> int:
        """Numbers in all tensors together, by the files' headers."""
        total = 0
        for file_name in sorted(set(self._file_of.values())):
            with safe_open(self._folder / file_name, framework="pt") as file:
                total += sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
        return total

    def _file(self, name: str) -> Path:
        if name not in self:
            raise ValueError(
                f"{self._folder} has no weights named {name}: the checkpoint is incomplete or of another type"
            )
        return self._folder / self._file_of[name]

    def _files(self) -> dict[str, str]:
        folder, index, single = self._folder, self._folder / INDEX, self._folder / "model.safetensors"
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder: give one with config.json and *.safetensors")
        if index.is_file():
            file_of = dict(json.loads(index.read_text("utf-8"))["weight_map"])
            for file_name in sorted(set(file_of.values())):
                if Path(file_name).name != file_name or not (folder / file_name).is_file():
                    raise ValueError(f"{index} names the shard {file_name!r}, which must be a file beside it")
            return file_of
        if single.is_file():
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), single.name)
        if pickles := sorted(one.name for pattern in PICKLES for one in folder.glob(pattern)):
            raise ValueError(
                f"{folder} holds its weights in {pickles[0]}, a pickle, which may run code when it is read: "
                "save them as safetensors"
            )
        raise ValueError(f"{folder} must hold model.safetensors, or shards and {INDEX}")
