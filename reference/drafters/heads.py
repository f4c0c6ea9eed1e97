"""Markov heads: drafts from the target's last hidden state by a few small layers, without a model of their own.

    independent (Medusa, arXiv 2401.10774):   s_i = h + silu(W_i h + b_i)
    conditioned (Hydra, arXiv 2402.05109):    s_0 = h,  s_i = s_{i-1} + silu(W_i [s_{i-1}; E[x_i]] + b_i)
    law of the token behind x_1 .. x_i:       softmax(s_i U^T)

h is what the logits that gave the root x_1 were made of, E the target's embedding, U the rows of its output matrix for
a reduced vocabulary (the full matrix costs more than the heads). Head i of the independent ones knows nothing of the
drafts before it. There is no state from round to round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specbench.protocols import Coins
from specbench.reference.drafters.folders import (
    check_fits,
    check_ids,
    check_weights,
    converted,
    load_weights,
    made,
    save_weights,
    states_of,
)
from specbench.reference.drafters.growth import Shape, grow
from specbench.tree import DraftTree, root_only
from specbench.types import Sampling, TargetState


@dataclass(frozen=True)
class HeadsConfig:
    """vocab_size: of the target. num_ids: columns of the heads' law. own_outputs: each head has an output matrix."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_ids: int
    conditioned: bool = True
    kind: str = "markov_heads"
    own_outputs: bool = False


class MarkovHeads:
    """weights: "heads.{i}.weight" [H, H], or [H, 2 H] of conditioned ones, "heads.{i}.bias" [H]; "ids" int64 [V'], the
    tokens that can be drafted, in ascending order; "heads.{i}.output" [V', H] where heads have outputs of their own."""

    def __init__(self, config: HeadsConfig, weights: dict[str, Tensor]) -> None:
        wide = 2 * config.hidden_size if config.conditioned else config.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"ids": (config.num_ids,)}
        for idx in range(config.num_heads):
            shapes |= {f"heads.{idx}.weight": (config.hidden_size, wide), f"heads.{idx}.bias": (config.hidden_size,)}
            if config.own_outputs:
                shapes[f"heads.{idx}.output"] = (config.num_ids, config.hidden_size)
        check_weights("heads", weights, shapes)
        check_ids(weights["ids"], config.vocab_size)
        self.config, self.weights = config, weights

    @classmethod
    def untrained(
        cls, target: Any, ids: Tensor, *, num_heads: int, conditioned: bool = True, gain: float = 0.0, seed: int = 0
    ) -> MarkovHeads:
        """For a target, in fp32: matrices drawn with `gain`; with 0 every head says what the target's own would."""
        vocab_size, hidden = target.embedding.shape
        generator = torch.Generator().manual_seed(seed)
        wide = 2 * hidden if conditioned else hidden
        weights = {"ids": ids}
        for idx in range(num_heads):
            weights[f"heads.{idx}.weight"] = torch.randn(hidden, wide, generator=generator) * (gain / wide**0.5)
            weights[f"heads.{idx}.bias"] = torch.zeros(hidden)
        return cls(HeadsConfig(hidden, vocab_size, num_heads, len(ids), conditioned), weights)

    @property
    def ids(self) -> Tensor:
        return self.weights["ids"]

    def states(self, hidden: Tensor, embedded: Tensor) -> list[Tensor]:
        """hidden: float [..., H]. embedded: float [..., num_heads, H], the embeddings of x_1, x_2 ... Returns s_1, s_2
        ..., each [..., H]."""
        states, state = [], hidden
        for idx in range(min(self.config.num_heads, embedded.shape[-2])):
            state = self.next_state(idx, hidden, state, embedded[..., idx, :])
            states.append(state)
        return states

    def next_state(self, idx: int, hidden: Tensor, state: Tensor, embedded: Tensor) -> Tensor:
        """s_{idx + 1} from h, s_idx and the embedding of x_{idx + 1}, each float [..., H]."""
        base = state if self.config.conditioned else hidden
        seen = torch.cat([state, embedded], dim=-1) if self.config.conditioned else hidden
        inner = seen @ self.weights[f"heads.{idx}.weight"].T + self.weights[f"heads.{idx}.bias"]
        return base + torch.nn.functional.silu(inner)

    def output(self, idx: int, shared: Tensor) -> Tensor:
        """float [V', H], head idx's output matrix: its own, or `shared`, the target's rows."""
        return self.weights.get(f"heads.{idx}.output", shared)

    def to(self, dtype: torch.dtype, device: str | torch.device | None = None) -> MarkovHeads:
        return MarkovHeads(self.config, converted(self.weights, dtype, device))

    def save(self, folder: Path, *, dtype: torch.dtype = torch.float16) -> None:
        save_weights(folder, asdict(self.config), self.to(dtype).weights)

    @classmethod
    def load(cls, folder: str | Path) -> MarkovHeads:
        """A folder with config.json and model.safetensors. ValueError says what does not fit."""
        fields, weights = load_weights(folder, kind="markov_heads")
        return cls(made(HeadsConfig, fields, folder), weights)


