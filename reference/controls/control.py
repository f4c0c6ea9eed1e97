"""What a control is: a name, what it does, why that is right, and the target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Control:
    """id: attribute-like name. sentence: what it does unlike the reference. why_right: why no claim may tell. make: a
    fresh target."""

    id: str
    sentence: str
    why_right: str
    make: Callable[[], Any]
