"""Cases for real models: fixed ones, over shipped prompts, since each costs seconds. None for a bank that is drawn on.

The profile says how many. Trees are written out so that every run sees width below depth one, a chain, and a repeat.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import torch

from specbench.banks import CheckpointBank
from specbench.cases import (
    LAW_PARAMETERS,
    SMALL_LAW_SHAPES,
    AttentionCase,
    BatchCase,
    BatchRequest,
    Case,
    ChunkCase,
    CommitCase,
    CommitRound,
    DrafterCase,
    GenerationCase,
    LawCase,
    LongCase,
    MachineCase,
    Op,
    PerturbedCase,
    ProcessorCase,
    SampledCase,
    StopCase,
    TreeCase,
    WalkCase,
)
from specbench.claims import KERNEL_CLAIMS
from specbench.coverage import all_shapes, broom, depth_of
from specbench.kernel_bank import KernelBank
from specbench.law.toys import is_chain
from specbench.profiles import Profile
from specbench.subjects import NotTested, Subject
from specbench.tree import UNUSED

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

# What a trained model is asked in every run and every precision: what its size and its weights can change.
REAL_QUICK = (
    "tree.mask",
    "tree.positions",
    "tree.attention_weights",
    "tree.layers",
    "tree.logits",
    "tree.noninterference",
    "kv.commit",
    "greedy.lossless",
    "stop.eos",
    "cost.rows",
)
# Rules alone, judged on logits of ours; the claims about laws say by themselves where they are judged.
KNOW_NO_MODEL = ("greedy.walk", "verify.batch", "greedy.temperature_zero", "sampler.law")

# Long contexts: boundaries of blocks, index types and buffers lie at powers of two, so every run stands on both sides
# of them. Written out, since drawing and reducing would ask for the longest ones hundreds of times.
LONG_CASES: dict[str, tuple[LongCase, ...]] = {
    "quick": (
        LongCase(prefix_len=129, num_nodes=257, shape="ragged", chunk=32, seed=1),
        LongCase(model=1, prefix_len=255, num_nodes=130, shape="chain", chunk=0, seed=2, cache="paged_16"),
        LongCase(model=7, prefix_len=513, num_nodes=33, shape="binary", chunk=100, seed=3, cache="ring"),
        LongCase(model=3, prefix_len=1025, num_nodes=64, shape="ragged", chunk=64, seed=4, layout="path_batch"),
        LongCase(prefix_len=2049, num_nodes=17, shape="deep", chunk=512, seed=4, cache="preallocated"),
    ),
    "standard": (
        LongCase(model=1, prefix_len=1, num_nodes=512, shape="star", seed=5, cache="preallocated"),
        LongCase(model=2, prefix_len=1023, num_nodes=255, shape="chain", chunk=512, seed=6, cache="paged_4"),
        LongCase(model=7, prefix_len=1984, num_nodes=129, shape="deep", chunk=128, seed=7, cache="ring"),
        LongCase(prefix_len=4097, num_nodes=257, shape="ragged", chunk=128, seed=8, cache="paged_16"),
    ),
    "thorough": (
        LongCase(prefix_len=8192, num_nodes=512, shape="ragged", chunk=512, seed=9),
        LongCase(model=2, prefix_len=8191, num_nodes=511, shape="deep", chunk=512, seed=9, cache="paged_16"),
        LongCase(model=3, prefix_len=4096, num_nodes=512, shape="binary", chunk=256, seed=9),
        LongCase(model=7, prefix_len=4097, num_nodes=512, shape="chain", chunk=512, seed=9, cache="ring"),
        LongCase(prefix_len=4095, num_nodes=511, shape="star", chunk=129, seed=9),
    ),
}
# What every kernel is asked first, and one that is compiled for each shape is asked alone: no prefix, one row, both
# sides of a block of 64, more nodes than a word has bits, holes between siblings, odd head sizes, large scores, ragged
# batches.
_CHAIN, _STAR = (-1, 0, 1, 2), (-1, 0, 0, 0, 0)
_TREE, _SECOND = (-1, 0, 0, 1, 1, 2, 2, 3, 5), (-1, 0, 1, 1, 0)
_WIDE = (-1, *(max(0, node - 3) for node in range(1, 70)))
KERNEL_CASES = (
    AttentionCase(),
    AttentionCase(trees=(_CHAIN,), prefix_lens=(1,), head_dim=16, large=1),
    AttentionCase(trees=(_TREE,), prefix_lens=(7,), num_key_heads=2, group=2),
    AttentionCase(trees=(_TREE,), prefix_lens=(63,), group=3, head_dim=5),
    AttentionCase(trees=(_TREE,), prefix_lens=(64,), num_key_heads=2, head_dim=80),
    AttentionCase(trees=(_STAR,), prefix_lens=(65,), group=2, head_dim=64, num_splits=2),
    AttentionCase(trees=(_WIDE,), prefix_lens=(1025,), head_dim=16, num_splits=3),
    AttentionCase(trees=(_TREE, _SECOND), prefix_lens=(7, 66), num_key_heads=2, group=2, num_splits=2),
    AttentionCase(trees=(_SECOND, (-1,), _TREE, _STAR, _CHAIN), prefix_lens=(0, 64, 1, 257, 5), group=2, head_dim=64),
    AttentionCase(trees=((-1, 3, 0, 2, 0, 1),), prefix_lens=(7,), group=2),
    AttentionCase(trees=((-1, 0, UNUSED, 0, UNUSED),), prefix_lens=(5,), group=2),
    AttentionCase(trees=(_TREE,), prefix_lens=(9,), page=4, group=2),
    AttentionCase(trees=(_TREE, _SECOND), prefix_lens=(67, 2), page=3, num_splits=2),
    AttentionCase(trees=(_TREE,), prefix_lens=(7,), window=3, group=2),
    AttentionCase(trees=(_TREE,), prefix_lens=(67,), window=1),
    AttentionCase(trees=(_TREE,), prefix_lens=(130,), window=66, num_splits=3, seed=3),
    AttentionCase(trees=(_TREE,), prefix_lens=(9,), soft_cap=150, group=2),
    AttentionCase(trees=(_TREE,), prefix_lens=(9,), alibi=1, num_key_heads=2, group=2, head_dim=16),
    AttentionCase(trees=(_TREE,), prefix_lens=(70,), codes="int8", num_key_heads=2),
    AttentionCase(trees=(_TREE,), prefix_lens=(70,), codes="fp8", num_key_heads=2, head_dim=64),
)
# Of a law that is gone through: toys, and every two parameters that have an order.
LAW_SEEDS = (1, 3, 2)
LAW_PAIRS = ((50, 0, 70, 0), (200, 0, 70, 0), (200, 0, 100, 40), (100, 2, 50, 0), (100, 3, 100, 40))
MAX_LONG_INEXACT = 1100  # prefix, where plain decoding's noise over the same tree has to be measured as well


def fixed_cases(claim: str, subject: Subject, profile: Profile) -> list[Case] | None:
    """The list for a claim on a real model, or for one whose cases are long; None where Hypothesis draws."""
    if claim == "tree.long":
        return long_cases(subject, profile)
    if isinstance(subject.bank, KernelBank) and subject.bank.limits.only_fixed_shapes:
        return kernel_cases(claim, subject)
    if not subject.bank.real or claim in KNOW_NO_MODEL or (claim.startswith("law.") and claim != "law.seed"):
        return None
    if reason := _left_out(claim, subject, profile):
        raise NotTested(reason)
    prompts = [tokens for _, tokens in _spread(subject, profile)]
    # One case shows what a trained model changes; the tiny models have shown the rest.
    num_cases = profile.num_real if claim in REAL_QUICK or profile.name == "thorough" else 1
    if claim == "kv.machine":
        return [_machine(subject, idx, prompts[idx % len(prompts)]) for idx in range(num_cases)]
    if claim.startswith(("tree.", "kv.")):
        return [_tree_or_commit(claim, subject, idx, prompts[idx % len(prompts)]) for idx in range(num_cases)]
    if claim.startswith("drafter.") and claim != "drafter.self_draft":
        return [_drafter_case(claim, subject, idx, prompts[idx % len(prompts)]) for idx in range(num_cases)]
    if claim == "greedy.lossless":
        all_drafters = DRAFTERS if profile.name == "thorough" else None
        return [
            GenerationCase(prompt=prompt, max_new_tokens=profile.real_tokens, drafter=drafter)
            for idx, prompt in enumerate(prompts)
            for drafter in (all_drafters or (DRAFTERS[idx % len(DRAFTERS)],))
        ]
    if claim.startswith("batch."):
        return [_batch(subject, joins=claim == "batch.join")]
    if claim == "law.seed":
        return [SampledCase(prompt=prompts[0][-MAX_PROMPT:], max_new_tokens=6, drafter="ngram")]
    if claim == "ranks.agree":
        one = _batch(subject, joins=False).alone(0)
        return [replace(one, prompt=one.prompt[-8:], max_new_tokens=4)]
    drafters = {
        "progress": "early_exit",  # the target's first layers: drafts that are partly right
        "stop.eos": "self_tree",
        "stop.max_tokens": "self_tree",
        "threshold.consistency": "runner_up",
        "drafter.self_draft": "self_tree",
    }
    num_cases = min(2, len(prompts), num_cases)
    cases = [
        GenerationCase(
            prompt=prompts[idx][-MAX_PROMPT:],
            max_new_tokens=min(profile.real_tokens, 7 + idx),
            drafter=drafters.get(claim, DRAFTERS[idx % len(DRAFTERS)]),
            eos_idx=4 + idx,
        )
        for idx in range(num_cases)
    ]
    return [_with_additions(claim, case) for case in cases]


def _left_out(claim: str, subject: Subject, profile: Profile) -> str:
    """Why a claim that the tiny models answer is not asked of a trained one as well: it would cost most of the run."""
    if not isinstance(subject.bank, CheckpointBank):
        return ""
    if profile.name != "thorough" and claim == "stop.every_index":
        return "judged on tiny models; on a real one in the thorough profile only"
    if profile.name == "quick" and claim not in REAL_QUICK:
        return "judged on tiny models in the quick profile, on a real one from the standard profile on"
    if profile.name != "thorough" and subject.bank.dtype != torch.float32 and claim not in REAL_QUICK:
        return "judged on the real model in fp32; in lower precisions in the thorough profile only"
    return ""


def sweep_cases(claim: str, subject: Subject, profile: Profile) -> list[Case]:
    """One round for each cell of the coverage table, so that a thorough run leaves none empty, however it draws. The
    accepted node is the last one at its depth: off the leftmost path where there is another. In any run every walk over
    a small tree."""
    if claim == "greedy.walk" and not subject.bank.real:
        return [*small_walks(), *large_ids()]
    if claim in KERNEL_CLAIMS:
        return kernel_cases(claim, subject)
    if claim in ("law.exact", "law.params") and not subject.bank.real:
        return list(small_laws(claim, subject, is_quick=profile.name == "quick"))
    if claim != "kv.commit" or profile.name != "thorough" or len(subject.cache_kinds) == 1:
        return []
    cases: list[Case] = []
    for idx, (cache, (accepted, width, depth)) in enumerate(itertools.product(subject.cache_kinds, all_shapes())):
        parents = broom(width, depth, level=max(0, accepted - 1))
        accept = max(node for node in range(len(parents)) if depth_of(parents, node) == accepted)
        model = idx % subject.bank.num_models
        vocab_size = subject.vocab_size(model)
        tokens = tuple((7 * node + idx) % vocab_size for node in range(len(parents)))
        cases.append(
            CommitCase(
                model=model,
                cache=cache,
                layout=subject.layouts[idx % len(subject.layouts)],
                prompt=tuple((3 * step + idx) % vocab_size for step in range(1 + idx % 9)),
                rounds=(CommitRound(tokens, parents, accept),),
                next_roots=(idx % vocab_size,),
            )
        )
    return cases


def kernel_cases(claim: str, subject: Subject) -> list[Case]:
    """Those of `KERNEL_CASES` that a claim is about, as far as the kernel can do them, in the column's dtype."""
    bank = subject.bank
    assert isinstance(bank, KernelBank)
    cases = [bank.limits.nearest(replace(one, dtype=bank.label)) for one in KERNEL_CASES]
    usual = [one for one in cases if not one.options]
    if claim == "attention.strides":
        cases = [replace(one, strided=1) for one in usual[2:4]]
        if bank.dtype.itemsize == 2:  # of a wider dtype such rows would take more addresses than many machines give
            cases.append(replace(usual[3], strided=2))
    elif claim == "attention.dead_memory":
        cases = [replace(one, dead=1) for one in cases if set(one.options) <= {"cu_nodes", "page_table", "k_scale"}]
    elif claim != "attention.lse":
        cases = [one for one in cases if bank.claim_of(one) == claim]
    cases = [one for one in cases if one.codes in ("", *bank.limits.codes) and not subject.missing(one.options)]
    return list(dict.fromkeys(cases))


