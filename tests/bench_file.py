"""A file of rows that a test makes up: nobody measured these numbers, and they are round so that a person can check.

Plain decoding takes 0.1 s a token behind the first; six prompts, two repetitions, 11 tokens, the first after 0.5 s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HOSTILE = '<script>alert("x")</script> & \u202eabc\u202c \x1b[31m $a_b$ |`*'
LONG = "word" * 40
CATEGORIES = {"p0": "code", "p1": "code", "p2": "prose", "p3": "prose", "p4": "prose", "p5": "中文"}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"side": "own"},
    "transformers-plain": {"side": "transformers"},
    "ngram-2": {"side": "own", "drafter": "ngram", "gamma": 2},
    "ngram-4": {"side": "own", "drafter": "ngram", "gamma": 4},
    "ngram-8": {"side": "own", "drafter": "ngram", "gamma": 8},
    "early_exit-2": {"side": "own", "drafter": "early_exit", "gamma": 2},
    "lookup": {"side": "transformers", "drafter": "lookup", "gamma": 4},
    "slow": {"side": "own", "drafter": "suffix", "gamma": 4, "width": 2},
    HOSTILE: {"side": "target", "drafter": "own", "gamma": 3},
    LONG: {"side": "own", "drafter": "model", "gamma": 1},
}
# Seconds a token behind the first: of each prompt p0 ... p5.
PACE = {
    "plain": [0.1] * 6,
    "transformers-plain": [0.2] * 6,
    "ngram-2": [0.08] * 6,
    "ngram-4": [0.025, 0.05, 0.1, 0.05, 0.05, 0.1],
    "ngram-8": [0.0625] * 6,
    "early_exit-2": [0.1, 0.11, 0.09, 0.1, 0.1, 0.1],
    "lookup": [0.05] * 6,
    "slow": [0.2] * 6,
    HOSTILE: [0.01] * 6,
    LONG: [0.05] * 6,
}
GATES: list[tuple[str, str, str, int]] = [
    ("plain", "EQUAL", "all tokens are plain decoding's", 6),
    ("transformers-plain", "EQUAL", "all tokens are plain decoding's", 6),
    ("ngram-2", "EQUAL", "all tokens are plain decoding's", 6),
    ("ngram-4", "NOISE", "5 of 6 outputs are plain decoding's; the largest regret is 0.1 of 0.3 allowed", 5),
    ("ngram-8", "EQUAL", "all tokens are plain decoding's", 6),
    ("early_exit-2", "EQUAL", "all tokens are plain decoding's", 6),
    ("slow", "EQUAL", "all tokens are plain decoding's", 6),
    (HOSTILE, "BUG", 'token 3 <img src=x onerror="alert(1)"> beyond the bound', 0),
]
PREDICTED = {"weights": 290, "cache": 20, "tree": 1, "logits": 30, "working": 50}  # MiB
ACCEPTED = [4, 2, 0, 0, 0]  # of five rounds that emit 11 tokens: 5 + 3 + 1 + 1 + 1


def records() -> list[dict[str, Any]]:
    header = {
        "kind": "header",
        "schema": 1,
        "definition": {
            "weights": "made-up-135M",
            "dtype": "bf16",
            "device": "cpu",
            "threads": 2,
            "max_new_tokens": 11,
            "seed": 0,
            "repetitions": 2,
            "settings": {name: _fields(fields) for name, fields in SETTINGS.items()},
            "prompts": {prompt: [category, 7] for prompt, category in CATEGORIES.items()},
        },
        "definition_hash": "0123456789abcdef",
        "machine": {"system": "Linux", "processor": "Made-Up CPU <b>9000</b>", "num_cores": 2, "device": "cpu"},
        "versions": {"specbench": "0.0.0", "torch": "0.0.0"},
        "command": "specbench bench --preset 'made up' </pre><script>",
        "started": "2026-01-02T03:04:05Z",
    }
    rows = [
        _row(setting, prompt, repetition, pace)
        for setting, paces in PACE.items()
        for prompt, pace in zip(CATEGORIES, paces, strict=True)
        for repetition in (0, 1)
    ]
    gates = [
        {"kind": "gate", "setting": name, "verdict": verdict, "sentence": said, "num_outputs": 6, "num_tokens": 66,
         "num_equal": equal, "law_checked": None, "facts": {}}
        for name, verdict, said, equal in GATES
    ]  # fmt: skip
    costs = [
        {"kind": "cost", "model": "own", "context": 256, "seconds": {"1": 0.04, "8": 0.044, "16": 0.05}},
    ]
    memory = [
        {"kind": "memory", "setting": name, "where": "cpu",
         "bytes": {"imported": 100 << 20, "loaded": 400 << 20, "peak": 460 << 20, "working": 60 << 20},
         "predicted": {name: size << 20 for name, size in PREDICTED.items()}}
        for name in ("plain", "ngram-4")
    ]  # fmt: skip
    return [header, *rows, *gates, *costs, *memory]


def _fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    usual = {"side": "own", "drafter": "", "gamma": 0, "width": 1, "layout": "tree_mask", "cache": "preallocated"}
    return {**usual, "temperature": 0.0, **fields}


def _row(setting: str, prompt: str, repetition: int, pace: float) -> dict[str, Any]:
    drafts = bool(SETTINGS[setting].get("drafter"))
    seconds = 0.5 + 10 * pace
    gamma = max(4, SETTINGS[setting].get("gamma", 0))
    rounds: list[list[int | None]] = (
        [[gamma, gamma, one, one + 1] for one in ACCEPTED] if drafts else [[0, 0, 0, 1]] * 11
    )
    phases: dict[str, float] | None = {"draft": pace, "verify": 8 * pace, "commit": 0.5 * pace, "decode": 10 * pace}
    if setting == "lookup":  # a decoder that does not say how deep it drafted, nor where its time went
        rounds, phases = [[None, None, one, one + 1] for one in ACCEPTED], None
    if setting == "slow" and prompt == "p0":
        phases = None
    return {
        "kind": "row",
        "key": f"{setting}/{prompt}/{repetition}",
        "setting": setting,
        "prompt": prompt,
        "category": CATEGORIES[prompt],
        "repetition": repetition,
        "num_prompt": 7,
        "num_tokens": 11,
        "tokens": list(range(11)),
        "seconds": seconds,
        "first_seconds": 0.5,
        "first_tokens": 1,
        "rounds": rounds,
        "phases": phases,
        "num_rows": sum(1 + (one[0] or 0) for one in rounds),
        "looping": 5 / 11 if prompt == "p5" else 0.0,
        "load": 1.5,
    }


def write(path: Path) -> Path:
    """With a last line that was torn."""
    lines = [json.dumps(one) for one in records()]
    path.write_text("\n".join(lines) + '\n{"kind": "row", "sett', encoding="utf-8")
    return path
