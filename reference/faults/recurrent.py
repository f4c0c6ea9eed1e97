"""Recurrent layers that go on from the wrong state: after a commit, after a cut, or inside a tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specbench.protocols import Cache, LanguageModel
from specbench.reference.caches.cache import AppendableCache
from specbench.reference.caches.contiguous import ContiguousCache
from specbench.reference.faults.fault import Fault
from specbench.reference.faults.housing import CacheTarget
from specbench.reference.faults.rewrite import rewrite, rows_behind, spec_of
from specbench.reference.model import Mix
from specbench.reference.recurrent import HybridModel, State
from specbench.reference.target import ReferenceTarget
from specbench.steps import FlatTree, Steps
from specbench.tree import DraftTree
from specbench.types import Taps


@dataclass(frozen=True)
class _Block:
    """What a commit can see. rows: the right ones, the root's first. previous: those of the round before, or rows."""

    num_rows: int
    rows: list[int]
    previous: list[int]
    positions: list[int]


def _last_state(
    choose: Callable[[_Block], int], *, memory: bool = True, window: bool = True, first_layer: bool = True
) -> Callable[[Steps], Steps]:
    """The last kept snapshot of recurrent layers is the block's row that `choose` names. memory, window: whether that
    goes for the recurrence and for the convolution. first_layer: whether it goes for the first such layer."""

    def plant(steps: Steps) -> Steps:
        previous: list[int] = []
        last: list[FlatTree] = []

        def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
            last[:] = [steps.flatten(tree, prefix_len)]
            return last[0]

        def commit(cache: Cache, prefix_len: int, rows: Sequence[int]) -> None:
            layers = rows_behind(cache, prefix_len)
            states = [idx for idx, layer in enumerate(spec_of(cache).layers) if layer.is_state]
            block = _Block(cache.length - prefix_len, list(rows), previous or list(rows), last[0].position_ids.tolist())
            wrong, right = torch.tensor([*rows[:-1], choose(block)]), torch.tensor(list(rows))
            steps.commit(cache, prefix_len, rows)
            previous[:] = rows
            kept = []
            for idx, (k, v) in enumerate(layers):
                is_wrong = idx in states and (first_layer or idx != states[0])
                kept.append(
                    (k[:, wrong if is_wrong and memory else right], v[:, wrong if is_wrong and window else right])
                )
            if states:
                rewrite(cache, prefix_len, kept)

        return replace(steps, flatten=flatten, commit=commit)

    return plant


def _state_before_the_block(steps: Steps) -> Steps:
    """Snapshots are taken before a block only, so that a commit finds the one behind the prefix."""

    def commit(cache: Cache, prefix_len: int, rows: Sequence[int]) -> None:
        layers, kept = rows_behind(cache, prefix_len), list(rows)
        if not prefix_len or not any(layer.is_state for layer in spec_of(cache).layers):
            steps.commit(cache, prefix_len, rows)
            return
        before = rows_behind(cache, prefix_len - 1)  # a row of the prefix, then the block
        steps.commit(cache, prefix_len, rows)
        old = [
            (torch.cat([k[:, kept[:-1]], b[0][:, :1]], 1), torch.cat([v[:, kept[:-1]], b[1][:, :1]], 1))
            for (k, v), b in zip(layers, before, strict=True)
        ]
        rewrite(
            cache,
            prefix_len,
            [
                stale if layer.is_state else (k[:, kept], v[:, kept])
                for layer, (k, v), stale in zip(spec_of(cache).layers, layers, old, strict=True)
            ],
        )

    return replace(steps, commit=commit)


class _StateNotCut(ContiguousCache):
    """A cut drops rows of attention layers; a recurrent layer goes on from the state it has."""

    def truncate(self, length: int) -> None:
        newest = [(k[:, -1:], v[:, -1:]) for k, v in zip(self._keys, self._values, strict=True)]
        is_cut = 0 < length < self.length
        super().truncate(length)
        for idx, layer in enumerate(self.spec.layers):
            if is_cut and layer.is_state:
                self._keys[idx][:, -1:], self._values[idx][:, -1:] = newest[idx]


class _RowByRow(HybridModel):
    """The rows of a tree are taken for a sequence: each one goes on from the row before it."""

    def _mix_behind(self, cache: AppendableCache, flat: FlatTree, taps: Taps | None) -> Mix:
        tree = super()._mix_behind(cache, flat, taps)
        sequence = super()._mix_behind(cache, replace(flat, mask=torch.ones_like(flat.mask).tril()), taps)
        return lambda layer, normed: (sequence if layer in self.recurrence.layers else tree)(layer, normed)


class _WindowOfTheRowBefore(HybridModel):
    """The convolution reads the rows before it, the recurrence its parent's state."""

    def _step(self, layer: int, x: Tensor, before: State) -> tuple[Tensor, State]:
        output, state = super()._step(layer, x, State(before.memory, self._newest.get(layer, before.window)))
        self._newest[layer] = state.window
        return output, state

    def _mix_behind(self, cache: AppendableCache, flat: FlatTree, taps: Taps | None) -> Mix:
        self._newest: dict[int, Tensor] = {}  # nothing goes before the first row of a block but its prefix
        return super()._mix_behind(cache, flat, taps)

    def _mix_causal(self, position_ids: Tensor, taps: Taps | None) -> Mix:
        self._newest = {}
        return super()._mix_causal(position_ids, taps)


