"""Drafters: what they propose by hand, what they may not exceed, and that no stale state survives a rejection."""

from __future__ import annotations

import random
import re

import pytest
import torch

from specbench.protocols import SeededCoins
from specbench.reference import autoregressive
from specbench.reference.decoder import Decoder
from specbench.reference.drafters.best_first import BestFirstDrafter
from specbench.reference.drafters.caching import CachingDrafter
from specbench.reference.drafters.model import ModelDrafter, self_drafter
from specbench.reference.drafters.ngram import NGramDrafter
from specbench.reference.drafters.sampled import SampledDrafter
from specbench.reference.drafters.scripted import RoundScript, ScriptedDrafter, play
from specbench.reference.drafters.suffix import SuffixAutomaton, SuffixDrafter
from specbench.reference.drafters.trie import TrieBuilder
from specbench.reference.model import LlamaConfig, LlamaModel, tiny_llama
from specbench.reference.verify.chance import inverse_cdf
from specbench.tree import DraftTree, chain, root_only
from specbench.types import GREEDY, Sampling, VerifyResult

CONFIG = LlamaConfig(
    vocab_size=13, hidden_size=16, intermediate_size=24, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4
)
MODEL = tiny_llama(CONFIG, seed=0)
PROMPT = [3, 1, 4, 1, 5]


def draft(drafter, context: list[int], *, max_nodes: int = 64, max_depth: int = 16) -> DraftTree:
    return drafter.draft(context, max_nodes=max_nodes, max_depth=max_depth, sampling=GREEDY, coins=SeededCoins(0))


def plain(model: LlamaModel, prompt: list[int], num_tokens: int) -> list[int]:
    return list(autoregressive.generate(model, prompt, max_new_tokens=num_tokens).tokens)


def has_duplicate_siblings(tree: DraftTree) -> bool:
    return any(
        len({tree.token_list[child] for child in tree.children(node)}) < len(tree.children(node))
        for node in range(tree.num_nodes)
    )


# ---- trie


def test_a_trie_shares_common_beginnings():
    trie = TrieBuilder(9, max_nodes=10)
    trie.add([1, 2, 3])
    trie.add([1, 2, 4])
    trie.add([5])
    assert trie.tree() == DraftTree.of([9, 1, 2, 3, 4, 5], [-1, 0, 1, 2, 2, 0])


def test_a_trie_without_drafts_is_its_root():
    assert TrieBuilder(9, max_nodes=10).tree() == root_only(9)


def test_a_trie_finds_a_child_it_has_already_made():
    trie = TrieBuilder(9, max_nodes=10)
    assert [trie.child(0, 4), trie.child(1, 4), trie.child(0, 4)] == [1, 2, 1]


@pytest.mark.parametrize("max_nodes", range(6))
def test_a_trie_holds_at_most_its_budget_of_drafts_and_the_root(max_nodes):
    trie = TrieBuilder(9, max_nodes=max_nodes)
    trie.add([1, 2])
    trie.add([1, 3, 4, 5])
    expected = DraftTree.of([9, 1, 2, 3, 4, 5], [-1, 0, 1, 1, 3, 4])
    assert trie.tree() == DraftTree.of(expected.token_list[: max_nodes + 1], expected.parent_list[: max_nodes + 1])


def test_a_full_trie_still_finds_what_it_holds():
    trie = TrieBuilder(9, max_nodes=1)
    trie.add([1])
    assert (trie.child(0, 1), trie.child(0, 2)) == (1, None)


# ---- n-gram lookup


def test_what_followed_the_last_occurrence_is_proposed():
    """... 7 8 5 6 ... 7 8: the tail 7 8 was followed by 5 6 1."""
    assert draft(NGramDrafter(gamma=3), [7, 8, 5, 6, 1, 7, 8]) == chain([8, 5, 6, 1])


def test_a_proposal_may_run_into_the_tail_itself():
    assert draft(NGramDrafter(gamma=8), [7, 8, 5, 7, 8]) == chain([8, 5, 7, 8])


def test_the_longest_ngram_is_asked_first():
    """8 alone was last followed by 2, but 7 8 by 5."""
    assert draft(NGramDrafter(gamma=1), [7, 8, 5, 8, 2, 7, 8]) == chain([8, 5])


