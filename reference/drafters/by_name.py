"""The reference drafters by name, each made over any model: what `ReferenceTarget.build_drafter` hands out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from specbench.protocols import Drafter, LanguageModel
from specbench.reference.drafters.adaptive import ARMS, AdaptiveDrafter, CostPolicy, Costs
from specbench.reference.drafters.caching import CachingDrafter
from specbench.reference.drafters.growth import BestFirst, Static
from specbench.reference.drafters.heads import HeadsDrafter, MarkovHeads
from specbench.reference.drafters.layers import DraftLayers, LayersConfig, LayersDrafter
from specbench.reference.drafters.model import ModelDrafter, self_drafter
from specbench.reference.drafters.ngram import NGramDrafter
from specbench.reference.drafters.sampled import SampledDrafter
from specbench.reference.drafters.suffix import SuffixDrafter
from specbench.reference.model import LlamaModel


def _early_exit(model: LanguageModel) -> Drafter:
    """The first half of the layers; the whole model where it is one that cannot be cut."""
    if isinstance(model, LlamaModel):
        return self_drafter(model, num_layers=max(1, model.num_layers // 2), widths=(2, 1, 1))
    return ModelDrafter(model, widths=(2, 1, 1))


def _heads(model: Any) -> Drafter:
    """Random ones over every second token: what they draft is seldom right, and depends on all that they read."""
    ids = torch.arange(0, model.vocab_size, 2)
    heads = MarkovHeads.untrained(model, ids, num_heads=3, gain=4.0)
    return HeadsDrafter(model, heads, shape=BestFirst(num_nodes=6, depth=3, beam=2, width=2))


def _adaptive(model: Any) -> Drafter:
    """Over random heads, which it asks all the same; drafting costs next to nothing, so that every arm has its turn."""
    costs = Costs({1: 1.0, 17: 1.1}, drafting=tuple(0.01 * arm.depth for arm in ARMS))
    return AdaptiveDrafter(_heads(model), CostPolicy(), costs, seldom=0.0)


def layers_drafter(
    model: Any, kind: type[LayersDrafter] = LayersDrafter, *, reads_features: bool = True, num_layers: int = 1
) -> Drafter:
    """Random layers."""
    vocab_size, hidden = model.embedding.shape
    ids = torch.arange(vocab_size)
    config = LayersConfig(hidden, 2 * hidden, num_layers, 2, 1, 4, vocab_size, len(ids), reads_features)
    return kind(model, DraftLayers.untrained(config, ids), shape=Static.widths(2, 1, 1))


DRAFTERS: dict[str, Callable[[LanguageModel], Drafter]] = {
    "self_chain": lambda model: ModelDrafter(model, widths=(1, 1, 1)),
    "self_tree": lambda model: ModelDrafter(model, widths=(2, 2, 1)),
    "early_exit": _early_exit,
    "ngram": lambda model: NGramDrafter(gamma=6, width=3),
    "ngram_chain": lambda model: NGramDrafter(gamma=6, width=1),
    "suffix": lambda model: SuffixDrafter(),
    "caching": CachingDrafter,
    "heads": _heads,
    "feature": layers_drafter,
    "adaptive": _adaptive,
    "small_model": lambda model: layers_drafter(model, reads_features=False, num_layers=2),
    "sampled_iid": lambda model: SampledDrafter(model, proposal="iid"),
    "sampled_distinct": lambda model: SampledDrafter(model, proposal="without_replacement"),
}
# Those that draft what the model itself says, so that a decoder over the same model accepts everything.
SELF_DRAFTERS = ("self_chain", "self_tree", "caching")
# Those that look up what has followed the last tokens earlier in the text.
LOOKUP_DRAFTERS = ("ngram", "ngram_chain", "suffix")
