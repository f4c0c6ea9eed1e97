"""Draft trees: tokens and parents are stored, everything else is derived from them.

Node 0 is the root, the last committed token. Parents precede children, so one pass in order visits a node after its
ancestors. Building trees by score is a drafter's business; reading them from a case is a strategy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Proposal = Literal["deterministic", "iid", "without_replacement"]
UNUSED = -2  # in place of a parent, in batches of trees: a row of padding that holds no node
PROPOSALS: tuple[str, ...] = ("deterministic", "iid", "without_replacement")


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A tree of drafted tokens below the last committed token.

    tokens: int64 [N], node 0 the root. parents: int64 [N], parents[0] == -1 and 0 <= parents[i] < i.
    draft_probs: float [N, V] or None; row i is q(. | path to i), the law that the children of i were drawn from, over
    the target's V: of a drafter with another vocabulary mapped to the target's ids, 0 where the drafter has none.
    proposal: how children were drawn from q: "deterministic", "iid" (with replacement) or "without_replacement".
    Sequences of ints are accepted and stored as int64 CPU tensors. Raises ValueError on a malformed tree.
    """

    tokens: Tensor
    parents: Tensor
    draft_probs: Tensor | None = None
    proposal: Proposal = "deterministic"

    def __post_init__(self) -> None:
        for name in ("tokens", "parents"):
            object.__setattr__(self, name, _as_int64_vector(name, getattr(self, name)))
        num_nodes = len(self.tokens)
        if num_nodes == 0:
            raise ValueError("tokens is empty: a tree has at least its root, the last committed token")
        if len(self.parents) != num_nodes:
            raise ValueError(f"parents has {len(self.parents)} entries, must match tokens ({num_nodes})")
        if self.parent_list[0] != -1:
            raise ValueError(f"parents[0] = {self.parent_list[0]} must be -1 (node 0 is the root)")
        for node, parent in enumerate(self.parent_list[1:], start=1):
            if parent < 0:
                raise ValueError(f"parents[{node}] = {parent} must be >= 0 (only node 0 is a root)")
            if parent >= node:
                raise ValueError(f"parents[{node}] = {parent} must be < {node} (parents precede children)")
        for node, token in enumerate(self.token_list):
            if token < 0:
                raise ValueError(f"tokens[{node}] = {token} must be >= 0 (a token id)")
        if self.proposal not in PROPOSALS:
            raise ValueError(f"proposal = {self.proposal!r} must be one of {', '.join(PROPOSALS)}")
        if self.draft_probs is not None:
            self._check_draft_probs(self.draft_probs)

    def _check_draft_probs(self, draft_probs: Tensor) -> None:
        if draft_probs.ndim != 2 or draft_probs.shape[0] != self.num_nodes:
            raise ValueError(f"draft_probs has shape {list(draft_probs.shape)}, must be [{self.num_nodes}, V]")
        if not draft_probs.is_floating_point():
            raise ValueError(f"draft_probs has dtype {draft_probs.dtype}, must be a floating type")
        vocab_size = draft_probs.shape[1]
        for node, token in enumerate(self.token_list[1:], start=1):
            if token >= vocab_size:
                raise ValueError(f"tokens[{node}] = {token} must be < {vocab_size} (columns of draft_probs)")

    @classmethod
    def of(cls, tokens: Sequence[int], parents: Sequence[int]) -> DraftTree:
        """A deterministic tree from plain sequences of ints."""
        return cls(torch.tensor(list(tokens), dtype=torch.int64), torch.tensor(list(parents), dtype=torch.int64))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DraftTree):
            return NotImplemented
        same_probs = (self.draft_probs is None) == (other.draft_probs is None)
        if same_probs and self.draft_probs is not None and other.draft_probs is not None:
            same_probs = torch.equal(self.draft_probs, other.draft_probs)
        return same_probs and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return (tuple(self.token_list), tuple(self.parent_list), self.proposal)

    @property
    def num_nodes(self) -> int:
        """N, the root included."""
        return len(self.tokens)

    @property
    def num_drafts(self) -> int:
        """N - 1: drafted nodes, the root not counted."""
        return len(self.tokens) - 1

    @cached_property
    def token_list(self) -> list[int]:
        return self.tokens.tolist()

    @cached_property
    def parent_list(self) -> list[int]:
        return self.parents.tolist()

    @cached_property
    def depth(self) -> Tensor:
        """int64 [N]: edges from the root; the root has depth 0."""
        depth = [0] * self.num_nodes
        for node, parent in enumerate(self.parent_list[1:], start=1):
            depth[node] = depth[parent] + 1
        return torch.tensor(depth, dtype=torch.int64)

    @cached_property
    def ancestor_mask(self) -> Tensor:
        """bool [N, N]: entry (i, j) is True when j is i or an ancestor of i."""
        mask = np.eye(self.num_nodes, dtype=bool)
        for node, parent in enumerate(self.parent_list[1:], start=1):
            mask[node, : parent + 1] |= mask[parent, : parent + 1]
        return torch.from_numpy(mask)

    def tree_mask(self, prefix_len: int) -> Tensor:
        """bool [N, P+N]: every node sees the whole prefix, its ancestors and itself."""
        return torch.cat([torch.ones(self.num_nodes, prefix_len, dtype=torch.bool), self.ancestor_mask], dim=1)

    def position_ids(self, prefix_len: int) -> Tensor:
        """int64 [N]: prefix_len + depth. Siblings share a position."""
        return self.depth + prefix_len

    def children(self, node: int) -> list[int]:
        """Child nodes in index order."""
        return self._children[node]

    @cached_property
    def _children(self) -> list[list[int]]:
        children: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for node, parent in enumerate(self.parent_list[1:], start=1):
            children[parent].append(node)
        return children

    def path_to(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        path = [node]
        while self.parent_list[path[-1]] >= 0:
            path.append(self.parent_list[path[-1]])
        return path[::-1]

    def path_tokens(self, node: int) -> list[int]:
        """Tokens from the root to `node`, both included."""
        return [self.token_list[one] for one in self.path_to(node)]

    def longest_match(self, tokens: Sequence[int]) -> list[int]:
        """The nodes of the path below the root that spells the beginning of `tokens` furthest."""
        best: list[int] = []
        for node in range(1, self.num_nodes):
            spelt = self.path_tokens(node)[1:]
            if len(spelt) > len(best) and spelt == list(tokens[: len(spelt)]):
                best = self.path_to(node)[1:]
        return best

    def leaves(self) -> list[int]:
        return [node for node in range(self.num_nodes) if not self.children(node)]

    def paths(self) -> list[list[int]]:
        """One root-to-leaf list of nodes for each leaf, in leaf order."""
        return [self.path_to(leaf) for leaf in self.leaves()]

    def is_path(self, path: Sequence[int]) -> bool:
        """True when `path` starts at a child of the root and each next node is a child of the one before."""
        parent = 0
        for node in path:
            if not 1 <= node < self.num_nodes or self.parent_list[node] != parent:
                return False
            parent = node
        return True

    def with_token(self, node: int, token: int) -> DraftTree:
        """The same shape with one token changed; draft_probs are dropped since they no longer describe it."""
        tokens = list(self.token_list)
        tokens[node] = token
        return DraftTree.of(tokens, self.parent_list)

    def draw(self, notes: dict[int, str] | None = None) -> str:
        """The tree as text, one node a line, with an optional note beside a node: column 14, or behind a long line."""
        notes = notes or {}
        lines: list[str] = []
        todo = [
            (0, "", "")
        ]  # node, the text left of its token, the text left of its children's; a stack: chains are deep
        while todo:
            node, lead, below = todo.pop()
            text = f"{lead}{self.token_list[node]}"
            lines.append(f"{text:<13} {notes[node]}" if node in notes else text)
            children = self.children(node)
            for child in reversed(children):
                last = child == children[-1]
                todo.append((child, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  ")))
        return "\n".join(lines)


def root_only(token: int) -> DraftTree:
    """A tree of the root alone: verifying it is one step of plain decoding."""
    return DraftTree.of([token], [-1])


def chain(tokens: Sequence[int]) -> DraftTree:
    """A tree of width one: `tokens[0]` the root, each next token the child of the one before."""
    return DraftTree.of(tokens, range(-1, len(tokens) - 1))


def _as_int64_vector(name: str, values: Sequence[int] | Tensor) -> Tensor:
    vector = torch.as_tensor(values)
    if vector.ndim != 1:
        raise ValueError(f"{name} has shape {list(vector.shape)}, must be one-dimensional [N]")
    if vector.is_floating_point() or vector.is_complex() or vector.dtype == torch.bool:
        if vector.numel():
            raise ValueError(f"{name} has dtype {vector.dtype}, must hold integers")
    # A copy: the tree must not change with the tensor or array that it was made from.
    return vector.detach().to(device="cpu", dtype=torch.int64, copy=True)
