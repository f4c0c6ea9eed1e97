"""FlexAttention as a tree-attention kernel (level 4): tree, window, soft-cap and ALiBi as a mask and a score modifier.

`eager` runs as torch runs it uncompiled: any dtype, with an lse. `compiled` is what one would use: on a CPU it has no
fp64 and no lse, and each new shape costs seconds, so it asks for the fixed shapes alone.
"""

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def eager(q, k, v, parents, prefix_lens, scale, *, cu_nodes, window=None, soft_cap=None, alibi_slopes=None):
    return over_sequences(
        flex_attention, q, k, v, parents, prefix_lens, scale, cu_nodes, window, soft_cap, alibi_slopes
    )


def compiled(q, k, v, parents, prefix_lens, scale, *, cu_nodes, window=None, soft_cap=None, alibi_slopes=None):
    return over_sequences(COMPILED, q, k, v, parents, prefix_lens, scale, cu_nodes, window, soft_cap, alibi_slopes)


# A compilation a shape: with shapes left open, torch 2.13 writes C++ for a CPU that no compiler takes. Beyond the usual
# limit of 8 it would go on uncompiled without a word.
COMPILED = torch.compile(flex_attention, dynamic=False)
torch._dynamo.config.recompile_limit = 1_000
torch._dynamo.config.accumulated_recompile_limit = 10_000
eager.features = compiled.features = ("any_order", "unused_rows", "strides")
compiled.dtypes = ("fp32", "bf16", "fp16")
compiled.only_fixed_shapes = True


def over_sequences(flex, q, k, v, parents, prefix_lens, scale, cu_nodes, window, soft_cap, slopes):
    has_lse = flex is flex_attention or q.is_cuda
    out, lse = (
        torch.empty_like(q),
        torch.empty(q.shape[:2], device=q.device, dtype=torch.promote_types(q.dtype, torch.float32)),
    )
    for sequence, prefix_len in enumerate(prefix_lens.tolist()):
        rows = slice(int(cu_nodes[sequence]), int(cu_nodes[sequence + 1]))
        seen, position, key_position = visible(parents[rows].tolist(), prefix_len, window, q.device)
        num_rows, num_keys = seen.shape

        def mask(batch, head, row, key, seen=seen):
            return seen[row, key]

        def score(score, batch, head, row, key, position=position, key_position=key_position):
            if soft_cap is not None:
                score = soft_cap * torch.tanh(score / soft_cap)
            if slopes is not None:
                score = score + slopes[head] * (key_position[key] - position[row])
            return score

        answer = flex(
            q[rows].transpose(0, 1)[None],
            k[sequence, :num_keys].transpose(0, 1)[None],
            v[sequence, :num_keys].transpose(0, 1)[None],
            score_mod=None if soft_cap is None and slopes is None else score,
            block_mask=create_block_mask(mask, 1, None, num_rows, num_keys, device=q.device),
            scale=scale,
            enable_gqa=True,
            **({"return_lse": True} if has_lse else {}),
        )
        out[rows] = (answer[0] if has_lse else answer)[0].transpose(0, 1)
        if has_lse:
            lse[rows] = answer[1][0].T
    return (out, lse) if has_lse else out


def visible(parents, prefix_len, window, device):
    """bool [N, P+N], and the positions of rows and of keys. A row without a node (parent -2) sees nothing."""
    num_nodes = len(parents)
    mask, depth = (
        torch.zeros(num_nodes, prefix_len + num_nodes, dtype=torch.bool),
        torch.zeros(num_nodes, dtype=torch.int64),
    )
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
    return mask.to(device), position.to(device), key_position.to(device)
