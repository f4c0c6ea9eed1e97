"""How each kernel's answer is held against its twin's: integers exactly, numbers by the noise that the plain
computation shows in the same dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from specbench.cases import AttentionCase
from specbench.checks.attention import Difference, arguments, difference, eager
from specbench.compare import exact_bound, max_error, measured_bound, rms_error, scale_of
from specbench.kernels.tree_mask import unpack_mask
from specbench.reference import attention as twin
from specbench.reference.attention import ancestors
from specbench.reference.drafters import scored
from specbench.reference.verify import RULES, CoinChance, greedy_walk, rule_for
from specbench.suites.kernels import DEVICE
from specbench.suites.kernels.cases import (
    CommitCase,
    GreedyCase,
    GrowthCase,
    SampleCase,
    TopkCase,
    attention_case,
    buffers_of,
    on_device,
)
from specbench.tree import DraftTree
from specbench.types import DTYPES

Attention = Callable[..., Any]


def attention_differences(case: AttentionCase, attention: Attention) -> list[Difference]:
    """What of a kernel's answer is beyond its bound. attention: (*positional, case, **keyword) -> out and lse."""
    positional, keyword = arguments(case)
    tensors, extra = on_device(positional, keyword)
    answer = attention(*tensors, case, **extra)
    right = twin.tree_attention(*positional, **keyword)
    plain = eager(case, positional, keyword) or (None, None)
    found = [
        difference(case, what, answer[idx].cpu(), right[idx], plain[idx]) for idx, what in enumerate(("out", "lse"))
    ]
    return [one for one in found if not one.error <= one.bound.value]


def asked_of(attention: Attention) -> Attention:
    """A kernel's launcher as `attention_differences` calls it."""

    def asked(*positional: Any, **keyword: Any) -> tuple[Tensor, Tensor]:
        *tensors, case = positional
        max_nodes = max(len(one) for one in case.trees)
        out, lse = attention(*tensors, max_nodes=max_nodes, num_splits=case.num_splits, **keyword)
        return out, lse

    return asked


def finds_far_pages(attention: Attention) -> bool:
    """Whether pages are found that lie 2^31 numbers and more apart, so that offsets do not fit into 32 bits."""
    case = attention_case([(-1, 0, 1, 2)], [9], dtype="fp16", page=4, head_dim=16)
    (q, k, *others), keyword = on_device(*arguments(case))
    step, num_pages = 2**29, k.shape[0]
    far = torch.empty_strided((num_pages, *k.shape[1:]), (step, *k.stride()[1:]), dtype=k.dtype, device=k.device)
    assert step * (num_pages - 1) > 2**31
    far.copy_(k)
    right, found = (asked_of(attention)(q, one, *others, case, **keyword) for one in (k, far))
    return torch.equal(found[0], right[0]) and torch.equal(found[1], right[1])


