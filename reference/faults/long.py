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


def _parents_in_a_byte(steps: Steps) -> Steps:
    """A negative number counts from the end, as indices do."""

    def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
        flat = steps.flatten(tree, prefix_len)
        if flat.num_rows > tree.num_nodes:
            return flat
        parents = tree.parents.to(torch.int8).tolist()
        mask = torch.eye(tree.num_nodes, dtype=torch.bool)
        for node in range(1, tree.num_nodes):
            mask[node] |= mask[parents[node]]
        return replace(flat, mask=mask)

    return replace(steps, flatten=flatten)


def _mask_offset_in_16_bits(steps: Steps) -> Steps:
    def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
        flat = steps.flatten(tree, prefix_len)
        wide = torch.nn.functional.pad(flat.mask, (prefix_len, 0), value=True)
        num_rows, num_columns = wide.shape
        offsets = (torch.arange(num_rows) * num_columns) % 2**16
        columns = torch.arange(prefix_len, num_columns)
        mask = wide.flatten()[offsets[:, None] + columns]
        mask.fill_diagonal_(True)  # a row always sees itself, whatever it reads
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
        subtle="a long context",
        kin="position_limit",
    ),
    Fault(
        "depth_in_a_byte",
        "position-ids",
        "a node's depth is kept in a signed byte",
        "a tree deeper than 127",
        "tree.long",
        _depth_in_a_byte,
        subtle="a deep tree",
    ),
    Fault(
        "parents_in_a_byte",
        "mask-missing-ancestor",
        "parents are kept in signed bytes when the mask is built",
        "a child of a node beyond 127",
        "tree.long",
        _parents_in_a_byte,
        subtle="a large tree",
    ),
    Fault(
        "mask_offset_in_16_bits",
        "mask-leak",
        "where a row of the mask begins is computed in 16 bits, prefix and tree together",
        "a mask of more than 65,536 entries",
        "tree.long",
        _mask_offset_in_16_bits,
        subtle="a large tree behind a long context",
    ),
    Fault(
        "one_word_a_row",
        "mask-missing-ancestor",
        "a row's ancestors are one word of 64 bits, and those beyond node 63 are lost",
        "a node below node 64",
        "tree.long",
        _one_word_a_row,
        origin="NVIDIA/TensorRT-LLM#12962",
        subtle="a large tree",
    ),
    Fault(
        "whole_blocks",
        "mask-missing-ancestor",
        "the prefix is read in blocks of 64 rows, and a last block of one row is not read",
        "a prefix of 65, 129, 193 ... tokens",
        "tree.long",
        target=lambda: ReferenceTarget(plant_model=_in_whole_blocks),
        subtle="a prefix of a block and one token",
    ),
    Fault(
        "tiled_chunks",
        "mask-missing-ancestor",
        "a prompt's piece is computed in tiles of 256 rows, each of which sees nothing of the tiles before it",
        "a piece of more than 256 tokens",
        "tree.long",
        target=lambda: ReferenceTarget(decoder=_TiledChunks),
        subtle="a long context",
    ),
)
