"""The reference decoder as a target: what `pytest suites/consistency` judges when no other is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from specbench.protocols import Drafter, LanguageModel
from specbench.reference.decoder import Decoder
from specbench.reference.layouts import LAYOUTS
from specbench.reference.steps import STEPS
from specbench.steps import Steps


class ReferenceTarget:
    """plant: turns good steps into faulty ones, for the fault bank; None leaves them alone."""

    def __init__(self, plant: Callable[[Steps], Steps] | None = None) -> None:
        self._plant = plant

    def build(
        self, model: LanguageModel, drafter: Drafter | None, *, cache: str = "contiguous", layout: str = "tree_mask"
    ) -> Decoder:
        """A fresh decoder over in-process objects."""
        steps = replace(STEPS, flatten=LAYOUTS[layout])
        return Decoder(model, drafter, steps=self._plant(steps) if self._plant else steps, cache=cache)


def reference() -> ReferenceTarget:
    """The correct decoder."""
    return ReferenceTarget()
