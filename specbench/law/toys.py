"""Toy models in fractions: a target's law p and a draft's law q for every context, and drafting from q.

Every row depends on its whole context. Some hold zeros, in some p and q are equal, in some their supports are disjoint.
Weights come from a hash, so a toy is the same on every machine and in every version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from typing import Literal

from specbench.law.enumeration import Enumeration
from specbench.tree import DraftTree, Proposal

Context = tuple[int, ...]  # all tokens so far, the root's last
Parents = tuple[int, ...]  # a tree's shape, parents[0] == -1
Drafting = Literal["deterministic", "iid", "without_replacement", "race"]
START: Context = (0,)

LARGEST_WEIGHT = 6
ONE_IN = 6  # rows of each odd kind: p == q, and disjoint supports


@dataclass(frozen=True)
class Toy:
    """p(context) and q(context): V fractions that sum to one. greedy: p is the point at its first maximum."""

    vocab_size: int
    seed: int
    greedy: bool = False

    def p(self, context: Context) -> tuple[Fraction, ...]:
        law = _rows(self.vocab_size, self.seed, context)[0]
        if not self.greedy:
            return law
        best = law.index(max(law))
        return tuple(Fraction(token == best) for token in range(self.vocab_size))

    def q(self, context: Context) -> tuple[Fraction, ...]:
        return _rows(self.vocab_size, self.seed, context)[1]


@dataclass(frozen=True)
class Drafted:
    """A drafted tree and what a rule is told of it: row i of both laws belongs to the context that ends in node i."""

    tree: DraftTree
    target_probs: tuple[tuple[Fraction, ...], ...]
    draft_probs: tuple[tuple[Fraction, ...], ...] | None

    def tokens(self, nodes: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.tree.token_list[node] for node in nodes)


def draft(toy: Toy, context: Context, shape: Parents, drafting: Drafting, chance: Enumeration) -> Drafted:
    """A tree of that shape behind `context`, its children drawn from q node by node, in order.

    deterministic: the likeliest tokens of q. race: one child, the winner of q's race at the place of its depth, which
    is a deterministic tree to a rule that does not look at that noise. Where q has no token left to draw without
    replacement, or the vocabulary no further one, a node has fewer children than the shape says.
    """
    kept = {0: 0}  # node of the shape: node of the tree
    tokens, parents, contexts = [context[-1]], [-1], [context]
    left: dict[int, list[Fraction]] = {}  # node of the tree: what of its q is still to be drawn
    for node, parent in enumerate(shape[1:], start=1):
        if parent not in kept:
            continue
        place = kept[parent]
        law = left.setdefault(place, _proposed(toy.q(contexts[place]), drafting))
        if not any(law):
            continue
        if drafting == "deterministic":
            token = law.index(max(law))
        elif drafting == "race":
            token = chance.race(law, len(contexts[place]) - len(context) + 1)
        else:
            token = chance.draw(law)
        if drafting in ("deterministic", "without_replacement"):
            law[token] = Fraction(0)
        kept[node] = len(tokens)
        tokens.append(token)
        parents.append(place)
        contexts.append((*contexts[place], token))
    proposal: Proposal = "deterministic" if drafting == "race" else drafting
    tree = _tree(tuple(tokens), tuple(parents), proposal)
    draft_probs = None if proposal == "deterministic" else tuple(toy.q(one) for one in contexts)
    return Drafted(tree, tuple(toy.p(one) for one in contexts), draft_probs)


def depth_of(shape: Parents) -> int:
    depths = [0]
    for parent in shape[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


def is_chain(shape: Parents) -> bool:
    return all(parent == node - 1 for node, parent in enumerate(shape))


def _proposed(law: Sequence[Fraction], drafting: Drafting) -> list[Fraction]:
    """Without chance a token of no mass may be drafted too, after all others: a rule has to stand that."""
    return [max(one, Fraction(1, 1000)) for one in law] if drafting == "deterministic" else list(law)


@lru_cache(maxsize=100_000)
def _tree(tokens: tuple[int, ...], parents: Parents, proposal: Proposal) -> DraftTree:
    return DraftTree(list(tokens), list(parents), None, proposal)  # type: ignore[arg-type]


@cache
def _rows(vocab_size: int, seed: int, context: Context) -> tuple[tuple[Fraction, ...], tuple[Fraction, ...]]:
    digest = hashlib.sha256(f"{vocab_size}/{seed}/{context}".encode()).digest()
    kind, zeros = digest[0] % ONE_IN, digest[1] % 2 == 0
    p = [_weight(digest[2 + token], zeros) for token in range(vocab_size)]
    q = [_weight(digest[12 + token], zeros) for token in range(vocab_size)]
    if kind == 0:
        q = list(p)
    elif kind == 1:
        first = digest[22] % vocab_size  # tokens up to here are the target's, in a turned order
        share = [(token + first) % vocab_size <= digest[23] % (vocab_size - 1) for token in range(vocab_size)]
        p = [one * own for one, own in zip(p, share, strict=True)]
        q = [one * (not own) for one, own in zip(q, share, strict=True)]
        p[share.index(True)] += 1
        q[share.index(False)] += 1
    return _law(p), _law(q)


def _weight(byte: int, may_be_zero: bool) -> int:
    return byte % (LARGEST_WEIGHT + 1) if may_be_zero else 1 + byte % LARGEST_WEIGHT


def _law(weights: list[int]) -> tuple[Fraction, ...]:
    if not any(weights):
        weights = [1, *weights[1:]]
    total = sum(weights)
    return tuple(Fraction(one, total) for one in weights)
