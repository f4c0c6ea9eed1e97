"""Drafters that others trained, from the folders they publish them in: Medusa's heads, EAGLE, EAGLE-3, speculators.

The names of a layout are turned into ours, and nothing else: where a drafter computes something that ours do not, it is
refused and told which part. Safetensors, or on request pickles of tensors alone; no code of a folder is ever run.

    Medusa         medusa_num_heads; {i}.0.linear.weight, .bias, {i}.1.weight      github.com/FasterDecoding/Medusa
                   num_heads; blocks.{i}.layers.0.weight, lm_heads.{i}.weight      vLLM's
    EAGLE, 1 and 2 fc.weight [H, 2 H], layers.0...; no norm before the first layer, none behind the last
    EAGLE-3        fc.weight [H, 3 H], midlayer..., norm, lm_head, d2t, t2d        github.com/SafeAILab/EAGLE
    speculators    speculators_model_type "eagle" or "eagle3", the sizes in transformer_layer_config
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from specbench.reference.drafters.folders import check_fits
from specbench.reference.drafters.fused import FusedConfig, FusedLayers
from specbench.reference.drafters.heads import HeadsConfig, MarkovHeads
from specbench.reference.drafters.layers import DraftLayers, LayersConfig

PICKLES = ("*.bin", "*.pt", "*.pth")
LAYOUTS = "Medusa (medusa_num_heads), EAGLE (fc.weight), EAGLE-3 (d2t) or speculators (speculators_model_type)"
# What changes the result where a config says it, and is computed nowhere here.
UNKNOWN = (
    "residual_multiplier",
    "use_sliding_window",
    "norm_before_fc",
    "fc_norm",
    "layernorms",
    "norm_output",
    "parallel_drafting",
    "attention_bias",
    "mlp_bias",
)


def is_published(folder: str | Path) -> bool:
    """Whether a folder's config.json is somebody else's: ours say their `kind`."""
    file = Path(folder) / "config.json"
    return file.is_file() and "kind" not in _fields(file)


def read_published(folder: str | Path, target: Any, *, pickles: bool = False) -> MarkovHeads | DraftLayers:
    """target: a model with `embedding`, `head` and `num_layers`, that the drafter was made for."""
    try:
        fields = _fields(Path(folder) / "config.json")
        weights = _weights(Path(folder), pickles=pickles)
        return _made(fields, weights, target)
    except KeyError as error:
        raise ValueError(f"{folder}: config.json lacks {error}") from None
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    except (ArithmeticError, AttributeError, IndexError, RuntimeError, TypeError, SafetensorError) as error:
        raise ValueError(f"{folder}: sizes in config.json and its tensors do not fit each other: {error}") from None


def _made(fields: Mapping[str, Any], weights: dict[str, Tensor], target: Any) -> MarkovHeads | DraftLayers:
    kind = fields.get("speculators_model_type")
    if kind is not None and kind not in ("eagle", "eagle3"):
        raise ValueError(f"speculators_model_type {kind!r} must be 'eagle' or 'eagle3': no other is computed here")
    if "medusa_num_heads" in fields or fields.get("model_type") == "medusa":
        return _medusa(fields, weights, target)
    for name in UNKNOWN:
        if fields.get(name) or fields.get("transformer_layer_config", {}).get(name):
            raise ValueError(f"config.json says {name}, which is not computed here")
    weights = {key.removeprefix("model.").replace("midlayer.", "layers.0."): one for key, one in weights.items()}
    if kind == "eagle3" or (kind is None and {"d2t", "layers.0.hidden_norm.weight"} & set(weights)):
        return _eagle3(fields, weights, target)
    if kind == "eagle" or "fc.weight" in weights:
        return _eagle(fields, weights, target)
    raise ValueError(f"this is the layout of no drafter that is known here: {LAYOUTS}")


def _medusa(fields: Mapping[str, Any], weights: dict[str, Tensor], target: Any) -> MarkovHeads:
    """One residual block a head, and an output matrix of its own."""
    vocab_size, hidden = target.embedding.shape
    num_heads = fields["medusa_num_heads"] if "medusa_num_heads" in fields else fields["num_heads"]
    num_blocks = fields.get("medusa_num_layers", fields.get("num_hidden_layers", 1))
    if num_blocks != 1:
        raise ValueError(f"its heads have {num_blocks} residual blocks each, must have 1 to be computed here")
    given = {re.sub(r"^medusa_heads?\.", "", key): one for key, one in weights.items()}
    ids = given.pop("token_map", torch.arange(vocab_size)).to(torch.int64)
    order = ids.argsort()
    found = {"ids": ids[order]}
    shared = given.pop("lm_head.weight", None)
    for idx in range(num_heads):
        block = _taken(given, f"{idx}.0.linear.weight", f"blocks.{idx}.layers.0.weight")
        bias = _taken(
            given,
            f"{idx}.0.linear.bias",
            f"blocks.{idx}.layers.0.bias",
            instead=torch.zeros(hidden, dtype=block.dtype),
        )
        output = _taken(given, f"{idx}.1.weight", f"lm_heads.{idx}.weight", instead=shared)
        found |= {f"heads.{idx}.weight": block, f"heads.{idx}.bias": bias}
        found[f"heads.{idx}.output"] = output[found["ids"]] if len(output) == vocab_size else output[order]
    if given:
        raise ValueError(f"{', '.join(sorted(given))} must not be there: nothing is computed with it here")
    config = HeadsConfig(hidden, vocab_size, num_heads, len(ids), conditioned=False, own_outputs=True)
    return MarkovHeads(config, found)


def _eagle(fields: Mapping[str, Any], weights: dict[str, Tensor], target: Any) -> DraftLayers:
    sizes = _sizes(fields)
    found = {_renamed(key): one for key, one in weights.items() if key != "lm_head.weight"}
    _keep_own(found, "embedding.weight", weights.get("embed_tokens.weight"), target.embedding)
    _keep_own(found, "output.weight", weights.get("lm_head.weight"), target.head)
    found["ids"] = torch.arange(sizes["vocab_size"])
    config = LayersConfig(**sizes, num_ids=sizes["vocab_size"], has_outer_norms=False)
    check_fits(target, config.hidden_size, config.vocab_size)
    return DraftLayers(config, found)


def _eagle3(fields: Mapping[str, Any], weights: dict[str, Tensor], target: Any) -> FusedLayers:
    sizes = _sizes(fields)
    if (other := fields.get("target_hidden_size") or sizes["hidden_size"]) != sizes["hidden_size"]:
        raise ValueError(f"its hidden size {sizes['hidden_size']} must be its target's, {other}, to be computed here")
    ids = torch.arange(fields.get("draft_vocab_size") or sizes["vocab_size"])
    if "d2t" in weights:
        ids = ids + weights["d2t"].to(torch.int64)
    if (
        (known := weights.get("t2d")) is not None
        and len(ids) < len(known)
        and (not known.bool()[ids].all() or int(known.sum()) != len(ids))
    ):
        raise ValueError("d2t and t2d name other tokens of the target")
    skipped = ("d2t", "t2d", "lm_head.weight", "verifier_norm.weight", "verifier_lm_head.weight")
    renamed = {
        "layers.0.input_layernorm.weight": "embedded_norm.weight",
        "layers.0.hidden_norm.weight": "before_norm.weight",
        "norm.weight": "output_norm.weight",
    }
    found = {renamed.get(key) or _renamed(key): one for key, one in weights.items() if key not in skipped}
    _keep_own(found, "embedding.weight", weights.get("embed_tokens.weight"), target.embedding)
    _keep_own(found, "output.weight", weights.get("lm_head.weight"), target.head[ids])
    found["ids"] = ids
    is_speculators = "speculators_model_type" in fields
    config = FusedConfig(
        **sizes,
        num_ids=len(ids),
        state_layers=_state_layers(fields, target.num_layers),
        norm_before_residual=fields["norm_before_residual"] if is_speculators else False,
    )
    check_fits(target, config.hidden_size, config.vocab_size)
    return FusedLayers(config, found)


def _state_layers(fields: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Those that the config names; where it names none, the ones that EAGLE-3 was published with."""
    name = "eagle_aux_hidden_state_layer_ids"
    told = fields.get(name) or fields.get("eagle_config", {}).get(name) or (2, num_layers // 2, num_layers - 3)
    if not all(0 <= layer < num_layers for layer in told):
        raise ValueError(f"it reads what layers {list(told)} are given, of which the target has {num_layers}")
    return tuple(told)


def _sizes(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Of a Llama-like config, whose layers are computed as Llama's."""
    given = fields.get("transformer_layer_config", fields)
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ValueError(f"its rotary embedding {rope} must be of type 'default' to be computed here")
    if (share := given.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor = {share} must be 1 to be computed here: all of a head turns")
    if given.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act = {given['hidden_act']!r} must be 'silu' to be computed here")
    heads = given["num_attention_heads"]
    return {
        "hidden_size": given["hidden_size"],
        "intermediate_size": given["intermediate_size"],
        "num_layers": given.get("num_hidden_layers", 1),
        "num_heads": heads,
        "num_kv_heads": given.get("num_key_value_heads") or heads,
        "head_dim": given.get("head_dim") or given["hidden_size"] // heads,
        "vocab_size": given["vocab_size"],
        "rms_norm_eps": given.get("rms_norm_eps", 1e-6),
        "rope_theta": float(rope.get("rope_theta") or given.get("rope_theta") or 10_000.0),
    }


def _renamed(key: str) -> str:
    return f"model.{key}" if key.startswith("layers.") else key


def _keep_own(found: dict[str, Tensor], name: str, own: Tensor | None, targets: Tensor) -> None:
    """A matrix that the target has too is kept where it is another one."""
    found.pop("embed_tokens.weight", None)
    if own is not None and not (own.shape == targets.shape and torch.equal(own.to(targets), targets)):
        found[name] = own


def _taken(weights: dict[str, Tensor], *names: str, instead: Tensor | None = None) -> Tensor:
    """Takes out the tensor of the first of these names that there is."""
    for name in names:
        if name in weights:
            return weights.pop(name)
    if instead is None:
        raise ValueError(f"there is no tensor {' or '.join(names)}")
    return instead


def _fields(file: Path) -> dict[str, Any]:
    fields = json.loads(file.read_text("utf-8"))
    if not isinstance(fields, dict):
        raise ValueError(f"{file} must hold a JSON object")
    return fields


def _weights(folder: Path, *, pickles: bool) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    if found:
        return found
    others = sorted(file for pattern in PICKLES for file in folder.glob(pattern))
    if not others:
        raise ValueError(f"{folder} holds no *.safetensors, which must have the drafter's weights")
    if not pickles:
        raise ValueError(
            f"{folder} holds its weights as a pickle, {others[0].name}, which is not read unasked: save them as "
            "safetensors, or load them with pickles=True, which reads tensors alone"
        )
    for file in others:
        found |= torch.load(file, map_location="cpu", weights_only=True)
    return found
