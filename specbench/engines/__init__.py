"""Implementations that nobody here wrote, each behind one small face: a mode and requests in, tokens out.

One file an engine, which is imported when it is asked for and imports its engine no earlier.
"""

from __future__ import annotations

from importlib import import_module

from specbench.engines.engine import REFUSALS, Answer, Engine, Files, Missing, Mode, Refused, Request, Settings

ENGINES = {
    "transformers": "hugging_face",
    "llama.cpp": "llama_cpp",
    "mlx-lm": "mlx_lm",
    "openvino": "openvino",
    "vllm": "vllm",
    "mistral.rs": "mistral_rs",
    "litgpt": "litgpt",
}


def engine_named(name: str) -> Engine:
    """name: one of ENGINES, KeyError for another. One of one's own is loaded where it runs (`apart.py`)."""
    engine: Engine = import_module(f"specbench.engines.{ENGINES[name]}").ENGINE
    return engine


__all__ = [
    "ENGINES",
    "REFUSALS",
    "Answer",
    "Engine",
    "Files",
    "Missing",
    "Mode",
    "Refused",
    "Request",
    "Settings",
    "engine_named",
]
