"""A run session for tests: no real model, no time limit, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specbench.judge import RunSession, quiet_session
from specbench.loading import Target
from specbench.profiles import PROFILES, Profile


def session_on(
    adapter: Any,
    *,
    name: str = "it",
    profile: Profile = PROFILES["quick"],
    seed: int = 0,
    make: Callable[[], Any] | None = None,
    naming: bool = False,
) -> RunSession:
    return quiet_session(Target(name, adapter, make=make), profile=profile, seed=seed, naming=naming)
