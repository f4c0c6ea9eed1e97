"""Verifiers that keep the wrong drafts, lose right ones, or say the wrong token after them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specbench.reference.faults.fault import Fault
from specbench.reference.verify import argmax_lowest
from specbench.steps import Emission, FlatTree, Steps, WalkStep
from specbench.tree import DraftTree
from specbench.types import Stop, VerifyResult

Plant = Callable[[Steps], Steps]


def _ends_at(path: Sequence[int], target_logits: Tensor) -> VerifyResult:
    """A path and the argmax of its last node's row."""
    return VerifyResult(tuple(path), argmax_lowest(target_logits[path[-1] if path else 0]))


def _follow(tree: DraftTree, target_logits: Tensor, fits: Callable[[int, int], bool]) -> VerifyResult:
    """Down the tree to the first child that fits: `fits(parent, child)`."""
    node, path = 0, list[int]()
    while fitting := [child for child in tree.children(node) if fits(node, child)]:
        node = fitting[0]
        path.append(node)
    return _ends_at(path, target_logits)


def _with_walk(walk: WalkStep) -> Plant:
    return lambda steps: replace(steps, walk=walk)


def _is_full(tree: DraftTree, path: Sequence[int]) -> bool:
    return bool(path) and not tree.children(path[-1])


def _own_row(at_level: Callable[[int], bool]) -> WalkStep:
    """A draft at the levels named is judged by its own row."""

    def walk(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
        def fits(parent: int, child: int) -> bool:
            judge = child if at_level(int(tree.depth[child])) else parent
            return argmax_lowest(target_logits[judge]) == tree.token_list[child]

        return _follow(tree, target_logits, fits)

    return walk


def _own_row_after_full_accept(steps: Steps) -> Steps:
    was_full = False

    def walk(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
        nonlocal was_full
        rule = _own_row(lambda level: True) if was_full else steps.walk
        result = rule(tree, target_logits)
        was_full = _is_full(tree, result.path)
        return result

    return replace(steps, walk=walk)


def _first_unverified(walk: WalkStep) -> WalkStep:
    def walk_and_keep_one(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
        result = walk(tree, target_logits)
        return result if result.path or tree.num_drafts == 0 else _ends_at([1], target_logits)

    return walk_and_keep_one


def _always(steps: Steps) -> Steps:
    return replace(steps, walk=_first_unverified(steps.walk))


def _in_blocks_of_one(steps: Steps) -> Steps:
    def walk(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
        rule = _first_unverified(steps.walk) if tree.num_drafts == 1 else steps.walk
        return rule(tree, target_logits)

    return replace(steps, walk=walk)


def _in_the_first_round(steps: Steps) -> Steps:
    is_first = True

    def walk(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
        return (_first_unverified(steps.walk) if is_first else steps.walk)(tree, target_logits)

    def emit(tree: DraftTree, result: VerifyResult, **rest: Any) -> Emission:
        nonlocal is_first
        one = steps.emit(tree, result, **rest)
        is_first = one.finish_reason is not None
        return one

    return replace(steps, walk=walk, emit=emit)


def _after_a_plain_step(steps: Steps) -> Steps:
    was_plain = False

    def walk(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
        nonlocal was_plain
        result = (_first_unverified(steps.walk) if was_plain else steps.walk)(tree, target_logits)
        was_plain = tree.num_drafts == 0
        return result

    return replace(steps, walk=walk)


def _one_too_many(steps: Steps) -> Steps:
    def walk(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
        result = steps.walk(tree, target_logits)
        beyond = tree.children(result.path[-1] if result.path else 0)[:1]
        return _ends_at([*result.path, *beyond], target_logits)

    return replace(steps, walk=walk)


def _deepest_never(steps: Steps) -> Steps:
    def walk(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
        result = steps.walk(tree, target_logits)
        # The bonus token is then what the last draft said, so nothing is lost but a token a round.
        return _ends_at(result.path[:-1], target_logits) if _is_full(tree, result.path) else result

    return replace(steps, walk=walk)


def _at_least_one(steps: Steps) -> Steps:
    def walk(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
        result = steps.walk(tree, target_logits)
        return result if result.path or tree.num_drafts == 0 else VerifyResult((1,), result.bonus_token)

    return replace(steps, walk=walk)


def _one_turn_late(steps: Steps) -> Steps:
    def walk(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
        result = steps.walk(tree, target_logits)
        refused = tree.children(result.path[-1] if result.path else 0)
        return VerifyResult(result.path, argmax_lowest(target_logits[refused[0]])) if refused else result

    return replace(steps, walk=walk)


def _fits(tree: DraftTree, target_logits: Tensor) -> list[bool]:
    """For each node whether its parent's row says it. The root always fits."""
    parents = tree.parent_list
    return [True] + [
        argmax_lowest(target_logits[parents[node]]) == tree.token_list[node] for node in range(1, tree.num_nodes)
    ]


def _as_a_chain(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
    """Each node is judged by the row before its own in memory."""
    path: list[int] = []
    for node in range(1, tree.num_nodes):
        if argmax_lowest(target_logits[node - 1]) != tree.token_list[node]:
            break
        path.append(node)
    return _ends_at(path, target_logits)


def _run_in_memory(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
    """Judged rightly, but counted in memory order up to the first node that does not fit."""
    fits = _fits(tree, target_logits)
    last = (fits.index(False) if False in fits else len(fits)) - 1
    return _ends_at(tree.path_to(last)[1:], target_logits)


def _matches_anywhere(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
    """As many nodes of a path as fit, those behind a refused one included."""
    fits = _fits(tree, target_logits)
    best = max((path[1:] for path in tree.paths()), key=lambda path: sum(fits[node] for node in path))
    return _ends_at(best[: sum(fits[node] for node in best)], target_logits)


def _among_all_nodes(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
    """The next node is looked for at the next level, below whichever parent."""
    depths, path = tree.depth.tolist(), list[int]()
    while True:
        one = _ends_at(path, target_logits)
        level = [node for node in range(tree.num_nodes) if depths[node] == len(path) + 1]
        fitting = [node for node in level if tree.token_list[node] == one.bonus_token]
        if not fitting:
            return one
        path.append(fitting[0])


def _first_copy(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
    """Of duplicate siblings the first one is followed, and what hangs below another is never seen."""
    fits = _fits(tree, target_logits)
    return _follow(tree, target_logits, lambda parent, child: fits[child])


def _hiding(hidden: Callable[[DraftTree, int], bool]) -> Plant:
    """Nodes for which `hidden(tree, node)` holds are never found."""

    def plant(steps: Steps) -> Steps:
        def walk(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
            nobody = target_logits.shape[1]  # an id that no row says
            tokens = [nobody if node and hidden(tree, node) else token for node, token in enumerate(tree.token_list)]
            return steps.walk(DraftTree.of(tokens, tree.parent_list), target_logits)

        return replace(steps, walk=walk)

    return plant


def _siblings(tree: DraftTree, node: int) -> list[int]:
    return tree.children(tree.parent_list[node])


def _second_best(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
    def fits(parent: int, child: int) -> bool:
        row = target_logits[parent]
        return int((row > row[tree.token_list[child]]).sum()) < 2

    return _follow(tree, target_logits, fits)


def _half_as_likely(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
    probs = target_logits.softmax(dim=-1)
    return _follow(
        tree,
        target_logits,
        lambda parent, child: bool(2 * probs[parent, tree.token_list[child]] >= probs[parent].max()),
    )


def _zero_is_unset(steps: Steps) -> Steps:
    generator = torch.Generator().manual_seed(0)

    def walk(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
        uniform = torch.rand(target_logits.shape, dtype=torch.float64, generator=generator)
        return steps.walk(tree, target_logits.cpu().double() - (-uniform.log()).log())  # Gumbel: a draw by argmax

    return replace(steps, walk=walk)


def _divides_by_little(steps: Steps) -> Steps:
    def walk(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
        return steps.walk(tree, target_logits.half() / 1e-5)

    return replace(steps, walk=walk)


def _bonus_from(row_of: Callable[[DraftTree, Sequence[int]], int]) -> Plant:
    """After an accepted path the bonus token is read from another row."""

    def plant(steps: Steps) -> Steps:
        def walk(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
            path = steps.walk(tree, target_logits).path
            return VerifyResult(path, argmax_lowest(target_logits[row_of(tree, path) if path else 0]))

        return replace(steps, walk=walk)

    return plant


def _root_row_if_partial(tree: DraftTree, path: Sequence[int]) -> int:
    return path[-1] if _is_full(tree, path) else 0


def _no_bonus_on_full_accept(steps: Steps) -> Steps:
    def emit(
        tree: DraftTree, result: VerifyResult, *, stop: Stop, num_remaining: int, output: Sequence[int] = ()
    ) -> Emission:
        one = steps.emit(tree, result, stop=stop, num_remaining=num_remaining, output=output)
        if _is_full(tree, result.path) and len(one.tokens) > len(result.path):
            return Emission(one.tokens[:-1], None)
        return one

    return replace(steps, emit=emit)


def _bonus_not_fed(steps: Steps) -> Steps:
    """The next block begins with the last accepted draft, whose row it was that said the bonus token."""
    stale: tuple[int, int] | None = None  # where the next root stands, and the token that is put there

    def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
        nonlocal stale
        flat = steps.flatten(tree, prefix_len)
        place, stale = stale, None
        if place is None or place[0] != prefix_len:
            return flat
        return replace(flat, tokens=torch.where(flat.node_of_row == 0, place[1], flat.tokens))

    def commit(cache: Any, prefix_len: int, rows: Sequence[int]) -> None:
        nonlocal stale
        steps.commit(cache, prefix_len, rows)
        stale = (prefix_len + len(rows), accepted[-1]) if accepted else None

    accepted: list[int] = []

    def emit(tree: DraftTree, result: VerifyResult, **rest: Any) -> Emission:
        one = steps.emit(tree, result, **rest)
        accepted[:] = one.tokens[:-1]
        return one

    return replace(steps, flatten=flatten, commit=commit, emit=emit)


def _correction_twice(steps: Steps) -> Steps:
    def emit(tree: DraftTree, result: VerifyResult, *, num_remaining: int, **rest: Any) -> Emission:
        one = steps.emit(tree, result, num_remaining=num_remaining, **rest)
        if result.path or one.finish_reason or len(one.tokens) == num_remaining or tree.num_drafts == 0:
            return one
        return Emission((*one.tokens, one.tokens[-1]), None)

    return replace(steps, emit=emit)


def _rounded_rows(steps: Steps) -> Steps:
    def walk(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
        return steps.walk(tree, target_logits.to(torch.bfloat16))

    return replace(steps, walk=walk)


def _columns(end: int) -> Plant:
    def plant(steps: Steps) -> Steps:
        def walk(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
            return steps.walk(tree, target_logits[:, :end])

        return replace(steps, walk=walk)

    return plant


def _ids_modulo(end: int) -> Plant:
    def plant(steps: Steps) -> Steps:
        def walk(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
            said = torch.zeros_like(target_logits)
            for node, row in enumerate(target_logits):
                said[node, argmax_lowest(row) % end] = 1
            return steps.walk(DraftTree.of([token % end for token in tree.token_list], tree.parent_list), said)

        return replace(steps, walk=walk)

    return plant


FAULTS = (
    Fault(
        "own_row",
        "row-self",
        "a draft is judged by its own row, which has read it already, instead of its parent's",
        "any draft",
        "greedy.walk",
        _with_walk(_own_row(lambda level: True)),
        origin="mlx-node/mlx-node#11",
        kin="own_row",
    ),
    Fault(
        "own_row_of_first_draft",
        "row-self",
        "drafts right below the root are judged by their own rows, deeper ones by their parents'",
        "any draft",
        "greedy.walk",
        _with_walk(_own_row(lambda level: level == 1)),
        subtle="the first level only",
        kin="own_row",
    ),
    Fault(
        "own_row_below_first_draft",
        "row-self",
        "drafts below the first level are judged by their own rows",
        "an accepted draft with a child",
        "greedy.walk",
        _with_walk(_own_row(lambda level: level > 1)),
        subtle="depth two",
        kin="own_row",
    ),
    Fault(
        "own_row_after_full_accept",
        "row-self",
        "in the round after a fully accepted one drafts are judged by their own rows",
        "a full accept and a round after it: right drafts are refused there",
        "metrics.acceptance",
        _own_row_after_full_accept,
        subtle="the round after a full accept; the output mostly stays right",
        kin="own_row",
    ),
    Fault(
        "first_unverified",
        "accept-draft-first-unverified",
        "the first draft is kept when nothing was accepted",
        "a fully rejected draft",
        "greedy.walk",
        _always,
        origin="ohdearquant/lattice#243",
        kin="first_unverified",
    ),
    Fault(
        "single_draft_unverified",
        "accept-draft-first-unverified",
        "a block of one draft is kept unseen",
        "one wrong draft and no other",
        "greedy.walk",
        _in_blocks_of_one,
        origin="ohdearquant/lattice#243",
        subtle="blocks of length one",
        kin="first_unverified",
    ),
    Fault(
        "first_round_unverified",
        "accept-draft-first-unverified",
        "in the first round of a text the first draft is kept when nothing was accepted",
        "a fully rejected draft right behind the prompt",
        "greedy.lossless",
        _in_the_first_round,
        subtle="the first round",
        kin="first_unverified",
    ),
    Fault(
        "unverified_after_plain_step",
        "accept-draft-first-unverified",
        "the first draft is kept in the round after one without drafts",
        "a fully rejected draft whose root came from a plain step",
        "greedy.lossless",
        _after_a_plain_step,
        subtle="a plain step before it",
        kin="first_unverified",
    ),
    Fault(
        "one_too_many",
        "accept-off-by-one",
        "one draft more is kept than fits: the first that was refused",
        "a refused draft",
        "greedy.walk",
        _one_too_many,
    ),
    Fault(
        "at_least_one_accepted",
        "accept-off-by-one",
        "the accept length is never below one: the first draft is kept, and its correction follows it",
        "a fully rejected draft",
        "greedy.walk",
        _at_least_one,
    ),
    Fault(
        "deepest_never_accepted",
        "accept-off-by-one",
        "the last draft of a fully accepted path is judged as the bonus token: the output is right, a token is lost",
        "a full accept",
        "greedy.walk",
        _deepest_never,
        subtle="a full accept; the output stays right",
    ),
    Fault(
        "rejection_one_turn_late",
        "accept-off-by-one",
        "the correction comes from the row of the draft that was refused",
        "a refused draft",
        "greedy.walk",
        _one_turn_late,
        origin="openvinotoolkit/openvino.genai#4190",
        kin="bonus_row",
    ),
    Fault(
        "tree_walked_as_chain",
        "accept-wrong-branch",
        "the longest run of matches in memory order is accepted, whichever branches it runs through",
        "siblings",
        "greedy.walk",
        _with_walk(_as_a_chain),
    ),
    Fault(
        "run_in_memory_order",
        "accept-wrong-branch",
        "acceptance ends at the first node in memory that does not fit: behind a wrong sibling nothing is found",
        "a right draft behind a wrong sibling",
        "greedy.walk",
        _with_walk(_run_in_memory),
        subtle="a right sibling behind a wrong one; the output stays right",
    ),
    Fault(
        "matches_counted_anywhere",
        "accept-wrong-branch",
        "as many nodes of a path are accepted as fit, though they stand behind a refused one",
        "a draft that fits its parent's row below one that does not",
        "greedy.walk",
        _with_walk(_matches_anywhere),
        subtle="a right draft below a wrong one",
    ),
    Fault(
        "matched_below_any_parent",
        "accept-wrong-branch",
        "the next draft is looked for by token at the next level, below whichever parent",
        "the same token in two branches",
        "greedy.walk",
        _with_walk(_among_all_nodes),
        subtle="the same token in two branches",
    ),
    Fault(
        "copy_without_children",
        "accept-wrong-branch",
        "of duplicate siblings the first is followed, and what was drafted below the other is lost",
        "duplicate siblings of which a later one has the right child",
        "greedy.walk",
        _with_walk(_first_copy),
        subtle="duplicate siblings; the output stays right",
    ),
    Fault(
        "first_child_only",
        "accept-wrong-branch",
        "of siblings only the first is tried: the output is right, the tree is as good as its leftmost path",
        "a right draft that is not the first child",
        "greedy.walk",
        _hiding(lambda tree, node: node != _siblings(tree, node)[0]),
        subtle="width; the output stays right",
        kin="one_child",
    ),
    Fault(
        "last_child_only",
        "accept-wrong-branch",
        "of siblings only the last is tried",
        "a right draft that is not the last child",
        "greedy.walk",
        _hiding(lambda tree, node: node != _siblings(tree, node)[-1]),
        subtle="width; the output stays right",
        kin="one_child",
    ),
    Fault(
        "deep_siblings_not_tried",
        "accept-wrong-branch",
        "siblings are tried at the first level only; below it the first child stands for all",
        "a right draft at depth two that is not the first child",
        "greedy.walk",
        _hiding(lambda tree, node: tree.parent_list[node] > 0 and node != _siblings(tree, node)[0]),
        subtle="width at depth two; the output stays right",
        kin="one_child",
    ),
    Fault(
        "second_best_accepted",
        "accept-rule/residual-wrong",
        "a draft is accepted when it is among the two best of its parent's row",
        "a draft that is the second best",
        "greedy.walk",
        _with_walk(_second_best),
    ),
    Fault(
        "half_as_likely_accepted",
        "greedy-vs-sampling",
        "at temperature zero a draft is accepted when it is at least half as likely as the best token",
        "a draft nearly as likely as the best token",
        "greedy.walk",
        _with_walk(_half_as_likely),
        subtle="a near tie",
    ),
    Fault(
        "zero_temperature_unset",
        "greedy-vs-sampling",
        "a temperature of zero is taken for an unset one: tokens are drawn at temperature one",
        "any row",
        "greedy.walk",
        _zero_is_unset,
        origin="opendatahub-io/vllm-tgis-adapter#182",
    ),
    Fault(
        "divided_by_tiny_temperature",
        "greedy-vs-sampling",
        "a temperature of zero becomes 1e-5 in half precision, and logits overflow to infinities that tie",
        "two large logits",
        "greedy.walk",
        _divides_by_little,
        origin="NVIDIA-NeMo/Automodel#3627",
        subtle="logits beyond the range of half precision once divided",
    ),
    Fault(
        "bonus_row",
        "bonus/correction-token-wrong",
        "the bonus token comes from the row numbered by depth, not from the last accepted node's",
        "an accepted path off the leftmost one",
        "greedy.walk",
        _bonus_from(lambda tree, path: len(path)),  # right on a chain and nowhere else
        subtle="an accepted path off the leftmost one",
        kin="bonus_row",
    ),
    Fault(
        "bonus_of_parents_row",
        "bonus/correction-token-wrong",
        "after an accepted path the bonus token comes from the row that judged its last draft, and repeats it",
        "any accepted draft",
        "greedy.walk",
        _bonus_from(lambda tree, path: tree.parent_list[path[-1]]),
        origin="SafeAILab/EAGLE#47",
        kin="bonus_row",
    ),
    Fault(
        "correction_of_roots_row",
        "bonus/correction-token-wrong",
        "after a partly accepted path the correction comes from the root's row",
        "a path that is accepted in part",
        "greedy.walk",
        _bonus_from(_root_row_if_partial),
        subtle="a partial accept",
        kin="bonus_row",
    ),
    Fault(
        "no_bonus_on_full_accept",
        "bonus/correction-token-wrong",
        "after a fully accepted path no bonus token is emitted: the output is right, each such round is a token short",
        "a full accept",
        "metrics.acceptance",
        _no_bonus_on_full_accept,
        origin="ohdearquant/lattice#509",
        subtle="a full accept; the output stays right",
    ),
    Fault(
        "bonus_not_next_root",
        "bonus/correction-token-wrong",
        "the bonus token is emitted, but the next block begins with the last accepted draft in its place",
        "a round after an accepted draft",
        "greedy.lossless",
        _bonus_not_fed,
        subtle="a second round after an accepted draft",
    ),
    Fault(
        "correction_twice",
        "bonus/correction-token-wrong",
        "the correction after a rejection is emitted again as the first token of the next round",
        "a fully rejected draft, and a round after it",
        "greedy.lossless",
        _correction_twice,
        subtle="a round after a full rejection",
    ),
    Fault(
        "rows_rounded",
        "dtype/precision",
        "the verifier rounds the logits to bf16 before it compares them",
        "two logits closer than bf16 can tell",
        "greedy.walk",
        _rounded_rows,
        subtle="a near tie",
    ),
    Fault(
        "first_columns",
        "tokenizer/vocab",
        "the verifier looks at the first 16 columns of the vocabulary",
        "a larger vocabulary",
        "greedy.walk",
        _columns(16),
        kin="columns",
    ),
    Fault(
        "last_column_lost",
        "tokenizer/vocab",
        "the verifier leaves out the last column, which it takes for padding",
        "a row that says the last token of the vocabulary",
        "greedy.walk",
        _columns(-1),
        subtle="the last token of the vocabulary",
        kin="columns",
    ),
    Fault(
        "ids_in_a_byte",
        "tokenizer/vocab",
        "token ids are kept in a byte, so that 256 is taken for 0",
        "a token id beyond 255",
        "greedy.walk",
        _ids_modulo(2**8),
        subtle="a vocabulary of more than 256",
        kin="ids_modulo",
    ),
    Fault(
        "ids_in_two_bytes",
        "tokenizer/vocab",
        "token ids are kept in two bytes, so that 65536 is taken for 0",
        "a token id beyond 65535",
        "greedy.walk",
        _ids_modulo(2**16),
        origin="huggingface/transformers#2825",
        subtle="a vocabulary of more than 65536",
        kin="ids_modulo",
    ),
)