def small_laws(claim: str, subject: Subject, *, is_quick: bool = False) -> Iterator[LawCase]:
    """The cheapest cases that tell rules apart, smaller ones first, so that a fault is found in the smallest it shows
    in: each way to draft, chains and siblings; under parameters each alone and every two that have an order. is_quick:
    one toy each, and each parameter alone."""
    proposals, only_chains = subject.law_drafts
    seeds = LAW_SEEDS[:1] if is_quick else LAW_SEEDS
    if claim == "law.exact":
        for shape, proposal in itertools.product(SMALL_LAW_SHAPES, proposals):
            if not only_chains or is_chain(shape):
                for seed in seeds[: 1 if len(shape) == 2 else 3]:
                    yield LawCase(seed=seed, parents=shape, proposal=proposal)
        return
    for (temperature, top_k, top_p, min_p), proposal, seed in itertools.product(
        LAW_PARAMETERS if is_quick else (*LAW_PARAMETERS, *LAW_PAIRS), proposals, seeds[:2]
    ):
        yield LawCase(
            vocab_size=4 if proposal == "deterministic" else 3,
            seed=seed,
            parents=(-1, 0, 0) if proposal == "deterministic" and not only_chains else (-1, 0),
            proposal=proposal,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
        )


def small_walks() -> Iterator[WalkCase]:
    """Every tree of at most two drafts over two tokens, and of three where the later of two copies has a child; each
    with every token that its rows can say."""
    for parents in ((-1,), (-1, 0), (-1, 0, 0), (-1, 0, 1), (-1, 0, 0, 2)):
        for drafts in itertools.product(range(2), repeat=len(parents) - 1):
            if len(drafts) == 3 and drafts[0] != drafts[1]:
                continue
            for said in itertools.product(range(2), repeat=len(parents)):
                yield WalkCase(tokens=(0, *drafts), parents=parents, winners=tuple((one,) for one in said))


