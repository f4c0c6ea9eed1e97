"""Triton's interpreter, made quicker, says what it says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specbench.checks.attention import arguments
from specbench.kernels import tree_attention as kernel
from specbench.kernels.interpreter import interpreter, patch_once_a_launch
from specbench.suites.kernels import DEVICE
from specbench.suites.kernels.cases import attention_case

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="kernels are not interpreted where a GPU is")
CASE = attention_case([(-1, 0, 0, 1, 1), (-1, 0)], [70, 3], group=2, window=5, alibi=1, num_splits=2)


def answer() -> tuple[Tensor, Tensor]:
    positional, keyword = arguments(CASE)
    return kernel.tree_attention(*positional, max_nodes=5, num_splits=2, **keyword)


def test_answers_are_the_same_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = answer()
    monkeypatch.setattr(interpreter, "_patch_lang", interpreter._patch_lang._patch)
    assert all(torch.equal(one, other) for one, other in zip(quick, answer(), strict=True))


def test_each_module_is_patched_once_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel sees `tl`, and what it calls, `tl.max` for instance, sees `tl.core`."""
    original, names = interpreter._patch_lang._patch, []

    def counted(fn: Callable[..., Any]) -> Any:
        names.append(fn.__name__)
        return original(fn)

    monkeypatch.setattr(interpreter, "_patch_lang", counted)
    patch_once_a_launch()
    answer()
    launches = [one for one in names if one.endswith("_kernel")]
    assert launches == ["tree_mask_kernel", "tree_attention_kernel", "merge_kernel"]
    assert len(names) <= 2 * len(launches)


def test_a_launch_that_fails_leaves_the_next_one_alone() -> None:
    right, loaded = answer(), kernel.tl.load
    with pytest.raises(TypeError, match="missing"):
        kernel.tree_attention_kernel[(1,)]()
    assert kernel.tl.load is loaded
    assert all(torch.equal(one, other) for one, other in zip(right, answer(), strict=True))
