"""Hypothesis strategies for cases: random prompts, trees, accept scripts, models, cache kinds, layouts.

They return valid cases only and shrink towards one prompt token, the first model and the smallest tree. Sizes are
steered so that an ordinary run has wide, deep trees: half of the cases branch at depth two or below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from specbench.cases import Case, CommitCase, CommitRound, GenerationCase, PerturbedCase, TreeCase, WalkCase
from specbench.subjects import Subject

MAX_DRAFTS = 64
# Hypothesis mutates a case by copying some of its draws over others of the same strategy, and drops what comes out
# longer than it was. Sizes are therefore sampled (no token id is ever copied over one), and nothing is drawn by
# `lists`, where a copy shifts all that follows: both made many trees tiny. Rising, so that cases shrink.
SIZES = (*range(7), *(size for size in range(7, 23) for _ in range(4)), *range(24, MAX_DRAFTS + 1, 4))
PROMPT_LENGTHS = (*(length for length in range(1, 13) for _ in range(4)), *range(14, 41, 2))
SHAPES = (*("ragged",) * 3, *("deep",) * 2, *("kary",) * 2, "chain", "star")

Draw = Callable[..., Any]


@st.composite
def parents_lists(draw: Draw, *, min_drafts: int = 0, max_drafts: int = MAX_DRAFTS) -> tuple[int, ...]:
    """Parents of a tree with root: ragged, chain, star, full k-ary, or a comb. Grown node by node."""
    shape = draw(st.sampled_from(SHAPES), label="shape")
    sizes = [size for size in SIZES if min_drafts <= size <= max_drafts]
    num_drafts = draw(st.sampled_from(sizes), label="drafts")
    width = draw(st.integers(2, 4), label="width") if shape == "kary" else 0
    parents = [-1]
    for node in range(1, num_drafts + 1):
        if shape == "ragged":
            parents.append(draw(st.integers(0, node - 1), label=f"parent of {node}"))
        elif shape == "deep":
            parents.append(draw(st.integers(max(0, node - 3), node - 1), label=f"parent of {node}"))
        else:
            parents.append({"chain": node - 1, "star": 0}.get(shape, (node - 1) // max(width, 1)))
    return tuple(parents)


@st.composite
def trees(
    draw: Draw, vocab_size: int, *, root: int, min_drafts: int = 0, max_drafts: int = MAX_DRAFTS
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens and parents. Tokens come from the whole vocabulary or from three, which gives duplicate siblings and the
    same token in different branches."""
    parents = draw(parents_lists(min_drafts=min_drafts, max_drafts=max_drafts))
    palette = draw(st.sampled_from([vocab_size, min(3, vocab_size)]), label="palette")
    tokens = [draw(st.integers(0, palette - 1), label=f"token {node}") for node in range(1, len(parents))]
    return (root, *tokens), parents


@st.composite
def prompts(draw: Draw, vocab_size: int) -> tuple[int, ...]:
    """1 to 12 tokens, now and then up to 40."""
    return tuple(
        draw(st.integers(0, vocab_size - 1), label=f"prompt {idx}")
        for idx in range(draw(st.sampled_from(PROMPT_LENGTHS), label="prompt length"))
    )


@st.composite
def _places(draw: Draw, subject: Subject) -> dict[str, Any]:
    """Model, cache kind and layout. Kinds and layouts vary only for models of ours, which have more than one."""
    model = draw(st.integers(0, subject.bank.num_models - 1), label="model")
    layout = draw(st.sampled_from(subject.layouts), label="layout")
    cache = draw(st.sampled_from(subject.cache_kinds), label="cache")
    return {"model": model, "cache": cache, "layout": layout}


@st.composite
def tree_cases(draw: Draw, subject: Subject) -> TreeCase:
    place = draw(_places(subject))
    vocab_size = subject.vocab_size(place["model"])
    prompt = draw(prompts(vocab_size))
    tokens, parents = draw(trees(vocab_size, root=prompt[-1]))
    return TreeCase(**place, prompt=prompt, tokens=tokens, parents=parents)


@st.composite
def interference_cases(draw: Draw, subject: Subject) -> PerturbedCase:
    """A change at a drafted node, to another token."""
    place = draw(_places(subject))
    vocab_size = subject.vocab_size(place["model"])
    prompt = draw(prompts(vocab_size))
    tokens, parents = draw(trees(vocab_size, root=prompt[-1], min_drafts=1))
    node = draw(st.integers(1, len(tokens) - 1), label="changed node")
    token = _other(draw, tokens[node], vocab_size)
    return PerturbedCase(
        **place, prompt=prompt, tokens=tokens, parents=parents, place=len(prompt) - 1 + node, token=token
    )


@st.composite
def sensitivity_cases(draw: Draw, subject: Subject) -> PerturbedCase:
    """A change anywhere: in the prefix, at the root, or at a drafted node."""
    place = draw(_places(subject))
    vocab_size = subject.vocab_size(place["model"])
    prompt = draw(prompts(vocab_size))
    tokens, parents = draw(trees(vocab_size, root=prompt[-1]))
    where = draw(st.integers(0, len(prompt) - 1 + len(tokens) - 1), label="changed place")
    old = (*prompt[:-1], *tokens)[where]
    return PerturbedCase(
        **place, prompt=prompt, tokens=tokens, parents=parents, place=where, token=_other(draw, old, vocab_size)
    )


