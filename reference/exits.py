"""How often a layer in the middle already says what the last one says: what an early exit would draft, or let pass.

At each row of a text the last norm and the output matrix are applied to what every layer leaves. Nothing is decoded by
it: to emit what a middle layer says is lossy, and no decoder here does so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specbench.reference.model import LlamaModel

SURE = 0.9  # of probability


@dataclass(frozen=True)
class Exit:
    """layers: how many are computed. Of `rows` rows the layer's argmax is the last one's in `equal`, and the last one's
    among its five best in `among_five`; it gives its argmax a probability above SURE in `sure`, and is right in
    `sure_equal` of those."""

    layers: int
    rows: int = 0
    equal: int = 0
    among_five: int = 0
    sure: int = 0
    sure_equal: int = 0

    def __add__(self, other: Exit) -> Exit:
        counts = ("rows", "equal", "among_five", "sure", "sure_equal")
        return Exit(self.layers, **{name: getattr(self, name) + getattr(other, name) for name in counts})


@torch.no_grad()
def exits(model: LlamaModel, text: Sequence[int], *, first: int = 0) -> list[Exit]:
    """For each layer, over the rows of a text from `first` on. ValueError where there are none."""
    if not 0 <= first < len(text):
        raise ValueError(f"first = {first} must be between 0 and {len(text) - 1} (rows of the text)")
    if model.num_layers == 1:
        inputs: tuple[torch.Tensor, ...] = ()
    else:
        between = model.layer_inputs(text, range(1, model.num_layers))
        inputs = between[first:].split(model.config.hidden_size, dim=-1)
    last = model.states(text)[first:] @ model.head.T  # [rows, V]
    said = last.argmax(dim=-1)
    found = []
    for layers, left in enumerate([*(model.normed(one) @ model.head.T for one in inputs), last], start=1):
        equal = left.argmax(dim=-1) == said
        five = left.topk(min(5, left.shape[1]), dim=-1).indices
        sure = left.float().softmax(dim=-1).amax(dim=-1) > SURE
        found.append(
            Exit(
                layers,
                rows=len(said),
                equal=int(equal.sum()),
                among_five=int((five == said[:, None]).any(dim=-1).sum()),
                sure=int(sure.sum()),
                sure_equal=int((sure & equal).sum()),
            )
        )
    return found
