"""Peak memory before anything is run: by formula, for our own decoder over a model like Llama.

The largest of three moments stands on top of weights and caches: the prompt's forward, a layer of a round, a round's
logits. What Python and its libraries hold comes on top of that, and what operators of torch use inside themselves.
`specbench bench` measures all of it beside the same formulas (`bench.memory`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from specbench.bench.memory import forward_bytes
from specbench.reference.model import LlamaConfig

MOST_NODES = 1 << 16
CACHE_BITS = {"int8": 8, "fp8": 8}  # of a number; each row and head has a scale in fp32 beside it
# Types whose layers are a Llama's: four projections, a gated feed-forward of three, two norms or a few more.
LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "smollm3", "olmo2", "granite")


@dataclass(frozen=True)
class Load:
    """What is to be run. context: tokens of a text, prompt and answer. prompt: of them, encoded at once in pieces of
    `chunk`. batch: texts at once. nodes: drafted, a tree. cache: "" for rows in the model's dtype, else of CACHE_BITS.
    """

    context: int
    prompt: int
    nodes: int
    batch: int = 1
    chunk: int = 0
    dtype: torch.dtype = torch.bfloat16
    cache: str = ""

    def __post_init__(self) -> None:
        for name in ("context", "prompt", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be >= 1")
        if self.nodes < 0 or self.chunk < 0:
            raise ValueError(f"nodes = {self.nodes} and chunk = {self.chunk} must be >= 0")
        if self.prompt > self.context:
            raise ValueError(f"prompt = {self.prompt} must be <= {self.context} (context: prompt and answer)")
        if self.cache and self.cache not in CACHE_BITS:
            raise ValueError(f"cache = {self.cache!r} must be '' or one of {', '.join(CACHE_BITS)}")


@dataclass(frozen=True)
class Needs:
    """Bytes. prompt: the forward of the prompt or of its largest piece; layer, logits: of a round."""

    weights: int
    cache: int
    prompt: int
    layer: int
    logits: int

    @property
    def working(self) -> int:
        return max(self.prompt, self.layer, self.logits)

    @property
    def peak(self) -> int:
        return self.weights + self.cache + self.working

    @property
    def largest(self) -> str:
        """Which moment decides."""
        return max(("prompt", "layer", "logits"), key=lambda name: getattr(self, name))


def tree_nodes(gamma: int, width: int) -> int:
    """Drafted nodes of a tree `gamma` deep in which every node has `width` children."""
    return sum(width**depth for depth in range(1, gamma + 1))


def needs(config: LlamaConfig, load: Load) -> Needs:
    rows, dtype = load.nodes + 1, load.dtype
    layer, logits = forward_bytes(config, rows=rows, prefix=load.context, dtype=dtype, batch=load.batch)
    piece = min(load.chunk or load.prompt, load.prompt)
    filling, reading = forward_bytes(config, rows=piece, prefix=load.prompt - piece, dtype=dtype, batch=load.batch)
    if load.batch == 1 and not any(config.windows):
        reading = 0  # nobody reads a prompt's logits there
    return Needs(
        weights=num_weights(config) * dtype.itemsize,
        cache=load.batch * (load.context + rows) * row_bytes(config, dtype, load.cache),
        prompt=max(filling, reading),
        layer=layer,
        logits=logits,
    )


def num_weights(config: LlamaConfig) -> int:
    """Numbers of a checkpoint: V hidden once or twice, and a layer's four projections, gated feed-forward and norms."""
    hidden, size = config.hidden_size, config.head_dim
    attention = 2 * hidden * size * (config.num_heads + config.num_kv_heads)
    layer = attention + 3 * hidden * config.intermediate_size + 2 * hidden
    return (1 if config.tied else 2) * config.vocab_size * hidden + config.num_layers * layer + hidden


