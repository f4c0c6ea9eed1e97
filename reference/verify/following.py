"""The walk of all rules in which the target says each token itself and the text follows what was drafted."""

from __future__ import annotations

from collections.abc import Callable

from specbench.tree import DraftTree
from specbench.types import VerifyResult


def follow(tree: DraftTree, say: Callable[[int], int]) -> VerifyResult:
    """say(node): what the target says behind that node; asked once for each text that is reached.

    Duplicate siblings stand for the same text, so the walk goes on below all of them at once and a copy without
    children costs no acceptance. Of the nodes that spell a text the lowest one speaks for it.
    """
    same_text = [0]  # nodes whose path spells what has been accepted so far
    while True:
        token = say(same_text[0])
        children = (child for node in same_text for child in tree.children(node))
        matches = sorted(child for child in children if tree.token_list[child] == token)
        if not matches:
            return VerifyResult(path=tuple(tree.path_to(same_text[0])[1:]), bonus_token=token)
        same_text = matches
