"""tree.long: its cases grow from a seed, travel as one word, shrink to what matters, and a correct decoder passes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from specbench.banks import TinyBank
from specbench.cases import LONG_SHAPES, LongCase, decode, encode
from specbench.checks import long
from specbench.checks.long import check_long
from specbench.claims import LongContextMismatch
from specbench.clock import Clock
from specbench.fixed import LONG_CASES, MAX_LONG_INEXACT, fixed_cases
from specbench.loading import Target
from specbench.profiles import PROFILES
from specbench.record import ClaimRecord
from specbench.reduce import smaller_cases
from specbench.reference.decoder import Decoder
from specbench.reference.faults.bank import FAULTS
from specbench.reference.target import ReferenceTarget
from specbench.strategies import strategy_for
from specbench.subjects import NotTested, Subject
from specbench.tree import DraftTree
from specbench.watchdog import Watchdog


def subject_on(target: object, label: str = "fp64", dtype: torch.dtype = torch.float64) -> Subject:
    return Subject(Target("it", target), TinyBank(label, dtype), clock=Clock(), watchdog=Watchdog(0, print))


def judged(subject: Subject, case: LongCase) -> ClaimRecord:
    record = ClaimRecord("tree.long", subject.name)
    check_long(subject, case, record)
    return record


# the cases


def test_a_seed_grows_into_the_same_case_everywhere() -> None:
    """Written out, since replay strings of old failures rely on it."""
    case = LongCase(prefix_len=6, num_nodes=6, shape="ragged", seed=1)
    assert (case.prefix(31), case.tree(31)) == (
        [7, 1, 16, 27, 20, 12],
        DraftTree.of([3, 14, 16, 2, 16, 9], [-1, 0, 1, 0, 0, 0]),
    )


SHAPES = {
    "chain": [-1, 0, 1, 2, 3, 4, 5],
    "star": [-1, 0, 0, 0, 0, 0, 0],
    "binary": [-1, 0, 0, 1, 1, 2, 2],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_is_what_its_name_says(shape: str) -> None:
    assert LongCase(num_nodes=7, shape=shape).tree(31).parent_list == SHAPES[shape]


def test_a_deep_tree_grows_at_its_last_three_nodes() -> None:
    parents = LongCase(num_nodes=200, shape="deep").tree(31).parent_list
    assert {node - parent for node, parent in enumerate(parents[1:], start=1)} == {1, 2, 3}


def test_a_ragged_tree_grows_anywhere() -> None:
    parents = LongCase(num_nodes=200, shape="ragged").tree(31).parent_list
    assert max(node - parent for node, parent in enumerate(parents[1:], start=1)) > 100


@pytest.mark.parametrize("shape", LONG_SHAPES)
def test_smaller_cases_of_a_seed_are_the_beginnings_of_larger_ones(shape: str) -> None:
    """The oracle keeps the longest prefix of a seed and reads shorter ones off it."""
    large = LongCase(prefix_len=40, num_nodes=30, shape=shape, seed=3)
    small = LongCase(prefix_len=17, num_nodes=11, shape=shape, seed=3)
    tree = large.tree(31)
    first = DraftTree.of(tree.token_list[:11], tree.parent_list[:11])
    assert (small.prefix(31), small.tree(31)) == (large.prefix(31)[:17], first)


def test_the_longest_case_is_a_short_word() -> None:
    word = encode(LONG_CASES["thorough"][1])
    expected = "LongCase,model=2,cache=paged_16,prefix_len=8191,num_nodes=511,shape=deep,chunk=512,seed=9"
    assert (word, decode(word)) == (expected, LONG_CASES["thorough"][1])


BAD = {
    "LongCase,prefix_len=16385": "replay string: prefix_len = 16385 must be >= 0 and < 16385 (a length)",
    "LongCase,num_nodes=0": "replay string: num_nodes = 0 must be >= 1 and < 1025 (a size)",
    "LongCase,num_nodes=1025": "replay string: num_nodes = 1025 must be >= 1 and < 1025 (a size)",
    "LongCase,chunk=-1": "replay string: chunk = -1 must be >= 0 and < 100000 (a length, or 0 for all at once)",
    "LongCase,seed=-1": "replay string: seed = -1 must be >= 0 and < 2147483648 (a seed)",
    "LongCase,shape=comb": "replay string: shape = 'comb' must be one of chain, star, binary, deep, ragged",
}


@pytest.mark.parametrize("word", BAD)
def test_a_case_out_of_bounds_is_refused(word: str) -> None:
    with pytest.raises(ValueError) as caught:
        decode(word)
    assert str(caught.value) == BAD[word]


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(strategy_for("tree.long", subject_on(ReferenceTarget())))
def test_every_step_of_reduction_is_smaller_and_valid(case: LongCase) -> None:
    for smaller in smaller_cases(case):
        assert isinstance(smaller, LongCase)
        assert decode(encode(smaller)) == smaller
        assert weight(smaller) < weight(case)


def weight(case: LongCase) -> tuple[int, ...]:
    """What may only go down: nodes and rows, then whatever is not the default."""
    plainness = sum((case.shape != "chain", case.cache != "contiguous", case.layout != "tree_mask"))
    return case.num_nodes + case.prefix_len, plainness + case.chunk + case.model + case.seed


def test_the_plainest_case_cannot_get_smaller() -> None:
    assert list(smaller_cases(LongCase())) == []


def test_a_very_long_prefix_is_never_tried_in_one_piece() -> None:
    """Scores of 8,192 rows against 8,192 would take gigabytes."""
    pieces = [one.chunk for one in smaller_cases(LongCase(prefix_len=8192, chunk=512)) if one.prefix_len > 2048]
    assert set(pieces) == {512}


# the list that a run is judged on


@pytest.mark.parametrize("profile", ["quick", "standard", "thorough"])
def test_every_profile_stands_on_both_sides_of_a_boundary(profile: str) -> None:
    cases = fixed_cases("tree.long", subject_on(ReferenceTarget()), PROFILES[profile])
    assert cases is not None
    longest, largest = max(one.prefix_len for one in cases), max(one.num_nodes for one in cases)
    assert (longest, largest) == {"quick": (2049, 257), "standard": (4097, 512), "thorough": (8192, 512)}[profile]


def test_every_listed_case_is_valid_and_every_shape_is_listed() -> None:
    cases = [one for listed in LONG_CASES.values() for one in listed]
    assert ([decode(encode(one)) for one in cases], {one.shape for one in cases}) == (cases, set(LONG_SHAPES))


def test_a_subject_without_cache_kinds_or_layouts_gets_cases_that_it_can_run() -> None:
    bare: Any = SimpleNamespace(
        bank=SimpleNamespace(num_models=2), exact=True, cache_kinds=("contiguous",), layouts=("tree_mask",)
    )
    cases = fixed_cases("tree.long", bare, PROFILES["standard"])
    assert cases is not None
    assert {(one.cache, one.layout, one.model < 2) for one in cases} == {("contiguous", "tree_mask", True)}


def test_in_a_lower_precision_cases_are_shorter() -> None:
    """There plain decoding's own noise has to be measured over the same nodes, one by one."""
    cases = fixed_cases("tree.long", subject_on(ReferenceTarget(), "fp32", torch.float32), PROFILES["thorough"])
    assert cases is not None
    assert (len(cases) >= 3, max(one.prefix_len for one in cases) <= MAX_LONG_INEXACT) == (True, True)


