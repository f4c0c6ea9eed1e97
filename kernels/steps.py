"""The steps of a round with kernels in them: `kernel_steps(STEPS)` for one sequence at a time, as the decoder asks.

What a kernel takes over is taken over wholly: where it cannot run, CannotRun says what is missing, and nothing else is
run in its place. Drafting, processing and stop rules stay the base's, and so does acceptance at a temperature unless
`kernel_steps` is told how parameters make a law of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specbench.kernels.commit_kv import commit_kv
from specbench.kernels.launch import CannotRun
from specbench.kernels.tree_attention import tree_attention
from specbench.kernels.tree_mask import TreeMask, pack_mask, tree_mask, unpack_mask
from specbench.kernels.verify_greedy import NO_TOKEN, verify_greedy
from specbench.kernels.verify_sample import verify_sample
from specbench.protocols import Cache, Coins, LanguageModel
from specbench.steps import FlatTree, SampleStep, Steps
from specbench.tree import DraftTree
from specbench.types import Sampling, Taps, VerifyResult

Probs = Callable[[Tensor, Sampling], Tensor]  # logits float [N, V] -> laws float64 [N, V], after all parameters

MAX_NODES = 1024  # of a block; a longer run of known tokens is computed in several


def kernel_steps(base: Steps, *, device: str | torch.device = "cpu", probs: Probs | None = None) -> Steps:
    """`base` with flatten (tree masks), forward, walk and commit by kernels, and sample where `probs` is given.

    device: where trees are laid out. probs: `reference.sampling.probs`, for instance.
    """

    def flatten_on_device(tree: DraftTree, prefix_len: int) -> FlatTree:
        return flatten(tree, prefix_len, device=device)

    sample = base.sample if probs is None else sample_by(probs)
    return replace(base, flatten=flatten_on_device, forward=forward, walk=walk, sample=sample, commit=commit)


def flatten(tree: DraftTree, prefix_len: int, *, device: str | torch.device = "cpu") -> FlatTree:
    """One row a node, in node order, as `reference.layouts.flatten_tree_mask`."""
    parents, num_nodes = tree.parents.to(device), tree.num_nodes
    made = tree_mask(
        parents,
        _ints([prefix_len], device),
        cu_nodes=_ints([0, num_nodes], device),
        max_nodes=num_nodes,
    )
    nodes = torch.arange(num_nodes)
    return FlatTree(
        tokens=tree.tokens,
        position_ids=made.position_ids.cpu(),
        mask=unpack_mask(made.bits, num_nodes).cpu(),
        node_of_row=nodes,
        row_of_node=nodes,
    )


def forward(model: LanguageModel, flat: FlatTree, cache: Cache, *, taps: Taps | None = None) -> Tensor:
    """The model's own forward, its rows attending by `tree_attention`; the model must have `with_attention`."""
    if not hasattr(model, "with_attention"):
        raise CannotRun(f"tree_attention cannot run in a {type(model).__name__}: give it with_attention(attention)")
    fused: LanguageModel = model.with_attention(Attend())
    if flat.num_rows <= MAX_NODES:
        return fused.forward(flat, cache, taps=taps)
    if not torch.equal(flat.mask, torch.ones_like(flat.mask).tril()):
        raise CannotRun(f"tree_attention cannot run on a tree of {flat.num_rows} nodes: at most {MAX_NODES}")
    if taps is not None:
        raise CannotRun(f"a run of {flat.num_rows} tokens is computed in pieces, which taps cannot show")
    pieces = [slice(start, start + MAX_NODES) for start in range(0, flat.num_rows, MAX_NODES)]
    return torch.cat([fused.forward(_piece(flat, rows), cache) for rows in pieces])


class Attend:
    """`reference.model.FusedAttention` by the kernel, one sequence of the batch at a time. All layers of a forward hand
    over the same mask, which is packed once."""

    def __init__(self) -> None:
        self._packed: tuple[Tensor, list[Tensor]] | None = None  # a mask, which lives as long, and its bits

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block_mask: Tensor,
        q_positions: Tensor,
        k_positions: Tensor,
        *,
        window: int | None,
        scale: float,
        soft_cap: float | None = None,
    ) -> Tensor:
        """q: [B, Hq, M, D]. k: [B, Hkv, K, D], v: [B, Hkv, K, Dv], the last M keys the rows' own. block_mask: bool
        [M, M] or [B, M, M], not written to between layers. Keys at negative positions are padding in front of the
        others. Returns [B, Hq, M, Dv]."""
        num_sequences, _, num_rows, _ = q.shape
        value_dim = v.shape[3]
        width = max(q.shape[3], value_dim)  # the kernel has one size; zeros add nothing to a product
        q, k, v = (torch.nn.functional.pad(x, (0, width - x.shape[3])) for x in (q, k, v))
        bits = self._bits(block_mask)
        mixed = []
        for one in range(num_sequences):
            at = q_positions if q_positions.dim() == 1 else q_positions[one]
            keys_at = k_positions if k_positions.dim() == 1 else k_positions[one]
            num_hidden = int((keys_at[: keys_at.shape[0] - num_rows] < 0).sum())
            keys, values = (x[one, :, num_hidden:].transpose(0, 1)[None] for x in (k, v))
            num_cached = keys.shape[1] - num_rows
            # The kernel counts positions from the first key it is given; only differences count.
            shift = int(keys_at[num_hidden]) if num_cached else int(at[0])
            depth = (at - shift - num_cached).to(torch.int32)
            lens = _ints([num_cached], q.device)
            out, _ = tree_attention(
                q[one].transpose(0, 1),
                keys,
                values,
                TreeMask(bits[one % len(bits)], depth, at),
                lens,
                scale,
                cu_nodes=_ints([0, num_rows], q.device),
                max_nodes=num_rows,
                window=window,
                soft_cap=soft_cap,
            )
            mixed.append(out.transpose(0, 1))
        return torch.stack(mixed)[..., :value_dim]

    def _bits(self, block_mask: Tensor) -> list[Tensor]:
        """int64 [M, W] of each sequence, or of all."""
        if self._packed is None or self._packed[0] is not block_mask:
            masks = block_mask[None] if block_mask.dim() == 2 else block_mask
            self._packed = block_mask, [pack_mask(one) for one in masks]
        return self._packed[1]


