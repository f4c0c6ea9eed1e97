"""Caches that keep the wrong rows between rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specbench.protocols import Cache, LanguageModel
from specbench.reference.faults.fault import Fault
from specbench.reference.faults.rewrite import rewrite, rows_behind, spec_of
from specbench.reference.model import LlamaModel
from specbench.steps import CommitStep, FlatTree, Steps
from specbench.tree import DraftTree
from specbench.types import Taps

Plant = Callable[[Steps], Steps]


def _with_commit(commit: CommitStep) -> Plant:
    return lambda steps: replace(steps, commit=commit)


def _keeping(choose: Callable[[list[int], int], Sequence[int]]) -> Plant:
    """choose: (the right rows, how many the block has) -> the rows that are kept."""
    return _with_commit(
        lambda cache, prefix_len, rows: cache.commit(prefix_len, choose(list(rows), cache.length - prefix_len))
    )


def _keeping_by_layout(choose: Callable[[FlatTree, list[int]], Sequence[int]]) -> Plant:
    """choose: (the block as it was laid out, the right rows) -> the rows that are kept."""

    def plant(steps: Steps) -> Steps:
        last: list[FlatTree] = []

        def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
            last[:] = [steps.flatten(tree, prefix_len)]
            return last[0]

        def commit(cache: Cache, prefix_len: int, rows: Sequence[int]) -> None:
            cache.commit(prefix_len, choose(last[0], list(rows)))

        return replace(steps, flatten=flatten, commit=commit)

    return plant


def _no_rollback(cache: Cache, prefix_len: int, rows: Sequence[int]) -> None:
    """Nothing is dropped: rejected rows stay where the forward left them."""


def _minus_zero(cache: Cache, prefix_len: int, rows: Sequence[int]) -> None:
    """`keys[:, :-num_rejected]` is empty where nothing was rejected."""
    num_rejected = cache.length - prefix_len - len(rows)
    cache.commit(prefix_len, rows)
    if not num_rejected:
        cache.truncate(0)


def _count_of_the_round_before(steps: Steps) -> Steps:
    """The rows are this round's; how many of them are kept was read before its verdict was in."""
    counts: list[int] = []

    def commit(cache: Cache, prefix_len: int, rows: Sequence[int]) -> None:
        counts.append(len(rows))
        num_kept = counts[-2:][0]
        behind = range(rows[-1] + 1, cache.length - prefix_len)
        steps.commit(cache, prefix_len, [*rows, *behind][:num_kept])

    return replace(steps, commit=commit)


def _path_of_the_round_before(steps: Steps) -> Steps:
    """The buffer of row numbers is filled a round late, its length is not."""
    buffer: list[int] = []

    def commit(cache: Cache, prefix_len: int, rows: Sequence[int]) -> None:
        num_rows = cache.length - prefix_len
        stale = [row for row in buffer[: len(rows)] if row < num_rows]
        steps.commit(cache, prefix_len, [*stale, *rows[len(stale) :]])
        buffer[:] = rows

    return replace(steps, commit=commit)


def _in_place_from_the_end(cache: Cache, prefix_len: int, rows: Sequence[int]) -> None:
    """Row by row within one buffer, deepest node first: a source may have been overwritten by a deeper one."""
    layers = rows_behind(cache, prefix_len)
    for part in (part for layer in layers for part in layer):
        for place in reversed(range(len(rows))):
            part[:, place] = part[:, rows[place]]
    rewrite(cache, prefix_len, [(k[:, : len(rows)], v[:, : len(rows)]) for k, v in layers])


def _moving(move: Callable[[int, int, Tensor, Sequence[int]], Tensor], *, keys: bool = True) -> Plant:
    """move: (layer, layers, rows of the block [H, M, D], right rows) -> what is kept of values, and of keys too where
    `keys` says so."""

    def commit(cache: Cache, prefix_len: int, rows: Sequence[int]) -> None:
        layers = rows_behind(cache, prefix_len)
        kept = [
            (move(idx, len(layers), k, rows) if keys else k[:, list(rows)], move(idx, len(layers), v, rows))
            for idx, (k, v) in enumerate(layers)
        ]
        rewrite(cache, prefix_len, kept)

    return _with_commit(commit)


