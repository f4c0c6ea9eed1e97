"""mlx-lm 0.32.2: a checkpoint that transformers 5 wrote is read with rope_theta 10,000, whatever it says.

    pip install 'mlx[cpu]==0.32.4' mlx-lm==0.32.2 transformers==5.24.0 torch safetensors
    python mlx_lm_rope_theta.py

transformers 5 writes rope_theta into rope_parameters alone; mlx-lm's Llama looks beside it. Expected: both give the same
logits but for rounding.
"""

import json
import tempfile
from pathlib import Path

import mlx.core as mx
import torch
from mlx_lm.utils import load_model
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS = [1, 5, 9, 2, 7, 3, 8, 4]

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    rope_parameters={"rope_type": "default", "rope_theta": 100.0},
)  # fmt: skip
model = LlamaForCausalLM(config).float()
for one in model.parameters():
    torch.nn.init.normal_(one, std=0.3)
with tempfile.TemporaryDirectory() as work:
    folder = Path(work)
    model.save_pretrained(folder)
    right = model(torch.tensor([TOKENS])).logits[0].detach()
    for name, more in (("as transformers wrote it", {}), ("with rope_theta at the top", {"rope_theta": 100.0})):
        said = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(said | more))
        other = torch.tensor(load_model(folder)[0](mx.array([TOKENS])).tolist())[0]
        print(f"{name}: logits off by {float((other - right).abs().max()):.2g} at a spread of {float(right.std()):.2g}")
