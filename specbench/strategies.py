"""Hypothesis strategies for cases: random prompts, trees, accept scripts, models, cache kinds, layouts.

They return valid cases only and shrink towards one prompt token, the first model and the smallest tree. Sizes are
steered so that an ordinary run has wide, deep trees: half of the cases branch at depth two or below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from hypothesis import strategies as st

from specbench.banks import TinyBank
from specbench.cases import (
    DRAWN,
    LAW_PARAMETERS,
    LAW_SHAPES,
    LONG_SHAPES,
    NUM_FLAVOURS,
    OWN_DRAFTERS,
    ROW_ADDITIONS,
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
    PerturbedCase,
    ProcessorCase,
    SampledCase,
    StopCase,
    TreeCase,
    Walk,
    WalkBatchCase,
    WalkCase,
)
from specbench.coverage import all_shapes, broom, depth_of
from specbench.kernel_bank import CLAIM_OF, KernelBank
from specbench.law.toys import is_chain
from specbench.reference.recurrent import HybridModel
from specbench.subjects import Subject
from specbench.tree import UNUSED

MAX_DRAFTS = 64
# Hypothesis mutates a case by copying some of its draws over others of the same strategy, and drops what comes out
# longer than it was. Sizes are therefore sampled (no token id is ever copied over one), and nothing is drawn by
# `lists`, where a copy shifts all that follows: both made many trees tiny. Rising, so that cases shrink.
SIZES = (*range(7), *(size for size in range(7, 23) for _ in range(4)), *range(24, MAX_DRAFTS + 1, 4))
BATCH_SIZES = (1, *(2,) * 4, *(3,) * 4, *(4,) * 3)
# Repetition, presence and frequency of a row, in hundredths: none, or so large that its neighbour's would show.
ROW_PENALTIES = ((100, 0, 0), (180, 0, 0), (100, 300, 0), (100, 0, 300), (130, 50, -300))
PROMPT_LENGTHS = (*(length for length in range(1, 13) for _ in range(4)), *range(14, 41, 2))
# A chain that is accepted whole.
RUN = CommitRound((0,) * 4, (-1, 0, 1, 2), 3)
SHAPES = (*("ragged",) * 3, *("deep",) * 2, *("kary",) * 2, "chain", "star")

Draw = Callable[..., Any]


@st.composite
def parents_lists(
    draw: Draw, *, min_drafts: int = 0, max_drafts: int = MAX_DRAFTS, shapes: Sequence[str] = SHAPES
) -> tuple[int, ...]:
    """Parents of a tree with root: ragged, chain, star, full k-ary, or a comb. Grown node by node."""
    shape = draw(st.sampled_from(shapes), label="shape")
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
    draw: Draw,
    vocab_size: int,
    *,
    root: int,
    min_drafts: int = 0,
    max_drafts: int = MAX_DRAFTS,
    shapes: Sequence[str] = SHAPES,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens and parents. Tokens come from the whole vocabulary or from three, which gives duplicate siblings and the
    same token in different branches."""
    parents = draw(parents_lists(min_drafts=min_drafts, max_drafts=max_drafts, shapes=shapes))
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
def places(draw: Draw, subject: Subject) -> dict[str, Any]:
    """Model, cache kind and layout. Kinds and layouts vary only for models of ours, which have more than one. Half of
    the models with a window keep a ring: only there does it let go of rows."""
    model = draw(st.integers(0, subject.bank.num_models - 1), label="model")
    layout = draw(st.sampled_from(subject.layouts), label="layout")
    kinds = subject.cache_kinds
    if "ring" in kinds and any(getattr(subject.bank.model(model), "layer_windows", ())):
        kinds = (*kinds, *("ring",) * (len(kinds) - 2))
    cache = draw(st.sampled_from(kinds), label="cache")
    return {"model": model, "cache": cache, "layout": layout}


@st.composite
def tree_cases(draw: Draw, subject: Subject) -> TreeCase:
    """One tree in five is a chain: many decoders mask and place chains by code of their own."""
    place = draw(places(subject))
    vocab_size = subject.vocab_size(place["model"])
    prompt = draw(prompts(vocab_size))
    tokens, parents = draw(trees(vocab_size, root=prompt[-1], shapes=(*SHAPES, "chain")))
    return TreeCase(**place, prompt=prompt, tokens=tokens, parents=parents)


@st.composite
def interference_cases(draw: Draw, subject: Subject) -> PerturbedCase:
    """A change at a drafted node, to another token."""
    place = draw(places(subject))
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
    place = draw(places(subject))
    vocab_size = subject.vocab_size(place["model"])
    prompt = draw(prompts(vocab_size))
    tokens, parents = draw(trees(vocab_size, root=prompt[-1]))
    where = draw(st.integers(0, len(prompt) - 1 + len(tokens) - 1), label="changed place")
    old = (*prompt[:-1], *tokens)[where]
    return PerturbedCase(
        **place, prompt=prompt, tokens=tokens, parents=parents, place=where, token=_other(draw, old, vocab_size)
    )


