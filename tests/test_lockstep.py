"""specbench.lockstep and ranks.agree: ranks hear one another, never wait forever, and a lonely decision is a BUG."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from specbench.banks import TinyBank
from specbench.cases import CommitRound, GenerationCase
from specbench.checks.ranks import TiedModel, check_agree
from specbench.claims import Misbehaviour, RankDivergence
from specbench.clock import Clock
from specbench.loading import EXPOSE, Target
from specbench.lockstep import Group, LockStep, OutOfStep
from specbench.protocols import LanguageModel
from specbench.record import ClaimRecord
from specbench.reference.decoder import Decoder
from specbench.reference.drafters.model import self_drafter
from specbench.reference.faults.bank import FAULTS
from specbench.reference.model import LlamaConfig, tiny_llama
from specbench.reference.target import ReferenceTarget
from specbench.subjects import Subject
from specbench.tree import DraftTree
from specbench.types import Generation, Request, Round
from specbench.watchdog import Watchdog

NEVER = 60.0  # longer than any of these tests waits
CASE = GenerationCase(
    prompt=(3, 1, 4),
    max_new_tokens=8,
    rounds=(CommitRound((0, 1, 2, 5), (-1, 0, 0, 2), 3), CommitRound((0, 1, 2), (-1, 0, 1), 0)),
)


@cache
def subject_of(target: Any) -> Subject:
    bank = TinyBank("fp64", torch.float64)
    return Subject(Target("it", target), bank, clock=Clock(), watchdog=Watchdog(0, print))


def run(*calls: Callable[[Group], Any], timeout: float = NEVER) -> list[Any]:
    meeting = LockStep(len(calls), timeout=timeout)
    pairs = zip(calls, meeting.groups, strict=True)
    return meeting.run([lambda call=call, group=group: call(group) for call, group in pairs])


def test_every_rank_hears_the_roots_value() -> None:
    def call(group: Group) -> list[int]:
        return [group.broadcast(10 * group.rank), group.broadcast(10 * group.rank, root=2)]

    assert run(call, call, call) == [[0, 20]] * 3


def test_a_rank_that_is_not_the_root_may_pass_nothing() -> None:
    def call(group: Group) -> Any:
        return group.broadcast("text" if group.rank == 0 else None)

    assert run(call, call) == ["text", "text"]


def test_what_is_heard_is_a_copy() -> None:
    given = [1, 2]

    def call(group: Group) -> list[int]:
        heard: list[int] = group.broadcast(given)
        heard.append(group.rank)
        return heard

    assert (run(call, call), given) == ([[1, 2, 0], [1, 2, 1]], [1, 2])


def test_broadcasts_are_counted() -> None:
    meeting = LockStep(2, timeout=NEVER)
    meeting.run([lambda group=group: [group.broadcast(0) for _ in range(3)] for group in meeting.groups])
    assert [group.num_broadcasts for group in meeting.groups] == [3, 3]


def test_ranks_take_turns_between_broadcasts() -> None:
    """They share a model, and models are not made for threads."""
    inside: list[int] = []

    def call(group: Group) -> list[list[int]]:
        seen = []
        for _ in range(20):
            inside.append(group.rank)
            seen.append(list(inside))
            inside.remove(group.rank)
            group.broadcast(None)
        return seen

    assert run(call, call) == [[[0]] * 20, [[1]] * 20]


def times(number: int) -> Callable[[Group], int]:
    def call(group: Group) -> int:
        for _ in range(number):
            group.broadcast(0)
        return number

    return call


def raises(group: Group) -> None:
    group.broadcast(0)
    raise KeyError("its own fault")


OUT_OF_STEP: dict[str, tuple[tuple[Callable[[Group], Any], ...], str]] = {
    "ended": ((times(3), times(2)), "rank 0 waits in broadcast 3, rank 1 has ended after 2"),
    "raised": ((times(2), raises), "rank 0 waits in broadcast 2, rank 1 has ended after 1"),
    "roots": (
        (lambda group: group.broadcast(0), lambda group: group.broadcast(0, root=1)),
        "broadcast 1: rank 0 names root 0, rank 1 names root 1",
    ),
    "values": (
        (lambda group: group.broadcast(0), lambda group: group.broadcast("a")),
        "broadcast 1: rank 0 passes a int, rank 1 passes a str",
    ),
}


@pytest.mark.parametrize("case", OUT_OF_STEP)
def test_ranks_out_of_step_are_told_which_does_what(case: str) -> None:
    calls, sentence = OUT_OF_STEP[case]
    answer = run(*calls)[0]
    assert (type(answer), str(answer)) == (OutOfStep, sentence)


def test_what_a_rank_raises_is_its_answer() -> None:
    assert type(run(times(2), raises)[1]) is KeyError


def test_a_rank_that_never_comes_is_left_behind() -> None:
    """It waits for something else; the others and whoever runs them are let go."""
    never = threading.Event()
    answers = run(lambda group: group.broadcast(0), lambda group: never.wait(), timeout=0.05)
    assert [str(one) for one in answers] == [
        "rank 0 has waited 0.05 s in broadcast 1, rank 1 has not come",
        "this rank has not ended",
    ]
    never.set()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "size": (lambda: LockStep(0, timeout=1), "size = 0 must be >= 1 (ranks)"),
    "calls": (lambda: LockStep(2, timeout=1).run([int]), "calls has 1 entries, must have 2 (ranks)"),
    "root": (lambda: LockStep(2, timeout=1).groups[0].broadcast(0, root=2), "root = 2 must be >= 0 and < 2 (ranks)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_group_can_do_is_refused(case: str) -> None:
    call, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(sentence)):
        call()


# the reference decoder in a group

CONFIG = LlamaConfig(31, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)


def ranked(meeting: LockStep, rank: int, **options: Any) -> Decoder:
    model = TiedModel(tiny_llama(CONFIG, seed=3), rank)
    return ReferenceTarget().build(model, self_drafter(model, widths=(2, 1)), group=meeting.groups[rank], **options)


def test_tied_models_of_two_ranks_differ_by_rounding_only_and_say_other_tokens() -> None:
    first, second = (TiedModel(tiny_llama(CONFIG, seed=3), rank).logits([1, 2, 3]) for rank in range(2))
    assert torch.allclose(first, second, rtol=0, atol=1e-13)
    assert first.argmax(-1).tolist() != second.argmax(-1).tolist()


def test_ranks_of_the_reference_decoder_emit_what_the_first_one_emits_alone() -> None:
    meeting = LockStep(2, timeout=NEVER)
    ranks = [ranked(meeting, rank) for rank in range(2)]
    answers = meeting.run([lambda one=one: one.generate([1, 2, 3], max_new_tokens=9) for one in ranks])
    alone = TiedModel(tiny_llama(CONFIG, seed=3), 0)
    expected = Decoder(alone, self_drafter(alone, widths=(2, 1))).generate([1, 2, 3], max_new_tokens=9)
    assert answers == [expected, expected]


def test_a_round_has_one_broadcast_for_the_draft_and_one_for_the_verdict() -> None:
    meeting = LockStep(1, timeout=NEVER)
    generation = ranked(meeting, 0).generate([1, 2, 3], max_new_tokens=9)
    assert meeting.groups[0].num_broadcasts == 2 * len(generation.rounds)


def test_rows_of_a_batch_agree_across_ranks() -> None:
    """Every row's draft is heard, and then the verdicts of all rows at once. What the second rank's weights, other ones
    altogether, would say does not matter."""
    meeting = LockStep(2, timeout=NEVER)
    requests = [Request((1, 2, 3), 6), Request((5,), 4, arrival=1)]
    models = [tiny_llama(CONFIG, seed=rank) for rank in range(2)]
    ranks = [
        ReferenceTarget().build(model, None, group=group) for model, group in zip(models, meeting.groups, strict=True)
    ]
    answers = meeting.run([lambda one=one: one.generate_batch(requests) for one in ranks])
    assert answers == [Decoder(models[0]).generate_batch(requests)] * 2


# the claim


def test_the_reference_agrees_and_its_tokens_and_rounds_are_counted() -> None:
    record = ClaimRecord("ranks.agree", "tiny-fp64")
    check_agree(subject_of(ReferenceTarget()), CASE, record)
    assert (record.num_tokens, record.num_rounds > 1) == (8, True)


ROUND = Round(tokens=(3, 1), parents=(-1, 0), path=(1,), bonus_token=2, emitted=(1, 2), prefix_len=0, num_rows=2)


class Fixed:
    """A target that answers as told, rank by rank. calls: how often each rank broadcasts."""

    def __init__(self, *answers: Any, calls: tuple[int, int] = (1, 1)) -> None:
        self._answers, self._calls = answers, calls

    def build(self, model: LanguageModel, drafter: Any, *, group: Group | None = None) -> Any:
        answer = None if group is None else self._answers[group.rank]
        num_calls = 0 if group is None else self._calls[group.rank]

        class Rank:
            def generate(self, prompt: Any, *, max_new_tokens: int, sampling: Any, stop: Any, seed: int) -> Any:
                for _ in range(num_calls):
                    assert group is not None
                    group.broadcast(0)
                if isinstance(answer, Exception):
                    raise answer
                return answer

        return Rank()


def generation(**changes: Any) -> Generation:
    return Generation((1, 2), "length", (replace(ROUND, **changes),))


APART: dict[str, tuple[Fixed, type[Exception], str]] = {
    "tokens": (Fixed([1, 2], [1, 3]), RankDivergence, "rank 1 emits another token than rank 0 at token 1"),
    "length": (Fixed([1, 2], [1]), RankDivergence, "rank 1 emits another token than rank 0 at token 1"),
    "draft": (
        Fixed(generation(), generation(tokens=(3, 7))),
        RankDivergence,
        "round 1: rank 1 has another draft than rank 0",
    ),
    "path": (
        Fixed(generation(), generation(path=())),
        RankDivergence,
        "round 1: rank 1 has another path than rank 0",
    ),
    "bonus token": (
        Fixed(generation(), generation(bonus_token=9)),
        RankDivergence,
        "round 1: rank 1 has another bonus token than rank 0",
    ),
    "rounds": (
        Fixed(generation(), Generation((1, 2), "length", (ROUND, ROUND))),
        RankDivergence,
        "rank 1 takes 2 rounds, rank 0 1",
    ),
    "calls": (
        Fixed([1], [1], calls=(2, 1)),
        RankDivergence,
        "rank 0 waits in broadcast 2, rank 1 has ended after 1",
    ),
    "error": (
        Fixed([1], KeyError("x"), calls=(2, 1)),
        Misbehaviour,
        "generate() raised KeyError: 'x'",
    ),
}


@pytest.mark.parametrize("case", APART)
def test_ranks_apart_are_told_in_one_sentence(case: str) -> None:
    target, kind, sentence = APART[case]
    with pytest.raises(kind) as raised:
        check_agree(subject_of(target), CASE, ClaimRecord("ranks.agree", "tiny-fp64"))
    assert str(raised.value) == sentence


@pytest.mark.parametrize("fault", ["ranks_alone", "rank_accepts_alone", "rank_draft_length"])
def test_a_rank_that_decides_for_itself_is_seen_on_an_ordinary_case(fault: str) -> None:
    with pytest.raises(RankDivergence):
        check_agree(subject_of(FAULTS[fault].make()), CASE, ClaimRecord("ranks.agree", "tiny-fp64"))


def test_a_rank_that_skips_an_exchange_is_told_what_the_others_passed() -> None:
    chain = GenerationCase(prompt=(0,), max_new_tokens=2, rounds=(CommitRound((0, 0), (-1, 0), 0),))
    with pytest.raises(RankDivergence) as raised:
        check_agree(subject_of(FAULTS["rank_silent"].make()), chain, ClaimRecord("ranks.agree", "tiny-fp64"))
    assert str(raised.value) == "broadcast 1: rank 0 passes a DraftTree, rank 1 passes a VerifyResult"


def test_ranks_are_not_tested_where_build_takes_no_group() -> None:
    class Groupless:
        def build(self, model: LanguageModel, drafter: Any) -> Decoder:
            return Decoder(model, drafter)

    has, lacks = subject_of(ReferenceTarget()), subject_of(Groupless())
    assert (has.missing(("ranks",)), lacks.missing(("ranks",))) == (None, EXPOSE["ranks"])


def test_a_tree_is_heard_whole() -> None:
    tree = DraftTree.of([1, 2, 3], [-1, 0, 0])
    assert (
        run(lambda group: group.broadcast(tree), lambda group: group.broadcast(DraftTree.of([9], [-1]))) == [tree] * 2
    )