def test_no_longer_ngram_than_max_ngram_is_asked():
    assert draft(NGramDrafter(gamma=1, max_ngram=1), [7, 8, 5, 8, 2, 7, 8]) == chain([8, 2])


def test_the_most_recent_occurrence_is_asked_first():
    assert draft(NGramDrafter(gamma=2), [8, 1, 1, 8, 2, 2, 8]) == chain([8, 2, 2])


def test_several_occurrences_make_a_tree():
    """8 was followed by 3 3, before that by 2 2, before that by 1 1; width 2 takes the later two."""
    tree = draft(NGramDrafter(gamma=2, width=2), [8, 1, 1, 8, 2, 2, 8, 3, 3, 8])
    assert tree == DraftTree.of([8, 3, 3, 2, 2], [-1, 0, 1, 0, 3])


def test_proposals_with_a_common_beginning_share_its_nodes():
    tree = draft(NGramDrafter(gamma=2, width=2), [8, 1, 5, 8, 1, 6, 8])
    assert tree == DraftTree.of([8, 1, 6, 5], [-1, 0, 1, 1])


def test_the_same_proposal_twice_counts_once():
    """Width 2 is filled by 1 6 and 2 2, although 1 6 occurs twice after them."""
    tree = draft(NGramDrafter(gamma=2, width=2), [8, 2, 2, 8, 1, 6, 8, 1, 6, 8])
    assert tree == DraftTree.of([8, 1, 6, 2, 2], [-1, 0, 1, 0, 3])


def test_shorter_ngrams_fill_the_width_that_longer_ones_leave():
    """7 8 was followed by 5; then 8 alone, most recent first, by 2."""
    tree = draft(NGramDrafter(gamma=1, width=2), [7, 8, 5, 8, 2, 7, 8])
    assert tree == DraftTree.of([8, 5, 2], [-1, 0, 0])


@pytest.mark.parametrize("context", [[5], [5, 6], [1, 2, 3, 4]], ids=str)
def test_a_tail_that_never_occurred_before_gives_the_root_alone(context):
    assert draft(NGramDrafter(), context) == root_only(context[-1])


def test_a_run_of_one_token_is_continued():
    assert draft(NGramDrafter(gamma=2), [4, 4]) == chain([4, 4])


@pytest.mark.parametrize("seed", range(20))
def test_ngram_trees_stay_within_every_budget_and_have_no_duplicate_siblings(seed):
    generator = random.Random(seed)
    context = [generator.randrange(3) for _ in range(40)]
    gamma, width = generator.randint(1, 5), generator.randint(1, 4)
    max_nodes, max_depth = generator.randint(0, 8), generator.randint(0, 4)
    tree = draft(NGramDrafter(gamma=gamma, width=width), context, max_nodes=max_nodes, max_depth=max_depth)
    assert tree.num_drafts <= max_nodes and tree.depth.max() <= min(gamma, max_depth)
    assert len(tree.leaves()) <= width and not has_duplicate_siblings(tree)


def test_every_ngram_proposal_has_occurred_in_the_context():
    generator = random.Random(1)
    for _ in range(50):
        context = [generator.randrange(3) for _ in range(30)]
        tree = draft(NGramDrafter(gamma=3, width=4), context)
        text = "".join(map(str, context))
        assert all("".join(map(str, tree.path_tokens(leaf))) in text for leaf in tree.leaves())


@pytest.mark.parametrize("name", ["gamma", "width", "max_ngram"])
def test_an_ngram_drafter_of_nothing_is_refused(name):
    with pytest.raises(ValueError, match=f"^{name} = 0 must be >= 1$"):
        NGramDrafter(**{name: 0})


# ---- scripted

FILLERS = (0, 2, 2, 7, 8, 2, 9)
SHAPE = (-1, 0, 0, 1, 1, 2, 4)


@pytest.mark.parametrize("accept", range(7))
def test_a_scripted_tree_is_accepted_down_to_the_scripted_node_in_a_real_decode(accept):
    expected = [*PROMPT, *plain(MODEL, PROMPT, 40)]
    drafter = ScriptedDrafter(expected, [RoundScript(FILLERS, SHAPE, accept)], vocab_size=13)
    rounds = Decoder(MODEL, drafter).generate(PROMPT, max_new_tokens=24).rounds
    path = tuple(DraftTree.of(FILLERS, SHAPE).path_to(accept)[1:])
    # Fillers may spell the accepted text by chance, so that a copy of the node is named; its text is the same.
    assert [len(one.path) for one in rounds[:-1]] == [len(path)] * (len(rounds) - 1)
    assert any(one.path == path for one in rounds[:-1])


