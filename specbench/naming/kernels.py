"""Which fault a tree-attention kernel has, by what it answers: the formula with one thing wrong, each in turn.

A fault is named when its numbers are the kernel's own, within the claim's own bound, on the failing case and on others,
right or wrong. Dense and by sequence, another way than the reference's row by row: without a fault it is a second
opinion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specbench.cases import AttentionCase
from specbench.checks.attention import Asked, arguments, difference
from specbench.claims import Misbehaviour
from specbench.naming.suspect import UNKNOWN
from specbench.subjects import NotTested, Subject
from specbench.tree import UNUSED

BLOCKS = (16, 32, 64, 128)
# What may be wrong, by name.
FAULTS: dict[str, str] = {
    "mask_ignored": "every row sees all rows of the tree",
    "causal": "a row sees every row before its own, right for chains alone: the mask is a lower triangle",
    "mask_transposed": "a row sees its descendants instead of its ancestors: rows and columns of the mask are swapped",
    "earlier_sibling": "a row sees the sibling before it",
    "earlier_siblings": "a row sees all siblings before it",
    "softmax_before_mask": "hidden rows are left out after the softmax, which has counted them",
    "one_level": "a row sees its parent and nothing of the tree above it",
    "self_left_out": "a row does not see itself",
    "tree_left_out": "a row sees its prefix and nothing of the tree",
    "prefix_left_out": "a row sees its path and nothing of the prefix",
    "prefix_one_less": "the last row of the prefix is left out",
    "mask_shared": "every sequence is masked by the first one's tree",
    "prefix_shared": "every sequence is taken to have the first one's prefix length",
    "table_shared": "every sequence is read through the first one's page table",
    "group_interleaved": "query heads take key heads in turn (h % Hkv) instead of in groups (h // group)",
    "first_key_head": "all query heads read the first key head",
    "scale_ignored": "scores are not multiplied by scale",
    "scale_twice": "scores are multiplied by scale twice",
    "window_ignored": "the window is not applied",
    "window_one_more": "a row sees one position more than its window holds",
    "window_one_less": "a row sees one position less than its window holds",
    "window_edge": "a row sees one position more than its window holds, where the root's window still reaches",
    "window_of_deepest": "the prefix is cut by the window of the deepest node",
    "window_by_row": "the window counts rows of the tree instead of depths",
    "window_keys_by_row": "the window measures from a row's depth to another row's place in the tree",
    "window_of_prefix": "the window is applied to the prefix and not to the tree",
    "cap_ignored": "scores are not capped",
    "cap_of_one": "scores are not divided by soft_cap before the tanh",
    "bias_ignored": "the ALiBi bias is not added",
    "bias_by_row": "the ALiBi bias counts rows of the tree instead of depths",
    "bias_upside_down": "the ALiBi bias has the wrong sign",
    "bias_of_first_head": "all query heads of a group share the first one's slope",
    "key_scale_ignored": "codes of keys are not multiplied by k_scale",
    "value_scale_ignored": "codes of values are not multiplied by v_scale",
    "scale_of_first_head": "all key heads share the first one's scales",
    "fp8_subnormals": "the smallest fp8 codes are taken for zero",
    "unused_see_prefix": "a row without a node attends to the prefix",
    "dead_rows_seen": "rows behind the last one are attended to",
    **{f"last_block_{size}": f"the last, partial block of {size} prefix rows is left out" for size in BLOCKS},
    **{
        f"last_block_{size}_{other}": f"the last, partial block is left out, of {size} rows of the prefix and "
        f"of {other} of the tree"
        for size in BLOCKS
        for other in BLOCKS
    },
    **{
        f"last_block_all_{size}": f"the last, partial block of {size} rows, prefix and tree in one, is left out"
        for size in BLOCKS
    },
    "merge_without_rescale": "the result over the prefix is not rescaled when the tree's brings a larger maximum",
    "parts_unweighted": "the results over prefix and tree are averaged without the weights that their lse give them",
    "lse_base_2": "the lse is a logarithm to base 2, must be to base e",
    "lse_without_maximum": "the lse lacks the maximum that was taken off before the exponentials",
    "lse_without_largest_part": "the lse lacks the larger of the two that prefix and tree were merged by",
    "lse_without_prefix": "the lse is that of the tree's rows alone",
    "lse_without_tree": "the lse is that of the prefix alone",
}


# How the names of faults begin that are about a claim's own option: where the claims before it hold, likelier ones.
FAMILIES: dict[str, tuple[str, ...]] = {
    "attention.batch": ("mask_shared", "prefix_shared"),
    "attention.unused_rows": ("unused_",),
    "attention.paged": ("table_",),
    "attention.window": ("window_",),
    "attention.soft_cap": ("cap_",),
    "attention.alibi": ("bias_",),
    "attention.quantised": ("key_scale_", "value_scale_", "scale_of_", "fp8_"),
    "attention.lse": ("lse_",),
}


OVERFLOW = "softmax_without_maximum: scores are not taken below their maximum before the exponentials, which overflow"
RIGHT, WRONG, NOT_A_NUMBER = "right", "wrong", "not a number"


def likely_fault(subject: Subject, claim: str, case: AttentionCase, more: Sequence[AttentionCase]) -> str:
    """The line `likely` of a failure. more: further cases of the claim."""
    what = "lse" if claim == "attention.lse" else "out"
    names = list(FAULTS)
    num_cases = num_wrong = 0
    is_nan = False
    at_large = []  # whether each wrong case has large scores
    # The formula knows two parts, the prefix and the tree.
    plain = [one for one in more if one.num_splits == 1 or "num_splits" not in subject.has]
    for one in (case, *plain):
        try:
            asked = Asked(subject, one)
        except (Misbehaviour, NotTested):
            continue
        if what == "lse" and asked.lse is None:
            continue
        num_cases += 1
        if asked.compared(what) is not None:
            num_wrong += 1
            at_large.append(one.large > 0)
        is_nan = is_nan or bool(asked.out.isnan().any())
        names = [name for name in names if _explains(name, what, asked)]
    if claim == "attention.dead_memory" and (told := _on(subject, replace(case, dead=0), what)) != WRONG:
        read = "rows behind the last one are read, be it to multiply them by zero"
        return f"{read}: with finite numbers there all is well" if told == RIGHT else read
    if claim == "attention.strides" and _on(subject, replace(case, strided=0), what) == RIGHT:
        return "strides are not looked at, or offsets are too narrow: side by side the same numbers come out right"
    if is_nan and all(at_large) and _on(subject, replace(case, large=0), what) == RIGHT:
        return f"{OVERFLOW}: with scores of order one all is well"
    if is_nan:
        return "NaN: 0 / 0 or exp(-inf + inf) where a row, or a stretch of keys, sees nothing, or memory never written"
    if not names or not num_wrong:
        return UNKNOWN
    first, *others = sorted(names, key=lambda name: not name.startswith(FAMILIES.get(claim, ())))
    rest = f"; as well: {', '.join(others[:2])}" if others else ""
    evidence = f"gives the kernel's own numbers on {num_cases} cases, {num_wrong} of them wrong"
    return f"{first}: {FAULTS[first]}: {evidence}{rest}"


def _on(subject: Subject, case: AttentionCase, what: str) -> str:
    """RIGHT, WRONG, or NOT_A_NUMBER on another case."""
    try:
        asked = Asked(subject, case)
        if asked.compared(what) is None:
            return RIGHT
    except (Misbehaviour, NotTested):
        return WRONG
    return NOT_A_NUMBER if bool(asked.out.isnan().any()) else WRONG


def _explains(name: str, what: str, asked: Asked) -> bool:
    """Whether the formula with a fault gives the kernel's own numbers."""
    wrong = answer(asked.case, asked.inputs, asked.options, fault=name)[("out", "lse").index(what)]
    mine = asked.out if what == "out" else asked.lse
    plain = None if asked.plain is None else asked.plain[("out", "lse").index(what)]
    right = asked.right[("out", "lse").index(what)]
    assert mine is not None
    # The fault's own rounding may be looked for with the bound of the right answer, whose error `plain` shows.
    shifted = None if plain is None else wrong + (plain.double() - right)
    found = difference(asked.case, what, mine, wrong, shifted)
    return found.error <= found.bound.value