# the check


@settings(max_examples=12, deadline=None, database=None, derandomize=True)
@given(strategy_for("tree.long", subject_on(ReferenceTarget())))
def test_a_correct_decoder_passes(case: LongCase) -> None:
    judged(subject_on(ReferenceTarget()), case)


def test_in_fp32_rounding_is_noise() -> None:
    subject = subject_on(ReferenceTarget(), "fp32", torch.float32)
    assert 0 < judged(subject, LongCase(prefix_len=129, num_nodes=33, shape="ragged", chunk=32)).worst <= 1


CAUGHT = {
    "table_of_positions": LongCase(prefix_len=1024),
    "depth_in_a_byte": LongCase(num_nodes=129),
    "one_word_a_row": LongCase(num_nodes=66),
    "whole_blocks": LongCase(prefix_len=65),
    "tiled_chunks": LongCase(prefix_len=257),
}
MISSED = {
    "table_of_positions": LongCase(prefix_len=1023),
    "depth_in_a_byte": LongCase(num_nodes=128),
    "one_word_a_row": LongCase(num_nodes=65),
    "whole_blocks": LongCase(prefix_len=64),
    "tiled_chunks": LongCase(prefix_len=256),
}


@pytest.mark.parametrize("fault", CAUGHT)
def test_a_fault_of_size_is_caught_at_its_size(fault: str) -> None:
    with pytest.raises(LongContextMismatch):
        judged(subject_on(FAULTS[fault].make()), CAUGHT[fault])


