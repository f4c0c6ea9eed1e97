"""What every engine's file offers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Missing(Exception):
    """The engine is not installed; the text is the command that installs it."""


@dataclass(frozen=True)
class Files:
    """A sentinel and its drafter, as engines load them: folders of safetensors, and GGUF files. Those that hold the
    format of weights that is asked for are there."""

    target: Path
    drafter: Path
    target_gguf: Path
    drafter_gguf: Path


@dataclass(frozen=True)
class Answer:
    """tokens: the new ones, -1 for what is no token of the sentinel. num_forwards: of the target, for this request;
    num_drafted, num_kept: drafts that it verified and kept. None where the engine does not say."""

    tokens: tuple[int, ...]
    num_forwards: int | None = None
    num_drafted: int | None = None
    num_kept: int | None = None


class Engine(Protocol):
    """formats: of the weights, as `generate` takes them. modes: ways to decode, "plain" first, which drafts nothing."""

    modes: tuple[str, ...]
    formats: tuple[str, ...]

    def version(self) -> str:
        """Name and version; raises `Missing`."""

    def generate(
        self, files: Files, requests: Sequence[tuple[tuple[int, ...], int]], *, mode: str, weights: str
    ) -> Iterator[Answer]:
        """Greedy answers in the order of the requests, each a prompt (token ids, BOS first) and how many tokens."""
