"""Claims about where an output ends: end tokens, stop sequences, least and most tokens, and going on afterwards."""

from __future__ import annotations

import itertools
from dataclasses import replace

from specbench import claims
from specbench.cases import Case, GenerationCase, StopCase
from specbench.checks.generation import (
    check_cache_after_stop,
    check_reason,
    generate,
    judge_tokens,
    make_drafter,
    scripts_of,
    stretch,
    token_facts,
)
from specbench.claims import Violation
from specbench.protocols import Drafter
from specbench.record import ClaimRecord
from specbench.reference.drafters.scripted import ScriptedDrafter
from specbench.subjects import Subject
from specbench.types import GREEDY, NEVER_STOP, Generation, Sampling, Stop


def check_eos(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """The end token is taken from plain decoding's own output, so it falls inside accepted runs as well as between."""
    assert isinstance(case, GenerationCase)
    plain = subject.plain_text(case, case.prompt, case.max_new_tokens)
    if plain:
        stop = Stop(_end_tokens(subject, case, plain, case.eos_idx))
        judge_stopped(claims.EosMismatch, subject, case, stop, record)


def check_max_tokens(subject: Subject, case: Case, record: ClaimRecord) -> None:
    assert isinstance(case, GenerationCase)
    judge_stopped(claims.MaxTokensMismatch, subject, case, NEVER_STOP, record)


def check_sequences(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """The sequence is cut out of plain decoding's own output. Beside it stand a longer one that ends right behind it,
    one that shares its start and never comes, and one that is half in the prompt, where none is looked for."""
    assert isinstance(case, StopCase)
    plain = subject.plain_text(case, case.prompt, case.max_new_tokens)
    sequence = stretch(plain, case.stop_from, case.stop_len)
    if not sequence:
        return
    unseen = _unseen(subject, case, plain)
    decoys = [(*sequence[:-1], token) for token in unseen[:1]]
    later = stretch(plain, case.stop_from + 1, case.stop_len + 1)
    across = (case.prompt[-1], plain[0])
    stop = Stop(stop_sequences=tuple(one for one in (later, *decoys, across, sequence) if one))
    judge_stopped(claims.StopSequenceMismatch, subject, case, stop, record)


def check_min_tokens(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """An end token that plain decoding would say among the first tokens must wait for its turn; a stop sequence ending
    with the last of them does not count."""
    assert isinstance(case, StopCase)
    plain = subject.plain_text(case, case.prompt, case.max_new_tokens)
    if plain:
        ends = _end_tokens(subject, case, plain, case.eos_idx)
        if len(set(ends)) == subject.vocab_size(case.model):
            ends = ends[1:]  # something must be left to say before the least length
        stop = Stop(ends, min_new_tokens=case.min_new_tokens)
        judge_stopped(claims.MinTokensMismatch, subject, case, stop, record)
        sequence = stretch(plain, case.stop_from, case.stop_len)
        if sequence and "stop_sequences" in subject.has:
            least = case.stop_from % len(plain) + len(sequence)
            stop = Stop(stop_sequences=(sequence,), min_new_tokens=least)
            judge_stopped(claims.MinTokensMismatch, subject, case, stop, record)


def check_every_index(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """Every length limit crossed with every place of the end token, none included; then every least length with every
    place of the end token, where the target honours one."""
    assert isinstance(case, GenerationCase)
    plain = subject.plain_text(case, case.prompt, case.max_new_tokens)
    for limit in range(1, case.max_new_tokens + 1):
        for eos_idx in range(-1, len(plain)):
            one = replace(case, max_new_tokens=limit, eos_idx=eos_idx)
            stop = NEVER_STOP if eos_idx < 0 else Stop((plain[eos_idx],))
            judge_stopped(claims.StopIndexMismatch, subject, one, stop, record)
    if "min_new_tokens" in subject.has:
        for least, eos_idx in itertools.product(range(1, case.max_new_tokens), range(len(plain))):
            one = replace(case, eos_idx=eos_idx)
            stop = Stop((plain[eos_idx],), min_new_tokens=least)
            judge_stopped(claims.StopIndexMismatch, subject, one, stop, record)


def check_resume(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """Several turns on one session. Each goes on from the target's own text, wherever the turn before was stopped, and
    has stop rules of its own: every second one those that the features allow beside an end token."""
    assert isinstance(case, StopCase)
    plain = subject.plain_text(case, case.prompt, case.max_new_tokens)
    turns = (case.prompt, *case.turns)
    stops = [_stop_of_turn(subject, case, plain, number) for number in range(len(turns))]
    probe = subject.open(case, drafter=_drafter_for_turns(subject, case, turns, stops))
    session = probe.session()
    text: tuple[int, ...] = ()
    for added, stop in zip(turns, stops, strict=True):
        text = (*text, *added)
        generation = session.generate(added, max_new_tokens=case.max_new_tokens, stop=stop)
        judge_end(claims.ResumeMismatch, subject, case, generation, stop, record, prompt=text)
        text = (*text, *generation.tokens)


def _stop_of_turn(subject: Subject, case: StopCase, plain: tuple[int, ...], number: int) -> Stop:
    eos = () if case.eos_idx < 0 or not plain else (plain[case.eos_idx % len(plain)],)
    if number % 2 == 0 or not plain:
        return Stop(eos)
    sequence = stretch(plain, case.stop_from, case.stop_len)
    return Stop(
        eos,
        stop_sequences=(sequence,) if sequence and "stop_sequences" in subject.has else (),
        min_new_tokens=case.min_new_tokens if "min_new_tokens" in subject.has and len(plain) > 1 else 0,
    )


def judge_stopped(
    violation: type[Violation],
    subject: Subject,
    case: GenerationCase,
    stop: Stop,
    record: ClaimRecord,
    *,
    sampling: Sampling = GREEDY,
) -> None:
    """One generation: where it ends, every token, the reason it gives, and what it leaves in the cache."""
    probe, generation = generate(subject, case, stop, sampling)
    judge_end(violation, subject, case, generation, stop, record, prompt=case.prompt, sampling=sampling)
    if generation.tokens:
        check_cache_after_stop(violation, subject, probe, case, generation)


def judge_end(
    violation: type[Violation],
    subject: Subject,
    case: GenerationCase,
    generation: Generation,
    stop: Stop,
    record: ClaimRecord,
    *,
    prompt: tuple[int, ...],
    sampling: Sampling = GREEDY,
) -> None:
    tokens = generation.tokens
    expected = subject.plain_text(case, prompt, case.max_new_tokens, sampling=sampling, stop=stop)
    early = next((idx for idx, token in enumerate(tokens[: stop.min_new_tokens]) if token in stop.eos_token_ids), None)
    if early is not None:
        headline = f"end token {tokens[early]} is emitted at token {early}, must not be among the first "
        raise violation(token_facts(f"{headline}{stop.min_new_tokens}", expected, generation, at=early))
    ends = [num for num in range(1, len(tokens) + 1) if stop.reason_at(tokens[:num])]
    if ends and ends[0] < len(tokens):
        headline = f"output goes on after {_what_ends(tokens[: ends[0]], stop)} at token {ends[0] - 1}"
        raise violation(token_facts(headline, expected, generation, at=ends[0] - 1))
    if not ends and len(tokens) < case.max_new_tokens:
        what = _what_could_end(stop)
        headline = f"output stops after {len(tokens)} tokens without {what}" if what else _wrong_length(tokens, case)
        raise violation(token_facts(headline, expected, generation))
    if len(tokens) > case.max_new_tokens:
        raise violation(token_facts(_wrong_length(tokens, case), expected, generation))
    judge_tokens(violation, subject, case, generation, record, sampling=sampling, stop=stop, prompt=prompt)
    check_reason(violation, generation, stop.reason_at(tokens) or "length")


def _wrong_length(tokens: tuple[int, ...], case: GenerationCase) -> str:
    return f"output has {len(tokens)} tokens, must have {case.max_new_tokens}"


def _what_ends(text: tuple[int, ...], stop: Stop) -> str:
    if text[-1] in stop.eos_token_ids:
        return f"end token {text[-1]}"
    return f"stop sequence {next(list(one) for one in stop.stop_sequences if text[-len(one) :] == one)}"


def _what_could_end(stop: Stop) -> str:
    names = [f"end token {token}" for token in stop.eos_token_ids[-1:]]
    return " or ".join([*names, *(f"stop sequence {list(one)}" for one in stop.stop_sequences[-1:])])


def _unseen(subject: Subject, case: Case, plain: tuple[int, ...]) -> list[int]:
    return sorted(set(range(subject.vocab_size(case.model))) - set(plain))


def _end_tokens(subject: Subject, case: Case, plain: tuple[int, ...], eos_idx: int) -> tuple[int, ...]:
    """One of two end tokens: models have several, and the first must not be the only one that counts."""
    return (*_unseen(subject, case, plain)[:1], plain[eos_idx % len(plain)])


def _drafter_for_turns(
    subject: Subject, case: StopCase, turns: tuple[tuple[int, ...], ...], stops: list[Stop]
) -> Drafter | None:
    if case.drafter != "scripted" or "build" not in subject.has:
        return make_drafter(subject, case, stop=stops[0])
    texts: list[tuple[int, ...]] = []
    text: tuple[int, ...] = ()
    for added, stop in zip(turns, stops, strict=True):
        text = (*text, *added)
        texts.append((*text, *subject.plain_text(case, text, case.max_new_tokens + 3, stop=stop, past_stop=True)))
        text = (*text, *subject.plain_text(case, text, case.max_new_tokens, stop=stop))
    first, *later = texts
    return ScriptedDrafter(first, scripts_of(case.rounds), vocab_size=subject.vocab_size(case.model), later=later)
