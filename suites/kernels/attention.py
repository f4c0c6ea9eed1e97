"""Our own tree attention as a target of level 4: `--target specbench.suites.kernels.attention:Attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specbench.kernels.tree_attention import tree_attention


class Attention:
    """attention: of the same signature, another one with a fault in it for instance."""

    features = ("any_order", "unused_rows", "strides")

    def __init__(self, attention: Callable[..., Any] = tree_attention) -> None:
        self.attention = attention
