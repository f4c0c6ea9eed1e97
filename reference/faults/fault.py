"""What a planted fault is: a name, what it does, when it shows, the claim that must catch it, and the replacement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specbench.steps import Steps


@dataclass(frozen=True)
class Fault:
    """id: attribute-like name. fault_class: as in the catalogue of real bugs. plant: good steps in, faulty steps out,
    with fresh state each time it is called."""

    id: str
    fault_class: str
    sentence: str
    shows_when: str
    claim: str
    plant: Callable[[Steps], Steps]
