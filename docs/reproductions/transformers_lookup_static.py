"""transformers 5.24.0: prompt lookup with a static cache ends with IndexError.

    pip install torch==2.13.0 transformers==5.24.0
    python transformers_lookup_static.py FOLDER

Any Llama. The static cache has room for the text alone, and the drafts of the last round lie behind it.
"""

import sys

import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
prompt = torch.tensor([[1, 2, 3, 4] * 5])
num_wrong = 0
for options in (
    {},
    {"cache_implementation": "static"},
    {"prompt_lookup_num_tokens": 4},
    {"prompt_lookup_num_tokens": 4, "cache_implementation": "static"},
):
    try:
        said = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False, **options
        )
        print(options, "gives", said[0, prompt.shape[1] :].tolist())
    except Exception as error:
        num_wrong += 1
        print(options, "raises", type(error).__name__, error)
sys.exit(num_wrong > 0)