@st.composite
def scripted_rounds(draw: Draw, vocab_size: int, *, max_drafts: int = 24) -> CommitRound:
    """A tree and the node down to which it is accepted. One in four comes from the coverage table: random trees rarely
    have its small shapes. One in eight is a chain accepted to its end, so that nothing is left to drop."""
    source = draw(st.integers(0, 7), label="any tree, a whole chain, or from the table")
    if source == 5:
        num_drafts = draw(st.sampled_from(range(1, 9)), label="length of the chain")
        tokens = tuple(draw(st.integers(0, vocab_size - 1), label=f"token {node}") for node in range(num_drafts + 1))
        return CommitRound(tokens, tuple(range(-1, num_drafts)), num_drafts)
    if source > 5:
        accepted, width, depth = draw(st.sampled_from(all_shapes()), label="accept length, width, depth")
        parents = broom(width, depth, level=draw(st.sampled_from(range(depth)), label="depth of the siblings"))
        deep_enough = [node for node in range(len(parents)) if depth_of(parents, node) == accepted]
        accept = draw(st.sampled_from(deep_enough), label="accept")
        tokens = tuple(draw(st.integers(0, vocab_size - 1), label=f"token {node}") for node in range(len(parents)))
        return CommitRound(tokens, parents, accept)
    tokens, parents = draw(trees(vocab_size, root=0, max_drafts=max_drafts))
    last = len(tokens) - 1
    how_far = draw(st.sampled_from(("any", "any", "none", "all")), label="how far it is right")
    accept = {"none": 0, "all": last}[how_far] if how_far != "any" else draw(st.integers(0, last), label="accept")
    return CommitRound(tokens, parents, accept)


@st.composite
def commit_cases(draw: Draw, subject: Subject) -> CommitCase:
    """One to three rounds, each committed down to any node, then a cut. One case in six more than chance has it is on a
    model with recurrent layers, which have more ways to go back to the wrong place."""
    place = draw(places(subject))
    if draw(st.integers(0, 5), label="a model with recurrent layers") == 5:
        place["model"] = draw(st.sampled_from(_models_with_states(subject) or [place["model"]]), label="which")
    vocab_size = subject.vocab_size(place["model"])
    prompt = draw(prompts(vocab_size))
    num_rounds = draw(st.integers(1, 3), label="rounds")
    rounds, next_roots = [], []
    for _ in range(num_rounds):
        rounds.append(draw(scripted_rounds(vocab_size)))
        next_roots.append(draw(st.integers(0, vocab_size - 1), label="next root"))
    cut = draw(st.integers(0, 12), label="cut")
    return CommitCase(**place, prompt=prompt, rounds=tuple(rounds), next_roots=tuple(next_roots), cut=cut)


@st.composite
def paged_cases(draw: Draw, subject: Subject) -> CommitCase:
    """Rounds on the caches that have pages, where there are any."""
    case = draw(commit_cases(subject))
    paged = [kind for kind in subject.cache_kinds if kind.startswith("paged")]
    return replace(case, cache=draw(st.sampled_from(paged), label="paged cache")) if paged else case


@st.composite
def walk_cases(
    draw: Draw, subject: Subject, *, vocab_size: int | None = None, max_drafts: int = MAX_DRAFTS
) -> WalkCase:
    """Trees with the winners of each row; most rows let one of the node's children win, some tie, some let none. In one
    case of four every row lets its first child win, so that long paths are accepted whole."""
    if vocab_size is None:
        vocab_size = draw(st.sampled_from([*range(2, 10), 17, 40, *(300,) * 3]), label="vocabulary")
    flavour = draw(st.integers(0, NUM_FLAVOURS - 1), label="flavour of logits")
    all_win = draw(st.integers(0, 3), label="all first children win") == 3
    tokens, parents = draw(trees(vocab_size, root=0, max_drafts=max_drafts))
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
        if all_win and children:
            first, tie = children[0], 0
        tied = [(first + tie) % vocab_size] if tie else []
        # Duplicate siblings spell the same text, so a model gives them the same row.
        by_text.setdefault(texts[node], tuple(sorted({first, *tied})))
        winners.append(by_text[texts[node]])
    if draw(st.booleans(), label="ids counted from the end of the vocabulary"):
        tokens = tuple(vocab_size - 1 - token for token in tokens)
        winners = [tuple(sorted(vocab_size - 1 - token for token in row)) for row in winners]
    return WalkCase(tokens=tokens, parents=parents, winners=tuple(winners), vocab_size=vocab_size, flavour=flavour)


