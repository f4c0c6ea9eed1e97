"""Cases for real models: fixed ones, over shipped prompts, since each costs seconds. None for a bank that is drawn on.

The profile says how many. Trees are written out so that every run sees width below depth one, a chain, and a repeat.
"""

from __future__ import annotations

from typing import Any

from specbench.cases import Case, CommitCase, CommitRound, GenerationCase, PerturbedCase, TreeCase
from specbench.profiles import Profile
from specbench.subjects import Subject

MAX_PROMPT = 32  # tokens kept of a prompt, its end, where a claim is not about whole generations

# 2-3-2 below the root with every branch alive, a chain, a star, a ragged one.
SHAPES: tuple[tuple[int, ...], ...] = (
    (-1, 0, 0, 1, 1, 1, 2, 2, 3, 6),
    (-1, 0, 1, 2, 3),
    (-1, 0, 0, 0, 1, 4, 4, 2),
    (-1, 0, 0, 1, 3, 3, 2, 6, 5),
)
# Committed down to their last node, which lies off the leftmost path.
COMMIT_SHAPES: tuple[tuple[int, ...], ...] = ((-1, 0, 0, 1, 2, 4), (-1, 0, 0, 0, 3, 4, 4))
DRAFTERS = ("ngram_chain", "self_tree", "ngram", "self_chain")


def fixed_cases(claim: str, subject: Subject, profile: Profile) -> list[Case] | None:
    """The list for a claim on a real model, None where Hypothesis draws."""
    if not subject.bank.real or claim == "greedy.walk":
        return None
    prompts = [tokens for _, tokens in _spread(subject, profile)]
    if claim.startswith(("tree.", "kv.")):
        return [_tree_or_commit(claim, subject, idx, prompts[idx % len(prompts)]) for idx in range(profile.num_real)]
    if claim == "greedy.lossless":
        all_drafters = DRAFTERS if profile.name == "thorough" else None
        return [
            GenerationCase(prompt=prompt, max_new_tokens=profile.real_tokens, drafter=drafter)
            for idx, prompt in enumerate(prompts)
            for drafter in (all_drafters or (DRAFTERS[idx % len(DRAFTERS)],))
        ]
    drafters = {
        "progress": "early_exit",  # the target's first layers: drafts that are partly right
        "stop.eos": "self_tree",
        "stop.max_tokens": "self_tree",
        "threshold.consistency": "runner_up",
    }
    num_cases = min(2, len(prompts), profile.num_real)
    return [
        GenerationCase(
            prompt=prompts[idx][-MAX_PROMPT:],
            max_new_tokens=min(profile.real_tokens, 7 + idx),
            drafter=drafters.get(claim, DRAFTERS[idx % len(DRAFTERS)]),
            eos_idx=4 + idx,
        )
        for idx in range(num_cases)
    ]


def _spread(subject: Subject, profile: Profile) -> list[tuple[str, tuple[int, ...]]]:
    """The prompts of this run, noted as used: one of each kind in turn, those that repeat text first, since there an
    n-gram drafter has something to find."""
    by_kind: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, tokens in subject.bank.prompts:
        by_kind.setdefault(name.partition("-")[0], []).append((name, tokens))
    kinds = sorted(by_kind, key=lambda kind: kind != "repeat")
    in_turn = [
        by_kind[kind][row] for row in range(len(subject.bank.prompts)) for kind in kinds if row < len(by_kind[kind])
    ]
    chosen = in_turn[: max(profile.real_prompts, profile.num_real)]
    subject.used_prompts.update(name for name, _ in chosen)
    return chosen


def _tree_or_commit(claim: str, subject: Subject, idx: int, prompt: tuple[int, ...]) -> Case:
    prompt = prompt[-MAX_PROMPT:]
    vocab_size = subject.vocab_size(0)
    shapes = SHAPES if claim.startswith("tree.") else COMMIT_SHAPES
    parents = shapes[idx % len(shapes)]
    tokens = (prompt[-1], *(_token(prompt, node + 7 * idx, vocab_size) for node in range(1, len(parents))))
    place: dict[str, Any] = {"layout": subject.layouts[idx % len(subject.layouts)], "cache": subject.cache_kinds[0]}
    if claim in ("tree.noninterference", "tree.sensitivity"):
        node = 1 + idx % 2
        changed = (tokens[node] + 1) % vocab_size
        where = len(prompt) - 1 + node
        return PerturbedCase(**place, prompt=prompt, tokens=tokens, parents=parents, place=where, token=changed)
    if claim.startswith("tree."):
        return TreeCase(**place, prompt=prompt, tokens=tokens, parents=parents)
    last = len(parents) - 1
    rounds = (CommitRound(tokens, parents, last), CommitRound(tokens, parents, 0))
    roots = (prompt[0], prompt[len(prompt) // 2])
    return CommitCase(**place, prompt=prompt, rounds=rounds, next_roots=roots, cut=2)


def _token(prompt: tuple[int, ...], node: int, vocab_size: int) -> int:
    """Alternately a token of the prompt, which a draft would hold, and one from anywhere in the vocabulary."""
    if node % 2:
        return prompt[node % len(prompt)]
    return (node * 7919 + 1013) % vocab_size
