"""Decoders that change what is not theirs: their inputs, the process, torch, or their own answers afterwards."""

from __future__ import annotations

import itertools
import os
import random
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specbench.reference.decoder import Decoder
from specbench.tree import DraftTree
from specbench.types import Generation, Taps, VerifyResult


class Factory:
    """made: the decoder that build returns."""

    def __init__(self, made: Callable[..., Decoder]) -> None:
        self._made = made

    def build(self, model: Any, drafter: Any) -> Decoder:
        return self._made(model, drafter)


class Does(Factory):
    """A right decoder that does something else as well, before it generates."""

    def __init__(self, deed: Callable[[], object]) -> None:
        class Doing(Decoder):
            def generate(self, *args: Any, **keywords: Any) -> Generation:
                deed()
                return super().generate(*args, **keywords)

        super().__init__(Doing)


# inputs


class EmptiesThePrompt(Decoder):
    def generate(self, prompt: Any, **keywords: Any) -> Generation:
        out = super().generate(list(prompt), **keywords)
        prompt.clear()
        return out


class RewritesTheTree(Decoder):
    def forward_tree(self, tree: DraftTree, *, taps: Taps | None = None) -> Tensor:
        logits = super().forward_tree(DraftTree.of(tree.token_list, tree.parent_list), taps=taps)
        tree.tokens.zero_()
        tree.parents.fill_(-1)
        return logits


class OverwritesLogits(Decoder):
    def verify(self, tree: DraftTree, target_logits: Tensor, **keywords: Any) -> VerifyResult:
        result = super().verify(tree, target_logits.clone(), **keywords)
        target_logits.zero_()
        return result


class RewritesTheRequest(Decoder):
    """Frozen dataclasses are not that frozen."""

    def generate(self, prompt: Any, *, sampling: Any, stop: Any, **keywords: Any) -> Generation:
        out = super().generate(prompt, sampling=sampling, stop=stop, **keywords)
        object.__setattr__(sampling, "temperature", 9.0)
        object.__setattr__(stop, "eos_token_ids", (0, 1, 2))
        return out


# state and answers


class RemembersTheLastRequest(Decoder):
    """Goes on behind the text of the request before, as an engine does that forgets to clear its cache."""

    _before: tuple[int, ...] = ()

    def generate(self, prompt: Any, **keywords: Any) -> Generation:
        out = super().generate([*self._before, *prompt], **keywords)
        self._before = tuple(prompt)
        return out


class ChangesItsMind:
    """The fourth generation of all ends in a wrong token, as when two streams race."""

    def __init__(self) -> None:
        calls = itertools.count(1)

        class Racing(Decoder):
            def generate(self, *args: Any, **keywords: Any) -> Generation:
                out = super().generate(*args, **keywords)
                if next(calls) != 4:
                    return Generation(out.tokens, out.finish_reason)
                return Generation((*out.tokens[:-1], (out.tokens[-1] + 1) % self.vocab_size), out.finish_reason)

        self._made = Racing

    def build(self, model: Any, drafter: Any) -> Decoder:
        return self._made(model, drafter)


class ReusesOneBuffer(Decoder):
    """Every answer is the same memory, overwritten by the next call."""

    _buffer = torch.zeros(0)

    def forward_tree(self, tree: DraftTree, *, taps: Taps | None = None) -> Tensor:
        logits = super().forward_tree(tree, taps=taps)
        self._buffer.fill_(7.0)
        self._buffer = logits
        return self._buffer

    def commit(self, path: Any) -> None:
        super().commit(path)
        self._buffer.fill_(-7.0)


class ChangesTheWeights(Decoder):
    """Writes to the model that it was handed (the same numbers, for the sake of the tests that come after)."""

    def generate(self, *args: Any, **keywords: Any) -> Generation:
        with torch.no_grad():
            for weight in self.model._weights.values():
                weight.mul_(1.0)
        return super().generate(*args, **keywords)


class BreaksInDel(Decoder):
    def __del__(self) -> None:
        raise RuntimeError("in __del__")


# deeds


def single_precision_is_double() -> None:
    torch.set_default_dtype(torch.float64)


def half_by_default() -> None:
    torch.set_default_dtype(torch.bfloat16)


def no_gradients() -> None:
    torch.set_grad_enabled(False)


def nowhere_by_default() -> None:
    torch.set_default_device("meta")


def many_threads() -> None:
    torch.set_num_threads(3)


def reseeds() -> None:
    torch.manual_seed(0)
    random.seed(0)


def demands_determinism() -> None:
    torch.use_deterministic_algorithms(True)


def recursion_of_almost_nothing() -> None:
    sys.setrecursionlimit(220)


def leaves_for_a_folder_that_goes() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)


def empties_the_environment() -> None:
    os.environ.clear()


def closes_stdout() -> None:
    sys.stdout.close()
    sys.stderr.close()


def replaces_stdout() -> None:
    sys.stdout = None  # type: ignore[assignment]


def prints_megabytes() -> None:
    print("x" * 300_000)
    sys.stderr.write("y\n" * 100_000)


def starts_a_thread_that_raises() -> None:
    def raising() -> None:
        raise RuntimeError("in a thread")

    thread = threading.Thread(target=raising)
    thread.start()
    thread.join()


def forks() -> None:
    """Both sides come back."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)


def replaces_argmax() -> None:
    """So that plain decoding says what the target says."""
    torch.Tensor.argmax = lambda *args, **keywords: torch.zeros((), dtype=torch.int64)  # type: ignore[assignment, method-assign]


def replaces_softmax() -> None:
    def softmax(*args: Any, **keywords: Any) -> Any:
        raise RuntimeError("not today")

    torch.softmax = softmax  # type: ignore[assignment]
    torch.nn.functional.softmax = softmax