@st.composite
def generation_cases(
    draw: Draw,
    subject: Subject,
    *,
    always_wrong: bool = False,
    with_run: bool = False,
    min_tokens: int = 1,
    max_tokens: int = 16,
    model: int | None = None,
) -> GenerationCase:
    """A prompt, a drafter's script and a length. Scripts mix full, partial and no acceptance, and rounds without
    drafts. with_run: the second round, or every one, is a chain that is accepted whole: a run to stop in."""
    place = draw(places(subject))
    if model is not None:
        place["model"] = model
    vocab_size = subject.vocab_size(place["model"])
    prompt = draw(prompts(vocab_size))
    max_new_tokens = draw(st.integers(min_tokens, max_tokens), label="max_new_tokens")
    rounds = []
    if "build" in subject.has:
        for _ in range(draw(st.integers(1, 4), label="rounds")):
            one = draw(scripted_rounds(vocab_size))
            if draw(st.sampled_from((*(False,) * 5, True)), label="no draft"):
                one = CommitRound((0,), (-1,), 0)
            rounds.append(replace(one, accept=0) if always_wrong else one)
        if with_run:
            rounds = [RUN] if draw(st.booleans(), label="nothing but runs") else [*rounds[:1], RUN, *rounds[1:]]
    eos_idx = draw(st.integers(0, 15), label="end token")
    return GenerationCase(**place, prompt=prompt, max_new_tokens=max_new_tokens, rounds=tuple(rounds), eos_idx=eos_idx)


@st.composite
def cost_cases(draw: Draw, subject: Subject) -> GenerationCase:
    """A third of the cases are rejected chains: where nothing is accepted nothing may be computed again, and a chain
    has as many rows in every layout. Another third are rejected trees."""
    kind = draw(st.sampled_from(("any", "rejected", "rejected chains")), label="drafts")
    case = draw(generation_cases(subject, always_wrong=kind != "any"))
    if kind == "rejected chains":
        chains = (replace(one, parents=tuple(range(-1, len(one.parents) - 1))) for one in case.rounds)
        case = replace(case, rounds=tuple(chains))
    return case


@st.composite
def metric_cases(draw: Draw, subject: Subject) -> GenerationCase:
    """Half of them without an end token: what it cuts off short says little of the counts of many rounds."""
    case = draw(generation_cases(subject))
    return replace(case, eos_idx=-1) if draw(st.booleans(), label="no end token") else case


@st.composite
def walk_batch_cases(draw: Draw, subject: Subject) -> WalkBatchCase:
    """One to four trees of unequal size. Every third is the root alone: a plain step beside rows that draft."""
    vocab_size = draw(st.integers(2, 9), label="vocabulary")
    walks = []
    for _ in range(draw(st.sampled_from(BATCH_SIZES), label="trees")):
        max_drafts = draw(st.sampled_from((24, 24, 0)), label="largest tree")
        one = draw(walk_cases(subject, vocab_size=vocab_size, max_drafts=max_drafts))
        walks.append(Walk(one.tokens, one.parents, one.winners))
    return WalkBatchCase(walks=tuple(walks), vocab_size=vocab_size)


@st.composite
def batch_cases(draw: Draw, subject: Subject, *, joins: bool) -> BatchCase:
    """One to four requests with prompts, lengths, drafts and penalties of their own, some without; some prompts are the
    first row's; a quarter of the batches has no penalties at all. joins: some arrive late, meet an end token or a stop
    sequence, have a least length; or the first is soon done, the others have far to go and must close up, and the last
    may end with the first or come when it has gone."""
    place = draw(places(subject))
    closes_up = joins and draw(st.booleans(), label="the first row ends first")
    models = _models_with_rows(subject)
    if closes_up:  # a model of two tokens says the same in most places: rows that change places would not show
        models = [idx for idx in models if subject.vocab_size(idx) > 2] or models
    place["model"] = draw(st.sampled_from(models), label="model of the batch")
    vocab_size = subject.vocab_size(place["model"])
    rows: list[BatchRequest] = []
    # One tree for all rows, each accepted at another node: what belongs to one row's path then fits into another's.
    one_tree = draw(trees(vocab_size, root=0, min_drafts=3, max_drafts=8))
    has_one_tree = draw(st.integers(0, 3), label="all rows draft one tree") == 3
    penalties = draw(st.sampled_from((ROW_PENALTIES[:1], *(ROW_PENALTIES,) * 3)), label="penalties")
    num_rows = draw(st.sampled_from((2, 3, 3, 3, 4, 4) if closes_up else BATCH_SIZES), label="rows")
    last = num_rows - 1
    how = draw(st.sampled_from(("goes on", *("ends", "joins") * 2)), label="the last row") if closes_up else ""
    for row in range(num_rows):
        prompt = draw(prompts(vocab_size))
        if rows and draw(st.integers(0, 4), label=f"prompt of row 0 in row {row}") == 4 and not closes_up:
            prompt = rows[0].prompt
        lengths: tuple[int, ...] = (1, 2, *range(3, 11), *range(3, 11))  # a second round shows what the first has left
        if closes_up:
            soon_done = row == 0 or (row == last and how == "ends")
            lengths = tuple(range(1, 2 if how == "ends" else 3) if soon_done else range(6, 11))
        max_new_tokens = draw(st.sampled_from(lengths), label=f"length of row {row}")
        num_rounds = draw(st.sampled_from((0, 1, 1, 2, 2)), label=f"rounds of row {row}")
        rounds = [draw(scripted_rounds(vocab_size, max_drafts=12)) for _ in range(num_rounds)]
        if has_one_tree:
            tokens, parents = one_tree
            rounds = [CommitRound(tokens, parents, draw(st.integers(1, len(tokens) - 1), label="accept"))]
        if "build" not in subject.has:
            rounds = []
        arrival = draw(st.sampled_from((0, 0, 1, 2, 4)), label=f"arrival of row {row}") if joins else 0
        eos_idx = draw(st.sampled_from((*(-1,) * 8, *range(8))), label=f"end token of row {row}") if joins else -1
        drawn = draw(st.sampled_from(penalties), label=f"penalties of row {row}")
        additions = dict(zip(ROW_ADDITIONS, drawn, strict=False))
        if joins:
            additions["stop_from"] = draw(st.integers(0, 7), label=f"stop sequence of row {row} from")
            additions["stop_len"] = draw(st.sampled_from((0, 0, 0, 1, 2)), label=f"its length in row {row}")
            additions["min_new_tokens"] = draw(st.sampled_from((0, 0, 3, 6)), label=f"least length of row {row}")
        if closes_up:  # what was drawn is dropped, so that a case without it is no longer to Hypothesis
            arrival = 2 * (row == last and how == "joins")
            eos_idx, additions = -1, dict(zip(ROW_ADDITIONS, drawn, strict=False))
        rows.append(BatchRequest(prompt, max_new_tokens, arrival, eos_idx, tuple(rounds), **additions))
    batch_layout = draw(st.sampled_from(subject.batch_layouts), label="batch layout")
    return BatchCase(**place, rows=tuple(rows), batch_layout=batch_layout)


