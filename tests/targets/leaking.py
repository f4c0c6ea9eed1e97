"""Decoders with a large vocabulary that say what they were asked wherever they can, and fail on tokens from 5000 on."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

import torch

VOCAB_SIZE = 9000
WORDS = "Alice lives in Oslo"


class _Leaking:
    dtype = "fp64"

    def logits(self, tokens: list[int]) -> torch.Tensor:
        return torch.nn.functional.one_hot((torch.tensor(tokens) * 3 + 1) % VOCAB_SIZE, VOCAB_SIZE).double()

    def generate(self, prompt: list[int], *, max_new_tokens: int, sampling: object, stop: Any, seed: int) -> list[int]:
        said = f"{WORDS}: {prompt}"
        print(said)
        print(said, file=sys.stderr)
        warnings.warn(said, stacklevel=1)
        logging.getLogger("decoder").error(said)
        tokens: list[int] = []
        while len(tokens) < max_new_tokens and (not tokens or tokens[-1] not in stop.eos_token_ids):
            tokens.append(([*prompt, *tokens][-1] * 3 + 1) % VOCAB_SIZE)
        return self.fail(prompt, tokens) if max(prompt) >= 5000 else tokens

    def fail(self, prompt: list[int], tokens: list[int]) -> Any:
        raise NotImplementedError


class Wrong(_Leaking):
    """Emits another first token."""

    def fail(self, prompt: list[int], tokens: list[int]) -> list[int]:
        return [(tokens[0] + 7001) % VOCAB_SIZE, *tokens[1:]] if tokens else tokens


class Telling(_Leaking):
    """Raises with the prompt in the text."""

    def fail(self, prompt: list[int], tokens: list[int]) -> list[int]:
        raise RuntimeError(f"{WORDS}: cannot answer {prompt}")


class Chatting(_Leaking):
    """Returns the prompt in a text."""

    def fail(self, prompt: list[int], tokens: list[int]) -> str:
        return f"{WORDS}: {prompt}"
