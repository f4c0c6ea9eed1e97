"""Tree-attention kernels that misbehave, each in one way, over the reference's formula."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor

from specbench.reference.attention import tree_attention

BOTH = tuple[Tensor, Tensor]


def right(q: Tensor, k: Tensor, v: Tensor, parents: Tensor, prefix_lens: Tensor, scale: float, **more: Any) -> BOTH:
    more.setdefault("cu_nodes", torch.tensor([0, len(q)]))
    out, lse = tree_attention(q, k, v, parents, prefix_lens, scale, **more)
    return out.to(q.dtype), lse


def out_alone(q, k, v, parents, prefix_lens, scale):
    return right(q, k, v, parents, prefix_lens, scale)[0]


def both(q, k, v, parents, prefix_lens, scale):
    return right(q, k, v, parents, prefix_lens, scale)


def with_all(
    q, k, v, parents, prefix_lens, scale, *, cu_nodes, page_table=None, window=None, soft_cap=None, alibi_slopes=None,
    k_scale=None, v_scale=None,
):  # fmt: skip
    return right(
        q, k, v, parents, prefix_lens, scale, cu_nodes=cu_nodes, page_table=page_table, window=window,
        soft_cap=soft_cap, alibi_slopes=alibi_slopes, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip


with_all.features = ("any_order", "unused_rows", "strides")


def raises(q, k, v, parents, prefix_lens, scale):
    raise RuntimeError("no kernel image is available\nfor execution")


def returns_none(q, k, v, parents, prefix_lens, scale):
    return None


def returns_three(q, k, v, parents, prefix_lens, scale):
    return q, q, q


def wrong_shape(q, k, v, parents, prefix_lens, scale):
    return q[:, :, 1:]


def wrong_dtype(q, k, v, parents, prefix_lens, scale):
    return out_alone(q, k, v, parents, prefix_lens, scale).float()


def on_meta(q, k, v, parents, prefix_lens, scale):
    return q.to("meta")


def lse_upside_down(q, k, v, parents, prefix_lens, scale):
    out, lse = both(q, k, v, parents, prefix_lens, scale)
    return out, lse.T


def half_lse(q, k, v, parents, prefix_lens, scale):
    out, lse = both(q, k, v, parents, prefix_lens, scale)
    return out, lse.half()


def writes_to_k(q, k, v, parents, prefix_lens, scale):
    out = out_alone(q, k, v, parents, prefix_lens, scale)
    k[0, 0] += 1.0
    return out


def hangs(q, k, v, parents, prefix_lens, scale):
    time.sleep(3600)


def is_nan(q, k, v, parents, prefix_lens, scale):
    out = out_alone(q, k, v, parents, prefix_lens, scale)
    out[-1] = math.nan
    return out


def other_signature(q, k, v, mask):
    return q


# Faults by hand, each a way in which a tree-attention kernel is known to go wrong.


def dense(q, k, v, prefix_len, mask, scale, *, group=None):
    """One sequence by torch alone. mask: bool [N, N]."""
    num_rows = prefix_len + len(q)
    seen = torch.cat([torch.ones(len(q), prefix_len, dtype=torch.bool), mask], dim=1)
    heads = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[2]) if group is None else group
    scores = scale * torch.einsum("nhd,shd->nhs", q, k[0, :num_rows, heads])
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    return torch.einsum("nhs,shd->nhd", scores.softmax(-1), v[0, :num_rows, heads]), scores.logsumexp(-1)


def path_mask(parents):
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents.tolist()):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def good_by_hand(q, k, v, parents, prefix_lens, scale):
    return dense(q, k, v, int(prefix_lens[0]), path_mask(parents), scale)


def causal(q, k, v, parents, prefix_lens, scale):
    return dense(q, k, v, int(prefix_lens[0]), torch.ones(len(q), len(q)).tril().bool(), scale)


def unmasked(q, k, v, parents, prefix_lens, scale):
    return dense(q, k, v, int(prefix_lens[0]), torch.ones(len(q), len(q)).bool(), scale)


def interleaved(q, k, v, parents, prefix_lens, scale):
    heads = torch.arange(q.shape[1]) % k.shape[2]
    return dense(q, k, v, int(prefix_lens[0]), path_mask(parents), scale, group=heads)


def unscaled(q, k, v, parents, prefix_lens, scale):
    return dense(q, k, v, int(prefix_lens[0]), path_mask(parents), 1.0)


def whole_blocks_of_64(q, k, v, parents, prefix_lens, scale):
    prefix_len = int(prefix_lens[0])
    whole = prefix_len // 64 * 64
    rows = [*range(whole), *range(prefix_len, prefix_len + len(q))]
    return dense(q, k[:, rows], v[:, rows], whole, path_mask(parents), scale)


def descendants_seen(q, k, v, parents, prefix_lens, scale):
    return dense(q, k, v, int(prefix_lens[0]), path_mask(parents).T, scale)


def sibling_before_seen(q, k, v, parents, prefix_lens, scale):
    return dense(q, k, v, int(prefix_lens[0]), _with_siblings(parents, 1), scale)


def siblings_before_seen(q, k, v, parents, prefix_lens, scale):
    return dense(q, k, v, int(prefix_lens[0]), _with_siblings(parents, len(q)), scale)


def _with_siblings(parents, most):
    mask, told = path_mask(parents), parents.tolist()
    for node, parent in enumerate(told):
        for other in [one for one in range(1, node) if told[one] == parent][-most:]:
            mask[node, other] = True
    return mask


def masked_after_softmax(q, k, v, parents, prefix_lens, scale):
    num_rows = int(prefix_lens[0]) + len(q)
    seen = torch.ones(len(q), num_rows, dtype=torch.bool)
    seen[:, int(prefix_lens[0]) :] = path_mask(parents)
    heads = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[2])
    scores = scale * torch.einsum("nhd,shd->nhs", q, k[0, :num_rows, heads])
    weights = scores.softmax(-1) * seen[:, None]
    return torch.einsum("nhs,shd->nhd", weights, v[0, :num_rows, heads]), scores.logsumexp(-1)


def prefix_without_its_last_row(q, k, v, parents, prefix_lens, scale):
    prefix_len = int(prefix_lens[0])
    rows = [*range(prefix_len - 1), *range(prefix_len, prefix_len + len(q))]
    return dense(q, k[:, rows], v[:, rows], max(0, prefix_len - 1), path_mask(parents), scale)


def no_maximum(q, k, v, parents, prefix_lens, scale):
    """exp(score) / sum of exp(score), in the precision that it is given, or fp32 where that is half."""
    num_rows, wide = int(prefix_lens[0]) + len(q), torch.promote_types(q.dtype, torch.float32)
    seen = torch.ones(len(q), num_rows, dtype=torch.bool)
    seen[:, int(prefix_lens[0]) :] = path_mask(parents)
    heads = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[2])
    weights = (scale * torch.einsum("nhd,shd->nhs", q.to(wide), k[0, :num_rows, heads].to(wide))).exp() * seen[:, None]
    total = weights.sum(-1, keepdim=True)
    out = torch.einsum("nhs,shd->nhd", weights / total, v[0, :num_rows, heads].to(wide))
    return out.to(q.dtype), total[..., 0].log()


def base_2_of_all(q, k, v, parents, prefix_lens, scale):
    out, lse = right(q, k, v, parents, prefix_lens, scale)
    return out, lse / math.log(2.0)


base_2_of_all.features = ("unused_rows",)


def unused_lse_is_zero(q, k, v, parents, prefix_lens, scale):
    out, lse = right(q, k, v, parents, prefix_lens, scale)
    return out, lse.masked_fill(lse.isneginf(), 0.0)


unused_lse_is_zero.features = ("unused_rows",)


def base_2(q, k, v, parents, prefix_lens, scale):
    out, lse = good_by_hand(q, k, v, parents, prefix_lens, scale)
    return out, lse / math.log(2.0)


def lse_of_the_tree(q, k, v, parents, prefix_lens, scale):
    out, _ = good_by_hand(q, k, v, parents, prefix_lens, scale)
    prefix_len = int(prefix_lens[0])
    return out, dense(q, k[:, prefix_len:], v[:, prefix_len:], 0, path_mask(parents), scale)[1]


def first_of_the_batch(q, k, v, parents, prefix_lens, scale, *, cu_nodes):
    """Every sequence is taken to have the first one's prefix."""
    parts = []
    for idx in range(len(prefix_lens)):
        rows = slice(int(cu_nodes[idx]), int(cu_nodes[idx + 1]))
        prefix_len = min(int(prefix_lens[0]), k.shape[1] - (rows.stop - rows.start))
        parts.append(dense(q[rows], k[[idx]], v[[idx]], prefix_len, path_mask(parents[rows]), scale)[0])
    return torch.cat(parts)


