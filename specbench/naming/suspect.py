"""One line of the ranked list of what a fault may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Suspect:
    """fault_class: as in the bank. fault: id of the planted fault that does the same, "" when there is none. evidence:
    why it is suspected, one sentence."""

    fault_class: str
    fault: str
    evidence: str

    def __str__(self) -> str:
        name = f"{self.fault_class} ({self.fault})" if self.fault else self.fault_class
        return f"{name}: {self.evidence}"


def as_line(suspects: Sequence[Suspect]) -> str:
    """What a failure says: the first suspect, and the next two by class alone. Behind a planted fault that gives the
    same numbers only others of that kind count."""
    if not suspects:
        return UNKNOWN
    others = ", ".join(one.fault_class for one in suspects[1:3] if one.fault or not suspects[0].fault)
    return f"{suspects[0]}{f'; less likely: {others}' if others else ''}"
