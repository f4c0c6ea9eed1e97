"""Acceptance rules: which drafts does the target keep, and what does it say next. One file a rule, all in `RULES`.

A draft is judged by its parent's row, never its own: row i has read node i and predicts what follows it. Lossless and
lossy rules share no walk; p is the target's law and q the draft's, always.
"""

from __future__ import annotations

from specbench.reference.verify.chance import Chance, CoinChance, Law, RuleFn, SharedNoise
from specbench.reference.verify.greedy import argmax_lowest, greedy_walk
from specbench.reference.verify.rules import RULES, Rule, rule_for, rule_named
from specbench.reference.verify.threshold import threshold_walk

__all__ = [
    "RULES",
    "Chance",
    "CoinChance",
    "Law",
    "Rule",
    "RuleFn",
    "SharedNoise",
    "argmax_lowest",
    "greedy_walk",
    "rule_for",
    "rule_named",
    "threshold_walk",
]
