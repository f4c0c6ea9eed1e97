"""Making a failing case smaller by its structure; Hypothesis only draws (`judge` leaves its shrinker out).

Taking one node out of a tree changes parents, tokens and whatever is listed per node at once, which a shrinker of draws
finds only by luck. Here each step is one such change; it is kept when the case still fails in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from specbench.cases import (
    ROW_ADDITIONS,
    TOKEN_OPS,
    AttentionCase,
    BatchCase,
    BatchRequest,
    Case,
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
    TreeCase,
    Walk,
    WalkBatchCase,
    WalkCase,
)

MAX_AT_ONCE = 2_048  # tokens of a long prefix that may come in one piece: scores grow with the square
BUDGETS = ("max_nodes", "max_depth", "seed")  # of a drafter's case


def reduce_case(case: Case, fails: Callable[[Case], bool], *, max_checks: int) -> Case:
    """The smallest case reached by greedy steps. fails: whether a case shows the same violation. At most `max_checks`
    cases are tried.

    After a step that succeeds the search goes on where it was: what failed before mostly fails again. Only when it has
    come to the end does it begin anew, until a whole pass brings nothing.
    """
    num_checks = first = 0
    while True:
        for number, smaller in enumerate(smaller_cases(case)):
            if number < first:
                continue
            if num_checks == max_checks:
                return case
            num_checks += 1
            if fails(smaller):
                case, first = smaller, number
                break
        else:
            if first == 0:
                return case
            first = 0


def smaller_cases(case: Case) -> Iterator[Case]:
    """Cases one step smaller, the boldest steps first. Every step lowers nodes, lengths, or the sum of numbers."""
    if isinstance(case, LawCase):
        yield from _simpler_laws(case)
        return
    if isinstance(case, AttentionCase):
        yield from _simpler_attention(case)
        return
    if isinstance(case, GenerationCase):  # every later try is then cheaper
        for lower in sorted({2, case.max_new_tokens // 2}):
            if 2 <= lower < case.max_new_tokens:
                yield _with(case, max_new_tokens=lower)
    if isinstance(case, CommitCase | GenerationCase):
        yield from _fewer_rounds(case)
        for number, one in enumerate(case.rounds):
            for smaller in _smaller_rounds(one):
                yield _with(case, rounds=(*case.rounds[:number], smaller, *case.rounds[number + 1 :]))
    if isinstance(case, TreeCase | WalkCase):
        yield from _fewer_nodes(case)
    if isinstance(case, LongCase):
        yield from _shorter_contexts(case)
    if isinstance(case, BatchCase):
        yield from _smaller_batches(case)
    if isinstance(case, WalkBatchCase):
        yield from _smaller_walk_batches(case)
    if isinstance(case, DrafterCase):
        yield from _shorter_histories(case)
    yield from _shorter_prompts(case)
    yield from _fewer_additions(case)
    if case.layout != "tree_mask":
        yield _with(case, layout="tree_mask")
    if case.cache != "contiguous":
        yield _with(case, cache="contiguous")
    yield from _lower_numbers(case)
    if case.layout != "tree_mask" and isinstance(case, TreeCase):  # the number of rows changed with the layout alone
        yield from _fewer_nodes(replace(case, layout="tree_mask"))


def _simpler_laws(case: LawCase) -> Iterator[LawCase]:
    """A single draft, a draft less, another toy of few; no cut. Each costs seconds: every draft and coin is gone
    through."""
    for num_nodes in sorted({2, len(case.parents) - 1}):
        if 1 <= num_nodes < len(case.parents):
            yield replace(case, parents=case.parents[:num_nodes])
    if case.vocab_size > 3:
        yield replace(case, vocab_size=3)
    if case.seed > 3:
        for seed in range(3):
            yield replace(case, seed=seed)
    for name in ("temperature", "top_k", "top_p", "min_p"):
        usual = getattr(LawCase, name)
        if getattr(case, name) != usual:
            yield replace(case, **{name: usual})


def _simpler_attention(case: AttentionCase) -> Iterator[AttentionCase]:
    """A sequence less; an option less; fewer rows, a shorter prefix, fewer heads, smaller ones."""
    for idx in range(len(case.trees)):
        if len(case.trees) > 1:
            yield replace(case, trees=_without(case.trees, [idx]), prefix_lens=_without(case.prefix_lens, [idx]))
    for name in ("page", "codes", "window", "soft_cap", "alibi", "large", "strided", "num_splits", "dead"):
        usual = getattr(AttentionCase, name)
        if getattr(case, name) != usual:
            yield replace(case, **{name: usual})
    for idx, parents in enumerate(case.trees):
        for fewer in _fewer_rows(parents):
            yield replace(case, trees=(*case.trees[:idx], fewer, *case.trees[idx + 1 :]))
    for idx, prefix_len in enumerate(case.prefix_lens):
        for lower in sorted({0, prefix_len // 2, prefix_len - 1}):
            if 0 <= lower < prefix_len:
                yield replace(case, prefix_lens=(*case.prefix_lens[:idx], lower, *case.prefix_lens[idx + 1 :]))
    for name, least in (("group", 1), ("num_key_heads", 1), ("window", 1), ("page", 1), ("seed", 0)):
        value = getattr(case, name)
        for lower in sorted({least, value - 1}):
            if least <= lower < value:
                yield replace(case, **{name: lower})
    if case.head_dim > 8:
        yield replace(case, head_dim=8)


def _fewer_rows(parents: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Whole subtrees out, the largest first, then single inner nodes, whose children move up; unused rows singly."""
    below = {node: {node} for node in range(1, len(parents))}
    for node in below:
        other = parents[node]
        while other > 0:
            below[other].add(node)
            other = parents[other]
    for gone in sorted(below.values(), key=len, reverse=True):
        yield _renumbered(parents, sorted(gone))
    for node, subtree in below.items():
        if len(subtree) > 1:
            lifted = tuple(parents[node] if parent == node else parent for parent in parents)
            yield _renumbered(lifted, [node])


