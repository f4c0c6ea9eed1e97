"""Cases: what one check runs on, as bounded plain data that travels in a replay string. Ints and short words, no code.

Strategies draw cases, checks run them, `encode` and `decode` carry them to another process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import islice
from typing import Any

from specbench.tree import PROPOSALS, UNUSED, DraftTree
from specbench.types import DTYPES

MAX_INTS = 100_000
MAX_PREFIX, MAX_NODES = 16_384, 1_024  # of a `LongCase`
NUM_FLAVOURS = 4  # of logits in a walk case
MAX_REPLAY_CHARS = 1_000_000
MAX_LAW_VOCAB, MAX_LAW_NODES = 6, 8  # of a `LawCase`
MAX_HEADS, MAX_HEAD_DIM, MAX_PAGE = 64, 512, 1_024  # of an `AttentionCase`
MAX_FAR_ROWS = 80  # of one whose rows lie far apart: 5 GB of addresses in half precision, which nobody touches
CODES = ("int8", "fp8")  # how its keys and values may be cached
OWN_DRAFTERS = ("own_0", "own_1", "own_2", "own_3")  # the target's own, in the order of its `self_drafters`
DRAFTERS = (
    *("scripted", "runner_up", "ngram", "ngram_chain", "self_chain", "self_tree", "early_exit"),
    *OWN_DRAFTERS,
)
DRAWN = "drawn"  # drafts that are drawn, of a `SampledCase`


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
class LongCase(Case):
    """A long prefix and a large tree, grown from a seed: written out they would be pages.

    shape: how the tree grows, one of `LONG_SHAPES`. chunk: tokens that a target is given at a time, 0 for all at once.
    Shorter prefixes and smaller trees of one seed are the beginnings of longer and larger ones.
    """

    prefix_len: int = 0
    num_nodes: int = 1
    shape: str = "chain"
    chunk: int = 0
    seed: int = 0

    def prefix(self, vocab_size: int) -> list[int]:
        return [one % vocab_size for one in islice(_numbers(2 * self.seed), self.prefix_len)]

    def tree(self, vocab_size: int) -> DraftTree:
        numbers = _numbers(2 * self.seed + 1)
        tokens, parents = [next(numbers) % vocab_size], [-1]
        for node in range(1, self.num_nodes):
            pick = next(numbers)
            parents.append(
                {
                    "chain": node - 1,
                    "star": 0,
                    "binary": (node - 1) // 2,
                    "deep": node - 1 - pick % min(3, node),
                    "ragged": pick % node,
                }[self.shape]
            )
            tokens.append(next(numbers) % vocab_size)
        return DraftTree.of(tokens, parents)

    @property
    def num_drafts(self) -> int:
        return self.num_nodes - 1


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
    """A tree and, for each node, the tokens that share the largest logit of its row; `vocab_size` columns.

    flavour: how the other logits look (see `checks.walk.walk_logits`).
    """

    tokens: tuple[int, ...] = (0,)
    parents: tuple[int, ...] = (-1,)
    winners: tuple[tuple[int, ...], ...] = ((0,),)
    vocab_size: int = 2
    flavour: int = 0

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


@dataclass(frozen=True)
class StopCase(GenerationCase):
    """A generation that is stopped, or several on one instance.

    stop_from, stop_len: the stop sequence is that stretch of what plain decoding emits; stop_len 0 for none.
    turns: token sequences; what is appended before each later turn, or other prompts served in between.
    """

    stop_from: int = 0
    stop_len: int = 0
    min_new_tokens: int = 0
    turns: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class ProcessorCase(GenerationCase):
    """A generation whose logits are changed. repetition, presence, frequency: penalties in hundredths. bans: pairs
    (first, length), forbidden stretches of what plain decoding emits. grammar: by state token, next state, token ..."""

    repetition: int = 100
    presence: int = 0
    frequency: int = 0
    bans: tuple[tuple[int, ...], ...] = ()
    grammar: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class ChunkCase(TreeCase):
    """A tree behind a prompt that arrives in pieces. keep: tokens of the prefix that are cached already, behind which
    another text went on. chunks: lengths of the pieces; what they leave over comes last."""

    keep: int = 0
    chunks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Op:
    """One operation of a machine case: a word and its numbers (see `checks.machine`)."""

    name: str
    numbers: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()


@dataclass(frozen=True)
class MachineCase(Case):
    """A sequence of operations on sequences and their caches. Any sequence is valid: what makes no sense in a state
    does nothing, so that a case can be made smaller by leaving operations out."""

    ops: tuple[Op, ...] = ()

    @property
    def num_drafts(self) -> int:
        return sum(max(0, len(one.parents) - 1) for one in self.ops)

    @property
    def num_rounds(self) -> int:
        return sum(bool(one.parents) for one in self.ops)


@dataclass(frozen=True)
class DrafterCase(Case):
    """One text that a drafter is asked about as a decoder would ask.

    prompt: its beginning. accepts, followers: the history, a round each: which node of the draft was accepted (0 the
    root, else node 1 + (accept - 1) mod drafted nodes, -1 for a plain step that asks for no draft) and which token
    followed. other_at: before that round another request is served, where the drafter has a reset(); -1 for never.
    temperature: in hundredths. seed: of the coins. drafter: which of the target's drafters, where it has several.
    """

    prompt: tuple[int, ...] = (0,)
    accepts: tuple[int, ...] = ()
    followers: tuple[int, ...] = ()
    other_at: int = -1
    max_nodes: int = 16
    max_depth: int = 4
    temperature: int = 0
    seed: int = 0
    drafter: str = "default"

    @property
    def num_rounds(self) -> int:
        return len(self.accepts)


@dataclass(frozen=True)
class LawCase(Case):
    """Drafts drawn behind one text of a toy model, for the law of what a verifier makes of them.

    vocab_size, seed: of the toy (`law.toys`), which gives p and q for every context. parents: the shape of the draft,
    proposal: how it is drafted. temperature, top_p, min_p in hundredths (100 and 0: no cut), top_k 0 for no cut.
    """

    vocab_size: int = 3
    seed: int = 0
    parents: tuple[int, ...] = (-1,)
    proposal: str = "iid"
    temperature: int = 100
    top_k: int = 0
    top_p: int = 100
    min_p: int = 0

    @property
    def num_drafts(self) -> int:
        return len(self.parents) - 1


@dataclass(frozen=True)
class SampledCase(GenerationCase):
    """A generation at a temperature, asked for again and again with other seeds. drafter: also "drawn". seed: the first
    of them. num_rows: requests side by side, each with seeds of its own. temperature ... min_p: as in `LawCase`."""

    seed: int = 0
    num_rows: int = 1
    temperature: int = 100
    top_k: int = 0
    top_p: int = 100
    min_p: int = 0


@dataclass(frozen=True)
class BatchRequest:
    """One row of a batch: a prompt, a length, the script of its drafts (empty: none), an end token as in
    `GenerationCase`, and the round before which it joins. Penalties of its own as in `ProcessorCase`, a stop sequence
    and a least length as in `StopCase`: they count where the target honours them."""

    prompt: tuple[int, ...] = (0,)
    max_new_tokens: int = 1
    arrival: int = 0
    eos_idx: int = -1
    rounds: tuple[CommitRound, ...] = ()
    repetition: int = 100
    presence: int = 0
    frequency: int = 0
    stop_from: int = 0
    stop_len: int = 0
    min_new_tokens: int = 0


@dataclass(frozen=True)
class BatchCase(Case):
    """Several requests served at once. batch_layout: how their rows lie in one forward, where a target has several."""

    rows: tuple[BatchRequest, ...] = (BatchRequest(),)
    batch_layout: str = "packed"

    @property
    def num_drafts(self) -> int:
        return sum(len(one.tokens) - 1 for row in self.rows for one in row.rounds)

    @property
    def num_rounds(self) -> int:
        return 0  # known only afterwards: checks count the rounds that ran

    def alone(self, idx: int) -> GenerationCase:
        """Row `idx` as a generation of its own."""
        row = self.rows[idx]
        return GenerationCase(
            self.model, self.cache, self.layout, row.prompt, row.max_new_tokens, row.rounds, row.eos_idx
        )


@dataclass(frozen=True)
class Walk:
    """A tree and the winners of its rows, as in `WalkCase`."""

    tokens: tuple[int, ...] = (0,)
    parents: tuple[int, ...] = (-1,)
    winners: tuple[tuple[int, ...], ...] = ((0,),)


@dataclass(frozen=True)
class WalkBatchCase(Case):
    """Several trees over one vocabulary, verified at once."""

    walks: tuple[Walk, ...] = (Walk(),)
    vocab_size: int = 2

    @property
    def num_drafts(self) -> int:
        return sum(len(one.tokens) - 1 for one in self.walks)

    def alone(self, idx: int) -> WalkCase:
        """Tree `idx` as a case of its own."""
        one = self.walks[idx]
        return WalkCase(tokens=one.tokens, parents=one.parents, winners=one.winners, vocab_size=self.vocab_size)


@dataclass(frozen=True)
class AttentionCase(Case):
    """What a tree-attention kernel is asked; its tensors are filled from the seed (see `checks.attention`).

    trees: parents, one tree a sequence, `UNUSED` for a row without a node. dtype: of queries, keys and values. page:
    rows a page, 0 for contiguous. codes: "", or how keys and values are cached, one of `CODES`. window: 0 for none.
    soft_cap: in hundredths, 0 for none. alibi: 1 with slopes. large: 1 where scores are in the thousands (hundreds in
    fp16), whose exponentials no precision holds. strided: 1 where heads lie outside of rows in memory, 2 where rows lie
    2^25 numbers apart. num_splits: of the prefix, for kernels that take it. dead: what stands in rows that nobody may
    read, 0 large numbers, 1 NaN.
    """

    trees: tuple[tuple[int, ...], ...] = ((-1,),)
    prefix_lens: tuple[int, ...] = (0,)
    num_key_heads: int = 1
    group: int = 1
    head_dim: int = 8
    dtype: str = "fp64"
    page: int = 0
    codes: str = ""
    window: int = 0
    soft_cap: int = 0
    alibi: int = 0
    large: int = 0
    strided: int = 0
    num_splits: int = 1
    dead: int = 0
    seed: int = 0

    @property
    def num_drafts(self) -> int:
        return sum(len(one) - 1 for one in self.trees)

    @property
    def described(self) -> str:
        """The inputs in one line."""
        parts = [f"prefix {', '.join(map(str, self.prefix_lens))}"]
        parts.append(
            f"{self.num_key_heads * self.group} query heads, {self.num_key_heads} key heads of {self.head_dim}"
        )
        parts.append(self.dtype)
        if self.page:
            parts.append(f"pages of {self.page}")
        if self.codes:
            parts.append(f"{self.codes} codes")
        if self.window:
            parts.append(f"window {self.window}")
        if self.soft_cap:
            parts.append(f"soft-cap {self.soft_cap / 100:g}")
        if self.alibi:
            parts.append("ALiBi")
        if self.large:
            parts.append("large scores")
        if self.strided:
            parts.append("rows 2^25 numbers apart" if self.strided == 2 else "heads outside of rows")
        if self.num_splits > 1:
            parts.append(f"{self.num_splits} splits")
        if self.dead:
            parts.append("dead rows NaN")
        return ", ".join(parts)

    @property
    def options(self) -> tuple[str, ...]:
        """What the case asks for besides a tree behind a prefix, in the order of the claims about it."""
        asked = {
            "cu_nodes": len(self.trees) > 1,
            "any_order": any(parent > node for one in self.trees for node, parent in enumerate(one)),
            "unused_rows": any(UNUSED in one for one in self.trees),
            "page_table": self.page > 0,
            "window": self.window > 0,
            "soft_cap": self.soft_cap > 0,
            "alibi_slopes": self.alibi > 0,
            "k_scale": self.codes != "",
            "strides": self.strided > 0,
            "dead_rows": self.dead > 0,
        }
        return tuple(name for name, is_asked in asked.items() if is_asked)


BATCH_LAYOUTS = ("packed", "left_padded")
# Drafts whose law can be gone through; temperature, top_k, top_p, min_p of a `LawCase`, each alone.
LAW_SHAPES = ((-1, 0), (-1, 0, 1), (-1, 0, 0), (-1, 0, 0, 1), (-1, 0, 0, 1, 2), (-1, 0, 0, 0))
SMALL_LAW_SHAPES = LAW_SHAPES[:3]
LAW_PARAMETERS = ((50, 0, 100, 0), (200, 0, 100, 0), (100, 2, 100, 0), (100, 0, 70, 0), (100, 0, 100, 40))
LONG_SHAPES = ("chain", "star", "binary", "deep", "ragged")
# Operations whose numbers are token ids; "commit" names a node, then a token.
TOKEN_OPS = ("prefill", "chunk", "draft", "step", "resume")
OPS = ("prefill", "chunk", "draft", "commit", "step", "truncate", "abort", "fork", "switch", "reset", "resume")

_KINDS = {
    one.__name__: one
    for one in (
        TreeCase,
        PerturbedCase,
        ChunkCase,
        LongCase,
        CommitCase,
        WalkCase,
        GenerationCase,
        StopCase,
        ProcessorCase,
        MachineCase,
        DrafterCase,
        BatchCase,
        WalkBatchCase,
        LawCase,
        SampledCase,
        AttentionCase,
    )
}
ROW_ADDITIONS = ("repetition", "presence", "frequency", "stop_from", "stop_len", "min_new_tokens")
NESTED = ("winners", "turns", "bans", "grammar", "trees")  # tuples of tuples of ints
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
    tokens += [token for one in getattr(case, "turns", ()) for token in one]
    if isinstance(case, BatchCase):
        tokens += [token for idx in range(len(case.rows)) for token in tokens_of(case.alone(idx))]
    tokens += getattr(case, "followers", ())
    tokens += [token for row in getattr(case, "grammar", ()) for token in row[::2]]
    tokens += [token for one in getattr(case, "ops", ()) if one.name in TOKEN_OPS for token in one.numbers]
    tokens += [token for one in getattr(case, "ops", ()) if one.name == "commit" for token in one.numbers[1:]]
    return [*tokens, *([case.token] if isinstance(case, PerturbedCase) else [])]


def _encode_value(value: object) -> str:
    if isinstance(value, tuple):
        if value and isinstance(value[0], CommitRound):
            return "/".join(f"{_ints(one.tokens)}:{_ints(one.parents)}:{one.accept}" for one in value)
        if value and isinstance(value[0], BatchRequest):
            return "__".join(_encode_request(one) for one in value)
        if value and isinstance(value[0], Walk):
            return "/".join(
                f"{_ints(one.tokens)}:{_ints(one.parents)}:{'_'.join(map(_ints, one.winners))}" for one in value
            )
        if value and isinstance(value[0], Op):
            return "/".join(f"{one.name}:{_ints(one.numbers)}:{_ints(one.parents)}" for one in value)
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
    if name == "rows":
        return tuple(_decode_request(one) for one in text.split("__"))
    if name == "walks":
        return tuple(_decode_walk(one) for one in text.split("/"))
    if name == "ops":
        return tuple(_decode_op(one) for one in text.split("/")) if text else ()
    if name in NESTED:
        return tuple(_tuple(name, one) for one in text.split("/"))
    if isinstance(default, tuple):
        return _tuple(name, text)
    if isinstance(default, str):
        if not _WORD.match(text):
            allowed = "lower-case letters, digits and underscores"
            raise ValueError(f"replay string: {name} = {text!r} must be a word of {allowed}")
        return text
    return _int(name, text)


def _encode_request(one: BatchRequest) -> str:
    rounds = _encode_value(one.rounds) or "none"
    additions = _additions_of(one)
    more = "" if additions == _additions_of(BatchRequest()) else f"_{_ints(additions)}"
    return f"{_ints(one.prompt)}_{one.max_new_tokens}_{one.arrival}_{one.eos_idx}_{rounds}{more}"


def _additions_of(one: BatchRequest) -> tuple[int, ...]:
    return tuple(getattr(one, name) for name in ROW_ADDITIONS)


def _decode_request(text: str) -> BatchRequest:
    parts = text.split("_")
    if len(parts) not in (5, 6):
        raise ValueError(
            f"replay string: row {text[:40]!r} must be prompt_length_arrival_end_rounds, or that and _additions"
        )
    max_new_tokens, arrival, eos_idx = (_int("rows", one) for one in parts[1:4])
    rounds: Any = _decode_value("rounds", "" if parts[4] == "none" else parts[4], ())
    additions = _tuple("rows", parts[5]) if len(parts) == 6 else _additions_of(BatchRequest())
    if len(additions) != len(ROW_ADDITIONS):
        raise ValueError(f"replay string: row {text[:40]!r} must add {'.'.join(ROW_ADDITIONS)}")
    return BatchRequest(_tuple("rows", parts[0]), max_new_tokens, arrival, eos_idx, rounds, *additions)


def _decode_walk(text: str) -> Walk:
    if text.count(":") != 2:
        raise ValueError(f"replay string: walk {text[:40]!r} must be tokens:parents:winners")
    tokens, parents, winners = text.split(":")
    rows = tuple(_tuple("walks", one) for one in winners.split("_"))
    return Walk(_tuple("walks", tokens), _tuple("walks", parents), rows)


def _decode_op(text: str) -> Op:
    if text.count(":") != 2:
        raise ValueError(f"replay string: operation {text[:40]!r} must be name:numbers:parents")
    name, numbers, parents = text.split(":")
    if name not in OPS:
        raise ValueError(f"replay string: operation {name[:20]!r} must be one of {', '.join(OPS)}")
    return Op(name, _tuple("ops", numbers), _tuple("ops", parents))


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
        if isinstance(case, ChunkCase):
            _in_range("keep", case.keep, 0, MAX_INTS, "a number of tokens")
            for length in case.chunks:
                _in_range("chunks", length, 1, MAX_INTS, "a length")
        if isinstance(case, PerturbedCase):
            _in_range("place", case.place, 0, len(case.prefix) + num_nodes, "a prefix token or a node")
    if isinstance(case, WalkCase):
        _in_range("vocab_size", case.vocab_size, 2, MAX_INTS, "a vocabulary")
        _in_range("flavour", case.flavour, 0, NUM_FLAVOURS, "a flavour of logits")
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
    if isinstance(case, LongCase):
        _in_range("prefix_len", case.prefix_len, 0, MAX_PREFIX + 1, "a length")
        _in_range("num_nodes", case.num_nodes, 1, MAX_NODES + 1, "a size")
        _in_range("chunk", case.chunk, 0, MAX_INTS, "a length, or 0 for all at once")
        _in_range("seed", case.seed, 0, 2**31, "a seed")
        if case.shape not in LONG_SHAPES:
            raise ValueError(f"replay string: shape = {case.shape!r} must be one of {', '.join(LONG_SHAPES)}")
    if isinstance(case, MachineCase):
        for op in case.ops:
            if op.parents:
                DraftTree.of(op.numbers, op.parents)
    if isinstance(case, DrafterCase):
        _check_drafter_case(case)
    if isinstance(case, LawCase):
        DraftTree.of(range(len(case.parents)), case.parents)
        _in_range("vocab_size", case.vocab_size, 2, MAX_LAW_VOCAB + 1, "a vocabulary that can be gone through")
        _in_range("parents", len(case.parents), 1, MAX_LAW_NODES + 1, "a number of nodes that can be gone through")
        if case.proposal not in PROPOSALS:
            raise ValueError(f"replay string: proposal = {case.proposal!r} must be one of {', '.join(PROPOSALS)}")
    if isinstance(case, LawCase | SampledCase):
        _check_sampling(case)
    if isinstance(case, AttentionCase):
        _check_attention(case)
    if isinstance(case, BatchCase):
        for idx, row in enumerate(case.rows):
            _check(case.alone(idx))
            _in_range("arrival", row.arrival, 0, MAX_INTS, "a round")
            _check_penalties(row)
            _check_stop(row)
        if case.batch_layout not in BATCH_LAYOUTS:
            raise ValueError(
                f"replay string: batch_layout = {case.batch_layout!r} must be one of {', '.join(BATCH_LAYOUTS)}"
            )
    if isinstance(case, WalkBatchCase):
        for idx in range(len(case.walks)):
            _check(case.alone(idx))
    if isinstance(case, GenerationCase):
        _in_range("max_new_tokens", case.max_new_tokens, 0, MAX_INTS, "a length")
        _in_range("eos_idx", case.eos_idx, -1, MAX_INTS, "an index, or -1 for none")
        _check_additions(case)
        drafters = (*DRAFTERS, DRAWN) if isinstance(case, SampledCase) else DRAFTERS
        if case.drafter not in drafters:
            raise ValueError(f"replay string: drafter = {case.drafter!r} must be one of {', '.join(drafters)}")


def _check_attention(case: AttentionCase) -> None:
    if len(case.trees) != len(case.prefix_lens):
        raise ValueError(
            f"replay string: {len(case.trees)} trees and {len(case.prefix_lens)} prefix_lens must be as many"
        )
    for parents in case.trees:
        _in_range("trees", len(parents), 1, MAX_NODES + 1, "a number of nodes")
        if parents[0] != -1:
            raise ValueError(f"replay string: trees holds {list(parents)[:20]}, must begin with -1 (the root)")
        for parent in parents[1:]:
            if parent != UNUSED:
                _in_range("trees", parent, 0, len(parents), "a parent, or -2 for a row without a node")
        for node in range(len(parents)):
            _check_path(parents, node)
    for prefix_len in case.prefix_lens:
        _in_range("prefix_lens", prefix_len, 0, MAX_PREFIX + 1, "a length")
    for name, least, end in (
        ("num_key_heads", 1, MAX_HEADS + 1), ("group", 1, MAX_HEADS + 1), ("head_dim", 1, MAX_HEAD_DIM + 1),
        ("page", 0, MAX_PAGE + 1), ("window", 0, MAX_INTS), ("soft_cap", 0, MAX_INTS), ("alibi", 0, 2),
        ("large", 0, 2), ("strided", 0, 3), ("num_splits", 1, MAX_HEADS + 1), ("dead", 0, 2), ("seed", 0, 2**31),
    ):  # fmt: skip
        _in_range(name, getattr(case, name), least, end, "see specbench.cases.AttentionCase")
    for name, value, known in (("dtype", case.dtype, tuple(DTYPES)), ("codes", case.codes, ("", *CODES))):
        if value not in known:
            raise ValueError(f"replay string: {name} = {value!r} must be one of {', '.join(filter(None, known))}")
    num_rows = max(case.prefix_lens) + max(map(len, case.trees))
    if case.strided == 2 and (
        DTYPES[case.dtype].itemsize > 2 or case.page or len(case.trees) > 1 or num_rows > MAX_FAR_ROWS
    ):
        raise ValueError(
            f"replay string: strided = 2 must have bf16 or fp16, one tree, no pages and at most {MAX_FAR_ROWS} rows"
        )


def _check_path(parents: tuple[int, ...], node: int) -> None:
    """Every node but an unused one hangs on the root."""
    first, num_steps = node, 0
    while node > 0 and parents[node] != UNUSED:
        node, num_steps = parents[node], num_steps + 1
        if num_steps > len(parents):
            raise ValueError(f"replay string: trees holds {list(parents)[:20]}, a circle from node {first}")
    if node > 0 and node != first:
        raise ValueError(f"replay string: trees holds {list(parents)[:20]}, where node {first} hangs on an unused row")


def _check_drafter_case(case: DrafterCase) -> None:
    if len(case.accepts) != len(case.followers):
        raise ValueError(
            f"replay string: {len(case.accepts)} accepts and {len(case.followers)} followers must be as many (rounds)"
        )
    for accept in case.accepts:
        _in_range("accepts", accept, -1, MAX_INTS, "a node, or -1 for a plain step")
    for name in ("max_nodes", "max_depth"):
        _in_range(name, getattr(case, name), 0, MAX_INTS, "a budget")
    _in_range("other_at", case.other_at, -1, MAX_INTS, "a round, or -1 for never")
    _in_range("temperature", case.temperature, 0, MAX_INTS, "hundredths")
    _in_range("seed", case.seed, 0, 2**31, "a seed")


def _check_additions(case: GenerationCase) -> None:
    if isinstance(case, StopCase):
        _check_stop(case)
    if isinstance(case, ProcessorCase):
        _check_penalties(case)
        for one in case.bans:
            if len(one) != 2 or one[0] < 0 or one[1] < 1:
                raise ValueError(f"replay string: bans holds {list(one)}, must hold pairs first.length, length >= 1")
        for row in case.grammar:
            if not row or len(row) % 2:
                raise ValueError(f"replay string: grammar holds {list(row)}, must hold token.state pairs by state")
            for after in row[1::2]:
                _in_range("grammar", after, 0, len(case.grammar), "a state")


def _check_sampling(case: LawCase | SampledCase) -> None:
    _in_range("seed", case.seed, 0, 2**31, "a seed")
    _in_range("temperature", case.temperature, 0, MAX_INTS, "hundredths")
    _in_range("top_k", case.top_k, 0, MAX_INTS, "a number of tokens, or 0 for no cut")
    _in_range("top_p", case.top_p, 1, 101, "hundredths")
    _in_range("min_p", case.min_p, 0, 101, "hundredths")
    if isinstance(case, SampledCase):
        _in_range("num_rows", case.num_rows, 1, MAX_INTS, "a number of requests")


def _check_stop(one: StopCase | BatchRequest) -> None:
    for name in ("stop_from", "stop_len", "min_new_tokens"):
        _in_range(name, getattr(one, name), 0, MAX_INTS, "a number of tokens")


def _check_penalties(one: ProcessorCase | BatchRequest) -> None:
    _in_range("repetition", one.repetition, 1, MAX_INTS, "hundredths")
    for name in ("presence", "frequency"):
        _in_range(name, getattr(one, name), -MAX_INTS, MAX_INTS, "hundredths")


def _numbers(seed: int) -> Iterator[int]:
    """Numbers of 31 bits without end (splitmix64), the same in every version of all: replay strings rely on it."""
    state = seed
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % 2**64
        yield mixed >> 33


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
