"""Query heads that read another head's keys or values. What a commit does to single heads is in `cache`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from specbench.reference.faults.fault import Fault
from specbench.reference.faults.hooks import Change, everywhere, in_verify
from specbench.reference.model import LlamaModel

# (query head, group size, number of key heads) -> key head
HeadMap = Callable[[int, int, int], int]


def _right(head: int, group: int, num_kv: int) -> int:
    return head // group


def _modulo(head: int, group: int, num_kv: int) -> int:
    return head % num_kv


def _last_first(head: int, group: int, num_kv: int) -> int:
    return num_kv - 1 - head // group


def _first(head: int, group: int, num_kv: int) -> int:
    return 0


def _by_number_of_heads(head: int, group: int, num_kv: int) -> int:
    return min(head // num_kv, num_kv - 1)


def _by_shift(head: int, group: int, num_kv: int) -> int:
    return min(head >> (group.bit_length() - 1), num_kv - 1)


def _reading(key_head: HeadMap, value_head: HeadMap) -> Change:
    def change(model: LlamaModel) -> None:
        num_heads, num_kv = model.config.num_heads, model.config.num_kv_heads
        keys, values = (
            [one(head, num_heads // num_kv, num_kv) for head in range(num_heads)] for one in (key_head, value_head)
        )
        expanded = copy.copy(model)
        expanded.config = replace(model.config, num_kv_heads=num_heads)

        def attention(
            layer: int, q: Tensor, k: Tensor, v: Tensor, block_mask: Tensor, q_positions: Tensor, k_positions: Tensor
        ) -> tuple[Tensor, Tensor]:
            weights = expanded._attention_weights(q, k[:, keys], block_mask, q_positions, k_positions, layer)
            return weights @ v[:, values], weights

        model.attention = attention  # type: ignore[method-assign]

    return change


def _behind_attention(reorder: Callable[[Tensor], Tensor]) -> Change:
    """reorder: mixed values [B, Hkv, G, M, D] of grouped heads in another order, of the same shape when flattened to
    [B, Hq, M, D]."""

    def change(model: LlamaModel) -> None:
        right, num_kv = model.attention, model.config.num_kv_heads

        def attention(
            layer: int, q: Tensor, k: Tensor, v: Tensor, block_mask: Tensor, q_positions: Tensor, k_positions: Tensor
        ) -> tuple[Tensor, Tensor | None]:
            mixed, weights = right(layer, q, k, v, block_mask, q_positions, k_positions)
            return reorder(mixed.unflatten(1, (num_kv, -1))).reshape(mixed.shape), weights

        model.attention = attention  # type: ignore[method-assign]

    return change


def _read_as_rows(mixed: Tensor) -> Tensor:
    """[B, Hkv, G, M, D], whose G and M are taken for M and G."""
    group, num_rows = mixed.shape[2:4]
    return mixed.flatten(2, 3).unflatten(2, (num_rows, group)).transpose(2, 3)


FAULTS = (
    Fault(
        "heads_modulo",
        "GQA-head-mapping",
        "query head h reads the values of head h mod Hkv: right for full and for multi-query heads",
        "grouped heads, 1 < Hkv < Hq",
        "tree.layers",
        target=everywhere(_reading(_right, _modulo)),
        origin="ekzhang/jax-js#180",
        subtle="grouped heads",
        kin="heads_modulo",
    ),
    Fault(
        "key_heads_modulo",
        "GQA-head-mapping",
        "query head h reads the keys of head h mod Hkv and the values of its own group",
        "grouped heads, 1 < Hkv < Hq",
        "tree.layers",
        target=everywhere(_reading(_modulo, _right)),
        subtle="grouped heads",
        kin="heads_modulo",
    ),
    Fault(
        "kv_heads_reversed",
        "GQA-head-mapping",
        "groups read the keys and values of the heads from the last to the first",
        "more than one key head: right for multi-query heads",
        "tree.layers",
        target=everywhere(_reading(_last_first, _last_first)),
    ),
    Fault(
        "first_kv_head_for_all",
        "GQA-head-mapping",
        "all query heads read the first key head, as if there were no other",
        "more than one key head: right for multi-query heads",
        "tree.layers",
        in_verify(_reading(_first, _first)),
    ),
    Fault(
        "divided_by_kv_heads",
        "GQA-head-mapping",
        "the key head is h // Hkv instead of h // (Hq / Hkv), and the last one beyond it",
        "a group that is not as large as the number of key heads: right for 4 over 2 and for multi-query heads",
        "tree.layers",
        target=everywhere(_reading(_by_number_of_heads, _by_number_of_heads)),
        origin="PSAL-POSTECH/ONNXim#34",
        subtle="grouped heads, other than G = Hkv",
    ),
    Fault(
        "group_by_shift",
        "GQA-head-mapping",
        "the key head is found by a shift, as if every group were a power of two",
        "groups of three, five, six or seven",
        "tree.layers",
        in_verify(_reading(_by_shift, _by_shift)),
        subtle="a group that is no power of two",
    ),
    Fault(
        "head_order_transposed",
        "GQA-head-mapping",
        "outputs stand in the order (group member, key head) where the output projection expects (key head, member)",
        "grouped heads, 1 < Hkv < Hq",
        "tree.layers",
        in_verify(_behind_attention(lambda mixed: mixed.transpose(1, 2))),
        subtle="grouped heads",
    ),
    Fault(
        "group_and_rows_mixed",
        "GQA-head-mapping",
        "the rows of a group's heads, packed as (member, row), are read back as (row, member)",
        "a group and more than one row: plain decoding is right",
        "tree.layers",
        in_verify(_behind_attention(_read_as_rows)),
        subtle="grouped heads, and a draft",
    ),
)
