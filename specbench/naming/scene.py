"""A failure as `structure` looks at it: the case, what the wrong answers look like, and small experiments on them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from specbench.cases import (
    Case,
    ChunkCase,
    CommitCase,
    CommitRound,
    DrafterCase,
    LongCase,
    TreeCase,
    tokens_of,
)
from specbench.checks import CHECKS
from specbench.claims import Violation
from specbench.compare import max_error
from specbench.loading import TargetError
from specbench.naming.fingerprint import Pair, compared
from specbench.naming.trace import Leaf
from specbench.record import ClaimRecord
from specbench.subjects import NotTested, Subject
from specbench.tree import DraftTree

# A tree that shows more than the smallest failing one does.
PROMPT = (3, 1, 4, 1, 5)
PARENTS = (-1, 0, 0, 1, 1, 1, 2, 2, 3, 5, 6)
UNLIKE_TEXTS = ((2, 3), (5, 3), (9, 6), (4, 2), (7, 6))  # first token, length
NUM_CONTEXTS = 6  # that a drafter is asked about
TOKENS = (7, 8, 9, 10, 11, 12, 9, 13, 14, 15)


@dataclass(frozen=True)
class Finding:
    """A claim that fails, the smallest case found, and how it fails there."""

    claim: str
    case: Case
    violation: Violation


@dataclass(frozen=True)
class Choice:
    """What was drafted below one node. ranked: all tokens as the model ranks them there; others: the same of the tree's
    other nodes."""

    depth: int
    drafted: tuple[int, ...]
    ranked: list[int]
    others: list[list[int]]

    @property
    def is_wrong(self) -> bool:
        return not self._is_best_of(self.ranked)

    @property
    def is_anothers(self) -> bool:
        """Whether it is right below another node."""
        return any(self._is_best_of(one) for one in self.others)

    @property
    def worst_rank(self) -> int:
        """0 for the most probable token."""
        return max(self.ranked.index(token) for token in self.drafted)

    def _is_best_of(self, ranked: list[int]) -> bool:
        return set(self.drafted) == set(ranked[: len(self.drafted)])


def find(subject: Subject, claim: str, case: Case) -> Finding | None:
    """How a claim fails on a case; None where it does not, or cannot be judged."""
    try:
        CHECKS[claim](subject, case, ClaimRecord(claim, subject.name))
    except Violation as violation:
        return Finding(claim, case, violation)
    except (NotTested, TargetError):
        pass
    return None


class Scene:
    """pair: the target's answers on the case beside the good decoder's, None where they cannot be compared. held:
    claims below this one that were judged and hold."""

    def __init__(self, subject: Subject, finding: Finding, pair: Pair | None, held: Collection[str] = ()) -> None:
        self.subject = subject
        self.claim = finding.claim
        self.case = finding.case
        self.violation = finding.violation
        self.headline = finding.violation.facts.headline
        self.pair = pair
        self.held = frozenset(held)

    @property
    def wrong(self) -> list[Leaf]:
        """Leaves in which the target is not the good decoder, in order."""
        return [] if self.pair is None else self.pair.wrong

    def actual(self, leaf: Leaf) -> Any:
        return None if self.pair is None else self.pair.target.leaves.get(leaf)

    def right(self, leaf: Leaf) -> Any:
        return None if self.pair is None else self.pair.right.leaves.get(leaf)

    def fails_with(self, case: Case, claim: str | None = None) -> bool:
        """Whether a case of the same kind (or a case of another claim) fails as well."""
        return find(self.subject, claim or self.claim, case) is not None

    @cached_property
    def taps(self) -> list[Pair]:
        """Tree forwards with everything that they fill in: that of the case, and of a wide and deep tree in its place.
        Empty where there is no such thing."""
        if "taps" not in self.subject.has or self.pair is None:
            return []
        cases = [one for one in (self._as_tree_case(), rich_tree(self.subject, self.case)) if one is not None]
        return list(compared(self.subject, "tree.layers", cases).pairs)

    @property
    def rich_tree(self) -> DraftTree:
        return rich_tree(self.subject, self.case).tree

    @cached_property
    def influence(self) -> dict[int, tuple[int, ...]]:
        """What rows see, found out from outside: for each node of a wide and deep tree the nodes whose tokens its
        logits move with. Empty where there is no forward, or the logits move by themselves."""
        if "tree" not in self.subject.has or self.subject.bank.real or not self.subject.exact:
            return {}
        case = rich_tree(self.subject, self.case)
        vocab_size = self.subject.vocab_size(case.model)
        try:
            before, again = self._forward(case, case.tree), self._forward(case, case.tree)
            if not torch.equal(before, again):
                return {}
            seen: dict[int, list[int]] = {node: [] for node in range(case.tree.num_nodes)}
            for node in range(1, case.tree.num_nodes):
                changed = case.tree.with_token(node, (case.tokens[node] + 1) % vocab_size)
                after = self._forward(case, changed)
                for row in range(case.tree.num_nodes):
                    if max_error(after[row], before[row]) > 1e-9:
                        seen[row].append(node)
        except (Violation, NotTested, TargetError):
            return {}
        return {row: (0, *nodes) for row, nodes in seen.items()}

    def _forward(self, case: TreeCase, tree: DraftTree) -> Tensor:
        probe = self.subject.open(case)
        probe.prefill(case.prefix)
        return probe.forward_tree(tree)

    def _as_tree_case(self) -> TreeCase | None:
        case = self.case
        if isinstance(case, LongCase):
            vocab_size = self.subject.vocab_size(case.model)
            tree, prefix = case.tree(vocab_size), case.prefix(vocab_size)
            prompt = (*prefix, tree.token_list[0])
            return TreeCase(
                case.model, case.cache, case.layout, prompt, tuple(tree.token_list), tuple(tree.parent_list)
            )
        if isinstance(case, TreeCase):
            return TreeCase(**{one.name: getattr(case, one.name) for one in fields(TreeCase)})
        return None

    def _fails_on(self, **place: Any) -> bool:
        """Whether the case fails in another place, or a richer one of its kind there."""
        if self.fails_with(replace(self.case, **place)):
            return True
        if isinstance(self.case, TreeCase) and not isinstance(self.case, ChunkCase):
            return self.fails_with(
                replace(rich_tree(self.subject, self.case, place.get("model")), **place), "tree.layers"
            )
        if isinstance(self.case, CommitCase):
            return self.fails_with(replace(rich_rounds(self.subject, self.case, place.get("model")), **place))
        return False

    @cached_property
    def needed_model(self) -> str:
        """What all models have that fail and not all others: "window", "groups" (1 < Hkv < Hq) or "recurrence"; ""
        where there is no such thing. Tried on every model whose vocabulary has the tokens of the case."""
        bank = self.subject.bank
        highest = max(tokens_of(self.case), default=0)
        usable = [idx for idx in range(bank.num_models) if bank.model(idx).vocab_size > highest]
        failing = {idx for idx in usable if self._fails_on(model=idx)}
        if not failing or len(failing) == len(usable):
            return ""
        kinds = [
            kind
            for kind, has in _MODEL_KINDS.items()
            if all(has(bank.model(idx)) for idx in failing) and not all(has(bank.model(idx)) for idx in usable)
        ]
        if len(failing) == 1 and "groups" in kinds:
            kinds.remove("groups")  # one model has more than one thing of its own
        if len(kinds) > 1 and self.case.cache != "ring":
            return kinds[1]  # a window matters to what slides; elsewhere the other kind is what these have in common
        return kinds[0] if kinds else ""

    @cached_property
    def needs_pages(self) -> bool:
        """Whether only paged caches fail, or the smallest failing case just does not fit into one page."""
        kinds = self.subject.cache_kinds
        failing = [kind for kind in kinds if self._fails_on(cache=kind)]
        if 0 < len(failing) < len(kinds):
            return all(kind.startswith("paged") for kind in failing)
        if "pages" not in self.subject.has or not isinstance(self.case, TreeCase | CommitCase):
            return False
        page_size = self.subject.open(self.case).page_size
        if isinstance(self.case, CommitCase):
            num_rows = len(self.case.prompt) + max(len(one.tokens) for one in self.case.rounds)
        else:
            num_rows = len(self.case.prompt) + self.case.num_drafts
        return page_size is not None and 1 < page_size < num_rows <= page_size + 4

    @cached_property
    def rich(self) -> Pair | None:
        """The claim on rounds that show more than the smallest failing ones do, where it fails there as well."""
        if not isinstance(self.case, CommitCase) or self.pair is None:
            return None
        (pair,) = compared(self.subject, self.claim, [rich_rounds(self.subject, self.case)]).pairs
        return pair if pair.wrong else None

    @cached_property
    def needs_other_trees(self) -> bool:
        """Whether rounds of one tree are right, whatever of it is accepted, and a smaller or a larger one after it is
        not."""
        if not isinstance(self.case, CommitCase):
            return False
        rich = rich_rounds(self.subject, self.case)
        large = rich.rounds[0]
        small = CommitRound(large.tokens[:4], (-1, 0, 0, 0), 3)
        again = rich.rounds[2]  # the same tree, another path of it

        def fails(*rounds: CommitRound) -> bool:
            return self.fails_with(replace(rich, rounds=rounds, next_roots=rich.next_roots[:2], cut=0))

        return not (fails(large, again) or fails(again, large)) and (fails(large, small) or fails(small, large))

    def num_drafted(self, case: DrafterCase) -> int:
        """Drafted nodes for the prompt of a case; 0 where nothing comes of it."""
        tree = self._draft(case)
        return 0 if tree is None else tree.num_drafts

    @cached_property
    def mixes_unlike_texts(self) -> bool:
        """Whether an instance answers wrongly behind texts that share no beginning with the next one, without drafts:
        what is left of them lies somewhere, and is not found by its tokens."""
        size = self.subject.vocab_size(self.case.model)
        texts = [tuple((first + step) % size for step in range(length)) for first, length in UNLIKE_TEXTS]
        try:
            probe = self.subject.open(self.case)
            answers = [probe.generate(text, max_new_tokens=2).tokens for text in texts]
        except (Violation, NotTested, TargetError):
            return True
        right = [self.subject.plain_text(self.case, text, 2) for text in texts]
        return [list(one) for one in answers] != [list(one) for one in right]

    @cached_property
    def choices(self) -> list[Choice]:
        """What a drafter that drafts what the model says has drafted for some contexts, node by node."""
        case = self.case
        if not isinstance(case, DrafterCase):
            return []
        vocab_size, found = self.subject.vocab_size(case.model), []
        plain = replace(case, accepts=(), followers=(), other_at=-1, max_nodes=16, max_depth=4)
        for shift in range(NUM_CONTEXTS):
            prompt = case.prompt if not shift else tuple((token + shift) % vocab_size for token in PROMPT)
            tree = self._draft(replace(plain, prompt=prompt))
            if tree is None:
                return []
            logits = self.subject.score(case, prompt[:-1], tree).logits
            ranked = [row.sort(descending=True, stable=True).indices.tolist() for row in logits]
            for node in range(tree.num_nodes):
                drafted = [tree.token_list[child] for child in tree.children(node)]
                if drafted:
                    others = [ranked[one] for one in range(tree.num_nodes) if one != node]
                    found.append(Choice(int(tree.depth[node]), tuple(drafted), ranked[node], others))
        return found

    def _draft(self, case: DrafterCase) -> DraftTree | None:
        try:
            probe = self.subject.open_drafter(case)
            return probe.draft(list(case.prompt), max_nodes=case.max_nodes, max_depth=case.max_depth)
        except (Violation, NotTested, TargetError):
            return None


def rich_cases(subject: Subject, case: Case) -> list[Case]:
    """Those that show more than a smallest failing one, of its kind and in its place."""
    if type(case) is TreeCase:
        return [rich_tree(subject, case)]
    return [rich_rounds(subject, case)] if isinstance(case, CommitCase) else []


def rich_tree(subject: Subject, case: Case, model: int | None = None) -> TreeCase:
    """Two children with two or three of their own, some of which go on off the leftmost path; one token stands in two
    branches. model: instead of the case's."""
    idx = case.model if model is None else model
    vocab_size = subject.vocab_size(idx)
    prompt, tokens = (tuple(token % vocab_size for token in one) for one in (PROMPT, TOKENS))
    return TreeCase(idx, case.cache, case.layout, prompt, (prompt[-1], *tokens), PARENTS)


