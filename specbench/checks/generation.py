"""Claims about whole generations: the tokens, progress, repeatability, cost, and the lossy threshold rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from specbench import claims
from specbench.cases import Case, CommitRound, GenerationCase, StopCase
from specbench.checks.budget import note_flips
from specbench.checks.cells import note_round
from specbench.checks.drafts import NotedDrafts, check_drafts
from specbench.checks.noise import token_bound
from specbench.claims import Facts, Violation
from specbench.compare import first_difference, regret
from specbench.counting import CountingModel
from specbench.probe import Probe
from specbench.protocols import Drafter
from specbench.record import ClaimRecord
from specbench.reference.drafters.by_name import DRAFTERS
from specbench.reference.drafters.model import ModelDrafter
from specbench.reference.drafters.scripted import RoundScript, ScriptedDrafter
from specbench.reference.processors import process_row
from specbench.reference.verify import argmax_lowest
from specbench.subjects import NotTested, Subject
from specbench.tree import DraftTree
from specbench.types import GREEDY, NEVER_STOP, Generation, Round, Sampling, Stop

THRESHOLDS = (0.2, 0.5, 0.8)
RECOMPUTED = "accepted rows are forwarded again instead of being kept: lost speed, not a bug"
RECOMPUTED_OR_PATHS = "rows are forwarded more than once, accepted ones again or whole paths: lost speed, not a bug"


def check_lossless(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """Every emitted token is plain decoding's; one that is not must be a tie, measured and counted."""
    assert isinstance(case, GenerationCase)
    stop = Stop(subject.bank.eos_token_ids)
    _, generation = generate(subject, case, stop)
    tokens = generation.tokens
    ended = bool(tokens) and tokens[-1] in stop.eos_token_ids
    if len(tokens) != case.max_new_tokens and not ended:
        raise claims.GreedyMismatch(
            token_facts(
                f"output has {len(tokens)} tokens, must have {case.max_new_tokens}",
                subject.plain_text(case, case.prompt, case.max_new_tokens),
                generation,
            )
        )
    judge_tokens(claims.GreedyMismatch, subject, case, generation, record)


