"""The grid of shapes and what each of them must cost at least, by formula. Nothing is run here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

PREFIXES = (1024, 8192, 32768, 131072)
NODES = (1, 8, 16, 32, 64, 256)
BATCHES = (1, 8, 32)
NUM_QUERY_HEADS, NUM_KEY_HEADS, HEAD_DIM = 32, 8, 128
ELEMENT = 2  # bytes of bf16
TARGET_BATCH, TARGET_PREFIX = 8, 8192  # the targets: this batch, prefixes from here on


@dataclass(frozen=True)
class AttentionCell:
    """B sequences of P cached rows, a tree of N nodes behind each; bf16, every sequence another tree."""

    P: int
    N: int
    B: int
    Hq: int = NUM_QUERY_HEADS
    Hkv: int = NUM_KEY_HEADS
    D: int = HEAD_DIM

    @property
    def sizes(self) -> dict[str, Any]:
        return asdict(self)

    @cached_property
    def parents(self) -> list[list[int]]:
        """Trees grown node by node below any earlier one: depth about 2.7 ln N, siblings and holes."""
        generator = torch.Generator().manual_seed(self.N)
        drawn = torch.rand(self.B, self.N, generator=generator)
        return [[-1, *(int(row[node] * node) for node in range(1, self.N))] for row in drawn.tolist()]

    @property
    def cache_bytes(self) -> int:
        """Keys and values of one layer."""
        return 2 * self.B * (self.P + self.N) * self.Hkv * self.D * ELEMENT

    @property
    def mask_bytes(self) -> int:
        """Ancestor bits, 64 nodes a word: N^2 / 8 a tree from whole words on, whatever the prefix."""
        return self.B * self.N * -(-self.N // 64) * 8

    @property
    def num_bytes(self) -> int:
        """The fewest that attention moves: each input read once, each output written once."""
        rows = self.B * self.N * self.Hq
        queries_and_out, lse = 2 * rows * self.D * ELEMENT, rows * 4
        depth_lens_and_ends = 4 * (self.B * self.N + self.B + self.B + 1)
        return self.cache_bytes + queries_and_out + lse + self.mask_bytes + depth_lens_and_ends

    @property
    def num_pairs(self) -> int:
        """Rows and the keys that they see, of one head: the prefix and the path down to the row."""
        seen = 0
        for tree in self.parents:
            depth = [0] * self.N
            for node in range(1, self.N):
                depth[node] = depth[tree[node]] + 1
            seen += sum(depth) + self.N
        return self.B * self.N * self.P + seen

    @property
    def num_flops(self) -> int:
        """Two products of D for each pair and query head, a multiplication and an addition each."""
        return 2 * 2 * self.D * self.Hq * self.num_pairs

    @property
    def is_target(self) -> bool:
        return self.B == TARGET_BATCH and self.P >= TARGET_PREFIX


def attention_cells() -> Iterator[AttentionCell]:
    """The most important first: those the targets speak of, then by size of the batch's cache."""
    cells = [AttentionCell(P, N, B) for P in PREFIXES for N in NODES for B in BATCHES]
    yield from sorted(cells, key=lambda cell: (not cell.is_target, cell.P * cell.B))


@dataclass(frozen=True)
class VerifyCell:
    """What follows a forward: V logits of N nodes for each of B sequences; L layers whose accepted rows move up."""

    kind: str  # of KINDS
    N: int
    B: int
    V: int = 131072
    L: int = 32
    P: int = 1024
    Hkv: int = NUM_KEY_HEADS
    D: int = HEAD_DIM

    @property
    def sizes(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def num_bytes(self) -> int:
        """The fewest: each logit read once, for chains one row of q too; each accepted row read and written."""
        logits = self.B * self.N * self.V * ELEMENT
        if self.kind == "chain":
            return logits + self.B * self.V * ELEMENT
        if self.kind == "tree":
            return logits
        return logits + 2 * 2 * self.L * self.B * NUM_ACCEPTED * self.Hkv * self.D * ELEMENT

    @property
    def num_flops(self) -> int:
        """A comparison a logit; with a temperature a division, a difference, an exponential and a sum."""
        return self.B * self.N * self.V * (1 if self.kind == "greedy" else 4)


KINDS = {"greedy": "verify_greedy + commit_kv", "tree": "verify_sample, tree", "chain": "verify_sample, chain"}
NUM_ACCEPTED = 4  # nodes of the path that greedy cells accept
VERIFY_CELLS = tuple(VerifyCell(kind, 8 if kind == "chain" else 64, B) for kind in KINDS for B in (8, 1))


@dataclass(frozen=True)
class RoundCell:
    """A whole round of B sequences: masks, the forward of a Llama of L layers, acceptance, rows moved up."""

    N: int
    B: int
    P: int = 1024
    L: int = 8
    hidden: int = 1024
    inner: int = 2816
    V: int = 32768
    Hq: int = NUM_QUERY_HEADS
    Hkv: int = NUM_KEY_HEADS
    D: int = HEAD_DIM

    @property
    def sizes(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def num_weights(self) -> int:
        """That are multiplied in a round: the embedding is looked up only."""
        attention = self.hidden * self.D * 2 * (self.Hq + self.Hkv)
        return self.L * (attention + 3 * self.hidden * self.inner) + self.V * self.hidden

    @property
    def num_bytes(self) -> int:
        """The fewest: weights and caches read once, logits written and read."""
        return ELEMENT * (self.num_weights + 2 * self.B * self.N * self.V) + self.L * self._attention.num_bytes

    @property
    def num_flops(self) -> int:
        return 2 * self.B * self.N * self.num_weights + self.L * self._attention.num_flops

    @property
    def _attention(self) -> AttentionCell:
        """Of one layer."""
        return AttentionCell(self.P, self.N, self.B, self.Hq, self.Hkv, self.D)


ROUND_CELLS = (RoundCell(16, 1), RoundCell(16, 8))
