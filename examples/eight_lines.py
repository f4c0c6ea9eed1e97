"""The smallest useful adapter, for transformers' own prompt-lookup decoding: put your decoder in its place.

The attention mask matters: without one, transformers hides every token of the prompt that equals the padding token.
"""

import torch
from transformers import AutoModelForCausalLM


class Adapter:
    def build_from(self, checkpoint, drafter_checkpoint):
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint)
        return self

    def generate(self, prompt, *, max_new_tokens, sampling, stop, seed):
        inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt))}
        options = {"eos_token_id": list(stop.eos_token_ids) or None, "prompt_lookup_num_tokens": 4, "do_sample": False}
        return self.model.generate(**inputs, **options, max_new_tokens=max_new_tokens)[0, len(prompt) :].tolist()
