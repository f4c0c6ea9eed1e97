"""How each claim is checked: functions `(subject, case, record) -> None` that raise the claim's Violation.

`CHECKS` maps claim ids to them. A check compares what a target did on one case with what the oracle says; it draws no
cases, prints nothing, and decides no verdict.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from specbench.cases import Case
from specbench.checks import (
    acceptance,
    accepted,
    attention,
    batch,
    cache,
    draft_law,
    drafter,
    generation,
    law,
    long,
    machine,
    processors,
    ranks,
    sampled,
    self_draft,
    states,
    stopping,
    tree,
    walk,
)
from specbench.claims import CLAIMS, KERNEL_LEVEL
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
    "tree.long": long.check_long,
    "kv.commit": cache.check_commit,
    "kv.rollback": cache.check_rollback,
    "kv.machine": machine.check_machine,
    "kv.dead_rows": states.check_dead_rows,
    "kv.fork": states.check_fork,
    "kv.pages": states.check_pages,
    "kv.chunked": states.check_chunked,
    "kv.abort": states.check_abort,
    "greedy.walk": walk.check_walk,
    "verify.batch": batch.check_verify,
    "greedy.lossless": generation.check_lossless,
    "greedy.repeatable": generation.check_repeatable,
    "progress": generation.check_progress,
    "stop.eos": stopping.check_eos,
    "stop.max_tokens": stopping.check_max_tokens,
    "stop.sequences": stopping.check_sequences,
    "stop.min_tokens": stopping.check_min_tokens,
    "stop.every_index": stopping.check_every_index,
    "stop.resume": stopping.check_resume,
    "processors.penalties": processors.check_penalties,
    "processors.bad_words": processors.check_bad_words,
    "processors.grammar": processors.check_grammar,
    "processors.history": processors.check_history,
    "batch.solo": batch.check_solo,
    "batch.join": batch.check_join,
    "ranks.agree": ranks.check_agree,
    "cost.rows": generation.check_rows,
    "threshold.consistency": generation.check_threshold,
    "metrics.acceptance": acceptance.check_acceptance,
    "drafter.tree": drafter.check_tree,
    "drafter.budget": drafter.check_budget,
    "drafter.law": draft_law.check_law,
    "drafter.no_peeking": drafter.check_no_peeking,
    "drafter.deterministic": drafter.check_deterministic,
    "drafter.state": drafter.check_state,
    "drafter.self_draft": self_draft.check_self_draft,
    "greedy.temperature_zero": law.check_temperature_zero,
    "law.exact": law.check_exact,
    "law.params": law.check_params,
    "law.support": law.check_support,
    "law.acceptance_bound": law.check_bound,
    "law.q": sampled.check_own_drafts,
    "law.joint": sampled.check_joint,
    "law.rows": sampled.check_rows,
    "law.accepted": accepted.check_accepted,
    "law.seed": sampled.check_seed,
    "sampler.law": law.check_sampler,
    **{
        claim: partial(attention.check_out, claim=claim)
        for claim in CLAIMS
        if CLAIMS[claim].level == KERNEL_LEVEL and claim != "attention.lse"
    },
    "attention.lse": attention.check_lse,
}
