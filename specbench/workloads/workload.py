"""A workload: prompts in categories, and parts of it: so many a category, or those of a length.

It says what is asked and in which order, not what a good answer would be.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

BOUNDS = (128, 512, 2048)  # prompt tokens


@dataclass(frozen=True)
class Prompt:
    """What one user sends: `turns`, each after the model's own answer to the one before.

    source: where it comes from, for reports. is_chat: False for a text that is to be continued, which no chat template
    is put around.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    source: str
    is_chat: bool = True

    def __post_init__(self) -> None:
        for field in ("id", "category", "source"):
            if not getattr(self, field):
                raise ValueError(f"prompt {self.id!r}: {field} is empty: reports name it")
        if not self.turns:
            raise ValueError(f"prompt {self.id!r}: turns is empty: nothing is asked")
        for idx, turn in enumerate(self.turns):
            if not turn.strip():
                raise ValueError(f"prompt {self.id!r}: turns[{idx}] is empty")
        if not self.is_chat and len(self.turns) != 1:
            raise ValueError(f"prompt {self.id!r}: a text to be continued has 1 turn, not {len(self.turns)}")


@dataclass(frozen=True)
class Workload:
    """prompts: in the order in which they are asked, no id twice. notes: sentences that belong beside any number that
    is measured on it, such as what was left out."""

    name: str
    prompts: tuple[Prompt, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError(f"workload {self.name}: prompts is empty: nothing is asked")
        twice = [one for one, count in Counter(prompt.id for prompt in self.prompts).items() if count > 1]
        if twice:
            raise ValueError(f"workload {self.name}: prompt {twice[0]} is there twice")

    @property
    def sha256(self) -> str:
        """Of ids, categories, turns and is_chat in order: the same prompts, from whichever file they were read."""
        digest = hashlib.sha256()
        for one in self.prompts:
            digest.update(json.dumps([one.id, one.category, one.turns, one.is_chat]).encode() + b"\n")
        return digest.hexdigest()

    @property
    def categories(self) -> dict[str, int]:
        """How many prompts each has, in order of their first."""
        return dict(Counter(prompt.category for prompt in self.prompts))


def sample(workload: Workload, per_category: int, *, seed: int = 0) -> Workload:
    """So many prompts of each category, in the workload's order. ValueError where a category has fewer.

    A prompt is in or out by a hash of seed and id: the same on every machine, whatever stands beside it, and a larger
    sample holds the smaller ones.
    """
    if per_category < 1:
        raise ValueError(f"per_category = {per_category} must be >= 1")
    for category, num in workload.categories.items():
        if num < per_category:
            raise ValueError(f"category {category} of {workload.name} has {num} prompts, {per_category} were asked for")
    chosen: set[str] = set()
    for category in workload.categories:
        ids = [one.id for one in workload.prompts if one.category == category]
        ids.sort(key=lambda one: hashlib.sha256(f"{seed}:{one}".encode("utf-8", "surrogatepass")).digest())
        chosen.update(ids[:per_category])
    kept = tuple(one for one in workload.prompts if one.id in chosen)
    return replace(workload, name=f"{workload.name} ({per_category} a category, seed {seed})", prompts=kept)


def by_length(workload: Workload, lengths: Mapping[str, int], bounds: Sequence[int] = BOUNDS) -> dict[str, Workload]:
    """The workload in buckets that are not empty, the shortest first, by name: "1-128", "129-512", ..., "2049-".

    lengths: tokens of each prompt by its id (`chat.lengths`). bounds: the most tokens of each bucket but the last.
    """
    if not bounds or bounds[0] < 1 or any(high <= low for low, high in pairwise(bounds)):
        raise ValueError(f"bounds = {list(bounds)} must be increasing numbers of at least 1")
    lows = [1, *(bound + 1 for bound in bounds)]
    names = [f"{low}-{high}" for low, high in zip(lows, bounds, strict=False)] + [f"{lows[-1]}-"]
    buckets: dict[str, list[Prompt]] = {name: [] for name in names}
    for one in workload.prompts:
        buckets[names[sum(lengths[one.id] > bound for bound in bounds)]].append(one)
    return {
        name: replace(workload, name=f"{workload.name} ({name} tokens)", prompts=tuple(prompts))
        for name, prompts in buckets.items()
        if prompts
    }
