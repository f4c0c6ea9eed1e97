"""reference.batch and its claims: rows of a batch are what they are alone, and what is claimed of them is checked."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, seed, settings
from sessions import session_on
from torch import Tensor

from specbench.banks import TinyBank
from specbench.cases import (
    BatchCase,
    BatchRequest,
    CommitRound,
    Walk,
    WalkBatchCase,
    decode,
    encode,
    tokens_of,
)
from specbench.checks import CHECKS
from specbench.checks.batch import request_of
from specbench.claims import BatchMismatch, BatchVerifyMismatch, JoinMismatch, Misbehaviour
from specbench.clock import Clock
from specbench.fixed import fixed_cases
from specbench.loading import Target
from specbench.probe import Probe
from specbench.profiles import PROFILES
from specbench.protocols import LanguageModel
from specbench.record import EQUAL, ClaimRecord
from specbench.reduce import smaller_cases
from specbench.reference import autoregressive, batch_layouts
from specbench.reference.batch_layouts import BATCH_LAYOUTS
from specbench.reference.caches.cache import GARBAGE
from specbench.reference.decoder import Decoder
from specbench.reference.drafters.caching import CachingDrafter
from specbench.reference.drafters.model import self_drafter
from specbench.reference.drafters.ngram import NGramDrafter
from specbench.reference.faults.bank import FAULTS
from specbench.reference.hf import HFModel
from specbench.reference.kv_cache import CACHES, QUANTISED
from specbench.reference.layouts import LAYOUTS, flatten_tree_mask
from specbench.reference.model import Attend, LlamaConfig, LlamaModel, tiny_llama
from specbench.reference.recurrent import Recurrence, tiny_hybrid
from specbench.reference.target import ReferenceTarget
from specbench.strategies import strategy_for
from specbench.subjects import Subject
from specbench.tree import DraftTree
from specbench.types import Generation, Request, Sampling, Stop, VerifyResult
from specbench.watchdog import Watchdog

CONFIG = LlamaConfig(31, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
SLIDING = LlamaConfig(31, 32, 48, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, windows=(4, None))
# Ragged prompts and lengths, an end token, a late row, one for no tokens, one penalised, one with a single token.
REQUESTS = (
    Request((1, 2, 3), 12),
    Request((5,), 9, stop=Stop((7,))),
    Request(tuple(range(9)), 7, arrival=3),
    Request((4, 4), 0),
    Request((9, 8), 10, sampling=Sampling(frequency_penalty=1.0, repetition_penalty=1.3), arrival=1),
    Request((3, 1, 3, 1, 3), 1, arrival=5),
)
DRAFTERS: dict[str, Callable[[LlamaModel], Any]] = {
    "none": lambda model: lambda request: None,
    "n-gram": lambda model: lambda request: NGramDrafter(width=3),
    "itself": lambda model: lambda request: self_drafter(model, widths=(2, 2, 1)),
    "itself, told of its accepts": lambda model: lambda request: CachingDrafter(model, widths=(2, 1)),
    "some": lambda model: lambda request: self_drafter(model, num_layers=1) if len(request.prompt) % 2 else None,
}


@cache
def model(config: LlamaConfig = CONFIG) -> LlamaModel:
    return tiny_llama(config, seed=3)


def decoder(one: LanguageModel | None = None, drafter: Any = None, **options: Any) -> Decoder:
    return ReferenceTarget().build(one or model(), drafter, **options)


def plain(one: LlamaModel, request: Request) -> Generation:
    return autoregressive.generate(
        one, request.prompt, max_new_tokens=request.max_new_tokens, stop=request.stop, sampling=request.sampling
    )


def outputs(generations: Sequence[Generation]) -> list[tuple[tuple[int, ...], str]]:
    return [(one.tokens, one.finish_reason) for one in generations]


@pytest.mark.parametrize("layout", BATCH_LAYOUTS)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("config", [CONFIG, SLIDING], ids=["full", "sliding"])
def test_every_row_is_plain_decodings_on_every_cache_kind(config: LlamaConfig, kind: str, layout: str) -> None:
    one = decoder(model(config), self_drafter(model(config), widths=(2, 1, 1)), cache=kind, batch_layout=layout)
    oracle = model(config).with_codec(kind if kind in QUANTISED else "")
    assert outputs(one.generate_batch(REQUESTS)) == outputs([plain(oracle, request) for request in REQUESTS])


@pytest.mark.parametrize("layout", BATCH_LAYOUTS)
@pytest.mark.parametrize("tree_layout", LAYOUTS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_row_is_plain_decodings_with_a_drafter_of_its_own(drafter: str, tree_layout: str, layout: str) -> None:
    one = decoder(layout=tree_layout, batch_layout=layout)
    generations = one.generate_batch(REQUESTS, drafter_for=DRAFTERS[drafter](model()))
    assert outputs(generations) == outputs([plain(model(), request) for request in REQUESTS])


def test_one_drafter_serves_all_rows_in_turn_as_a_drafter_of_its_own_serves_each() -> None:
    """A drafter with a cache is handed contexts of several rows in turn, and drafts what it drafts for each alone."""
    shared = decoder(drafter=self_drafter(model(), num_layers=1)).generate_batch(REQUESTS)
    own = decoder().generate_batch(REQUESTS, drafter_for=lambda request: self_drafter(model(), num_layers=1))
    assert shared == own


@pytest.mark.parametrize("layout", BATCH_LAYOUTS)
def test_rows_are_recorded_as_their_solo_runs_are(layout: str) -> None:
    """Trees, paths, prefix lengths and rows of every round, not the tokens alone."""
    drafter = NGramDrafter(width=2)
    together = decoder(drafter=drafter, batch_layout=layout).generate_batch(REQUESTS)
    alone = [
        decoder(drafter=drafter).generate(
            one.prompt, max_new_tokens=one.max_new_tokens, sampling=one.sampling, stop=one.stop
        )
        for one in REQUESTS
    ]
    assert together == alone


class CountingRows(LlamaModel):
    """Counts forwards and the rows of each."""

    def rows(self, tokens: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        self.forwards.append(tuple(tokens.shape))
        return super().rows(tokens, position_ids, attend)

    forwards: list[tuple[int, ...]]


def counting() -> CountingRows:
    one = CountingRows(CONFIG, model()._weights)
    one.forwards = []
    return one


def test_all_rows_share_one_forward_a_round_and_leave_it_when_they_end() -> None:
    one = counting()
    decoder(one).generate_batch([Request((1, 2, 3), 4), Request((5,), 2), Request((6, 7), 1, arrival=2)])
    # Prompts of 2 and 0 rows; two rounds of two; then a prompt of 1 row and a round of two; then the first row alone.
    assert one.forwards == [(1, 2), (1, 2), (1, 2), (1, 1), (1, 2), (1, 1)]


def test_a_left_padded_batch_is_a_rectangle() -> None:
    one = counting()
    decoder(one, batch_layout="left_padded").generate_batch([Request((1, 2, 3, 4), 1), Request((5, 6), 1)])
    assert one.forwards == [(2, 3), (2, 1)]


def test_a_late_request_does_not_hold_up_an_empty_batch() -> None:
    generations = decoder().generate_batch([Request((1, 2), 2, arrival=10**9)])
    assert generations[0].tokens == plain(model(), Request((1, 2), 2)).tokens


def test_no_requests_are_served_at_once() -> None:
    assert decoder().generate_batch([]) == []


def test_the_same_request_twice_gives_the_same_answer_twice() -> None:
    first, second = decoder(drafter=self_drafter(model())).generate_batch([REQUESTS[0], REQUESTS[0]])
    assert first == second


def test_a_processor_sees_the_history_of_its_own_row() -> None:
    histories: dict[int, list[tuple[int, ...]]] = {0: [], 1: []}

    def recorder(row: int) -> Sampling:
        def record(history: tuple[int, ...], logits: Tensor) -> Tensor:
            histories[row].append(history)
            return logits

        return Sampling(processors=(record,))

    requests = [Request((1, 2), 3, sampling=recorder(0)), Request((5, 6, 7), 2, sampling=recorder(1))]
    tokens = [one.tokens for one in decoder().generate_batch(requests)]
    assert histories == {
        0: [(1, 2, *tokens[0][:num]) for num in range(3)],
        1: [(5, 6, 7, *tokens[1][:num]) for num in range(2)],
    }


BLOCKS = (
    (DraftTree.of([1, 2, 3, 4], [-1, 0, 0, 1]), 5),
    (DraftTree.of([7], [-1]), 0),
    (DraftTree.of([9, 8, 7, 6, 5, 4], [-1, 0, 1, 2, 3, 4]), 2),
)


@pytest.mark.parametrize("layout", BATCH_LAYOUTS)
@pytest.mark.parametrize("config", [CONFIG, SLIDING], ids=["full", "sliding"])
def test_a_block_has_the_logits_it_has_alone(config: LlamaConfig, layout: str) -> None:
    one = model(config)
    found = forward(one, layout)
    for (tree, length), logits in zip(BLOCKS, found, strict=True):
        cache = filled(one, length)
        assert torch.allclose(logits, one.forward(flatten_tree_mask(tree, length), cache), rtol=0, atol=1e-11)


def test_padding_moves_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    before = forward(model(), "left_padded")
    assert GARBAGE != -777.0
    monkeypatch.setattr(batch_layouts, "GARBAGE", -777.0)
    assert all(torch.equal(a, b) for a, b in zip(before, forward(model(), "left_padded"), strict=True))


@pytest.mark.parametrize("layout", BATCH_LAYOUTS)
def test_only_real_rows_reach_the_caches(layout: str) -> None:
    caches = [filled(model(), length) for _, length in BLOCKS]
    blocks = [flatten_tree_mask(tree, length) for tree, length in BLOCKS]
    BATCH_LAYOUTS[layout](model(), blocks, caches)
    assert [cache.length for cache in caches] == [9, 1, 8]


def filled(one: LlamaModel, length: int) -> Any:
    """A cache of `length` tokens, each row its own."""
    session = decoder(one)
    session.prefill(list(range(10, 10 + length)))
    return session._cache


def forward(one: LlamaModel, layout: str) -> list[Tensor]:
    blocks = [flatten_tree_mask(tree, length) for tree, length in BLOCKS]
    return BATCH_LAYOUTS[layout](one, blocks, [filled(one, length) for _, length in BLOCKS])


REFUSED = {
    "no prompt": ([Request((), 1)], "requests[0].prompt is empty: it must hold at least one token"),
    "an unknown token": ([Request((1,), 1), Request((31,), 1)], "requests[1].prompt[0] = 31 must be >= 0 and < 31"),
    "a negative length": ([Request((1,), -1)], "requests[0].max_new_tokens = -1 must be >= 0"),
    "a negative round": ([Request((1,), 1, arrival=-2)], "requests[0].arrival = -2 must be >= 0"),
    "beams": ([Request((1,), 1, sampling=Sampling(num_beams=4))], "num_beams = 4 must be 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_request_that_cannot_be_served_is_named(case: str) -> None:
    requests, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(sentence)):
        decoder().generate_batch(requests)


class Observer(NGramDrafter):
    """Remembers what it is told."""

    def __init__(self) -> None:
        super().__init__(width=2)
        self.told: list[VerifyResult] = []

    def observe(self, result: VerifyResult) -> None:
        self.told.append(result)


def test_a_drafter_that_observes_is_told_of_its_own_row() -> None:
    observers: dict[tuple[int, ...], Observer] = {}
    requests = [Request((1, 2, 1, 2), 6), Request((5, 5), 4)]
    generations = decoder().generate_batch(
        requests, drafter_for=lambda request: observers.setdefault(request.prompt, Observer())
    )
    for request, generation in zip(requests, generations, strict=True):
        heard = [(one.path, one.bonus_token) for one in observers[request.prompt].told]
        assert heard == [(one.path, one.bonus_token) for one in generation.rounds]


def test_a_drafter_that_observes_serves_one_row_only() -> None:
    with pytest.raises(ValueError, match=re.escape("a drafter with observe() is told of one text only")):
        decoder(drafter=Observer()).generate_batch(REQUESTS[:2])


def test_no_batch_is_offered_over_models_that_cannot_attend_across_caches() -> None:
    hybrid = tiny_hybrid(CONFIG, Recurrence(layers=(1,)), seed=0)
    gpt2 = HFModel.tiny("gpt2", seed=0, dtype=torch.float64, attention="sdpa")
    assert [hasattr(decoder(one), "generate_batch") for one in (model(), hybrid, gpt2)] == [True, False, False]


def test_trees_are_verified_each_by_its_own_rows() -> None:
    trees = [DraftTree.of([0, 1], [-1, 0]), DraftTree.of([0], [-1]), DraftTree.of([0, 2, 1], [-1, 0, 0])]
    logits = torch.nn.functional.one_hot(torch.tensor([1, 2, 0, 1, 0, 2]), 3).double()
    results = decoder().verify_batch(trees, logits, torch.tensor([0, 2, 3, 6]))
    assert results == [VerifyResult((1,), 2), VerifyResult((), 0), VerifyResult((2,), 2)]


MISFITS = {
    "offsets": ([0, 1, 3], 3, "cu_nodes = [0, 1, 3] must be [0, 2, 3] (0, then the nodes of the trees summed up)"),
    "rows": ([0, 2, 3], 4, "flat_logits has 4 rows, must have 3 (nodes of all trees)"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_offsets_that_do_not_fit_the_trees_are_refused(case: str) -> None:
    cu_nodes, num_rows, sentence = MISFITS[case]
    trees = [DraftTree.of([0, 1], [-1, 0]), DraftTree.of([0], [-1])]
    with pytest.raises(ValueError, match=re.escape(sentence)):
        decoder().verify_batch(trees, torch.zeros(num_rows, 3), cu_nodes)


# cases


EXAMPLES = {
    "BatchCase": BatchCase(),
    "BatchCase,model=2,rows=1.2_3_1_-1_0.1:-1.0:1/0:-1:0__0_1_0_4_none,batch_layout=left_padded": BatchCase(
        model=2,
        rows=(
            BatchRequest((1, 2), 3, 1, rounds=(CommitRound((0, 1), (-1, 0), 1), CommitRound((0,), (-1,), 0))),
            BatchRequest(eos_idx=4),
        ),
        batch_layout="left_padded",
    ),
    "BatchCase,rows=0_1_0_-1_none_130.-50.150.3.2.4__0_1_0_-1_none": BatchCase(
        rows=(
            BatchRequest(repetition=130, presence=-50, frequency=150, stop_from=3, stop_len=2, min_new_tokens=4),
            BatchRequest(),
        )
    ),
    "WalkBatchCase,walks=0.1:-1.0:0.2_1/0:-1:0,vocab_size=3": WalkBatchCase(
        walks=(Walk((0, 1), (-1, 0), ((0, 2), (1,))), Walk()), vocab_size=3
    ),
}


@pytest.mark.parametrize("text", EXAMPLES)
def test_a_batch_travels_in_one_word(text: str) -> None:
    assert (encode(EXAMPLES[text]), decode(text)) == (text, EXAMPLES[text])


BAD = {
    "BatchCase,rows=1_2": "row '1_2' must be prompt_length_arrival_end_rounds",
    "BatchCase,rows=1_1_0_-1_none_130.0": "must add repetition.presence.frequency.stop_from.stop_len.min_new_tokens",
    "BatchCase,rows=1_1_0_-1_none_0.0.0.0.0.0": "repetition = 0 must be >= 1",
    "BatchCase,rows=1_1_0_-1_none_100.0.0.0.-1.0": "stop_len = -1 must be >= 0",
    "BatchCase,rows=1_1_-1_-1_none": "arrival = -1 must be >= 0",
    "BatchCase,rows=1_1_0_-2_none": "eos_idx = -2 must be >= -1",
    "BatchCase,rows=_1_0_-1_none": "prompt must hold at least one token id >= 0",
    "BatchCase,rows=1_1_0_-1_0:-1:5": "accept = 5 must be >= 0 and < 1",
    "BatchCase,batch_layout=diagonal": "batch_layout = 'diagonal' must be one of packed, left_padded",
    "WalkBatchCase,walks=0:-1": "walk '0:-1' must be tokens:parents:winners",
    "WalkBatchCase,walks=0:-1:7": "winners = 7 must be >= 0 and < 2 (a token id)",
}


@pytest.mark.parametrize("text", BAD)
def test_a_word_that_no_strategy_draws_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(BAD[text])):
        decode(text)


def test_every_token_of_a_batch_is_checked_against_the_vocabulary() -> None:
    rows = (BatchRequest((1, 2), rounds=(CommitRound((0, 3), (-1, 0), 1),)), BatchRequest((4,)))
    assert sorted(set(tokens_of(BatchCase(rows=rows)))) == [0, 1, 2, 3, 4]


@cache
def subject() -> Subject:
    return subject_of(ReferenceTarget())


def subject_of(target: Any) -> Subject:
    bank = TinyBank("fp64", torch.float64)
    return Subject(Target("it", target), bank, clock=Clock(), watchdog=Watchdog(0, print))


@cache
def drawn(claim: str) -> list[Any]:
    cases: list[Any] = []

    @seed(20)
    @settings(max_examples=120, phases=[Phase.generate], **QUIET)
    @given(strategy_for(claim, subject()))
    def collect(case: Any) -> None:
        cases.append(case)

    collect()
    return cases


QUIET: dict[str, Any] = {
    "database": None,
    "deadline": None,
    "derandomize": False,
    "suppress_health_check": list(HealthCheck),
    "report_multiple_bugs": False,
}


@pytest.mark.parametrize("claim", ["verify.batch", "batch.solo", "batch.join"])
def test_drawn_batches_come_back_from_words_that_a_shell_leaves_alone(claim: str) -> None:
    words = [encode(case) for case in drawn(claim)]
    assert [decode(word) for word in words] == drawn(claim)
    assert [shlex.quote(word) for word in words] == words


MINIMAL = {
    "verify.batch": WalkBatchCase(walks=(Walk(),) * 2),
    "batch.solo": BatchCase(rows=(BatchRequest(),) * 2),
    "batch.join": BatchCase(rows=(BatchRequest(),) * 2),
}


@pytest.mark.parametrize("claim", MINIMAL)
def test_the_smallest_batch_of_two_is_two_smallest_rows(claim: str) -> None:
    once = settings(phases=[Phase.generate, Phase.shrink], **QUIET)
    two = find(
        strategy_for(claim, subject()),
        lambda case: num_rows(case) > 1 and not closes_up(case),
        settings=once,
        random=Random(0),
    )
    assert two == MINIMAL[claim]


def closes_up(case: Any) -> bool:
    """Whether a row that is soon done leaves others with far to go: such batches are drawn in a way of their own."""
    return isinstance(case, BatchCase) and any(row.max_new_tokens > 5 for row in case.rows[1:])


def num_rows(case: Any) -> int:
    return len(case.rows if isinstance(case, BatchCase) else case.walks)


def is_plain(row: BatchRequest) -> bool:
    return (row.repetition, row.presence, row.frequency) == (100, 0, 0)


ODD: dict[str, tuple[str, Callable[[BatchCase], bool]]] = {
    "unequal prompts": ("batch.solo", lambda case: len({len(row.prompt) for row in case.rows}) > 1),
    "a row without drafts beside one with": ("batch.solo", lambda case: len({not row.rounds for row in case.rows}) > 1),
    "four rows": ("batch.solo", lambda case: len(case.rows) == 4),
    "left padding": ("batch.solo", lambda case: case.batch_layout == "left_padded"),
    "a late row beside an early one": ("batch.join", lambda case: len({row.arrival for row in case.rows}) > 1),
    "an end token beside none": ("batch.join", lambda case: len({row.eos_idx < 0 for row in case.rows}) > 1),
    "a penalised row beside one that is not": ("batch.solo", lambda case: len(set(map(is_plain, case.rows))) > 1),
    "no penalties": ("batch.solo", lambda case: all(map(is_plain, case.rows))),
    "a stop sequence beside none": ("batch.join", lambda case: len({not row.stop_len for row in case.rows}) > 1),
    "an end token behind a least length": (
        "batch.join",
        lambda case: any(row.eos_idx >= 0 and row.min_new_tokens for row in case.rows),
    ),
    "unequal lengths": ("batch.join", lambda case: len({row.max_new_tokens for row in case.rows}) > 1),
}


@pytest.mark.parametrize("what", ODD)
def test_a_tenth_of_the_batches_has_it(what: str) -> None:
    claim, has = ODD[what]
    assert sum(map(has, drawn(claim))) >= len(drawn(claim)) / 10


@pytest.mark.parametrize("number", range(8))
def test_a_root_alone_stands_behind_another_tree_within_a_quick_run(number: int) -> None:
    cases: list[WalkBatchCase] = []

    @seed(number)
    @settings(max_examples=PROFILES["quick"].max_examples, phases=[Phase.generate], **QUIET)
    @given(strategy_for("verify.batch", subject()))
    def collect(case: WalkBatchCase) -> None:
        cases.append(case)

    collect()
    assert any(len(walk.parents) == 1 for case in cases for walk in case.walks[1:] if len(case.walks[0].parents) > 1)


def test_no_batch_is_drawn_over_a_model_that_keeps_states() -> None:
    drawn_models = {case.model for claim in ("batch.solo", "batch.join") for case in drawn(claim)}
    kinds = {type(subject().bank.model(idx)).__name__ for idx in drawn_models}
    assert kinds == {"LlamaModel"}


def test_on_a_real_model_three_ragged_prompts_are_a_batch_with_one_row_without_drafts() -> None:
    prompts = tuple((f"english-{idx}", tuple(range(idx, 60 + idx))) for idx in range(5))
    real: Any = SimpleNamespace(
        bank=SimpleNamespace(real=True, prompts=prompts),
        used_prompts=set(),
        vocab_size=lambda idx: 100,
        cache_kinds=("contiguous", "ring"),
        batch_layouts=("packed", "left_padded"),
    )
    solo, late = (fixed_cases(claim, real, PROFILES["quick"]) for claim in ("batch.solo", "batch.join"))
    assert solo is not None and late is not None and len(solo) == len(late) == 1
    assert [(len(row.prompt), bool(row.rounds), row.arrival) for row in solo[0].rows] == [
        (32, True, 0),
        (27, True, 0),
        (22, False, 0),
    ]
    assert [(row.arrival, row.eos_idx) for row in late[0].rows] == [(0, 3), (1, -1), (0, -1)]
    assert [(row.min_new_tokens, row.repetition, row.stop_len) for row in late[0].rows] == [
        (2, 100, 0),
        (0, 130, 0),
        (0, 100, 2),
    ]
    assert decode(encode(late[0])) == late[0]


def test_a_batch_is_made_smaller_by_rows_and_by_what_is_in_a_row() -> None:
    case = BatchCase(rows=(BatchRequest((5, 6), 3, 2, 1), BatchRequest()), batch_layout="left_padded")
    found = set(smaller_cases(case))
    expected = {
        "a row less": BatchCase(rows=case.rows[:1], batch_layout="left_padded"),
        "an earlier row": BatchCase(rows=(BatchRequest((5, 6), 3, 0, 1), BatchRequest()), batch_layout="left_padded"),
        "a shorter prompt": BatchCase(rows=(BatchRequest((6,), 3, 2, 1), BatchRequest()), batch_layout="left_padded"),
        "no end token": BatchCase(rows=(BatchRequest((5, 6), 3, 2), BatchRequest()), batch_layout="left_padded"),
        "no padding": BatchCase(rows=case.rows),
    }
    assert {name for name, smaller in expected.items() if smaller not in found} == set()


def test_a_row_is_made_smaller_by_what_it_adds() -> None:
    row = BatchRequest((5,), 3, 2, 1, (), 130, 50, -100, 3, 2, 4)
    found = {one.rows[0] for one in smaller_cases(BatchCase(rows=(row,))) if isinstance(one, BatchCase)}
    fewer = [
        {"repetition": 100},
        {"presence": 0},
        {"frequency": 0},
        {"stop_from": 2},
        {"stop_len": 0},
        {"min_new_tokens": 2},
    ]
    assert [one for one in fewer if replace(row, **one) not in found] == []
    assert all(one.repetition == 130 for one in found if one.prompt != row.prompt)


def test_a_batch_of_trees_is_made_smaller_by_trees_and_by_nodes() -> None:
    first, second = Walk((0, 1), (-1, 0), ((0,), (1,))), Walk((0,), (-1,), ((1,),))
    found = list(smaller_cases(WalkBatchCase(walks=(first, second))))
    assert WalkBatchCase(walks=(first,)) in found
    assert WalkBatchCase(walks=(Walk((0,), (-1,), ((0,),)), second)) in found


# claims

JUDGED = BatchCase(
    rows=(
        BatchRequest((3, 1, 4), 6, 0, 4, (CommitRound((0, 1, 2), (-1, 0, 0), 2),)),
        BatchRequest((5,), 3, 1),
        BatchRequest((9, 2), 5, 2, -1, (CommitRound((0, 1), (-1, 0), 1), CommitRound((0, 7, 8), (-1, 0, 1), 0))),
    )
)


@pytest.mark.parametrize("claim", ["batch.solo", "batch.join"])
def test_the_reference_holds_and_its_tokens_are_counted(claim: str) -> None:
    record = ClaimRecord(claim, "tiny-fp64")
    CHECKS[claim](subject(), JUDGED, record)
    assert (record.num_differing, record.num_generations) == (0, 3)
    assert record.num_tokens == sum(len(one.tokens) for one in served(subject()))


def served(one: Subject) -> list[Generation]:
    return one.open(JUDGED).generate_batch([request_of(one, JUDGED, idx) for idx in range(3)])


ADDED = BatchCase(rows=(BatchRequest((3, 1, 4), 8, 0, 2, (), 130, 50, 150, 4, 2, 3), BatchRequest((5,), 3)))


def test_a_row_asks_for_penalties_and_stops_where_the_target_honours_them() -> None:
    """Both stops are taken from what plain decoding says under the row's own penalties."""
    sampling = Sampling(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=1.5)
    text = subject().plain_text(ADDED.alone(0), (3, 1, 4), 8, sampling=sampling)
    stop = Stop((text[2],), stop_sequences=(text[4:6],), min_new_tokens=3)
    assert request_of(subject(), ADDED, 0) == Request((3, 1, 4), 8, sampling=sampling, stop=stop)
    greedy = subject().plain_text(ADDED.alone(0), (3, 1, 4), 8)
    assert request_of(subject_of(Foreign()), ADDED, 0) == Request((3, 1, 4), 8, stop=Stop((greedy[2],)))
    assert request_of(subject(), ADDED, 1) == Request((5,), 3)


