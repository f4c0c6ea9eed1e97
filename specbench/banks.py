"""Banks of models that a target is judged on: tiny random ones in each dtype, transformers ones, a real checkpoint.

A bank hands out models by index, the same one for the same index, and the fp64 model that is their oracle. Models are
made on first use and kept.
"""

from __future__ import annotations

import copy
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from specbench.protocols import LanguageModel
from specbench.reference.hf import CACHE_KINDS, HFModel
from specbench.reference.hf_types import exact_attention
from specbench.reference.kv_cache import CACHES
from specbench.reference.model import LlamaConfig, LlamaModel, tiny_llama
from specbench.reference.recurrent import Recurrence, tiny_hybrid
from specbench.reference.sentinel import is_sentinel, load_program, prompts_for
from specbench.reference.streaming import StreamedOracle
from specbench.reference.weights import StoredWeights

_CONFIGS = (
    LlamaConfig(31, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8),
    LlamaConfig(37, 24, 40, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=4),
    LlamaConfig(29, 24, 32, num_layers=2, num_heads=3, num_kv_heads=1, head_dim=10),
    LlamaConfig(41, 32, 48, num_layers=3, num_heads=4, num_kv_heads=4, head_dim=8, tied=True),
    LlamaConfig(23, 18, 24, num_layers=2, num_heads=6, num_kv_heads=3, head_dim=6, rope_theta=500.0),
    LlamaConfig(2, 16, 24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8),
    LlamaConfig(27, 24, 32, num_layers=2, num_heads=6, num_kv_heads=1, head_dim=4, windows=(3, 3)),
    LlamaConfig(33, 24, 32, num_layers=3, num_heads=6, num_kv_heads=6, head_dim=4, windows=(5, None, 5)),
    LlamaConfig(25, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, windows=(8, 8)),
    LlamaConfig(35, 24, 32, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=4),
    LlamaConfig(39, 16, 24, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4, windows=(4, None, None)),
)
SHORTEST_PROMPT = 8  # of a sentinel: cases are cut out of prompts
_RECURRENCES = {9: Recurrence(layers=(0, 2)), 10: Recurrence(layers=(1,), inner=5, key_dim=3, value_dim=4, kernel=4)}
# Those with a checkpoint format: Llama, and Mistral, whose layers all slide.
_NUM_SAVABLE = 7


class Bank:
    """dtype: of the models handed out. exact: fp64, judged at 1e-9. real: a trained model, judged on fixed cases.

    share_of_examples: of the profile's Hypothesis cases. cache_kinds: what the models' caches can be.
    """

    share_of_examples = 1.0
    cache_kinds: tuple[str, ...] = ("contiguous", "preallocated")
    from_checkpoint = False
    _widest: ClassVar[dict[str, tuple[torch.dtype, LanguageModel]]] = {}

    def __init__(self, name: str, dtype: torch.dtype, *, num_models: int, real: bool = False) -> None:
        self.name = name
        self.dtype = dtype
        self.num_models = num_models
        self.real = real
        self.prompts: tuple[tuple[str, tuple[int, ...]], ...] = ()  # (id, token ids) of a real model's prompts
        self.eos_token_ids: tuple[int, ...] = ()

    @property
    def exact(self) -> bool:
        return self.dtype == torch.float64

    @property
    def noise_dtype(self) -> torch.dtype:
        """The precision whose rounding the models show."""
        return self.dtype

    @property
    def description(self) -> str:
        raise NotImplementedError

    def model(self, idx: int) -> LanguageModel:
        """The model a target is handed."""
        raise NotImplementedError

    def wide(self, idx: int) -> LanguageModel:
        """The same weights, as rounded, in fp64: the oracle."""
        raise NotImplementedError

    def checkpoint(self, idx: int) -> Path:
        """The model as a folder of safetensors and config.json."""
        raise NotImplementedError

    @classmethod
    def widened(cls, path: str, dtype: torch.dtype) -> LanguageModel:
        """A checkpoint's weights, rounded to `dtype`, in fp64 on the CPU.

        Each dtype has an oracle of its own, since rounded weights differ. One is kept: two of SmolLM2 take a gigabyte
        more. A Llama or Mistral folder whose fp64 copy takes more than $SPECBENCH_ORACLE_GIB (4) is streamed instead.
        """
        if cls._widest.get(path, (None, None))[0] != dtype:
            cls._widest.clear()
            cls._widest[path] = (dtype, _widened_checkpoint(path, dtype))
        return cls._widest[path][1]


