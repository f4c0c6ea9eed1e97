"""Drafters that build their tree wrong: parents, order, siblings, limits, and what a lookup copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from specbench.protocols import Drafter, LanguageModel
from specbench.reference.drafters.model import ModelDrafter
from specbench.reference.drafters.ngram import NGramDrafter
from specbench.reference.faults.fault import Fault
from specbench.reference.faults.housing import drafting, shaped
from specbench.reference.session import TreeSession
from specbench.tree import DraftTree, chain
from specbench.types import Taps

NO_LIMIT = 64


class _DuplicateSiblings(ModelDrafter):
    def draft(self, context: list[int], *, max_nodes: int, **keywords: Any) -> DraftTree:
        tree = super().draft(context, max_nodes=max_nodes, **keywords)
        if not 0 < tree.num_drafts < max_nodes:
            return tree
        return DraftTree.of([*tree.token_list, tree.token_list[1]], [*tree.parent_list, 0])


class _DuplicatesBelow(ModelDrafter):
    def draft(self, context: list[int], **keywords: Any) -> DraftTree:
        tree = super().draft(context, **keywords)
        tokens = list(tree.token_list)
        for node in range(1, tree.num_nodes):
            for child in tree.children(node):
                tokens[child] = tokens[tree.children(node)[0]]
        return DraftTree.of(tokens, tree.parent_list)


class _OneLayerOff(ModelDrafter):
    def draft(self, context: list[int], **keywords: Any) -> Any:
        tree = super().draft(context, **keywords)
        depth = tree.depth.tolist()
        parents = [
            # Counted from the start of the node's own layer instead of its parent's.
            parent if level < 2 else parent - depth.index(level - 1) + depth.index(level)
            for parent, level in zip(tree.parent_list, depth, strict=True)
        ]
        return SimpleNamespace(tokens=tree.token_list, parents=parents)


class _RootCounted(ModelDrafter):
    def draft(self, context: list[int], *, max_nodes: int, **keywords: Any) -> DraftTree:
        return super().draft(context, max_nodes=max_nodes + 1, **keywords)


class _WholeFamilies(ModelDrafter):
    """The limit is looked at before each parent, whose children then all go in."""

    def draft(self, context: list[int], *, max_nodes: int, **keywords: Any) -> DraftTree:
        tree = super().draft(context, max_nodes=NO_LIMIT if max_nodes else 0, **keywords)
        num_kept = min(max_nodes, tree.num_drafts)
        while 0 < num_kept < tree.num_drafts and tree.parent_list[num_kept + 1] == tree.parent_list[num_kept]:
            num_kept += 1
        return DraftTree.of(tree.token_list[: num_kept + 1], tree.parent_list[: num_kept + 1])


class _AnyDepth(ModelDrafter):
    def draft(self, context: list[int], *, max_depth: int, **keywords: Any) -> DraftTree:
        return super().draft(context, max_depth=len(self._widths), **keywords)


class _OneLevelAtLeast(ModelDrafter):
    def draft(self, context: list[int], *, max_depth: int, **keywords: Any) -> DraftTree:
        return super().draft(context, max_depth=max(1, max_depth), **keywords)


class _PrunedFromTheFront(ModelDrafter):
    """A tree that is too large loses its first leaves, where the best ones stand."""

    def draft(self, context: list[int], *, max_nodes: int, **keywords: Any) -> DraftTree:
        tree = super().draft(context, max_nodes=NO_LIMIT if max_nodes else 0, **keywords)
        while tree.num_drafts > max_nodes:
            tree = _without(tree, tree.leaves()[0])
        return tree


class _Star(ModelDrafter):
    def draft(self, context: list[int], **keywords: Any) -> DraftTree:
        tree = super().draft(context, **keywords)
        return DraftTree.of(tree.token_list, [-1] + [0] * tree.num_drafts)


class _FirstParentOnly(ModelDrafter):
    """Nodes of the last level all hang below the first node of the level before."""

    def draft(self, context: list[int], **keywords: Any) -> DraftTree:
        tree = super().draft(context, **keywords)
        depth = tree.depth.tolist()
        last = max(depth)
        if not last:
            return tree
        first = depth.index(last - 1)
        return DraftTree.of(
            tree.token_list,
            [first if level == last else parent for parent, level in zip(tree.parent_list, depth, strict=True)],
        )


class _MergedCousins(ModelDrafter):
    """Nodes are found by depth and token: the same token in two branches becomes one node."""

    def draft(self, context: list[int], **keywords: Any) -> DraftTree:
        tree = super().draft(context, **keywords)
        tokens, parents = [tree.token_list[0]], [-1]
        merged, found = [0], {(0, tree.token_list[0]): 0}
        for node in range(1, tree.num_nodes):
            place = int(tree.depth[node]), tree.token_list[node]
            if place not in found:
                found[place] = len(tokens)
                tokens.append(tree.token_list[node])
                parents.append(merged[tree.parent_list[node]])
            merged.append(found[place])
        return DraftTree.of(tokens, parents)


class _Remembering(TreeSession):
    seen: Tensor  # the last logits, float [N, V]

    def forward_tree(self, tree: DraftTree, *, taps: Taps | None = None) -> Tensor:
        self.seen = super().forward_tree(tree, taps=taps)
        return self.seen


class _SortedByScore(ModelDrafter):
    """Tokens are sorted by the probability of their path, parents stay where they were."""

    def __init__(self, model: LanguageModel, *, widths: Sequence[int]) -> None:
        super().__init__(model, widths=widths)
        self._session: _Remembering = _Remembering(model)

    def draft(self, context: list[int], **keywords: Any) -> DraftTree:
        tree = super().draft(context, **keywords)
        scores = [0.0]
        for node in range(1, tree.num_nodes):
            parent = tree.parent_list[node]
            row = self._session.seen[parent].log_softmax(dim=-1)
            scores.append(scores[parent] + float(row[tree.token_list[node]]))
        order = sorted(range(tree.num_nodes), key=lambda node: -scores[node])
        return DraftTree.of([tree.token_list[node] for node in order], tree.parent_list)


class _WorstFirst(TreeSession):
    def forward_tree(self, tree: DraftTree, *, taps: Taps | None = None) -> Tensor:
        return -super().forward_tree(tree, taps=taps)


class _RowByRank(TreeSession):
    """A node is given the row of its number within its level."""

    def forward_tree(self, tree: DraftTree, *, taps: Taps | None = None) -> Tensor:
        depth = tree.depth.tolist()
        return super().forward_tree(tree, taps=taps)[[node - depth.index(depth[node]) for node in range(len(depth))]]


class _RowOfFirst(TreeSession):
    """All nodes of a level are given the row of its first node."""

    def forward_tree(self, tree: DraftTree, *, taps: Taps | None = None) -> Tensor:
        depth = tree.depth.tolist()
        return super().forward_tree(tree, taps=taps)[[depth.index(level) for level in depth]]


class _RootRepeated(NGramDrafter):
    """What follows is copied from the match itself on."""

    def draft(self, context: list[int], **keywords: Any) -> DraftTree:
        tree = super().draft(context, **keywords)
        return DraftTree.of([tree.token_list[max(parent, 0)] for parent in tree.parent_list], tree.parent_list)


class _OneSkipped(NGramDrafter):
    """What follows is copied from one token too late on."""

    def draft(self, context: list[int], **keywords: Any) -> DraftTree:
        tree = super().draft(context, **keywords)
        return chain([tree.token_list[0], *tree.token_list[2:]])


class _EndToEnd(NGramDrafter):
    """A second continuation is hung below the end of the one before."""

    def draft(self, context: list[int], **keywords: Any) -> DraftTree:
        tree = super().draft(context, **keywords)
        parents = [
            node - 1 if parent == 0 and node > 1 and not tree.children(node - 1) else parent
            for node, parent in enumerate(tree.parent_list)
        ]
        return DraftTree.of(tree.token_list, parents)


def _without(tree: DraftTree, leaf: int) -> DraftTree:
    kept = [node for node in range(tree.num_nodes) if node != leaf]
    parents = [tree.parent_list[node] for node in kept]
    return DraftTree.of([tree.token_list[node] for node in kept], [one - (one > leaf) for one in parents])


def _over(session: Callable[[LanguageModel], TreeSession], *widths: int) -> Callable[[LanguageModel], Drafter]:
    """A drafter that reads its rows from such a session."""

    def make(model: LanguageModel) -> Drafter:
        drafter = ModelDrafter(model, widths=widths)
        drafter._session = session(model)
        return drafter

    return make


FAULTS = (
    Fault(
        "duplicate_siblings",
        "tree-construction",
        "the best draft is proposed twice below the root",
        "any draft with room for one more node",
        "drafter.tree",
        target=drafting(_DuplicateSiblings),
        kin="duplicate siblings",
    ),
    Fault(
        "duplicate_siblings_below",
        "tree-construction",
        "below a drafted node the best token is proposed as often as there are siblings, below the root it is not",
        "two siblings at depth two",
        "drafter.tree",
        target=drafting(shaped(_DuplicatesBelow, 1, 2)),
        subtle="width at depth two",
        kin="duplicate siblings",
    ),
    Fault(
        "parent_layer_off",
        "tree-construction",
        "parents are counted from the start of the node's own layer",
        "a draft of two levels",
        "drafter.tree",
        target=drafting(shaped(_OneLayerOff, 2, 2, 1)),
    ),
    Fault(
        "root_in_budget",
        "tree-construction",
        "the node limit is compared with a count that leaves a node out",
        "a limit below the size of the whole draft",
        "drafter.budget",
        target=drafting(shaped(_RootCounted, 2, 2, 1)),
    ),
    Fault(
        "families_never_split",
        "tree-construction",
        "the node limit is looked at before each parent, whose children are then all drafted",
        "a limit that falls between siblings",
        "drafter.budget",
        target=drafting(shaped(_WholeFamilies, 2, 2, 1)),
        subtle="a limit between siblings",
    ),
    Fault(
        "depth_ignored",
        "tree-construction",
        "the drafter's own depth is drafted whatever max_depth says",
        "a limit below that depth",
        "drafter.budget",
        target=drafting(_AnyDepth),
    ),
    Fault(
        "one_level_at_least",
        "tree-construction",
        "a depth limit of 0 is taken for 1",
        "no level allowed",
        "drafter.budget",
        target=drafting(_OneLevelAtLeast),
        subtle="a limit of none",
    ),
    Fault(
        "pruned_from_the_front",
        "tree-construction",
        "a draft above the node limit loses its first leaves, the best ones, instead of its last",
        "a limit below the size of the whole draft",
        "drafter.tree",
        target=drafting(shaped(_PrunedFromTheFront, 2, 2, 1), itself=True),
        subtle="a limit that cuts",
    ),
    Fault(
        "worst_first",
        "tree-construction",
        "the tokens of smallest logit are drafted: the sort ascends",
        "any draft; the output stays right, only acceptance falls",
        "drafter.tree",
        target=drafting(_over(_WorstFirst, 2, 2, 1), itself=True),
    ),
    Fault(
        "best_left_out",
        "tree-construction",
        "ranks are counted from one: the most probable token is never drafted",
        "any draft; the output stays right, only acceptance falls",
        "drafter.tree",
        target=drafting(lambda model: ModelDrafter(model, widths=(2, 1), first_ranks=(1,)), itself=True),
        kin="best left out",
    ),
    Fault(
        "best_left_out_below",
        "tree-construction",
        "ranks are counted from one below drafted nodes: their most probable token is never drafted",
        "a draft of two levels",
        "drafter.tree",
        target=drafting(lambda model: ModelDrafter(model, widths=(1, 1), first_ranks=(0, 1)), itself=True),
        subtle="depth two",
        kin="best left out",
    ),
    Fault(
        "star_for_chain",
        "tree-construction",
        "a draft of width one is laid out as siblings, each level's token below the root",
        "a draft of two levels",
        "drafter.tree",
        target=drafting(shaped(_Star, 1, 1, 1), itself=True),
        subtle="depth two",
    ),
    Fault(
        "first_parent_only",
        "tree-construction",
        "nodes of the last level all hang below the first node of the level before",
        "a last level below two siblings",
        "drafter.tree",
        target=drafting(shaped(_FirstParentOnly, 2, 1), itself=True),
        subtle="width above the last level",
    ),
    Fault(
        "cousins_merged",
        "tree-construction",
        "nodes are found by depth and token, so that the same token in two branches becomes one node",
        "the same token below two siblings",
        "drafter.tree",
        target=drafting(shaped(_MergedCousins, 2, 2, 2), itself=True),
        subtle="the same token in two branches",
    ),
    Fault(
        "sorted_without_parents",
        "tree-construction",
        "nodes are sorted by the probability of their path, and parents stay as they were",
        "a grandchild more probable than a child",
        "drafter.tree",
        target=drafting(shaped(_SortedByScore, 2, 2, 1), itself=True),
        subtle="scores that do not fall from level to level",
    ),
    Fault(
        "row_by_rank",
        "tree-construction",
        "a node's children come from the row of its number within its level instead of its number in the tree",
        "a draft of two levels",
        "drafter.tree",
        target=drafting(_over(_RowByRank, 1, 1, 1), itself=True),
        kin="row of another node",
    ),
    Fault(
        "row_of_first_sibling",
        "tree-construction",
        "the children of all nodes of a level come from the row of its first node",
        "a second sibling with children",
        "drafter.tree",
        target=drafting(_over(_RowOfFirst, 2, 1), itself=True),
        subtle="width above depth two",
        kin="row of another node",
    ),
    Fault(
        "lookup_repeats_root",
        "tree-construction",
        "a lookup copies from the match itself on, so that the root is drafted again",
        "a token that has occurred before",
        "drafter.tree",
        target=drafting(lambda model: _RootRepeated(width=1), looks_up=True),
        kin="lookup start",
    ),
    Fault(
        "lookup_skips_one",
        "tree-construction",
        "a lookup copies from one token behind the match on",
        "a match with two tokens behind it",
        "drafter.tree",
        target=drafting(lambda model: _OneSkipped(width=1), looks_up=True),
        kin="lookup start",
    ),
    Fault(
        "lookups_end_to_end",
        "tree-construction",
        "a second continuation is hung below the end of the first instead of below the root",
        "two continuations of different beginnings",
        "drafter.tree",
        target=drafting(lambda model: _EndToEnd(width=3), looks_up=True),
        subtle="two continuations",
    ),
)