@pytest.mark.parametrize("ignored", ["sampling", "stop"])
def test_a_batch_that_ignores_what_a_row_asks_for_is_found(ignored: str) -> None:
    class Ignoring(Decoder):
        @property
        def generate_batch(self) -> Any:
            serve, usual = super().generate_batch, {"sampling": Sampling(), "stop": Stop()}[ignored]
            return lambda requests: serve([replace(one, **{ignored: usual}) for one in requests])

    CHECKS["batch.join"](subject(), ADDED, ClaimRecord("batch.join", "tiny-fp64"))
    ignoring = subject_of(ReferenceTarget(decoder=Ignoring))
    sentence = {
        "sampling": "output ",
        "stop": "end token 8 is emitted at token 2, must not be among the first 3",
    }[ignored]
    with pytest.raises(JoinMismatch, match=re.escape(f"row 0 of 2, prompt [3, 1, 4]: {sentence}")):
        CHECKS["batch.join"](ignoring, ADDED, ClaimRecord("batch.join", "tiny-fp64"))


class Foreign:
    """A target of lists, over the reference. change: what is wrong with its answers."""

    def __init__(self, change: Callable[[list[Any]], Any] = lambda answers: answers) -> None:
        self._change = change

    def build(self, model: LanguageModel, drafter: Any) -> Foreign:
        self._decoder = Decoder(model, drafter)
        return self

    def generate(self, prompt: list[int], *, max_new_tokens: int, sampling: Any, stop: Any, seed: int) -> list[int]:
        return list(self._decoder.generate(prompt, max_new_tokens=max_new_tokens, stop=stop).tokens)

    def generate_batch(self, requests: list[Request]) -> Any:
        return self._change([list(one.tokens) for one in self._decoder.generate_batch(requests)])

    def verify_batch(self, trees: list[DraftTree], flat_logits: Tensor, cu_nodes: Tensor, **options: Any) -> Any:
        return self._change(self._decoder.verify_batch(trees, flat_logits, cu_nodes))


