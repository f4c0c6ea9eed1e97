"""How each claim is checked: functions `(subject, case, record) -> None` that raise the claim's Violation.

`CHECKS` maps claim ids to them. A check compares what a target did on one case with what the oracle says; it draws no
cases, prints nothing, and decides no verdict.
"""

from __future__ import annotations

from collections.abc import Callable

from specbench.cases import Case
from specbench.checks import cache, generation, tree, walk
from specbench.record import ClaimRecord
from specbench.subjects import Subject

Check = Callable[[Subject, Case, ClaimRecord], None]

CHECKS: dict[str, Check] = {
    "tree.mask": tree.check_mask,
    "tree.positions": tree.check_positions,
    "tree.attention_weights": tree.check_attention_weights,
    "tree.layers": tree.check_layers,
    "tree.logits": tree.check_logits,
    "tree.noninterference": tree.check_noninterference,
    "tree.sensitivity": tree.check_sensitivity,
    "kv.commit": cache.check_commit,
    "kv.rollback": cache.check_rollback,
    "greedy.walk": walk.check_walk,
    "greedy.lossless": generation.check_lossless,
    "progress": generation.check_progress,
    "stop.eos": generation.check_eos,
    "stop.max_tokens": generation.check_max_tokens,
    "cost.rows": generation.check_rows,
    "threshold.consistency": generation.check_threshold,
}
