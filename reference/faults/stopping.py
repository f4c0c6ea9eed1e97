"""Stop rules that look at the wrong token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specbench.reference.faults.fault import Fault
from specbench.steps import Emission, Steps
from specbench.tree import DraftTree
from specbench.types import Stop, VerifyResult


def _last_token_only(steps: Steps) -> Steps:
    def emit(
        tree: DraftTree, result: VerifyResult, *, stop: Stop, num_remaining: int, output: Sequence[int] = ()
    ) -> Emission:
        whole = steps.emit(tree, result, stop=Stop(), num_remaining=num_remaining)
        if whole.tokens and whole.tokens[-1] in stop.eos_token_ids:
            return Emission(whole.tokens, "eos")
        return whole

    return replace(steps, emit=emit)


FAULTS = (
    Fault(
        "eos_mid_path",
        "eos/stop/max-length",
        "the end token is looked for in the last token of a round only",
        "an end token inside an accepted run",
        "stop.eos",
        _last_token_only,
    ),
)
