"""How cases of kernels are drawn: so many each run, by the run's profile and seed, and shrunk by Hypothesis."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings

from specbench.profiles import PROFILES

USUAL = "standard"  # profile, whose number of cases the others scale


def drawn(num_cases: int) -> Callable[[Any], Any]:
    """num_cases: in a run of the standard profile, in proportion in the others."""
    share = settings().max_examples / PROFILES[USUAL].max_examples
    return settings(
        max_examples=math.ceil(num_cases * share),
        deadline=None,
        database=None,
        derandomize=False,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
