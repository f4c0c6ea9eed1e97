"""What every launcher needs: can a kernel run here, and do its arguments fit? No kernels here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Triton looks at this when a kernel is defined, so it must be set before a kernel module is imported.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "") == "1"
# Triton's own functions, which kernels call, are made for one of the two when Triton is imported.
IN_TIME = isinstance(tl.max, triton.JITFunction) != INTERPRETED

TRITON_DTYPES: Mapping[torch.dtype, Any] = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


class CannotRun(RuntimeError):
    """A kernel was asked for and cannot run here; the text says what is missing. Nothing else is run instead."""


def check_runs(kernel: str, **tensors: Tensor | None) -> None:
    """The arguments that a kernel reads, None for one that is left out. ValueError where one is no tensor or they lie
    on several devices, CannotRun when a kernel cannot reach their memory."""
    devices: dict[str, torch.device] = {}
    for name, one in tensors.items():
        if one is not None:
            if not isinstance(one, Tensor):
                kind = type(one)
                told = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
                raise ValueError(f"{kernel}: {name} is a {told}, must be a torch.Tensor: see torch.as_tensor")
            devices[name] = one.device
    if len(set(devices.values())) > 1:
        told = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"{kernel}: all inputs must lie on one device, not {told}")
    if not IN_TIME:
        changed = "set" if INTERPRETED else "unset"
        raise CannotRun(f"{kernel} cannot run: TRITON_INTERPRET was {changed} after Triton was imported, not before")
    device = next(iter(devices.values()))
    if device.type != "cuda" and not INTERPRETED:
        raise CannotRun(
            f"{kernel} cannot run on {device}: move its inputs to a GPU, or set TRITON_INTERPRET=1 before "
            "specbench.kernels is imported, which runs it in Triton's interpreter"
        )


def check_shape(kernel: str, name: str, tensor: Tensor, expected: tuple[int | None, ...]) -> None:
    """ValueError unless the shape is `expected`; None stands for any size."""
    given = tuple(tensor.shape)
    if len(given) != len(expected) or any(size not in (None, one) for one, size in zip(given, expected, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in expected)
        raise ValueError(f"{kernel}: {name} has shape {list(given)}, must be [{wanted}]")


def check_rows_are_dense(kernel: str, name: str, tensor: Tensor) -> None:
    """ValueError unless neighbours in the last dimension are neighbours in memory."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{kernel}: {name} has stride {tensor.stride(-1)} in its last dimension, must be 1")


def check_indices(kernel: str, **tensors: Tensor | None) -> None:
    """ValueError unless vectors that a kernel walks through are dense: a column of a table is not."""
    for name, one in tensors.items():
        if one is not None:
            check_rows_are_dense(kernel, name, one)


def check_num_rows(kernel: str, num_rows: int, num_sequences: int, max_nodes: int) -> None:
    """ValueError where so many rows cannot be those of trees of `max_nodes` at most: no value is read for that."""
    if num_rows > num_sequences * max_nodes:
        raise ValueError(
            f"{kernel}: {num_rows} rows of {num_sequences} trees are more than max_nodes = {max_nodes} each, must be "
            "no more than the largest tree has"
        )


def next_power_of_2(number: int) -> int:
    return int(triton.next_power_of_2(max(1, number)))
