"""bench.sides, loop, verdicts: what is timed, in which order, how little the timing does, who gets a speed-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from specbench.bench.lean import LeanLlama
from specbench.bench.loop import Item, Plan, measure, plain_texts, with_later_turns
from specbench.bench.metrics import RoundCounts
from specbench.bench.overhead import overhead
from specbench.bench.rows import Gate, Row, RowFile, Setting, header_of, read
from specbench.bench.sides import Answer, OwnSide, Sides, TargetSide, TransformersSide, load_own, load_transformers
from specbench.bench.verdicts import LAW, Judge
from specbench.reference.decoder import Decoder
from specbench.reference.model import LlamaConfig, tiny_llama
from specbench.regret import Oracle
from specbench.types import Stop
from specbench.workloads.chat import encode
from specbench.workloads.workload import Prompt

CONFIG = LlamaConfig(31, 32, 48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8], [1, 6, 1, 8, 0, 3, 3]]
ITEMS = tuple(Item(f"p{idx}", "code", tuple(one)) for idx, one in enumerate(PROMPTS))
PLAIN = Setting("plain")
LOOKUP = Setting("lookup", drafter="lookup", gamma=4)
OTHERS = (
    LOOKUP,
    Setting("ngram tree", drafter="ngram", gamma=3, width=2),
    Setting("paths", drafter="ngram", gamma=3, width=2, layout="path_batch"),
    Setting("early exit", drafter="early_exit", gamma=2),
    Setting("k-ary", drafter="early_exit", gamma=2, width=3),
    Setting("model", drafter="model", gamma=3),
    Setting("best first", drafter="best_first", gamma=3, width=2),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint that both stacks load."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    tiny_llama(CONFIG, seed=5).to(torch.float32).save(path)
    return path


@pytest.fixture(scope="module")
def sides(folder: Path) -> Sides:
    return Sides(folder, torch.float32, longest=100, draft_model=str(folder))


def plan(settings: Sequence[Setting] = (PLAIN, LOOKUP), **changes: Any) -> Plan:
    given = {"weights": "tiny", "dtype": "fp32", "threads": 1, "max_new_tokens": 20, "repetitions": 2}
    return Plan(ITEMS, tuple(settings), **given | changes)


class Ticks:
    """A clock that moves on by one second whenever it is read."""

    def __init__(self) -> None:
        self.num_reads = 0

    def __call__(self) -> float:
        self.num_reads += 1
        return float(self.num_reads)


class CountingList(list[Any]):
    num_appends = 0

    def append(self, one: Any) -> None:
        self.num_appends += 1
        super().append(one)


@pytest.mark.parametrize("setting", [PLAIN, *OTHERS], ids=lambda one: one.name)
def test_a_step_costs_two_clock_reads_and_one_append(setting: Setting, sides: Sides) -> None:
    """And nothing else is done inside the timed part, so that stamps are some microseconds of a round: 4 steps a round,
    one fewer where nothing is drafted, and two reads around the whole."""
    clock = Ticks()
    side = OwnSide(sides.model, setting, small=sides.model, clock=clock)
    log = side._log
    num_before = len(log)
    answer = side.generate(PROMPTS[0], 12)
    asked = sum(12 - done > 1 for done in _emitted_before(answer)) if setting.drafter else 0
    assert (num_before, clock.num_reads) == (0, 2 + 2 * len(log))
    assert len(log) == 3 * len(answer.rounds) + asked


def test_a_later_turn_holds_what_the_model_itself_said(sides: Sides) -> None:
    """A letter a token; the answer ends before its end token, which is not in it."""

    class Letters:
        chat_template = None

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [ord(one) - ord("a") if one.isalpha() else 30 for one in text]}

        def decode(self, tokens: Sequence[int]) -> str:
            return "".join(chr(ord("a") + one) for one in tokens)

    class Saying:
        asked: ClassVar[list[tuple[int, ...]]] = []

        def generate(self, prompt: Sequence[int], *, max_new_tokens: int, stop: Stop) -> Any:
            self.asked.append(tuple(prompt))
            return Answer((2, 3, *stop.eos_token_ids), 1.0, 1.0)

    prompt = Prompt("d", "dialogue", ("ab", "e"), "here")
    first = Item("d", "dialogue", (0, 1), prompt=prompt)
    found = with_later_turns([ITEMS[0], first], Saying(), Letters(), [9], 5)
    assert [(one.id, one.category) for one in found[1:]] == [("d", "dialogue"), ("d turn 2", "dialogue")]
    expected = encode(prompt, Letters(), ["cd"])
    assert (Saying.asked, found[2].tokens) == ([(0, 1)], tuple(expected))
    assert found[:2] == (ITEMS[0], first)


def test_room_is_made_for_longer_texts(folder: Path) -> None:
    sides = Sides(folder, torch.float32, longest=20)
    assert sides.model.vocab_size == CONFIG.vocab_size
    sides.reserve(300)
    assert len(sides.make(LOOKUP).generate(PROMPTS[0], 250).tokens) == 250


@pytest.mark.parametrize("setting", [PLAIN, LOOKUP, OTHERS[4]], ids=lambda one: one.name)
def test_a_batch_says_what_each_text_alone_does_and_costs_as_few_clock_reads(setting: Setting, sides: Sides) -> None:
    """A forward for the prompts, then a round of forward, verification and commit for all texts, and a draft for each
    text that may still draft."""
    clock = Ticks()
    side = OwnSide(sides.model, replace(setting, batch=3), small=sides.model, clock=clock)
    answer = side.generate_batch(PROMPTS, 12)
    alone = [sides.make(setting).generate(one, 12) for one in PROMPTS]
    assert answer.tokens == tuple(token for one in alone for token in one.tokens)
    assert sorted(map(repr, answer.rounds)) == sorted(repr(each) for one in alone for each in one.rounds)
    assert answer.first_rounds == 3 and answer.first_tokens == sum(one.rounds[0].emitted for one in alone)
    assert answer.num_rows == sum(one.num_rows or 0 for one in alone)
    num_drafts = sum(12 - done > 1 for one in alone for done in _emitted_before(one)) if setting.drafter else 0
    num_rounds = max(len(one.rounds) for one in alone)
    assert clock.num_reads == 2 + 2 * (1 + 3 * num_rounds + num_drafts)


@pytest.mark.parametrize("side", ["transformers", "target"])
def test_a_batch_of_others_is_refused(side: str, sides: Sides) -> None:
    with pytest.raises(ValueError, match=f"setting x: batch = 2 must be 1 on the side {side}"):
        sides.make(Setting("x", side=side, batch=2))


def test_an_answer_of_a_batch_is_split_by_text() -> None:
    item = replace(ITEMS[0], others=(("p1", (1, 2)), ("p2", (3,))))
    assert item.split([1, 2, 3, 4, 5, 6]) == [(1, 2), (3, 4), (5, 6)]
    assert [name for name, _ in item.texts] == ["p0", "p1", "p2"]


def _emitted_before(answer: Answer) -> list[int]:
    """Tokens emitted before each round: with one left, none is drafted."""
    done = 0
    found = []
    for one in answer.rounds:
        found.append(done)
        done += one.emitted
    return found


def test_times_are_told_apart_by_hand() -> None:
    """Three plain rounds behind a prefill without stamp, a second a read: begin 1; forward 2-3, walk 4-5, commit 6-7;
    forward 8-9 ... commit 18-19; end 20."""
    model = LeanLlama.of(tiny_llama(CONFIG, seed=5))
    answer = OwnSide(model, PLAIN, clock=Ticks()).generate(PROMPTS[0], 3)
    assert (answer.seconds, answer.first_seconds, answer.first_tokens) == (19.0, 6.0, 1)
    assert answer.phases == {"draft": 0.0, "verify": 4.0, "commit": 2.0, "decode": 13.0}


def test_a_slow_prefill_is_in_the_time_to_the_first_token_alone() -> None:
    """A model without `encode` stamps its prefill as a forward: two reads more before the first token."""
    answer = OwnSide(tiny_llama(CONFIG, seed=5), PLAIN, clock=Ticks()).generate(PROMPTS[0], 3)
    assert (answer.first_seconds, answer.phases) == (8.0, {"draft": 0.0, "verify": 4.0, "commit": 2.0, "decode": 13.0})


@pytest.mark.parametrize("setting", [PLAIN, *OTHERS], ids=lambda one: one.name)
def test_our_side_says_what_plain_decoding_says(setting: Setting, sides: Sides) -> None:
    plain = Decoder(tiny_llama(CONFIG, seed=5)).generate(PROMPTS[0], max_new_tokens=20).tokens
    side = sides.make(setting)
    assert [side.generate(PROMPTS[0], 20).tokens for _ in range(2)] == [plain] * 2


def test_the_target_as_its_own_drafter_accepts_all(sides: Sides) -> None:
    """Rounds of 3 drafts emit 4; the last round drafts what is left without its bonus."""
    answer = sides.make(Setting("model", drafter="model", gamma=3)).generate(PROMPTS[0], 10)
    assert answer.rounds == (RoundCounts(3, 3, 3, 4), RoundCounts(3, 3, 3, 4), RoundCounts(1, 1, 1, 2))


def test_a_k_ary_tree_has_k_children_a_node(sides: Sides) -> None:
    answer = sides.make(Setting("k-ary", drafter="early_exit", gamma=2, width=3)).generate(PROMPTS[0], 10)
    assert (answer.rounds[0].nodes, answer.rounds[0].depth) == (3 + 9, 2)


def test_a_best_first_tree_keeps_its_budget(folder: Path, sides: Sides) -> None:
    """Over the early exit, and over the target where that is the draft model: then its first path is accepted."""
    setting = Setting("best first", drafter="best_first", gamma=3, width=2)
    over_itself = sides.make(setting).generate(PROMPTS[0], 12).rounds[0]
    over_exit = Sides(folder, torch.float32, longest=100).make(setting).generate(PROMPTS[0], 12).rounds[0]
    assert (over_itself.nodes, over_exit.nodes) == (6, 6)
    assert over_itself.accepted >= 1


def test_transformers_gives_what_was_asked_for_beyond_an_end_token(folder: Path) -> None:
    model = load_transformers(str(folder), torch.float32)
    plain = Decoder(tiny_llama(CONFIG, seed=5)).generate(PROMPTS[0], max_new_tokens=20).tokens
    model.generation_config.eos_token_id = plain[3]
    assert TransformersSide(model, Setting("hf", side="transformers")).generate(PROMPTS[0], 20).tokens == plain


def test_lookup_drafts_the_same_in_both_stacks(sides: Sides) -> None:
    """So that they can be compared: the same tokens come round by round."""
    for prompt in PROMPTS:
        ours = sides.make(LOOKUP).generate(prompt, 24)
        theirs = sides.make(replace(LOOKUP, side="transformers")).generate(prompt, 24)
        assert [one.emitted for one in ours.rounds] == [one.emitted for one in theirs.rounds]
        assert ours.tokens == theirs.tokens


def test_transformers_is_stamped_once_a_forward(sides: Sides) -> None:
    """A second a read: begin 1, the prompt 2, tokens at 3, 4, 5, end 6."""
    model = sides._once("transformers", sides._load_transformers)
    answer = TransformersSide(model, Setting("hf", side="transformers"), clock=Ticks()).generate(PROMPTS[0], 3)
    assert (answer.seconds, answer.first_seconds, answer.rounds) == (5.0, 2.0, (RoundCounts(0, 0, 0, 1),) * 3)


class Listing:
    """A target that knows one text."""

    def generate(self, prompt: list[int], *, max_new_tokens: int, sampling: Any, stop: Any, seed: int) -> list[int]:
        return list(range(max_new_tokens))


def test_a_target_is_asked_for_one_token_to_know_when_the_first_comes() -> None:
    answer = TargetSide(Listing(), Setting("mine", side="target", drafter="own"), clock=Ticks()).generate([1], 4)
    assert answer == Answer(tokens=(0, 1, 2, 3), seconds=1.0, first_seconds=1.0)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (Setting("x", drafter="lokup", gamma=2), "unknown drafter 'lokup': did you mean lookup?"),
        (Setting("x", side="transformers", drafter="ngram", gamma=2), "transformers' drafter 'ngram' must be '' or"),
        (Setting("x", drafter="lookup", gamma=2, width=3), "'lookup' drafts chains: width = 3 must be 1"),
        (Setting("x", drafter="model", gamma=2), "needs a draft model of the same vocabulary: name one by --draft"),
    ],
    ids=["unknown", "transformers", "chain", "no draft model"],
)
def test_what_cannot_be_had_is_refused(setting: Setting, message: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=message):
        Sides(folder, torch.float32, longest=100).make(setting)


def test_a_draft_model_of_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    tiny_llama(replace(CONFIG, vocab_size=29), seed=0).to(torch.float32).save(tmp_path / "other")
    with pytest.raises(ValueError, match=r"has 29 tokens, must have 31 \(the target's vocabulary\)"):
        Sides(folder, torch.float32, longest=100, draft_model=str(tmp_path / "other")).make(
            Setting("m", drafter="model", gamma=2)
        )


def test_our_side_runs_lean_where_it_can(folder: Path) -> None:
    assert isinstance(load_own(str(folder), torch.float32), LeanLlama)


# The loop.


class Noting:
    """A side that notes its turns in a list that it shares with others."""

    def __init__(self, name: str, turns: list[tuple[str, tuple[int, ...], int]], *, fails_at: int = -1) -> None:
        self._name, self._turns, self._fails_at = name, turns, fails_at

    def generate(self, prompt: Sequence[int], num: int, *, seed: int = 0) -> Answer:
        if len(self._turns) == self._fails_at:
            raise KeyboardInterrupt
        self._turns.append((self._name, tuple(prompt), num))
        return Answer(tuple(range(num)), 2.0, 1.0)


def _noting(setting: Setting, **options: Any) -> Noting:
    return Noting(setting.name, **options)


def rows_in(tmp_path: Path, of: Plan, *, resume: bool = False) -> RowFile:
    return RowFile(tmp_path / "rows.jsonl", header_of(of.definition, command="x"), resume=resume)


NUMS = {one.id: 5 + idx for idx, one in enumerate(ITEMS)}


def test_settings_take_turns_on_each_prompt_after_a_warm_up(tmp_path: Path) -> None:
    turns: list[tuple[str, tuple[int, ...], int]] = []
    measure(plan(), lambda setting: Noting(setting.name, turns), NUMS, rows_in(tmp_path, plan()))
    expected = [("plain", ITEMS[0].tokens, 8), ("lookup", ITEMS[0].tokens, 8)]
    for item in ITEMS:
        expected += [(name, item.tokens, NUMS[item.id]) for name in ("plain", "lookup", "plain", "lookup")]
    assert turns == expected


def test_a_run_stopped_anywhere_goes_on_without_losing_or_repeating_a_row(tmp_path: Path) -> None:
    whole = 2 + 2 * 2 * len(ITEMS)
    for stop in range(2, whole):
        where = tmp_path / str(stop)
        make = partial(_noting, turns=[], fails_at=stop)
        with pytest.raises(KeyboardInterrupt):
            measure(plan(), make, NUMS, rows_in(where, plan()))
        measure(plan(), lambda setting: Noting(setting.name, []), NUMS, rows_in(where, plan(), resume=True))
        rows = read(where / "rows.jsonl").rows
        found = [(one.prompt, one.repetition, one.setting) for one in rows]
        assert found == [(item.id, repetition, setting.name) for item, repetition, setting in plan().turns()]
        assert len({one.key for one in rows}) == len(rows)


def test_an_answer_that_ends_at_once_is_not_timed(tmp_path: Path) -> None:
    file = rows_in(tmp_path, plan())
    measure(plan(), lambda setting: Noting(setting.name, []), NUMS | {"p1": 3}, file)
    assert {one.prompt for one in read(file.path).rows} == {"p0", "p2"}


def test_a_side_that_gives_another_number_of_tokens_ends_the_run(tmp_path: Path) -> None:
    class Short(Noting):
        def generate(self, prompt: Sequence[int], num: int, *, seed: int = 0) -> Answer:
            return super().generate(prompt, num - 1)

    with pytest.raises(RuntimeError, match="plain on prompt p0 gave 4 tokens, must give 5"):
        measure(plan(), lambda setting: Short(setting.name, []), NUMS, rows_in(tmp_path, plan()))


def test_a_side_that_raises_ends_the_run_in_a_sentence(tmp_path: Path) -> None:
    class Failing(Noting):
        def generate(self, prompt: Sequence[int], num: int, *, seed: int = 0) -> Answer:
            if self._name == "lookup" and num == NUMS["p1"]:
                raise IndexError("no row 7")
            return super().generate(prompt, num)

    file = rows_in(tmp_path, plan())
    with pytest.raises(RuntimeError, match="lookup on prompt p1 raised IndexError: no row 7"):
        measure(plan(), lambda setting: Failing(setting.name, []), NUMS, file)
    assert len(read(file.path).rows) == 5


def test_plain_texts_end_at_an_end_token_and_are_kept(tmp_path: Path, sides: Sides) -> None:
    decoder = Decoder(sides.model)
    full = decoder.generate(ITEMS[0].tokens, max_new_tokens=20).tokens
    file = rows_in(tmp_path, plan())
    found = plain_texts(plan(), decoder, [full[4]], file)
    assert found["p0"] == full[: full.index(full[4]) + 1]
    assert plain_texts(plan(), None, [], rows_in(tmp_path, plan(), resume=True)) == found


def test_rows_say_what_was_measured(tmp_path: Path, sides: Sides) -> None:
    file = rows_in(tmp_path, plan())
    measure(plan(), sides.make, NUMS, file)
    one = next(row for row in read(file.path).rows if row.setting == "lookup")
    assert (one.num_prompt, len(one.tokens), one.category) == (8, 5, "code")
    assert sum(each.emitted for each in one.rounds) == 5 and one.num_rows is not None
    assert 0 < one.first_seconds < one.seconds and one.phases is not None
    assert sum(one.phases[name] for name in ("draft", "verify", "commit")) <= one.phases["decode"]


def test_settings_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="settings and prompts must each have a name of their own"):
        plan((PLAIN, PLAIN))


# The gate.


def row(setting: Setting, item: Item, tokens: Sequence[int]) -> Row:
    return Row("k", setting.name, item.id, item.category, 0, len(item.tokens), tuple(tokens), 2.0, 1.0)


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, tuple[int, ...]]:
    decoder = Decoder(load_own(str(folder), torch.bfloat16))
    return {one.id: decoder.generate(one.tokens, max_new_tokens=60).tokens for one in ITEMS}


def judge(folder: Path, plain: dict[str, tuple[int, ...]]) -> Judge:
    return Judge(ITEMS, plain, oracle=lambda: Oracle(folder, weights=torch.bfloat16), dtype=torch.bfloat16)


def no_oracle() -> Oracle:
    raise AssertionError("nothing differs, so nothing is to be computed")


def test_the_same_tokens_are_equal_without_an_oracle(plain: dict[str, tuple[int, ...]]) -> None:
    rows = [row(LOOKUP, one, plain[one.id]) for one in ITEMS]
    found = Judge(ITEMS, plain, oracle=no_oracle, dtype=torch.bfloat16).judge(LOOKUP, rows, plain)
    assert found == Gate("lookup", "EQUAL", "all 180 tokens are plain decoding's", 3, 180, 3)


def test_a_token_that_is_no_tie_is_a_bug(folder: Path, plain: dict[str, tuple[int, ...]]) -> None:
    """Planted: the oracle's last choice in the middle of a text."""
    worst = int(Oracle(folder).rows(ITEMS[1].tokens, plain["p1"])[30].argmin())
    spoilt = [*plain["p1"][:30], worst, *plain["p1"][31:]]
    rows = [row(LOOKUP, ITEMS[0], plain["p0"]), row(LOOKUP, ITEMS[1], spoilt)]
    found = judge(folder, plain).judge(LOOKUP, rows, plain)
    assert (found.verdict, found.passed, found.num_equal) == ("BUG", False, 1)
    assert f"p1, token 30: {worst}, regret" in found.sentence


