"""Acceptance by the sampler: the target's own token is drawn at every node, and the text follows what was drafted. And,
above temperature 0, by rules that decide otherwise than node by node, and keep the law as well."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from specbench.protocols import Coins
from specbench.reference.controls.control import Control
from specbench.reference.steps import sample_by
from specbench.reference.target import ReferenceTarget
from specbench.reference.verify import RULES, argmax_lowest
from specbench.steps import Steps
from specbench.tree import DraftTree
from specbench.types import Sampling, VerifyResult


def _sampler_match(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
    """All nodes are drawn before any is judged, as a batched sampler does; the deepest node that the draws reach, the
    first of them, ends the path."""
    drawn = [argmax_lowest(row) for row in target_logits]
    reached, last = {0}, 0
    for node in range(1, tree.num_nodes):
        parent = tree.parent_list[node]
        if parent in reached and tree.token_list[node] == drawn[parent]:
            reached.add(node)
            last = node if tree.depth[node] > tree.depth[last] else last
    return VerifyResult(tuple(tree.path_to(last)[1:]), drawn[last])


def _sample_by_others(
    tree: DraftTree, target_logits: Tensor, *, sampling: Sampling, coins: Coins, root_place: int = 0
) -> VerifyResult:
    """Drawn trees from their leaves, chosen ones by the target's own draw."""
    rule = RULES["sample_and_match" if tree.proposal == "deterministic" else "traversal"]
    return sample_by(rule)(tree, target_logits, sampling=sampling, coins=coins, root_place=root_place)


def _others(steps: Steps) -> Steps:
    return replace(steps, sample=_sample_by_others)


def _matching(steps: Steps) -> Steps:
    return replace(steps, walk=_sampler_match)


CONTROLS = (
    Control(
        "sampler_match",
        "the target's token is drawn at each node, unreached ones too, and a child that carries it is accepted",
        "every token that is emitted is the target's own draw behind the text before it; what is drawn elsewhere is "
        "dropped unread",
        lambda: ReferenceTarget(_matching),
    ),
    Control(
        "other_rules",
        "above temperature 0 drawn trees are judged from their leaves (traversal verification), chosen ones by the "
        "target's own draw",
        "both rules are lossless: they accept other drafts than recursive rejection does, and emit the same law",
        lambda: ReferenceTarget(_others),
    ),
)
