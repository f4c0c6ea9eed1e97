"""Every root-to-leaf path written out whole, and no other layout: how trees are verified without a tree mask."""

from __future__ import annotations

from specbench.lockstep import Group
from specbench.protocols import Drafter, LanguageModel
from specbench.reference.controls.control import Control
from specbench.reference.decoder import Decoder
from specbench.reference.target import ReferenceTarget


class _PathBatch:
    """Takes no `layout`, and says nothing of the one that it has."""

    def __init__(self) -> None:
        self._reference = ReferenceTarget()
        self.drafter_names = self._reference.drafter_names
        self.self_drafters = self._reference.self_drafters

    def build(
        self,
        model: LanguageModel,
        drafter: Drafter | None,
        *,
        cache: str = "contiguous",
        batch_layout: str = "packed",
        group: Group | None = None,
    ) -> Decoder:
        return self._reference.build(
            model, drafter, cache=cache, layout="path_batch", batch_layout=batch_layout, group=group
        )

    def build_drafter(self, model: LanguageModel, *, name: str = "self_chain") -> Drafter:
        return self._reference.build_drafter(model, name=name)


CONTROLS = (
    Control(
        "path_batch",
        "a tree is a batch of its root-to-leaf paths under a causal mask each, without a tree mask",
        "each path holds all ancestors of its nodes, so every row sees what plain decoding sees; shared ancestors are "
        "computed once a path, which costs rows and changes nothing",
        _PathBatch,
    ),
)
