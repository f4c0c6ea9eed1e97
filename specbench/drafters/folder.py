"""Any causal language model in a folder as drafter: safetensors only, no code of the folder, transformers' forward.

Its cache is kept between rounds: rows of tokens that the next context still begins with stay, all others are cropped,
so that a draft hangs on the context and nothing else. A cache that cannot be cropped (recurrent layers, a full sliding
window) is dropped and computed again. A chain is drafted. A model of another vocabulary is refused, or mapped to the
target's ids when asked: its best token ends the chain where the target has none like it; draws are from those it has.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from specbench.drafters.toys import other_symbols, symbols, tiny_model, tokenizer
from specbench.drafters.vocabulary import VocabularyMap, check_same, read_vocabulary
from specbench.models import ModelError, find_folder
from specbench.protocols import Coins, LanguageModel
from specbench.reference.hf import cache_argument
from specbench.reference.sampling import probs
from specbench.reference.verify.chance import inverse_cdf
from specbench.tree import DraftTree, chain
from specbench.types import Sampling


class FolderDrafter:
    """vocab_size: the target's. mapping: None where the drafter's ids are the target's.

    Drawn drafts follow the model's law at the target's temperature, one coin each; other cuts are the verifier's.
    """

    def __init__(
        self, model: PreTrainedModel, *, vocab_size: int, gamma: int = 4, mapping: VocabularyMap | None = None
    ) -> None:
        self._model = model.eval()
        self._cache_argument = cache_argument(model)
        self._vocab_size, self._gamma, self._mapping = vocab_size, gamma, mapping
        self.reset()

    def reset(self) -> None:
        self._cache = DynamicCache(config=self._model.config)
        self._cached: list[int] = []  # drafter ids, a row each

    def draft(
        self, context: list[int], *, max_nodes: int, max_depth: int, sampling: Sampling, coins: Coins
    ) -> DraftTree:
        """draft_probs: float64 [N, V] where drafts are drawn; the last row is zero."""
        read = list(context) if self._mapping is None else self._mapping.read(context)
        drafts: list[int] = []
        laws: list[Tensor] = []
        while read and len(drafts) < min(self._gamma, max_nodes, max_depth):
            logits = self._next_logits(read)
            if sampling.temperature == 0.0:
                picked = int(logits.argmax())
                token = picked if self._mapping is None else self._mapping.to_target.get(picked)
                if token is None or token >= self._vocab_size:
                    break
            else:
                laws.append(self._over_target(probs(logits, Sampling(temperature=sampling.temperature))))
                token = inverse_cdf(laws[-1].tolist(), float(coins.uniform(1)))
            drafts.append(token)
            read += [token] if self._mapping is None else self._mapping.to_drafter[token]
        tree = chain([context[-1], *drafts])
        if not laws:
            return tree
        rows = torch.stack([*laws, torch.zeros_like(laws[0])])
        return DraftTree(tree.tokens, tree.parents, draft_probs=rows, proposal="iid")

    def _next_logits(self, read: list[int]) -> Tensor:
        """float [V'] behind the last token, the drafter's own V'."""
        num_kept = 0
        for cached, wanted in zip(self._cached, read[:-1], strict=False):
            if cached != wanted:
                break
            num_kept += 1
        self._crop(num_kept)
        new = torch.tensor([read[len(self._cached) :]])
        self._cached = list(read)
        with torch.no_grad():
            return self._model(input_ids=new, use_cache=True, **{self._cache_argument: self._cache}).logits[0, -1]

    def _crop(self, length: int) -> None:
        num_rows = len(self._cached)
        if length == num_rows:
            return
        if length == 0 or not _can_crop(self._cache):
            self.reset()
            return
        self._cache.crop(length - num_rows)
        self._cached = self._cached[:length]

    def _over_target(self, law: Tensor) -> Tensor:
        """float64 [V]: the law of those tokens that the target has, on its ids."""
        out = torch.zeros(self._vocab_size, dtype=torch.float64)
        if self._mapping is None:
            shared = min(len(law), self._vocab_size)
            out[:shared] = law[:shared]
        else:
            theirs, ours = (torch.tensor(one) for one in zip(*self._mapping.to_target.items(), strict=True))
            out[ours] = law[theirs]
        return out / out.sum()


def load_folder(
    folder: str | Path,
    *,
    target_folder: str | Path,
    gamma: int = 4,
    mapped: bool = False,
    dtype: torch.dtype = torch.float32,
) -> FolderDrafter:
    """mapped: take a model of another vocabulary too. ModelError for a folder that is not loaded, OtherVocabulary."""
    model = load_model(folder, dtype=dtype)
    vocab_size = AutoConfig.from_pretrained(target_folder, trust_remote_code=False).get_text_config().vocab_size
    if not mapped:
        check_same(read_vocabulary(target_folder), read_vocabulary(folder))
        return FolderDrafter(model, vocab_size=vocab_size, gamma=gamma)
    ours, theirs = (AutoTokenizer.from_pretrained(one, trust_remote_code=False) for one in (target_folder, folder))
    return FolderDrafter(model, vocab_size=vocab_size, gamma=gamma, mapping=VocabularyMap.of(ours, theirs))


def load_model(folder: str | Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """ModelError names what is wrong with the folder before any of its weights are read."""
    place = Path(folder)
    find_folder(place)
    if "auto_map" in json.loads((place / "config.json").read_text(encoding="utf-8")):
        raise ModelError(f"{folder} needs code of its own (auto_map in config.json), which is never run")
    options: dict[str, Any] = {"use_safetensors": True, "trust_remote_code": False, "local_files_only": True}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)


def _can_crop(cache: DynamicCache) -> bool:
    """Whether each layer still holds the row that would come to be its last."""
    return all(type(layer).__name__ == "DynamicLayer" for layer in cache.layers)


class Folder:
    """A target for the claims: the folder's model is a tiny one, here in memory."""

    drafter_names = ("same", "mapped")

    def build_drafter(self, model: LanguageModel, name: str) -> FolderDrafter:
        if name == "same":
            return FolderDrafter(tiny_model(model.vocab_size), vocab_size=model.vocab_size)
        spelt = tuple(other_symbols(model.vocab_size))
        mapping = VocabularyMap.of(tokenizer(tuple(symbols(model.vocab_size))), tokenizer(spelt))
        return FolderDrafter(tiny_model(len(spelt)), vocab_size=model.vocab_size, mapping=mapping)