@st.composite
def commit_cases(draw: Draw, subject: Subject) -> CommitCase:
    """One to three rounds, each committed down to any node, then a cut."""
    place = draw(_places(subject))
    vocab_size = subject.vocab_size(place["model"])
    prompt = draw(prompts(vocab_size))
    num_rounds = draw(st.integers(1, 3), label="rounds")
    rounds, next_roots = [], []
    for _ in range(num_rounds):
        tokens, parents = draw(trees(vocab_size, root=0, max_drafts=24))
        rounds.append(CommitRound(tokens, parents, draw(st.integers(0, len(tokens) - 1), label="accept")))
        next_roots.append(draw(st.integers(0, vocab_size - 1), label="next root"))
    cut = draw(st.integers(0, 12), label="cut")
    return CommitCase(**place, prompt=prompt, rounds=tuple(rounds), next_roots=tuple(next_roots), cut=cut)


@st.composite
def walk_cases(draw: Draw, subject: Subject) -> WalkCase:
    """Trees with the winners of each row; most rows let one of the node's children win, some tie, some let none."""
    vocab_size = draw(st.integers(2, 9), label="vocabulary")
    tokens, parents = draw(trees(vocab_size, root=0))
    by_text: dict[tuple[int, ...], tuple[int, ...]] = {}
    texts: list[tuple[int, ...]] = [()]
    winners: list[tuple[int, ...]] = []
    for node in range(len(tokens)):
        if node:
            texts.append((*texts[parents[node]], tokens[node]))
        children = [tokens[child] for child in range(node + 1, len(tokens)) if parents[child] == node]
        pick = draw(st.integers(0, 3 * vocab_size - 1), label=f"argmax {node}")  # two thirds name a child
        first = children[pick % len(children)] if children and pick >= vocab_size else pick % vocab_size
        tie = draw(st.integers(0, 3), label=f"tied with {node}")  # 0: no tie
        tied = [(first + tie) % vocab_size] if tie else []
        # Duplicate siblings spell the same text, so a model gives them the same row.
        by_text.setdefault(texts[node], tuple(sorted({first, *tied})))
        winners.append(by_text[texts[node]])
    return WalkCase(tokens=tokens, parents=parents, winners=tuple(winners), vocab_size=vocab_size)


@st.composite
def generation_cases(draw: Draw, subject: Subject, *, always_wrong: bool = False) -> GenerationCase:
    """A prompt, a drafter's script and a length. Scripts mix full, partial and no acceptance."""
    place = draw(_places(subject))
    vocab_size = subject.vocab_size(place["model"])
    prompt = draw(prompts(vocab_size))
    max_new_tokens = draw(st.integers(1, 16), label="max_new_tokens")
    rounds = []
    if "build" in subject.has:
        for _ in range(draw(st.integers(1, 4), label="rounds")):
            tokens, parents = draw(trees(vocab_size, root=0, max_drafts=24))
            accept = 0 if always_wrong else draw(st.integers(0, len(tokens) - 1), label="accept")
            rounds.append(CommitRound(tokens, parents, accept))
    eos_idx = draw(st.integers(0, 15), label="end token")
    return GenerationCase(**place, prompt=prompt, max_new_tokens=max_new_tokens, rounds=tuple(rounds), eos_idx=eos_idx)


@st.composite
def threshold_cases(draw: Draw, subject: Subject) -> GenerationCase:
    """Scripted trees, or chains with the target's second choice in them: that is what a threshold may let pass."""
    case = draw(generation_cases(subject))
    case = replace(case, max_new_tokens=(case.max_new_tokens + 1) // 2)  # each case is generated once a threshold
    return draw(st.sampled_from([case, replace(case, rounds=(), drafter="runner_up")]), label="drafter")


def strategy_for(claim: str, subject: Subject) -> st.SearchStrategy[Any]:
    """The cases a claim is judged on."""
    special = {
        "tree.noninterference": interference_cases,
        "tree.sensitivity": sensitivity_cases,
        "kv.commit": commit_cases,
        "kv.rollback": commit_cases,
        "greedy.walk": walk_cases,
        "threshold.consistency": threshold_cases,
    }
    if claim in special:
        return special[claim](subject)
    if claim.startswith("tree."):
        return tree_cases(subject)
    if claim == "progress":
        return st.one_of(generation_cases(subject, always_wrong=True), generation_cases(subject))
    return generation_cases(subject)


def case_kind(claim: str) -> type[Case]:
    """The kind of case that `strategy_for` draws for a claim, and a replay must bring."""
    if claim in ("tree.noninterference", "tree.sensitivity"):
        return PerturbedCase
    if claim == "greedy.walk":
        return WalkCase
    return {"tree": TreeCase, "kv": CommitCase}.get(claim.partition(".")[0], GenerationCase)


def _other(draw: Draw, token: int, vocab_size: int) -> int:
    """A token other than `token`."""
    return (token + draw(st.integers(1, vocab_size - 1), label="shift")) % vocab_size
