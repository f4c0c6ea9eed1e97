"""Drafters that play a script: given trees, or trees that the target will accept down to a chosen node.

For tests and claims. They look at the answer on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbench.protocols import Coins
from specbench.tree import DraftTree, root_only
from specbench.types import Sampling


@dataclass(frozen=True)
class RoundScript:
    """One round: a tree shape with filler tokens, and the node down to which the draft shall be right.

    tokens: N ids (entry 0 is ignored, the root is given). parents: N. accept: a node; 0 makes every draft wrong.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    accept: int = 0

    def __post_init__(self) -> None:
        DraftTree.of(self.tokens, self.parents)  # validates the shape
        if not 0 <= self.accept < len(self.tokens):
            raise ValueError(f"accept = {self.accept} must be >= 0 and < {len(self.tokens)} (a node)")


class ScriptedDrafter:
    """Plays one `RoundScript` a round, over and over.

    expected: prompt and the tokens that plain decoding emits after it; later: the same for later turns, behind other
    texts. When the context leaves them all, or runs past their ends, the fillers stand as they are. The budget is not
    obeyed: a decoder must cut its output by itself.
    """

    def __init__(
        self,
        expected: Sequence[int],
        rounds: Sequence[RoundScript],
        *,
        vocab_size: int,
        later: Sequence[Sequence[int]] = (),
    ) -> None:
        self._texts = [list(expected), *map(list, later)]
        self._rounds = list(rounds)
        self._vocab_size = vocab_size
        self._num_played = 0

    def draft(
        self, context: list[int], *, max_nodes: int, max_depth: int, sampling: Sampling, coins: Coins
    ) -> DraftTree:
        if not self._rounds:
            return root_only(context[-1])
        script = self._rounds[self._num_played % len(self._rounds)]
        self._num_played += 1
        going_on = [text for text in self._texts if text[: len(context)] == list(context)]
        return play(script, context, max(going_on, key=len, default=[]), self._vocab_size)


def play(script: RoundScript, context: Sequence[int], expected: Sequence[int], vocab_size: int) -> DraftTree:
    """The scripted tree below the last token of `context`.

    Nodes on the way to `script.accept` get the expected tokens; a draft that would prolong the match is turned into a
    wrong one, so that acceptance ends where the script says (at that node, or at a copy of it when fillers spell the
    same text).
    """
    tokens = [context[-1], *script.tokens[1:]]
    coming = list(expected[len(context) :]) if list(expected[: len(context)]) == list(context) else []
    path = DraftTree.of(tokens, script.parents).path_to(script.accept)
    for node, token in zip(path[1:], coming, strict=False):
        tokens[node] = token
    tree = DraftTree.of(tokens, script.parents)
    after = coming[len(path) - 1 : len(path)]
    for node in range(tree.num_nodes):
        # Duplicate siblings stand for the same text, so a child of any copy of the accepted node would be accepted too.
        if tree.path_tokens(node) == tree.path_tokens(script.accept):
            for child in tree.children(node):
                if after == [tokens[child]]:
                    tokens[child] = (tokens[child] + 1) % vocab_size
    return DraftTree.of(tokens, script.parents)