@pytest.mark.parametrize("seed", range(40))
def test_scripted_acceptance_is_exact_even_when_fillers_hit_the_expected_tokens(seed):
    """Fillers of a vocabulary of two collide all the time. A filler that spelt the text once prolonged the match."""
    generator = random.Random(seed)
    parents = [-1, *(generator.randrange(node) for node in range(1, 9))]
    script = RoundScript(tuple(generator.randrange(2) for _ in parents), tuple(parents), generator.randrange(9))
    expected = [generator.randrange(2) for _ in range(12)]
    tree = play(script, expected[:2], expected, 2)
    coming = expected[1:]
    agreeing = [node for node in range(9) if coming[: len(tree.path_to(node))] == tree.path_tokens(node)]
    assert max(len(tree.path_to(node)) for node in agreeing) == len(tree.path_to(script.accept))


def test_a_script_writes_the_expected_tokens_on_the_way_and_spoils_the_next():
    """After 5 6 come 7 8 9. Node 1 gets 7; node 2, a child of it that says 8, is spoilt; node 3 stands."""
    script = RoundScript((0, 0, 8, 4), (-1, 0, 1, 1), accept=1)
    assert play(script, [5, 6], [5, 6, 7, 8, 9], 10) == DraftTree.of([6, 7, 9, 4], [-1, 0, 1, 1])


def test_a_script_that_accepts_the_root_makes_every_draft_wrong():
    script = RoundScript((0, 7, 7), (-1, 0, 0), accept=0)
    assert play(script, [5, 6], [5, 6, 7], 8) == DraftTree.of([6, 0, 0], [-1, 0, 0])


def test_a_script_leaves_fillers_alone_once_the_context_has_left_the_expected_text():
    script = RoundScript((0, 1, 2), (-1, 0, 1), accept=2)
    assert play(script, [5, 9], [5, 6, 7, 8], 10) == chain([9, 1, 2])


def test_a_script_leaves_fillers_alone_behind_the_end_of_the_expected_text():
    script = RoundScript((0, 1, 2), (-1, 0, 1), accept=2)
    assert play(script, [5, 6], [5, 6, 7], 10) == chain([6, 7, 2])


def test_scripts_are_played_in_turn_over_and_over():
    scripts = [RoundScript((0, 1), (-1, 0)), RoundScript((0, 2, 3), (-1, 0, 0))]
    drafter = ScriptedDrafter([], scripts, vocab_size=9)
    assert [draft(drafter, [5]).num_drafts for _ in range(5)] == [1, 2, 1, 2, 1]


def test_an_empty_script_drafts_nothing():
    assert draft(ScriptedDrafter([], [], vocab_size=9), [5, 6]) == root_only(6)


@pytest.mark.parametrize("accept", [-1, 2])
def test_a_script_that_accepts_no_node_is_refused(accept):
    message = f"accept = {accept} must be >= 0 and < 2 (a node)"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        RoundScript((0, 1), (-1, 0), accept)


# ---- models


def test_a_chain_of_the_model_is_what_it_would_say_greedily():
    assert draft(ModelDrafter(MODEL, widths=(1,) * 5), PROMPT) == chain([PROMPT[-1], *plain(MODEL, PROMPT, 5)])


def ranked(text: list[int]) -> list[int]:
    """Token ids from the most to the least probable."""
    row = MODEL.logits(text)[-1].tolist()
    return sorted(range(len(row)), key=lambda token: (-row[token], token))


def test_a_tree_of_the_model_holds_its_best_tokens_below_every_node():
    first = ranked(PROMPT)[:2]
    second = [ranked([*PROMPT, token])[:3] for token in first]
    expected = DraftTree.of([5, *first, *second[0], *second[1]], [-1, 0, 0, 1, 1, 1, 2, 2, 2])
    assert draft(ModelDrafter(MODEL, widths=(2, 3)), PROMPT) == expected