def answer(
    case: AttentionCase, inputs: list[Any] | None = None, options: dict[str, Any] | None = None, *, fault: str = ""
) -> tuple[Tensor, Tensor]:
    """out float64 [R, Hq, D] and lse float64 [R, Hq] of a case, with one of `FAULTS` in them."""
    if inputs is None or options is None:
        inputs, options = arguments(case)
    q, k, v, _, _, scale = inputs
    sequences = []
    start = 0
    for idx, parents in enumerate(case.trees):
        rows = q[start : start + len(parents)].double()
        sequences.append(_sequence(case, idx, rows, k, v, float(scale), options, fault))
        start += len(parents)
    return torch.cat([out for out, _ in sequences]), torch.cat([lse for _, lse in sequences])


def _sequence(
    case: AttentionCase, idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float, options: dict[str, Any], fault: str
) -> tuple[Tensor, Tensor]:
    parents = case.trees[idx]
    num_nodes = len(parents)
    prefix_len = case.prefix_lens[0 if fault == "prefix_shared" else idx]
    num_rows = prefix_len + num_nodes + (3 if fault == "dead_rows_seen" else 0)
    keys = _rows(case, idx, k, options.get("k_scale"), options, num_rows, fault, "key_scale_ignored")
    values = _rows(case, idx, v, options.get("v_scale"), options, num_rows, fault, "value_scale_ignored")
    num_rows = len(keys)

    depth = _depths(parents)
    row_positions = prefix_len + torch.tensor(depth)
    slots = torch.arange(num_rows)
    positions = slots.clone()
    positions[prefix_len : prefix_len + num_nodes] = row_positions[: num_rows - prefix_len]
    seen = torch.zeros(num_nodes, num_rows, dtype=torch.bool)
    tree = _tree_mask(case, idx, fault)[:, : num_rows - prefix_len]
    seen[:, prefix_len : prefix_len + tree.shape[1]] = tree
    is_node = torch.tensor([parent != UNUSED for parent in parents])
    seen[:, :prefix_len] = (is_node | (fault == "unused_see_prefix"))[:, None]
    if fault == "dead_rows_seen":
        seen[is_node, prefix_len + num_nodes :] = True
    if fault == "prefix_left_out":
        seen[:, :prefix_len] = False
    if fault == "prefix_one_less":
        seen[:, max(0, prefix_len - 1) : prefix_len] = False
    if fault.startswith("last_block_"):
        _skip_last_block(seen, prefix_len, *fault.removeprefix("last_block_").split("_"))
    if case.window and fault != "window_ignored":
        size = case.window + {"window_one_more": 1, "window_edge": 1, "window_one_less": -1}.get(fault, 0)
        where = slots if fault in ("window_by_row", "window_keys_by_row") else positions
        of_row = prefix_len + torch.arange(num_nodes) if fault == "window_by_row" else row_positions
        inside = where[None, :] > of_row[:, None] - size
        if fault == "window_of_prefix":
            inside[:, prefix_len:] = True
        if fault in ("window_edge", "window_of_deepest"):
            reaches = int(row_positions[0 if fault == "window_edge" else slice(None)].max()) - case.window + 1
            inside[:, : min(max(0, reaches), prefix_len)] = False
        seen &= inside

    outs, sums = [], []
    for head in range(q.shape[1]):
        key_head = head // case.group
        if fault == "group_interleaved":
            key_head = head % case.num_key_heads
        elif fault == "first_key_head":
            key_head = 0
        factor = {"scale_ignored": 1.0, "scale_twice": scale * scale}.get(fault, scale)
        scores = factor * (q[:, head] @ keys[:, key_head].T)  # [N, P+N]
        if case.soft_cap and fault != "cap_ignored":
            cap = case.soft_cap / 100
            scores = cap * torch.tanh(scores if fault == "cap_of_one" else scores / cap)
        if case.alibi and fault != "bias_ignored":
            of_head = head // case.group * case.group if fault == "bias_of_first_head" else head
            slope = options["alibi_slopes"][of_head].double() * (-1 if fault == "bias_upside_down" else 1)
            place = slots if fault == "bias_by_row" else positions
            scores = scores + slope * (place[None, :] - row_positions[:, None])
        out, lse = _averaged(scores, values[:, key_head], seen)
        if fault == "softmax_before_mask":
            counted = _averaged(scores, values[:, key_head], is_node[:, None].expand_as(seen))[1]
            share = (lse - torch.where(counted.isneginf(), 0.0, counted)).exp()
            out, lse = out * share[:, None], counted
        if fault == "parts_unweighted":
            parts = [_averaged(scores[:, part], values[part, key_head], seen[:, part]) for part in _parts(prefix_len)]
            out = torch.stack([part for part, _ in parts]).sum(0) / 2
        if fault == "merge_without_rescale":
            (first, one), (second, other) = (
                _averaged(scores[:, part], values[part, key_head], seen[:, part]) for part in _parts(prefix_len)
            )
            top = torch.maximum(one, other)
            shift = torch.where(top.isneginf(), 0.0, top)
            # The first part was weighted by its own maximum, the second by the larger of both.
            out = first * (~one.isneginf())[:, None] + second * (other - shift).exp()[:, None]
            out = out / (lse - shift).exp().clamp_min(1e-300)[:, None]
        if fault == "lse_without_maximum":
            top = scores.masked_fill(~seen, -math.inf).amax(-1)
            lse = torch.where(top.isneginf(), lse, lse - top)
        elif fault == "lse_without_largest_part":
            parts = [_averaged(scores[:, part], values[part, key_head], seen[:, part]) for part in _parts(prefix_len)]
            top = torch.maximum(parts[0][1], parts[1][1])
            lse = torch.where(top.isneginf(), lse, lse - top)
        elif fault == "lse_base_2":
            lse = lse / math.log(2.0)
        elif fault == "lse_without_prefix":
            lse = _averaged(scores[:, prefix_len:], values[prefix_len:, key_head], seen[:, prefix_len:])[1]
        elif fault == "lse_without_tree":
            lse = _averaged(scores[:, :prefix_len], values[:prefix_len, key_head], seen[:, :prefix_len])[1]
        outs.append(out)
        sums.append(lse)
    return torch.stack(outs, dim=1), torch.stack(sums, dim=1)