def _models_with_rows(subject: Subject) -> list[int]:
    """A model that keeps states instead of rows has no batch over several caches."""
    numbers = range(subject.bank.num_models)
    return [idx for idx in numbers if not isinstance(subject.bank.model(idx), HybridModel)] or list(numbers)


def _models_with_states(subject: Subject) -> list[int]:
    """Models that recur, which only the tiny banks have."""
    if not isinstance(subject.bank, TinyBank):
        return []
    return [idx for idx in range(subject.bank.num_models) if isinstance(subject.bank.model(idx), HybridModel)]


@st.composite
def stop_cases(draw: Draw, subject: Subject, *, max_tokens: int = 16) -> StopCase:
    """A generation with an end token, a stop sequence of one to four tokens and a least length."""
    case = draw(generation_cases(subject, max_tokens=max_tokens))
    return _extended(
        StopCase,
        case,
        stop_from=draw(st.integers(0, 15), label="stop sequence from"),
        stop_len=draw(st.integers(1, 4), label="stop sequence length"),
        min_new_tokens=draw(st.integers(0, 8), label="least length"),
    )


@st.composite
def turn_cases(draw: Draw, subject: Subject, *, min_added: int) -> StopCase:
    """One to three texts beside the prompt: later turns, which may add nothing, or other requests."""
    case = draw(generation_cases(subject, max_tokens=8, with_run=min_added == 0))
    turns = tuple(
        draw(_turns(subject.vocab_size(case.model), case.prompt, min_added=min_added))
        for _ in range(draw(st.integers(1, 3), label="turns"))
    )
    return _extended(
        StopCase,
        replace(case, eos_idx=draw(st.integers(-1, 7), label="end token")),
        stop_from=draw(st.integers(0, 7), label="stop sequence from"),
        stop_len=draw(st.integers(0, 2), label="stop sequence length"),
        min_new_tokens=draw(st.integers(0, 4), label="least length"),
        turns=turns,
    )


@st.composite
def _turns(draw: Draw, vocab_size: int, prompt: tuple[int, ...], *, min_added: int) -> tuple[int, ...]:
    """Any tokens, or the prompt, with its beginning or its end changed or as it is: a cache that looks at the length
    and a part of a text takes the one for the other. Turns that may add nothing often do."""
    others = ["no"] * (1 if min_added else 6)
    copies = ("same beginning", "same beginning", "same end", "same")
    near = draw(st.sampled_from((*others, *copies)), label="near copy of the prompt")
    if near == "same":
        return prompt
    if near != "no":
        cut = draw(st.sampled_from(range(len(prompt) + 1)), label="where the copy changes")
        shift = draw(st.integers(1, vocab_size - 1), label="shift")
        other = tuple((token + shift) % vocab_size for token in prompt)
        return (*prompt[:cut], *other[cut:]) if near == "same beginning" else (*other[:cut], *prompt[cut:])
    return tuple(
        draw(st.integers(0, vocab_size - 1), label=f"token {idx}")
        for idx in range(draw(st.sampled_from((*range(min_added, 13), *(min_added,) * 12)), label="length"))
    )


@st.composite
def penalty_cases(draw: Draw, subject: Subject) -> ProcessorCase:
    """Each penalty alone or with others, large enough to change what is said. Every second one is over the smallest
    vocabulary, where all logits of a row are often negative, tokens come again and counts decide."""
    sizes = [subject.vocab_size(idx) for idx in range(subject.bank.num_models)]
    smallest = draw(st.booleans(), label="smallest vocabulary")
    case = draw(generation_cases(subject, model=sizes.index(min(sizes)) if smallest else None))
    hundredths = st.sampled_from([0, 50, 150, 300, -100])
    return _extended(
        ProcessorCase,
        case,
        repetition=draw(st.sampled_from([100, 130, 180, 80]), label="repetition"),
        presence=draw(hundredths, label="presence"),
        frequency=draw(hundredths, label="frequency"),
    )


