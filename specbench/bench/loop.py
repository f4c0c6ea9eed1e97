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
from specbench.bench.sides import Side, generated
from specbench.types import Stop
from specbench.workloads.chat import encode
from specbench.workloads.loops import loop_share
from specbench.workloads.workload import Prompt

WARM_UP = 8  # tokens
FEWEST = 4  # tokens of an answer that is worth a timing


@dataclass(frozen=True)
class Item:
    """A prompt in the target's tokens; of a batch, several that are decoded together. texts: their ids and tokens.
    prompt: of a workload, where it has later turns."""

    id: str
    category: str
    tokens: tuple[int, ...]
    others: tuple[tuple[str, tuple[int, ...]], ...] = ()
    prompt: Prompt | None = None

    @property
    def texts(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return ((self.id, self.tokens), *self.others)

    @property
    def num_texts(self) -> int:
        return 1 + len(self.others)

    def split(self, answer: Sequence[int]) -> list[tuple[int, ...]]:
        """An answer by text: as many tokens of each."""
        each = len(answer) // self.num_texts
        return [tuple(answer[start : start + each]) for start in range(0, each * self.num_texts, each)]


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
            "prompts": {name: [one.category, len(tokens)] for one in self.items for name, tokens in one.texts},
            "prompts_hash": key_of({name: list(tokens) for one in self.items for name, tokens in one.texts}),
        }

    @property
    def _common(self) -> dict[str, Any]:
        names = ("weights", "forward", "draft_model", "target", "dtype", "device", "threads", "max_new_tokens", "seed")
        trained = {"trained": dict(self.trained)} if self.trained else {}
        return {name: getattr(self, name) for name in names} | trained

    def key(self, item: Item, setting: Setting, repetition: int, num: int) -> str:
        prompts = [list(tokens) for _, tokens in item.texts]
        own = {"setting": setting.as_fields(), "prompts": prompts, "repetition": repetition, "num": num}
        return key_of(self._common | own)

    def turns(self) -> Iterator[tuple[Item, int, Setting]]:
        """In the order of measuring: A B C, A B C on one prompt, then on the next."""
        for item in self.items:
            for repetition in range(self.repetitions):
                for setting in self.settings:
                    yield item, repetition, setting


def with_later_turns(
    items: Sequence[Item], decoder: Any, tokenizer: Any, ends: Sequence[int], num: int
) -> tuple[Item, ...]:
    """Behind each first turn the later ones, which hold what came before: the turns, and the model's own answers by
    `decoder`, of up to `num` tokens."""
    found = []
    for item in items:
        found.append(item)
        tokens, answers = item.tokens, list[str]()
        for turn in range(2, len(item.prompt.turns) + 1 if item.prompt is not None else 0):
            assert item.prompt is not None
            said = decoder.generate(tokens, max_new_tokens=num, stop=Stop(tuple(ends))).tokens
            answers.append(tokenizer.decode([one for one in said if one not in ends]))
            tokens = tuple(encode(item.prompt, tokenizer, answers))
            found.append(Item(f"{item.id} turn {turn}", item.category, tokens))
    return tuple(found)


def plain_texts(plan: Plan, decoder: Any, ends: Sequence[int], file: RowFile) -> dict[str, tuple[int, ...]]:
    """The plain text of each prompt by our decoder without a drafter, from the file where it is there already. Of a
    batch all texts are as long as the shortest, one behind the other, so that they are there to the end together."""
    known = {one["prompt"]: tuple(one["tokens"]) for one in file.records if one["kind"] == "plain"}
    found = {}
    for item in plan.items:
        for name, tokens in item.texts:
            if name not in known:
                stop = Stop(tuple(ends))
                known[name] = decoder.generate(tokens, max_new_tokens=plan.max_new_tokens, stop=stop).tokens
                file.append({"kind": "plain", "prompt": name, "tokens": list(known[name])})
        texts = [known[name] for name, _ in item.texts]
        shortest = min(map(len, texts))
        found[item.id] = tuple(token for text in texts for token in text[:shortest])
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
            generated(sides[setting.name], setting.batch, [tokens for _, tokens in left[0][0].texts], WARM_UP)
    for done, (item, repetition, setting, key) in enumerate(left, start=len(turns) - len(left)):
        tell(done, len(turns), f"{setting.name} on {item.id}")
        gc.collect()
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        seed, prompts = plan.seed + repetition, [tokens for _, tokens in item.texts]
        try:
            answer = generated(sides[setting.name], setting.batch, prompts, nums[item.id], seed=seed)
        except Exception as error:  # a target may raise anything
            told = f"{type(error).__name__}: {error}"
            raise RuntimeError(f"{setting.name} on prompt {item.id} raised {told}") from error
        if len(answer.tokens) != nums[item.id] * item.num_texts:
            got = f"{len(answer.tokens)} tokens, must give {nums[item.id] * item.num_texts}"
            raise RuntimeError(f"{setting.name} on prompt {item.id} gave {got}: end tokens must not end it here")
        row = Row(
            key=key,
            setting=setting.name,
            prompt=item.id,
            category=item.category,
            repetition=repetition,
            num_prompt=sum(map(len, prompts)),
            looping=sum(map(loop_share, item.split(answer.tokens))) / item.num_texts,
            load=load,
            **vars(answer),
        )
        file.append(row.as_record())
    tell(len(turns), len(turns), "")
