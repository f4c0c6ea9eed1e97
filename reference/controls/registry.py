"""All controls by id, and each as a target: `--target specbench.reference.controls.registry:path_batch`."""

from __future__ import annotations

from typing import Any

from specbench.reference.controls import (
    duplicates,
    habits,
    key_positions,
    matching,
    paths,
    plain,
    recompute,
    rounding,
    row_order,
    storage,
)
from specbench.reference.controls.control import Control

CONTROLS: dict[str, Control] = {
    one.id: one
    for family in (
        plain,
        paths,
        row_order,
        key_positions,
        recompute,
        matching,
        storage,
        duplicates,
        rounding,
        habits,
    )
    for one in family.CONTROLS
}


def __getattr__(name: str) -> Any:
    if name in CONTROLS:
        return CONTROLS[name].make()
    raise AttributeError(f"no control {name!r}: there are {', '.join(CONTROLS)}")


def __dir__() -> list[str]:
    return [*globals(), *CONTROLS]