def _as(kind: type[HybridModel]) -> Callable[[LanguageModel], LanguageModel]:
    """The same weights in a faulty class; models without recurrent layers as they are."""
    return lambda model: (
        kind(model.config, model.recurrence, model._weights, name=model.name)
        if isinstance(model, HybridModel)
        else model
    )


FAULTS = (
    Fault(
        "state_after_block",
        "recurrent-state-rollback",
        "a recurrent layer keeps its state behind the whole block, rejected rows included",
        "a rejection, in a model with recurrent layers",
        "kv.commit",
        _last_state(lambda block: block.num_rows - 1),
        origin="vllm-project/tpu-inference#3178",
        kin="state_of_another_row",
    ),
    Fault(
        "state_one_behind",
        "recurrent-state-rollback",
        "a recurrent layer keeps the state of the row before the last accepted one",
        "any accepted draft, in a model with recurrent layers: right when none is accepted",
        "kv.commit",
        _last_state(lambda block: block.rows[-2:][0]),
        subtle="an accepted draft",
        kin="state_of_another_row",
    ),
    Fault(
        "state_one_ahead",
        "recurrent-state-rollback",
        "a recurrent layer keeps the state of the row behind the last accepted one",
        "a row behind the accepted path, in a model with recurrent layers: right on a full accept",
        "kv.commit",
        _last_state(lambda block: min(block.rows[-1] + 1, block.num_rows - 1)),
        subtle="partial accept",
        kin="state_of_another_row",
    ),
    Fault(
        "state_of_the_root",
        "recurrent-state-rollback",
        "a recurrent layer keeps the state behind the root, however many drafts are accepted",
        "any accepted draft, in a model with recurrent layers: right when none is accepted",
        "kv.commit",
        _last_state(lambda block: 0),
        subtle="two accepted drafts tell it from one row behind",
        kin="state_of_another_row",
    ),
    Fault(
        "state_of_the_first_sibling",
        "recurrent-state-rollback",
        "a recurrent layer keeps the state of the first row at the last accepted one's depth",
        "an accepted node with an earlier sibling or cousin, in a model with recurrent layers",
        "kv.commit",
        _last_state(lambda block: block.positions.index(block.positions[block.rows[-1]])),
        subtle="partial accept off the leftmost path",
    ),
    Fault(
        "state_of_the_last_rounds_row",
        "recurrent-state-rollback",
        "a recurrent layer keeps the state of the row that the round before ended with",
        "a second round with another path, in a model with recurrent layers",
        "kv.commit",
        _last_state(lambda block: min(block.previous[-1], block.num_rows - 1)),
        subtle="a second rollback, of another length",
    ),
    Fault(
        "state_before_the_block",
        "recurrent-state-rollback",
        "a recurrent layer goes back to its state before the block and is not brought up to the accepted rows",
        "any round behind a prefix, in a model with recurrent layers",
        "kv.commit",
        _state_before_the_block,
    ),
    Fault(
        "first_state_rolled_back_alone",
        "recurrent-state-rollback",
        "only the first recurrent layer is rolled back",
        "a rejection, in a model with two recurrent layers",
        "kv.commit",
        _last_state(lambda block: block.num_rows - 1, first_layer=False),
        subtle="a second recurrent layer",
        kin="part_of_a_state",
    ),
    Fault(
        "convolution_not_rolled_back",
        "recurrent-state-rollback",
        "the recurrence is rolled back, the window of the convolution before it is not",
        "a rejection, in a model with recurrent layers",
        "kv.commit",
        _last_state(lambda block: block.num_rows - 1, memory=False),
        origin="ekryski/mlx-swift-lm#218",
        subtle="the convolution's part of the state only",
        kin="part_of_a_state",
    ),
    Fault(
        "state_not_cut",
        "recurrent-state-rollback",
        "a cut drops the rows of attention layers and leaves the state of recurrent ones as it is",
        "a cut, or a forward that is dropped, in a model with recurrent layers",
        "kv.rollback",
        target=lambda: CacheTarget("contiguous", _StateNotCut),
        origin="ml-explore/mlx-lm#1111",
        subtle="a cut rather than a rejection",
    ),
    Fault(
        "state_of_the_previous_row",
        "recurrent-state-rollback",
        "inside a tree a recurrent layer goes on from the row before instead of the parent's",
        "siblings, in a model with recurrent layers",
        "kv.commit",
        target=lambda: ReferenceTarget(plant_model=_as(_RowByRow)),
        subtle="a node whose parent is not the row before",
    ),
    Fault(
        "window_of_the_previous_row",
        "recurrent-state-rollback",
        "inside a tree the recurrence goes on from the parent, the convolution before it from the row before",
        "siblings, in a model with recurrent layers",
        "kv.commit",
        target=lambda: ReferenceTarget(plant_model=_as(_WindowOfTheRowBefore)),
        subtle="the convolution's part of the state only, in a tree with siblings",
        kin="part_of_a_state",
    ),
)
