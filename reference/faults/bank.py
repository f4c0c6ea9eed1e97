"""All planted faults by id, and each as a target: `--target specbench.reference.faults.bank:sibling_leak`."""

from __future__ import annotations

from specbench.reference.faults import acceptance, cache, mask, positions, stopping
from specbench.reference.faults.fault import Fault
from specbench.reference.target import ReferenceTarget

FAULTS: dict[str, Fault] = {
    one.id: one for family in (mask, positions, cache, acceptance, stopping) for one in family.FAULTS
}


def __getattr__(name: str) -> ReferenceTarget:
    if name in FAULTS:
        return ReferenceTarget(FAULTS[name].plant)
    raise AttributeError(f"no planted fault {name!r}: there are {', '.join(FAULTS)}")


def __dir__() -> list[str]:
    return [*globals(), *FAULTS]
