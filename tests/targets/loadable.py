"""Things to load: right and wrong answers to `--specbench-target`."""

from __future__ import annotations

from typing import Any


class Adapter:
    """The smallest target: a class to be called without arguments."""

    def logits(self, tokens: list[int]) -> list[list[float]]:
        return [[0.0, 1.0] for _ in tokens]


ready_made = Adapter()


def factory() -> Adapter:
    return Adapter()


class Holder:
    inner = ready_made


class NeedsArguments:
    def __init__(self, path: str) -> None:
        self.path = path


def failing_factory() -> Adapter:
    raise FileNotFoundError("weights.bin is not here")


class Misspelt:
    def genrate(self, prompt: list[int]) -> list[int]:
        return prompt


class Stranger:
    def run(self) -> None: ...


class OldGenerate:
    def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        return prompt[:max_tokens]


class NoCacheLen:
    def prefill(self, tokens: list[int]) -> None: ...
    def forward_tree(self, tree: Any) -> None: ...
    def commit(self, path: list[int]) -> None: ...
    def truncate(self, length: int) -> None: ...


class Full(NoCacheLen):
    cache_len = 0
    num_layers = 1

    def generate(self, prompt: Any, *, max_new_tokens: int, sampling: Any, stop: Any, seed: int) -> list[int]:
        return []

    def verify(self, tree: Any, target_logits: Any, **keywords: Any) -> None: ...
    def forward_tree(self, tree: Any, *, taps: Any = None) -> None: ...
    def kv(self, layer: int) -> None: ...
    def with_threshold(self, threshold: float) -> Full:
        return self
