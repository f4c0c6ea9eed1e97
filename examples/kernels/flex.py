"""FlexAttention as a tree-attention kernel (level 4): tree, window, soft-cap and ALiBi as a mask and a score modifier.

`eager` runs as torch runs it uncompiled: any dtype, with an lse. `compiled` is what one would use: on a CPU it has no
fp64 and no lse, and each new shape costs seconds, so it asks for the fixed shapes alone.
"""

import functools

import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention


def over_sequences(
    flex, has_lse, q, k, v, parents, prefix_lens, scale, *, cu_nodes, page_table=None, window=None, soft_cap=None,
    alibi_slopes=None, k_scale=None, v_scale=None,
):  # fmt: skip
    out, sums = torch.empty_like(q), []
    for sequence, prefix_len in enumerate(prefix_lens.tolist()):
        rows = slice(int(cu_nodes[sequence]), int(cu_nodes[sequence + 1]))
        seen, position, key_position = (one.to(q.device) for one in visible(parents[rows].tolist(), prefix_len, window))
        num_rows, num_keys = seen.shape
        keys, values = (
            rows_of(cache, scales, sequence, num_keys, page_table).to(q.dtype).transpose(0, 1)
            for cache, scales in ((k, k_scale), (v, v_scale))
        )

        def mask(batch, head, row, key, seen=seen):
            return seen[row, key]

        def score(score, batch, head, row, key, position=position, key_position=key_position):
            if soft_cap is not None:
                score = soft_cap * torch.tanh(score / soft_cap)
            if alibi_slopes is not None:
                score = score + alibi_slopes[head] * (key_position[key] - position[row])
            return score

        answer = flex(
            q[rows].transpose(0, 1)[None],
            keys[None],
            values[None],
            score_mod=None if soft_cap is None and alibi_slopes is None else score,
            block_mask=create_block_mask(mask, 1, None, num_rows, num_keys, device=q.device),
            scale=scale,
            enable_gqa=True,
            return_aux=AuxRequest(lse=True) if has_lse else None,
        )
        if has_lse:
            answer, more = answer
            sums.append(more.lse[0].T)
        out[rows] = answer[0].transpose(0, 1)
    return (out, torch.cat(sums)) if has_lse else out


# A compilation a shape: with shapes left open, torch 2.13 writes C++ for a CPU that no compiler takes. Beyond the usual
# limit of 8 it would go on uncompiled without a word.
COMPILED = torch.compile(flex_attention, dynamic=False)
torch._dynamo.config.recompile_limit = 1_000
torch._dynamo.config.accumulated_recompile_limit = 10_000
torch._dynamo.config.fail_on_recompile_limit_hit = True

eager = functools.partial(over_sequences, flex_attention, True)
compiled = functools.partial(over_sequences, COMPILED, torch.cuda.is_available())
eager.features = compiled.features = ("any_order", "unused_rows", "strides")
compiled.dtypes = ("fp32", "bf16", "fp16")
compiled.only_fixed_shapes = True


def visible(parents, prefix_len, window):
    """bool [N, P+N], and the positions of rows and of keys. A row without a node (parent -2) sees nothing."""
    num_nodes = len(parents)
    mask = torch.zeros(num_nodes, prefix_len + num_nodes, dtype=torch.bool)
    depth = torch.zeros(num_nodes, dtype=torch.int64)
    for row in range(num_nodes):
        node, path = row, []
        while node >= 0 and parents[row] != -2:
            path.append(node)
            node = parents[node]
        depth[row] = max(0, len(path) - 1)
        if path:
            mask[row, :prefix_len] = True
            mask[row, [prefix_len + one for one in path]] = True
    position = prefix_len + depth
    key_position = torch.cat([torch.arange(prefix_len), position])
    if window is not None:
        mask &= key_position[None, :] > position[:, None] - window
    return mask, position, key_position


def rows_of(cache, scales, sequence, num_keys, page_table):
    """[P+N, Hkv, D]: gathered from pages, and decoded."""
    if page_table is not None:
        pages = page_table[sequence, : -(-num_keys // cache.shape[1])].long()
        cache, scales = (None if one is None else torch.cat([one[page] for page in pages]) for one in (cache, scales))
    else:
        cache, scales = (None if one is None else one[sequence] for one in (cache, scales))
    rows = cache[:num_keys]
    return rows if scales is None else rows.to(scales.dtype) * scales[:num_keys, :, None]
