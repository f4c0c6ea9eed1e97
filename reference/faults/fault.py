"""What a planted fault is: a name, what it does, when it shows, the claim that must catch it, and the replacement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specbench.cases import LawCase
from specbench.reference.target import ReferenceTarget
from specbench.steps import Steps

SUBJECT = "tiny-fp64"  # whose models show nearly all of them


def unchanged(steps: Steps) -> Steps:
    """For faults that lie outside the steps."""
    return steps


@dataclass(frozen=True)
class Fault:
    """id: attribute-like name. fault_class: as in the catalogue of real bugs. plant: good steps in, faulty steps out,
    with fresh state each time it is called. target: the whole faulty target, where the fault is in no step.

    origin: a public report or fix of such a fault, `owner/repository#number`; empty where none is known. subtle: what
    it needs beside any draft at all, empty where any reasonable test shows it. kin: a name shared by faults that are
    one mechanism with another constant or in another place, empty where there is none: naming one of them by another
    would prove nothing. subject: on whose models it is judged; "own" for a target with a model of its own. tv: the
    exact total variation of one round's law from the target's on the drafts of `toy`, None where it was not taken.
    """

    id: str
    fault_class: str
    sentence: str
    shows_when: str
    claim: str
    plant: Callable[[Steps], Steps] = unchanged
    target: Callable[[], Any] | None = None
    origin: str = ""
    subtle: str = ""
    kin: str = ""
    subject: str = SUBJECT
    tv: float | None = None
    toy: LawCase | None = None

    def make(self) -> Any:
        """A fresh faulty target."""
        return ReferenceTarget(self.plant) if self.target is None else self.target()
