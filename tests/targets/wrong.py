"""Decoders that misbehave, each in one way, over a model and drafter that the harness hands them."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

import torch

from specbench.reference.decoder import Decoder
from specbench.tree import DraftTree
from specbench.types import Generation, Taps


class _Factory:
    """A target whose build returns decoders of class `made`."""

    made: type[Decoder] = Decoder

    def build(self, model: Any, drafter: Any) -> Decoder:
        return self.made(model, drafter)


class _RaisingDecoder(Decoder):
    def generate(self, *args: Any, **keywords: Any) -> Generation:
        raise RuntimeError("CUDA error: device-side assert\ntriggered somewhere else")


class _NaNDecoder(Decoder):
    def forward_tree(self, tree: DraftTree, *, taps: Taps | None = None) -> torch.Tensor:
        logits = super().forward_tree(tree, taps=taps)
        logits[-1, 1] = torch.nan
        return logits


class _WrongShapeDecoder(Decoder):
    def forward_tree(self, tree: DraftTree, *, taps: Taps | None = None) -> torch.Tensor:
        return super().forward_tree(tree, taps=taps)[None]


class _SleepingDecoder(Decoder):
    def generate(self, *args: Any, **keywords: Any) -> Generation:
        time.sleep(600)
        raise AssertionError("the watchdog did not end the process")


class _LeavingDecoder(Decoder):
    def generate(self, *args: Any, **keywords: Any) -> Generation:
        os._exit(3)


class _RacingDecoder(Decoder):
    """One generation of the process, the fourth, ends in a wrong token: what a race between streams looks like."""

    calls = itertools.count(1)

    def generate(self, *args: Any, **keywords: Any) -> Generation:
        out = super().generate(*args, **keywords)
        tokens = out.tokens
        if tokens and next(self.calls) == 4:
            tokens = (*tokens[:-1], (tokens[-1] + 1) % self.vocab_size)
        return Generation(tokens, out.finish_reason)


class Raising(_Factory):
    made = _RaisingDecoder


class NaN(_Factory):
    made = _NaNDecoder


class WrongShape(_Factory):
    made = _WrongShapeDecoder


class Sleeping(_Factory):
    made = _SleepingDecoder


class Leaving(_Factory):
    made = _LeavingDecoder


class Nondeterministic(_Factory):
    made = _RacingDecoder


class VerifierOnly:
    """Level 2 alone, and right."""

    vocab_size = 5

    def verify(self, tree: DraftTree, target_logits: torch.Tensor, *, sampling: object, coins: object) -> object:
        from specbench.reference.verify import greedy_walk

        return greedy_walk(tree, target_logits)


class GeneratorOnly:
    """Levels 0 and 1 alone, and right: the next token is the last one plus one."""

    dtype = "fp64"

    def logits(self, tokens: list[int]) -> torch.Tensor:
        return torch.nn.functional.one_hot((torch.tensor(tokens) + 1) % 7, 7).double()

    def generate(self, prompt: list[int], *, max_new_tokens: int, sampling: object, stop: Any, seed: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < max_new_tokens and (not tokens or tokens[-1] not in stop.eos_token_ids):
            tokens.append(([*prompt, *tokens][-1] + 1) % 7)
        return tokens


class HangsAtOnce:
    """Does not even answer the first question about its logits."""

    def logits(self, tokens: list[int]) -> torch.Tensor:
        time.sleep(600)
        raise AssertionError("the watchdog did not end the process")


class RaisesAtOnce:
    def logits(self, tokens: list[int]) -> torch.Tensor:
        raise RuntimeError("no weights here")
