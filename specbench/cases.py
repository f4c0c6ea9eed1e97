"""Cases: what one check runs on, as bounded plain data that travels in a replay string. Ints and short words, no code.

Strategies draw cases, checks run them, `encode` and `decode` carry them to another process.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from specbench.tree import DraftTree

MAX_INTS = 100_000
MAX_REPLAY_CHARS = 1_000_000
DRAFTERS = ("scripted", "runner_up", "ngram", "ngram_chain", "self_chain", "self_tree", "early_exit")


@dataclass(frozen=True)
class Case:
    """What all cases share. model: index into the subject's models. cache, layout: names (see `reference`)."""

    model: int = 0
    cache: str = "contiguous"
    layout: str = "tree_mask"

    @property
    def num_drafts(self) -> int:
        """Drafted nodes over all trees of the case."""
        return 0

    @property
    def num_rounds(self) -> int:
        return 1


@dataclass(frozen=True)
class TreeCase(Case):
    """One tree behind a prompt. prompt: at least one token, the last one is the root (tokens[0])."""

    prompt: tuple[int, ...] = (0,)
    tokens: tuple[int, ...] = (0,)
    parents: tuple[int, ...] = (-1,)

    @cached_property
    def tree(self) -> DraftTree:
        return DraftTree.of(self.tokens, self.parents)

    @property
    def prefix(self) -> tuple[int, ...]:
        return self.prompt[:-1]

    @property
    def num_drafts(self) -> int:
        return len(self.tokens) - 1


@dataclass(frozen=True)
class PerturbedCase(TreeCase):
    """A tree and one change. place: 0..P-1 names a prefix token, P+i names node i. token: what stands there instead."""

    place: int = 0
    token: int = 0