@st.composite
def bad_word_cases(draw: Draw, subject: Subject) -> ProcessorCase:
    """One to five bans of one to three tokens."""
    case = draw(generation_cases(subject))
    bans = tuple(
        (
            draw(st.integers(0, 15), label=f"ban {idx} from"),
            draw(st.sampled_from((1, 2, 2, 3)), label=f"length of ban {idx}"),
        )
        for idx in range(draw(st.integers(1, 5), label="bans"))
    )
    return _extended(ProcessorCase, case, bans=bans)


@st.composite
def grammar_cases(draw: Draw, subject: Subject) -> ProcessorCase:
    """Two to four states, each with one to four tokens that lead to different states."""
    case = draw(generation_cases(subject))
    vocab_size = subject.vocab_size(case.model)
    num_states = draw(st.integers(2, 4), label="states")
    grammar = []
    for state in range(num_states):
        first = draw(st.integers(0, vocab_size - 1), label=f"first token of state {state}")
        row = []
        for idx in range(draw(st.integers(1, min(4, vocab_size)), label=f"tokens of state {state}")):
            row += [(first + idx) % vocab_size, draw(st.integers(0, num_states - 1), label=f"state after {idx}")]
        grammar.append(tuple(row))
    return _extended(ProcessorCase, case, grammar=tuple(grammar))


@st.composite
def chunk_cases(draw: Draw, subject: Subject) -> ChunkCase:
    """A prompt in up to four pieces, behind a kept prefix or none."""
    case = draw(tree_cases(subject))
    length = len(case.prefix)
    keep = draw(st.sampled_from(range(length + 1)), label="kept")
    chunks = tuple(
        draw(st.sampled_from(range(1, 9)), label=f"chunk {idx}")
        for idx in range(draw(st.integers(0, 3), label="chunks"))
    )
    return _extended(ChunkCase, case, keep=keep, chunks=chunks)


@st.composite
def long_cases(draw: Draw, subject: Subject) -> LongCase:
    """Sizes at powers of two and beside them, up to hundreds. A run is judged on the list in `fixed`, which has larger
    ones."""
    place = draw(places(subject))
    place["model"] = draw(st.sampled_from(_models_with_rows(subject)), label="model with rows")
    return LongCase(
        **place,
        prefix_len=draw(st.sampled_from(_around_powers_of_two(256)), label="prefix"),
        num_nodes=draw(st.sampled_from(_around_powers_of_two(128)[1:]), label="nodes"),
        shape=draw(st.sampled_from(LONG_SHAPES), label="shape"),
        chunk=draw(st.sampled_from((0, 16, 64)), label="chunk"),
        seed=draw(st.integers(0, 99), label="seed"),
    )


def _around_powers_of_two(end: int) -> list[int]:
    """0, 1, 2, 3, 4, 5, 7, 8, 9, 15 ... `end` + 1."""
    return sorted({2**power + beside for power in range(end.bit_length()) for beside in (-1, 0, 1)})


def _extended(kind: type[Any], case: Case, **more: Any) -> Any:
    """The same case with the fields that a kind of its own adds."""
    return kind(**{one.name: getattr(case, one.name) for one in fields(case)}, **more)


