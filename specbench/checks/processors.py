"""Claims about what changes logits before a token is picked: each drafted row with the history of its own path."""

from __future__ import annotations

import itertools
from collections import Counter

from torch import Tensor

from specbench import claims
from specbench.cases import BatchRequest, Case, CommitRound, GenerationCase, ProcessorCase
from specbench.checks.generation import generate, stretch, token_facts
from specbench.checks.stopping import judge_end, judge_stopped
from specbench.claims import Facts
from specbench.record import ClaimRecord
from specbench.subjects import Subject
from specbench.tree import DraftTree
from specbench.types import NEVER_STOP, Automaton, Generation, Sampling

MAX_DECOYS = 4  # tokens beside the accepted path that bans begin with


def check_penalties(subject: Subject, case: Case, record: ClaimRecord) -> None:
    assert isinstance(case, ProcessorCase)
    judge_stopped(claims.PenaltyMismatch, subject, case, NEVER_STOP, record, sampling=penalties_of(case))


def check_bad_words(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """The forbidden sequences are cut out of plain decoding's own output, so that it would say them. Others begin with
    a draft that stands beside the accepted path: they forbid nothing unless it is taken for a part of a row's text."""
    assert isinstance(case, ProcessorCase)
    plain = subject.plain_text(case, case.prompt, case.max_new_tokens)
    if not plain:
        return
    banned = tuple(dict.fromkeys(stretch(plain, first, length) for first, length in case.bans))
    plain = subject.plain_text(case, case.prompt, case.max_new_tokens, sampling=Sampling(bad_words=banned))
    beside = dict.fromkeys(token for one in case.rounds for token in _beside_the_path(one) if token not in plain)
    said = sorted({(token,) for token in plain} | set(itertools.pairwise(plain)))
    decoys = tuple((first, *rest) for first in list(beside)[:MAX_DECOYS] for rest in said)
    sampling = Sampling(bad_words=(*banned, *decoys))
    expected = subject.plain_text(case, case.prompt, case.max_new_tokens, sampling=sampling)
    if any(_holds(expected, idx, one) for idx in range(len(expected)) for one in banned):
        return  # with few tokens a text can come to where nothing may be said
    _, generation = generate(subject, case, NEVER_STOP, sampling)
    for idx in range(len(generation.tokens)):
        for one in banned:
            if _holds(generation.tokens, idx, one):
                headline = f"output holds the bad words {list(one)} at token {idx}"
                raise claims.BadWordEmitted(token_facts(headline, expected, generation, at=idx + len(one) - 1))
    _judge(claims.BadWordEmitted, subject, case, generation, record, sampling)


def check_grammar(subject: Subject, case: Case, record: ClaimRecord) -> None:
    assert isinstance(case, ProcessorCase)
    grammar = Automaton(tuple(tuple(zip(row[::2], row[1::2], strict=True)) for row in case.grammar))
    sampling = Sampling(grammar=grammar)
    _, generation = generate(subject, case, NEVER_STOP, sampling)
    for idx, token in enumerate(generation.tokens):
        state = grammar.state_after(generation.tokens[:idx])
        assert state is not None
        allowed = sorted(one for one, _ in grammar.transitions[state])
        if token not in allowed:
            expected = subject.plain_text(case, case.prompt, case.max_new_tokens, sampling=sampling)
            headline = f"token {idx} is {token}, which the grammar forbids in state {state} (it allows {allowed})"
            raise claims.GrammarViolation(token_facts(headline, expected, generation, at=idx))
    _judge(claims.GrammarViolation, subject, case, generation, record, sampling)


def check_history(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """A processor that writes down what it is called with. A decoder may leave out rows that it never looks at, but not
    those on the accepted path. The rounds that the target reports say which rows there were."""
    assert isinstance(case, GenerationCase)
    seen: list[tuple[int, ...]] = []

    def recorder(history: tuple[int, ...], row: Tensor) -> Tensor:
        seen.append(tuple(int(token) for token in history))
        return row

    probe, _ = generate(subject, case, NEVER_STOP)
    generation = probe.generate(
        case.prompt, max_new_tokens=case.max_new_tokens, sampling=Sampling(processors=(recorder,))
    )
    _judge(claims.HistoryMismatch, subject, case, generation, record, Sampling())
    needed = [(*case.prompt, *generation.tokens[:idx]) for idx in range(len(generation.tokens))]
    rows = _rows(case, generation) if generation.rounds else None
    for history, count in Counter(seen).items():
        most = 1 if rows is None else rows[history]
        if most == 0:
            _raise(f"a processor was given {list(history)}, which is no row's history", rows, history)
        if rows is not None and count > most:
            times = f"{count} times for {most} row{'s' if most > 1 else ''}"
            _raise(f"a processor was called {times} with the history {list(history)}", rows, history)
    for history in needed:
        if history not in seen:
            _raise(f"no processor was given the history {list(history)}, whose next token is emitted", rows, None)


def penalties_of(numbers: ProcessorCase | BatchRequest) -> Sampling:
    """The penalties that a case, or a row of one, gives in hundredths."""
    return Sampling(
        repetition_penalty=numbers.repetition / 100,
        presence_penalty=numbers.presence / 100,
        frequency_penalty=numbers.frequency / 100,
    )


def _beside_the_path(one: CommitRound) -> list[int]:
    """Tokens of nodes that stand in memory right before a node of the accepted path and are not on it."""
    path = DraftTree.of(one.tokens, one.parents).path_to(one.accept)
    return [one.tokens[node - 1] for node in path[1:] if node - 1 not in path]


def _holds(text: tuple[int, ...], at: int, sequence: tuple[int, ...]) -> bool:
    return text[at : at + len(sequence)] == sequence


def _rows(case: GenerationCase, generation: Generation) -> Counter[tuple[int, ...]]:
    """The history of every row of every round, with how many rows have it (duplicate siblings share one)."""
    rows: Counter[tuple[int, ...]] = Counter()
    context = case.prompt
    for one in generation.rounds:
        tree = DraftTree.of(one.tokens, one.parents)
        rows.update((*context, *tree.path_tokens(node)[1:]) for node in range(tree.num_nodes))
        context = (*context, *one.emitted)
    return rows


def _raise(headline: str, rows: Counter[tuple[int, ...]] | None, history: tuple[int, ...] | None) -> None:
    expected = "committed text and own path, once a row"
    if rows:
        near = sorted(rows, key=lambda one: _num_different(one, history or ()))[:1]
        expected += f"; the nearest row has {list(near[0])}"
    raise claims.HistoryMismatch(
        Facts(
            headline=headline,
            expected=expected,
            actual="never given" if history is None else str(list(history)),
            source="the rounds that the target reports",
        )
    )


def _num_different(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=False)) + abs(len(one) - len(other))


def _judge(
    violation: type[claims.Violation],
    subject: Subject,
    case: GenerationCase,
    generation: Generation,
    record: ClaimRecord,
    sampling: Sampling,
) -> None:
    judge_end(violation, subject, case, generation, NEVER_STOP, record, prompt=case.prompt, sampling=sampling)
