"""The reference drafters by name, each made over any model: what `ReferenceTarget.build_drafter` hands out."""

from __future__ import annotations

from collections.abc import Callable

from specbench.protocols import Drafter, LanguageModel
from specbench.reference.drafters.caching import CachingDrafter
from specbench.reference.drafters.model import ModelDrafter, self_drafter
from specbench.reference.drafters.ngram import NGramDrafter
from specbench.reference.drafters.sampled import SampledDrafter
from specbench.reference.model import LlamaModel


def _early_exit(model: LanguageModel) -> Drafter:
    """The first half of the layers; the whole model where it is one that cannot be cut."""
    if isinstance(model, LlamaModel):
        return self_drafter(model, num_layers=max(1, model.num_layers // 2), widths=(2, 1, 1))
    return ModelDrafter(model, widths=(2, 1, 1))


DRAFTERS: dict[str, Callable[[LanguageModel], Drafter]] = {
    "self_chain": lambda model: ModelDrafter(model, widths=(1, 1, 1)),
    "self_tree": lambda model: ModelDrafter(model, widths=(2, 2, 1)),
    "early_exit": _early_exit,
    "ngram": lambda model: NGramDrafter(gamma=6, width=3),
    "ngram_chain": lambda model: NGramDrafter(gamma=6, width=1),
    "caching": CachingDrafter,
    "sampled_iid": lambda model: SampledDrafter(model, proposal="iid"),
    "sampled_distinct": lambda model: SampledDrafter(model, proposal="without_replacement"),
}
# Those that draft what the model itself says, so that a decoder over the same model accepts everything.
SELF_DRAFTERS = ("self_chain", "self_tree", "caching")
# Those that look up what has followed the last tokens earlier in the text.
LOOKUP_DRAFTERS = ("ngram", "ngram_chain")