def test_plain_decoding_is_not_right_by_being_what_the_others_are_held_to(
    folder: Path, plain: dict[str, tuple[int, ...]]
) -> None:
    """Planted: a forward that says the worst token once. Drafts that are verified by it agree with it."""
    worst = int(Oracle(folder).rows(ITEMS[1].tokens, plain["p1"])[30].argmin())
    spoilt = plain | {"p1": (*plain["p1"][:30], worst, *plain["p1"][31:])}
    rows = [row(PLAIN, one, spoilt[one.id]) for one in ITEMS]
    assert judge(folder, plain).judge(PLAIN, rows, spoilt).verdict == "BUG"
    assert (
        judge(folder, plain).judge(PLAIN, [row(PLAIN, one, plain[one.id]) for one in ITEMS], plain).verdict == "EQUAL"
    )


def test_a_wrong_repetition_is_not_hidden_by_right_ones(folder: Path, plain: dict[str, tuple[int, ...]]) -> None:
    worst = int(Oracle(folder).rows(ITEMS[0].tokens, plain["p0"])[10].argmin())
    spoilt = [*plain["p0"][:10], worst, *plain["p0"][11:]]
    rows = [row(LOOKUP, ITEMS[0], tokens) for tokens in (plain["p0"], spoilt)]
    assert judge(folder, plain).judge(LOOKUP, rows, plain).verdict == "BUG"


