"""A Medusa-style model object as our `Drafter`: heads on the last hidden state, and the tree of choices they fill.

Such an object is called as `model(input_ids, output_orig=True)` and answers (head logits [H, B, S, V], the base model's
outputs, its logits [B, S, V]), as in Medusa's own repository (github.com/FasterDecoding/Medusa, medusa_model.py). The
logits behind the token before the root predict the root; head h there predicts the token h + 1 behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from specbench.drafters.toys import tiny_model
from specbench.protocols import Coins, LanguageModel
from specbench.reference.drafters.trie import TrieBuilder
from specbench.tree import DraftTree, root_only
from specbench.types import Sampling

# (input_ids int64 [1, S], output_orig=True) -> (float [H, 1, S, V], anything, float [1, S, V])
MedusaModel = Callable[..., tuple[Tensor, Any, Tensor]]
Choices = Sequence[Sequence[int]]
TOY_CHOICES: Choices = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0))


class MedusaDrafter:
    """choices: a path of ranks for each node, as Medusa's `medusa_choices`: (0, 2) is the third best token of head 1
    below the best one of head 0. Every path but those of one rank needs its parent among the choices.

    The model reads the whole context each time: this judges what is drafted, not how fast.
    """

    def __init__(self, model: MedusaModel, choices: Choices) -> None:
        known = {tuple(path) for path in choices}
        for path in sorted(known, key=lambda one: (len(one), one)):
            if not path or min(path) < 0:
                raise ValueError(f"choices holds {list(path)}, must be ranks >= 0, at least one")
            if len(path) > 1 and path[:-1] not in known:
                raise ValueError(f"choices holds {list(path)} without its parent {list(path[:-1])}")
        self._model = model
        # The order in which Medusa fills its tree: by depth, then by rank. A budget cuts its end off.
        self._paths = sorted(known, key=lambda path: (len(path), path))

    def draft(
        self, context: list[int], *, max_nodes: int, max_depth: int, sampling: Sampling, coins: Coins
    ) -> DraftTree:
        paths = [path for path in self._paths if len(path) <= max_depth][: max(0, max_nodes)]
        if not paths or len(context) < 2:
            return root_only(context[-1])
        with torch.no_grad():
            heads = self._model(torch.tensor([context[:-1]]), output_orig=True)[0][:, 0, -1]  # [H, V]
        deepest, widest = max(map(len, paths)), 1 + max(map(max, paths))
        if deepest > len(heads) or widest > heads.shape[-1]:
            has = f"the model has {len(heads)} heads of {heads.shape[-1]} tokens"
            raise ValueError(f"choices go {deepest} deep and {widest} wide, {has}")
        best = heads.topk(widest, dim=-1).indices.tolist()
        trie = TrieBuilder(context[-1], max_nodes=max_nodes)
        for path in paths:
            trie.add([best[depth][rank] for depth, rank in enumerate(path)])
        return trie.tree()


class ToyMedusa(nn.Module):
    """A random model of that kind: residual blocks on the last hidden state, a matrix each. float64."""

    def __init__(self, base: LlamaForCausalLM, *, num_heads: int, seed: int = 0) -> None:
        super().__init__()
        self.base_model = base
        generator = torch.Generator().manual_seed(seed)
        size, vocab_size = base.config.hidden_size, base.config.vocab_size
        draws = [
            torch.randn(num_heads, *shape, size, generator=generator, dtype=torch.float64)
            for shape in ((size,), (vocab_size,))
        ]
        self._blocks, self._matrices = draws[0] / size**0.5, draws[1]

    def forward(self, input_ids: Tensor, *, output_orig: bool = False) -> Any:
        outputs = self.base_model.model(input_ids=input_ids)
        hidden = outputs[0]
        heads = torch.stack(
            [
                (hidden + nn.functional.silu(hidden @ block.mT)) @ matrix.mT
                for block, matrix in zip(self._blocks, self._matrices, strict=True)
            ]
        )
        return (heads, outputs, self.base_model.lm_head(hidden)) if output_orig else heads


class Medusa:
    """A target for the claims."""

    drafter_names = ("medusa",)

    def build_drafter(self, model: LanguageModel, name: str) -> MedusaDrafter:
        choices = [path for path in TOY_CHOICES if max(path) < model.vocab_size]
        return MedusaDrafter(ToyMedusa(tiny_model(model.vocab_size), num_heads=3), choices)