def times_zero(q, k, v, parents, prefix_lens, scale):
    """Masked, over all rows of the cache: 0 x what is there."""
    num_rows = int(prefix_lens[0]) + len(q)
    seen = torch.zeros(len(q), k.shape[1], dtype=torch.bool)
    seen[:, : int(prefix_lens[0])] = True
    seen[:, int(prefix_lens[0]) : num_rows] = path_mask(parents)
    heads = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[2])
    scores = (scale * torch.einsum("nhd,shd->nhs", q, k[0][:, heads])).masked_fill(~seen[:, None], -math.inf)
    return torch.einsum("nhs,shd->nhd", scores.softmax(-1), v[0][:, heads])


def times_zero_and_says_so(q, k, v, parents, prefix_lens, scale):
    return times_zero(q, k, v, parents, prefix_lens, scale)


times_zero_and_says_so.reads_dead_rows = True


def fp32_alone(q, k, v, parents, prefix_lens, scale):
    if q.dtype != torch.float32:
        raise TypeError(f"{q.dtype} is not supported")
    return out_alone(q, k, v, parents, prefix_lens, scale)


fp32_alone.dtypes = ("fp32",)
fp32_alone.head_dims = (64, 128)


class Holder:
    """A kernel as a method, with an option and what it declares beside it."""

    dtypes = ("fp64",)
    features = ("any_order",)

    def attention(self, q, k, v, parents, prefix_lens, scale, *, window=None):
        return right(q, k, v, parents, prefix_lens, scale, window=window)


def make():
    """A factory."""
    return good_by_hand
