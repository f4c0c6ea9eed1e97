"""A sentinel as files: a folder that transformers and servers load, with its tokenizer and its program; or one GGUF.

Symbols are the hexadecimal digits, so that a token is one printable character. Nothing is computed here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specbench.reference.model import hf_shape
from specbench.reference.sentinel.program import BOS, NUM_SYMBOLS, VOCAB_SIZE, Program
from specbench.reference.sentinel.weights import HEAD_DIM, Sentinel, quantised

SYMBOLS = "0123456789abcdef"
BOS_TEXT = "<s>"
MAX_POSITIONS = 8192
PROGRAM_FILE = "sentinel.json"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MODEL_TYPES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "gqa": ("llama", "LlamaForCausalLM"),
    "tied": ("llama", "LlamaForCausalLM"),
    "window": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
}
GGUF_VARIANTS = tuple(variant for variant, (model_type, _) in MODEL_TYPES.items() if model_type == "llama")
GGUF_TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0"}


def export(
    sentinel: Sentinel,
    folder: str | Path,
    *,
    dtype: str = "bf16",
    bits: int | None = None,
    symbols: str = SYMBOLS,
    num_unused: int = 0,
) -> Path:
    """config.json, model.safetensors, a tokenizer and sentinel.json, the program. The folder must be new or empty.

    dtype: bf16, fp16 or fp32. bits: 8 or 4, weights rounded as `quantised` does and stored dequantised.
    symbols: the text of tokens 0 to 15. num_unused: tokens behind BOS that the model never gives; with a law head their
    logits are 0.
    """
    from safetensors.torch import save_file

    if dtype not in DTYPES:
        raise ValueError(f"dtype = {dtype!r} must be one of {', '.join(DTYPES)}")
    weights = sentinel.weights() if bits is None else quantised(sentinel.weights(), bits)
    folder = _empty(Path(folder))
    stored = {name: one.to(DTYPES[dtype]).contiguous() for name, one in weights.items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in stored:
            stored[name] = torch.cat([stored[name], stored[name].new_zeros(num_unused, stored[name].shape[1])])
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    special = {"bos_token_id": BOS, "eos_token_id": None, "pad_token_id": None}
    sizes = {"vocab_size": VOCAB_SIZE + num_unused}
    _write(folder / "config.json", _config(sentinel, dtype) | special | sizes)
    _write(folder / "generation_config.json", special | {"do_sample": False})
    _write(folder / "tokenizer.json", _tokenizer(symbols, num_unused))
    _write(folder / "tokenizer_config.json", _tokenizer_config())
    _write(folder / PROGRAM_FILE, _described(sentinel, symbols))
    return folder


def is_sentinel(folder: str | Path) -> bool:
    """Whether a folder has been written by `export`."""
    return (Path(folder) / PROGRAM_FILE).is_file()


def load_program(folder: str | Path) -> Program:
    """The program of an exported folder."""
    return Program.from_json(_read(folder)["program"])


def has_law(folder: str | Path) -> bool:
    """Whether an exported folder's head gives the program's law, and not 10 for the next token."""
    return bool(_read(folder)["has_law"])


def export_gguf(sentinel: Sentinel, file: str | Path, *, kind: str = "f16") -> Path:
    """One GGUF file of type llama with its tokenizer.

    kind: f32, f16 or bf16; q8_0 and q4_0 round the layers' projections and keep embedding and head in f16.
    """
    check_gguf(sentinel, kind)
    import gguf

    config = sentinel.config
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_name(f"sentinel-{sentinel.program.receptive_field}")
    writer.add_file_type(gguf.LlamaFileType[("MOSTLY_" if kind != "f32" else "ALL_") + GGUF_TYPES[kind]])
    writer.add_vocab_size(VOCAB_SIZE)
    writer.add_context_length(MAX_POSITIONS)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    # Characters with equal scores and no pieces of several of them: SentencePiece then makes a token of each.
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*SYMBOLS, BOS_TEXT])
    writer.add_token_scores([0.0] * VOCAB_SIZE)
    writer.add_token_types([int(gguf.TokenType.NORMAL)] * NUM_SYMBOLS + [int(gguf.TokenType.CONTROL)])
    writer.add_bos_token_id(BOS)
    # Without these llama.cpp takes 2 for the end of text and 0 for unknown, which are symbols here. BOS is never made.
    writer.add_eos_token_id(BOS)
    writer.add_unk_token_id(BOS)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    for name, weight in sentinel.weights(torch.float32).items():
        where, stored = _gguf_name(name), _paired(name, weight)
        is_vector, in_layer = weight.dim() == 1, where.startswith("blk.")
        wanted = "F32" if is_vector else GGUF_TYPES[kind] if in_layer or not kind.startswith("q") else "F16"
        chosen = gguf.GGMLQuantizationType[wanted]
        writer.add_tensor(where, gguf.quantize(stored.numpy(), chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(file)


def check_gguf(sentinel: Sentinel, kind: str) -> None:
    """ValueError for what `export_gguf` would refuse."""
    if find_spec("gguf") is None:
        raise ValueError("writing a GGUF file needs the package gguf: pip install 'gguf>=0.17'")
    if kind not in GGUF_TYPES:
        raise ValueError(f"kind = {kind!r} must be one of {', '.join(GGUF_TYPES)}")
    if sentinel.variant not in GGUF_VARIANTS:
        raise ValueError(f"variant = {sentinel.variant!r} must be llama, gqa or tied to be written as GGUF")


def _config(sentinel: Sentinel, dtype: str) -> dict[str, object]:
    config, (model_type, architecture) = sentinel.config, MODEL_TYPES[sentinel.variant]
    window: dict[str, object] = {"sliding_window": sentinel.window} if model_type == "mistral" else {}
    return {
        "architectures": [architecture],
        "model_type": model_type,
        **hf_shape(config),
        "max_position_embeddings": MAX_POSITIONS,
        "hidden_act": "gelu_pytorch_tanh" if model_type == "gemma" else "silu",
        "torch_dtype": str(DTYPES[dtype]).removeprefix("torch."),
        **window,
    }


def _tokenizer(symbols: str, num_unused: int) -> dict[str, object]:
    """What the tokenizers library reads: every character is looked up by itself, another one is an error."""
    bos = {
        "id": BOS, "content": BOS_TEXT, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
        "special": True,
    }  # fmt: skip
    special = {"SpecialToken": {"id": BOS_TEXT, "type_id": 0}}
    unused = [f"<unused{idx}>" for idx in range(num_unused)]
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [bos],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [special, first],
            "pair": [special, first, second],
            "special_tokens": {BOS_TEXT: {"id": BOS_TEXT, "ids": [BOS], "tokens": [BOS_TEXT]}},
        },
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {text: idx for idx, text in enumerate([*symbols, BOS_TEXT, *unused])},
            "unk_token": "",  # which is no token: a character outside the alphabet raises
        },
    }


def _tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
    }


def _described(sentinel: Sentinel, symbols: str) -> dict[str, object]:
    return {
        "schema": 1,
        "what": "s_0 = the tokens; s_{l+1}[t] = tables[l][s_l[t]][s_l[max(0, t - 2^l)]]; position 0 (BOS) stays BOS",
        "variant": sentinel.variant,
        "receptive_field": sentinel.program.receptive_field,
        "has_law": sentinel.has_law,
        "bos": BOS,
        "symbols": symbols,
        "program": sentinel.program.as_json(),
    }


def _gguf_name(name: str) -> str:
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    inner = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    stem = name.removesuffix(".weight")
    if stem in outer:
        return outer[stem] + ".weight"
    _, _, layer, part = stem.split(".", maxsplit=3)
    return f"blk.{layer}.{inner[part]}.weight"


def _paired(name: str, weight: Tensor) -> Tensor:
    """GGUF's llama turns neighbouring dimensions of a head, where Hugging Face turns i with i + D/2."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return weight
    return weight.unflatten(0, (-1, 2, HEAD_DIM // 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _read(folder: str | Path) -> dict[str, Any]:
    if not is_sentinel(folder):
        raise ValueError(
            f"{folder} holds no {PROGRAM_FILE}: give a folder that `specbench sentinel export` has written"
        )
    read: dict[str, Any] = json.loads((Path(folder) / PROGRAM_FILE).read_text("utf-8"))
    return read


def _empty(folder: Path) -> Path:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there and not an empty folder: name a new one, nothing is overwritten")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write(file: Path, fields: Mapping[str, object]) -> None:
    file.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
