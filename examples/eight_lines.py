import torch
from transformers import AutoModelForCausalLM


class Adapter:
    def build_from(self, checkpoint, drafter_checkpoint):
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
        return self

    def generate(self, prompt, *, max_new_tokens, sampling, stop, seed):
        ids, ends = torch.tensor([prompt]), list(stop.eos_token_ids) or None
        out = self.model.generate(
            ids, max_new_tokens=max_new_tokens, do_sample=False, prompt_lookup_num_tokens=4, eos_token_id=ends
        )
        return out[0, len(prompt) :].tolist()
