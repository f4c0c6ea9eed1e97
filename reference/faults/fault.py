"""What a planted fault is: a name, what it does, when it shows, the claim that must catch it, and the replacement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specbench.reference.target import ReferenceTarget
from specbench.steps import Steps


def unchanged(steps: Steps) -> Steps:
    """For faults that lie outside the steps."""
    return steps


@dataclass(frozen=True)
class Fault:
    """id: attribute-like name. fault_class: as in the catalogue of real bugs. plant: good steps in, faulty steps out,
    with fresh state each time it is called. target: the whole faulty target, where the fault is in no step."""

    id: str
    fault_class: str
    sentence: str
    shows_when: str
    claim: str
    plant: Callable[[Steps], Steps] = unchanged
    target: Callable[[], Any] | None = None

    def make(self) -> Any:
        """A fresh faulty target."""
        return ReferenceTarget(self.plant) if self.target is None else self.target()
