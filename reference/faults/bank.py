"""All planted faults by id, and each as a target: `--target specbench.reference.faults.bank:sibling_leak`."""

from __future__ import annotations

from typing import Any

from specbench.reference.faults import (
    acceptance,
    batch,
    cache,
    drafter,
    kinds,
    long,
    loop,
    mask,
    pages,
    positions,
    processors,
    ranks,
    states,
    stopping,
)
from specbench.reference.faults.fault import Fault

FAULTS: dict[str, Fault] = {
    one.id: one
    for family in (
        mask,
        positions,
        long,
        cache,
        kinds,
        pages,
        states,
        loop,
        acceptance,
        stopping,
        processors,
        batch,
        ranks,
        drafter,
    )
    for one in family.FAULTS
}


def __getattr__(name: str) -> Any:
    if name in FAULTS:
        return FAULTS[name].make()
    raise AttributeError(f"no planted fault {name!r}: there are {', '.join(FAULTS)}")


def __dir__() -> list[str]:
    return [*globals(), *FAULTS]
