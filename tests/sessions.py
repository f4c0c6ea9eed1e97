"""A run session for tests: no real model, no time limit, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specbench.judge import RunSession
from specbench.loading import Target
from specbench.profiles import PROFILES, Profile


def session_on(
    adapter: Any,
    *,
    name: str = "it",
    profile: Profile = PROFILES["quick"],
    seed: int = 0,
    make: Callable[[], Any] | None = None,
) -> RunSession:
    return RunSession(
        Target(name, adapter, make=make),
        model="none",
        profile=profile,
        seed=seed,
        device="cpu",
        timeout=0,
        on_hang=print,
    )
