"""Claims about several requests at once: trees verified together, and rows of a batch against their solo runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from specbench import claims
from specbench.cases import BatchCase, Case, WalkBatchCase
from specbench.checks.drafts import NotedDrafts, check_drafts
from specbench.checks.generation import scripts_of, stretch
from specbench.checks.processors import penalties_of
from specbench.checks.stopping import judge_end
from specbench.checks.walk import walk_logits
from specbench.claims import Facts, Violation
from specbench.probe import Probe
from specbench.record import ClaimRecord
from specbench.reference.drafters.scripted import ScriptedDrafter
from specbench.subjects import Subject
from specbench.tree import DraftTree, root_only
from specbench.types import GREEDY, NEVER_STOP, Generation, Request, Stop, VerifyResult


def check_verify(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """Each tree of a batch against the same tree alone: by `verify` where there is one, else in a batch of one."""
    assert isinstance(case, WalkBatchCase)
    alone = [case.alone(idx) for idx in range(len(case.walks))]
    trees, logits = [one.tree for one in alone], [walk_logits(one) for one in alone]
    results = subject.open(case).verify_batch(trees, logits)
    probe = subject.open(case)
    for idx, (tree, one, result) in enumerate(zip(trees, logits, results, strict=True)):
        solo = probe.verify(tree, one) if "verify" in subject.has else probe.verify_batch([tree], [one])[0]
        if result != solo:
            winner = [min(tied) for tied in case.walks[idx].winners]
            raise claims.BatchVerifyMismatch(
                Facts(
                    headline=f"tree {idx} of {len(trees)} is decided otherwise than alone",
                    expected=_said(solo),
                    actual=_said(result),
                    source="the same tree verified alone",
                    tree=tree,
                    notes={node: f"argmax {winner[node]}" for node in range(tree.num_nodes)},
                )
            )


def check_solo(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """All rows are there from the first round on."""
    _check_rows(claims.BatchMismatch, subject, case, record)


def check_join(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """Rows join late and end early, by length or end token."""
    _check_rows(claims.JoinMismatch, subject, case, record)


def _check_rows(violation: type[Violation], subject: Subject, case: Case, record: ClaimRecord) -> None:
    """Every row is plain decoding's, ties excused as anywhere, and verifies what was drafted for it; where computing is
    exact it is also its solo run's."""
    assert isinstance(case, BatchCase)
    requests = [request_of(subject, case, idx) for idx in range(len(case.rows))]
    drafter = drafter_of(subject, case, requests)
    probe = subject.open(case, drafter=drafter)
    generations = probe.generate_batch(requests)
    for idx, (request, generation) in enumerate(zip(requests, generations, strict=True)):
        row = case.alone(idx)
        try:
            judge_end(
                violation,
                subject,
                row,
                generation,
                request.stop,
                record,
                prompt=row.prompt,
                sampling=request.sampling,
            )
            if drafter is not None:
                check_drafts(violation, drafter, request.prompt, generation)
            if subject.exact:
                solo = subject.open(case, drafter=drafter_of(subject, case, requests))
                _check_solo_run(violation, solo, request, generation)
        except violation as found:
            prompt = f"prompt {list(row.prompt)}" if len(row.prompt) <= 8 else f"prompt of {len(row.prompt)} tokens"
            headline = f"row {idx} of {len(requests)}, {prompt}: {found.facts.headline}"
            raise violation(replace(found.facts, headline=headline)) from None


def _check_solo_run(violation: type[Violation], probe: Probe, request: Request, generation: Generation) -> None:
    solo = probe.generate(
        request.prompt, max_new_tokens=request.max_new_tokens, sampling=request.sampling, stop=request.stop
    )
    if solo.tokens != generation.tokens:
        raise violation(
            Facts(
                headline="output differs from the target's own solo run",
                expected=str(list(solo.tokens)),
                actual=str(list(generation.tokens)),
                source="generate() of the same target",
            )
        )


def request_of(subject: Subject, case: BatchCase, idx: int) -> Request:
    """Penalties, a stop sequence and a least length are asked for where the target honours them. The end token and the
    stop sequence are taken from what plain decoding says under the row's own penalties."""
    row, sampling, stop = case.rows[idx], GREEDY, NEVER_STOP
    if "penalties" in subject.has:
        sampling = penalties_of(row)
    plain = subject.plain_text(case.alone(idx), row.prompt, row.max_new_tokens, sampling=sampling)
    if plain and row.eos_idx >= 0:
        stop = Stop((plain[row.eos_idx % len(plain)],))
    if plain and row.stop_len and "stop_sequences" in subject.has:
        stop = replace(stop, stop_sequences=(stretch(plain, row.stop_from, row.stop_len),))
    if stop != NEVER_STOP and "min_new_tokens" in subject.has:
        stop = replace(stop, min_new_tokens=row.min_new_tokens)
    return Request(row.prompt, row.max_new_tokens, sampling=sampling, stop=stop, arrival=row.arrival)


def drafter_of(subject: Subject, case: BatchCase, requests: Sequence[Request]) -> NotedDrafts | None:
    """A few tokens beyond the limit and the stop are known to it, so that both also fall inside an accepted run."""
    if "build" not in subject.has:
        return None
    texts = []
    for idx, request in enumerate(requests):
        text = subject.plain_text(
            case.alone(idx),
            request.prompt,
            request.max_new_tokens + 3,
            sampling=request.sampling,
            stop=request.stop,
            past_stop=True,
        )
        texts.append((*request.prompt, *text))
    vocab_size = subject.vocab_size(case.model)
    drafters = [
        ScriptedDrafter(text, scripts_of(row.rounds), vocab_size=vocab_size)
        for text, row in zip(texts, case.rows, strict=True)
    ]
    return NotedDrafts(_RowsDrafter([row.prompt for row in case.rows], texts, drafters))


@dataclass
class _RowsDrafter:
    """One drafter for all rows, each with a script of its own. It is handed contexts of several rows in turn and knows
    a row by its text."""

    prompts: list[tuple[int, ...]]
    texts: list[tuple[int, ...]]
    drafters: list[ScriptedDrafter]

    def draft(self, context: list[int], **asked: Any) -> DraftTree:
        row = self._row_of(tuple(context))
        return root_only(context[-1]) if row is None else self.drafters[row].draft(context, **asked)

    def _row_of(self, context: tuple[int, ...]) -> int | None:
        """The row whose text goes on from the context, else one whose prompt begins it. Rows that share a text are one
        and the same to a drafter."""
        rows = range(len(self.texts))
        beginning = [row for row in rows if context[: len(self.prompts[row])] == self.prompts[row]]
        going_on = [row for row in beginning if self.texts[row][: len(context)] == context]
        return next(iter([*going_on, *beginning]), None)


def _said(result: VerifyResult) -> str:
    return f"path {list(result.path)}, bonus {result.bonus_token}"
