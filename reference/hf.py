"""A transformers causal LM driven by the reference decoder: tree masks, a cache that keeps every row, taps.

Known types are Llama, GPT-2 and Gemma 3 (text); another type is refused, since a wrongly placed mask gives plausible
logits. Weights come from safetensors only, never pickles or remote code. Only attention that takes an additive 4-D mask
is driven ("sdpa", "eager"). There is no batching over caches and no generation loop.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import eager_mask

from specbench.protocols import Cache
from specbench.reference.kv_cache import check_truncation, kept_rows
from specbench.steps import FlatTree
from specbench.types import Taps, as_token_ids


@dataclass(frozen=True)
class ModulePaths:
    """Where a model type keeps its decoder layers, and the attention module inside one."""

    layers: str
    attention: str


MODULE_PATHS = {
    "llama": ModulePaths("model.layers", "self_attn"),
    "gpt2": ModulePaths("transformer.h", "attn"),
    "gemma3_text": ModulePaths("model.layers", "self_attn"),
}
ATTENTIONS = ("sdpa", "eager")
CACHE_KINDS = ("contiguous",)
TAP = "specbench_tap"


class HFModel:
    """A transformers model and the forward over it. Satisfies `specbench.protocols.LanguageModel`.

    `model` is put into evaluation mode (dropout off) and otherwise left as it is. A tapped forward swaps the model's
    attention function while it runs, so two threads must not share one model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        check_supported(model.config)
        self.model = model.eval()
        self._cache_argument = _cache_argument(model)

    @classmethod
    def load(
        cls, path_or_id: str | Path, *, dtype: torch.dtype, device: str = "cpu", attention: str = "sdpa"
    ) -> HFModel:
        """A checkpoint folder or hub id. The config is judged first: an unsupported type costs no download."""
        check_supported(AutoConfig.from_pretrained(path_or_id, trust_remote_code=False), attention)
        model = AutoModelForCausalLM.from_pretrained(
            path_or_id, dtype=dtype, attn_implementation=attention, use_safetensors=True, trust_remote_code=False
        )
        return cls(model.to(device))

    @classmethod
    def tiny(cls, model_type: str, *, seed: int, dtype: torch.dtype, attention: str = "sdpa") -> HFModel:
        """A seeded random model with 2 to 4 layers. One seed gives the same weights in every dtype, up to rounding."""
        if model_type not in TINY_CONFIGS:
            raise ValueError(f"model_type = {model_type!r} must be one of {', '.join(TINY_CONFIGS)}")
        config = TINY_CONFIGS[model_type]()
        check_supported(config, attention)
        # transformers initialises from the global generator, whose state belongs to the caller.
        with torch.random.fork_rng(devices=[]):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        _randomise(model, torch.Generator().manual_seed(seed))
        return cls(model)

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
    def num_kv_heads(self) -> int:
        return getattr(self.model.config, "num_key_value_heads", None) or self.num_heads

    @property
    def head_dim(self) -> int:
        return getattr(self.model.config, "head_dim", None) or self.model.config.hidden_size // self.num_heads

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """How many positions each layer sees, the row's own included; None for all."""
        kinds = getattr(self.model.config, "layer_types", None) or ["full_attention"] * self.num_layers
        return tuple(self.model.config.sliding_window if kind == "sliding_attention" else None for kind in kinds)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        return self.model.device

    def new_cache(self, kind: str = "contiguous") -> HFCache:
        """An empty cache. ValueError for a kind other than "contiguous"."""
        if kind not in CACHE_KINDS:
            raise ValueError(f"cache kind {kind!r} is unknown: choose one of {', '.join(CACHE_KINDS)}")
        return HFCache(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    @torch.no_grad()
    def forward(self, flat: FlatTree, cache: Cache, *, taps: Taps | None = None) -> Tensor:
        """The M rows of `flat` behind the cache, which grows by M rows. Returns float [M, V] in the model's dtype.

        `taps.mask` is what full-attention layers may see; a sliding layer sees of it what its window covers. If the
        forward raises, truncate the cache to its old length before using it again.
        """
        if not isinstance(cache, HFCache):
            raise ValueError(f"cache is a {type(cache).__name__}, must be an HFCache (from HFModel.new_cache)")
        self._check_rows(flat.tokens, flat.position_ids)
        prefix_len = cache.length
        mask = torch.cat([torch.ones(flat.num_rows, prefix_len, dtype=torch.bool), flat.mask], dim=1)  # [M, P+M]
        arguments = {
            "input_ids": flat.tokens[None].to(self.device),
            "position_ids": flat.position_ids[None].to(self.device),
            "attention_mask": self._attention_mask(mask, flat.position_ids),
            "use_cache": True,
            self._cache_argument: cache.dynamic,
        }
        if taps is None:
            return self.model(**arguments).logits[0]
        taps.node_of_row, taps.position_ids, taps.mask = flat.node_of_row, flat.position_ids, mask
        with self._tapped(taps, lambda one: one[0]):
            logits = self.model(**arguments).logits[0]
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
            tap.k, tap.v = _keys_values(dynamic, layer)
        return logits

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

    def _attention_mask(self, mask: Tensor, position_ids: Tensor) -> Tensor | dict[str, Tensor]:
        """mask: bool [M, P+M], position_ids: int64 [M]. Returns an additive mask [1, 1, M, P+M], or one per layer type.

        A 4-D mask replaces the one transformers would build, sliding window included: the window must be in ours.
        """
        if self.model.config.model_type != "gemma3_text":
            return self._additive(mask)
        prefix_len = mask.shape[1] - len(position_ids)
        key_positions = torch.cat([torch.arange(prefix_len), position_ids])  # [P+M]
        in_window = position_ids[:, None] - key_positions[None, :] < self.model.config.sliding_window
        return {"full_attention": self._additive(mask), "sliding_attention": self._additive(mask & in_window)}

    def _additive(self, mask: Tensor) -> Tensor:
        """bool [M, P+M] to [1, 1, M, P+M] in the model's dtype: 0 where visible, the most negative number elsewhere."""
        additive = torch.zeros(mask.shape, dtype=self.dtype).masked_fill(~mask, torch.finfo(self.dtype).min)
        return additive[None, None].to(self.device)

    @contextmanager
    def _tapped(self, taps: Taps, pick: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Forwards inside fill the outputs and weights in `taps`; afterwards the model is as it was, come what may."""
        paths = MODULE_PATHS[self.model.config.model_type]
        attention = self.model.config._attn_implementation
        handles = []
        try:
            for idx, layer in enumerate(self.model.get_submodule(paths.layers).children()):
                handles.append(layer.register_forward_hook(_record_hidden_state(taps, idx, pick)))
                attention_module = layer.get_submodule(paths.attention)
                handles.append(attention_module.register_forward_hook(_record_attention(taps, idx, pick)))
            self.model.set_attn_implementation(TAP)
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.model.set_attn_implementation(attention)


class HFCache:
    """Keys and values of one sequence in a transformers `DynamicCache`. Satisfies `specbench.protocols.Cache`.

    The `DynamicCache` is built without a config, so sliding-window layers keep all rows too: rows that left a window
    may be needed again after a rejection, and the window is the mask's business.
    """

    def __init__(
        self, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.dynamic = DynamicCache()
        empty = torch.empty(1, num_kv_heads, 0, head_dim, dtype=dtype, device=device)
        for layer in range(num_layers):
            self.dynamic.update(empty, empty, layer)

    @property
    def length(self) -> int:
        return self.rows(-1)[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for layer in range(len(self.dynamic.layers)) for one in self.rows(layer))

    def commit(self, prefix_len: int, rows: Sequence[int]) -> None:
        """Keep the first `prefix_len` rows and then rows `prefix_len + r`, in the order of `rows`; drop the rest."""
        self._keep(kept_rows(self.length, prefix_len, rows))

    def truncate(self, length: int) -> None:
        """Keep the first `length` rows. ValueError when there are fewer."""
        check_truncation(self.length, length)
        self._keep(list(range(length)))

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [Hkv, length, D]: views, valid until the cache changes."""
        keys, values = _keys_values(self.dynamic, layer)
        return keys[0], values[0]

    def _keep(self, rows: list[int]) -> None:
        """Copies, so that dropped rows are freed and `nbytes` is what is held."""
        for idx, layer in enumerate(self.dynamic.layers):
            keys, values = _keys_values(self.dynamic, idx)
            index = torch.tensor(rows, dtype=torch.int64, device=keys.device)
            layer.keys, layer.values = keys.index_select(2, index), values.index_select(2, index)


def check_supported(config: PreTrainedConfig, attention: str | None = None) -> None:
    """ValueError for a model that this file would drive wrongly. attention: None means what the config says."""
    if config.model_type not in MODULE_PATHS:
        raise ValueError(
            f"model_type = {config.model_type!r} must be one of {', '.join(MODULE_PATHS)}, "
            "the types whose tree mask is known; test another model "
            "through an adapter of yours that has the methods of specbench.protocols.TreeModel"
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise ValueError("use_bidirectional_attention = True must be False: such a model cannot decode token by token")
    attention = config._attn_implementation if attention is None else attention
    if attention not in ATTENTIONS:
        raise ValueError(f"attention = {attention!r} must be one of {', '.join(ATTENTIONS)} (others take no 4-D mask)")


def tap_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float,
    **unused: object,
) -> tuple[Tensor, Tensor]:
    """Attention that returns its weights, with the softmax in the query's dtype (transformers' eager takes fp32).

    query: [B, Hq, M, D]. key, value: [B, Hkv, P+M, D]. attention_mask: additive [B or 1, 1, M, P+M], any window in it.
    Returns the mixed values [B, M, Hq, D] and the weights [B, Hq, M, P+M].
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    weights = (query @ key.mT * scaling + attention_mask).softmax(dim=-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


# Without a mask function of its own, transformers would build no mask for this attention: forwards without an explicit
# 4-D mask would look into the future.
AttentionInterface.register(TAP, tap_attention)
AttentionMaskInterface.register(TAP, eager_mask)


def _record_hidden_state(taps: Taps, layer: int, pick: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        # Some versions return a tuple from some decoder layers.
        taps.layer(layer).hidden_state = pick(output if isinstance(output, Tensor) else output[0])

    return hook


def _record_attention(taps: Taps, layer: int, pick: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: object, output: tuple[Tensor, Tensor]) -> None:
        tap = taps.layer(layer)
        tap.attention_output, tap.attention_weights = pick(output[0]), pick(output[1])

    return hook


def _keys_values(dynamic: DynamicCache, layer: int) -> tuple[Tensor, Tensor]:
    """The cached keys and values of one layer, each [B, Hkv, length, D]."""
    held = dynamic.layers[layer]
    return held.keys, held.values


def _cache_argument(model: PreTrainedModel) -> str:
    """transformers 5.24 deprecates `past_key_values` in favour of `cache`; 5.17 knows only the old name."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _tiny_llama() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=61,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        **NO_SPECIAL_TOKENS,
    )


def _tiny_gpt2() -> GPT2Config:
    return GPT2Config(
        vocab_size=47,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=512,
        tie_word_embeddings=False,
        **NO_SPECIAL_TOKENS,
    )


def _tiny_gemma3() -> Gemma3TextConfig:
    """Heads wider than hidden / heads, as real Gemma has; a window small enough that short prompts outgrow it."""
    return Gemma3TextConfig(
        vocab_size=53,
        hidden_size=40,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=4,
        max_position_embeddings=512,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        tie_word_embeddings=False,
        **NO_SPECIAL_TOKENS,
    )


TINY_CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _tiny_llama,
    "gpt2": _tiny_gpt2,
    "gemma3_text": _tiny_gemma3,
}


def _randomise(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Overwrites every weight, at a generous scale: attention must depend on what it sees, greedy output must vary.

    Drawn in fp64 and rounded afterwards: one seed is one model, whatever the dtype.
    """
    norm_center = 0.0 if model.config.model_type == "gemma3_text" else 1.0  # Gemma's norms store weight - 1
    # Gemma multiplies embeddings by sqrt(hidden).
    embedding_std = 1.0 if model.config.model_type != "gemma3_text" else 1.0 / math.sqrt(model.config.hidden_size)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            owner = model.get_submodule(name.rpartition(".")[0])
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            if isinstance(owner, nn.Embedding):
                drawn = embedding_std * noise
            elif weight.ndim == 2:
                fan_in = weight.shape[1] if isinstance(owner, nn.Linear) else weight.shape[0]  # GPT-2's Conv1D
                drawn = 1.5 / math.sqrt(fan_in) * noise
            elif name.endswith("bias"):
                drawn = 0.1 * noise
            else:
                drawn = norm_center + 0.1 * noise
            weight.copy_(drawn)
