"""The smallest useful adapter, for transformers' own prompt-lookup decoding: put your decoder in its place."""

import torch
from transformers import AutoModelForCausalLM


class Adapter:
    def build_from(self, checkpoint, drafter_checkpoint):
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint)
        return self

    def generate(self, prompt, *, max_new_tokens, sampling, stop, seed):
        options = {"eos_token_id": list(stop.eos_token_ids) or None, "prompt_lookup_num_tokens": 4}
        out = self.model.generate(torch.tensor([prompt]), max_new_tokens=max_new_tokens, do_sample=False, **options)
        return out[0, len(prompt) :].tolist()
