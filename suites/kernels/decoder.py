"""The reference decoder with every kernel in it, as a target: `--target specbench.suites.kernels.decoder:KernelTarget`.

Over our own models and over transformers models. Falcon's and Bloom's attention cannot be taken over: there every
kernel but that one runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specbench.kernels.steps import attend, kernel_steps
from specbench.protocols import Drafter, LanguageModel
from specbench.reference.decoder import Decoder
from specbench.reference.target import ReferenceTarget
from specbench.suites.kernels import DEVICE


class KernelTarget(ReferenceTarget):
    """Rows are moved in place, so that only caches with a place for each row are offered."""

    cache_kinds = ("preallocated", "paged_1", "paged_4", "paged_16", "int8", "fp8")

    def build(
        self,
        model: LanguageModel,
        drafter: Drafter | None,
        *,
        cache: str = "preallocated",
        layout: str = "tree_mask",
        batch_layout: str = "packed",
        group: Any = None,
    ) -> Decoder:
        """A fresh decoder over in-process objects."""
        takes_attention = getattr(model, "takes_attention", True)
        fused = (
            model.with_attention(attend) if takes_attention and hasattr(model, "with_attention") else model
        )  # for batches
        decoder = super().build(fused, drafter, cache=cache, layout=layout, batch_layout=batch_layout, group=group)
        base, steps = decoder.steps, kernel_steps(decoder.steps, device=DEVICE)
        if not takes_attention:
            steps = replace(steps, forward=base.forward)
        if layout != "tree_mask":  # only trees with a mask have a kernel that lays them out
            steps = replace(steps, flatten=base.flatten)
        decoder.steps = steps
        return decoder