def large_ids() -> Iterator[WalkCase]:
    """Ids on both sides of what a byte and two bytes hold, said by the root's row and accepted."""
    for token in (255, 256, 65_535, 65_536):
        yield WalkCase(tokens=(0, token), parents=(-1, 0), winners=((token,), (token,)), vocab_size=token + 2)


def _with_additions(claim: str, case: GenerationCase) -> Case:
    """The case with what the claim's own kind adds: stops, turns, other requests, penalties, bans, a grammar."""
    base = {one.name: getattr(case, one.name) for one in fields(case)}
    turns: tuple[tuple[int, ...], ...] = (case.prompt[:3], (), case.prompt[-5:])
    if claim.startswith("stop.") or claim == "greedy.repeatable":
        if claim == "stop.every_index":
            return replace(case, max_new_tokens=3)
        if claim in ("stop.eos", "stop.max_tokens"):
            return case
        if claim == "greedy.repeatable":
            turns = (turns[0], turns[2])
        return StopCase(**base, stop_from=3, stop_len=2, min_new_tokens=6, turns=turns)
    if claim == "drafter.self_draft":
        spoilt = tuple(CommitRound((0,) * 4, (-1, 0, 1, 2), level) for level in (1, 0))
        return replace(case, max_new_tokens=12, rounds=spoilt)
    if claim.startswith("processors."):
        first = case.prompt[0]
        grammar = ((first, 1, first + 1, 0), (case.prompt[-1], 0, first, 1))
        return ProcessorCase(**base, repetition=130, presence=50, frequency=50, bans=((1, 1), (3, 2)), grammar=grammar)
    return case