def _half_the_heads(layer: int, num_layers: int, part: Tensor, rows: Sequence[int]) -> Tensor:
    num_moved = max(1, part.shape[0] // 2)
    return torch.cat([part[:num_moved, list(rows)], part[num_moved:, : len(rows)]])


def _turned_when_moved(sign: int) -> Plant:
    """Keys that move are turned by as many positions as they move, backwards (-1) or forwards (1)."""

    def plant(steps: Steps) -> Steps:
        models: list[LanguageModel] = []

        def forward(model: LanguageModel, flat: FlatTree, cache: Cache, *, taps: Taps | None = None) -> Tensor:
            models[:] = [model]
            return steps.forward(model, flat, cache, taps=taps)

        def commit(cache: Cache, prefix_len: int, rows: Sequence[int]) -> None:
            layers, kept = rows_behind(cache, prefix_len), list(rows)
            model = models[0]
            assert isinstance(model, LlamaModel)
            cos, sin = model._rotation(sign * (torch.tensor(kept) - torch.arange(len(kept))))
            rewrite(
                cache,
                prefix_len,
                [
                    (k[:, kept] if layer.is_state else model._rotate(k[:, kept], cos, sin), v[:, kept])
                    for layer, (k, v) in zip(spec_of(cache).layers, layers, strict=True)
                ],
            )

        return replace(steps, forward=forward, commit=commit)

    return plant


def _known_by_token(steps: Steps) -> Steps:
    """Rows of the last block are set aside by token and position, and stand in for equal ones of the next."""
    aside: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}

    def forward(model: LanguageModel, flat: FlatTree, cache: Cache, *, taps: Taps | None = None) -> Tensor:
        prefix_len = cache.length
        logits = steps.forward(model, flat, cache, taps=taps)
        layers = rows_behind(cache, prefix_len)
        names = list(zip(flat.tokens.tolist(), flat.position_ids.tolist(), strict=True))
        fresh = {name: [(k[:, row].clone(), v[:, row].clone()) for k, v in layers] for row, name in enumerate(names)}
        for row, name in enumerate(names):
            for (k, v), (old_k, old_v) in zip(layers, aside.get(name, ()), strict=False):
                k[:, row], v[:, row] = old_k, old_v
        if any(name in aside for name in names):
            rewrite(cache, prefix_len, layers)
        aside.clear()
        aside.update(fresh)
        return logits

    return replace(steps, forward=forward)


def _first_of_its_depth(flat: FlatTree, rows: list[int]) -> list[int]:
    positions = flat.position_ids.tolist()
    return [positions.index(positions[row]) for row in rows]


def _first_with_its_token(flat: FlatTree, rows: list[int]) -> list[int]:
    tokens = flat.tokens.tolist()
    return [0, *(tokens.index(tokens[row]) for row in rows[1:])]


def _sorted_by_token(flat: FlatTree, rows: list[int]) -> list[int]:
    return [0, *sorted(rows[1:], key=lambda row: int(flat.tokens[row]))]


