"""transformers' draft models: an assistant of the target's vocabulary, and the target's own first layers.

How many tokens an assistant drafts is said by three numbers of its generation config. "constant" drafts all of them
every time; "default" is what transformers does when nothing is said: it stops behind the first token that it is unsure
of; "heuristic" drafts two more after a full accept and one fewer after a refusal.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.candidate_generator import AssistedCandidateGenerator, EarlyExitCandidateGenerator

from specbench.drafters.candidates import CandidateDrafter
from specbench.drafters.toys import NUM_LAYERS, tiny_model
from specbench.protocols import LanguageModel

SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0},
    "default": {},
    "heuristic": {"num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0.0},
}


def assisted_drafter(
    assistant: PreTrainedModel, *, gamma: int = 4, schedule: str = "constant", vocab_size: int | None = None
) -> CandidateDrafter:
    """assistant: of the target's vocabulary; vocab_size: the target's where that is another, as with padded rows."""

    def make(ids: Tensor, config: GenerationConfig) -> AssistedCandidateGenerator:
        scheduled = with_schedule(assistant, gamma, schedule)
        return AssistedCandidateGenerator(ids, scheduled, config, {"attention_mask": torch.ones_like(ids)})

    size = assistant.config.get_text_config().vocab_size
    if vocab_size not in (None, size):
        raise ValueError(f"the assistant has {size} tokens, the target {vocab_size}: use specbench.drafters.universal")
    return CandidateDrafter(make, vocab_size=size)


def early_exit_drafter(target: PreTrainedModel, *, num_layers: int, gamma: int = 4) -> CandidateDrafter:
    """The first `num_layers` layers of the target, its last norm and its head."""

    def make(ids: Tensor, config: GenerationConfig) -> EarlyExitCandidateGenerator:
        config.assistant_early_exit = num_layers
        scheduled = with_schedule(target, gamma, "constant")
        return EarlyExitCandidateGenerator(ids, scheduled, config, {"attention_mask": torch.ones_like(ids)})

    return CandidateDrafter(make, vocab_size=target.config.get_text_config().vocab_size)


def with_schedule(model: PreTrainedModel, gamma: int, schedule: str) -> PreTrainedModel:
    """The same weights under a generation config that says how many tokens to draft."""
    scheduled = copy.copy(model)
    scheduled.generation_config = copy.deepcopy(model.generation_config)
    scheduled.generation_config.update(num_assistant_tokens=gamma, **SCHEDULES[schedule])
    return scheduled


class Assisted:
    """A target for the claims."""

    drafter_names = tuple(SCHEDULES)

    def build_drafter(self, model: LanguageModel, name: str) -> CandidateDrafter:
        return assisted_drafter(tiny_model(model.vocab_size), schedule=name)


class EarlyExit:
    """A target for the claims."""

    drafter_names = ("early_exit",)

    def build_drafter(self, model: LanguageModel, name: str) -> CandidateDrafter:
        return early_exit_drafter(tiny_model(model.vocab_size), num_layers=NUM_LAYERS - 1)
