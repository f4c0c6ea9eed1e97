"""A target's instance behind guarded calls: whatever it does wrong becomes one clear sentence, and no call can hang.

Answers are checked for type, shape, dtype, NaN and token range here, once, so that checks compare only real answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import index
from typing import Any, NoReturn

import torch
from torch import Tensor

from specbench.claims import Facts, Misbehaviour
from specbench.clock import Clock
from specbench.protocols import SeededCoins
from specbench.tree import DraftTree
from specbench.types import GREEDY, NEVER_STOP, Generation, Round, Stop, Taps, VerifyResult
from specbench.watchdog import Watchdog


class Probe:
    """One instance of a target. vocab_size: None when only the target knows it."""

    def __init__(self, adapter: Any, *, vocab_size: int | None, clock: Clock, watchdog: Watchdog) -> None:
        self.adapter = adapter
        self.vocab_size = vocab_size
        self._clock = clock
        self._watchdog = watchdog

    # level 0

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """float [S, V]."""
        out = self._call("logits", lambda: self.adapter.logits(list(tokens)))
        return self._real_tensor("logits", out, [len(tokens), self.vocab_size])

    # level 1

    def generate(
        self, prompt: Sequence[int], *, max_new_tokens: int, stop: Stop = NEVER_STOP, adapter: Any = None
    ) -> Generation:
        """The answer as a Generation; bare token sequences get no rounds. adapter: another face of the target."""
        one = self.adapter if adapter is None else adapter
        out = self._call(
            "generate",
            lambda: one.generate(list(prompt), max_new_tokens=max_new_tokens, sampling=GREEDY, stop=stop, seed=0),
        )
        if isinstance(out, Generation):
            rounds = tuple(self._round(number, one) for number, one in enumerate(out.rounds, start=1))
            return replace(out, tokens=self._token_ids("generate", out.tokens), rounds=rounds)
        tokens = self._token_ids("generate", out)
        ended = "eos" if tokens and tokens[-1] in stop.eos_token_ids else "length"
        return Generation(tokens, ended)

    def with_threshold(self, threshold: float) -> Any:
        """The target's face under lossy acceptance, for `generate(adapter=...)`."""
        return self._call("with_threshold", lambda: self.adapter.with_threshold(threshold))

    # level 2

    def verify(self, tree: DraftTree, target_logits: Tensor) -> VerifyResult:
        out = self._call(
            "verify",
            lambda: self.adapter.verify(_copy(tree), target_logits.clone(), sampling=GREEDY, coins=SeededCoins(0)),
        )
        path, bonus = getattr(out, "path", None), getattr(out, "bonus_token", None)
        if path is None or bonus is None:
            self._wrong("verify", "a VerifyResult with `path` and `bonus_token`", describe(out))
        try:
            result = VerifyResult(tuple(path), bonus)
        except (TypeError, ValueError) as error:
            self._wrong("verify", "a VerifyResult with node numbers and a token id", str(error))
        if result.path and max(result.path) >= tree.num_nodes:
            self._wrong("verify", f"nodes < {tree.num_nodes} in `path`", str(list(result.path)))
        return result

    # level 3

    def prefill(self, tokens: Sequence[int]) -> None:
        self._call("prefill", lambda: self.adapter.prefill(list(tokens)))

    def forward_tree(self, tree: DraftTree, *, taps: Taps | None = None) -> Tensor:
        """float [N, V], a copy."""
        keywords = {} if taps is None else {"taps": taps}
        out = self._call("forward_tree", lambda: self.adapter.forward_tree(_copy(tree), **keywords))
        if taps is not None:
            taps.move_to_cpu()
        return self._real_tensor("forward_tree", out, [tree.num_nodes, self.vocab_size])

    def commit(self, path: Sequence[int]) -> None:
        self._call("commit", lambda: self.adapter.commit(list(path)))

    def truncate(self, length: int) -> None:
        self._call("truncate", lambda: self.adapter.truncate(length))

    def kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """Copies of the committed keys and values, each [Hkv, cache_len, D]."""
        out = self._call("kv", lambda: self.adapter.kv(layer))
        if not (isinstance(out, tuple | list) and len(out) == 2):
            self._wrong("kv", "a pair (keys, values)", describe(out))
        keys, values = (self._real_tensor("kv", one, [None, None, None]) for one in out)
        return keys, values

    @property
    def cache_len(self) -> int:
        out = self._call("cache_len", lambda: self.adapter.cache_len)
        if isinstance(out, bool) or not isinstance(out, int):
            self._wrong("cache_len", "an int (a property, not a method)", describe(out))
        return out

    def _call(self, name: str, call: Callable[[], Any]) -> Any:
        with self._clock.count("target"), self._watchdog.guard(f"{type(self.adapter).__name__}.{name}()"):
            try:
                return call()
            except (Exception, SystemExit) as error:
                headline = f"{name}() raised {type(error).__name__}: {first_line(error)}"
                facts = Facts(
                    headline=headline, expected="an answer", actual=f"{type(error).__name__} ({_where(error)})"
                )
                raise Misbehaviour(facts) from error

    def _real_tensor(self, name: str, out: Any, shape: list[int | None]) -> Tensor:
        wanted = "[" + ", ".join("?" if one is None else str(one) for one in shape) + "]"
        if not isinstance(out, Tensor):
            self._wrong(name, f"a torch tensor of shape {wanted}", describe(out))
        if out.ndim != len(shape) or any(w is not None and w != g for w, g in zip(shape, out.shape, strict=False)):
            self._wrong(name, f"shape {wanted}", f"shape {list(out.shape)}")
        if not out.is_floating_point():
            self._wrong(name, "a floating dtype", str(out.dtype))
        bad = out.isnan() | (out == torch.inf)
        if bool(bad.any()):
            place = bad.nonzero()[0].tolist()
            self._wrong(name, "numbers", f"{out[tuple(place)].item()} at {place} ({int(bad.sum())} such entries)")
        return out.detach().to("cpu", copy=True)

    def _round(self, number: int, one: Any) -> Round:
        """A record of a round with tuples in it, its tree well-formed and its path a path in it."""
        try:
            parts = {name: tuple(map(index, getattr(one, name))) for name in ("tokens", "parents", "path", "emitted")}
            tidy: Round = replace(one, **parts)
            if not DraftTree.of(tidy.tokens, tidy.parents).is_path(tidy.path):
                raise ValueError(f"path = {list(tidy.path)} must run from a child of the root downwards")
        except (TypeError, ValueError, AttributeError) as error:
            self._wrong("generate", "a well-formed specbench.types.Round for each round", f"round {number}: {error}")
        return tidy

    def _token_ids(self, name: str, out: Any) -> tuple[int, ...]:
        values = out.tolist() if hasattr(out, "tolist") else out  # tensors and numpy arrays
        if not isinstance(values, list | tuple):
            self._wrong(name, "a sequence of token ids or a Generation", describe(out))
        ids = []
        for idx, given in enumerate(values):
            token = _as_int(given)
            if token is None:
                self._wrong(name, "token ids as ints", f"{describe(given)} at index {idx}")
            if token < 0 or (self.vocab_size is not None and token >= self.vocab_size):
                limit = "" if self.vocab_size is None else f" and < {self.vocab_size}"
                self._wrong(name, f"token ids >= 0{limit}", f"{token} at index {idx}")
            ids.append(token)
        return tuple(ids)

    def _wrong(self, name: str, expected: str, actual: str) -> NoReturn:
        raise Misbehaviour(
            Facts(headline=f"{name}() must return {expected}, got {actual}", expected=expected, actual=actual)
        )


def _copy(tree: DraftTree) -> DraftTree:
    """What a target does to the tree it is given must not reach the tree it is judged by."""
    return DraftTree.of(tree.token_list, tree.parent_list)


def _as_int(value: Any) -> int | None:
    """An int of any make (numpy's and one-element tensors too); True and False are none."""
    try:
        return None if isinstance(value, bool) else index(value)
    except TypeError:
        return None


def describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and dtype {value.dtype}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def first_line(error: BaseException) -> str:
    """The start of an exception's message, fit for one sentence."""
    lines = str(error).strip().splitlines() or ["no message"]
    return lines[0] if len(lines[0]) <= 160 else f"{lines[0][:157]}..."


def _where(error: BaseException) -> str:
    """File and line where the target raised: the innermost frame."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "no traceback"
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
