"""torch's scaled_dot_product_attention with a dense mask, as a tree-attention kernel (level 4).

`attention` is the smallest adapter: one sequence, a contiguous cache. `with_options` says by its parameters what else
it takes, and by `features` what no parameter shows. SDPA returns no lse.
"""

import torch
import torch.nn.functional as F

from specbench import DraftTree


def attention(q, k, v, parents, prefix_lens, scale):
    num_nodes, prefix_len = len(parents), int(prefix_lens[0])
    mask = torch.ones(num_nodes, prefix_len + num_nodes, dtype=torch.bool, device=q.device)
    mask[:, prefix_len:] = DraftTree.of(range(num_nodes), parents.tolist()).ancestor_mask
    keys, values = (one[0, : prefix_len + num_nodes].transpose(0, 1) for one in (k, v))
    out = F.scaled_dot_product_attention(q.transpose(0, 1), keys, values, mask, scale=scale, enable_gqa=True)
    return out.transpose(0, 1)


def with_options(q, k, v, parents, prefix_lens, scale, *, cu_nodes, page_table=None, window=None):
    out = torch.empty_like(q)
    for sequence, prefix_len in enumerate(prefix_lens.tolist()):
        rows = slice(int(cu_nodes[sequence]), int(cu_nodes[sequence + 1]))
        mask = visible(parents[rows].tolist(), prefix_len, window).to(q.device)
        places = torch.arange(mask.shape[1], device=q.device)
        keys, values = (rows_of(one, sequence, places, page_table).transpose(0, 1) for one in (k, v))
        one = F.scaled_dot_product_attention(q[rows].transpose(0, 1), keys, values, mask, scale=scale, enable_gqa=True)
        out[rows] = one.transpose(0, 1)
    return out


with_options.features = ("any_order", "unused_rows", "strides")


def visible(parents, prefix_len, window):
    """bool [N, P+N]. A row without a node (parent -2) sees nothing."""
    mask = torch.zeros(len(parents), prefix_len + len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        path = []
        while node >= 0 and parent != -2:
            path.append(node)
            node = parents[node]
        if path:
            first = 0 if window is None else prefix_len + len(path) - window  # a node stands at prefix_len + its depth
            mask[path[0], max(0, first) : prefix_len] = True
            mask[path[0], [prefix_len + one for one in path[:window]]] = True
    return mask


def rows_of(cache, sequence, places, page_table):
    """[P+N, Hkv, D]"""
    if page_table is None:
        return cache[sequence, places]
    size = cache.shape[1]
    return cache[page_table[sequence, places // size].long(), places % size]
