"""The smallest adapter of level 4: torch's scaled_dot_product_attention with a dense mask."""

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
