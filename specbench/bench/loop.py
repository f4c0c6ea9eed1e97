"""The measuring loop: prompts outermost, then repetitions, then settings in turn, so that drift hits all alike.

Every row is written as it comes. How many tokens are asked for is decided beforehand, by our own plain decoding up to
an end token: nobody is timed on what comes behind the end of an answer, and all emit the same number.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbench.bench.rows import Row, RowFile, Setting, key_of
from specbench.bench.sides import Side
from specbench.types import Stop
from specbench.workloads.loops import loop_share

WARM_UP = 8  # tokens
FEWEST = 4  # tokens of an answer that is worth a timing


@dataclass(frozen=True)
class Item:
    """A prompt in the target's tokens."""

    id: str
    category: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """All that is to be measured. weights: names the model in the rows' keys. forward: the name of the forward that our
    side runs. draft_model, target: as they were named. trained: hashes of the trained drafters' files, by kind."""

    items: tuple[Item, ...]
    settings: tuple[Setting, ...]
    weights: str
    dtype: str
    threads: int
    max_new_tokens: int
    repetitions: int
    forward: str = ""
    draft_model: str = ""
    trained: Mapping[str, str] = field(default_factory=dict)
    target: str = ""
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        names = [one.name for one in self.settings]
        if len(set(names)) < len(names) or len({one.id for one in self.items}) < len(self.items):
            raise ValueError("settings and prompts must each have a name of their own")
        if self.max_new_tokens < FEWEST or self.repetitions < 1:
            raise ValueError(f"max_new_tokens must be >= {FEWEST} and repetitions >= 1")

    @property
    def definition(self) -> dict[str, Any]:
        return {
            **self._common,
            "repetitions": self.repetitions,
            "settings": {one.name: one.as_fields() for one in self.settings},
            "prompts": {one.id: [one.category, len(one.tokens)] for one in self.items},
            "prompts_hash": key_of({one.id: list(one.tokens) for one in self.items}),
        }

    @property
    def _common(self) -> dict[str, Any]:
        names = ("weights", "forward", "draft_model", "target", "dtype", "device", "threads", "max_new_tokens", "seed")
        trained = {"trained": dict(self.trained)} if self.trained else {}
        return {name: getattr(self, name) for name in names} | trained

    def key(self, item: Item, setting: Setting, repetition: int, num: int) -> str:
        own = {"setting": setting.as_fields(), "prompt": list(item.tokens), "repetition": repetition, "num": num}
        return key_of(self._common | own)

    def turns(self) -> Iterator[tuple[Item, int, Setting]]:
        """In the order of measuring: A B C, A B C on one prompt, then on the next."""
        for item in self.items:
            for repetition in range(self.repetitions):
                for setting in self.settings:
                    yield item, repetition, setting


def plain_texts(plan: Plan, decoder: Any, ends: Sequence[int], file: RowFile) -> dict[str, tuple[int, ...]]:
    """The plain text of each prompt by our decoder without a drafter, from the file where it is there already."""
    found = {one["prompt"]: tuple(one["tokens"]) for one in file.records if one["kind"] == "plain"}
    for item in plan.items:
        if item.id not in found:
            stop = Stop(tuple(ends))
            found[item.id] = decoder.generate(item.tokens, max_new_tokens=plan.max_new_tokens, stop=stop).tokens
            file.append({"kind": "plain", "prompt": item.id, "tokens": list(found[item.id])})
    return found


def measure(
    plan: Plan,
    make: Callable[[Setting], Side],
    nums: Mapping[str, int],
    file: RowFile,
    *,
    tell: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> None:
    """Appends every row that the file lacks. make: called once a setting, which is warmed up then. nums: tokens to ask
    for, by prompt; answers of fewer than FEWEST are not timed. tell: rows done, rows in all, and which is next.

    RuntimeError when a side raises, or gives another number of tokens than it was asked for.
    """
    turns = [
        (item, repetition, setting, plan.key(item, setting, repetition, nums[item.id]))
        for item, repetition, setting in plan.turns()
        if nums[item.id] >= FEWEST
    ]
    left = [one for one in turns if one[3] not in file.keys]
    sides: dict[str, Side] = {}
    for setting in plan.settings:
        if any(one[2] == setting for one in left):
            sides[setting.name] = make(setting)
            sides[setting.name].generate(left[0][0].tokens, WARM_UP)
    for done, (item, repetition, setting, key) in enumerate(left, start=len(turns) - len(left)):
        tell(done, len(turns), f"{setting.name} on {item.id}")
        gc.collect()
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        seed = plan.seed + repetition
        try:
            answer = sides[setting.name].generate(item.tokens, nums[item.id], seed=seed)
        except Exception as error:  # a target may raise anything
            told = f"{type(error).__name__}: {error}"
            raise RuntimeError(f"{setting.name} on prompt {item.id} raised {told}") from error
        if len(answer.tokens) != nums[item.id]:
            got = f"{len(answer.tokens)} tokens, must give {nums[item.id]}"
            raise RuntimeError(f"{setting.name} on prompt {item.id} gave {got}: end tokens must not end it here")
        row = Row(
            key=key,
            setting=setting.name,
            prompt=item.id,
            category=item.category,
            repetition=repetition,
            num_prompt=len(item.tokens),
            looping=loop_share(answer.tokens),
            load=load,
            **vars(answer),
        )
        file.append(row.as_record())
    tell(len(turns), len(turns), "")
