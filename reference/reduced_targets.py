"""Decoders over small reduced models, as targets: `specbench check specbench.reference.reduced_targets:sparse`.

Their oracle is their own model's forward over a whole text, in the column `own`.
"""

from __future__ import annotations

from specbench.reference.decoder import Decoder
from specbench.reference.drafters.model import self_drafter
from specbench.reference.model import LlamaConfig, tiny_llama
from specbench.reference.reduced import ReducedLlama, Reduction

CONFIG = LlamaConfig(31, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)


def int8() -> Decoder:
    """Weights alone."""
    return over(Reduction(weights=True))


def int8_rows() -> Decoder:
    """Weights, and what they are given."""
    return over(Reduction(weights=True, activations=True))


def sparse() -> Decoder:
    """A quarter of the activations."""
    return over(Reduction(keep=12))


def over(reduction: Reduction, kind: type[ReducedLlama] = ReducedLlama) -> Decoder:
    """Drafts come from the model's own first layer."""
    model = kind.of(tiny_llama(CONFIG, seed=0), reduction)
    return Decoder(model, self_drafter(model, num_layers=1, widths=(2, 1, 1)))