def decodes_fp8(attention: Attention) -> bool:
    """Whether each of the 254 codes that are numbers is read as it is: a root alone gets its own value back."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    codes[(codes & 0x7F) == 0x7F] = 0
    rows = codes.view(torch.float8_e4m3fn).view(1, 1, 1, 256)
    one = torch.tensor([0], dtype=torch.int32, device=DEVICE)
    ones = torch.ones(1, 1, 1, device=DEVICE)
    q = torch.zeros(1, 1, 256, device=DEVICE)
    extra = {"cu_nodes": boundaries([1]), "max_nodes": 1, "k_scale": ones, "v_scale": ones}
    out, _ = attention(q, torch.zeros_like(rows.float()).to(rows.dtype), rows, one - 1, one, 1.0, **extra)
    return torch.equal(out[0, 0].cpu(), rows.cpu().float().flatten())


def masks_rightly(tree_mask: Callable[..., Any], parents: Sequence[Sequence[int]], prefix_lens: Sequence[int]) -> bool:
    """Whether bits, depths and positions are those of the parents followed one by one."""
    made = asked_mask(tree_mask, parents, prefix_lens)
    row = 0
    for own, start in zip(parents, prefix_lens, strict=True):
        for node in range(len(own)):
            path = ancestors(list(own), node)
            seen = unpack_mask(made.bits[row : row + 1], len(own))[0].nonzero()[:, 0].tolist()
            depth = max(0, len(path) - 1)
            if (seen, int(made.depth[row]), int(made.position_ids[row])) != (sorted(path), depth, start + depth):
                return False
            row += 1
    return True


def asked_mask(tree_mask: Callable[..., Any], parents: Sequence[Sequence[int]], prefix_lens: Sequence[int]) -> Any:
    sizes = [len(one) for one in parents]
    flat = torch.tensor([parent for one in parents for parent in one], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor(prefix_lens, dtype=torch.int32, device=DEVICE)
    return tree_mask(flat, lens, cu_nodes=boundaries(sizes), max_nodes=max(sizes))


def walks_rightly(verify_greedy: Callable[..., Any], case: GreedyCase) -> bool:
    """Whether each tree's path and bonus token are the reference's."""
    trees, logits = case.drafts, case.logits
    result, row = asked_walk(verify_greedy, trees, logits), 0
    for idx, tree in enumerate(trees):
        right = greedy_walk(tree, logits[row : row + tree.num_nodes])
        if told_walk(result, idx) != (right.path, right.bonus_token):
            return False
        row += tree.num_nodes
    return True


def asked_walk(
    verify_greedy: Callable[..., Any], trees: Sequence[DraftTree], logits: Tensor, *, max_depth: int | None = None
) -> Any:
    deepest = max(int(one.depth.max()) for one in trees)
    return verify_greedy(
        logits.to(DEVICE),
        torch.cat([one.tokens for one in trees]).to(DEVICE),
        torch.cat([one.parents for one in trees]).to(DEVICE),
        cu_nodes=boundaries([one.num_nodes for one in trees]),
        max_depth=deepest if max_depth is None else max_depth,
    )


def told_walk(result: Any, tree: int) -> tuple[tuple[int, ...], int] | None:
    """Path and bonus token; None where something stands behind the path."""
    num = int(result.num_accepted[tree])
    if not (result.path[tree, num:] == -1).all():
        return None
    return tuple(result.path[tree, :num].tolist()), int(result.bonus_tokens[tree])


def tells_nan(verify_greedy: Callable[..., Any], row: int) -> bool:
    """Whether a walk down a chain of three ends where a row holds NaN, with the bonus token -1."""
    logits = torch.zeros(3, 9000)
    logits[0, 5], logits[1, 6], logits[2, 7] = 1.0, 1.0, 1.0
    logits[row, 8999] = torch.nan
    result = asked_walk(verify_greedy, [DraftTree.of([0, 5, 6], [-1, 0, 1])], logits)
    return told_walk(result, 0) == (tuple(range(1, row + 1)), -1)


def samples_rightly(verify_sample: Callable[..., Any], case: SampleCase) -> bool:
    """Whether path, bonus token and number of coins are the reference rule's. Below fp64 a coin may lie closer to an
    edge than rounding does: such a tree is not compared."""
    trees, (logits, draft_probs, uniforms) = case.drafts, case.tensors
    temperatures = torch.tensor(case.temperatures, dtype=torch.float64) / 100
    sizes = [one.num_nodes for one in trees]
    with poisoned_memory():
        result = verify_sample(
            logits.to(DEVICE),
            torch.cat([one.tokens for one in trees]).to(DEVICE),
            torch.cat([one.parents for one in trees]).to(DEVICE),
            uniforms.to(DEVICE),
            temperatures.to(DEVICE),
            cu_nodes=boundaries(sizes),
            max_nodes=max(sizes),
            max_depth=max(int(one.depth.max()) for one in trees),
            draft_probs=None if draft_probs is None else draft_probs.to(DEVICE),
            without_replacement=case.proposal == "without_replacement",
        )
    slack = 0.0 if case.dtype == "fp64" else 1e-4
    row = 0
    for idx, tree in enumerate(trees):
        rows = slice(row, row + tree.num_nodes)
        p = (logits[rows].double() / temperatures[idx]).softmax(-1)
        q = None if draft_probs is None else draft_probs[rows]
        right = [sampled(tree, p, q, uniforms[idx] + shift) for shift in {0.0, slack, -slack}]
        told = told_walk(result, idx)
        if len(set(right)) == 1 and (told, int(result.num_coins[idx])) != right[0]:
            return False
        row += tree.num_nodes
    return True


def sampled(tree: DraftTree, p: Tensor, q: Tensor | None, uniforms: Tensor) -> tuple[tuple[tuple[int, ...], int], int]:
    """What the reference rule makes of a tree, and the coins it takes."""
    coins = _Listed(uniforms.clamp(0.0, 1.0 - 2.0**-53))
    rule = RULES["chain"] if q is not None and len(tree.leaves()) == 1 else rule_for(tree)
    result = rule.function(tree, p.tolist(), None if q is None else q.tolist(), CoinChance(coins))
    return (result.path, result.bonus_token), coins.used


def topk_differences(draft_topk: Callable[..., Any], case: TopkCase) -> list[str]:
    """What differs: tokens exactly, log-probabilities by more than rounding does."""
    logits = case.logits
    with poisoned_memory():
        tokens, log_probs = (one.cpu() for one in draft_topk(logits.to(DEVICE), case.k))
    right_tokens, right = scored.draft_topk(logits, case.k)
    wide = torch.promote_types(logits.dtype, torch.float32)
    if not torch.equal(tokens, right_tokens) or not torch.equal(log_probs.isneginf(), right.isneginf()):
        return [f"tokens are {tokens.tolist()}, must be {right_tokens.tolist()}"]
    is_token = right.isfinite()
    bound, error = exact_bound(scale_of(right)), max_error(log_probs, right)
    if wide != torch.float64:
        eagerly = logits.to(wide).log_softmax(-1).gather(1, right_tokens.clamp(min=0))
        plain = rms_error(eagerly[is_token], right[is_token])
        # Logits are of order one, as is what is left of a sum when most of it is gone.
        bound = measured_bound(plain, max(1.0, scale_of(right)), wide, pooled=True)
        error = rms_error(log_probs[is_token], right[is_token])
    return [] if error <= bound.value else [f"log_probs are off by {error:.2g}, must be within {bound}"]


def tells_no_law(draft_topk: Callable[..., Any]) -> bool:
    """Whether a row that holds NaN or inf anywhere is NaN and -1 all along, and the rows beside it are not."""
    logits = torch.zeros(4, 9000)
    logits[1, 8999], logits[2, 0] = torch.nan, torch.inf
    tokens, log_probs = draft_topk(logits.to(DEVICE), 2)
    is_bad = [[False] * 2, [True] * 2, [True] * 2, [False] * 2]
    return log_probs.isnan().tolist() == is_bad and (tokens == -1).tolist() == is_bad


def grows_rightly(drafting: Any, case: GrowthCase) -> bool:
    """Whether each level's candidates and frontier, and the trees selected in the end, are the twin's, exactly.
    drafting: a module with `roots`, `expand` and `select`."""
    dtype = DTYPES[case.dtype]
    with poisoned_memory():
        grown, frontier = drafting.roots(torch.arange(case.num_trees, device=DEVICE), dtype=dtype)
    right, right_frontier = tuple(one.cpu() for one in grown), frontier.cpu()
    for level in range(case.depth):
        children = case.children(level, frontier.shape[1])
        with poisoned_memory():
            grown, frontier = drafting.expand(grown, frontier, *(one.to(DEVICE) for one in children), width=case.width)
        right, right_frontier = scored.expand(right, right_frontier, *children, width=case.width)
        if not all(same(mine, one) for mine, one in zip((*grown, frontier), (*right, right_frontier), strict=True)):
            return False
    with poisoned_memory():
        trees = drafting.select(grown, max_nodes=case.max_nodes)
    return all(map(same, trees, scored.select(right, max_nodes=case.max_nodes)))


def same(mine: Tensor, right: Tensor) -> bool:
    """Equal in shape and values, NaN where NaN must be."""
    if mine.shape != right.shape:
        return False
    return torch.allclose(mine.cpu().double(), right.double(), rtol=0, atol=0, equal_nan=True)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN and the largest integers until they are written."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class _Listed:
    """Coins from a list."""

    def __init__(self, uniforms: Tensor) -> None:
        self._uniforms, self.used = uniforms, 0

    def uniform(self, num: int) -> Tensor:
        self.used += num
        return self._uniforms[self.used - num : self.used]


def moves_rightly(commit_kv: Callable[..., None], case: CommitCase) -> bool:
    """Whether the paths' rows stand behind the roots', and nothing else has moved."""
    buffers, table = buffers_of(case)
    prefix_lens = torch.tensor(case.prefix_lens, dtype=torch.int32, device=DEVICE)
    num_accepted = torch.tensor([len(one) for one in case.paths], dtype=torch.int32, device=DEVICE)
    longest = max(1, *(len(one) for one in case.paths)) + 1
    filled = [(*one, *(77 for _ in range(longest - len(one)))) for one in case.paths]  # what stands behind is not read
    path = torch.tensor(filled, dtype=torch.int32, device=DEVICE)
    right = [rows_moved(one, prefix_lens, path, num_accepted, table) for one in buffers]
    commit_kv(buffers, prefix_lens, path, num_accepted, page_table=table)
    return all(torch.equal(mine, wanted) for mine, wanted in zip(buffers, right, strict=True))


def boundaries(sizes: Sequence[int]) -> Tensor:
    """cu_nodes int32 [B+1]."""
    return torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)


def rows_moved(buffer: Tensor, prefix_lens: Tensor, path: Tensor, num_accepted: Tensor, table: Tensor | None) -> Tensor:
    """What `commit_kv` must leave of a buffer, row by row."""
    right = buffer.clone()
    for sequence in range(path.shape[0]):
        for idx in range(int(num_accepted[sequence])):
            rows = int(prefix_lens[sequence]) + int(path[sequence, idx]), int(prefix_lens[sequence]) + 1 + idx
            places = [(sequence, row) for row in rows]
            if table is not None:
                size = buffer.shape[1]
                places = [(int(table[sequence, row // size]), row % size) for row in rows]
            right[places[1]] = buffer[places[0]]
    return right
