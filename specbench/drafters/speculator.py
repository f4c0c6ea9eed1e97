"""EAGLE-3 drafters in the `speculators` format of vLLM, read and run by that package: safetensors only, no remote code.

The package saves its own config.py and an auto_map into every folder. Neither is heeded: its classes are named here.

Such a drafter reads what some layers of the target say of each token. Here a forward of the target over the whole
context gives that, each round anew: a decoder has it from its last verification, which would be state to go wrong. The
package has one forward, made for training: it is shown the drafts so far as if they were the text's next tokens, one
more each time, and the last step's choice behind the context is the next draft. Greedy, as the format's proposals are.
"""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedModel

from specbench.drafters.folder import load_model
from specbench.drafters.toys import tiny_model
from specbench.engines import Missing
from specbench.models import ModelError
from specbench.protocols import Coins, LanguageModel
from specbench.tree import DraftTree, chain
from specbench.types import Sampling

INSTALL = "pip install --no-deps speculators hs-connectors && pip install loguru pydantic-settings openai aiohttp"
KIND = "eagle3"


class SpeculatorDrafter:
    """speculator: an Eagle3DraftModel. target: the model that it drafts for."""

    def __init__(self, speculator: Any, target: PreTrainedModel, *, gamma: int = 4) -> None:
        self._speculator, self._target, self._gamma = speculator.eval(), target.eval(), gamma
        self._layers = list(speculator.config.eagle_aux_hidden_state_layer_ids)
        # The drafter's own ids are the places of the target's that it has.
        self._to_target = None if speculator.t2d is None else speculator.t2d.nonzero()[:, 0].tolist()

    def draft(
        self, context: list[int], *, max_nodes: int, max_depth: int, sampling: Sampling, coins: Coins
    ) -> DraftTree:
        """Behind a single token there is no hidden state to read and nothing is drafted."""
        num_drafts, num_read = min(self._gamma, max_nodes, max_depth), len(context) - 1
        drafts: list[int] = []
        with torch.no_grad():
            known = self._hidden_states(context[:-1]) if num_read and num_drafts > 0 else None
            while known is not None and len(drafts) < num_drafts:
                # Rows behind the context are never looked at by those in front of them.
                hidden = torch.nn.functional.pad(known, (0, 0, 0, len(drafts)))  # [1, S, layers * hidden]
                ids = torch.tensor([[*context[1:], *drafts]])
                steps = self._speculator(
                    hidden_states=hidden,
                    input_ids=ids,
                    document_ids=torch.zeros_like(ids),
                    ttt_steps=len(drafts) + 1,
                )
                picked = int(steps[-1][0, num_read - 1])
                drafts.append(picked if self._to_target is None else self._to_target[picked])
        return chain([context[-1], *drafts])

    def _hidden_states(self, tokens: list[int]) -> torch.Tensor:
        """float [1, S, layers * hidden]."""
        states = self._target(
            input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False
        ).hidden_states
        dtype = next(self._speculator.parameters()).dtype
        return torch.cat([states[layer] for layer in self._layers], dim=-1).to(dtype)


def load_speculator(folder: str | Path, *, target_folder: str | Path, gamma: int = 4) -> SpeculatorDrafter:
    """ModelError for a folder that is not one of these, or whose weights are pickled; `Missing`."""
    place = Path(folder)
    if not (place / "config.json").is_file():
        raise ModelError(f"{folder} holds no config.json, so it is no speculators checkpoint")
    config = json.loads((place / "config.json").read_text(encoding="utf-8"))
    kind = config.get("speculators_model_type")
    if kind != KIND:
        said = "no speculators_model_type" if kind is None else f"speculators_model_type {kind!r}"
        raise ModelError(f"{folder} has {said} in its config.json; only {KIND!r} is read here")
    if not any(place.glob("*.safetensors")):
        raise ModelError(f"{folder} holds no *.safetensors: other weight formats may run code and are not loaded")
    target = load_model(target_folder)
    kinds = _package()
    read = kinds.Eagle3SpeculatorConfig.from_pretrained(place, local_files_only=True)
    read.speculators_config.verifier.name_or_path = str(target_folder)  # whose embedding and head it may borrow
    read.transformer_layer_config._attn_implementation = "eager"  # the default materialises scores and warns on a CPU
    speculator = kinds.Eagle3DraftModel.from_pretrained(place, config=read, local_files_only=True, use_safetensors=True)
    return SpeculatorDrafter(speculator, target, gamma=gamma)


def write_toy(folder: Path, vocab_size: int) -> tuple[Path, Path]:
    """A tiny target and a random EAGLE-3 drafter for it, as the package saves them."""
    kinds = _package()
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    target, speculator = folder / "target", folder / "speculator"
    model = tiny_model(vocab_size)
    model.save_pretrained(target)
    layer = LlamaConfig(**{**model.config.to_dict(), "num_hidden_layers": 1, "dtype": "float32", "layer_types": None})
    layer._attn_implementation = "eager"
    verifier = VerifierConfig(name_or_path=str(target), architectures=["LlamaForCausalLM"])
    proposal = GreedyTokenProposalConfig(speculative_tokens=4)
    config = kinds.Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=vocab_size,
        eagle_aux_hidden_state_layer_ids=[0, 1, 2],
        speculators_config=SpeculatorsConfig(
            algorithm=KIND, proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
        ),
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        made = kinds.Eagle3DraftModel(config)
        for one in made.layers.parameters():
            if one.ndim == 2:
                torch.nn.init.normal_(one, std=0.3)  # its own scale is so small that every draft is alike
    made.load_verifier_weights()
    made.save_pretrained(speculator)
    return target, speculator


def _package() -> Any:
    try:
        import loguru
        from speculators.models import eagle3
    except ImportError as error:
        raise Missing(f"{INSTALL}: {error}") from None
    loguru.logger.disable("speculators")  # it says of each load where it reads from
    return eagle3


@cache
def _toy(vocab_size: int) -> SpeculatorDrafter:
    with tempfile.TemporaryDirectory(prefix="specbench-speculator-") as folder:
        target, speculator = write_toy(Path(folder), vocab_size)
        return load_speculator(speculator, target_folder=target)


class Speculator:
    """A target for the claims. The drafter keeps no state, so one serves all."""

    def build_drafter(self, model: LanguageModel) -> SpeculatorDrafter:
        return _toy(model.vocab_size)