def _shorter_contexts(case: LongCase) -> Iterator[Case]:
    """A root alone, no prefix; a plainer case of the same size; then fewer nodes and a shorter prefix, by half, by a
    quarter ..., by one. Every try costs a prefill, so lengths are searched last, once."""
    yield from _cut(case, 0)
    plain = LongCase()
    names = ["model", "layout", "cache", "shape", "seed"]
    if case.prefix_len <= MAX_AT_ONCE:
        names.append("chunk")
    for name in names:
        if getattr(case, name) != getattr(plain, name):
            yield _with(case, **{name: getattr(plain, name)})
    for power in range(1, max(case.prefix_len, case.num_nodes).bit_length() + 1):
        yield from _cut(case, power)
    if case.prefix_len <= 256:
        for lower in sorted({1, case.chunk // 2}):
            if 0 < lower < case.chunk:
                yield _with(case, chunk=lower)


def _cut(case: LongCase, power: int) -> Iterator[Case]:
    """Fewer nodes and a shorter prefix, by their 2 ** power-th part."""
    for name, least in (("num_nodes", 1), ("prefix_len", 0)):
        value = getattr(case, name)
        lower = max(least, value - (value >> power))
        if lower < value and (power == 0 or lower > least):
            yield _with(case, **{name: lower})


def _shorter_histories(case: DrafterCase) -> Iterator[Case]:
    """A round less, or one that accepts less."""
    for idx in range(len(case.accepts)):
        accepts, followers = _without(case.accepts, [idx]), _without(case.followers, [idx])
        yield _with(case, accepts=accepts, followers=followers, other_at=min(case.other_at, len(accepts) - 1))
    if case.other_at >= 0:
        yield _with(case, other_at=-1)
    if case.temperature:
        yield _with(case, temperature=0)
    for name in ("accepts", "followers"):
        for values in _lower(getattr(case, name)):
            yield _with(case, **{name: values})


def _smaller_batches(case: BatchCase) -> Iterator[Case]:
    """A row less, or one row smaller in the way a generation is."""
    rows = case.rows
    for idx in range(len(rows)):
        if len(rows) > 1:
            yield _with(case, rows=_without(rows, [idx]))
    for idx, row in enumerate(rows):
        smaller = [
            replace(row, prompt=one.prompt, max_new_tokens=one.max_new_tokens, eos_idx=one.eos_idx, rounds=one.rounds)
            for one in smaller_cases(case.alone(idx))
            if isinstance(one, GenerationCase)
        ]
        smaller += [replace(row, arrival=lower) for lower in sorted({0, row.arrival // 2}) if lower < row.arrival]
        smaller.append(replace(row, eos_idx=-1))
        smaller += _fewer_row_additions(row)
        for one in smaller:
            if one.prompt != row.prompt:  # rows that share a prompt may have to go on sharing it
                alike = tuple(replace(two, prompt=one.prompt) if two.prompt == row.prompt else two for two in rows)
                if sum(two.prompt == row.prompt for two in rows) > 1:
                    yield _with(case, rows=alike)
            if one != row:  # else it was the model or the cache that had become smaller
                yield _with(case, rows=(*rows[:idx], one, *rows[idx + 1 :]))
    if case.batch_layout != "packed":
        yield _with(case, batch_layout="packed")


def _fewer_row_additions(row: BatchRequest) -> Iterator[BatchRequest]:
    """No penalty, no stop sequence, no least length; then a lower one of the last two."""
    for name in ROW_ADDITIONS:
        yield replace(row, **{name: getattr(BatchRequest, name)})
    for name in ("stop_from", "stop_len", "min_new_tokens"):
        value = getattr(row, name)
        for lower in sorted({value // 2, value - 1}):
            if 0 < lower < value:
                yield replace(row, **{name: lower})


def _smaller_walk_batches(case: WalkBatchCase) -> Iterator[Case]:
    walks = case.walks
    for idx in range(len(walks)):
        if len(walks) > 1:
            yield _with(case, walks=_without(walks, [idx]))
    for idx in range(len(walks)):
        for one in _fewer_nodes(case.alone(idx)):
            assert isinstance(one, WalkCase)
            walk = Walk(one.tokens, one.parents, one.winners)
            yield _with(case, walks=(*walks[:idx], walk, *walks[idx + 1 :]))


def _fewer_rounds(case: CommitCase | GenerationCase) -> Iterator[Case]:
    for number in range(len(case.rounds)):
        rest = _without(case.rounds, [number])
        if isinstance(case, GenerationCase):
            yield _with(case, rounds=rest)
        elif rest:
            yield _with(case, rounds=rest, next_roots=_without(case.next_roots, [number]))


def _smaller_rounds(one: CommitRound) -> Iterator[CommitRound]:
    for gone, parents in _smaller_trees(one.parents):
        if one.accept not in gone:
            accept = one.accept - sum(node < one.accept for node in gone)
            yield CommitRound(_without(one.tokens, gone), parents, accept)
    if one.accept:
        yield replace(one, accept=max(0, one.parents[one.accept]))
    for tokens in _lower(one.tokens):
        yield replace(one, tokens=tokens)


def _fewer_nodes(case: TreeCase | WalkCase) -> Iterator[Case]:
    if isinstance(case, WalkCase):
        yield from _shorter_walks(case)
        if any(len(one) > 1 for one in case.winners):
            yield _with(case, winners=tuple(one[:1] for one in case.winners))
    for gone, parents in _smaller_trees(case.parents):
        changes: dict[str, Any] = {"tokens": _without(case.tokens, gone), "parents": parents}
        if isinstance(case, WalkCase):
            changes["winners"] = _without(case.winners, gone)
        if isinstance(case, PerturbedCase):
            node = case.place - len(case.prefix)
            if node in gone:
                continue
            changes["place"] = case.place - sum(other < node for other in gone)
        yield _with(case, **changes)


def _shorter_walks(case: WalkCase) -> Iterator[Case]:
    """What hangs below one node as a tree of its own; then two nodes of a path made one, which judges as the lower."""
    num_nodes = len(case.parents)
    below = [[node] for node in range(num_nodes)]
    for node in range(num_nodes - 1, 0, -1):
        below[case.parents[node]] += below[node]
    for kept in sorted((sorted(one) for one in below[1:]), key=len):
        yield _with(
            case,
            tokens=tuple(case.tokens[node] for node in kept),
            parents=(-1, *(kept.index(case.parents[node]) for node in kept[1:])),
            winners=tuple(case.winners[node] for node in kept),
        )
    for node in range(1, num_nodes):
        parent = case.parents[node]
        lifted = tuple(parent if one == node else one for one in case.parents)
        winners = (*case.winners[:parent], case.winners[node], *case.winners[parent + 1 :])
        yield _with(
            case,
            tokens=_without(case.tokens, [node]),
            parents=_renumbered(lifted, [node]),
            winners=_without(winners, [node]),
        )


def _smaller_trees(parents: tuple[int, ...]) -> Iterator[tuple[list[int], tuple[int, ...]]]:
    """Nodes to take out and the parents that remain: whole subtrees, the largest first, then single inner nodes, whose
    children move up; then all behind the first 2, 4, 8 ..., for what shows in some sizes only."""
    subtrees: list[list[int]] = [[node] for node in range(len(parents))]
    for node in range(len(parents) - 1, 0, -1):
        subtrees[parents[node]] += subtrees[node]
    for gone in sorted((sorted(one) for one in subtrees[1:]), key=len, reverse=True):
        yield gone, _renumbered(parents, gone)
    for node in range(1, len(parents)):
        if len(subtrees[node]) > 1:
            lifted = tuple(parents[node] if parent == node else parent for parent in parents)
            yield [node], _renumbered(lifted, [node])
    size = 2
    while size < len(parents) - 1:
        yield list(range(size, len(parents))), parents[:size]
        size *= 2


def _renumbered(parents: tuple[int, ...], gone: Sequence[int]) -> tuple[int, ...]:
    return tuple(parent - sum(node < parent for node in gone) for parent in _without(parents, gone))


def _fewer_additions(case: Case) -> Iterator[Case]:
    """Whatever a kind of case adds to prompt and trees: turns, bans, pieces, operations."""
    for name in ("turns", "bans", "chunks", "ops"):
        values: tuple[Any, ...] = getattr(case, name, ())
        for idx in range(len(values)):
            yield _with(case, **{name: _without(values, [idx])})
    for idx, turn in enumerate(getattr(case, "turns", ())):
        if len(turn) > 1:
            yield _with(case, turns=(*case.turns[:idx], turn[:1], *case.turns[idx + 1 :]))  # type: ignore[attr-defined]
    if isinstance(case, MachineCase):
        for idx, op in enumerate(case.ops):
            for smaller in _smaller_ops(op):
                yield _with(case, ops=(*case.ops[:idx], smaller, *case.ops[idx + 1 :]))
    if isinstance(case, ProcessorCase):
        for name, neutral in (("repetition", 100), ("presence", 0), ("frequency", 0)):
            if getattr(case, name) != neutral:
                yield _with(case, **{name: neutral})
        for state, row in enumerate(case.grammar):
            for first in range(0, len(row), 2):
                if len(row) > 2:
                    rows = (*case.grammar[:state], _without(row, [first, first + 1]), *case.grammar[state + 1 :])
                    yield _with(case, grammar=rows)


def _smaller_ops(op: Op) -> Iterator[Op]:
    if op.parents:
        for gone, parents in _smaller_trees(op.parents):
            yield replace(op, numbers=_without(op.numbers, gone), parents=parents)
    elif op.name in TOKEN_OPS and len(op.numbers) > 1:
        yield replace(op, numbers=op.numbers[:1])
    for numbers in _lower(op.numbers):
        yield replace(op, numbers=numbers)


def _shorter_prompts(case: Case) -> Iterator[Case]:
    prompt: tuple[int, ...] = getattr(case, "prompt", ())
    for num_cut in sorted({len(prompt) - 1, len(prompt) // 2, 1}, reverse=True):
        if not 0 < num_cut < len(prompt):
            continue
        if isinstance(case, PerturbedCase):
            if case.place >= num_cut:
                yield _with(case, prompt=prompt[num_cut:], place=case.place - num_cut)
        else:
            yield _with(case, prompt=prompt[num_cut:])


def _lower_numbers(case: Case) -> Iterator[Case]:
    for name in (
        "max_new_tokens",
        "cut",
        "eos_idx",
        "stop_from",
        "stop_len",
        "min_new_tokens",
        "keep",
        "flavour",
        *BUDGETS,
    ):
        value = getattr(case, name, 0)
        lowest = 1 if name in ("max_new_tokens", "stop_len") else 0
        for lower in sorted({lowest, value // 2, value - 1}):
            if lowest <= lower < value:
                yield _with(case, **{name: lower})
    for model in range(case.model):
        yield _with(case, model=model)
    for name in ("prompt", "tokens", "next_roots"):
        for values in _lower(getattr(case, name, ())):
            if not isinstance(case, TreeCase):
                yield _with(case, **{name: values})
            elif name == "prompt":
                yield _with(case, prompt=values, tokens=(values[-1], *case.tokens[1:]))
            elif values[0] == case.prompt[-1]:
                yield _with(case, tokens=values)


def _lower(values: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if any(values):
        yield (0,) * len(values)
        for idx, value in enumerate(values):
            if value:
                yield (*values[:idx], 0, *values[idx + 1 :])


def _without(values: tuple[Any, ...], gone: Sequence[int]) -> tuple[Any, ...]:
    return tuple(value for idx, value in enumerate(values) if idx not in gone)


def _with(case: Case, **changes: Any) -> Case:
    return replace(case, **changes)
