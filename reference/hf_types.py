"""What the reference decoder must know about a transformers model type, and why some models are refused.

A wrongly placed mask gives plausible logits, so a type is driven only when it is listed here, and a config only when
nothing in it makes a row depend on more than its own path. Holds facts and refusals; runs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig

# Attention of our own, registered by `hf.py`: returns its weights, with the softmax in the query's dtype.
TAP = "specbench_tap"
# A mask of our own, where a 4-D mask is not taken: see `HFModel._masked_by`.
TREE_MASK = "specbench_tree"
# Attention and masks of somebody else's: see `HFModel.with_attention`.
FUSED = "specbench_fused"
ELSEWHERE = "test this model through an adapter of yours that has the methods of specbench.protocols.TreeModel"


@dataclass(frozen=True)
class ModelType:
    """One model type. layers, attention: where the model keeps its decoder layers, and each its attention module.

    windows: "none"; "all" layers see `config.sliding_window` positions; or "by_type", as `config.layer_types` says
    (such a model takes a dict of masks). attentions: implementations that can be driven, the first one by default.
    has_alibi: attention is biased by the distance between rows of the cache, which a tree must turn into positions.
    takes_attention: its attention is looked up by name, so that another one can be registered.
    has_experts: a router sends rows to experts, in batches that depend on the other rows.
    casts_to_fp32: norms, routers or rotations pass data through fp32 even in an fp64 model. A difference of 1e-16 then
    becomes one of 1e-8 in about one forward of 2,000 (measured), so such a type is judged as fp32 is, never at 1e-9.
    special: what sets the type apart, for the table of architectures.
    """

    layers: str
    attention: str
    special: str
    windows: str = "none"
    attentions: tuple[str, ...] = ("sdpa", "eager")
    has_alibi: bool = False
    takes_attention: bool = True
    has_experts: bool = False
    casts_to_fp32: bool = True  # every RMSNorm of transformers does


_LAYERS = ("model.layers", "self_attn")
MODEL_TYPES = {
    "llama": ModelType(*_LAYERS, "rotary positions, grouped heads"),
    "qwen2": ModelType(*_LAYERS, "biases on q, k, v; window in some layers", windows="by_type"),
    "qwen3": ModelType(*_LAYERS, "normed q and k", windows="by_type"),
    "mistral": ModelType(*_LAYERS, "sliding window in every layer", windows="all"),
    "gemma2": ModelType(
        *_LAYERS, "soft-cap, alternating windows, no sdpa", windows="by_type", attentions=("eager", TAP)
    ),
    "gemma3_text": ModelType(*_LAYERS, "alternating windows, two rotary bases", windows="by_type"),
    "gpt2": ModelType("transformer.h", "attn", "learned positions", casts_to_fp32=False),
    "gpt_neox": ModelType("gpt_neox.layers", "attention", "partial rotary, parallel residual", casts_to_fp32=False),
    "phi": ModelType(*_LAYERS, "partial rotary, parallel residual", casts_to_fp32=False),
    "falcon": ModelType(
        "transformer.h",
        "self_attention",
        "rotary, one key head, parallel residual",
        takes_attention=False,
        casts_to_fp32=False,
    ),
    "bloom": ModelType(
        "transformer.h",
        "self_attention",
        "ALiBi, no sdpa",
        attentions=("eager",),
        has_alibi=True,
        takes_attention=False,
    ),
    "mixtral": ModelType(*_LAYERS, "experts", windows="all", has_experts=True),
    "deepseek_v2": ModelType(*_LAYERS, "latent cache (MLA), rotary in fp32", has_experts=True),
    "deepseek_v3": ModelType(*_LAYERS, "latent cache (MLA), experts in groups", has_experts=True),
}
LAYER_TYPES = ("full_attention", "sliding_attention")


def check_supported(config: PreTrainedConfig, attention: str | None = None) -> None:
    """ValueError for a model that `hf.py` would drive wrongly. attention: None means what the config says."""
    reason = refusal(config)
    if reason is not None:
        raise ValueError(f"{reason}; {ELSEWHERE}")
    attention = config._attn_implementation if attention is None else attention
    known = MODEL_TYPES[config.model_type].attentions
    if attention not in known:
        raise ValueError(
            f"attention = {attention!r} must be one of {', '.join(known)} for model_type = {config.model_type!r} "
            "(others take no 4-D mask, or leave a soft-cap out)"
        )


def refusal(config: PreTrainedConfig) -> str | None:
    """Why a model of this config is not driven, whatever its attention; None when it is."""
    name = config.model_type
    if name not in MODEL_TYPES:
        return f"model_type = {name!r} must be one of {', '.join(MODEL_TYPES)}, the types whose tree mask is known"
    if getattr(config, "alibi", False):
        return (
            "alibi = True is refused: transformers' Falcon counts ALiBi's distances in rows of the cache, and takes "
            "from a mask only what to hide, so siblings would shift the bias of every row behind them"
        )
    for key, wanted in (("use_bidirectional_attention", False), ("is_causal", True)):
        if getattr(config, key, wanted) == (not wanted):
            return f"{key} = {not wanted} must be {wanted}: such a model cannot decode token by token"
    moving = sorted(one for one in _rope_types(config) if "dynamic" in one or one == "longrope")
    if moving:
        return (
            f"rope_type = {moving[0]!r} is refused: its frequencies change with the length of a forward, so cached "
            "keys differ from recomputed ones"
        )
    if MODEL_TYPES[name].windows == "by_type":
        for idx, kind in enumerate(config.layer_types):
            if kind not in LAYER_TYPES:
                return f"layer_types[{idx}] = {kind!r} must be one of {', '.join(LAYER_TYPES)}"
    return None


def exact_attention(model_type: str) -> str:
    """The attention whose softmax is in the model's dtype, if it has one: transformers' eager takes it in fp32."""
    return next((one for one in MODEL_TYPES[model_type].attentions if one != "eager"), "eager")


def layer_windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """How many positions each layer sees, the row's own included; None for all."""
    windows = MODEL_TYPES[config.model_type].windows
    if windows == "by_type":
        return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types)
    return (config.sliding_window if windows == "all" else None,) * config.num_hidden_layers


def _rope_types(config: PreTrainedConfig) -> set[str]:
    """Of the one rotary embedding, or of one for each layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [one for one in parameters.values() if isinstance(one, dict)]
    return {str(one.get("rope_type", "default")) for one in nested or [parameters]}