def _averaged(scores: Tensor, values: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Zeros and -inf where nothing is seen. Rows that nobody sees take no part, whatever is in them."""
    lse = scores.masked_fill(~seen, -math.inf).logsumexp(-1)
    shift = torch.where(lse.isneginf(), 0.0, lse)
    weights = torch.where(seen, (scores - shift[:, None]).exp(), 0.0)
    is_used = seen.any(0)
    return weights[:, is_used] @ values[is_used], lse


def _skip_last_block(seen: Tensor, prefix_len: int, of_prefix: str, of_tree: str = "") -> None:
    """Sizes of blocks. of_prefix "all": prefix and tree are one stretch, of blocks of the other size."""
    if of_tree:
        begin = 0 if of_prefix == "all" else prefix_len
        size = int(of_tree)
        seen[:, begin + (seen.shape[1] - begin) // size * size :] = False
    if of_prefix != "all":
        seen[:, prefix_len // int(of_prefix) * int(of_prefix) : prefix_len] = False


def _parts(prefix_len: int) -> tuple[slice, slice]:
    return slice(0, prefix_len), slice(prefix_len, None)


def _rows(
    case: AttentionCase,
    idx: int,
    cache: Tensor,
    scales: Tensor | None,
    options: dict[str, Any],
    num_rows: int,
    fault: str,
    ignores: str,
) -> Tensor:
    """float64 [rows, Hkv, D] of a sequence, as many as there are at most."""
    if case.page:
        table = options["page_table"][0 if fault == "table_shared" else idx].tolist()
        num_rows = min(num_rows, len(table) * case.page)
        index = torch.tensor([table[row // case.page] * case.page + row % case.page for row in range(num_rows)])
        flat = (
            cache.reshape(-1, *cache.shape[2:]) if cache.dtype != torch.float8_e4m3fn else cache.float().flatten(0, 1)
        )
        rows = flat[index].double()
        steps = None if scales is None else scales.flatten(0, 1)[index].double()
    else:
        num_rows = min(num_rows, cache.shape[1])
        rows = cache[idx, :num_rows].double()
        steps = None if scales is None else scales[idx, :num_rows].double()
    if fault == "fp8_subnormals" and case.codes == "fp8":
        rows = torch.where(rows.abs() < 2.0**-6, 0.0, rows)
    if steps is None or fault == ignores:
        return rows
    return rows * (steps[:, :1] if fault == "scale_of_first_head" else steps)[..., None]


def _tree_mask(case: AttentionCase, idx: int, fault: str) -> Tensor:
    """bool [N, N]: which rows of its tree a row sees. A mask that is shared is read from the batch's first row on."""
    parents = case.trees[idx]
    num_nodes = len(parents)
    mask = torch.zeros(num_nodes, num_nodes, dtype=torch.bool)
    paths = [_path(own, node) for own in case.trees[0 if fault == "mask_shared" else idx :] for node in range(len(own))]
    for node in range(num_nodes):
        mask[node, [one for one in paths[node] if one < num_nodes]] = True
    used = torch.tensor([parent != UNUSED for parent in parents])
    if fault == "mask_ignored":
        mask = used[:, None] & used[None, :]
    elif fault == "causal":
        mask |= torch.ones(num_nodes, num_nodes).tril().bool() & used[:, None]
    elif fault == "mask_transposed":
        mask = mask.T.clone()
    elif fault in ("earlier_sibling", "earlier_siblings"):
        for node, parent in enumerate(parents):
            before = [one for one in range(node) if parents[one] == parent and parent >= 0]
            mask[node, before[-1:] if fault == "earlier_sibling" else before] = True
    elif fault == "one_level":
        mask.fill_(False)
        for node, parent in enumerate(parents):
            mask[node, [one for one in (node, parent) if one >= 0 and parent != UNUSED]] = True
    elif fault == "self_left_out":
        mask.fill_diagonal_(False)
    elif fault == "tree_left_out":
        mask.fill_(False)
    return mask


def _path(parents: Sequence[int], node: int) -> list[int]:
    """From a node up to its root; nothing for an unused row. Ends, whatever the parents."""
    path: list[int] = []
    while 0 <= node < len(parents) and parents[node] != UNUSED and len(path) < len(parents):
        path.append(node)
        node = parents[node]
    return path


def _depths(parents: Sequence[int]) -> list[int]:
    return [max(0, len(_path(parents, node)) - 1) for node in range(len(parents))]
