"""The reference decoder and its session: lossless whatever is drafted, honest records, exact stops, clear refusals."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from specbench.protocols import Drafter
from specbench.reference import autoregressive
from specbench.reference.decoder import Decoder
from specbench.reference.drafters.gumbel import GumbelDrafter
from specbench.reference.drafters.model import ModelDrafter, self_drafter
from specbench.reference.drafters.ngram import NGramDrafter
from specbench.reference.drafters.sampled import SampledDrafter
from specbench.reference.drafters.scripted import RoundScript, ScriptedDrafter
from specbench.reference.hf import HFModel
from specbench.reference.kv_cache import CACHES, QUANTISED, new_cache
from specbench.reference.layouts import LAYOUTS
from specbench.reference.model import LlamaConfig, LlamaModel, tiny_llama
from specbench.reference.session import TreeSession
from specbench.reference.steps import STEPS, emit
from specbench.reference.target import reference
from specbench.steps import Emission
from specbench.tree import DraftTree, chain, root_only
from specbench.types import NEVER_STOP, Generation, Request, Sampling, Stop, VerifyResult

CONFIG = LlamaConfig(
    vocab_size=13, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4
)
PROMPT = [3, 1, 4, 1, 5]
NUM_TOKENS = 24
# Rounded rows have an oracle of their own, see test_quantised_cache.py.
every_kind = pytest.mark.parametrize("kind", [kind for kind in CACHES if kind not in QUANTISED])
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@lru_cache
def model(seed: int = 0) -> LlamaModel:
    return tiny_llama(CONFIG, seed=seed)


@lru_cache
def plain(seed: int = 0, num_tokens: int = NUM_TOKENS, prompt: tuple[int, ...] = tuple(PROMPT)) -> tuple[int, ...]:
    return autoregressive.generate(model(seed), prompt, max_new_tokens=num_tokens).tokens


class RandomDrafter:
    """Random trees of 1 to 12 nodes over few tokens: duplicates, repeats across branches, mostly wrong."""

    def __init__(self, seed: int) -> None:
        self._generator = random.Random(seed)

    def draft(self, context, *, max_nodes, max_depth, sampling, coins):
        parents = [-1, *(self._generator.randrange(node) for node in range(1, self._generator.randint(1, 12)))]
        return DraftTree.of([context[-1], *(self._generator.randrange(13) for _ in parents[1:])], parents)


def scripted(seed: int, *scripts: RoundScript) -> ScriptedDrafter:
    return ScriptedDrafter([*PROMPT, *plain(seed, 48)], scripts, vocab_size=13)


def mixed_scripts(seed: int) -> ScriptedDrafter:
    """Acceptance of every kind in turn: none, full, partial, off the leftmost path."""
    shape, fillers = (-1, 0, 0, 1, 1, 2, 2, 6, 7), (0, 1, 1, 2, 3, 4, 5, 6, 7)
    return scripted(seed, *(RoundScript(fillers, shape, accept) for accept in (0, 8, 2, 4, 1, 6, 0, 5, 7, 3)))


DRAFTERS: dict[str, Callable[[int], Drafter | None]] = {
    "none": lambda seed: None,
    "scripted": mixed_scripts,
    "always-wrong": lambda seed: scripted(seed, RoundScript((0, 1, 2, 3, 1), (-1, 0, 0, 1, 0), 0)),
    "random": RandomDrafter,
    "ngram-chain": lambda seed: NGramDrafter(gamma=4, max_ngram=2),
    "ngram-tree": lambda seed: NGramDrafter(gamma=3, width=3, max_ngram=1),
    "self-chain": lambda seed: self_drafter(model(seed), widths=(1, 1, 1)),
    "self-tree": lambda seed: self_drafter(model(seed), widths=(2, 2)),
    "early-exit": lambda seed: self_drafter(model(seed), num_layers=1, widths=(2, 1)),
    "runner-up": lambda seed: ModelDrafter(model(seed), widths=(1, 1), first_ranks=(0, 1)),
    "another-model": lambda seed: ModelDrafter(model(seed + 100), widths=(3, 2)),
}
every_drafter = pytest.mark.parametrize("drafter", DRAFTERS)


@lru_cache
def decode(drafter: str, seed: int = 0, kind: str = "contiguous", layout: str = "tree_mask") -> Generation:
    steps = replace(STEPS, flatten=LAYOUTS[layout])
    decoder = Decoder(model(seed), DRAFTERS[drafter](seed), cache=kind, steps=steps)
    return decoder.generate(PROMPT, max_new_tokens=NUM_TOKENS)


# ---- lossless


@every_drafter
@every_kind
@every_layout
@pytest.mark.parametrize("seed", range(3))
def test_output_equals_plain_decoding(drafter, kind, layout, seed):
    generation = decode(drafter, seed, kind, layout)
    assert (generation.tokens, generation.finish_reason) == (plain(seed), "length")


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text"])
@every_layout
def test_output_equals_plain_decoding_on_transformers_models(name, layout):
    twin = HFModel.tiny(name, seed=0, dtype=torch.float64)
    expected = autoregressive.generate(twin, PROMPT, max_new_tokens=16)
    decoder = Decoder(
        twin, ModelDrafter(twin, widths=(2, 1), first_ranks=(0, 1)), steps=replace(STEPS, flatten=LAYOUTS[layout])
    )
    assert decoder.generate(PROMPT, max_new_tokens=16).tokens == expected.tokens


@pytest.mark.parametrize("prompt", [[0], [12], [5, 5], [7] * 9], ids=str)
@pytest.mark.parametrize("drafter", ["none", "ngram-tree", "self-tree", "random"])
def test_prompts_of_one_and_more_tokens_give_plain_output(drafter, prompt):
    generation = Decoder(model(), DRAFTERS[drafter](0)).generate(prompt, max_new_tokens=10)
    assert generation.tokens == plain(0, 10, tuple(prompt))


@every_drafter
def test_a_decoder_used_twice_gives_the_same_output(drafter):
    decoder = Decoder(model(), DRAFTERS[drafter](0))
    decoder.generate([9, 9, 2], max_new_tokens=7)
    assert decoder.generate(PROMPT, max_new_tokens=NUM_TOKENS).tokens == plain()


@every_layout
@every_kind
def test_the_cache_after_a_generation_is_that_of_a_plain_forward(kind, layout):
    decoder = Decoder(model(), mixed_scripts(0), cache=kind, steps=replace(STEPS, flatten=LAYOUTS[layout]))
    tokens = decoder.generate(PROMPT, max_new_tokens=NUM_TOKENS).tokens
    scores = autoregressive.prefix_scores(model(), [*PROMPT, *tokens][:-1])
    for layer, tap in enumerate(scores.layers):
        keys, values = decoder.kv(layer)
        assert (keys - tap.k).abs().max() < 1e-9 and (values - tap.v).abs().max() < 1e-9


# ---- records


@every_drafter
def test_emitted_tokens_of_the_rounds_make_the_output(drafter):
    generation = decode(drafter)
    assert tuple(token for one in generation.rounds for token in one.emitted) == generation.tokens


@every_drafter
def test_every_round_emits_at_least_one_token(drafter):
    assert min(len(one.emitted) for one in decode(drafter).rounds) >= 1


@every_drafter
def test_the_prefix_grows_by_what_was_emitted(drafter):
    """It starts with the prompt but its last token, which is the first root."""
    prefix_len = len(PROMPT) - 1
    for one in decode(drafter).rounds:
        assert one.prefix_len == prefix_len
        prefix_len += len(one.emitted)


@every_drafter
def test_every_root_is_the_token_emitted_last(drafter):
    root = PROMPT[-1]
    for one in decode(drafter).rounds:
        assert one.tokens[0] == root
        root = one.emitted[-1]


@every_drafter
def test_every_round_but_the_last_emits_its_path_and_its_bonus(drafter):
    for one in decode(drafter).rounds[:-1]:
        assert one.emitted == (*(one.tokens[node] for node in one.path), one.bonus_token)


@every_drafter
def test_a_tree_mask_forwards_one_row_a_node(drafter):
    assert all(one.num_rows == len(one.tokens) == len(one.parents) for one in decode(drafter).rounds)


@every_drafter
def test_a_batch_of_paths_forwards_the_rows_of_every_path(drafter):
    for one in decode(drafter, layout="path_batch").rounds:
        assert one.num_rows == sum(len(path) for path in DraftTree.of(one.tokens, one.parents).paths())


@every_layout
def test_memory_is_counted_by_rows(layout):
    """A mask entry takes one byte; a row takes 2 layers x (K and V) x 2 heads x 4 numbers x 8 bytes."""
    for one in decode("scripted", layout=layout).rounds:
        assert (one.mask_bytes, one.kv_bytes) == (one.num_rows**2, one.num_rows * 256)


def test_fully_rejected_drafts_still_emit_one_token_a_round():
    rounds = decode("always-wrong").rounds
    assert [len(one.emitted) for one in rounds] == [1] * NUM_TOKENS and not any(one.path for one in rounds)


def test_without_a_drafter_every_round_is_the_root_alone():
    assert all(one.tokens[1:] == () and one.num_rows == 1 for one in decode("none").rounds)


def test_fully_accepted_chains_emit_their_length_and_one_more():
    assert [len(one.emitted) for one in decode("self-chain").rounds] == [4] * 6


def test_mixed_scripts_accept_what_they_say():
    """Depths of nodes 0, 8, 2, 4, 1, 6, 0, 5, 7, 3."""
    depths = [0, 4, 1, 2, 1, 2, 0, 2, 3, 2]
    rounds = decode("scripted").rounds
    assert [len(one.path) for one in rounds[:-1]] == depths[: len(rounds) - 1] and len(rounds) > 8


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 9])
def test_no_draft_is_asked_for_deeper_than_the_tokens_that_remain(num_tokens):
    asked = []

    class Asking:
        def draft(self, context, *, max_nodes, max_depth, sampling, coins):
            asked.append((max_depth, len(context)))
            return root_only(context[-1])

    Decoder(model(), Asking(), max_depth=3).generate(PROMPT, max_new_tokens=num_tokens)
    assert asked == [
        (min(3, num_tokens - done - 1), len(PROMPT) + done) for done in range(num_tokens) if num_tokens - done > 1
    ]


def test_a_drafter_is_given_the_budgets_of_the_decoder():
    asked = []

    class Asking:
        def draft(self, context, **budgets):
            asked.append((budgets["max_nodes"], budgets["max_depth"], budgets["sampling"].temperature))
            return root_only(context[-1])

    Decoder(model(), Asking(), max_nodes=7, max_depth=3).generate(PROMPT, max_new_tokens=10)
    assert asked[0] == (7, 3, 0.0)


def test_a_drafter_that_scribbles_over_its_context_does_not_change_the_output():
    class Scribbling:
        def draft(self, context, **budgets):
            root = context[-1]
            context[:] = [0] * len(context)
            return chain([root, 1, 2])

    assert Decoder(model(), Scribbling()).generate(PROMPT, max_new_tokens=NUM_TOKENS).tokens == plain()


# ---- stopping


def cut(tokens: tuple[int, ...], max_new_tokens: int, eos: int | None) -> tuple[tuple[int, ...], str]:
    """What plain decoding, having said `tokens`, would have said under a stop rule."""
    tokens = tokens[:max_new_tokens]
    if eos in tokens:
        return tokens[: tokens.index(eos) + 1], "eos"
    return tokens, "length"


LONG_CHAIN = RoundScript((0,) * 6, tuple(range(-1, 5)), accept=5)
# An accepted chain of two behind a wrong sibling, and a wrong leaf below.
SIDE_BRANCH = RoundScript((0, 1, 0, 0, 2), (-1, 0, 0, 2, 2), accept=3)


@pytest.mark.parametrize("script", [LONG_CHAIN, SIDE_BRANCH], ids=["chain", "side-branch"])
@pytest.mark.parametrize("eos_idx", [None, *range(12)])
def test_a_stop_at_every_index_cuts_the_output_and_the_cache_there(script, eos_idx):
    """Every end token and every limit, inside accepted runs and between them. The last token is never cached."""
    eos = None if eos_idx is None else plain()[eos_idx]
    stop = NEVER_STOP if eos is None else Stop((eos,))
    for max_new_tokens in range(13):
        decoder = Decoder(model(), scripted(0, script))
        generation = decoder.generate(PROMPT, max_new_tokens=max_new_tokens, stop=stop)
        expected = cut(plain(), max_new_tokens, eos)
        assert (generation.tokens, generation.finish_reason) == expected, f"max_new_tokens = {max_new_tokens}"
        assert decoder.cache_len == len(PROMPT) + len(expected[0]) - 1, f"max_new_tokens = {max_new_tokens}"


def test_the_cache_after_a_stop_inside_an_accepted_path_is_that_of_a_plain_forward():
    stop = Stop((plain()[2],))
    decoder = Decoder(model(), scripted(0, LONG_CHAIN))
    tokens = decoder.generate(PROMPT, max_new_tokens=NUM_TOKENS, stop=stop).tokens
    tap = autoregressive.prefix_scores(model(), [*PROMPT, *tokens][:-1]).layers[1]
    keys, values = decoder.kv(1)
    assert (keys - tap.k).abs().max() < 1e-9 and (values - tap.v).abs().max() < 1e-9


def test_the_earliest_of_several_end_tokens_stops():
    stop = Stop((plain()[7], plain()[4]))
    generation = Decoder(model(), scripted(0, LONG_CHAIN)).generate(PROMPT, max_new_tokens=NUM_TOKENS, stop=stop)
    first = min(plain().index(token) for token in stop.eos_token_ids)
    assert (generation.tokens, generation.finish_reason) == (plain()[: first + 1], "eos")


def test_an_end_token_in_the_prompt_or_in_a_rejected_draft_does_not_stop():
    unused = next(token for token in range(13) if token not in plain())
    drafter = scripted(0, RoundScript((0, unused, unused), (-1, 0, 1), accept=0))
    generation = Decoder(model(), drafter).generate(PROMPT, max_new_tokens=NUM_TOKENS, stop=Stop((unused,)))
    assert (generation.tokens, generation.finish_reason) == (plain(), "length")


@pytest.mark.parametrize("stop", [NEVER_STOP, Stop((5,))])
def test_no_new_tokens_are_no_rounds(stop):
    decoder = Decoder(model(), NGramDrafter())
    assert decoder.generate(PROMPT, max_new_tokens=0, stop=stop) == Generation((), "length", ())
    assert decoder.cache_len == len(PROMPT) - 1


@pytest.mark.parametrize(
    ("num_remaining", "eos", "expected"),
    [
        (9, (), Emission((3, 5, 1, 8), None)),
        (4, (), Emission((3, 5, 1, 8), "length")),
        (3, (), Emission((3, 5, 1), "length")),
        (1, (), Emission((3,), "length")),
        (9, (3,), Emission((3,), "eos")),
        (9, (5, 1), Emission((3, 5), "eos")),
        (9, (8,), Emission((3, 5, 1, 8), "eos")),
        (4, (8,), Emission((3, 5, 1, 8), "eos")),
        (3, (8,), Emission((3, 5, 1), "length")),
        (9, (7, 9), Emission((3, 5, 1, 8), None)),
    ],
    ids=str,
)
def test_emission_is_cut_behind_the_first_end_token_and_at_the_limit(num_remaining, eos, expected):
    """Path 1-4-6 spells 3 5 1, the bonus is 8; 7 and 9 stand in the tree but off the path."""
    tree = DraftTree.of([7, 3, 9, 4, 5, 4, 1], [-1, 0, 0, 1, 1, 2, 4])
    assert emit(tree, VerifyResult((1, 4, 6), 8), stop=Stop(eos), num_remaining=num_remaining) == expected


# ---- refusals


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"prompt": []}, "prompt is empty: it must hold at least one token (the root of the first tree)"),
        ({"prompt": [3, 13]}, "prompt[1] = 13 must be >= 0 and < 13 (the vocabulary)"),
        ({"prompt": [-1]}, "prompt[0] = -1 must be >= 0 and < 13 (the vocabulary)"),
        ({"max_new_tokens": -1}, "max_new_tokens = -1 must be >= 0"),
        (
            {"sampling": Sampling(num_beams=4)},
            "num_beams = 4 must be 1: beam search ranks several texts at once, so there is no single plain-decoding "
            "output for a verified draft to equal",
        ),
    ],
    ids=["empty", "outside", "negative", "max_new_tokens", "beams"],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(call, message):
    arguments = {"prompt": PROMPT, "max_new_tokens": 3, **call}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Decoder(model()).generate(arguments.pop("prompt"), **arguments)


class Drafting:
    def __init__(self, tree: DraftTree) -> None:
        self._tree = tree

    def draft(self, context, **budgets):
        return self._tree


def test_a_draft_below_another_root_is_refused():
    with pytest.raises(ValueError, match=r"^draft tree has root token 4, must be 5 \(last of the context\)$"):
        Decoder(model(), Drafting(chain([4, 1]))).generate(PROMPT, max_new_tokens=3)


def test_a_drafted_token_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match=r"^tree\.tokens\[1\] = 13 must be >= 0 and < 13 \(the vocabulary\)$"):
        Decoder(model(), Drafting(chain([5, 13]))).generate(PROMPT, max_new_tokens=3)


def test_verify_is_the_greedy_walk_at_temperature_zero():
    assert Decoder(model()).verify(chain([5, 1]), torch.eye(13)[[1, 2]]) == VerifyResult((1,), 2)


def test_verify_has_to_be_given_coins_where_there_is_a_draw_to_make():
    with pytest.raises(ValueError, match=r"^coins = None must be given at temperature 1\.0: there is a draw to make$"):
        Decoder(model()).verify(chain([5, 1]), torch.eye(13)[[1, 2]], sampling=Sampling(temperature=1.0))


def test_a_draft_is_refused_above_temperature_zero_where_its_coin_says_so():
    """Row 0 gives token 1 exp(1) / (exp(1) + 12) = 0.185: a coin below keeps it, one above goes on without it."""
    logits, sampling = torch.eye(13, dtype=torch.float64)[[1, 2]], Sampling(temperature=1.0)

    class Coins:
        def __init__(self, *uniforms):
            self.uniforms = list(uniforms)

        def uniform(self, num):
            return torch.tensor([self.uniforms.pop(0) for _ in range(num)], dtype=torch.float64)

    kept = Decoder(model()).verify(chain([5, 1]), logits, sampling=sampling, coins=Coins(0.18, 0.0))
    refused = Decoder(model()).verify(chain([5, 1]), logits, sampling=sampling, coins=Coins(0.19, 0.1))
    assert (kept, refused) == (VerifyResult((1,), 0), VerifyResult((), 2))


@pytest.mark.parametrize("rule", ["recursive", "k_seq", "traversal", "sample_and_match"])
def test_the_decoder_samples_by_any_rule_and_the_seed_decides(rule):
    sampling = Sampling(temperature=1.0)
    decoder = Decoder(model(), SampledDrafter(model(), widths=(2, 1))).with_rule(rule)
    texts = [decoder.generate(PROMPT, max_new_tokens=6, sampling=sampling, seed=seed).tokens for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1] and len({*texts}) > 1


def test_gumbel_coupling_says_the_same_with_any_drafter_and_with_none():
    """The only sampling rule whose output can be compared token by token."""
    sampling, plain = Sampling(temperature=1.0), Decoder(model()).with_rule("gumbel")
    drafting = plain.with_drafter(GumbelDrafter(model(), gamma=3))
    right = plain.generate(PROMPT, max_new_tokens=12, sampling=sampling, seed=5)
    found = drafting.generate(PROMPT, max_new_tokens=12, sampling=sampling, seed=5)
    assert (found.tokens, len(found.rounds) < len(right.rounds)) == (right.tokens, True)


def test_a_sampled_batch_gives_each_row_what_it_gives_alone():
    sampling = Sampling(temperature=0.8, top_k=6)
    requests = [
        Request((3, 1), 5, sampling=sampling, seed=1),
        Request((2, 4, 6), 7, seed=2),
        Request((3, 1), 6, sampling, seed=3),
    ]
    decoder = Decoder(model())
    alone = [
        decoder.generate(one.prompt, max_new_tokens=one.max_new_tokens, sampling=one.sampling, seed=one.seed).tokens
        for one in requests
    ]
    assert [one.tokens for one in decoder.generate_batch(requests)] == alone


# ---- threshold


@pytest.mark.parametrize("threshold", [0.5, 0.8, 1.0])
def test_a_threshold_of_one_half_or_more_loses_nothing(threshold):
    decoder = Decoder(model(), DRAFTERS["self-tree"](0)).with_threshold(threshold)
    assert decoder.generate(PROMPT, max_new_tokens=NUM_TOKENS).tokens == plain()


def test_a_threshold_of_zero_emits_what_was_drafted():
    drafter = ModelDrafter(model(), widths=(1, 1), first_ranks=(1,))
    lossy = Decoder(model(), drafter).with_threshold(0.0).generate(PROMPT, max_new_tokens=NUM_TOKENS)
    assert lossy.tokens != plain() and {len(one.path) for one in lossy.rounds[:-1]} == {2}


def test_with_threshold_leaves_the_decoder_lossless():
    decoder = Decoder(model(), ModelDrafter(model(), widths=(1, 1), first_ranks=(1,)))
    decoder.with_threshold(0.0).generate(PROMPT, max_new_tokens=5)
    assert decoder.generate(PROMPT, max_new_tokens=NUM_TOKENS).tokens == plain()


def test_with_threshold_keeps_cache_layout_and_budgets():
    steps = replace(STEPS, flatten=LAYOUTS["path_batch"])
    drafter = self_drafter(model(), widths=(2, 2, 2))
    decoder = Decoder(model(), drafter, steps=steps, cache="preallocated", max_nodes=5, max_depth=2)
    lossy = decoder.with_threshold(0.5)
    round_ = lossy.generate(PROMPT, max_new_tokens=9).rounds[0]
    assert len(round_.tokens) == 6 and round_.num_rows > 6  # five drafts; paths repeat the root
    assert type(lossy._cache) is CACHES["preallocated"]


# ---- session


def session(cached: list[int] = PROMPT, **options: object) -> TreeSession:
    one = TreeSession(model(), **options)
    one.prefill(cached)
    return one


TREE = DraftTree.of([7, 3, 9, 4, 5, 4, 1], [-1, 0, 0, 1, 1, 2, 4])


def assert_caches(one: TreeSession, tokens: list[int]) -> None:
    assert one.cache_len == len(tokens)
    for layer, tap in enumerate(autoregressive.prefix_scores(model(), tokens).layers):
        keys, values = one.kv(layer)
        assert (keys - tap.k).abs().max() < 1e-9 and (values - tap.v).abs().max() < 1e-9


def test_a_new_session_has_cached_nothing():
    assert (TreeSession(model()).cache_len, TreeSession(model()).last_flat) == (0, None)


def test_prefill_caches_its_tokens():
    assert_caches(session(PROMPT), PROMPT)


def test_prefill_drops_whatever_was_cached():
    one = session([9, 9, 9, 9, 9, 9, 9])
    one.forward_tree(TREE)
    one.prefill([3, 1])
    assert_caches(one, [3, 1])


def test_prefill_of_nothing_empties_the_cache():
    one = session(PROMPT)
    one.prefill([])
    assert one.cache_len == 0
    assert (one.forward_tree(chain([3, 1])) - model().logits([3, 1])).abs().max() < 1e-9


def test_prefill_in_chunks_equals_prefill_at_once():
    one = session(PROMPT[:2])
    one.extend(PROMPT[2:3])
    one.extend([])
    one.extend(PROMPT[3:])
    assert_caches(one, PROMPT)


@every_kind
@every_layout
def test_node_logits_are_those_of_plain_forwards(kind, layout):
    one = session(cache=kind, steps=replace(STEPS, flatten=LAYOUTS[layout]))
    expected = autoregressive.score_tree_naive(model(), PROMPT, TREE).logits
    assert (one.forward_tree(TREE) - expected).abs().max() < 1e-9


@every_kind
@every_layout
@pytest.mark.parametrize("path", [[], [1], [2], [1, 3], [1, 4], [1, 4, 6], [2, 5]], ids=str)
def test_a_commit_caches_the_root_and_the_path(kind, layout, path):
    one = session(cache=kind, steps=replace(STEPS, flatten=LAYOUTS[layout]))
    one.forward_tree(TREE)
    one.commit(path)
    assert_caches(one, [*PROMPT, 7, *(TREE.token_list[node] for node in path)])


@every_kind
@every_layout
def test_rounds_after_commits_of_any_path_see_the_committed_text(kind, layout):
    one = session(cache=kind, steps=replace(STEPS, flatten=LAYOUTS[layout]))
    text = list(PROMPT)
    for path in ([1, 4, 6], [], [2, 5], [1, 3], [2], [1, 4]):
        expected = autoregressive.score_tree_naive(model(), text, TREE).logits
        assert (one.forward_tree(TREE) - expected).abs().max() < 1e-9
        one.commit(path)
        text += [7, *(TREE.token_list[node] for node in path)]
    assert_caches(one, text)


def test_an_uncommitted_forward_does_not_count():
    one = session()
    one.forward_tree(TREE)
    assert_caches(one, PROMPT)


@every_kind
def test_a_second_forward_replaces_an_uncommitted_one(kind):
    one = session(cache=kind)
    one.forward_tree(DraftTree.of([9, 9, 9, 9], [-1, 0, 1, 2]))
    expected = autoregressive.score_tree_naive(model(), PROMPT, TREE).logits
    assert (one.forward_tree(TREE) - expected).abs().max() < 1e-9
    one.commit([2, 5])
    assert_caches(one, [*PROMPT, 7, 9, 4])


def test_a_commit_without_a_forward_is_refused():
    with pytest.raises(ValueError, match=r"^commit\(\) without a forward: call forward_tree\(tree\) first$"):
        session().commit([])


@pytest.mark.parametrize(
    "after", [lambda one: one.commit([]), lambda one: one.truncate(5), lambda one: one.extend([1])]
)
def test_a_forward_can_be_committed_only_once_and_not_after_a_change(after):
    one = session()
    one.forward_tree(TREE)
    after(one)
    with pytest.raises(ValueError, match=r"^commit\(\) without"):
        one.commit([])


@pytest.mark.parametrize("path", [[0], [3], [1, 5], [4, 1], [7], [-1]], ids=str)
def test_a_commit_of_no_path_is_refused_and_may_be_repeated_rightly(path):
    one = session()
    one.forward_tree(TREE)
    message = f"path = {path} must run from a child of the root downwards, parent to child"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        one.commit(path)
    one.commit([1])
    assert_caches(one, [*PROMPT, 7, 3])


@every_kind
@pytest.mark.parametrize("length", range(6))
def test_truncate_keeps_the_first_committed_rows(kind, length):
    one = session(cache=kind)
    one.forward_tree(TREE)
    one.truncate(length)
    expected = autoregressive.score_tree_naive(model(), PROMPT[:length], TREE).logits
    assert one.cache_len == length and (one.forward_tree(TREE) - expected).abs().max() < 1e-9


@pytest.mark.parametrize("length", [-1, 6, 7])
def test_a_truncation_beyond_the_committed_rows_is_refused(length):
    """Seven rows of an uncommitted forward lie behind the five committed ones and do not count."""
    one = session()
    one.forward_tree(TREE)
    with pytest.raises(ValueError, match=f"^length = {length} must be between 0 and the committed length 5$"):
        one.truncate(length)


@pytest.mark.parametrize("call", ["prefill", "logits", "extend"])
def test_tokens_outside_the_vocabulary_are_refused_before_the_model_sees_them(call):
    one = session()
    with pytest.raises(ValueError, match=r"^tokens\[1\] = 13 must be >= 0 and < 13 \(the vocabulary\)$"):
        getattr(one, call)([1, 13])
    assert_caches(one, PROMPT)


@every_kind
def test_a_forward_that_fails_half_way_leaves_the_committed_rows(kind):
    """Layer 0 has appended its rows when layer 1 raises."""

    class Failing:
        def __getattr__(self, name):
            return getattr(model(), name)

        def forward(self, flat, cache, *, taps=None):
            cache.append(0, *(one.repeat(1, 3, 1)[:, :3] for one in cache.rows(0)))
            raise RuntimeError("out of memory")

    one = session(cache=kind)
    one.model = Failing()
    with pytest.raises(RuntimeError, match="out of memory"):
        one.forward_tree(TREE)
    one.model = model()
    expected = autoregressive.score_tree_naive(model(), PROMPT, TREE).logits
    assert (one.forward_tree(TREE) - expected).abs().max() < 1e-9
    one.commit([1])
    assert_caches(one, [*PROMPT, 7, 3])


def test_logits_do_not_touch_the_cache():
    one = session()
    assert torch.equal(one.logits([1, 2, 3]), model().logits([1, 2, 3]))
    assert_caches(one, PROMPT)


def test_kv_bytes_count_rows_over_all_layers():
    assert session().kv_bytes(3) == 3 * 2 * 2 * 2 * 4 * 8


# ---- target


@every_layout
@every_kind
def test_the_reference_target_builds_the_decoder_it_names(layout, kind):
    decoder = reference().build(model(), NGramDrafter(), cache=kind, layout=layout)
    named = new_cache(kind, model().cache_spec)
    assert decoder.steps.flatten is LAYOUTS[layout]
    assert (type(decoder._cache), decoder.page_size) == (type(named), named.page_size)
    assert decoder.generate(PROMPT, max_new_tokens=NUM_TOKENS).tokens == plain()