def test_first_ranks_skip_the_most_probable_tokens_level_by_level():
    second = ranked(PROMPT)[1]
    best = ranked([*PROMPT, second])[0]
    third = ranked([*PROMPT, second, best])[1]
    tree = draft(ModelDrafter(MODEL, widths=(1, 1, 1), first_ranks=(1, 0)), PROMPT)
    assert tree == chain([5, second, best, third])


def test_runner_up_drafts_are_never_accepted():
    generation = Decoder(MODEL, ModelDrafter(MODEL, first_ranks=(1,))).generate(PROMPT, max_new_tokens=20)
    assert generation.acceptance_length == 1.0 and list(generation.tokens) == plain(MODEL, PROMPT, 20)


def test_tied_drafts_come_lowest_id_first():
    zeros = {key: torch.zeros_like(one) for key, one in MODEL._weights.items()}
    tree = draft(ModelDrafter(LlamaModel(CONFIG, zeros), widths=(3,)), PROMPT)
    assert tree.token_list == [5, 0, 1, 2]


@pytest.mark.parametrize("widths", [(1,), (1, 1, 1, 1), (2, 2), (3, 1, 2)], ids=str)
def test_drafts_of_the_target_itself_are_all_accepted(widths):
    decoder = Decoder(MODEL, self_drafter(MODEL, widths=widths))
    rounds = decoder.generate(PROMPT, max_new_tokens=25).rounds
    full_rounds = [one for one in rounds if max(DraftTree.of(one.tokens, one.parents).depth) == len(widths)]
    assert len(full_rounds) >= len(rounds) - 1
    assert all(len(one.path) == len(widths) for one in full_rounds)


@pytest.mark.parametrize("seed", range(6))
def test_self_drafts_stay_right_whatever_was_accepted_before(seed):
    """Contexts that grow, shrink, branch and jump, as rejections of any kind would make them."""
    generator = random.Random(seed)
    drafter = self_drafter(MODEL, widths=(1, 1, 1))
    context = list(PROMPT)
    for _ in range(15):
        tree = draft(drafter, context)
        assert tree == chain([context[-1], *plain(MODEL, context, 3)])
        kept = generator.choice([0, 1, 2, 3])
        context += [*tree.token_list[1 : kept + 1], generator.randrange(13)]
        if generator.random() < 0.3:
            context = context[: generator.randint(1, len(context))]


@pytest.mark.parametrize("seed", range(4))
def test_a_used_drafter_equals_a_fresh_one(seed):
    """Two texts in turn, so that each call finds the rows of the other text in its cache."""
    generator = random.Random(seed)
    used = ModelDrafter(MODEL, widths=(2, 2, 1))
    texts = [[3, 1, 4], [3, 1, 5, 9, 2]]
    for turn in range(10):
        text = texts[turn % 2]
        text.append(generator.randrange(13))
        assert draft(used, text) == draft(ModelDrafter(MODEL, widths=(2, 2, 1)), text)


@pytest.mark.parametrize("context", [[7], [7, 7], [3, 1, 4]], ids=str)
def test_a_context_shorter_than_the_cached_one_is_drafted_from_as_if_fresh(context):
    used = ModelDrafter(MODEL)
    draft(used, [3, 1, 4, 1, 5, 9, 2, 6])
    assert draft(used, context) == draft(ModelDrafter(MODEL), context)


def test_a_drafter_recovers_from_a_context_that_made_its_model_fail():
    used = ModelDrafter(MODEL)
    draft(used, PROMPT)
    with pytest.raises(ValueError, match=r"^tokens\[0\] = 99 must be"):
        draft(used, [3, 99, 4])
    assert draft(used, [*PROMPT, 9]) == draft(ModelDrafter(MODEL), [*PROMPT, 9])


def test_a_drafter_encodes_a_committed_token_once():
    """The rows it forwards on the second call are the new tokens' and its drafts', not the context's."""
    drafter = ModelDrafter(MODEL, widths=(1,))
    draft(drafter, PROMPT)
    rows = []
    forward = MODEL.forward

    class Counting:
        def __getattr__(self, name):
            return getattr(MODEL, name)

        def forward(self, flat, cache, *, taps=None):
            rows.append(flat.tokens.tolist())
            return forward(flat, cache, taps=taps)

    drafter._session.model = Counting()
    draft(drafter, [*PROMPT, 9, 2])
    assert rows == [[5, 9], [2]]


