"""Implementations that nobody here wrote, each behind one small face: a mode and requests in, tokens out.

One file an engine, which is imported when it is asked for and imports its engine no earlier.
"""

from __future__ import annotations

from importlib import import_module

from specbench.engines.engine import REFUSALS, Answer, Engine, Files, Missing, Mode, Request, Settings
from specbench.engines.own import engine_in

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
    """name: one of ENGINES, or `./file.py:ATTRIBUTE` (`own.py`). KeyError for another."""
    if ".py:" in name:
        return engine_in(name)
    engine: Engine = import_module(f"specbench.engines.{ENGINES[name]}").ENGINE
    return engine


__all__ = ["ENGINES", "REFUSALS", "Answer", "Engine", "Files", "Missing", "Mode", "Request", "Settings", "engine_named"]