def _drafter_case(claim: str, subject: Subject, idx: int, prompt: tuple[int, ...]) -> DrafterCase:
    """A partial accept, a plain step, a full accept; each time another of the target's drafters."""
    draws = claim == "drafter.law"
    names = subject.drafters_with_law if draws else subject.drafter_names
    prompt = prompt[-MAX_PROMPT // 2 :]
    return DrafterCase(
        prompt=prompt,
        accepts=() if draws else (2, -1, 3),
        followers=() if draws else (prompt[0], prompt[1], prompt[2]),
        max_nodes=4 if draws else 8,
        max_depth=2 if draws else 3,
        temperature=100 if draws else 0,
        drafter=names[(3 * idx + 5) % len(names)],  # the caching one first, of ours
        seed=idx,
    )


def _machine(subject: Subject, idx: int, prompt: tuple[int, ...]) -> MachineCase:
    """Every operation once or more, on the cache kinds in turn."""
    prompt, parents = prompt[-MAX_PROMPT:], COMMIT_SHAPES[idx % len(COMMIT_SHAPES)]
    vocab_size = subject.vocab_size(0)
    tokens = tuple(_token(prompt, node, vocab_size) for node in range(len(parents)))
    last = len(parents) - 1
    ops = (
        Op("prefill", prompt[-14:-6]),
        Op("chunk", prompt[-6:]),
        Op("draft", tokens, parents),
        Op("commit", (last, prompt[0])),
        Op("fork"),
        Op("draft", tokens, parents),
        Op("abort"),
        Op("truncate", (2,)),
        Op("resume", prompt[2:5]),
        Op("switch", (0,)),
        Op("step", prompt[1:2]),
        Op("reset"),
    )
    return MachineCase(cache=subject.cache_kinds[idx % len(subject.cache_kinds)], ops=ops)


def long_cases(subject: Subject, profile: Profile) -> list[Case]:
    """The profile's cases and those of the smaller profiles, in what caches and layouts the subject has."""
    names = list(LONG_CASES)
    last = names.index(profile.name) if profile.name in names else 0  # a profile of somebody's own: the smallest list
    cases = [one for name in names[: last + 1] for one in LONG_CASES[name]]
    if not subject.exact:
        cases = [one for one in cases if one.prefix_len <= MAX_LONG_INEXACT and one.num_nodes <= 130]
    return [
        replace(
            one,
            model=one.model % subject.bank.num_models,
            cache=one.cache if one.cache in subject.cache_kinds else "contiguous",
            layout=one.layout if one.layout in subject.layouts else "tree_mask",
        )
        for one in cases
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


def _batch(subject: Subject, *, joins: bool) -> BatchCase:
    """Three prompts of unequal length, the last without drafts, the second penalised. joins: one comes late, one meets
    an end token behind its least length, the last a stop sequence."""
    rows = []
    for idx, (name, prompt) in enumerate(subject.bank.prompts[:3]):
        subject.used_prompts.add(name)
        prompt = prompt[-MAX_PROMPT + 5 * idx :]
        parents = SHAPES[2 + idx % 2]
        tokens = (0, *(_token(prompt, node, subject.vocab_size(0)) for node in range(1, len(parents))))
        rounds = (CommitRound(tokens, parents, len(parents) - 1), CommitRound(tokens, parents, 0))
        eos_idx = 3 if joins and idx == 0 else -1
        row = BatchRequest(prompt, 6 - idx, idx % 2 * joins, eos_idx, rounds[: 2 - 2 * (idx == 2)])
        if idx == 1:
            row = replace(row, repetition=130, frequency=50)
        if joins:
            row = replace(row, min_new_tokens=2 * (idx == 0), stop_from=idx // 2, stop_len=idx // 2 * 2)
        rows.append(row)
    return BatchCase(rows=tuple(rows), cache=subject.cache_kinds[0], batch_layout=subject.batch_layouts[-1])


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
    if claim == "kv.chunked":
        return ChunkCase(**place, prompt=prompt, tokens=tokens, parents=parents, keep=5, chunks=(7, 1))
    if claim == "kv.pages":
        place["cache"] = next((kind for kind in subject.cache_kinds if kind.startswith("paged")), place["cache"])
    last = len(parents) - 1
    rounds = (CommitRound(tokens, parents, last), CommitRound(tokens, parents, 0))
    roots = (prompt[0], prompt[len(prompt) // 2])
    return CommitCase(**place, prompt=prompt, rounds=rounds, next_roots=roots, cut=2)


def _token(prompt: tuple[int, ...], node: int, vocab_size: int) -> int:
    """Alternately a token of the prompt, which a draft would hold, and one from anywhere in the vocabulary."""
    if node % 2:
        return prompt[node % len(prompt)]
    return (node * 7919 + 1013) % vocab_size