def row_bytes(config: LlamaConfig, dtype: torch.dtype, cache: str = "") -> int:
    """Of one token in all layers, keys and values."""
    numbers = 2 * config.num_layers * config.num_kv_heads
    if cache:
        return numbers * (config.head_dim * CACHE_BITS[cache] // 8 + 4)
    return numbers * config.head_dim * dtype.itemsize


def largest_tree(config: LlamaConfig, load: Load, memory: int) -> int | None:
    """The most nodes within `memory` bytes, None where plain decoding does not fit. More nodes never take less."""

    def fits(nodes: int) -> bool:
        return needs(config, replace(load, nodes=nodes)).peak <= memory

    if not fits(0):
        return None
    return bisect_left(range(1, MOST_NODES + 1), True, key=lambda nodes: not fits(nodes))


@dataclass(frozen=True)
class Change:
    """One thing changed, the rest as it was."""

    what: str
    peak: int


def changes(config: LlamaConfig, load: Load, *, gamma: int = 0, width: int = 0) -> list[Change]:
    """Those that take less, the least first. gamma, width: where the tree was named by them."""
    found: dict[str, Load] = {}
    if width > 1:
        found[f"k {width // 2} in place of {width}"] = replace(load, nodes=tree_nodes(gamma, width // 2))
        found[f"a chain (k 1), gamma {gamma}"] = replace(load, nodes=gamma)
    if gamma > 1:
        found[f"gamma {gamma // 2} in place of {gamma}"] = replace(load, nodes=tree_nodes(gamma // 2, width))
    elif load.nodes > 1:
        found[f"{load.nodes // 2} nodes in place of {load.nodes}"] = replace(load, nodes=load.nodes // 2)
    for piece in (512, 128):
        if load.batch == 1 and piece < (load.chunk or load.prompt):
            found[f"the prompt in pieces of {piece}"] = replace(load, chunk=piece)
    if load.dtype.itemsize > 2:
        found["bf16"] = replace(load, dtype=torch.bfloat16)
    if not load.cache:
        found["a cache of int8"] = replace(load, cache="int8")
    if load.batch > 1:
        found[f"batch {load.batch // 2} in place of {load.batch}"] = replace(load, batch=load.batch // 2)
    half = load.context // 2
    if half:
        prompt = min(load.prompt, half)
        found[f"context {half} in place of {load.context}"] = replace(load, context=half, prompt=prompt)
    now = needs(config, load).peak
    listed = [Change(what, needs(config, other).peak) for what, other in found.items()]
    return sorted((one for one in listed if one.peak < now), key=lambda one: one.peak)


def config_of(fields: Mapping[str, Any], *, name: str) -> LlamaConfig:
    """fields: of a config.json as transformers reads it. ValueError for a type whose layers are not a Llama's."""
    kind = fields.get("model_type")
    if kind not in LIKE_LLAMA:
        known = ", ".join(LIKE_LLAMA)
        raise ValueError(f"{name}: model_type = {kind!r} must be one of {known}: others need formulas of their own")
    heads, hidden = int(fields["num_attention_heads"]), int(fields["hidden_size"])
    window = fields.get("sliding_window") if kind == "mistral" else None
    return LlamaConfig(
        vocab_size=int(fields["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(fields["intermediate_size"]),
        num_layers=int(fields["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(fields.get("num_key_value_heads") or heads),
        head_dim=int(fields.get("head_dim") or hidden // heads),
        tied=bool(fields.get("tie_word_embeddings")),
        windows=() if window is None else (int(window),) * int(fields["num_hidden_layers"]),
    )


def table(
    config: LlamaConfig, load: Load, memory: int, *, tree: str, drafter: int = 0, gamma: int = 0, width: int = 0
) -> list[str]:
    """Lines of text. tree: its words. drafter: bytes of a draft model, its cache included. gamma, width: as in
    `changes`."""
    found, rows = needs(config, load), row_bytes(config, load.dtype, load.cache)
    piece, peak = min(load.chunk or load.prompt, load.prompt), found.peak + drafter
    sides = [
        ("weights", found.weights, f"{num_weights(config):,} numbers"),
        ("cache", found.cache, f"{load.batch} x {load.context + load.nodes + 1} rows of {rows:,} bytes"),
        ("drafter", drafter, "the draft model's weights and cache"),
        ("prompt", found.prompt, f"the forward of {load.batch} x {piece} rows"),
        ("layer", found.layer, f"a layer of a round: {load.batch} x {load.nodes + 1} rows, {tree}"),
        ("logits", found.logits, f"of the same rows, {config.vocab_size:,} each"),
        ("peak", peak, f"what is held, and the largest of the three moments: {found.largest}"),
        ("free", memory, ""),
    ]
    lines = [f"{name:8} {_mib(size):>14}  {words}".rstrip() for name, size, words in sides if size]
    most = largest_tree(config, load, memory - drafter)
    words = "largest tree that does has"
    if most is None:
        lines += ["", "It does not fit, and neither does plain decoding."]
    elif peak > memory:
        lines += ["", f"It does not fit. The {words} {most} nodes."]
    else:
        lines += ["", f"It fits. The {words} {most} nodes{' or more' * (most == MOST_NODES)}."]
    if peak > memory:
        lines += ["One thing changed, and the peak then:"]
        for one in changes(config, load, gamma=gamma, width=width):
            lines.append(f"  {_mib(one.peak + drafter):>14}  {one.what}{': fits' * (one.peak + drafter <= memory)}")
    return lines


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
