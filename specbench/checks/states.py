"""Claims about the states a cache gets into: dead rows, forks, pages, prompts in pieces, rounds that are dropped.

As in `cache.py`, the oracle is asked for everything before the target's rounds begin.
"""

from __future__ import annotations

from dataclasses import replace

from specbench import claims
from specbench.cases import Case, ChunkCase, CommitCase
from specbench.checks.cache import (
    ExpectedLogits,
    PlannedRound,
    compare_cache,
    compare_length,
    compare_logits,
    expected_cache,
    expected_logits,
    planned,
)
from specbench.claims import Facts, Violation
from specbench.probe import Probe
from specbench.record import ClaimRecord
from specbench.subjects import NotTested, Subject
from specbench.tree import DraftTree, root_only


def check_dead_rows(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """Everything that must not be read is overwritten before each forward, whose logits must not notice."""
    assert isinstance(case, CommitCase)
    rounds, logits, next_logits = _expected(subject, case)
    probe = subject.open(case)
    probe.prefill(case.prompt[:-1])
    for one, expected in zip(rounds, logits, strict=True):
        probe.poison()
        compare_logits(claims.DeadRowRead, probe, expected, record, f" in round {one.number}, dead rows overwritten")
        probe.commit(one.path)
    probe.poison()
    compare_logits(claims.DeadRowRead, probe, next_logits, record, " in the next round, dead rows overwritten")


def check_fork(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """After the first round a second sequence is split off. Both go on in turn, with other trees and other tokens: both
    forwards, then both commits. A third one stays where it is to the end."""
    assert isinstance(case, CommitCase)
    first, *ours = planned(case)
    roots = tuple((root + 1) % subject.vocab_size(case.model) for root in reversed(case.next_roots))
    theirs = planned(replace(case, prompt=first.after, rounds=case.rounds[::-1], next_roots=roots))
    names = ("the sequence", "its fork")
    plans = (ours, theirs)
    caches = [[expected_cache(subject, case, one.after[:-1]) for one in plan] for plan in plans]
    shared = expected_cache(subject, case, first.after[:-1])
    ends = [plan[-1].after if plan else first.after for plan in plans]
    logits = [expected_logits(subject, case, end[:-1], root_only(end[-1])) for end in ends]
    other_root = (first.after[-1] + 1) % subject.vocab_size(case.model)
    idle_logits = expected_logits(subject, case, first.after[:-1], root_only(other_root))
    probe = subject.open(case)
    probe.prefill(case.prompt[:-1])
    _play(probe, first)
    probes, idle = (probe, probe.fork()), probe.fork()
    for turn in range(max(len(plan) for plan in plans)):
        playing = [(one, plan[turn]) for one, plan in zip(probes, plans, strict=True) if turn < len(plan)]
        for one, round_of_it in playing:
            one.forward_tree(round_of_it.tree)
        for one, round_of_it in playing:
            one.commit(round_of_it.path)
        for name, one, plan, expected in zip(names, probes, plans, caches, strict=True):
            right = expected[min(turn, len(plan) - 1)] if plan else shared
            tree, path = (plan[turn].tree, plan[turn].path) if turn < len(plan) else (first.tree, first.path)
            when = f" in {name} after round {turn + 1} behind the fork"
            if "kv" in subject.has:
                compare_cache(claims.ForkMismatch, one, right, record, tree, path, when)
            else:
                compare_length(claims.ForkMismatch, one, len(right.committed), tree, when)
    compare_logits(claims.ForkMismatch, idle, idle_logits, record, " in a second fork, in its first round")
    for name, one, next_logits in zip(names, probes, logits, strict=True):
        compare_logits(claims.ForkMismatch, one, next_logits, record, f" in {name}, in the next round")


def check_pages(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """Pages in use between rounds, after cuts, and after a reset. Nothing may pile up over rounds."""
    assert isinstance(case, CommitCase)
    probe = subject.open(case)
    if probe.page_size is None:
        raise NotTested("give a target whose cache has pages (an int page_size)")
    probe.prefill(case.prompt[:-1])
    rounds = planned(case)
    check_balance(claims.PageLeak, probe, len(case.prompt) - 1, rounds[0].tree, "after the prefill")
    for one in rounds:
        probe.forward_tree(one.tree)
        probe.truncate(len(one.before) - 1)
        check_balance(
            claims.PageLeak, probe, len(one.before) - 1, one.tree, f"after dropping the forward of round {one.number}"
        )
        _play(probe, one)
        check_balance(claims.PageLeak, probe, len(one.after) - 1, one.tree, f"after round {one.number}")
    num_kept = max(0, len(rounds[-1].after) - 1 - case.cut)
    probe.truncate(num_kept)
    check_balance(claims.PageLeak, probe, num_kept, rounds[-1].tree, f"after cutting back to {num_kept} rows")
    probe.prefill(case.prompt[:-1])
    check_balance(claims.PageLeak, probe, len(case.prompt) - 1, rounds[0].tree, "after a second prefill")
    probe.reset()
    check_balance(claims.PageLeak, probe, 0, rounds[0].tree, "after a reset")


def check_chunked(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """A kept prefix behind which another text had gone on, then the rest of the prompt in pieces; then two prompts at
    once, of which a cache of prefixes might know too much."""
    assert isinstance(case, ChunkCase)
    prefix, keep = case.prefix, min(case.keep, len(case.prefix))
    cache = expected_cache(subject, case, prefix)
    logits = expected_logits(subject, case, prefix, case.tree)
    spelt = (*prefix, *case.tokens)
    vocab_size = subject.vocab_size(case.model)
    other = (*prefix[:keep], *((token + 1) % vocab_size for token in prefix[keep:]))
    spelt_cache, other_cache = expected_cache(subject, case, spelt), expected_cache(subject, case, other)
    probe = subject.open(case)
    if prefix:  # a text that differs in its first token only: none of its rows may be taken for this one's
        probe.prefill([(prefix[0] + 1) % vocab_size, *prefix[1:]])
    probe.prefill(other)
    probe.truncate(keep)
    start = keep
    for length in (*case.chunks, len(prefix)):
        probe.extend(prefix[start : start + length])
        start += length
    pieces = f" behind {keep} kept tokens and pieces of {list(case.chunks)}"
    compare_cache(claims.ChunkMismatch, probe, cache, record, case.tree, [], pieces)
    compare_logits(claims.ChunkMismatch, probe, logits, record, pieces)
    # That forward was not committed, and this prompt spells its rows: none of them may be taken for the prompt's.
    probe.prefill(spelt)
    spelling = " of a prompt that spells an uncommitted tree"
    compare_cache(claims.ChunkMismatch, probe, spelt_cache, record, case.tree, [], spelling)
    probe.prefill(other)
    shared = f" of a prompt behind one with the same first {keep} tokens"
    compare_cache(claims.ChunkMismatch, probe, other_cache, record, case.tree, [], shared)


def check_abort(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """Every round is begun, dropped and begun again; now and then the dropped tree is another one."""
    assert isinstance(case, CommitCase)
    rounds, logits, next_logits = _expected(subject, case)
    probe = subject.open(case)
    probe.prefill(case.prompt[:-1])
    for one, expected in zip(rounds, logits, strict=True):
        other = rounds[-one.number]
        probe.forward_tree(DraftTree.of((one.before[-1], *other.tree.token_list[1:]), other.tree.parent_list))
        probe.abort()
        when = f" after an aborted forward in round {one.number}"
        compare_length(claims.AbortMismatch, probe, len(one.before) - 1, one.tree, when)
        compare_logits(claims.AbortMismatch, probe, expected, record, when)
        probe.commit(one.path)
    compare_logits(claims.AbortMismatch, probe, next_logits, record, " in the next round")


def _expected(subject: Subject, case: CommitCase) -> tuple[list[PlannedRound], list[ExpectedLogits], ExpectedLogits]:
    """The rounds, the logits of each, and those behind the last one."""
    rounds = planned(case)
    logits = [expected_logits(subject, case, one.before[:-1], one.tree) for one in rounds]
    last = rounds[-1].after
    return rounds, logits, expected_logits(subject, case, last[:-1], root_only(last[-1]))


def _play(probe: Probe, one: PlannedRound) -> None:
    probe.forward_tree(one.tree)
    probe.commit(one.path)


def check_balance(violation: type[Violation], probe: Probe, num_rows: int, tree: DraftTree, when: str) -> None:
    """The instance's pages in use are what `num_rows` rows need."""
    page_size = probe.page_size
    assert page_size is not None
    expected, actual = -(-num_rows // page_size), probe.pages_in_use
    if actual != expected:
        raise violation(
            Facts(
                headline=f"{actual} pages are in use {when}, must be {expected}",
                expected=f"{expected} pages ({num_rows} rows, {page_size} a page)",
                actual=f"{actual} pages",
                source="committed rows",
                tree=tree,
            )
        )
