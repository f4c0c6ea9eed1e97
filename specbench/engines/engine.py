"""What every engine's file offers. Standard library only: an engine's environment may hold nothing of ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


class Missing(Exception):
    """The engine is not installed; the text is the command that installs it."""


class Refused(Exception):
    """A mode or a setting cannot be asked of the engine; the text says why, in a sentence."""


# Before the first answer these say that something cannot be asked for. Later, and whatever else an engine raises, is a
# fault of it: a ValueError comes as easily from a wrong shape in the middle of a verification.
REFUSALS = (Refused, NotImplementedError)


@contextmanager
def configuring() -> Iterator[None]:
    """Around what only loads or sets up an engine: a ValueError or ImportError there says what it cannot do."""
    try:
        yield
    except (ValueError, ImportError) as error:
        raise Refused(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Mode:
    """One way of decoding. drafts: drafts are verified. as_plain: its numbers are rounded as plain decoding's are, so
    that ties can be judged by those; not so with a quantised cache, which only a sentinel judges."""

    drafts: bool = False
    as_plain: bool = True


@dataclass(frozen=True)
class Files:
    """A target and its drafter as engines load them: folders of safetensors, and GGUF files. Those that hold the
    format of weights that is asked for are there.

    other_drafter: with other token ids for the same symbols, of sentinels only. symbols: one character a token of a
    sentinel; "" for a real model, whose tokenizer is in the folder.
    """

    target: Path
    drafter: Path
    other_drafter: Path
    target_gguf: Path
    drafter_gguf: Path
    symbols: str


@dataclass(frozen=True)
class Request:
    """prompt: token ids, BOS first where the model has one. text: the same without BOS, for engines that read text."""

    prompt: tuple[int, ...]
    text: str
    max_new_tokens: int


@dataclass(frozen=True)
class Settings:
    """mode, weights: of those that the engine names. temperature: 0 is greedy. top_k, top_p, min_p: None is off.
    seed: of the draws, where the engine takes one; request i may add i."""

    mode: str
    weights: str
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """tokens: the new ones, -1 for what is no token of the sentinel. num_forwards: of the target, for this request;
    num_drafted, num_kept: drafts that it verified and kept. None where the engine does not say.

    logprobs: for each new token what the engine tells about its place, as (token, natural log probability at
    temperature 1), the most likely ones and the emitted one; empty where it does not say.
    """

    tokens: tuple[int, ...]
    num_forwards: int | None = None
    num_drafted: int | None = None
    num_kept: int | None = None
    logprobs: tuple[tuple[tuple[int, float], ...], ...] = field(default=())


class Engine(Protocol):
    """requirements: what pip installs for it. weights: formats that it reads, the first is the default. modes: by name;
    those whose name begins with "plain" decode without drafts and differ in shape alone (batch, split of the prompt);
    "plain" is the first. temperature_last: top_k, top_p and min_p look at the law of temperature 1."""

    requirements: tuple[str, ...]
    weights: tuple[str, ...]
    modes: Mapping[str, Mode]
    temperature_last: bool

    def version(self) -> str:
        """Name and version; raises `Missing`."""

    def generate(self, files: Files, requests: Sequence[Request], settings: Settings) -> Iterator[Answer]:
        """Answers in the order of the requests. A text ends early only with an end token of the model, which may be
        left out. `Refused` says, before the first of them, what cannot be asked of it; what else it raises is a BUG."""