FAULTS = (
    Fault(
        "no_rollback",
        "kv-not-rolled-back",
        "rejected rows stay in the cache",
        "a rejected draft",
        "kv.commit",
        _with_commit(_no_rollback),
        origin="microsoft/onnxruntime-genai#2441",
    ),
    Fault(
        "kept_when_none_accepted",
        "kv-not-rolled-back",
        "the whole block stays where no draft was accepted: the crop hangs on a count above zero",
        "a round that accepts none of its drafts",
        "kv.commit",
        _keeping(lambda rows, num_rows: rows if len(rows) > 1 else range(num_rows)),
        subtle="accept count 0",
        kin="kept_on_accept_0",
    ),
    Fault(
        "trimmed_by_minus_zero",
        "kv-not-rolled-back",
        "rows are cut off by a negative index, which with nothing to cut off is all of them",
        "a round in which no row is rejected",
        "kv.commit",
        _with_commit(_minus_zero),
        subtle="full accept, or a round without drafts",
    ),
    Fault(
        "one_row_too_many",
        "kv-off-by-one",
        "the row behind the accepted path's last one is kept as well",
        "a draft behind the accepted path",
        "kv.commit",
        _keeping(lambda rows, num_rows: [*rows, rows[-1] + 1] if rows[-1] + 1 < num_rows else rows),
        origin="mlx-node/mlx-node#11",
    ),
    Fault(
        "one_row_kept_on_accept_0",
        "kv-off-by-one",
        "the first draft's row is kept where no draft was accepted",
        "a round that accepts none of its drafts",
        "kv.commit",
        _keeping(lambda rows, num_rows: rows if len(rows) > 1 else range(num_rows)[:2]),
        subtle="accept count 0",
        kin="kept_on_accept_0",
    ),
    Fault(
        "last_row_lost_on_full_accept",
        "kv-off-by-one",
        "the last draft's row is missing where the whole block was accepted",
        "a chain accepted to its end",
        "kv.commit",
        _keeping(lambda rows, num_rows: rows[:-1] if 1 < len(rows) == num_rows else rows),
        subtle="full accept",
    ),
    Fault(
        "root_row_lost",
        "kv-off-by-one",
        "the accepted drafts' rows are kept, the root's is not",
        "any round",
        "kv.commit",
        _keeping(lambda rows, num_rows: rows[1:]),
        kin="root_row_lost",
    ),
    Fault(
        "root_row_lost_on_accept_0",
        "kv-off-by-one",
        "with all drafts rejected the root's row goes with them",
        "a round that accepts none of its drafts",
        "kv.commit",
        _keeping(lambda rows, num_rows: [] if len(rows) == 1 < num_rows else rows),
        subtle="accept count 0",
        kin="root_row_lost",
    ),
    Fault(
        "count_of_the_round_before",
        "kv-off-by-one",
        "as many rows are kept as the round before accepted",
        "a second round with another accept count",
        "kv.commit",
        _count_of_the_round_before,
        subtle="a second round",
    ),
    Fault(
        "first_rows",
        "kv-wrong-path-compacted",
        "the first rows of the block are kept, as many as were accepted, whichever path it was",
        "an accepted path that is not the first rows in memory",
        "kv.commit",
        _keeping(lambda rows, num_rows: range(len(rows))),
        origin="sgl-project/sglang#15360",
    ),
    Fault(
        "one_slice",
        "kv-wrong-path-compacted",
        "the path is copied as one slice from its first accepted row on",
        "an accepted path with a gap below its first draft",
        "kv.commit",
        _keeping(lambda rows, num_rows: [0, *range(rows[1], rows[1] + len(rows) - 1)] if rows[1:] else rows),
        subtle="two accepted drafts with a row between them",
    ),
    Fault(
        "rows_without_the_root",
        "kv-wrong-path-compacted",
        "accepted drafts are looked for one row too early, as if the block began with the first draft",
        "an accepted draft",
        "kv.commit",
        _keeping(lambda rows, num_rows: [0, *(row - 1 for row in rows[1:])]),
    ),
    Fault(
        "path_reversed",
        "kv-wrong-path-compacted",
        "the accepted path is kept as it was walked up, from the leaf to the root's child",
        "two accepted drafts",
        "kv.commit",
        _keeping(lambda rows, num_rows: [0, *reversed(rows[1:])]),
        subtle="two accepted drafts",
        kin="path_order",
    ),
    Fault(
        "path_sorted_by_token",
        "kv-wrong-path-compacted",
        "the accepted drafts' rows are kept in the order of their tokens",
        "two accepted drafts, the second with the smaller token",
        "kv.commit",
        _keeping_by_layout(_sorted_by_token),
        subtle="two accepted drafts whose tokens fall",
        kin="path_order",
    ),
    Fault(
        "first_of_its_depth",
        "kv-wrong-path-compacted",
        "the path is gathered by depth: of all rows at a depth, the first",
        "an accepted node with an earlier sibling or cousin",
        "kv.commit",
        _keeping_by_layout(_first_of_its_depth),
        subtle="partial accept off the leftmost path",
    ),
    Fault(
        "first_with_its_token",
        "kv-wrong-path-compacted",
        "an accepted draft's row is found by its token, the first one that has it",
        "an accepted token that also stands in an earlier row",
        "kv.commit",
        _keeping_by_layout(_first_with_its_token),
        subtle="an accepted token that also stands earlier",
    ),
    Fault(
        "path_of_the_round_before",
        "kv-wrong-path-compacted",
        "the row numbers are those of the round before",
        "a second round with another path",
        "kv.commit",
        _path_of_the_round_before,
        subtle="a second round",
    ),
    Fault(
        "in_place_from_the_end",
        "kv-wrong-path-compacted",
        "rows are copied within one buffer from the deepest node upwards, over rows that are still to be read",
        "an accepted row that is another one's destination",
        "kv.commit",
        _with_commit(_in_place_from_the_end),
        subtle="an accepted path that overlaps the rows it moves to",
    ),
    Fault(
        "values_not_moved",
        "kv-wrong-path-compacted",
        "keys of the accepted path are gathered, values are not",
        "an accepted path that is not the first rows in memory",
        "kv.commit",
        _moving(lambda layer, num_layers, part, rows: part[:, : len(rows)], keys=False),
        subtle="an accepted path off the first rows",
        kin="part_not_moved",
    ),
    Fault(
        "half_the_heads_moved",
        "kv-wrong-path-compacted",
        "the gather moves the first half of the key/value heads",
        "an accepted path that is not the first rows in memory, with more than one key/value head",
        "kv.commit",
        _moving(_half_the_heads),
        subtle="grouped or full heads and an accepted path off the first rows",
        kin="part_not_moved",
    ),
    Fault(
        "first_layer_not_moved",
        "kv-wrong-path-compacted",
        "the gather begins with the second layer",
        "an accepted path that is not the first rows in memory",
        "kv.commit",
        _moving(lambda layer, num_layers, part, rows: part[:, list(rows) if layer else slice(len(rows))]),
        origin="sgl-project/sglang#30775",
        subtle="one layer only, and an accepted path off the first rows",
        kin="part_not_moved",
    ),
    Fault(
        "last_layer_not_moved",
        "kv-wrong-path-compacted",
        "the gather leaves the last layer out",
        "an accepted path that is not the first rows in memory",
        "kv.commit",
        _moving(
            lambda layer, num_layers, part, rows: part[:, list(rows) if layer + 1 < num_layers else slice(len(rows))]
        ),
        subtle="one layer only, and an accepted path off the first rows",
        kin="part_not_moved",
    ),
    Fault(
        "not_rotated_again",
        "kv-stale-after-reject",
        "keys are rotated by their row in the block and keep that angle when a commit moves them",
        "an accepted path that is not the first rows in memory",
        "kv.commit",
        _turned_when_moved(1),
        subtle="an accepted path off the first rows",
        kin="rotation_on_move",
    ),
    Fault(
        "rotated_twice",
        "kv-stale-after-reject",
        "keys that a commit moves are turned back by as many positions, though depth has rotated them already",
        "an accepted path that is not the first rows in memory",
        "kv.commit",
        _turned_when_moved(-1),
        subtle="an accepted path off the first rows",
        kin="rotation_on_move",
    ),
    Fault(
        "rejected_row_known_by_token",
        "kv-stale-after-reject",
        "a row of the last block is taken for any later one with its token and position, whatever lies before them",
        "the same token at the same position of two rounds, behind different tokens",
        "kv.commit",
        _known_by_token,
        subtle="a second round with an equal token behind other ancestors",
    ),
)