@pytest.mark.parametrize("fault", MISSED)
def test_a_fault_of_size_hides_one_below(fault: str) -> None:
    """Which is why the listed cases stand on both sides of a boundary."""
    judged(subject_on(FAULTS[fault].make()), MISSED[fault])


def test_the_sentence_says_how_long_and_how_large() -> None:
    with pytest.raises(LongContextMismatch) as caught:
        judged(subject_on(FAULTS["whole_blocks"].make()), LongCase(prefix_len=65, num_nodes=3, chunk=40))
    assert caught.value.facts.headline.endswith(" in a tree of 3 behind 65 tokens, 40 at a time")


class Recorder(Decoder):
    """Notes how the prefix arrives."""

    pieces: list[int]

    def prefill(self, tokens: Any) -> None:
        self.pieces = []
        super().prefill(tokens)

    def extend(self, tokens: Any) -> None:
        self.pieces.append(len(tokens))
        super().extend(tokens)


@pytest.mark.parametrize(
    ("prefix_len", "chunk", "pieces"),
    [(10, 4, [4, 4, 2]), (8, 4, [4, 4]), (3, 4, [3]), (10, 0, [10]), (0, 4, [0]), (0, 0, [0]), (3, 1, [1, 1, 1])],
)
def test_the_prefix_comes_in_pieces(
    prefix_len: int, chunk: int, pieces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subject_on(ReferenceTarget(decoder=Recorder))
    opened = []
    real_open = subject.open
    monkeypatch.setattr(subject, "open", lambda case: opened.append(real_open(case)) or opened[0])
    judged(subject, LongCase(prefix_len=prefix_len, chunk=chunk))
    assert opened[0].adapter.pieces == pieces


def test_a_target_without_extend_gets_the_prefix_at_once() -> None:
    class Bare:
        """Level 3 and nothing else."""

        def __init__(self, inner: Decoder) -> None:
            for name in ("prefill", "forward_tree", "commit", "truncate"):
                setattr(self, name, getattr(inner, name))
            self.cache_len = 0

    class Target:
        def build(self, model: Any, drafter: Any) -> Bare:
            return Bare(ReferenceTarget().build(model, drafter))

    subject = subject_on(Target())
    assert "extend" not in subject.has
    judged(subject, LongCase(prefix_len=10, chunk=4))


def test_the_oracle_computes_a_seeds_longest_prefix_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    trunk = long.StreamedOracle.trunk
    monkeypatch.setattr(
        long.StreamedOracle, "trunk", lambda self, prefix: lengths.append(len(prefix)) or trunk(self, prefix)
    )
    subject = subject_on(ReferenceTarget())
    for prefix_len in (20, 30, 25, 30, 7):
        judged(subject, LongCase(prefix_len=prefix_len))
    assert lengths == [20, 30]


def test_half_precision_says_where_the_claim_is_judged() -> None:
    with pytest.raises(NotTested, match="judged on tiny-fp64 and tiny-fp32"):
        judged(subject_on(ReferenceTarget(), "bf16", torch.bfloat16), LongCase())