@pytest.mark.parametrize("max_nodes", [0, 1, 2, 4, 7, 64])
@pytest.mark.parametrize("max_depth", [0, 1, 2, 3, 16])
def test_model_drafters_stay_within_both_budgets(max_nodes, max_depth):
    tree = draft(ModelDrafter(MODEL, widths=(2, 2, 1)), PROMPT, max_nodes=max_nodes, max_depth=max_depth)
    whole = draft(ModelDrafter(MODEL, widths=(2, 2, 1)[:max_depth] or (1,)), PROMPT)
    size = 1 if max_depth == 0 else min(max_nodes + 1, whole.num_nodes)
    assert tree == DraftTree.of(whole.token_list[:size], whole.parent_list[:size])


def test_model_trees_have_no_duplicate_siblings():
    assert not has_duplicate_siblings(draft(ModelDrafter(MODEL, widths=(4, 3, 2)), PROMPT))


def test_a_level_wider_than_the_vocabulary_holds_every_token_once():
    tree = draft(ModelDrafter(MODEL, widths=(20,)), PROMPT)
    assert sorted(tree.token_list[1:]) == list(range(13))


def test_an_early_exit_drafter_drafts_with_the_first_layers():
    tree = draft(self_drafter(MODEL, num_layers=1, widths=(1, 1, 1)), PROMPT)
    assert tree == chain([5, *plain(MODEL.first_layers(1), PROMPT, 3)])


def test_an_early_exit_drafter_of_all_layers_is_the_target():
    tree = draft(self_drafter(MODEL, num_layers=3, widths=(1, 1)), PROMPT)
    assert tree == draft(self_drafter(MODEL, widths=(1, 1)), PROMPT)


@pytest.mark.parametrize("widths", [(), (0,), (1, -1)], ids=str)
def test_widths_that_draft_nothing_are_refused(widths):
    message = f"widths = {widths} must name at least one level, each >= 1"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ModelDrafter(MODEL, widths=widths)


# ---- rows that are kept


@pytest.mark.parametrize("seed", range(6))
def test_a_drafter_that_keeps_rows_drafts_what_one_that_does_not_drafts(seed):
    """Accepts of every kind, told or untold, other texts in between."""
    generator = random.Random(seed)
    keeping, plainly = CachingDrafter(MODEL, widths=(2, 2, 1)), ModelDrafter(MODEL, widths=(2, 2, 1))
    context = list(PROMPT)
    for _ in range(15):
        tree = draft(keeping, context)
        assert tree == draft(plainly, context)
        path = tree.path_to(generator.randrange(tree.num_nodes))[1:]
        context += [*(tree.token_list[node] for node in path), follower := generator.randrange(13)]
        if generator.random() < 0.8:
            keeping.observe(VerifyResult(tuple(path), follower))
        if generator.random() < 0.2:
            keeping.reset()
        if generator.random() < 0.2:
            draft(keeping, [1, 2, 3])


def test_kept_rows_are_not_computed_again():
    """After 3 of 3 drafts were accepted only the last one, which was never read, and the new root are forwarded."""
    drafter = CachingDrafter(MODEL)
    tree = draft(drafter, PROMPT)
    drafter.observe(VerifyResult((1, 2, 3), 9))
    rows = []
    forward = MODEL.forward

    class Counting:
        def __getattr__(self, name):
            return getattr(MODEL, name)

        def forward(self, flat, cache, *, taps=None):
            rows.append(flat.tokens.tolist())
            return forward(flat, cache, taps=taps)

    drafter._session.model = Counting()
    draft(drafter, [*PROMPT, *tree.token_list[1:], 9])
    assert rows[:2] == [[tree.token_list[3]], [9]]


# ---- draws