def test_a_tie_is_noise_and_counted(folder: Path, plain: dict[str, tuple[int, ...]]) -> None:
    """Where the oracle's two best are nearest to each other, the second is taken and the text goes on from there."""
    oracle = Oracle(folder, weights=torch.bfloat16)
    places = [
        (place.margin, one, at, place)
        for one in ITEMS
        for at, place in enumerate(oracle.places(one.tokens, plain[one.id]))
    ]
    _, item, at, place = min(places, key=lambda found: found[0])
    other = place.second if plain[item.id][at] == place.best else place.best
    begun = [*plain[item.id][:at], other]
    decoder = Decoder(load_own(str(folder), torch.bfloat16))
    rest = decoder.generate([*item.tokens, *begun], max_new_tokens=60 - len(begun)).tokens
    found = judge(folder, plain).judge(LOOKUP, [row(LOOKUP, item, [*begun, *rest])], plain)
    assert (found.verdict, found.passed, found.num_equal) == ("NOISE", True, 0)


def test_a_sampled_setting_says_that_its_law_was_not_checked(plain: dict[str, tuple[int, ...]]) -> None:
    sampled = replace(LOOKUP, temperature=0.8)
    found = Judge(ITEMS, plain, oracle=no_oracle, dtype=torch.bfloat16).judge(
        sampled, [row(sampled, ITEMS[0], [1, 2])], plain
    )
    assert (found.verdict, found.sentence, found.law_checked, found.passed) == ("NOT TESTED", LAW, False, False)


def test_what_was_not_measured_is_not_tested(plain: dict[str, tuple[int, ...]]) -> None:
    found = Judge(ITEMS, plain, oracle=no_oracle, dtype=torch.bfloat16).judge(LOOKUP, [], plain)
    assert (found.verdict, found.passed) == ("NOT TESTED", False)


def test_what_stamps_cost_is_a_ratio_of_the_same_decoder_with_and_without() -> None:
    """What it is on a real model stands in docs/benchmarks.md."""
    found = overhead(tiny_llama(CONFIG, seed=5), [one * 2 for one in PROMPTS], num=12)
    assert found.n == len(PROMPTS) and found.low <= found.value <= found.high