def walk(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
    """target_logits: float [N, V]. As `reference.verify.greedy_walk`, ValueError for NaN included."""
    device = target_logits.device
    found = verify_greedy(
        target_logits,
        tree.tokens.to(device),
        tree.parents.to(device),
        cu_nodes=_ints([0, tree.num_nodes], device),
        max_depth=max(1, int(tree.depth.max())),
    )
    bonus_token = int(found.bonus_tokens[0])
    if bonus_token == NO_TOKEN:
        raise ValueError("target logits hold NaN, so no token is the largest: look at the forward that made them")
    return VerifyResult(tuple(found.path[0, : int(found.num_accepted[0])].tolist()), bonus_token)


def sample_by(probs: Probs) -> SampleStep:
    """The rule that is usual for how a tree was drafted, by `verify_sample`, with the coins that the rule would take.

    A kernel takes all coins at once and tells how many it needed: it is launched again with one more until it has them.
    Where no coin is to be saved one launch does (`kernels.round`).
    """

    def sample(
        tree: DraftTree, target_logits: Tensor, *, sampling: Sampling, coins: Coins, root_place: int = 0
    ) -> VerifyResult:
        device, num_nodes = target_logits.device, tree.num_nodes
        is_drawn = tree.proposal != "deterministic"
        if is_drawn and tree.draft_probs is None:
            raise ValueError(f"draft_probs is None, must be q where drafts are drawn (proposal = {tree.proposal!r})")
        q = tree.draft_probs.to(device, torch.float64) if is_drawn and tree.draft_probs is not None else None
        uniforms = torch.zeros(1, num_nodes, dtype=torch.float64)
        num_known, num_needed = 0, 1
        while num_known < num_needed:
            uniforms[0, num_known] = float(coins.uniform(1))
            num_known += 1
            found = verify_sample(
                probs(target_logits, sampling).log().to(device),  # at temperature 1 the law itself
                tree.tokens.to(device),
                tree.parents.to(device),
                uniforms.to(device),
                torch.ones(1, dtype=torch.float64, device=device),
                cu_nodes=_ints([0, num_nodes], device),
                max_nodes=num_nodes,
                max_depth=max(1, int(tree.depth.max())),
                draft_probs=q,
                without_replacement=tree.proposal == "without_replacement",
            )
            num_needed = int(found.num_coins[0])
        return VerifyResult(tuple(found.path[0, : int(found.num_accepted[0])].tolist()), int(found.bonus_tokens[0]))

    return sample


def commit(cache: Cache, prefix_len: int, rows: Sequence[int]) -> None:
    """In place; the cache must have `in_place`. rows: the root's first, which is row 0, then those of the path."""
    if not hasattr(cache, "in_place"):
        raise CannotRun(
            f"commit_kv cannot run on a {type(cache).__name__}: its rows cannot be moved in place; take a preallocated "
            "or paged cache"
        )
    if not rows or rows[0] != 0:
        raise ValueError(f"rows = {list(rows)} must begin with 0, the root's row")
    buffers, page_table = cache.in_place(prefix_len, len(rows))
    device = buffers[0].device
    if path := list(rows[1:]):
        # One launch for all buffers of one shape: layers may differ, and scales are narrower than rows.
        alike: dict[Any, list[Tensor]] = {}
        for one in buffers:
            alike.setdefault((one.shape, one.stride(), one.dtype), []).append(one)
        for some in alike.values():
            commit_kv(
                some,
                _ints([prefix_len], device),
                _ints([path], device),
                _ints([len(path)], device),
                page_table=page_table,
            )
    cache.truncate(prefix_len + len(rows))


def _ints(numbers: list[Any], device: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def _piece(flat: FlatTree, rows: slice) -> FlatTree:
    tokens = flat.tokens[rows]
    own = torch.arange(len(tokens))
    return FlatTree(tokens, flat.position_ids[rows], flat.mask[rows, rows], own, own)