def drawn(drafter, seed: int, temperature: float = 1.0, **budget: int) -> DraftTree:
    limits = {"max_nodes": 64, "max_depth": 16, **budget}
    return drafter.draft(PROMPT, sampling=Sampling(temperature=temperature), coins=SeededCoins(seed), **limits)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_rows_of_draft_probs_are_the_models_law_after_each_path(temperature):
    tree = drawn(SampledDrafter(MODEL, widths=(2, 1)), 0, temperature)
    for node in range(tree.num_nodes):
        law = (MODEL.logits([*PROMPT[:-1], *tree.path_tokens(node)])[-1] / temperature).softmax(-1)
        expected = law if tree.children(node) else torch.zeros(13)
        assert torch.allclose(tree.draft_probs[node], expected.double(), atol=1e-9)


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 0), (0.4999, 0), (0.5, 2), (0.9999999999999999, 3)])
def test_a_uniform_falls_into_its_tokens_stretch(uniform, token):
    """Tokens 0, 2 and 3 have 1/2, 1/4, 1/4; 1 and 4 have none."""
    assert inverse_cdf([0.5, 0.0, 0.25, 0.25, 0.0], uniform) == token


def test_a_temperature_of_zero_draws_the_argmax_with_certainty():
    tree = drawn(SampledDrafter(MODEL, widths=(1, 1, 1)), 5, 0.0)
    assert tree.token_list == [5, *plain(MODEL, PROMPT, 3)]
    assert tree.draft_probs[0].max() == 1.0


@pytest.mark.parametrize("seed", range(10))
def test_draws_without_replacement_have_no_duplicate_siblings(seed):
    tree = drawn(SampledDrafter(MODEL, widths=(4, 3), proposal="without_replacement"), seed, 2.0)
    assert tree.num_drafts == 16 and not has_duplicate_siblings(tree)


def test_draws_with_replacement_may_have_duplicate_siblings():
    assert any(has_duplicate_siblings(drawn(SampledDrafter(MODEL, widths=(4,)), seed, 0.5)) for seed in range(5))


@pytest.mark.parametrize("max_nodes", [0, 1, 2, 5])
@pytest.mark.parametrize("max_depth", [0, 1, 2])
def test_drawing_drafters_stay_within_both_budgets(max_nodes, max_depth):
    tree = drawn(SampledDrafter(MODEL, widths=(2, 2)), 0, max_nodes=max_nodes, max_depth=max_depth)
    assert tree.num_drafts == min(max_nodes, (0, 2, 6)[max_depth]) and tree.depth.max() <= max_depth


def test_a_drafter_that_draws_nothing_is_refused():
    with pytest.raises(ValueError, match="this drafter draws"):
        SampledDrafter(MODEL, proposal="deterministic")


# ---- suffix lookup


def occurrences(part: list[int], text: list[int]) -> int:
    return sum(text[start : start + len(part)] == part for start in range(len(text) - len(part) + 1))


@pytest.mark.parametrize("seed", range(8))
def test_the_automaton_counts_every_substring(seed):
    text = [random.Random(seed).randrange(3) for _ in range(24)]
    automaton = SuffixAutomaton()
    for length, token in enumerate(text, start=1):
        automaton.append(token)
        parts = {tuple(text[start:end]) for end in range(1, length + 1) for start in range(end)}
        for part in parts:
            state = 0
            for one in part:
                state = automaton.states[state].following[one]
            assert automaton.states[state].count == occurrences(list(part), text[:length])
    assert len(automaton.states) <= 2 * len(text)


def test_what_most_often_followed_the_longest_ending_is_drafted():
    """7 8 was followed by 1, 2, 1: shares 2/3 and 1/3; then 1 by 7 and by 9: 1/3 each. 8 alone: by 5 too."""
    context = [8, 5, 7, 8, 1, 7, 8, 2, 7, 8, 1, 9, 7, 8]
    tree = draft(SuffixDrafter(num_nodes=3, factor=1.0), context)
    assert tree == DraftTree.of([8, 1, 2, 7], [-1, 0, 0, 1])


def test_a_draft_is_no_deeper_than_the_ending_allows():
    context = [1, 2, 3, 4, 5, 6, 1, 2]
    assert draft(SuffixDrafter(factor=1.0), context) == chain([2, 3, 4])
    assert draft(SuffixDrafter(factor=2.0), context) == chain([2, 3, 4, 5, 6])
    assert draft(SuffixDrafter(factor=2.0, min_match=3), context) == root_only(2)