def test_a_target_of_bare_lists_is_judged_as_well() -> None:
    CHECKS["batch.join"](subject_of(Foreign()), JUDGED, ClaimRecord("batch.join", "tiny-fp64"))


WRONG: dict[str, tuple[Callable[[list[Any]], Any], type[Exception], str]] = {
    "another row's answer": (
        lambda answers: [*answers[:2], answers[0]],
        BatchMismatch,
        "row 2 of 3, prompt [9, 2]: output differs from autoregressive decoding at token 0",
    ),
    "an answer too few": (
        lambda answers: answers[:2],
        Misbehaviour,
        "generate_batch() must return a list of 3 answers, one for each request, got a list of 2",
    ),
    "answers without end": (
        lambda answers: answers * 2,
        Misbehaviour,
        "generate_batch() must return a list of 3 answers, one for each request, got a list of more",
    ),
    "no list": (
        lambda answers: 7,
        Misbehaviour,
        "generate_batch() must return a list of 3 answers, one for each request, got int 7",
    ),
    "a token of no vocabulary": (
        lambda answers: [[99], *answers[1:]],
        Misbehaviour,
        "generate_batch() must return token ids >= 0 and < 31, got 99 at index 0",
    ),
    "a token less": (
        lambda answers: [*answers[:2], answers[2][:-1]],
        BatchMismatch,
        "row 2 of 3, prompt [9, 2]: output has 4 tokens, must have 5",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_answer_to_a_batch_is_told_in_one_sentence(case: str) -> None:
    change, kind, sentence = WRONG[case]
    with pytest.raises(kind) as raised:
        CHECKS["batch.solo"](subject_of(Foreign(change)), JUDGED, ClaimRecord("batch.solo", "tiny-fp64"))
    assert str(raised.value) == sentence


def test_a_tree_that_is_decided_otherwise_than_alone_is_drawn() -> None:
    """Without a `verify` of its own a target is compared with its batches of one."""
    swapped = subject_of(Foreign(lambda results: results[::-1]))
    case = WalkBatchCase(walks=(Walk((0, 1), (-1, 0), ((1,), (0,))), Walk((0, 1), (-1, 0), ((0,), (1,)))))
    with pytest.raises(BatchVerifyMismatch) as raised:
        CHECKS["verify.batch"](swapped, case, ClaimRecord("verify.batch", "tiny-fp64"))
    facts = raised.value.facts
    assert (facts.headline, facts.expected, facts.actual, facts.notes) == (
        "tree 0 of 2 is decided otherwise than alone",
        "path [1], bonus 0",
        "path [], bonus 0",
        {0: "argmax 1", 1: "argmax 0"},
    )


def test_solo_runs_of_the_target_count_beside_plain_decoding() -> None:
    """A target whose batches are right and whose solo runs are not has rows that differ from their solo runs."""

    class Backwards(Foreign):
        def generate(self, prompt: list[int], **options: Any) -> list[int]:
            return super().generate(prompt, **options)[::-1]

    with pytest.raises(
        JoinMismatch, match=re.escape("row 0 of 3, prompt [3, 1, 4]: output differs from the target's own solo run")
    ):
        CHECKS["batch.join"](subject_of(Backwards()), JUDGED, ClaimRecord("batch.join", "tiny-fp64"))


def test_verify_batch_is_handed_copies() -> None:
    class Scribbler:
        def verify_batch(self, trees: list[DraftTree], flat_logits: Tensor, cu_nodes: Tensor, **options: Any) -> Any:
            results = decoder().verify_batch(trees, flat_logits, cu_nodes)
            trees.clear()
            flat_logits.zero_()
            cu_nodes.zero_()
            return tuple(results)

    logits = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    probe = Probe(Scribbler(), vocab_size=2, clock=Clock(), watchdog=Watchdog(0, print))
    assert probe.verify_batch([DraftTree.of([0], [-1])], [logits]) == [VerifyResult((), 1)]
    assert logits.tolist() == [[0.0, 1.0]]


# What the faults of a batch must leave alone: one row is right, and so is the verifier where the fault is elsewhere.
STILL_HOLDS = {
    "padding_visible": ["verify.batch"],
    "first_rows_path": ["greedy.lossless", "kv.commit"],
    "stale_slots": ["verify.batch"],
    "neighbours_cache": ["batch.solo"],
    "first_rows_stop": ["batch.solo"],
    "stale_sampling": ["verify.batch", "processors.penalties"],
    "root_reads_before": ["greedy.walk"],
    "batch_minimum": ["greedy.walk"],
    "padding_accepted": ["greedy.walk"],
}


@pytest.mark.parametrize("fault", STILL_HOLDS)
def test_claims_that_a_fault_of_a_batch_does_not_touch_still_hold(fault: str) -> None:
    session = session_on(FAULTS[fault].make(), name="planted", seed=7)
    assert {session.judge(claim, "tiny-fp64").verdict for claim in STILL_HOLDS[fault]} == {EQUAL}
