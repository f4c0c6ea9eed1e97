"""specbench.machines and checks.machine: what sequences of operations are drawn, and what is planned from one."""

from __future__ import annotations

from collections import Counter
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from sessions import session_on

from specbench.cases import OPS, MachineCase, Op, decode, encode, tokens_of
from specbench.checks.machine import check_machine
from specbench.claims import MachineMismatch
from specbench.machines import MAX_OPS, machine_for
from specbench.record import ClaimRecord
from specbench.reduce import reduce_case
from specbench.reference.decoder import Decoder
from specbench.reference.target import ReferenceTarget
from specbench.tree import DraftTree

SUBJECT: Any = SimpleNamespace(
    bank=SimpleNamespace(num_models=3, model=lambda idx: SimpleNamespace(layer_windows=())),
    vocab_size=lambda idx: 5 + idx,
    has=frozenset({"build"}),
    cache_kinds=("contiguous", "ring"),
    layouts=("tree_mask", "path_batch"),
)


def run(judge: Any, *, num_examples: int) -> None:
    how = settings(
        max_examples=num_examples,
        stateful_step_count=MAX_OPS,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        derandomize=False,
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(3)(machine_for(SUBJECT, judge)), settings=how)


@cache
def drawn() -> list[MachineCase]:
    cases: list[MachineCase] = []
    run(cases.append, num_examples=200)
    return cases


def test_every_operation_is_drawn() -> None:
    assert set(Counter(op.name for case in drawn() for op in case.ops)) == set(OPS)


def test_sequences_are_long_and_hold_several_rounds() -> None:
    assert sum(len(case.ops) >= 8 for case in drawn()) > len(drawn()) // 3
    assert sum(case.num_rounds >= 2 for case in drawn()) > len(drawn()) // 4


def test_every_sequence_comes_back_from_its_string_and_stays_in_the_vocabulary() -> None:
    for case in drawn():
        assert decode(encode(case)) == case
        assert all(token < SUBJECT.vocab_size(case.model) for token in tokens_of(case))


def test_a_failing_sequence_is_reduced_to_the_operations_that_matter() -> None:
    """A cut somewhere behind a commit: found among a hundred sequences, then made smaller as a run does it."""

    def fails(case: MachineCase) -> bool:
        names = [op.name for op in case.ops]
        return "commit" in names and "truncate" in names[names.index("commit") :]

    found = next(case for case in drawn()[:100] if fails(case))
    smallest = reduce_case(found, fails, max_checks=400)  # type: ignore[arg-type]
    assert [op.name for op in smallest.ops] == ["commit", "truncate"]  # type: ignore[attr-defined]


def test_a_sequence_that_fails_ends_the_run_with_its_error() -> None:
    def judge(case: MachineCase) -> None:
        if any(op.name == "fork" for op in case.ops):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(judge, num_examples=50)


# Every operation, some of them where they make no sense.
WHOLE = MachineCase(
    cache="paged_4",
    ops=(
        Op("commit", (0, 1)),
        Op("prefill", (3, 1, 4, 1, 5)),
        Op("chunk", (9, 2, 6)),
        Op("draft", (0, 7, 8, 9), (-1, 0, 0, 2)),
        Op("fork"),
        Op("commit", (3, 5)),
        Op("fork"),
        Op("step", (3,)),
        Op("switch", (0,)),
        Op("truncate", (30,)),
        Op("resume", (5, 8)),
        Op("draft", (0, 7), (-1, 0)),
        Op("step", (1,)),
        Op("draft", (0, 7), (-1, 0)),
        Op("abort"),
        Op("switch", (1,)),
        Op("reset"),
        Op("chunk", (9, 7)),
    ),
)


class OnlyTree:
    """The reference decoder without anything that level 3 does not demand."""

    def build(self, model: Any, drafter: Any) -> Any:
        decoder = Decoder(model)
        names = ("prefill", "forward_tree", "commit", "truncate", "kv", "logits")
        bare = {name: lambda self, *given, name=name: getattr(decoder, name)(*given) for name in names}
        bare |= {"cache_len": property(lambda self: decoder.cache_len), "num_layers": decoder.num_layers}
        return type("Bare", (), bare)()


@pytest.mark.parametrize("target", [ReferenceTarget(), OnlyTree()], ids=["all methods", "level 3 alone"])
def test_all_operations_hold_on_a_right_decoder(target: Any) -> None:
    case = WHOLE if isinstance(target, ReferenceTarget) else MachineCase(ops=WHOLE.ops)
    check_machine(session_on(target).subjects["tiny-fp64"], case, ClaimRecord("kv.machine", "tiny-fp64"))


class _LosesACut(Decoder):
    def truncate(self, length: int) -> None:
        super().truncate(min(length + 1, self.cache_len))


def test_the_operation_that_breaks_is_named() -> None:
    subject = session_on(ReferenceTarget(decoder=_LosesACut)).subjects["tiny-fp64"]
    case = MachineCase(ops=(Op("prefill", (3, 1, 4)), Op("truncate", (1,))))
    with pytest.raises(MachineMismatch) as raised:
        check_machine(subject, case, ClaimRecord("kv.machine", "tiny-fp64"))
    assert str(raised.value) == "the cache holds 2 rows after operation 2, truncate, must hold 1"


def test_a_tree_of_a_machine_case_is_a_tree() -> None:
    assert DraftTree.of(WHOLE.ops[3].numbers, WHOLE.ops[3].parents).num_drafts == 3