@pytest.mark.parametrize("seed", range(20))
def test_suffix_drafts_are_the_likeliest_by_counting(seed):
    """Every drafted node has its score by counting substrings, and no likelier one was left out. What ends the text was
    followed by nothing: then it is the longest of its endings that was."""
    randomly = random.Random(seed)
    context = [randomly.randrange(3) for _ in range(30)]
    tree = draft(SuffixDrafter(num_nodes=5, gamma=3, least_score=0.0), context)
    length = max(size for size in range(30) if size == 0 or occurrences(context[-size:], context) > 1)
    ending = context[len(context) - length :]

    def score(path: tuple[int, ...]) -> float:
        product = 1.0
        for idx in range(len(path)):
            before = [*ending, *path[:idx]]
            while before and not any(occurrences([*before, token], context) for token in range(3)):
                before = before[1:]
            total = sum(occurrences([*before, token], context) for token in range(3))
            product *= occurrences([*before, path[idx]], context) / total if before else 0.0
        return product

    drafted = [tuple(tree.path_tokens(node)[1:]) for node in range(1, tree.num_nodes)]
    depth = min(3, 2 * length)
    every = [(one, *rest) for one in range(3) for rest in [(), *((x,) for x in range(3))]]
    every += [(one, two, three) for one in range(3) for two in range(3) for three in range(3)]
    scores = sorted((score(path) for path in every if len(path) <= depth and score(path) > 0), reverse=True)
    assert sorted((score(path) for path in drafted), reverse=True) == pytest.approx(scores[:5])


@pytest.mark.parametrize("name", ["num_nodes", "gamma", "min_match"])
def test_a_suffix_drafter_of_nothing_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} = 0 must be >= 1"):
        SuffixDrafter(**{name: 0})


def test_a_suffix_drafter_starts_over_with_another_text():
    one = SuffixDrafter()
    draft(one, [1, 2, 1, 2, 1])
    assert draft(one, [3, 4, 3]) == draft(SuffixDrafter(), [3, 4, 3]) == chain([3, 4, 3])


# ---- best first


def likeliest_paths(prompt: list[int], depth: int, num: int) -> set[tuple[int, ...]]:
    """By going through all of them: the `num` paths of at most `depth` tokens of the largest probability."""
    found: list[tuple[float, tuple[int, ...]]] = []
    todo = [(0.0, ())]
    while todo:
        score, path = todo.pop()
        laws = MODEL.logits([*prompt, *path])[-1].log_softmax(dim=-1).tolist()
        grown = [(score + log_prob, (*path, token)) for token, log_prob in enumerate(laws)]
        found += grown
        todo += [one for one in grown if len(one[1]) < depth]
    return {path for _, path in sorted(found, reverse=True)[:num]}


@pytest.mark.parametrize("num_nodes", [1, 5, 12])
@pytest.mark.parametrize("prompt", [PROMPT, [2, 7, 1, 8]])
def test_best_first_drafts_the_likeliest_paths_of_all(prompt, num_nodes):
    """Where every node grows, nothing is missed: 13 + 13 x 13 paths are gone through."""
    tree = draft(BestFirstDrafter(MODEL, gamma=2, width=13, num_nodes=num_nodes), prompt)
    paths = {tuple(tree.path_tokens(node)[1:]) for node in range(1, tree.num_nodes)}
    assert paths == likeliest_paths(prompt, 2, num_nodes)


@pytest.mark.parametrize(("max_nodes", "max_depth"), [(1, 4), (3, 4), (9, 1), (9, 2)])
def test_best_first_keeps_to_the_budgets(max_nodes, max_depth):
    tree = draft(
        BestFirstDrafter(MODEL, gamma=3, width=3, num_nodes=9), PROMPT, max_nodes=max_nodes, max_depth=max_depth
    )
    assert tree.num_drafts <= max_nodes and int(tree.depth.max()) <= max_depth
    assert not has_duplicate_siblings(tree)


def test_best_first_of_the_target_itself_loses_nothing():
    said = Decoder(MODEL, BestFirstDrafter(MODEL, gamma=3, width=2, num_nodes=6)).generate(PROMPT, max_new_tokens=20)
    assert said.tokens == tuple(plain(MODEL, PROMPT, 20))
    assert said.acceptance_length > 1.5


def test_best_first_without_nodes_is_refused():
    with pytest.raises(ValueError, match="num_nodes = 0 must be >= 1"):
        BestFirstDrafter(MODEL, num_nodes=0)
