"""The values that travel between drafter, target, verifier and harness. Frozen, validated, no behaviour.

A token is an int id in `[0, vocab_size)`. Tensors carry no gradient. Trees have their own file, `tree.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How the target picks a token. `temperature == 0.0` means argmax, ties to the lowest id.

    `num_beams` exists so that a request for beam search can be refused by name rather than ignored.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    num_beams: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise ValueError(f"temperature = {self.temperature} must be finite and >= 0.0 (0.0 means argmax)")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k = {self.top_k} must be >= 1, or None for no cut")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p = {self.top_p} must be in (0, 1], or None for no cut")
        if self.num_beams < 1:
            raise ValueError(f"num_beams = {self.num_beams} must be >= 1")


GREEDY = Sampling()


@dataclass(frozen=True)
class Stop:
    """When generation ends besides `max_new_tokens`. An end token is emitted, and nothing after it."""

    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "eos_token_ids", tuple(int(token) for token in self.eos_token_ids))
        for idx, token in enumerate(self.eos_token_ids):
            if token < 0:
                raise ValueError(f"eos_token_ids[{idx}] = {token} must be >= 0 (a token id)")


NEVER_STOP = Stop()


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

    finish_reason: "eos" or "length".
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


DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
