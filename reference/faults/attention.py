"""Attention that does not apply the mask it is given: in one layer, in one head, for one size, by a finite number."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from specbench.reference.faults.fault import Fault
from specbench.reference.faults.hooks import Change, Sight, everywhere, in_verify, with_sight
from specbench.reference.model import LlamaModel

TILE = 4


def _second_layer_unmasked(sight: Sight) -> Tensor:
    return sight.visible | _whole_block(sight) if sight.layer == 1 else sight.visible


def _first_layer_causal(sight: Sight) -> Tensor:
    if sight.layer:
        return sight.visible
    causal = sight.behind_prefix(torch.ones_like(sight.block_mask).tril())
    return causal if sight.window is None else causal & sight.near(sight.window)


def _one_head_unmasked(sight: Sight) -> Tensor:
    seen = sight.visible.unsqueeze(-3).repeat_interleave(sight.model.config.num_heads, dim=-3)
    if sight.layer == sight.model.num_layers - 1:
        seen[..., -1, :, :] |= _whole_block(sight)
    return seen


def _by_packed_row(sight: Sight) -> Tensor:
    """A kernel packs the heads of a group into rows, row r and head g at r * group + g, and looks that up in the mask
    as a row number."""
    config = sight.model.config
    group = config.num_heads // config.num_kv_heads
    rows = torch.arange(sight.num_rows, device=sight.block_mask.device)
    packed = [(rows * group + head % group).clamp(max=sight.num_rows - 1) for head in range(config.num_heads)]
    block = torch.stack([sight.block_mask[..., one, :] for one in packed], dim=-3)
    seen = torch.nn.functional.pad(block, (sight.num_cached, 0), value=True)
    return seen & (sight.visible | _whole_block(sight)).unsqueeze(-3)


def _full_tiles_unmasked(sight: Sight) -> Tensor:
    return sight.visible if sight.num_rows % TILE else sight.visible | _whole_block(sight)


def _causal_top_left(sight: Sight) -> Tensor:
    """`is_causal` for blocks that are chains, counted from the first key and not so that the last row sees the last."""
    causal = torch.ones_like(sight.block_mask).tril()
    if sight.window is not None or sight.num_rows == 1 or not torch.equal(sight.block_mask, causal):
        return sight.visible
    return torch.ones_like(sight.visible).tril() & (sight.k_positions >= 0)[..., None, :]


def _last_prefix_row_hidden(sight: Sight) -> Tensor:
    seen = sight.visible.clone()
    if sight.num_cached:
        seen[..., sight.num_cached - 1] = False
    return seen


def _first_prefix_row_hidden(sight: Sight) -> Tensor:
    """In the last layer, as by a mask that is one column short."""
    seen = sight.visible.clone()
    if sight.num_cached and sight.layer == sight.model.num_layers - 1:
        seen[..., 0] = False
    return seen


def _last_row_unread(sight: Sight) -> Tensor:
    seen = sight.visible.clone()
    if sight.num_rows > 1:
        seen[..., -1] = False
    return seen


def _root_without_prefix(sight: Sight) -> Tensor:
    seen = sight.visible.clone()
    seen[..., 0, : sight.num_cached] = False
    return seen


def _whole_block(sight: Sight) -> Tensor:
    """bool [..., M, K]: every row of the block, nothing of the prefix."""
    return torch.nn.functional.pad(torch.ones_like(sight.block_mask), (sight.num_cached, 0), value=False)


def _faint(exponent: float) -> Change:
    """What a row must not see is that much lower in score than it would be, instead of being hidden."""

    def change(model: LlamaModel) -> None:
        right = model._attention_weights

        def attention_weights(q: Tensor, k: Tensor, block_mask: Tensor, *rest: Any) -> Tensor:
            seen_all = right(q, k, torch.ones_like(block_mask), *rest)
            hidden = torch.nn.functional.pad(~block_mask, (k.shape[2] - q.shape[2], 0)).unsqueeze(-3)
            faint = torch.where(hidden, seen_all * math.exp(-exponent), seen_all)
            return faint / faint.sum(dim=-1, keepdim=True)

        model._attention_weights = attention_weights  # type: ignore[assignment,method-assign]

    return change


FAULTS = (
    Fault(
        "one_layer_mask",
        "mask-leak",
        "the second layer ignores the mask inside the block, the others and the mask itself are right",
        "any draft",
        "tree.attention_weights",
        target=everywhere(with_sight(_second_layer_unmasked)),
        subtle="one layer",
        kin="part_unmasked",
    ),
    Fault(
        "one_head_mask",
        "mask-leak",
        "one head of the last layer ignores the mask inside the block",
        "any draft",
        "tree.attention_weights",
        in_verify(with_sight(_one_head_unmasked)),
        subtle="one head of one layer",
        kin="part_unmasked",
    ),
    Fault(
        "first_layer_causal",
        "mask-leak",
        "the first layer is causal over the flattened tree, since the tree's mask is set behind it",
        "a second sibling: chains are right",
        "tree.attention_weights",
        in_verify(with_sight(_first_layer_causal)),
        subtle="one layer, and a second sibling",
    ),
    Fault(
        "mask_by_packed_row",
        "mask-leak",
        "the mask is indexed by the packed row (row x group) of grouped heads instead of by the row",
        "grouped heads and a draft: right for full heads",
        "tree.attention_weights",
        in_verify(with_sight(_by_packed_row)),
        origin="AMD-Ecosystem/flashinfer#214",
        subtle="grouped heads",
    ),
    Fault(
        "finite_mask",
        "mask-leak",
        "what a row must not see is made faint by a finite number instead of being hidden",
        "two drafts in different branches",
        "tree.noninterference",
        target=everywhere(_faint(12)),
        origin="ohdearquant/lattice#361",
        subtle="a leak of a millionth",
        kin="finite_mask",
    ),
    Fault(
        "mask_added_as_ones",
        "mask-leak",
        "a mask of ones and zeros is added to the scores as it is: the rows seen are one higher, none is hidden",
        "any draft",
        "tree.attention_weights",
        in_verify(_faint(1)),
        kin="finite_mask",
    ),
    Fault(
        "full_tiles_unmasked",
        "mask-future",
        f"masking is left out when the rows fill tiles of {TILE}",
        f"a tree of {TILE}, {2 * TILE}, {3 * TILE} ... nodes",
        "tree.attention_weights",
        in_verify(with_sight(_full_tiles_unmasked)),
        subtle="a number of rows that fills a tile",
    ),
    Fault(
        "causal_top_left",
        "mask-missing-ancestor",
        "a chain is causal from the first key on: row i sees the keys 0 to i, whatever stands before the block",
        "a chain behind a prefix: right without one, and for trees",
        "tree.attention_weights",
        target=everywhere(with_sight(_causal_top_left)),
        origin="pytorch/executorch#21749",
        subtle="a chain, and a prefix",
    ),
    Fault(
        "first_row_hidden",
        "mask-missing-ancestor",
        "the last layer does not see the oldest row of the prefix",
        "a prefix of one token",
        "tree.sensitivity",
        target=everywhere(with_sight(_first_prefix_row_hidden)),
        subtle="one layer",
        kin="prefix_row_hidden",
    ),
    Fault(
        "last_prefix_row_hidden",
        "mask-missing-ancestor",
        "the rows of a tree do not see the last row of the prefix",
        "a prefix of one token",
        "tree.attention_weights",
        in_verify(with_sight(_last_prefix_row_hidden)),
        kin="prefix_row_hidden",
    ),
    Fault(
        "root_without_prefix",
        "mask-missing-ancestor",
        "the root's row sees itself and nothing of the prefix; drafts are right",
        "a prefix of one token",
        "tree.attention_weights",
        in_verify(with_sight(_root_without_prefix)),
    ),
    Fault(
        "last_row_unread",
        "mask-missing-ancestor",
        "attention reads to one row before the last: the last node does not see itself",
        "any draft; only the last node is wrong",
        "tree.attention_weights",
        in_verify(with_sight(_last_row_unread)),
        subtle="the last node alone",
    ),
)
