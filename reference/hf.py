"""A transformers causal LM driven by the reference decoder: tree masks, a cache that keeps every row, taps.

Which types are driven, and why others are refused, says `hf_types.py`. Weights come from safetensors only, never
pickles or remote code. transformers' forwards run as they are: what a row sees comes in by masks and positions. There
is no batching over caches and no generation loop.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask

from specbench.protocols import Cache
from specbench.reference.hf_cache import CACHE_KINDS, HFCache, keys_values
from specbench.reference.hf_tiny import TINY_NAMES, randomise, tiny_config
from specbench.reference.hf_types import FUSED, MODEL_TYPES, TAP, TREE_MASK, ModelType, check_supported, layer_windows
from specbench.reference.kv_cache import AppendableCache, CacheSpec, LayerSpec, new_cache
from specbench.reference.model import FusedAttention, StateSink
from specbench.steps import FlatTree
from specbench.types import Taps, as_token_ids

__all__ = ["CACHE_KINDS", "TAP", "HFCache", "HFModel", "check_supported", "tap_attention"]


class HFModel:
    """A transformers model and the forward over it. Satisfies `specbench.protocols.LanguageModel`.

    `model` is put into evaluation mode (dropout off) and otherwise left as it is. A tapped forward swaps the model's
    attention function while it runs, so two threads must not share one model; nor may two drive models with ALiBi.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        check_supported(model.config)
        self.model = model.eval()
        self._cache_argument = cache_argument(model)
        self._fused: FusedAttention | None = None
        self._sink: StateSink | None = None
        self._sink_layers: tuple[int, ...] = ()

    @classmethod
    def load(
        cls, path_or_id: str | Path, *, dtype: torch.dtype, device: str = "cpu", attention: str | None = None
    ) -> HFModel:
        """A checkpoint folder or hub id. The config is judged first: an unsupported type costs no download.

        attention: None means the first that the type can be driven with, "sdpa" for most.
        """
        config = AutoConfig.from_pretrained(path_or_id, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            path_or_id, dtype=dtype, use_safetensors=True, trust_remote_code=False, **_choices(config, attention)
        )
        return cls(model.to(device))

    @classmethod
    def tiny(cls, name: str, *, seed: int, dtype: torch.dtype, attention: str | None = None) -> HFModel:
        """A seeded random model with 2 to 4 layers. One seed gives the same weights in every dtype, up to rounding."""
        if name not in TINY_NAMES:
            raise ValueError(f"name = {name!r} must be one of {', '.join(TINY_NAMES)}")
        config = tiny_config(name)
        if config is None:
            raise ValueError(f"name = {name!r} is not in this transformers ({transformers.__version__}): upgrade it")
        # transformers initialises from the global generator, whose state belongs to the caller.
        with torch.random.fork_rng(devices=[]):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **_choices(config, attention))
        randomise(model, torch.Generator().manual_seed(seed))
        return cls(model)

    def to(self, dtype: torch.dtype) -> HFModel:
        """A copy whose weights are converted, rounded where dtype holds fewer digits."""
        return HFModel(copy.deepcopy(self.model).to(dtype))

    @property
    def takes_attention(self) -> bool:
        """Whether `with_attention` has a place to put one."""
        return self._type.takes_attention

    def with_attention(self, attention: FusedAttention | None) -> HFModel:
        """The same model; rows behind a cache attend by `attention`, registered with transformers by name, masks too.
        None for transformers' own attention, which whole texts keep.

        ValueError for types that compute attention without looking a name up.
        """
        if attention is not None and not self.takes_attention:
            raise ValueError(
                f"{self.name} computes attention in its own code, must look it up in transformers' AttentionInterface "
                "for another one to take its place"
            )
        twin = copy.copy(self)
        twin._fused = attention
        return twin

    def with_state_sink(self, sink: StateSink | None, layers: Sequence[int] = ()) -> HFModel:
        """The same model; each forward behind a cache hands `sink` what its logits are made of, float [M, hidden], or
        where layers are named, what these are given, float [M, len(layers) * hidden]."""
        twin = copy.copy(self)
        twin._sink, twin._sink_layers = sink, tuple(layers)
        return twin

    @property
    def embedding(self) -> Tensor:
        """float [V, hidden]."""
        return cast(Tensor, self.model.get_input_embeddings().weight)

    @property
    def head(self) -> Tensor:
        """float [V, hidden], the output matrix."""
        return cast(Tensor, self.model.get_output_embeddings().weight)

    def states(self, tokens: Sequence[int]) -> Tensor:
        """float [S, hidden]: what the logits of a whole text are made of."""
        return self._overheard(tokens, ())

    def layer_inputs(self, tokens: Sequence[int], layers: Sequence[int]) -> Tensor:
        """float [S, len(layers) * hidden]: what these layers are given of a whole text, side by side."""
        return self._overheard(tokens, layers)

    def _overheard(self, tokens: Sequence[int], layers: Sequence[int]) -> Tensor:
        seen: list[Tensor] = []
        with self._heard(seen.append, layers):
            self.causal(torch.tensor([list(tokens)], dtype=torch.int64))
        return seen[0]

    @property
    def _type(self) -> ModelType:
        return MODEL_TYPES[self.model.config.model_type]

    @property
    def name(self) -> str:
        return f"transformers {self.model.config.model_type} {self.model.config._attn_implementation}"

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @property
    def num_layers(self) -> int:
        return self.model.config.num_hidden_layers

    @property
    def num_heads(self) -> int:
        return self.model.config.num_attention_heads

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """How many positions each layer sees, the row's own included; None for all."""
        return layer_windows(self.model.config)

    @cached_property
    def cache_spec(self) -> CacheSpec:
        """What each layer caches for one position: seen in a forward of one token, since it is the version's choice
        (MLA layers cache a latent and a rotary key, grouped heads may be cached repeated)."""
        dynamic = DynamicCache()
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        with torch.no_grad():
            self.model(input_ids=token, use_cache=True, **{self._cache_argument: dynamic})
        seen = [keys_values(dynamic, layer) for layer in range(self.num_layers)]
        layers = tuple(LayerSpec(keys.shape[1], keys.shape[3], values.shape[3]) for keys, values in seen)
        return CacheSpec(layers, self.dtype, str(self.device))

    @property
    def is_exact(self) -> bool:
        """True when nothing is computed in fewer bits than fp64, so that equal rows are equal to 1e-9 and better."""
        casts = self._type.casts_to_fp32
        return self.dtype == torch.float64 and not casts and self.model.config._attn_implementation != "eager"

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        return self.model.device

    def new_cache(self, kind: str = "contiguous") -> AppendableCache:
        """An empty cache of a kind in `CACHE_KINDS`; ValueError for another."""
        if kind not in CACHE_KINDS:
            raise ValueError(f"cache kind {kind!r} is unknown: choose one of {', '.join(CACHE_KINDS)}")
        return new_cache(kind, self.cache_spec)

    @torch.no_grad()
    def forward(self, flat: FlatTree, cache: Cache, *, taps: Taps | None = None) -> Tensor:
        """The M rows of `flat` behind the cache, which grows by M rows. Returns float [M, V] in the model's dtype.

        `taps.mask` is what full-attention layers may see; a sliding layer sees of it what its window covers. If the
        forward raises, truncate the cache to its old length before using it again.
        """
        if getattr(cache, "spec", None) != self.cache_spec:
            other = " of other rows" if hasattr(cache, "spec") else ""
            raise ValueError(f"cache is a {type(cache).__name__}{other}, must be from this model's new_cache()")
        self._check_rows(flat.tokens, flat.position_ids)
        prefix_len = cache.length
        mask = torch.cat([torch.ones(flat.num_rows, prefix_len, dtype=torch.bool), flat.mask], dim=1)  # [M, P+M]
        if taps is None:
            return self._run(flat, mask, cache)
        taps.node_of_row, taps.position_ids, taps.mask = flat.node_of_row, flat.position_ids, mask
        with self._tapped(taps, lambda one: one[0]):
            logits = self._run(flat, mask, cache)
        for layer in range(self.num_layers):
            tap, (k, v) = taps.layer(layer), cache.rows(layer)
            tap.k, tap.v = k[:, prefix_len:].clone(), v[:, prefix_len:].clone()
        return logits

    @torch.no_grad()
    def causal(self, tokens: Tensor, *, taps: Taps | None = None) -> Tensor:
        """tokens: int64 [B, S], whole sequences, transformers' own masks. Returns float [B, S, V].

        Fields of a layer's tap get a leading B dimension: k, v [B, Hkv, S, D], attention_output and hidden_state
        [B, S, hidden], attention_weights [B, Hq, S, S]. `taps.mask` [S, S] and `taps.position_ids` [S] hold for every
        sequence; there is no tree, so `taps.node_of_row` stays as it is.
        """
        position_ids = torch.arange(tokens.shape[1])
        self._check_rows(tokens, position_ids)
        tokens = tokens.to(self.device)
        if taps is None:
            return self.model(input_ids=tokens, use_cache=False).logits
        taps.position_ids, taps.mask = position_ids, position_ids[:, None] >= position_ids[None, :]
        dynamic = DynamicCache()
        with self._tapped(taps, lambda one: one):
            logits = self.model(input_ids=tokens, use_cache=True, **{self._cache_argument: dynamic}).logits
        for layer in range(self.num_layers):
            tap = taps.layer(layer)
            tap.k, tap.v = keys_values(dynamic, layer)
        return logits

    @torch.no_grad()
    def stepped(self, tokens: Sequence[int]) -> Tensor:
        """float [S, V]: transformers' own plain decoding, token by token through its own cache, with its own masks."""
        argument = {self._cache_argument: DynamicCache()}
        ids = torch.tensor([list(tokens)], device=self.device)
        rows = [self.model(input_ids=ids[:, [idx]], use_cache=True, **argument).logits[0] for idx in range(len(tokens))]
        return torch.cat(rows)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Level 0: float [S, V], row i predicts token i + 1."""
        ids = as_token_ids(tokens, argument="tokens", vocab_size=self.vocab_size)
        return self.causal(torch.tensor([ids], dtype=torch.int64))[0]

    def _check_rows(self, tokens: Tensor, position_ids: Tensor) -> None:
        """On a GPU an index past a table would end the process, not raise."""
        if tokens.numel() == 0:
            raise ValueError("tokens is empty, must hold at least one token")
        as_token_ids(tokens.flatten(), argument="tokens", vocab_size=self.vocab_size)
        num_positions = self.model.config.max_position_embeddings
        if self.model.config.model_type == "gpt2" and int(position_ids.max()) >= num_positions:
            raise ValueError(
                f"position_ids holds {int(position_ids.max())}, must be < {num_positions} (learned positions)"
            )

    @contextmanager
    def _heard(self, sink: StateSink, layers: Sequence[int]) -> Iterator[None]:
        """Forwards inside hand `sink` what the output matrix is given, or what `layers` are."""
        inputs: dict[int, Tensor] = {}

        def hear(layer: int) -> Any:
            def hook(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
                inputs[layer] = (given[0] if given else named["hidden_states"])[0]

            return hook

        def tell(module: Any, given: tuple[Any, ...]) -> None:
            sink(torch.cat([inputs[layer] for layer in layers], dim=-1) if layers else given[0][0])

        modules = list(self.model.get_submodule(self._type.layers).children())
        handles = [modules[one].register_forward_pre_hook(hear(one), with_kwargs=True) for one in dict.fromkeys(layers)]
        handles.append(self.model.get_output_embeddings().register_forward_pre_hook(tell))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _run(self, flat: FlatTree, mask: Tensor, cache: Cache) -> Tensor:
        with nullcontext() if self._sink is None else self._heard(self._sink, self._sink_layers):
            return self._masked(flat, mask, cache)

    def _masked(self, flat: FlatTree, mask: Tensor, cache: Cache) -> Tensor:
        """The model's own forward, told where the rows stand and, by mask bool [M, P+M], what they see."""
        arguments = {
            "input_ids": flat.tokens[None].to(self.device),
            "use_cache": True,
            self._cache_argument: HFCache(cast(AppendableCache, cache)),
        }
        if self._type.has_alibi:
            with self._masked_by(TREE_MASK, self._alibi_mask(mask, flat.position_ids)):
                return self.model(**arguments).logits[0]
        position_ids = flat.position_ids[None].to(self.device)
        if self._fused is not None:
            keys = _key_positions(mask, flat.position_ids).to(self.device)
            rows = FusedRows(self._fused, flat.mask.to(self.device), position_ids[0], keys, self.layer_windows)
            with self._masked_by(FUSED, rows):
                return self.model(**arguments, position_ids=position_ids).logits[0]
        attention_mask = self._attention_mask(mask, flat.position_ids)
        return self.model(**arguments, position_ids=position_ids, attention_mask=attention_mask).logits[0]

    def _attention_mask(self, mask: Tensor, position_ids: Tensor) -> Tensor | dict[str, Tensor]:
        """mask: bool [M, P+M], position_ids: int64 [M]. Returns an additive mask [1, 1, M, P+M], or one per layer type.

        A 4-D mask replaces the one transformers would build, sliding window included: the window must be in ours.
        """
        windows = set(self.layer_windows)
        masks = {window: self._additive(self._within(mask, position_ids, window)) for window in windows}
        if self._type.windows != "by_type":
            return masks[windows.pop()]  # one for all layers
        return {"full_attention" if window is None else "sliding_attention": one for window, one in masks.items()}

    def _within(self, mask: Tensor, position_ids: Tensor, window: int | None) -> Tensor:
        """mask, less what lies `window` or more positions back: positions count, not rows, since siblings share one."""
        if window is None:
            return mask
        return mask & (position_ids[:, None] - _key_positions(mask, position_ids)[None, :] < window)

    def _alibi_mask(self, mask: Tensor, position_ids: Tensor) -> Tensor:
        """Additive [1, Hq, M, P+M] for models that bias the key in row r by slope * r: makes it slope * position."""
        num_rows = torch.ones(1, mask.shape[1], dtype=torch.int64, device=self.device)
        of_row = self.model.base_model.build_alibi_tensor(num_rows, self.num_heads, self.dtype)  # [Hq, 1, P+M]
        moved = of_row[:, :, _key_positions(mask, position_ids).to(self.device)] - of_row
        return moved[None].masked_fill(~mask.to(self.device), torch.finfo(self.dtype).min)

    @contextmanager
    def _masked_by(self, name: str, mask: object) -> Iterator[None]:
        """Forwards inside attend by `name`, and get this mask where transformers would build one.

        transformers lets a mask be registered by name. That is how one gets in that is not a 4-D tensor, or gets into
        a model that takes 2-D masks only.
        """
        config, attention = self.model.config, self.model.config._attn_implementation
        ALL_MASK_ATTENTION_FUNCTIONS[name] = lambda *sizes, **named: mask
        try:
            config._attn_implementation = name
            yield
        finally:
            config._attn_implementation = attention
            del ALL_MASK_ATTENTION_FUNCTIONS[name]

    def _additive(self, mask: Tensor) -> Tensor:
        """bool [M, P+M] to [1, 1, M, P+M] in the model's dtype: 0 where visible, the most negative number elsewhere."""
        additive = torch.zeros(mask.shape, dtype=self.dtype).masked_fill(~mask, torch.finfo(self.dtype).min)
        return additive[None, None].to(self.device)

    @contextmanager
    def _tapped(self, taps: Taps, pick: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Forwards inside fill the outputs and weights in `taps`; afterwards the model is as it was, come what may."""
        config, attention = self.model.config, self.model.config._attn_implementation
        handles = []
        try:
            for idx, layer in enumerate(self.model.get_submodule(self._type.layers).children()):
                handles.append(layer.register_forward_hook(_record_hidden_state(taps, idx, pick)))
                attention_module = layer.get_submodule(self._type.attention)
                handles.append(attention_module.register_forward_hook(_record_attention(taps, idx, pick)))
            # Not set_attn_implementation, which skips Falcon and Bloom. They take any name but "sdpa" for their own
            # eager attention, which returns its weights: all that a tap needs.
            config._attn_implementation = TAP
            yield
        finally:
            for handle in handles:
                handle.remove()
            config._attn_implementation = attention


def tap_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    **unused: object,
) -> tuple[Tensor, Tensor]:
    """Attention that returns its weights, with the softmax in the query's dtype (transformers' eager takes fp32).

    query: [B, Hq, M, D]. key: [B, Hkv, P+M, D]. value: [B, Hkv, P+M, Dv]. attention_mask: additive [B or 1, 1, M, P+M],
    any window in it. softcap: scores are squeezed between minus it and it before they are masked.
    Returns the mixed values [B, M, Hq, Dv] and the weights [B, Hq, M, P+M].
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = query @ key.mT * scaling  # [B, Hq, M, P+M]
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    weights = (scores + attention_mask).softmax(dim=-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


@dataclass(frozen=True)
class FusedRows:
    """What `HFModel.with_attention` hands through transformers as a mask. block_mask: bool [M, M]. positions: int64
    [M], key_positions: int64 [P+M]. windows: of the layers."""

    attention: FusedAttention
    block_mask: Tensor
    positions: Tensor
    key_positions: Tensor
    windows: tuple[int | None, ...]


def fused_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: FusedRows,
    *,
    scaling: float,
    softcap: float | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """As `tap_attention`, by somebody else's attention, which forms no weights."""
    rows = attention_mask
    window = rows.windows[cast(int, module.layer_idx)]
    mixed = rows.attention(
        query, key, value, rows.block_mask, rows.positions, rows.key_positions,
        window=window, scale=scaling, soft_cap=softcap,
    )  # fmt: skip
    return mixed.transpose(1, 2).contiguous(), None


# Without a mask function of its own, transformers would build no mask for this attention: forwards without an explicit
# 4-D mask would look into the future.
AttentionInterface.register(TAP, tap_attention)
AttentionInterface.register(FUSED, fused_attention)
for _name in (TAP, TREE_MASK, FUSED):
    AttentionMaskInterface.register(_name, eager_mask)


def _record_hidden_state(taps: Taps, layer: int, pick: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        # Some versions return a tuple from some decoder layers.
        taps.layer(layer).hidden_state = pick(output if isinstance(output, Tensor) else output[0])

    return hook


def _record_attention(taps: Taps, layer: int, pick: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: object, output: tuple[Tensor, Tensor | None]) -> None:
        tap = taps.layer(layer)
        tap.attention_output = pick(output[0])
        tap.attention_weights = None if output[1] is None else pick(output[1])

    return hook


def cache_argument(model: PreTrainedModel) -> str:
    """transformers 5.24 deprecates `past_key_values` in favour of `cache`; 5.17 knows only the old name."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _key_positions(mask: Tensor, position_ids: Tensor) -> Tensor:
    """int64 [P+M]: where each key of a mask [M, P+M] stands; the prefix in order, then the rows."""
    return torch.cat([torch.arange(mask.shape[1] - len(position_ids)), position_ids])


def _choices(config: PreTrainedConfig, attention: str | None) -> dict[str, str]:
    """What transformers is told beside the config, after checking that the model can be driven so."""
    known = MODEL_TYPES.get(config.model_type)
    attention = known.attentions[0] if attention is None and known else attention
    check_supported(config, attention)
    assert known is not None and attention is not None
    # The default experts of transformers have no fp64.
    return {"attn_implementation": attention, **({"experts_implementation": "eager"} if known.has_experts else {})}
