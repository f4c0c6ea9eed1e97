"""FlashInfer's paged prefill with a custom mask as a tree-attention kernel: run with --specbench-device cuda.

The cache needs no copy: pages are taken as they are, and a contiguous cache is one of pages of one row. FlashInfer's
lse is a logarithm to base 2.
"""

import functools
import importlib.util
import math

import torch

WORKSPACE_BYTES = 128 * 2**20


def attention(q, k, v, parents, prefix_lens, scale, *, cu_nodes, page_table=None, soft_cap=None):
    wrapper = prefill(str(q.device))
    sizes, prefixes = cu_nodes.diff().tolist(), prefix_lens.tolist()
    lengths = [prefix_len + num_nodes for prefix_len, num_nodes in zip(prefixes, sizes, strict=True)]
    if page_table is None:
        rows_each = k.shape[1]
        k, v = (one.reshape(-1, 1, *one.shape[2:]) for one in (k, v))
        pages = [torch.arange(length) + sequence * rows_each for sequence, length in enumerate(lengths)]
    else:
        pages = [page_table[sequence, : -(-length // k.shape[1])].cpu() for sequence, length in enumerate(lengths)]
    page_size = k.shape[1]
    starts = torch.tensor([0, *(len(one) for one in pages)]).cumsum(0)
    masks = [visible(own.tolist(), prefix_len) for own, prefix_len in zip(parents.split(sizes), prefixes, strict=True)]
    wrapper.plan(
        cu_nodes.int(),
        starts.int().to(q.device),
        torch.cat(pages).int().to(q.device),
        torch.tensor([(length - 1) % page_size + 1 for length in lengths], dtype=torch.int32, device=q.device),
        q.shape[1],
        k.shape[2],
        q.shape[2],
        page_size,
        custom_mask=torch.cat([one.flatten() for one in masks]).to(q.device),
        sm_scale=scale,
        logits_soft_cap=soft_cap,
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
    )
    out, lse = wrapper.run(q, (k, v), return_lse=True)
    return out, lse * math.log(2.0)


attention.features = ("any_order",)
attention.dtypes = ("bf16", "fp16")
attention.head_dims = (64, 128, 256)


@functools.cache
def prefill(device):
    if not device.startswith("cuda"):
        raise RuntimeError(f"FlashInfer runs on a GPU, the inputs lie on {device}: give --specbench-device cuda")
    if importlib.util.find_spec("flashinfer") is None:
        raise RuntimeError("FlashInfer is not installed: pip install flashinfer-python")
    import flashinfer

    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")


def visible(parents, prefix_len):
    """bool [N, P+N]"""
    mask = torch.zeros(len(parents), prefix_len + len(parents), dtype=torch.bool)
    mask[:, :prefix_len] = True
    for row in range(len(parents)):
        node = row
        while node >= 0:
            mask[row, prefix_len + node] = True
            node = parents[node]
    return mask
