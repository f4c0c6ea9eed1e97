"""The options that say how an engine draws, alike in all commands that judge engines."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specbench.types import Sampling


def add(one: argparse.ArgumentParser, count: Any, *, temperature: str, others: str = "at a temperature") -> None:
    """count: reads a number of at least 1. temperature, others: their help."""
    one.add_argument("--temperature", type=float, default=0.0, metavar="T", help=temperature)
    one.add_argument("--top-k", type=count, metavar="K", help=others)
    one.add_argument("--top-p", type=float, metavar="P", help=others)
    one.add_argument("--min-p", type=float, metavar="P", help=others)


def sampling_of(args: argparse.Namespace) -> Sampling:
    """ValueError names what is out of range."""
    from specbench.types import Sampling

    return Sampling(args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p)