class TinyBank(Bank):
    """Shapes of our own tiny Llama: grouped, multi-query and full heads, tied head, groups of three and six, V = 2,
    windows in all layers or every other one, and hybrids with recurrent layers.

    savable: only the models that have a checkpoint format.
    """

    cache_kinds = tuple(CACHES)

    def __init__(self, label: str, dtype: torch.dtype, *, device: str = "cpu", savable: bool = False) -> None:
        super().__init__(f"tiny-{label}", dtype, num_models=_NUM_SAVABLE if savable else len(_CONFIGS))
        self.share_of_examples = 1.0 if self.exact else 0.1
        self._device = device
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def description(self) -> str:
        return f"{self.num_models} random Llama shapes, windowed and recurrent ones too, 2-3 layers, reference.model"

    def model(self, idx: int) -> LlamaModel:
        return _tiny(idx, self.dtype, self._device)

    def wide(self, idx: int) -> LlamaModel:
        return _tiny_wide(idx, self.dtype)

    def checkpoint(self, idx: int) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="specbench-tiny-")
        folder = Path(self._folder.name) / str(idx)
        if not folder.exists():
            self.model(idx).save(folder)
        return folder


@cache
def _tiny(idx: int, dtype: torch.dtype, device: str) -> LlamaModel:
    if idx in _RECURRENCES:
        return tiny_hybrid(_CONFIGS[idx], _RECURRENCES[idx], seed=idx).to(dtype, device)
    return tiny_llama(_CONFIGS[idx], seed=idx).to(dtype, device)


@cache
def _tiny_wide(idx: int, dtype: torch.dtype) -> LlamaModel:
    return _tiny(idx, dtype, "cpu").to(torch.float64)


class HFBank(Bank):
    """Tiny transformers models through `reference.hf`, fp64 weights, in three banks by what can be asked of them.

    "hf-fp64": types without a cast to fp32, judged at 1e-9. "hf-tolerant": types that cast (norms, routers, rotations),
    windows and experts among them, judged as fp32 is. "hf-eager": softmax in fp32, and the types that have no other.
    """

    TYPES: ClassVar[dict[str, tuple[str, ...]]] = {
        "hf-fp64": ("gpt2", "gpt_neox", "phi", "falcon"),
        "hf-tolerant": (
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "gemma3_text",
            "mixtral",
            "deepseek_v2",
            "deepseek_v3",
        ),
        "hf-eager": ("llama", "gpt2", "gemma3_text", "gemma2", "bloom"),
    }
    cache_kinds = CACHE_KINDS

    def __init__(self, name: str) -> None:
        super().__init__(name, torch.float64, num_models=len(self.TYPES[name]))
        self.share_of_examples = {"hf-fp64": 0.15, "hf-tolerant": 0.1, "hf-eager": 0.05}[name]

    @property
    def description(self) -> str:
        attention = "eager" if self.name == "hf-eager" else "sdpa"
        return f"tiny transformers models ({', '.join(self.TYPES[self.name])}), fp64, {attention}, reference.hf"

    @property
    def exact(self) -> bool:
        return self.name == "hf-fp64"

    @property
    def noise_dtype(self) -> torch.dtype:
        return torch.float64 if self.exact else torch.float32

    def model(self, idx: int) -> HFModel:
        return _tiny_hf(self.TYPES[self.name][idx], "eager" if self.name == "hf-eager" else "sdpa")

    def wide(self, idx: int) -> HFModel:
        one = self.TYPES[self.name][idx]
        return _tiny_hf(one, exact_attention(one))


