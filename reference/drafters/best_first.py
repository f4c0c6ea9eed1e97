"""A model drafter that grows where its own law says the target will go: the likeliest paths under a node budget."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specbench.protocols import LanguageModel
from specbench.reference.drafters.growth import BestFirst, grow
from specbench.reference.drafters.model import ModelDrafter
from specbench.reference.session import TreeSession
from specbench.tree import DraftTree


class BestFirstDrafter(ModelDrafter):
    """gamma: levels at most. width: nodes that grow at each of them, and children that each is given."""

    def __init__(self, model: LanguageModel, *, gamma: int = 4, width: int = 4, num_nodes: int = 16) -> None:
        super().__init__(model, widths=(width,) * gamma)
        self._shape = BestFirst(num_nodes, depth=gamma, beam=width, width=width)

    def _grow(self, root: int, *, max_nodes: int, max_depth: int) -> DraftTree:
        return grow(root, _Law(self._session), self._shape, max_nodes=max_nodes, max_depth=max_depth)


class _Law:
    ids = None

    def __init__(self, session: TreeSession) -> None:
        self._session = session

    def __call__(self, tokens: Sequence[int], parents: Sequence[int], level: Sequence[int]) -> Tensor:
        return self._session.forward_tree(DraftTree.of(tokens, parents))[list(level)].double().log_softmax(dim=-1)
