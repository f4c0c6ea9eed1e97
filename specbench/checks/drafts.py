"""Whether a row or request verifies the drafts that were made for it: others leave the output right and are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specbench.claims import Facts, Violation
from specbench.protocols import Drafter
from specbench.tree import DraftTree
from specbench.types import Generation


class NotedDrafts:
    """A drafter, and by context what each of its drafts has spelt from the root on."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.drafted: dict[tuple[int, ...], set[tuple[int, ...]]] = {}

    def draft(self, context: list[int], **asked: Any) -> DraftTree:
        tree = self._drafter.draft(context, **asked)
        texts = self.drafted.setdefault(tuple(context), set())
        texts.update(tuple(tree.path_tokens(node)) for node in range(1, tree.num_nodes))
        return tree


def check_drafts(
    violation: type[Violation], drafter: NotedDrafts, prompt: Sequence[int], generation: Generation
) -> None:
    """Every node of every round's tree was drafted behind the text that it stands behind."""
    context = tuple(prompt)
    for number, one in enumerate(generation.rounds, start=1):
        tree = DraftTree.of(one.tokens, one.parents)
        drafted = drafter.drafted.get(context, set())
        foreign = [node for node in range(1, tree.num_nodes) if tuple(tree.path_tokens(node)) not in drafted]
        if foreign:
            raise violation(
                Facts(
                    headline=f"round {number} verifies drafts that were made behind another text",
                    expected=f"drafts that the drafter gave behind these {len(context)} tokens, or none",
                    actual=f"nodes {foreign} are not among them",
                    source="what the drafter was asked and has answered",
                    tree=tree,
                    notes=dict.fromkeys(foreign, "not drafted here"),
                )
            )
        context += one.emitted
