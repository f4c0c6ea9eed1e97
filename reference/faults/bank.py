"""All planted faults by id, and each as a target: `--target specbench.reference.faults.bank:sibling_leak`."""

from __future__ import annotations

from typing import Any

from specbench.reference.faults import (
    acceptance,
    attention,
    batch,
    buffers,
    cache,
    capacity,
    cost,
    drafter,
    draws,
    heads,
    kinds,
    law,
    law_params,
    long,
    loop,
    mask,
    memory,
    metric,
    numerics,
    pages,
    positions,
    prefixes,
    processors,
    ranks,
    recurrent,
    reduced,
    rows,
    states,
    stopping,
    ties,
    tree,
    vocab,
    windows,
)
from specbench.reference.faults.fault import Fault

FAULTS: dict[str, Fault] = {
    one.id: one
    for family in (
        mask,
        attention,
        heads,
        windows,
        positions,
        long,
        cache,
        kinds,
        recurrent,
        pages,
        states,
        loop,
        buffers,
        capacity,
        prefixes,
        acceptance,
        ties,
        stopping,
        processors,
        batch,
        rows,
        ranks,
        drafter,
        memory,
        numerics,
        reduced,
        cost,
        metric,
        vocab,
        draws,
        law,
        law_params,
        tree,
    )
    for one in family.FAULTS
}


def __getattr__(name: str) -> Any:
    if name in FAULTS:
        return FAULTS[name].make()
    raise AttributeError(f"no planted fault {name!r}: there are {', '.join(FAULTS)}")


def __dir__() -> list[str]:
    return [*globals(), *FAULTS]
