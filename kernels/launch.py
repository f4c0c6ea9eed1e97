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

TRITON_DTYPES: Mapping[torch.dtype, Any] = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


class CannotRun(RuntimeError):
    """A kernel was asked for and cannot run here; the text says what is missing. Nothing else is run instead."""


def check_runs(kernel: str, tensor: Tensor) -> None:
    """CannotRun when a kernel cannot reach the tensor's memory."""
    if tensor.is_cuda or INTERPRETED:
        return
    raise CannotRun(
        f"{kernel} cannot run on {tensor.device}: move its inputs to a GPU, or set TRITON_INTERPRET=1 before "
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


def check_same_device(kernel: str, **tensors: Tensor | None) -> None:
    """ValueError when tensors lie on several devices."""
    devices = {name: one.device for name, one in tensors.items() if one is not None}
    if len(set(devices.values())) > 1:
        told = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"{kernel}: all inputs must lie on one device, not {told}")


def next_power_of_2(number: int) -> int:
    return int(triton.next_power_of_2(max(1, number)))
