"""How much is drawn: quick for every save, standard for every push, thorough for the night.

max_examples: Hypothesis cases per claim on the exact tiny subjects; other subjects take a share of it. num_real: fixed
cases per claim on a real model. real_tokens, real_prompts: its generations.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Profile:
    name: str
    max_examples: int
    num_real: int
    real_prompts: int
    real_tokens: int
    real_dtypes: tuple[str, ...]


PROFILES = {
    one.name: one
    for one in (
        Profile("quick", 12, num_real=1, real_prompts=1, real_tokens=12, real_dtypes=("fp32",)),
        Profile("standard", 48, num_real=2, real_prompts=3, real_tokens=24, real_dtypes=("fp32", "bf16")),
        Profile("thorough", 400, num_real=6, real_prompts=20, real_tokens=64, real_dtypes=("fp32", "bf16")),
    )
}


def profile_named(name: str | None) -> Profile:
    """The profile behind --hypothesis-profile; any other name (a project's own) means standard."""
    return PROFILES.get(name or "standard", PROFILES["standard"])
