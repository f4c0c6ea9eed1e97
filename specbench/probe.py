"""A target's instance behind guarded calls: whatever it does wrong becomes one clear sentence, and no call can hang.

Answers are checked for type, shape, dtype, NaN and token range here, once, so that checks compare only real answers.
They are read as warily as they are asked for: an answer's own methods are the target's code too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import lru_cache
from itertools import islice
from operator import index
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from specbench.ambient import SettingsOfTheTarget
from specbench.claims import Facts, Misbehaviour, Violation
from specbench.clock import Clock
from specbench.law.scripted import CannotTell
from specbench.lockstep import LockStep, OutOfStep
from specbench.protocols import Coins, SeededCoins
from specbench.sanitize import plain
from specbench.tree import DraftTree
from specbench.types import GREEDY, NEVER_STOP, Generation, Request, Round, Sampling, Stop, Taps, VerifyResult
from specbench.watchdog import Watchdog

MAX_TOKENS = 200_000  # more than any case asks for: what goes on beyond does not end
Answer = TypeVar("Answer")

METRICS = ("acceptance_length", "acceptance_rate", "num_accepted", "num_drafted")  # what an answer may say of itself
MAX_SAID = 4_096  # characters of what a target's objects say of themselves


class Probe:
    """One instance of a target. vocab_size: None when only the target knows it. note: told of every answer, once it has
    been found to be one."""

    def __init__(
        self,
        adapter: Any,
        *,
        vocab_size: int | None,
        clock: Clock,
        watchdog: Watchdog,
        note: Callable[[str, Any], None] | None = None,
    ) -> None:
        self.adapter = adapter
        self.vocab_size = vocab_size
        self._clock = clock
        self._watchdog = watchdog
        self._note = note

    def noted(self, name: str, answer: Answer) -> Answer:
        """The answer, after whoever keeps a trace has been told. Checks say so of what they find out by themselves."""
        if self._note is not None:
            self._note(name, answer)
        return answer

    # level 0

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """float [S, V]."""
        out = self._call("logits", lambda: self.adapter.logits(list(tokens)))
        return self.noted("logits", self._real_tensor("logits", out, [len(tokens), self.vocab_size]))

    # level 1

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        stop: Stop = NEVER_STOP,
        seed: int = 0,
        adapter: Any = None,
    ) -> Generation:
        """The answer as a Generation; bare token sequences get no rounds. adapter: another face of the target."""
        one = self.adapter if adapter is None else adapter
        out = self._call(
            "generate",
            lambda: one.generate(
                list(prompt), max_new_tokens=max_new_tokens, sampling=replace(sampling), stop=replace(stop), seed=seed
            ),
        )
        return self.noted("generate", self._generation("generate", out, stop))

    def generate_and_report(
        self, prompt: Sequence[int], *, max_new_tokens: int, stop: Stop = NEVER_STOP
    ) -> tuple[Generation, dict[str, float]]:
        """The answer, and of `METRICS` those numbers that the target's own answer shows."""
        out = self._call(
            "generate",
            lambda: self.adapter.generate(
                list(prompt), max_new_tokens=max_new_tokens, sampling=replace(GREEDY), stop=replace(stop), seed=0
            ),
        )
        generation = self.noted("generate", self._generation("generate", out, stop))
        with self._reading("generate"):
            shown = {name: getattr(out, name, None) for name in METRICS}
            numbers = {name: float(one) for name, one in shown.items() if isinstance(one, int | float)}
        return generation, self.noted("metrics", numbers)

    def session(self) -> Probe:
        """A text that is continued by each `generate` on what this returns."""
        return self._beside(self._call("session", lambda: self.adapter.session()))

    def generate_batch(self, requests: Sequence[Request]) -> list[Generation]:
        """One Generation a request, in their order."""
        out = self._call("generate_batch", lambda: self.adapter.generate_batch([replace(one) for one in requests]))
        answers = self._one_each("generate_batch", out, len(requests), "request")
        return [
            self.noted("generate_batch", self._generation("generate_batch", one, to.stop))
            for one, to in zip(answers, requests, strict=True)
        ]

    def generate_in_lockstep(
        self, others: Sequence[Probe], meeting: LockStep, prompt: Sequence[int], *, max_new_tokens: int
    ) -> list[Generation] | OutOfStep:
        """Generates on this instance and the others at the same time, each a rank of `meeting`. Returns how the ranks
        fell out of step when they did."""

        def request(adapter: Any) -> Callable[[], Any]:
            return lambda: adapter.generate(
                list(prompt), max_new_tokens=max_new_tokens, sampling=replace(GREEDY), stop=replace(NEVER_STOP), seed=0
            )

        def run() -> list[Any]:
            answers = meeting.run([request(one.adapter) for one in (self, *others)])
            for one in answers:
                if isinstance(one, BaseException) and not isinstance(one, OutOfStep):
                    raise one
            return answers

        answers = self._call("generate", run)
        fallen = [one for one in answers if isinstance(one, OutOfStep)]
        if fallen:
            return self.noted("out of step", fallen[0])
        return [self.noted("generate", self._generation("generate", one, NEVER_STOP)) for one in answers]

    def with_threshold(self, threshold: float) -> Any:
        """The target's face under lossy acceptance, for `generate(adapter=...)`."""
        return self._call("with_threshold", lambda: self.adapter.with_threshold(threshold))

    # level 2

    def verify(
        self, tree: DraftTree, target_logits: Tensor, *, sampling: Sampling = GREEDY, coins: Coins | None = None
    ) -> VerifyResult:
        out = self._call(
            "verify",
            lambda: self.adapter.verify(
                _copy(tree), target_logits.clone(), sampling=replace(sampling), coins=coins or SeededCoins(0)
            ),
        )
        return self.noted("verify", self._verify_result("verify", out, tree))

    def verify_batch(
        self,
        trees: Sequence[DraftTree],
        target_logits: Sequence[Tensor],
        *,
        sampling: Sampling = GREEDY,
        coins: Coins | None = None,
    ) -> list[VerifyResult]:
        """target_logits: float [N, V] for each tree."""
        cu_nodes = torch.tensor([0, *(tree.num_nodes for tree in trees)]).cumsum(0)
        out = self._call(
            "verify_batch",
            lambda: self.adapter.verify_batch(
                [_copy(tree) for tree in trees],
                torch.cat(list(target_logits)),
                cu_nodes.clone(),
                sampling=replace(sampling),
                coins=coins or SeededCoins(0),
            ),
        )
        answers = self._one_each("verify_batch", out, len(trees), "tree")
        return [
            self.noted("verify_batch", self._verify_result("verify_batch", one, tree))
            for one, tree in zip(answers, trees, strict=True)
        ]

    # level 6

    def probs(self, logits: Tensor, sampling: Sampling) -> Tensor:
        """float64 [V]: the target's own law of one row of logits."""
        out = self._call("probs", lambda: self.adapter.probs(logits.clone(), replace(sampling)))
        return self.noted("probs", self._real_tensor("probs", out, [len(logits)]).double())

    def sample(self, probs: Tensor, coins: Coins) -> int:
        """A token drawn from a law float64 [V], whose V is its own."""
        out = self._call("sample", lambda: self.adapter.sample(probs.clone(), coins))
        with self._reading("sample"):
            token = _as_int(out)
        if token is None or not 0 <= token < len(probs):
            self._wrong("sample", f"a token id >= 0 and < {len(probs)}", describe(out) if token is None else str(token))
        return self.noted("sample", token)

    # level 3

    def prefill(self, tokens: Sequence[int]) -> None:
        self._call("prefill", lambda: self.adapter.prefill(list(tokens)))

    def forward_tree(self, tree: DraftTree, *, taps: Taps | None = None) -> Tensor:
        """float [N, V], a copy."""
        keywords = {} if taps is None else {"taps": taps}
        out = self._call("forward_tree", lambda: self.adapter.forward_tree(_copy(tree), **keywords))
        if taps is not None:
            taps.move_to_cpu()
            self.noted("taps", taps)
        return self.noted("forward_tree", self._real_tensor("forward_tree", out, [tree.num_nodes, self.vocab_size]))

    def commit(self, path: Sequence[int]) -> None:
        self._call("commit", lambda: self.adapter.commit(list(path)))

    def truncate(self, length: int) -> None:
        self._call("truncate", lambda: self.adapter.truncate(length))

    def kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """Copies of the committed keys and values, each [Hkv, cache_len, D]."""
        out = self._call("kv", lambda: self.adapter.kv(layer))
        with self._reading("kv"):
            if not (isinstance(out, tuple | list) and len(out) == 2):
                self._wrong("kv", "a pair (keys, values)", describe(out))
            keys, values = out
        shape = [None, None, None]
        return self.noted("kv", (self._real_tensor("kv", keys, shape), self._real_tensor("kv", values, shape)))

    @property
    def cache_len(self) -> int:
        return self._int_property("cache_len")

    # level 3, optional

    def extend(self, tokens: Sequence[int]) -> None:
        self._call("extend", lambda: self.adapter.extend(list(tokens)))

    def fork(self) -> Probe:
        """A second instance with the same committed prefix."""
        return self._beside(self._call("fork", lambda: self.adapter.fork()))

    def abort(self) -> None:
        self._call("abort", lambda: self.adapter.abort())

    def reset(self) -> None:
        self._call("reset", lambda: self.adapter.reset())

    def poison(self) -> None:
        """Dead rows and buffers become NaN where the target declares that it never reads them, else large numbers: a
        static cache that multiplies masked garbage by zero is right, and 0 x NaN is NaN."""
        with self._reading("reads_dead_rows"):
            value = 1e4 if getattr(self.adapter, "reads_dead_rows", True) else torch.nan
        self._call("poison", lambda: self.adapter.poison(value))

    @property
    def page_size(self) -> int | None:
        """None when this instance's cache has no pages."""
        with self._reading("page_size"):
            if getattr(self.adapter, "page_size", None) is None:
                return None
        return self._int_property("page_size")

    @property
    def pages_in_use(self) -> int:
        return self._int_property("pages_in_use")

    # level 4

    def attention(self, inputs: Sequence[Any], options: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
        """out [R, Hq, D] and, where the kernel returns one, lse [R, Hq], both on the CPU; NaN is for the check to tell.

        inputs: q, k, v, parents, prefix_lens and scale.
        """
        q = inputs[0]
        given = {**dict(zip(("q", "k", "v", "parents", "prefix_lens", "scale"), inputs, strict=True)), **options}
        before = {name: _bytes(one) for name, one in given.items() if isinstance(one, Tensor)}
        out = self._call("attention", lambda: self.adapter.attention(*inputs, **options))
        for name, one in before.items():
            if not torch.equal(one, _bytes(given[name])):
                self._wrong("attention", "an answer and leave its inputs as they are", f"{name} changed in place")
        with self._reading("attention"):
            lse = None
            if isinstance(out, tuple | list):
                if len(out) != 2:
                    self._wrong("attention", "out, or a pair (out, lse)", describe(out))
                out, lse = out
            rows = self._tensor("attention", out, list(q.shape), of="out of ")
            if (out.dtype, out.device.type) != (q.dtype, q.device.type):
                self._wrong(
                    "attention", f"out in q's {q.dtype} on {q.device.type}", f"{out.dtype} on {out.device.type}"
                )
            if lse is None:
                return self.noted("attention", (rows, None))
            sums = self._tensor("attention", lse, list(q.shape[:2]), of="lse of ")
            if lse.dtype not in (torch.float32, torch.float64):
                self._wrong("attention", "lse in torch.float32 or wider", str(lse.dtype))
            return self.noted("attention", (rows, sums))

    # level 5

    def draft(
        self,
        context: list[int],
        *,
        max_nodes: int,
        max_depth: int,
        sampling: Sampling = GREEDY,
        coins: Coins | None = None,
        malformed: type[Violation] = Misbehaviour,
    ) -> DraftTree:
        """A tree of ours, well-formed below the last token of the context. context: the very list is handed over, so
        that a check can look at what became of it. malformed: how a tree that is none is told."""
        root = context[-1]
        out = self._call(
            "draft",
            lambda: self.adapter.draft(
                context,
                max_nodes=max_nodes,
                max_depth=max_depth,
                sampling=replace(sampling),
                coins=SeededCoins(0) if coins is None else coins,
            ),
        )
        self.noted("context", tuple(context))
        return self.noted("draft", self._draft_tree(out, root, malformed))

    @property
    def observes(self) -> bool:
        """Whether a drafter wants to be told what was accepted."""
        with self._reading("observe"):
            return callable(getattr(self.adapter, "observe", None))

    def observe(self, result: VerifyResult) -> None:
        self._call("observe", lambda: self.adapter.observe(result))

    def _draft_tree(self, out: Any, root: int, malformed: type[Violation]) -> DraftTree:
        with self._reading("draft"):
            tokens, parents = getattr(out, "tokens", None), getattr(out, "parents", None)
            if tokens is None or parents is None:
                self._wrong("draft", "a DraftTree, or an object with `tokens` and `parents`", describe(out))
            proposal: Any = getattr(out, "proposal", "deterministic")
            try:
                tokens, parents = (_ints(_listed(one)) for one in (tokens, parents))
                probs = _probs(getattr(out, "draft_probs", None), len(tokens), self.vocab_size)
                tree = DraftTree(
                    torch.tensor(tokens, dtype=torch.int64), torch.tensor(parents, dtype=torch.int64), probs, proposal
                )
                _check_draft(tree, root, self.vocab_size)
                return tree
            except (TypeError, ValueError, OverflowError) as error:
                said = first_line(error)
            shown = ", ".join(
                f"{name} {list(one) if isinstance(one, tuple) else describe(one)}"
                for name, one in (("tokens", tokens), ("parents", parents))
            )
        raise malformed(
            Facts(
                headline=f"draft() returned no draft tree: {said}",
                expected=f"root {root}, parents before children, siblings unlike",
                actual=shown,
                source="the last token of the context, and what every draft tree is",
            )
        )

    def _beside(self, adapter: Any) -> Probe:
        return Probe(adapter, vocab_size=self.vocab_size, clock=self._clock, watchdog=self._watchdog, note=self._note)

    def _int_property(self, name: str) -> int:
        out = self._call(name, lambda: getattr(self.adapter, name))
        with self._reading(name):
            if isinstance(out, bool) or not isinstance(out, int):
                self._wrong(name, "an int (a property, not a method)", describe(out))
            number = _whole(out)
        return self.noted(name, number)

    def _call(self, name: str, call: Callable[[], Any]) -> Any:
        with self._guarded(name), SettingsOfTheTarget():
            try:
                return call()
            except (KeyboardInterrupt, CannotTell):
                raise  # the user's, a target's own is told from it by --specbench-isolate; or that of our coins
            except BaseException as error:
                facts = Facts(
                    headline=f"{name}() raised {_said_of(error)}",
                    expected="an answer",
                    actual=f"{type_name(error)} ({_where(error)})",
                )
        raise Misbehaviour(facts)  # out here: what the target raised, with all its frames hold, is let go

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        with self._clock.count("target"), self._watchdog.guard(f"{type_name(self.adapter)}.{name}()"):
            yield

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Around everything that touches an answer."""
        with self._guarded(name), SettingsOfTheTarget():
            try:
                yield
                return
            except (Misbehaviour, KeyboardInterrupt):
                raise
            except BaseException as error:
                said, where = _said_of(error), _where(error)
        self._wrong(name, "an answer that can be read", f"one that raises {said} ({where})")

    def _one_each(self, name: str, out: Any, number: int, what: str) -> list[Any]:
        """The answers of a batch."""
        with self._reading(name):
            if not isinstance(out, list | tuple):
                self._wrong(name, f"a list of {number} answers, one for each {what}", describe(out))
            answers = list(islice(out, number + 1))
            if len(answers) != number:
                more = "more" if len(answers) > number else str(len(answers))
                self._wrong(name, f"a list of {number} answers, one for each {what}", f"a list of {more}")
            return answers

    def _verify_result(self, name: str, out: Any, tree: DraftTree) -> VerifyResult:
        with self._reading(name):
            path, bonus = getattr(out, "path", None), getattr(out, "bonus_token", None)
            if path is None or bonus is None:
                self._wrong(name, "a VerifyResult with `path` and `bonus_token`", describe(out))
            try:
                result = VerifyResult(_ints(path), _whole(bonus))
            except (TypeError, ValueError) as error:
                self._wrong(name, "a VerifyResult with node numbers and a token id", first_line(error))
            if result.path and max(result.path) >= tree.num_nodes:
                self._wrong(name, f"nodes < {tree.num_nodes} in `path`", str(list(result.path)))
            return result

    def _generation(self, name: str, out: Any, stop: Stop) -> Generation:
        """What a target generated, as a Generation of plain ints and tuples."""
        with self._reading(name):
            given = {one.name: getattr(out, one.name) for one in fields(Generation)} if _is_generation(out) else None
        if given is None:
            tokens = self._token_ids(name, out)
            return Generation(tokens, stop.reason_at(tokens) or "length")
        with self._reading(name):
            if not isinstance(given["finish_reason"], str):
                self._wrong(name, "a finish reason as a str", describe(given["finish_reason"]))
            given["finish_reason"] = plain(_said(given["finish_reason"], str), 40, one_line=True)
            rounds = list(islice(given["rounds"], MAX_TOKENS + 1))
            if len(rounds) > MAX_TOKENS:
                self._wrong(name, "rounds that end", f"more than {MAX_TOKENS} of them")
        given["tokens"] = self._token_ids(name, given["tokens"])
        given["rounds"] = tuple(self._round(name, number, one) for number, one in enumerate(rounds, start=1))
        return Generation(**given)

    def _tensor(self, name: str, out: Any, shape: Sequence[int | None], *, of: str = "") -> Tensor:
        """A copy on the CPU, whatever numbers are in it. of: what it is, where an answer has several parts."""
        wanted = "[" + ", ".join("?" if one is None else str(one) for one in shape) + "]"
        if not isinstance(out, Tensor):
            self._wrong(name, f"{of}a torch tensor of shape {wanted}", describe(out))
        if out.ndim != len(shape) or any(w is not None and w != g for w, g in zip(shape, out.shape, strict=False)):
            self._wrong(name, f"{of}shape {wanted}", f"shape {list(out.shape)}")
        if not out.is_floating_point():
            self._wrong(name, f"{of}a floating dtype", str(out.dtype))
        if out.layout != torch.strided or out.device.type == "meta":
            kind = "on the meta device" if out.device.type == "meta" else f"of layout {out.layout}"
            self._wrong(name, f"{of}a dense tensor with numbers in it", f"one {kind}")
        return out.detach().to("cpu", copy=True)

    def _real_tensor(self, name: str, out: Any, shape: Sequence[int | None]) -> Tensor:
        with self._reading(name):
            numbers = self._tensor(name, out, shape)  # first of all, so that what is checked is what is kept
            bad = numbers.isnan() | (numbers == torch.inf)
            if bool(bad.any()):
                place = bad.nonzero()[0].tolist()
                self._wrong(
                    name, "numbers", f"{numbers[tuple(place)].item()} at {place} ({int(bad.sum())} such entries)"
                )
            return numbers

    def _round(self, name: str, number: int, one: Any) -> Round:
        """A record of a round with tuples in it, its tree well-formed and its path a path in it."""
        with self._reading(name):
            try:
                parts: dict[str, Any] = {}
                for each in fields(Round):
                    value = getattr(one, each.name)
                    parts[each.name] = _ints(value) if "tuple" in str(each.type) else _whole(value)
                tidy = Round(**parts)
                if not DraftTree.of(tidy.tokens, tidy.parents).is_path(tidy.path):
                    raise ValueError(f"path = {list(tidy.path)} must run from a child of the root downwards")
            except (TypeError, ValueError, AttributeError) as error:
                wanted = "a well-formed specbench.types.Round for each round"
                self._wrong(name, wanted, f"round {number}: {first_line(error)}")
            return tidy

    def _token_ids(self, name: str, out: Any) -> tuple[int, ...]:
        with self._reading(name):
            values = out.tolist() if hasattr(out, "tolist") else out  # tensors and numpy arrays
            if not isinstance(values, list | tuple):
                self._wrong(name, "a sequence of token ids or a Generation", describe(out))
            ids: list[int] = []
            for idx, given in enumerate(values):
                if idx == MAX_TOKENS:
                    self._wrong(name, "a sequence that ends", f"more than {MAX_TOKENS} tokens")
                token = _as_int(given)
                if token is None:
                    self._wrong(name, "token ids as ints", f"{describe(given)} at index {idx}")
                if token < 0 or (self.vocab_size is not None and token >= self.vocab_size):
                    limit = "" if self.vocab_size is None else f" and < {self.vocab_size}"
                    self._wrong(name, f"token ids >= 0{limit}", f"{_number(token)} at index {idx}")
                ids.append(token)
            return tuple(ids)

    def _wrong(self, name: str, expected: str, actual: str) -> NoReturn:
        headline = f"{name}() must return {expected}, got {actual}"
        raise Misbehaviour(Facts(headline=headline, expected=expected, actual=actual))


def _check_draft(tree: DraftTree, root: int, vocab_size: int | None) -> None:
    """ValueError for what a draft may not be, though it is a tree."""
    if tree.token_list[0] != root:
        raise ValueError(f"tokens[0] = {tree.token_list[0]} must be {root} (the root: the last token of the context)")
    for node, token in enumerate(tree.token_list):
        if vocab_size is not None and token >= vocab_size:
            raise ValueError(f"tokens[{node}] = {token} must be < {vocab_size} (the vocabulary)")
    if tree.proposal == "iid":
        return
    for node in range(tree.num_nodes):
        first: dict[int, int] = {}
        for child in tree.children(node):
            token = tree.token_list[child]
            if token in first:
                raise ValueError(
                    f"nodes {first[token]} and {child} are siblings with the same token {token}, which only "
                    "proposal = 'iid' (drawn with replacement) may have"
                )
            first[token] = child


def _probs(given: Any, num_nodes: int, vocab_size: int | None) -> Tensor | None:
    """draft_probs as a float tensor [N, V] of its own, None when there are none."""
    if given is None:
        return None
    probs = torch.as_tensor(given).detach().to("cpu", copy=True)
    wanted = f"[{num_nodes}, {'V' if vocab_size is None else vocab_size}]"
    if probs.ndim != 2 or len(probs) != num_nodes or vocab_size not in (None, probs.shape[1]):
        raise ValueError(f"draft_probs has shape {list(probs.shape)}, must be {wanted} (a row a node)")
    return probs


def _listed(values: Any) -> Any:
    """A tensor's or an array's numbers as a list."""
    return values.tolist() if hasattr(values, "tolist") else values


def _copy(tree: DraftTree) -> DraftTree:
    """What a target does to the tree it is given must not reach the tree it is judged by."""
    draft_probs = None if tree.draft_probs is None else tree.draft_probs.clone()
    return DraftTree(tree.tokens, tree.parents, draft_probs=draft_probs, proposal=tree.proposal)


def _bytes(tensor: Tensor) -> Tensor:
    """A copy that compares, NaN and fp8 included, and small also where rows lie far apart."""
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _is_generation(value: Any) -> bool:
    return isinstance(value, Generation)


def _as_int(value: Any) -> int | None:
    """An int of any make (numpy's and one-element tensors too); True and False are none."""
    try:
        return None if isinstance(value, bool) else int(index(value))
    except TypeError:
        return None


def _whole(value: Any) -> int:
    """As `_as_int`, for a single number of an answer. TypeError when it is none."""
    number = _as_int(value)
    if number is None:
        raise TypeError(f"{describe(value)} must be an int")
    return number


def _ints(values: Any) -> tuple[int, ...]:
    numbers = tuple(_whole(one) for one in islice(values, MAX_TOKENS + 1))
    if len(numbers) > MAX_TOKENS:
        raise ValueError(f"more than {MAX_TOKENS} numbers, which do not seem to end")
    return numbers


def _number(value: int) -> str:
    """Python refuses to write out ints of more than 4,300 digits."""
    return str(value) if value.bit_length() < 256 else f"an int of {value.bit_length()} bits"


def describe(value: Any) -> str:
    """Type and content in a few words, whatever the object does when it is asked."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and dtype {value.dtype}"
    if type(value) in (list, tuple) and len(value) > MAX_SAID:
        value = value[:MAX_SAID]  # their text is cut far before
    return f"{type_name(value)} {plain(_said(value, repr), 60, one_line=True)}"


def type_name(value: Any) -> str:
    """A class may have any string for a name."""
    return _plain_name(_said(type(value).__name__, str))


@lru_cache(maxsize=1_024)
def _plain_name(name: str) -> str:
    """Kept: it is asked for at every call."""
    return plain(name, 80, one_line=True)


def first_line(error: BaseException) -> str:
    """The start of an exception's message, fit for one sentence."""
    lines = _said(error, str).strip().splitlines() or ["no message"]
    return plain(lines[0], 160, one_line=True)


def _said_of(error: BaseException) -> str:
    return f"{type_name(error)}: {first_line(error)}{_limit_of_memory(error)}"


def _said(value: Any, how: Callable[[Any], str]) -> str:
    """The start of str() or repr() of an object, as an exact str, also when the object will not have it."""
    try:
        return str.__getitem__(how(value), slice(0, MAX_SAID))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"({how.__name__}() of it raises {plain(type(error).__name__, 80, one_line=True)})"


def _limit_of_memory(error: BaseException) -> str:
    """What a want of memory has to do with --specbench-memory, when that is what sets the limit here."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    is_want = isinstance(error, MemoryError) or "allocate memory" in _said(error, str)
    if not is_want or limit == resource.RLIM_INFINITY:
        return ""
    return f" (its process may have {limit / 2**30:.3g} GiB: give --specbench-memory GIB if it needs more)"


def _where(error: BaseException) -> str:
    """File and line where the target raised: the innermost frame."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "no traceback"
    return f"{plain(trace.tb_frame.f_code.co_filename, 200, one_line=True)}:{trace.tb_lineno}"