def check_repeatable(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """One instance serves a request, other requests, the first one again, and one that goes on behind its answer: what
    it says must not depend on those before, nor may it verify drafts that were made for another.

    Longer and shorter texts and trees take turns, which is where a buffer that is not cleared shows.
    """
    assert isinstance(case, StopCase)
    drafter = make_drafter(subject, case)
    noted = NotedDrafts(drafter) if isinstance(drafter, ScriptedDrafter) else None
    probe = subject.open(case, drafter=noted or drafter)
    first = probe.generate(case.prompt, max_new_tokens=case.max_new_tokens)
    answers = []
    for other in case.turns:
        limit = 1 + len(other) % max(case.max_new_tokens, 1)
        answers.append((other, limit, probe.generate(other, max_new_tokens=limit)))
    again = probe.generate(case.prompt, max_new_tokens=case.max_new_tokens)
    at = first_difference(again.tokens, first.tokens)
    if subject.exact and at is not None:
        headline = f"the same request is answered differently from token {at} on, {len(case.turns)} requests later"
        raise claims.StaleState(token_facts(headline, first.tokens, again, at=at))
    judge_tokens(claims.StaleState, subject, case, again, record)
    if noted is not None:
        check_drafts(claims.StaleState, noted, case.prompt, again)
    behind = (*case.prompt, *again.tokens, *case.prompt[:1])
    answers.append((behind, 4, probe.generate(behind, max_new_tokens=4)))
    for prompt, limit, answer in answers:
        if len(answer.tokens) > limit:
            headline = f"a later request is answered with {len(answer.tokens)} tokens, must have {limit}"
            raise claims.StaleState(token_facts(headline, answer.tokens[:limit], answer))
        one = replace(case, max_new_tokens=limit)
        judge_tokens(claims.StaleState, subject, one, answer, record, prompt=prompt)


def check_progress(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """The output is as long as asked for, whatever the drafts were; with rounds, each one emitted something."""
    assert isinstance(case, GenerationCase)
    _, generation = generate(subject, case, NEVER_STOP)
    record.num_rounds += len(generation.rounds)
    if len(generation.tokens) < case.max_new_tokens:
        raise claims.NoProgress(
            Facts(
                headline=f"generation ended after {len(generation.tokens)} of {case.max_new_tokens} tokens",
                expected=f"{case.max_new_tokens} tokens",
                actual=f"{len(generation.tokens)} tokens {list(generation.tokens)}",
                source="max_new_tokens, no end token given",
                **last_round(generation),
            )
        )
    for number, one in enumerate(generation.rounds, start=1):
        said = [*(one.tokens[node] for node in one.path), one.bonus_token]
        if not one.emitted or list(one.emitted) != said[: len(one.emitted)]:
            raise claims.NoProgress(
                Facts(
                    headline=f"round {number} emitted {list(one.emitted)}, must emit {said} (or its start, when cut)",
                    expected=str(said),
                    actual=str(list(one.emitted)),
                    source="accepted path and bonus token of the round",
                    tree=DraftTree.of(one.tokens, one.parents),
                )
            )
    if generation.rounds and sum((one.emitted for one in generation.rounds), ()) != generation.tokens:
        raise claims.NoProgress(
            token_facts("rounds emitted other tokens than the output", generation.tokens, generation)
        )


def check_rows(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """Counts the rows the target asks its model for: the prompt once, then no more than each round's tree.

    Two right decoders forward more, which is remarked: one that computes accepted rows again instead of moving them,
    and one that writes whole paths out because it knows no other layout.
    """
    assert isinstance(case, GenerationCase)
    model = CountingModel(subject.bank.model(case.model))
    probe = subject.open(case, drafter=make_drafter(subject, case), model=model)
    generation = probe.generate(case.prompt, max_new_tokens=case.max_new_tokens)
    rounds = rounds_of(generation, case)
    record.num_rounds += len(rounds)
    record.note_layout(
        case.layout,
        rounds=len(rounds),
        rows=sum(one.num_rows for one in rounds),
        mask_bytes=sum(one.mask_bytes for one in rounds),
        kv_bytes=sum(one.kv_bytes for one in rounds),
    )
    total, again = sum(model.rows), [len(one.emitted) for one in rounds]  # the root and the accepted nodes but the last
    needed = [_rows_needed(one, case.layout) for one in rounds]
    most = [_rows_needed(one, "path_batch") for one in rounds] if len(subject.layouts) == 1 else needed
    allowed = len(case.prompt) + sum(most) + sum(again)  # the prompt once, in whatever pieces
    if total > allowed:
        raise claims.RowCountMismatch(
            Facts(
                headline=f"{total} rows were forwarded in {len(rounds)} rounds, must be at most {allowed}",
                expected=f"at most {len(case.prompt)} for the prompt, {most} by round and {again} accepted ones again",
                actual=f"{model.rows} by forward",
                source="nodes and root of each round's tree",
                **last_round(generation),
            )
        )
    if total > len(case.prompt) + sum(needed):
        record.note_remark(RECOMPUTED if most == needed else RECOMPUTED_OR_PATHS)


def check_threshold(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """Accepted drafts lie above the threshold, the refused ones do not, and from 0.5 on nothing is lost; the share of
    tokens equal to plain decoding is reported for each threshold."""
    assert isinstance(case, GenerationCase)
    for threshold in THRESHOLDS:
        probe = subject.open(case, drafter=make_drafter(subject, case))
        lossy = probe.with_threshold(threshold)
        generation = probe.generate(case.prompt, max_new_tokens=case.max_new_tokens, adapter=lossy)
        rounds = rounds_of(generation, case)
        record.num_rounds += len(rounds)
        context = list(case.prompt)
        for number, one in enumerate(rounds, start=1):
            _check_threshold_round(subject, case, context, one, threshold, number)
            context += one.emitted
        # The share is against the same model in the same dtype, along the lossy text itself.
        rows = subject.bank.model(case.model).logits([*case.prompt, *generation.tokens])[len(case.prompt) - 1 : -1]
        num_equal = sum(argmax_lowest(row) == token for row, token in zip(rows, generation.tokens, strict=True))
        record.note_threshold(threshold, num_equal, len(generation.tokens))
        if threshold >= 0.5:
            judge_tokens(claims.ThresholdMismatch, subject, case, generation, record)


def judge_tokens(
    violation: type[Violation],
    subject: Subject,
    case: GenerationCase,
    generation: Generation,
    record: ClaimRecord,
    *,
    sampling: Sampling = GREEDY,
    stop: Stop = NEVER_STOP,
    prompt: tuple[int, ...] | None = None,
) -> None:
    """Compares a generation with plain decoding in the subject's own dtype, and every token from the first difference
    on with the fp64 oracle along the target's own text. prompt: the case's, unless given.

    Such a token is excused as a tie when its regret (the oracle's best logit minus the token's own) is below the noise
    that plain decoding shows on the same text; the first one counts as differing, those behind it have another context.
    """
    tokens, prompt = generation.tokens, case.prompt if prompt is None else prompt
    plain = subject.plain_text(case, prompt, case.max_new_tokens, sampling=sampling, stop=stop)[: len(tokens)]
    start = first_difference(tokens, plain)
    record.num_rounds += len(generation.rounds)
    for one in generation.rounds:
        note_round(record, subject, case, one.parents, len(one.path))
    record.note_generation(identical=start is None)
    record.num_tokens += len(tokens) if start is None else start + 1
    if prompt == case.prompt and not sampling.changes_logits and not stop.min_new_tokens:
        note_flips(record, subject, case, tokens, plain, start=start)
    if start is None:
        return
    record.num_differing += 1
    text = [*prompt, *tokens]
    raw = subject.rows(case, text)[len(prompt) - 1 : -1]  # row i judges token i
    oracle = torch.stack(
        [
            process_row(row, text[: len(prompt) + idx], num_prompt=len(prompt), sampling=sampling, stop=stop)
            for idx, row in enumerate(raw)
        ]
    )
    bound = token_bound(subject, case, prompt, tokens, raw)
    # A repetition penalty multiplies a logit's rounding error as it multiplies the logit.
    stretch = max(sampling.repetition_penalty, 1 / sampling.repetition_penalty)
    bound = replace(bound, value=bound.value * stretch)
    for idx in range(start, len(tokens)):
        margin = regret(oracle[idx], tokens[idx])
        if margin > bound.value:
            best = argmax_lowest(oracle[idx])
            raise violation(
                token_facts(
                    f"output differs from autoregressive decoding at token {idx}",
                    plain if idx == start and plain[idx : idx + 1] == (best,) else (*tokens[:idx], best),
                    generation,
                    at=idx,
                    remark=f"expected {best}, margin {margin:.2g} (not a tie: bound {bound})",
                )
            )
        record.num_ties += margin > 0
        record.note_share(margin / bound.value)


def make_drafter(
    subject: Subject, case: GenerationCase, *, sampling: Sampling = GREEDY, stop: Stop = NEVER_STOP
) -> Drafter | None:
    """The drafter a case names. Scripted ones look up what plain decoding will say."""
    if "build" not in subject.has:
        return None
    model = subject.bank.model(case.model)
    if case.drafter == "scripted":
        # A few tokens beyond the limit and the stop, so that they also fall inside an accepted run.
        num_tokens = case.max_new_tokens + 3
        plain = subject.plain_text(case, case.prompt, num_tokens, sampling=sampling, stop=stop, past_stop=True)
        return ScriptedDrafter([*case.prompt, *plain], scripts_of(case.rounds), vocab_size=model.vocab_size)
    if case.drafter == "runner_up":
        return ModelDrafter(model, widths=(1, 1), first_ranks=(0, 1))
    if case.drafter in DRAFTERS:
        return DRAFTERS[case.drafter](model)
    raise ValueError(f"drafter {case.drafter!r} must be one of scripted, runner_up, {', '.join(DRAFTERS)}")


def generate(
    subject: Subject, case: GenerationCase, stop: Stop, sampling: Sampling = GREEDY
) -> tuple[Probe, Generation]:
    """On an instance that has already served another request: nothing of that one may be left."""
    probe = subject.open(case, drafter=make_drafter(subject, case, sampling=sampling, stop=stop))
    probe.generate(case.prompt[:1], max_new_tokens=2)
    generation = probe.generate(case.prompt, max_new_tokens=case.max_new_tokens, sampling=sampling, stop=stop)
    return probe, generation


def scripts_of(rounds: Sequence[CommitRound]) -> list[RoundScript]:
    """What a case says of each round, as a scripted drafter plays it."""
    return [RoundScript(one.tokens, one.parents, one.accept) for one in rounds]


def stretch(plain: tuple[int, ...], first: int, length: int) -> tuple[int, ...]:
    """Up to `length` tokens of what plain decoding says, from token `first` on, counted round and round."""
    first %= max(len(plain), 1)
    return plain[first : first + length]


def rounds_of(generation: Generation, case: GenerationCase) -> tuple[Round, ...]:
    if not generation.rounds and case.max_new_tokens:
        raise NotTested("let generate return a specbench.types.Generation with one Round per verification")
    return generation.rounds


def _rows_needed(one: Round, layout: str) -> int:
    """Rows of a tree, counted from its parents: nodes, or for a batch of paths the nodes on each root-to-leaf path."""
    if layout == "tree_mask":
        return len(one.tokens)
    leaves = [node for node in range(len(one.parents)) if node not in one.parents]
    total = 0
    for leaf in leaves:
        node = leaf
        while node >= 0:
            total += 1
            node = one.parents[node]
    return total


def check_reason(violation: type[Violation], generation: Generation, expected: str) -> None:
    if generation.finish_reason != expected:
        raise violation(
            Facts(
                headline=f"finish reason is {generation.finish_reason!r}, must be {expected!r}",
                expected=expected,
                actual=generation.finish_reason,
                source="the last token and the limit",
            )
        )


def check_cache_after_stop(
    violation: type[Violation], subject: Subject, probe: Probe, case: GenerationCase, generation: Generation
) -> None:
    """A session that is resumed after the stop must find nothing beyond the committed tokens. Fewer rows are no fault:
    a decoder may leave its last round uncommitted when it is done."""
    if "tree" not in subject.has or "build" not in subject.has:
        return
    expected = len(case.prompt) + len(generation.tokens) - 1
    actual = probe.cache_len
    if actual > expected:
        raise violation(
            Facts(
                headline=f"after the stop the cache holds {actual} rows, must hold at most {expected}",
                expected=f"at most {expected} rows (all tokens but the last)",
                actual=f"{actual} rows",
                source="prompt and emitted tokens",
                **last_round(generation),
            )
        )


def _check_threshold_round(
    subject: Subject, case: GenerationCase, context: list[int], one: Round, threshold: float, number: int
) -> None:
    tree = DraftTree.of(one.tokens, one.parents)
    if not subject.exact:
        return  # probabilities near the threshold are rounding's business there
    probs = subject.score(case, context[:-1], tree).logits.softmax(dim=-1)
    last = one.path[-1] if one.path else 0
    for node in range(1, tree.num_nodes):
        parent = tree.parent_list[node]
        chance = float(probs[parent, tree.token_list[node]])
        if abs(chance - threshold) < 1e-9:
            continue
        wrongly_kept = node in one.path and chance < threshold
        wrongly_dropped = parent == last and chance > threshold
        if wrongly_kept or wrongly_dropped:
            verb = "is accepted" if wrongly_kept else "is refused"
            raise claims.ThresholdMismatch(
                Facts(
                    headline=f"round {number}, threshold {threshold}: node {node} {verb} at probability {chance:.3g}",
                    expected="refused" if wrongly_kept else "accepted",
                    actual="accepted" if wrongly_kept else "refused",
                    source="target probability of the draft, from its parent's row",
                    tree=tree,
                    notes={node: f"target probability {chance:.3g}"},
                )
            )


def token_facts(
    headline: str, expected: tuple[int, ...], generation: Generation, *, at: int | None = None, remark: str = ""
) -> Facts:
    where: dict[str, Any] = {} if at is None else _round_of(generation, at)
    return Facts(
        headline=headline, expected=str(list(expected)), actual=str(list(generation.tokens)), remark=remark, **where
    )


def _round_of(generation: Generation, at: int) -> dict[str, Any]:
    """The tree of the round that emitted token `at`."""
    seen = 0
    for one in generation.rounds:
        seen += len(one.emitted)
        if at < seen:
            return _round_picture(one)
    return {}


def last_round(generation: Generation) -> dict[str, Any]:
    return _round_picture(generation.rounds[-1]) if generation.rounds else {}


def _round_picture(one: Round) -> dict[str, Any]:
    notes = dict.fromkeys(one.path, "accepted")
    notes[0] = "root"
    last = one.path[-1] if one.path else 0
    notes[last] = f"{notes[last]}, then {one.bonus_token}"
    return {"tree": DraftTree.of(one.tokens, one.parents), "notes": notes}
