"""Sizes that do not fit: into an index type, a table, a word of a bitmask, a block. Right in every small case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specbench.protocols import Cache, LanguageModel
from specbench.reference.decoder import Decoder
from specbench.reference.faults.fault import Fault
from specbench.reference.layouts import flatten_causal
from specbench.reference.model import LlamaModel
from specbench.reference.target import ReferenceTarget
from specbench.steps import FlatTree, Steps
from specbench.tree import DraftTree
from specbench.types import Taps

TABLE = 1024
WORD = 64
BLOCK = 64
TILE = 256


def _table_of_positions(steps: Steps) -> Steps:
    def forward(model: LanguageModel, flat: FlatTree, cache: Cache, *, taps: Taps | None = None) -> Tensor:
        return steps.forward(model, replace(flat, position_ids=flat.position_ids % TABLE), cache, taps=taps)

    return replace(steps, forward=forward)


def _depth_in_a_byte(steps: Steps) -> Steps:
    def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
        flat = steps.flatten(tree, prefix_len)
        depth = (flat.position_ids - prefix_len).to(torch.int8).long()
        return replace(flat, position_ids=prefix_len + depth)

    return replace(steps, flatten=flatten)


def _one_word_a_row(steps: Steps) -> Steps:
    def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
        flat = steps.flatten(tree, prefix_len)
        mask = flat.mask.clone()
        mask[:, WORD:] = False
        mask.fill_diagonal_(True)  # a row always sees itself, word or not
        return replace(flat, mask=mask)

    return replace(steps, flatten=flatten)


class _WholeBlocks(LlamaModel):
    """The prefix is read in whole blocks; a last one of a single row is lost, once there is a whole one before it."""

    def _attention_weights(
        self, q: Tensor, k: Tensor, block_mask: Tensor, q_positions: Tensor, k_positions: Tensor, layer: int
    ) -> Tensor:
        num_prefix = k.shape[2] - q.shape[2]
        if num_prefix > BLOCK and num_prefix % BLOCK == 1:
            k_positions = k_positions.clone()
            k_positions[..., num_prefix - 1] = -1  # as padding is hidden
        return super()._attention_weights(q, k, block_mask, q_positions, k_positions, layer)


def _in_whole_blocks(model: LanguageModel) -> LanguageModel:
    if type(model) is not LlamaModel:
        return model  # a model with attention of its own
    return _WholeBlocks(model.config, model._weights, name=model.name).with_codec(model._codec)


class _TiledChunks(Decoder):
    """A piece of a prompt is attended to in tiles of rows; a tile does not see those before it in the piece."""

    def extend(self, tokens: Sequence[int]) -> None:
        self.abort()
        if tokens:
            flat = flatten_causal(list(tokens), self._cache.length)
            tile = torch.arange(flat.num_rows) // TILE
            flat = replace(flat, mask=flat.mask & (tile[:, None] == tile[None, :]))
            self.steps.forward(self.model, flat, self._cache)
            self._tokens += tokens


FAULTS = (
    Fault(
        "table_of_positions",
        "position-ids",
        "positions index a table of 1,024 rows and begin anew behind it",
        "a context of more than 1,024 tokens",
        "tree.long",
        _table_of_positions,
    ),
    Fault(
        "depth_in_a_byte",
        "position-ids",
        "a node's depth is kept in a signed byte",
        "a tree deeper than 127",
        "tree.long",
        _depth_in_a_byte,
    ),
    Fault(
        "one_word_a_row",
        "mask-missing-ancestor",
        "a row's ancestors are one word of 64 bits, and those beyond node 63 are lost",
        "a node below node 64",
        "tree.long",
        _one_word_a_row,
    ),
    Fault(
        "whole_blocks",
        "mask-prefix/padding",
        "the prefix is read in blocks of 64 rows, and a last block of one row is not read",
        "a prefix of 65, 129, 193 ... tokens",
        "tree.long",
        target=lambda: ReferenceTarget(plant_model=_in_whole_blocks),
    ),
    Fault(
        "tiled_chunks",
        "mask-prefix/padding",
        "a prompt's piece is computed in tiles of 256 rows, each of which sees nothing of the tiles before it",
        "a piece of more than 256 tokens",
        "tree.long",
        target=lambda: ReferenceTarget(decoder=_TiledChunks),
    ),
)