class HeadsDrafter:
    """Drafts by `heads` over a target that tells its states. No deeper than there are heads."""

    reads_target_state = True

    def __init__(self, target: Any, heads: MarkovHeads, *, shape: Shape) -> None:
        """target: a model with `states`, `embedding` and `head`, as `reference.model.LlamaModel`."""
        check_fits(target, heads.config.hidden_size, heads.config.vocab_size)
        self._target, self._shape = target, shape
        self._heads = heads.to(target.dtype, target.device)
        self._output = target.head[self._heads.ids]  # [V', H]

    @property
    def ids(self) -> Tensor:
        return self._heads.ids

    @torch.no_grad()
    def first_laws(self, context: list[int], roots: range, target_state: TargetState | None) -> Tensor:
        """log-probabilities float [len(roots), V'] of the token behind context[r] for each root r >= 1."""
        hidden = states_of(self._target, context, target_state)[roots.start - 1 : roots.stop - 1]
        embedded = self._target.embedding[context[roots.start : roots.stop]]
        states = self._heads.next_state(0, hidden, hidden, embedded)
        return (states @ self._heads.output(0, self._output).T).float().log_softmax(-1)

    def draft(
        self,
        context: list[int],
        *,
        max_nodes: int,
        max_depth: int,
        sampling: Sampling,
        coins: Coins,
        target_state: TargetState | None = None,
    ) -> DraftTree:
        if len(context) < 2 or max_nodes < 1:
            return root_only(context[-1])  # the target has said nothing yet
        hidden = states_of(self._target, context, target_state)[-1]
        law = _HeadsLaw(self._heads, self._target.embedding, self._output, hidden)
        return grow(
            context[-1], law, self._shape, max_nodes=max_nodes, max_depth=min(max_depth, self._heads.config.num_heads)
        )


class _HeadsLaw:
    def __init__(self, heads: MarkovHeads, embedding: Tensor, output: Tensor, hidden: Tensor) -> None:
        self._heads, self._embedding, self._output, self._hidden = heads, embedding, output, hidden
        self.ids = heads.ids
        self._state_of: dict[int, Tensor] = {}  # node -> s_i, node of depth i - 1
        self._depth = 0

    @torch.no_grad()
    def __call__(self, tokens: Sequence[int], parents: Sequence[int], level: Sequence[int]) -> Tensor:
        before = torch.stack([self._state_of.get(parents[node], self._hidden) for node in level])
        embedded = self._embedding[[tokens[node] for node in level]]
        states = self._heads.next_state(self._depth, self._hidden.expand_as(before), before, embedded)
        output = self._heads.output(self._depth, self._output)
        self._depth += 1
        self._state_of |= dict(zip(level, states, strict=True))
        return (states @ output.T).float().log_softmax(-1)
