"""Sentinel checkpoints: constructed, not trained, so that the next token of every context is known without a model."""

from specbench.reference.sentinel.export import (
    DTYPES,
    GGUF_TYPES,
    GGUF_VARIANTS,
    SYMBOLS,
    check_gguf,
    export,
    export_gguf,
    has_law,
    is_sentinel,
    load_program,
)
from specbench.reference.sentinel.program import (
    BOS,
    NUM_SYMBOLS,
    Program,
    accepted_lengths,
    prompts_for,
    random_symbols,
    repeating_prompt,
)
from specbench.reference.sentinel.weights import VARIANTS, Layout, Sentinel, quantised

__all__ = [
    "BOS",
    "DTYPES",
    "GGUF_TYPES",
    "GGUF_VARIANTS",
    "NUM_SYMBOLS",
    "SYMBOLS",
    "VARIANTS",
    "Layout",
    "Program",
    "Sentinel",
    "accepted_lengths",
    "check_gguf",
    "export",
    "export_gguf",
    "has_law",
    "is_sentinel",
    "load_program",
    "prompts_for",
    "quantised",
    "random_symbols",
    "repeating_prompt",
]