def rich_rounds(subject: Subject, case: Case, model: int | None = None) -> CommitCase:
    """That tree, accepted off its leftmost path; a chain that is refused; the tree again, down its first leaf."""
    tree = rich_tree(subject, case, model)
    last = tuple(root % subject.vocab_size(tree.model) for root in (2, 6, 1))
    rounds = (
        CommitRound(tree.tokens, tree.parents, 9),
        CommitRound(tree.tokens[:4], (-1, 0, 1, 2), 0),
        CommitRound(tree.tokens, tree.parents, 8),
    )
    return CommitCase(tree.model, tree.cache, tree.layout, tree.prompt, rounds, last, cut=2)


def _is_windowed(model: Any) -> bool:
    windows = getattr(getattr(model, "config", None), "windows", None) or getattr(model, "layer_windows", ())
    return any(window is not None for window in windows or ())


def _is_grouped(model: Any) -> bool:
    config = getattr(model, "config", None)
    heads, kv_heads = getattr(config, "num_heads", 0), getattr(config, "num_kv_heads", 0)
    return bool(1 < kv_heads < heads)


def _is_recurrent(model: Any) -> bool:
    return getattr(model, "recurrence", None) is not None


_MODEL_KINDS: dict[str, Callable[[Any], bool]] = {
    "window": _is_windowed,
    "recurrence": _is_recurrent,
    "groups": _is_grouped,
}