@st.composite
def threshold_cases(draw: Draw, subject: Subject) -> GenerationCase:
    """Scripted trees, or chains with the target's second choice in them: that is what a threshold may let pass."""
    case = draw(generation_cases(subject))
    case = replace(case, max_new_tokens=(case.max_new_tokens + 1) // 2)  # each case is generated once a threshold
    return draw(st.sampled_from([case, replace(case, rounds=(), drafter="runner_up")]), label="drafter")


@st.composite
def drafter_cases(
    draw: Draw, subject: Subject, *, with_law: bool = False, num_rounds: tuple[int, int] = (0, 4)
) -> DrafterCase:
    """A text with some rounds behind it, a budget and coins. Half of the prompts hold three tokens only, so that they
    repeat. with_law: for drafters that name their law, at a temperature, and no rounds. num_rounds: from, to."""
    model = draw(st.integers(0, subject.bank.num_models - 1), label="model")
    names = subject.drafters_with_law if with_law else subject.drafter_names
    vocab_size = subject.vocab_size(model)
    prompt = draw(prompts(draw(st.sampled_from([vocab_size, min(3, vocab_size)]), label="palette")))
    accepts, followers = [], []
    for _ in range(0 if with_law else draw(st.integers(*num_rounds), label="rounds")):
        accepts.append(draw(st.sampled_from((*range(12), *(-1,) * 4)), label="accept"))
        followers.append(draw(st.integers(0, vocab_size - 1), label="follower"))
    return DrafterCase(
        model=model,
        prompt=prompt,
        accepts=tuple(accepts),
        followers=tuple(followers),
        other_at=draw(st.sampled_from((*(-1,) * (len(accepts) + 1), *range(len(accepts)))), label="other request"),
        max_nodes=draw(
            st.sampled_from((2, 3, 4, 6, 6) if with_law else (*(16, 8, 5, 3) * 3, 2, 1, 0)), label="max_nodes"
        ),
        max_depth=draw(st.sampled_from((2, 1) if with_law else (*(4, 3, 2) * 3, 1, 0)), label="max_depth"),
        temperature=draw(st.sampled_from((100, 50, 200, 10) if with_law else (0, 100, 50)), label="temperature"),
        seed=draw(st.integers(0, 999), label="seed"),
        drafter=draw(st.sampled_from(names), label="drafter"),
    )


@st.composite
def self_draft_cases(draw: Draw, subject: Subject) -> GenerationCase:
    """Self-drafting behind a script: `accept` of a round is the level down to which its draft is left right."""
    place = draw(places(subject))
    prompt = draw(prompts(subject.vocab_size(place["model"])))
    levels = [draw(st.integers(0, 3), label="level") for _ in range(draw(st.integers(0, 3), label="spoilt rounds"))]
    ours = ("self_chain", "self_tree")
    drafter = draw(st.sampled_from((*ours, *OWN_DRAFTERS[: len(subject.self_drafters)])), label="drafter")
    return GenerationCase(
        **place,
        prompt=prompt,
        max_new_tokens=draw(st.integers(6, 16), label="max_new_tokens"),
        rounds=tuple(CommitRound((0,) * 4, (-1, 0, 1, 2), level) for level in levels),
        drafter=drafter,
    )


# Temperature, top_k, top_p, min_p together.
LAW_MIXTURES = ((70, 2, 80, 10), (100, 0, 62, 50))
# top_k, top_p, min_p of sampled generations.
LAW_CUTS = ((4, 100, 0), (0, 100, 0), (0, 60, 0), (0, 100, 30), (4, 90, 5))


@st.composite
def law_cases(draw: Draw, subject: Subject, *, with_params: bool = False, whole: bool = True) -> LawCase:
    """Drafts over a toy. with_params: at least one sampling parameter is not the usual one. whole: the law is found by
    going through every coin, so that wide and deep trees take three tokens only."""
    proposals, only_chains = subject.law_drafts
    proposal = draw(st.sampled_from(proposals), label="proposal")
    shapes = [one for one in LAW_SHAPES if not only_chains or is_chain(one)]
    if whole and proposal != "deterministic":  # each draft that is drawn multiplies what is gone through by V
        shapes = [one for one in SMALL_LAW_SHAPES if one in shapes]
    shape = draw(st.sampled_from(shapes), label="shape")
    sizes = (3,) if whole and len(shape) > 3 else (3, 3, 4) if len(shape) > 2 else (3, 4, 5)
    vocab_size = draw(st.sampled_from(sizes), label="vocabulary")
    usual, others = (100, 0, 100, 0), (*LAW_PARAMETERS, *LAW_MIXTURES)
    temperature, top_k, top_p, min_p = draw(st.sampled_from(others)) if with_params else usual
    return LawCase(
        vocab_size=vocab_size,
        seed=draw(st.integers(0, 999), label="seed"),
        parents=shape,
        proposal=proposal,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )


@st.composite
def sampled_cases(draw: Draw, subject: Subject, *, in_rows: bool = False) -> SampledCase:
    """Generations at a temperature. The simplest case, often the only one of a run, tells most: drafts that
    are drawn, and two tokens, whose law is flattened, so that few draws show what rounds have in common. Over
    more tokens cuts leave few enough texts to know them all."""
    models = _models_with_rows(subject) if in_rows else list(range(subject.bank.num_models))
    if not in_rows:  # whose contexts should differ
        models.insert(0, min(models, key=subject.vocab_size))
    model = draw(st.sampled_from(models), label="model")
    vocab_size = subject.vocab_size(model)
    proposals, only_chains = subject.law_drafts
    drawn = (DRAWN, DRAWN) if set(proposals) - {"deterministic"} else ()
    drafter = draw(st.sampled_from((*drawn, *(("scripted",) if "deterministic" in proposals else ()))), label="drafter")
    rounds = []
    if drafter == "scripted" and "build" in subject.has:
        for _ in range(draw(st.integers(1, 3), label="rounds")):
            one = draw(scripted_rounds(vocab_size, max_drafts=4))
            parents = tuple(range(-1, len(one.parents) - 1)) if only_chains else one.parents
            rounds.append(replace(one, parents=parents))
    cuts = draw(st.sampled_from(LAW_CUTS), label="cuts") if vocab_size > 2 else (0, 100, 0)
    return SampledCase(
        model=model,
        layout=draw(st.sampled_from(subject.layouts), label="layout"),
        prompt=draw(prompts(vocab_size)),
        max_new_tokens=draw(st.sampled_from((6, 5, 4) if vocab_size == 2 else (4, 3)), label="max_new_tokens"),
        rounds=tuple(rounds),
        drafter=drafter,
        seed=draw(st.integers(0, 9_999), label="seed"),
        num_rows=draw(st.sampled_from((3, 2, 4)), label="rows") if in_rows else 1,
        temperature=draw(st.sampled_from((400, 200) if vocab_size == 2 else (100, 200, 70)), label="temperature"),
        top_k=cuts[0],
        top_p=cuts[1],
        min_p=cuts[2],
    )


@st.composite
def seed_cases(draw: Draw, subject: Subject) -> SampledCase:
    """Longer texts without a script, which would go on from one request to the next. Where no oracle tells how likely a
    text is, they are so long and so hot that no sensible model says one again and again."""
    case = draw(sampled_cases(subject))
    length = draw(st.sampled_from((8, 10, 12) if subject.vocab_size(case.model) > 2 else (24, 32)), label="length")
    drafter = case.drafter if case.drafter != "scripted" else draw(st.sampled_from(("self_tree", "ngram")))
    case = replace(case, max_new_tokens=length, drafter=drafter, rounds=(), top_k=0, top_p=100, min_p=0)
    return case if "oracle" in subject.has else replace(case, max_new_tokens=24, temperature=500)


@st.composite
def accepted_cases(draw: Draw, subject: Subject) -> SampledCase:
    """Longer texts of more tokens, whose laws differ: there few drafts can be kept."""
    case = draw(sampled_cases(subject))
    sizes = [subject.vocab_size(idx) for idx in range(subject.bank.num_models)]
    model = draw(st.sampled_from([idx for idx, size in enumerate(sizes) if size > 2] or [0]), label="model of many")
    return replace(
        case,
        model=model,
        prompt=draw(prompts(sizes[model])),
        max_new_tokens=draw(st.sampled_from((12, 16, 8)), label="length"),
        drafter=DRAWN,
        rounds=(),
        temperature=draw(st.sampled_from((100, 150, 70)), label="temperature of texts"),
        top_k=0,
        top_p=100,
        min_p=0,
    )


@st.composite
def own_draft_cases(draw: Draw, subject: Subject) -> DrafterCase:
    """Small drafts of the target's own drafters over the model of two tokens, where there is one."""
    case = draw(drafter_cases(subject, with_law=True))
    sizes = [subject.vocab_size(idx) for idx in range(subject.bank.num_models)]
    model = sizes.index(min(sizes))
    return replace(
        case,
        model=model,
        prompt=draw(prompts(sizes[model])),
        max_nodes=draw(st.sampled_from((3, 2, 1)), label="nodes"),
        max_depth=draw(st.sampled_from((2, 1)), label="depth"),
        temperature=draw(st.sampled_from((100, 50)), label="temperature of both"),
    )


KERNEL_PREFIXES = (0, 1, 2, 7, 63, 64, 65, 131, 257, 1025)  # around blocks of keys
KERNEL_SIZES = ((1, 2, 3, 5, 8, 9), (31, 33, 63, 64, 65, 70, 129))  # nodes: usual, rare
WINDOWS = (1, 2, 5, 64, 66)


@st.composite
def attention_cases(draw: Draw, subject: Subject, claim: str) -> AttentionCase:
    """Trees behind prefixes, with the option that a claim is about, and now and then those of the claims before it."""
    bank = subject.bank
    assert isinstance(bank, KernelBank)
    own = next((option for option, one in CLAIM_OF.items() if one == claim), "")
    known = [one for one in CLAIM_OF if not subject.missing([one])]
    earlier = known[: known.index(own)] if own in known else known[:-1] if claim == "attention.lse" else []
    asked = {own, *(one for one in earlier if draw(st.integers(0, 3), label=one) == 3)}
    num_trees = draw(st.sampled_from((2, 3, 5)), label="trees") if "cu_nodes" in asked else 1
    trees = [draw(kernel_trees()) for _ in range(num_trees)]
    if "any_order" in asked:
        trees = [scrambled(one, draw(st.permutations(range(1, len(one))), label="order")) for one in trees]
    if "unused_rows" in asked:
        trees[-1] = (*trees[-1], UNUSED)
    return AttentionCase(
        trees=tuple(trees),
        prefix_lens=tuple(draw(st.sampled_from(KERNEL_PREFIXES), label="prefix") for _ in trees),
        num_key_heads=draw(st.sampled_from((1, 2)), label="key heads"),
        group=draw(st.sampled_from(bank.limits.groups), label="group"),
        head_dim=draw(st.sampled_from(bank.limits.head_dims), label="head size"),
        dtype=bank.label,
        page=draw(st.sampled_from(bank.limits.page_sizes), label="page") if "page_table" in asked else 0,
        codes=draw(st.sampled_from(bank.limits.codes), label="codes") if "k_scale" in asked else "",
        window=draw(st.sampled_from(WINDOWS), label="window") if "window" in asked else 0,
        soft_cap=150 if "soft_cap" in asked else 0,
        alibi=int("alibi_slopes" in asked),
        large=draw(st.sampled_from((0, 0, 0, 1)), label="large scores"),
        strided=int("strides" in asked),
        num_splits=draw(st.sampled_from((1, 2, 3)), label="splits"),
        dead=int("dead_rows" in asked),
        seed=draw(st.integers(0, 2**16), label="seed"),
    )


@st.composite
def kernel_trees(draw: Draw) -> tuple[int, ...]:
    """Mostly small; chains, stars and whatever lies between."""
    num_nodes = draw(st.sampled_from(KERNEL_SIZES[draw(st.integers(0, 9), label="rarely large") == 9]), label="nodes")
    kind = draw(st.sampled_from(("any", "any", "chain", "star", "recent")), label="shape")
    parents = [-1]
    for node in range(1, num_nodes):
        lowest = {"any": 0, "chain": node - 1, "star": 0, "recent": max(0, node - 4)}[kind]
        parents.append(draw(st.integers(lowest, 0 if kind == "star" else node - 1)))
    return tuple(parents)


def scrambled(parents: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The same tree with its nodes but the root in another order: node order[i] becomes node i + 1."""
    place = {node: at for at, node in enumerate((0, *order))}
    return tuple(-1 if parents[node] < 0 else place[parents[node]] for node in (0, *order))


# What each claim is judged on: the kind of case, and the strategy that draws it.
Strategy = Callable[[Subject], st.SearchStrategy[Any]]
_DRAWN: dict[str, tuple[type[Case], Strategy]] = {
    "tree.noninterference": (PerturbedCase, interference_cases),
    "tree.sensitivity": (PerturbedCase, sensitivity_cases),
    "tree.long": (LongCase, long_cases),
    "kv.commit": (CommitCase, commit_cases),
    "kv.rollback": (CommitCase, commit_cases),
    "kv.dead_rows": (CommitCase, commit_cases),
    "kv.fork": (CommitCase, commit_cases),
    "kv.pages": (CommitCase, paged_cases),
    "kv.abort": (CommitCase, commit_cases),
    "kv.chunked": (ChunkCase, chunk_cases),
    "greedy.walk": (WalkCase, walk_cases),
    "verify.batch": (WalkBatchCase, walk_batch_cases),
    "batch.solo": (BatchCase, lambda subject: batch_cases(subject, joins=False)),
    "batch.join": (BatchCase, lambda subject: batch_cases(subject, joins=True)),
    "ranks.agree": (GenerationCase, lambda subject: generation_cases(subject, max_tokens=8)),
    "greedy.repeatable": (StopCase, lambda subject: turn_cases(subject, min_added=1)),
    "progress": (
        GenerationCase,
        lambda subject: st.one_of(generation_cases(subject, always_wrong=True), generation_cases(subject)),
    ),
    "cost.rows": (GenerationCase, cost_cases),
    "stop.sequences": (StopCase, stop_cases),
    "stop.min_tokens": (StopCase, stop_cases),
    "stop.every_index": (
        GenerationCase,
        lambda subject: generation_cases(subject, min_tokens=4, max_tokens=5, with_run=True),
    ),
    "stop.resume": (StopCase, lambda subject: turn_cases(subject, min_added=0)),
    "processors.penalties": (ProcessorCase, penalty_cases),
    "processors.bad_words": (ProcessorCase, bad_word_cases),
    "processors.grammar": (ProcessorCase, grammar_cases),
    "threshold.consistency": (GenerationCase, threshold_cases),
    "metrics.acceptance": (GenerationCase, metric_cases),
    "drafter.state": (DrafterCase, lambda subject: drafter_cases(subject, num_rounds=(2, 5))),
    "drafter.law": (DrafterCase, lambda subject: drafter_cases(subject, with_law=True)),
    "drafter.self_draft": (GenerationCase, self_draft_cases),
    "greedy.temperature_zero": (LawCase, lambda subject: law_cases(subject, whole=False)),
    "law.exact": (LawCase, law_cases),
    "law.params": (LawCase, lambda subject: law_cases(subject, with_params=True)),
    "law.support": (LawCase, lambda subject: st.one_of(law_cases(subject), law_cases(subject, with_params=True))),
    "law.acceptance_bound": (LawCase, law_cases),
    "law.q": (DrafterCase, own_draft_cases),
    "law.joint": (SampledCase, sampled_cases),
    "law.accepted": (SampledCase, accepted_cases),
    "law.rows": (SampledCase, lambda subject: sampled_cases(subject, in_rows=True)),
    "law.seed": (SampledCase, seed_cases),
    "sampler.law": (LawCase, lambda subject: st.one_of(law_cases(subject), law_cases(subject, with_params=True))),
}


def _drawn(claim: str) -> tuple[type[Case], Strategy]:
    if claim in _DRAWN:
        return _DRAWN[claim]
    if claim.startswith("attention."):
        return AttentionCase, lambda subject: attention_cases(subject, claim)
    if claim.startswith("drafter."):
        return DrafterCase, drafter_cases
    return (TreeCase, tree_cases) if claim.startswith("tree.") else (GenerationCase, generation_cases)


def strategy_for(claim: str, subject: Subject) -> st.SearchStrategy[Any]:
    """The cases a claim is judged on."""
    return _drawn(claim)[1](subject)


def case_kind(claim: str) -> type[Case]:
    """The kind of case that `strategy_for` draws for a claim, and a replay must bring."""
    return MachineCase if claim == "kv.machine" else _drawn(claim)[0]


def _other(draw: Draw, token: int, vocab_size: int) -> int:
    """A token other than `token`."""
    return (token + draw(st.integers(1, vocab_size - 1), label="shift")) % vocab_size
