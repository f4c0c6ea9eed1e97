"""The values that travel between drafter, target, verifier and harness. Frozen, validated, no behaviour.

A token is an int id in `[0, vocab_size)`. Tensors carry no gradient. Trees have their own file, `tree.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


def _token_sequences(name: str, sequences: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    tidy = tuple(tuple(int(token) for token in one) for one in sequences)
    for idx, one in enumerate(tidy):
        if not one or min(one) < 0:
            raise ValueError(f"{name}[{idx}] = {list(one)} must hold at least one token id >= 0")
    return tidy


@dataclass(frozen=True)
class Automaton:
    """A toy grammar: which tokens may follow in which state, and the state they lead to. Generation starts in state 0.

    transitions[state]: pairs (token, next state); every other token is forbidden there. Each state allows something.
    """

    transitions: tuple[tuple[tuple[int, int], ...], ...]

    def __post_init__(self) -> None:
        for state, pairs in enumerate(self.transitions):
            if not pairs:
                raise ValueError(f"transitions[{state}] is empty: a state must allow at least one token")
            for token, after in pairs:
                if token < 0 or not 0 <= after < len(self.transitions):
                    raise ValueError(
                        f"transitions[{state}] holds ({token}, {after}), must be a token >= 0 and a state "
                        f"< {len(self.transitions)}"
                    )

    def state_after(self, tokens: Sequence[int]) -> int | None:
        """The state that `tokens` lead to from state 0; None once a forbidden one was among them."""
        state: int | None = 0
        for token in tokens:
            state = None if state is None else dict(self.transitions[state]).get(token)
        return state


# Called once for each row: (prompt and output so far, the row's own token last; logits [V]) -> logits [V].
Processor = Callable[[tuple[int, ...], Tensor], Tensor]


@dataclass(frozen=True)
class Sampling:
    """How the target picks a token. `temperature == 0.0` means argmax, ties to the lowest id.

    Logits are changed before that, in this order: repetition_penalty (over prompt and output, once a distinct token:
    positive logits are divided by it, others multiplied; transformers, vLLM), frequency_penalty (subtracted once for
    each time a token stands in the output; OpenAI, vLLM), presence_penalty (subtracted once for each distinct token of
    the output), bad_words (token sequences that the output never holds), grammar (an automaton over the output),
    processors (called in turn). A drafted node's output ends with its own path.

    What is drawn from is then the softmax of the logits after temperature (they are divided by it), top_k (the k
    largest are kept, and what ties with the k-th), top_p (the most probable are kept until their sum reaches it, lowest
    ids first among equals) and min_p (what has less than that share of the largest probability is dropped), each over
    what the one before left (transformers' order; `reference.sampling`).

    `num_beams` exists so that a request for beam search can be refused by name rather than ignored.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    num_beams: int = 1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Automaton | None = None
    processors: tuple[Processor, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise ValueError(f"temperature = {self.temperature} must be finite and >= 0.0 (0.0 means argmax)")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k = {self.top_k} must be >= 1, or None for no cut")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p = {self.top_p} must be in (0, 1], or None for no cut")
        if self.min_p is not None and not 0.0 < self.min_p <= 1.0:
            raise ValueError(f"min_p = {self.min_p} must be in (0, 1], or None for no cut")
        if self.num_beams < 1:
            raise ValueError(f"num_beams = {self.num_beams} must be >= 1")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0.0):
            raise ValueError(
                f"repetition_penalty = {self.repetition_penalty} must be finite and > 0.0 (1.0 means none)"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} = {getattr(self, name)} must be finite (0.0 means none)")
        object.__setattr__(self, "bad_words", _token_sequences("bad_words", self.bad_words))

    @property
    def changes_logits(self) -> bool:
        """Whether logits are touched before a token is picked."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)
        return penalties or bool(self.bad_words or self.grammar or self.processors)


GREEDY = Sampling()


@dataclass(frozen=True)
class Stop:
    """When generation ends besides `max_new_tokens`.

    An end token is emitted, and nothing after it. A stop sequence ends the output with its last token; it is looked for
    in the output alone, never in the prompt. The first `min_new_tokens` tokens are not end tokens (they cannot be
    picked), and no stop sequence that ends among them counts (vLLM's min_tokens).
    """

    eos_token_ids: tuple[int, ...] = ()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "eos_token_ids", tuple(int(token) for token in self.eos_token_ids))
        for idx, token in enumerate(self.eos_token_ids):
            if token < 0:
                raise ValueError(f"eos_token_ids[{idx}] = {token} must be >= 0 (a token id)")
        object.__setattr__(self, "stop_sequences", _token_sequences("stop_sequences", self.stop_sequences))
        if self.min_new_tokens < 0:
            raise ValueError(f"min_new_tokens = {self.min_new_tokens} must be >= 0")

    def reason_at(self, output: Sequence[int]) -> str | None:
        """ "eos" or "stop" when an output that ends here is finished, else None."""
        if len(output) <= self.min_new_tokens:
            return None
        if output[-1] in self.eos_token_ids:
            return "eos"
        text = tuple(output)
        return "stop" if any(text[-len(one) :] == one for one in self.stop_sequences) else None


NEVER_STOP = Stop()


@dataclass(frozen=True)
class Request:
    """One row of a batch. arrival: the round, counted from 0, before which it joins the batch."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = GREEDY
    stop: Stop = NEVER_STOP
    seed: int = 0
    arrival: int = 0


@dataclass(frozen=True)
class VerifyResult:
    """What the target made of one draft tree.

    path: accepted nodes from the root's child downwards; empty when the first draft is rejected.
    bonus_token: the token drawn from the target after the path (the correction after a rejection).
    """

    path: tuple[int, ...]
    bonus_token: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", tuple(int(node) for node in self.path))
        object.__setattr__(self, "bonus_token", int(self.bonus_token))
        for idx, node in enumerate(self.path):
            if node < 1:
                raise ValueError(f"path[{idx}] = {node} must be >= 1 (node 0 is the root, never a draft)")
        if self.bonus_token < 0:
            raise ValueError(f"bonus_token = {self.bonus_token} must be >= 0 (a token id)")

    @property
    def num_accepted(self) -> int:
        return len(self.path)

    @property
    def acceptance_length(self) -> int:
        """Tokens emitted by this forward: accepted drafts and the one extra token."""
        return len(self.path) + 1


@dataclass(frozen=True)
class Round:
    """The record of one draft-verify-commit round.

    tokens, parents: the flattened draft tree, node 0 the root.
    path, bonus_token: the verifier's answer. emitted: what was appended to the output after stop rules.
    prefix_len: cached rows before the round. num_rows: rows the target forward computed in this round.
    mask_bytes, kv_bytes: memory that the tree layout needed for its mask and its drafted cache rows.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    path: tuple[int, ...]
    bonus_token: int
    emitted: tuple[int, ...]
    prefix_len: int
    num_rows: int
    mask_bytes: int = 0
    kv_bytes: int = 0


@dataclass(frozen=True)
class Generation:
    """A finished generation: the new tokens (prompt excluded), why it ended, and one record per round.

    finish_reason: "eos", "stop" (a stop sequence) or "length".
    """

    tokens: tuple[int, ...]
    finish_reason: str
    rounds: tuple[Round, ...] = ()

    @property
    def acceptance_length(self) -> float:
        """Accepted drafts + 1 per target forward, pooled over rounds."""
        if not self.rounds:
            return math.nan
        return sum(len(one.path) + 1 for one in self.rounds) / len(self.rounds)


@dataclass
class LayerTap:
    """What one layer computed for the rows of one forward, batch of one.

    k, v: [Hkv, M, D], as cached (k after rotary embedding). attention_output: [M, hidden], after the output projection.
    attention_weights: [Hq, M, P+M] or None when the implementation does not form them. hidden_state: [M, hidden],
    the layer's output after both residual additions.
    """

    k: Tensor | None = None
    v: Tensor | None = None
    attention_weights: Tensor | None = None
    attention_output: Tensor | None = None
    hidden_state: Tensor | None = None


@dataclass
class Taps:
    """A recorder passed to `forward_tree(tree, taps=...)`, filled by the implementation under test.

    A row is one query position of the forward, M rows in all. With a tree mask over one sequence rows are nodes
    (M = N); with a batch of paths a node may fill several rows.
    node_of_row: int64 [M]. position_ids: int64 [M]. mask: bool [M, P+M], True where row may attend: first the P cached
    positions, then the rows of this forward.
    """

    node_of_row: Tensor | None = None
    position_ids: Tensor | None = None
    mask: Tensor | None = None
    layers: list[LayerTap] = field(default_factory=list)

    def move_to_cpu(self) -> None:
        """Where oracles compute and comparisons happen."""
        for one in (self, *self.layers):
            for name, value in vars(one).items():
                if isinstance(value, Tensor):
                    setattr(one, name, value.detach().cpu())

    def layer(self, idx: int) -> LayerTap:
        """The tap of layer `idx`, made on first use."""
        while len(self.layers) <= idx:
            self.layers.append(LayerTap())
        return self.layers[idx]


@dataclass(frozen=True)
class TargetState:
    """What a target knows of a context that it has decoded: for drafters that go on from its features.

    hidden: float [S, hidden], row i what the target's output matrix saw at token i (after the last norm), so that its
    logits predict token i + 1. S = len(context) - 1: the root has not been computed yet. For a drafter with
    `state_layers`, a tuple of layers counted from 0, what these were given at token i, side by side.
    """

    hidden: Tensor


DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return next((idx for idx, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def as_token_ids(tokens: Sequence[int] | Tensor, *, argument: str, vocab_size: int | None = None) -> tuple[int, ...]:
    """Token ids as a tuple of ints; ValueError names `argument` and the first id outside `[0, vocab_size)`."""
    values = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
    for idx, value in enumerate(values):
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise ValueError(f"{argument}[{idx}] = {value!r} must be an int (a token id)")
    ids = tuple(int(value) for value in values)
    for idx, token in enumerate(ids):
        if token < 0 or (vocab_size is not None and token >= vocab_size):
            limit = "" if vocab_size is None else f" and < {vocab_size} (the vocabulary)"
            raise ValueError(f"{argument}[{idx}] = {token} must be >= 0{limit}")
    return ids