@cache
def _tiny_hf(model_type: str, attention: str) -> HFModel:
    return HFModel.tiny(model_type, seed=0, dtype=torch.float64, attention=attention)


class CheckpointBank(Bank):
    """One trained checkpoint, with its tokenizer and our prompts."""

    def __init__(self, label: str, path: str, dtype: torch.dtype, *, provenance: str, device: str) -> None:
        super().__init__(label, dtype, num_models=1, real=True)
        self._path = path
        self._provenance = provenance
        self._device = device
        self.prompts, self.eos_token_ids = encoded_prompts(path)
        self.cache_kinds = tuple(CACHES) if isinstance(self.model(0), LlamaModel) else ("contiguous",)
        if not self.prompts:
            raise ValueError(f"{path} has no tokenizer, which the shipped prompts need: save one into the folder")

    @property
    def description(self) -> str:
        short = str(self.dtype).removeprefix("torch.")
        return f"{self._provenance}; judged in {short}; {len(self.prompts)} shipped prompts"

    def model(self, idx: int) -> LanguageModel:
        return load_checkpoint(self._path, self.dtype, self._device)

    def wide(self, idx: int) -> LanguageModel:
        return self.widened(self._path, self.dtype)

    def checkpoint(self, idx: int) -> Path:
        return Path(self._path)


def _widened_checkpoint(path: str, dtype: torch.dtype) -> LanguageModel:
    if _is_streamed(path):
        return StreamedOracle(path, dtype)
    model = load_checkpoint(path, dtype)
    return model.to(torch.float64) if isinstance(model, LlamaModel) else _widened_hf(model)


def _is_streamed(path: str) -> bool:
    """Whether a checkpoint's fp64 copy is too large to be held. Types that the streaming oracle does not compute, and
    hub ids, are held whatever they take."""
    from transformers import AutoConfig

    text = os.environ.get("SPECBENCH_ORACLE_GIB", "4")
    try:
        limit = float(text) * 2**30
    except ValueError:
        raise ValueError(f"SPECBENCH_ORACLE_GIB = {text!r} must be a number of GiB") from None
    if not Path(path).is_dir():
        return False
    if AutoConfig.from_pretrained(path, trust_remote_code=False).model_type not in ("llama", "mistral"):
        return False
    return StoredWeights(path).num_numbers * torch.float64.itemsize > limit


def _widened_hf(model: LanguageModel) -> HFModel:
    assert isinstance(model, HFModel)
    return HFModel(copy.deepcopy(model.model).double())


@cache
def load_checkpoint(path: str, dtype: torch.dtype, device: str = "cpu") -> LanguageModel:
    """Our own forward for a Llama architecture, transformers for the other types that `reference.hf` supports."""
    from transformers import AutoConfig

    if AutoConfig.from_pretrained(path, trust_remote_code=False).model_type in ("llama", "mistral"):
        return LlamaModel.load(path, dtype=dtype, device=device)
    return HFModel.load(path, dtype=dtype, device=device)


@cache
def encoded_prompts(path: str) -> tuple[tuple[tuple[str, tuple[int, ...]], ...], tuple[int, ...]]:
    """(id, token ids) of every shipped prompt and the end token ids; both empty when the folder has no tokenizer. A
    sentinel knows sixteen symbols: its prompts are drawn of them, and it never ends."""
    from transformers import AutoTokenizer

    if is_sentinel(path):
        drawn = prompts_for(load_program(path)).items()
        return tuple((name, tuple(prompt)) for name, prompt in drawn if len(prompt) >= SHORTEST_PROMPT), ()

    from specbench.prompts import encode, load_prompts

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError):
        return (), ()
    eos = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    return tuple((one.id, tuple(encode(one, tokenizer))) for one in load_prompts()), eos
