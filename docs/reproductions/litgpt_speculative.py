"""LitGPT 0.5.13, litgpt.generate.speculative_decoding: three ways in which its text is not the target's.

    pip install torch==2.13.0 litgpt==0.5.13
    python repro_litgpt_speculative.py

Two random models of 2 layers; expected is litgpt.generate.base.generate with temperature 0.
"""

import torch
from litgpt import GPT, Config
from litgpt.generate.base import generate as plain
from litgpt.generate.speculative_decoding import generate, next_token, sample, speculative_decoding

NUM_NEW = 24


def model(seed):
    torch.manual_seed(seed)
    made = GPT(Config(n_layer=2, n_head=2, n_embd=32, vocab_size=16, padded_vocab_size=16, block_size=64, bias=False))
    made.max_seq_length = 64
    made.set_kv_cache(batch_size=1)
    return made.eval()


def rounds(drafter, target, prompt, **sampling):
    """The loop of `generate`, with the first token."""
    with torch.inference_mode():
        num_read = len(prompt)
        for one in (drafter, target):
            token = next_token(one, torch.arange(num_read), prompt.view(1, -1), num_read, **sampling)
        tokens = [int(token)]
        while len(tokens) < NUM_NEW:
            new = speculative_decoding(
                drafter,
                target,
                torch.tensor(tokens[-1:]),
                torch.tensor([num_read]),
                num_read + 1,
                min(3, NUM_NEW - len(tokens)),
                **sampling,
            )
            tokens += new.tolist()
            num_read += len(new)
    return tokens[:NUM_NEW]


target, drafter = model(0), model(1)
prompt = torch.tensor([1, 2, 3, 4])
greedy = {"temperature": 0.0, "top_k": None, "top_p": 1.0}
expected = plain(target, prompt, len(prompt) + NUM_NEW, temperature=0.0, include_prompt=False).tolist()

print("1. generate drops the first new token: the target as its own drafter")
said, _ = generate(
    target, model(0), prompt, len(prompt) + NUM_NEW, temperature=0.0, include_prompt=False, speculative_k=3
)
said = said.flatten().tolist()
print("   expected", expected)
print("   actual  ", said)
print("   the same without its first", said[: NUM_NEW - 1] == expected[1:])

print("2. temperature 0 is not greedy: a draft is kept with probability min(1, p / q) of temperature 1")
texts = set()
for seed in range(5):
    torch.manual_seed(seed)
    texts.add(tuple(rounds(drafter, target, prompt, **greedy)))
print(f"   {len(texts)} different texts in 5 runs at temperature 0, expected among them: {tuple(expected) in texts}")

print("3. after a rejection top_p puts -inf among what are probabilities already, not logits")
residual = torch.tensor([0.9, 0.06, 0.04, 0.0])
drawn = torch.zeros(4)
torch.manual_seed(0)
try:
    for _ in range(2_000):
        drawn[sample(residual[None, None], apply_softmax=False, temperature=1.0, top_p=0.8)[0]] += 1
    print(f"   residual {residual.tolist()}, top_p 0.8: drawn {(drawn / 2_000).tolist()}, expected [1, 0, 0, 0]")
except RuntimeError as error:
    print("  ", error)
