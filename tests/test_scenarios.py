"""The scenario bank: small scripted runs in which real decoders broke, each named after what it proves.

Scripted drafts are right exactly as far as the script says; after every round tokens, acceptance and every cached key
and value are compared with plain decoding. Planted faults must break each scenario, or it would prove nothing.
Batches (S4), exact laws (S5), drafters (S13, S14) have files of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from specbench.counting import CountingModel
from specbench.protocols import SeededCoins
from specbench.reference import autoregressive
from specbench.reference.decoder import Decoder
from specbench.reference.drafters.scripted import RoundScript, ScriptedDrafter
from specbench.reference.faults.bank import FAULTS
from specbench.reference.model import LlamaConfig, LlamaModel, tiny_llama
from specbench.reference.recurrent import Recurrence, tiny_hybrid
from specbench.reference.target import ReferenceTarget
from specbench.tree import DraftTree, root_only
from specbench.types import GREEDY, NEVER_STOP, Automaton, Sampling, Stop

CONFIG = LlamaConfig(31, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
MODEL = tiny_llama(CONFIG, seed=0)
PROMPT = (3, 1, 4, 1, 5)
KINDS = ("contiguous", "preallocated", "paged_1", "paged_4", "paged_16", "ring")
# 2-3-2 below the root: two children, three each, two each; 19 is drafted in two branches.
TREE = (-1, 0, 0, 1, 1, 1, 2, 2, 2, *(node for node in range(3, 9) for _ in range(2)))
TOKENS = (0, 7, 8, 19, 10, 11, 12, 19, 14, *range(15, 27))


class Run:
    """A scripted generation on a target, checked after every round."""

    def __init__(
        self,
        target: Any,
        scripts: Sequence[RoundScript],
        *,
        model: LlamaModel = MODEL,
        prompt: Sequence[int] = PROMPT,
        **place: str,
    ) -> None:
        num_tokens = sum(_depth(one) for one in scripts) + 2 * len(scripts) + 4
        plain = autoregressive.generate(model, prompt, max_new_tokens=num_tokens).tokens
        self.model, self.expected = model, [*prompt, *plain]
        self.context, self.num_prompt = list(prompt), len(prompt)
        drafter = ScriptedDrafter(self.expected, scripts, vocab_size=model.vocab_size)
        self.decoder: Decoder = target.build(model, drafter, **place)
        self.decoder.prefill(prompt[:-1])

    def round(self) -> int:
        """How many drafts were accepted."""
        one, _ = self.decoder.round(
            self.context,
            num_prompt=self.num_prompt,
            num_remaining=1000,
            sampling=GREEDY,
            stop=NEVER_STOP,
            coins=SeededCoins(0),
        )
        self.context += one.emitted
        assert self.context == self.expected[: len(self.context)]
        self.check_cache()
        return len(one.path)

    def plain_step(self) -> None:
        logits = self.decoder.forward_tree(root_only(self.context[-1]))
        self.decoder.commit([])
        self.context.append(int(logits[0].argmax()))
        assert self.context == self.expected[: len(self.context)]
        self.check_cache()

    def check_cache(self) -> None:
        assert_cached(self.decoder, self.model, self.context[:-1])


def assert_cached(session: Any, model: LlamaModel, tokens: Sequence[int]) -> None:
    """Keys and values of every layer are those of plain decoding over `tokens`; a window may show its last rows."""
    assert session.cache_len == len(tokens)
    if not tokens:
        return
    for layer, right in enumerate(autoregressive.prefix_scores(model, tokens).layers):
        for actual, expected in zip(session.kv(layer), (right.k, right.v), strict=True):
            window = model.layer_windows[layer]
            assert actual.shape[1] >= (len(tokens) if window is None else min(len(tokens), window - 1))
            assert torch.allclose(actual, expected[:, expected.shape[1] - actual.shape[1] :], rtol=0, atol=1e-9)


def _depth(script: RoundScript) -> int:
    return len(DraftTree.of(script.tokens, script.parents).path_to(script.accept)) - 1


def run_all(target: Any, scripts: Sequence[RoundScript], **more: Any) -> None:
    run = Run(target, scripts, **more)
    accepted = [run.round() for _ in scripts]
    assert accepted == [_depth(one) for one in scripts]


def chain(num_drafts: int, accept: int) -> RoundScript:
    return RoundScript(tuple(range(20, 21 + num_drafts)), tuple(range(-1, num_drafts)), accept)


def s1(target: Any) -> None:
    leaves = [node for node in range(len(TREE)) if node not in TREE]
    for leaf in leaves:
        run_all(
            target, [RoundScript(TOKENS, TREE, leaf), RoundScript(TOKENS, TREE, 0), RoundScript(TOKENS, TREE, leaf)]
        )


def s2(target: Any) -> None:
    """A pattern says for each drafted position whether it matches: what comes first and fails ends the run."""
    for pattern in itertools.product([True, False], repeat=3):
        accept = next((idx for idx, fits in enumerate(pattern) if not fits), 3)
        run_all(target, [chain(3, accept)] * 3)


def s3(target: Any) -> None:
    for cache in KINDS:
        scripts = [chain(3, accept) for accept in (0, 3, 1, 0, 3, 2)]
        run = Run(target, [*scripts, chain(3, 2)], cache=cache)
        assert [run.round() for _ in scripts] == [0, 3, 1, 0, 3, 2]
        run.plain_step()
        assert run.round() == 2


def s6(target: Any) -> None:
    for num_kv_heads in (1, 2, 3, 6):
        config = replace(CONFIG, hidden_size=24, num_heads=6, num_kv_heads=num_kv_heads, head_dim=4)
        scripts = [RoundScript(TOKENS, TREE, len(TREE) - 1), RoundScript(TOKENS, TREE, 4)]
        run_all(target, scripts, model=tiny_llama(config, seed=num_kv_heads))


def s7(target: Any) -> None:
    for window in (3, len(PROMPT) - 1, len(PROMPT), len(PROMPT) + 1):
        for windows in ((window, window), (window, None)):
            model = tiny_llama(replace(CONFIG, windows=windows), seed=1)
            for cache in ("ring", "contiguous"):
                accepts = (len(TREE) - 1, 0, 5, 0, len(TREE) - 2)
                run = Run(target, [RoundScript(TOKENS, TREE, one) for one in accepts], model=model, cache=cache)
                for _ in accepts:
                    run.round()
                run.decoder.truncate(len(PROMPT))  # far behind what the ring still holds
                assert_cached(run.decoder, model, run.context[: len(PROMPT)])


def s8(target: Any) -> None:
    for size in (1, 4, 16):
        for length in (size - 1, size, size + 1):
            text = [*range(2, 22)]
            session = target.build(MODEL, None, cache=f"paged_{size}")
            session.prefill(text[:18])
            session.truncate(length)
            assert_cached(session, MODEL, text[:length])
            assert session.pages_in_use == -(-length // size)
            for script in (RoundScript(TOKENS, TREE, len(TREE) - 1), RoundScript(TOKENS, TREE, 5)):
                tree = DraftTree.of((text[length], *script.tokens[1:]), script.parents)
                session.forward_tree(tree)
                session.commit(tree.path_to(script.accept)[1:])
                committed = [*text[:length], *tree.path_tokens(script.accept)]
                assert_cached(session, MODEL, committed)
                text, length = [*committed, 1], len(committed)


def s9(target: Any) -> None:
    config = replace(CONFIG, num_layers=3, hidden_size=24, num_heads=6, head_dim=4)
    model = tiny_hybrid(config, Recurrence(layers=(0, 2)), seed=3)
    for first, second in itertools.product(range(4), repeat=2):  # two rollbacks in a row, every accept length
        run_all(target, [chain(3, first), chain(3, second), RoundScript(TOKENS, TREE, len(TREE) - 1)], model=model)


def s10(target: Any) -> None:
    """A count penalty, a least length and a grammar whose siblings lead to different states."""
    plain = autoregressive.generate(MODEL, PROMPT, max_new_tokens=12).tokens
    grammar = Automaton((((plain[0], 1), (7, 2), (8, 0)), ((9, 0), (7, 2)), ((8, 1), (9, 0), (10, 2))))
    samplings = (
        Sampling(frequency_penalty=2.0),
        Sampling(presence_penalty=1.0, repetition_penalty=1.5),
        Sampling(grammar=grammar),
    )
    for sampling, min_new_tokens in itertools.product(samplings, (0, 4)):
        stop = Stop((plain[1],), min_new_tokens=min_new_tokens)
        expected = autoregressive.generate(MODEL, PROMPT, max_new_tokens=12, sampling=sampling, stop=stop)
        text = autoregressive.generate(MODEL, PROMPT, max_new_tokens=15, sampling=sampling, stop=stop, past_stop=True)
        scripts = [RoundScript(TOKENS, TREE, accept) for accept in (4, 0, len(TREE) - 1, 13)]
        drafter = ScriptedDrafter([*PROMPT, *text.tokens], scripts, vocab_size=31)
        out = target.build(MODEL, drafter).generate(PROMPT, max_new_tokens=12, sampling=sampling, stop=stop, seed=0)
        assert (out.tokens, out.finish_reason) == (expected.tokens, expected.finish_reason)


def s11(target: Any) -> None:
    """End token and stop sequence at every index, the limit at every index, and a turn afterwards."""
    plain = autoregressive.generate(MODEL, PROMPT, max_new_tokens=6).tokens
    stops = [NEVER_STOP, *(Stop((token,)) for token in plain)]
    stops += [Stop(stop_sequences=(plain[idx : idx + 2],)) for idx in range(5)]
    scripts = [chain(4, 4), chain(2, 1)]
    for stop, limit in itertools.product(stops, range(1, 7)):
        first = autoregressive.generate(MODEL, PROMPT, max_new_tokens=limit, stop=stop)
        text = (*PROMPT, *first.tokens, 9)
        second = autoregressive.generate(MODEL, text, max_new_tokens=3)
        expected = [*PROMPT, *autoregressive.generate(MODEL, PROMPT, max_new_tokens=10).tokens]
        session = target.build(MODEL, ScriptedDrafter(expected, scripts, vocab_size=31)).session()
        out = session.generate(PROMPT, max_new_tokens=limit, sampling=GREEDY, stop=stop, seed=0)
        assert (out.tokens, out.finish_reason) == (first.tokens, first.finish_reason)
        again = session.generate((9,), max_new_tokens=3, sampling=GREEDY, stop=NEVER_STOP, seed=0)
        assert again.tokens == second.tokens


def s12(target: Any) -> None:
    """Everything dead is NaN before each forward; rounds are aborted at each point at which they can be."""
    for cache in KINDS:
        run = Run(target, [RoundScript(TOKENS, TREE, accept) for accept in (4, 0, len(TREE) - 1)], cache=cache)
        for _ in range(3):
            run.decoder.poison(torch.nan)
            run.decoder.forward_tree(DraftTree.of((run.context[-1], 1, 2), (-1, 0, 0)))
            run.decoder.abort()
            run.check_cache()
            run.decoder.poison(torch.nan)
            run.round()


def s15(target: Any) -> None:
    """Cold, behind a kept prefix, in pieces, and after a preemption: the same cache and the same next logits."""
    text = [*range(1, 20)]
    tree = DraftTree.of((text[-1], *TOKENS[1:]), TREE)
    right = autoregressive.score_tree(MODEL, text[:-1], tree).logits
    for kind in KINDS:
        for keep, pieces in itertools.product((0, 3, 4, 5, 16, 18), ([18], [1, 17], [4, 4, 10])):
            session = target.build(MODEL, None, cache=kind)
            session.prefill([*text[:keep], 30, 29, 28])
            session.forward_tree(tree)  # preempted here
            session.truncate(keep)
            start = keep
            for length in pieces:
                session.extend(text[start : min(start + length, 18)])
                start = min(start + length, 18)
            assert_cached(session, MODEL, text[:-1])
            assert torch.allclose(session.forward_tree(tree), right, rtol=0, atol=1e-9)


def s16(target: Any) -> None:
    """A hundred rounds, with the rows that were forwarded and the pages that are held counted."""
    model = CountingModel(MODEL)
    scripts = [chain(3, accept) for accept in (0, 3, 1, 0, 2)]
    plain = autoregressive.generate(MODEL, PROMPT, max_new_tokens=230).tokens
    drafter = ScriptedDrafter([*PROMPT, *plain], scripts, vocab_size=31)
    decoder = target.build(model, drafter, cache="paged_4")
    decoder.prefill(PROMPT[:-1])
    context = list(PROMPT)
    for _ in range(100):
        one, _ = decoder.round(
            context, num_prompt=len(PROMPT), num_remaining=1000, sampling=GREEDY, stop=NEVER_STOP, coins=SeededCoins(0)
        )
        context += one.emitted
        assert decoder.pages_in_use == -(-(len(context) - 1) // 4)
    assert context == [*PROMPT, *plain][: len(context)]
    assert len(context) == len(PROMPT) + 20 * (5 + 6)  # five corrections and six accepted drafts in every five rounds
    assert sum(model.rows) == len(PROMPT) - 1 + 100 * 4
    decoder.reset()
    assert decoder.pages_in_use == 0


SCENARIOS: dict[str, Callable[[Any], None]] = {
    "S1 every leaf of a 2-3-2 tree is accepted in turn and two more rounds stay right": s1,
    "S2 every match pattern of a chain of three over three rounds": s2,
    "S3 accept lengths 0 K 1 0 K 2 then a plain step then drafts again": s3,
    "S6 grouped heads read their own keys at every grouping": s6,
    "S7 a window around the prompt length slides by position and is restored after a rejection": s7,
    "S8 scattered pages of 1, 4 and 16 rows survive a rewind to either side of a page edge": s8,
    "S9 recurrent state is that of the accepted path after two rollbacks in a row": s9,
    "S10 penalties, least length and grammar follow each row's own path": s10,
    "S11 an end at every index with a limit at every index, and a turn afterwards": s11,
    "S12 nothing dead is read and an aborted round leaves no trace": s12,
    "S15 cold, warm, chunked and preempted prompts end in the same cache": s15,
    "S16 a hundred rounds leak no page and forward no row twice": s16,
}

# What each scenario must break on.
KILLS = {
    "S1": ["sibling_leak", "cousin_leak", "missing_ancestor", "index_position", "first_rows", "bonus_row"],
    "S2": ["own_row", "first_unverified", "future_leak"],
    "S3": ["no_rollback", "base_not_advanced"],
    "S6": ["values_not_moved"],
    "S7": ["siblings_share_a_slot", "ring_never_restored"],
    "S8": ["next_slot", "freed_page_kept", "page_leak"],
    "S9": ["state_after_block", "state_one_behind"],
    "S10": ["penalty_committed_only", "penalty_path_twice", "grammar_in_memory_order", "least_length_by_round"],
    "S11": ["eos_mid_path", "limit_before_end", "stop_sequence_at_end", "committed_past_stop"],
    "S12": ["dead_row_times_zero", "abort_forgets_only"],
    "S15": ["chunks_from_zero"],
    "S16": ["no_rollback", "encoded_twice"],
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str) -> None:
    SCENARIOS[name](ReferenceTarget())


@pytest.mark.parametrize(("scenario", "fault"), [(one, fault) for one, faults in KILLS.items() for fault in faults])
def test_a_scenario_breaks_on_the_faults_it_is_there_for(scenario: str, fault: str) -> None:
    play = next(play for name, play in SCENARIOS.items() if name.split()[0] == scenario)
    with pytest.raises((AssertionError, ValueError)):
        play(FAULTS[fault].make())
