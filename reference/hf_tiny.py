"""Tiny random transformers configs, one for each model type that `hf_types` knows or refuses by name.

Windows are shorter than most prompts, partial rotary leaves dimensions out, experts outnumber those picked. A config is
made on demand: importing this file builds none, and a type that the installed transformers lacks is only found missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

_COMMON = {
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "max_position_embeddings": 512,
}
_ALTERNATING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
# Heads wider than hidden / heads, as real Gemmas have.
_GEMMA = {
    "hidden_size": 40,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 4,
    **_ALTERNATING,
}
_MLA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,  # one dense layer, one of experts
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def _grouped(vocab_size: int, **more: Any) -> dict[str, Any]:
    """Two layers of four heads over two key heads."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {"vocab_size": vocab_size, **shape, "num_key_value_heads": 2, **more}


# name -> class of transformers, arguments. A name is a model type, or one with a variant behind a dash.
_TINY: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _grouped(61, hidden_size=48, intermediate_size=64, num_hidden_layers=3)),
    "gpt2": ("GPT2Config", {"vocab_size": 47, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "gemma3_text": ("Gemma3TextConfig", {"vocab_size": 53, **_GEMMA}),
    "qwen2": (
        "Qwen2Config",
        _grouped(59, use_sliding_window=True, sliding_window=5, layer_types=["full_attention", "sliding_attention"]),
    ),
    "qwen3": ("Qwen3Config", _grouped(43, head_dim=12)),
    "mistral": ("MistralConfig", _grouped(57, sliding_window=7)),
    "gpt_neox": (
        "GPTNeoXConfig",
        {
            "vocab_size": 63,
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "phi": (
        "PhiConfig",
        _grouped(
            55,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        ),
    ),
    "falcon": (
        "FalconConfig",
        {"vocab_size": 44, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False},
    ),
    "gemma2": (
        "Gemma2Config",
        {"vocab_size": 51, **_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 8.0},
    ),
    "mixtral": ("MixtralConfig", _grouped(45, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
    # No layer of experts: its rotation in fp32 moves hidden states by 1e-7, on which a router could tip over.
    "deepseek_v2": ("DeepseekV2Config", {"vocab_size": 46, **_MLA, "first_k_dense_replace": 2}),
    "deepseek_v3": ("DeepseekV3Config", {"vocab_size": 48, **_MLA, "n_group": 4, "topk_group": 2}),
    "bloom": ("BloomConfig", {"vocab_size": 49, "hidden_size": 36, "n_layer": 2, "n_head": 6}),
    "falcon-alibi": (
        "FalconConfig",
        {"vocab_size": 44, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
    ),
    "llama-dynamic": (
        "LlamaConfig",
        _grouped(61, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
    ),
}
TINY_NAMES = tuple(_TINY)


def tiny_config(name: str) -> PreTrainedConfig | None:
    """A fresh config, or None when the installed transformers has no such class. KeyError for an unknown name."""
    class_name, arguments = _TINY[name]
    found = getattr(transformers, class_name, None)
    return None if found is None else found(**{**_COMMON, **arguments})


def randomise(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Overwrites every weight, at a generous scale: attention must depend on what it sees, greedy output must vary.

    Drawn in fp64 and rounded afterwards: one seed is one model, whatever the dtype.
    """
    is_gemma = model.config.model_type.startswith("gemma")
    norm_center = 0.0 if is_gemma else 1.0  # Gemma's norms store weight - 1
    embedding_std = 1.0 / math.sqrt(model.config.hidden_size) if is_gemma else 1.0  # Gemma multiplies by sqrt(hidden)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            owner = model.get_submodule(name.rpartition(".")[0])
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            if isinstance(owner, nn.Embedding):
                drawn = embedding_std * noise
            elif weight.ndim >= 2:  # [out, in], or [experts, out, in]
                fan_in = weight.shape[0] if isinstance(owner, Conv1D) else weight.shape[-1]
                drawn = 1.5 / math.sqrt(fan_in) * noise
            elif name.endswith("bias"):
                drawn = 0.1 * noise
            else:
                drawn = norm_center + 0.1 * noise
            weight.copy_(drawn)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # a router's, learned but no parameter
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator, dtype=torch.float64))
