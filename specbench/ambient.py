"""The settings of this process that a target may change: those it changed hold inside its own calls, and nowhere else.

The settings belong to the process, so what is remembered about them belongs to the process too: it lives in this
module, and not with one instance of a target.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

_CPU = torch.device("cpu")
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (
        # With no function mode entered there is none set, and that is cheaper to ask: it is asked twice a call.
        lambda: torch.get_default_device() if torch._C._len_torch_function_stack() else _CPU,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),  # None costs nothing a call
    ),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "autocast": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda enabled: torch.set_autocast_enabled("cpu", enabled),
    ),
    "matmul precision": (
        lambda: torch.backends.cuda.matmul.fp32_precision,
        lambda precision: setattr(torch.backends.cuda.matmul, "fp32_precision", precision),
    ),
    "recursion limit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "stdout": (lambda: sys.stdout, lambda file: setattr(sys, "stdout", file)),
    "stderr": (lambda: sys.stderr, lambda file: setattr(sys, "stderr", file)),
}
_GETTERS = [(name, get) for name, (get, _) in _SETTINGS.items()]
_changed: dict[str, Any] = {}  # setting -> what a target set it to


class SettingsOfTheTarget:
    """Around one call of a target: what earlier calls set is set again, what this one sets is undone and remembered.
    Written out as a class: every call goes through it.

    A child process that a target forked ends here, when the call comes back in it: one run of the claims is enough.
    """

    def __enter__(self) -> None:
        self._process = os.getpid()
        self._ours = _read()
        for name, value in _changed.items():
            _SETTINGS[name][1](value)
        self._given = {**self._ours, **_changed} if _changed else self._ours

    def __exit__(self, *error: object) -> None:
        if os.getpid() != self._process:
            os._exit(0)
        for name, value in _read().items():
            ours, given = self._ours[name], self._given[name]
            if value is not given and value != given:
                _changed[name] = value
            if value is not ours and value != ours:
                _SETTINGS[name][1](ours)


@contextmanager
def streams_that_stay_open() -> Iterator[None]:
    """stdout and stderr are shared with whoever reports: a target that closes them closes them for nobody."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _StaysOpen(sys.stdout), _StaysOpen(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def forget_the_target() -> None:
    """Before another target is judged in this process: what the last one set is not its."""
    _changed.clear()


class _StaysOpen:
    def __init__(self, file: Any) -> None:
        self._file = file

    def close(self) -> None:
        self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class KeptSurroundings:
    """The folder, the environment and the functions of torch, as they were when this was made."""

    def __init__(self) -> None:
        self._folder = os.getcwd()
        self._environment = dict(os.environ)

    def restore(self) -> list[str]:
        """Undoes what a target did to them; returns the names of the torch functions that it had replaced."""
        if _folder() != self._folder:
            os.chdir(self._folder)
        if dict(os.environ) != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)
        return _put_torch_back()


def _read() -> dict[str, Any]:
    return {name: get() for name, get in _GETTERS}


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it has been removed
        return None


def _functions_of(holder: Any) -> dict[str, Any]:
    kinds = (FunctionType, BuiltinFunctionType, type(torch.Tensor.add))
    return {name: value for name, value in vars(holder).items() if isinstance(value, kinds)}


_TORCH = {"torch": torch, "torch.Tensor": torch.Tensor, "torch.nn.functional": torch.nn.functional}
_ORIGINALS = {label: _functions_of(holder) for label, holder in _TORCH.items()}
_TENSORS_OWN = frozenset(vars(torch.Tensor))


def _put_torch_back() -> list[str]:
    """torch replaces some functions of its own when parts of it load; those replacements stay."""
    replaced = []
    for label, holder in _TORCH.items():
        originals, present = _ORIGINALS[label], vars(holder)
        changed = [name for name, original in originals.items() if present.get(name) is not original]
        for name in changed:
            if not _is_torchs_own(present.get(name)):
                setattr(holder, name, originals[name])
                replaced.append(f"{label}.{name}")
    inherited = [name for name in vars(torch.Tensor) if hasattr(torch._C.TensorBase, name)]
    for name in inherited:
        if name not in _TENSORS_OWN and not _is_torchs_own(vars(torch.Tensor)[name]):
            delattr(torch.Tensor, name)
            replaced.append(f"torch.Tensor.{name}")
    return replaced


def _is_torchs_own(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith("torch")