@dataclass(frozen=True)
class CommitRound:
    """A tree (tokens[0] is set by the round before) and the node down to which its path is committed; 0: the root."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    accept: int


@dataclass(frozen=True)
class CommitCase(Case):
    """Rounds of forward and commit; `next_roots[i]` is the root after round i. cut: committed rows to drop at last."""

    prompt: tuple[int, ...] = (0,)
    rounds: tuple[CommitRound, ...] = ()
    next_roots: tuple[int, ...] = ()
    cut: int = 0

    @property
    def num_drafts(self) -> int:
        return sum(len(one.tokens) - 1 for one in self.rounds)

    @property
    def num_rounds(self) -> int:
        return len(self.rounds)


@dataclass(frozen=True)
class WalkCase(Case):
    """A tree and, for each node, the tokens that share the largest logit of its row; `vocab_size` columns."""

    tokens: tuple[int, ...] = (0,)
    parents: tuple[int, ...] = (-1,)
    winners: tuple[tuple[int, ...], ...] = ((0,),)
    vocab_size: int = 2

    @cached_property
    def tree(self) -> DraftTree:
        return DraftTree.of(self.tokens, self.parents)

    @property
    def num_drafts(self) -> int:
        return len(self.tokens) - 1


@dataclass(frozen=True)
class GenerationCase(Case):
    """A whole generation. rounds: the drafter's script, repeated. eos_idx: the end token is the eos_idx-th token that
    plain decoding emits; -1 for none. drafter: "scripted" plays `rounds`, the
    others are real (see `checks.generation.make_drafter`)."""

    prompt: tuple[int, ...] = (0,)
    max_new_tokens: int = 1
    rounds: tuple[CommitRound, ...] = ()
    eos_idx: int = -1
    drafter: str = "scripted"

    @property
    def num_drafts(self) -> int:
        return sum(len(one.tokens) - 1 for one in self.rounds)

    @property
    def num_rounds(self) -> int:
        return 0  # known only afterwards: checks count the rounds that ran


_KINDS = {one.__name__: one for one in (TreeCase, PerturbedCase, CommitCase, WalkCase, GenerationCase)}
_WORD = re.compile(r"[a-z][a-z0-9_]{0,31}\Z")


def encode(case: Case) -> str:
    """A case as one shell-safe word: `TreeCase,model=3,prompt=7.3,tokens=3.9.4,parents=-1.0.0`."""
    parts = [type(case).__name__]
    for one in fields(case):
        value = getattr(case, one.name)
        if value != one.default:
            parts.append(f"{one.name}={_encode_value(value)}")
    return ",".join(parts)


def decode(text: str) -> Case:
    """The case behind a word from `encode`. ValueError says what is wrong and where."""
    if len(text) > MAX_REPLAY_CHARS:
        raise ValueError(f"replay string has {len(text)} characters, at most {MAX_REPLAY_CHARS} are read")
    kind, *parts = text.split(",")
    if kind not in _KINDS:
        raise ValueError(f"replay string names the case kind {kind!r}: expected one of {', '.join(_KINDS)}")
    defaults = {one.name: one.default for one in fields(_KINDS[kind])}
    values: dict[str, Any] = {}
    for part in parts:
        name, _, value = part.partition("=")
        if name not in defaults:
            raise ValueError(f"replay string: {kind} has no field {name!r}: expected one of {', '.join(defaults)}")
        values[name] = _decode_value(name, value, defaults[name])
    case: Case = _KINDS[kind](**values)
    _check(case)
    return case


def tokens_of(case: Case) -> list[int]:
    """Every token id in a case."""
    tokens = [*getattr(case, "prompt", ()), *getattr(case, "tokens", ()), *getattr(case, "next_roots", ())]
    tokens += [token for one in getattr(case, "rounds", ()) for token in one.tokens]
    return [*tokens, *([case.token] if isinstance(case, PerturbedCase) else [])]


def _encode_value(value: object) -> str:
    if isinstance(value, tuple):
        if value and isinstance(value[0], CommitRound):
            return "/".join(f"{_ints(one.tokens)}:{_ints(one.parents)}:{one.accept}" for one in value)
        if value and isinstance(value[0], tuple):
            return "/".join(_ints(one) for one in value)
        return _ints(value)
    return str(value)


def _decode_value(name: str, text: str, default: object) -> object:
    if name == "rounds":
        rounds = []
        for one in text.split("/") if text else ():
            if one.count(":") != 2:
                raise ValueError(f"replay string: round {one[:40]!r} must be tokens:parents:accept")
            tokens, parents, accept = one.split(":")
            rounds.append(CommitRound(_tuple(name, tokens), _tuple(name, parents), _int(name, accept)))
        return tuple(rounds)
    if name == "winners":
        return tuple(_tuple(name, one) for one in text.split("/"))
    if isinstance(default, tuple):
        return _tuple(name, text)
    if isinstance(default, str):
        if not _WORD.match(text):
            allowed = "lower-case letters, digits and underscores"
            raise ValueError(f"replay string: {name} = {text!r} must be a word of {allowed}")
        return text
    return _int(name, text)


def _check(case: Case) -> None:
    """Whatever no strategy would draw is refused here, before a target sees it."""
    prompt = getattr(case, "prompt", (0,))
    if not prompt or min(prompt) < 0:
        raise ValueError("replay string: prompt must hold at least one token id >= 0")
    if isinstance(case, TreeCase):
        num_nodes = case.tree.num_nodes
        if case.prompt[-1] != case.tokens[0]:
            raise ValueError(
                f"replay string: tokens[0] = {case.tokens[0]} must be {case.prompt[-1]} (the root, last of the prompt)"
            )
        if isinstance(case, PerturbedCase):
            _in_range("place", case.place, 0, len(case.prefix) + num_nodes, "a prefix token or a node")
    if isinstance(case, WalkCase):
        _in_range("vocab_size", case.vocab_size, 2, MAX_INTS, "a vocabulary")
        if len(case.winners) != case.tree.num_nodes:
            raise ValueError(
                f"replay string: winners has {len(case.winners)} rows, must be {case.tree.num_nodes} (nodes)"
            )
        for name, tokens in (("tokens", case.tokens), *(("winners", row) for row in case.winners)):
            for token in tokens:
                _in_range(name, token, 0, case.vocab_size, "a token id")
        if not all(case.winners):
            raise ValueError("replay string: winners must name at least one token a row")
    if isinstance(case, CommitCase | GenerationCase):
        for one in case.rounds:
            _in_range("accept", one.accept, 0, DraftTree.of(one.tokens, one.parents).num_nodes, "a node")
    if isinstance(case, CommitCase):
        if not case.rounds or len(case.rounds) != len(case.next_roots):
            raise ValueError(
                f"replay string: {len(case.rounds)} rounds and {len(case.next_roots)} next_roots must be as many, >= 1"
            )
        _in_range("cut", case.cut, 0, MAX_INTS, "rows to drop")
    if isinstance(case, GenerationCase):
        _in_range("max_new_tokens", case.max_new_tokens, 0, MAX_INTS, "a length")
        _in_range("eos_idx", case.eos_idx, -1, MAX_INTS, "an index, or -1 for none")
        if case.drafter not in DRAFTERS:
            raise ValueError(f"replay string: drafter = {case.drafter!r} must be one of {', '.join(DRAFTERS)}")


def _in_range(name: str, value: int, least: int, end: int, what: str) -> None:
    if not least <= value < end:
        raise ValueError(f"replay string: {name} = {value} must be >= {least} and < {end} ({what})")


def _ints(values: tuple[int, ...]) -> str:
    return ".".join(str(one) for one in values)


def _tuple(name: str, text: str) -> tuple[int, ...]:
    parts = text.split(".") if text else []
    if len(parts) > MAX_INTS:
        raise ValueError(f"replay string: {name} holds {len(parts)} numbers, at most {MAX_INTS} are read")
    return tuple(_int(name, one) for one in parts)


def _int(name: str, text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,12}", text):
        raise ValueError(f"replay string: {name} holds {text[:20]!r}, must be a whole number")
    return int(text)
