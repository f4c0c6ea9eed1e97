"""The reference decoder with every kernel in it, as a target: `--target specbench.suites.kernels.decoder:KernelTarget`.

Over our own models and over transformers models. Falcon's and Bloom's attention cannot be taken over: there every
kernel but that one runs. In Triton's interpreter acceptance at a temperature is the reference's, since the claims about
laws verify some 45,000 drafts; `SamplingKernelTarget` runs that kernel there too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from specbench.kernels.launch import check_runs
from specbench.kernels.steps import Attend, kernel_steps
from specbench.protocols import Drafter, LanguageModel
from specbench.reference.decoder import Decoder
from specbench.reference.sampling import probs
from specbench.reference.target import ReferenceTarget
from specbench.suites.kernels import DEVICE


class KernelTarget(ReferenceTarget):
    """sampling: whether `verify_sample` accepts at temperatures above 0; None for yes on a GPU alone. Rows are moved in
    place, so that only caches with a place for each row are offered."""

    cache_kinds = ("preallocated", "paged_1", "paged_4", "paged_16", "int8", "fp8")

    def __init__(self, *, sampling: bool | None = None) -> None:
        super().__init__()
        check_runs("KernelTarget", given=torch.empty(0, device=DEVICE))
        self._sampling = DEVICE == "cuda" if sampling is None else sampling

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
            model.with_attention(Attend()) if takes_attention and hasattr(model, "with_attention") else model
        )  # for batches
        decoder = super().build(fused, drafter, cache=cache, layout=layout, batch_layout=batch_layout, group=group)
        base, steps = decoder.steps, kernel_steps(decoder.steps, device=DEVICE, probs=probs if self._sampling else None)
        if not takes_attention:
            steps = replace(steps, forward=base.forward)
        if layout != "tree_mask":  # only trees with a mask have a kernel that lays them out
            steps = replace(steps, flatten=base.flatten)
        decoder.steps = steps
        return decoder


class SamplingKernelTarget(KernelTarget):
    """With `verify_sample` wherever it runs."""

    def __init__(self) -> None:
        super().__init__(sampling=True)
