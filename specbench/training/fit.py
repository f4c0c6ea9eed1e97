"""Losses of drafters over a target's own texts, and the loop that lowers them: seeded, resumable, without pickles.

Every drafter learns the target's most likely token (the label) at each place of an answer, since that is what is
accepted. Level i is trained behind the true text, since drafts behind a wrong one are refused; layers that read
features read their own guesses from the second token on, as they will (training-time test, EAGLE-3, arXiv 2503.01840).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specbench.reference.drafters.heads import MarkovHeads
from specbench.reference.drafters.layers import DraftLayers
from specbench.training.texts import Progress, Text, save_whole

DECAY = 0.8  # of the loss with each level of depth
NUM_RANKS = 10  # of a label among a drafter's likeliest tokens, as far as they are counted
# (texts, embedding [V, H]) -> for each depth logits float [n, V'] and labels int64 [n]
Laws = Callable[[Sequence[Text], Tensor, Tensor], list[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class Recipe:
    """batch: texts a step. rate: of Adam at its highest, falling to a tenth by a cosine. bf16: products are formed in
    bfloat16 (twice as fast where the processor has it); weights, sums over tokens and Adam stay in fp32."""

    num_steps: int
    batch: int = 4
    rate: float = 1e-3
    warm_up: int = 50
    seed: int = 0
    checkpoint_every: int = 100
    bf16: bool = True


def heads_laws(
    heads: MarkovHeads, texts: Sequence[Text], embedding: Tensor, output: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Depth i behind each token of the answers: what head i says of the token i + 2 places on."""
    num_heads = heads.config.num_heads
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(num_heads)]
    for one in texts:
        first = one.start - 1
        states = one.states[first:-1]  # [n, H], the root behind each is text
        num = len(states)
        padded = torch.nn.functional.pad(one.tokens[first + 1 :], (0, num_heads))
        following = padded.unfold(0, num_heads, 1)[:num]  # [n, K]
        for idx, state in enumerate(heads.states(states, embedding[following])):
            known = num - idx  # further on the text has ended
            if known > 0:
                found[idx].append((state[:known] @ output.T, one.labels[first + 1 + idx :]))
    return _joined(found)


def layers_laws(
    layers: DraftLayers, texts: Sequence[Text], embedding: Tensor, output: Tensor, *, depth: int
) -> list[tuple[Tensor, Tensor]]:
    """Depth i: what the layers say of the token behind x_j when the i features before it are their own guesses."""
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(depth)]
    for one in texts:
        embedded, before = embedding[one.tokens[1:]], one.states[:-1]
        rows = _Unrolled(layers.num_layers)
        position_ids = torch.arange(len(embedded))
        for idx in range(depth if layers.sizes.reads_features else 1):
            features = layers.features(embedded[None], before[None], position_ids, rows)[0]
            # Row r is that of token r + 1, whose label follows it; the first `idx` rows have no guess before them.
            first = max(one.start - 1, idx)
            if first < len(features):
                found[idx].append((features[first:] @ output.T, one.labels[1 + first :]))
            before = torch.cat([before[:1], features[:-1]])
            rows.step += 1
    return _joined([one for one in found if one])


class _Unrolled:
    """How rows attend when the last `step` rows on their way are guesses: row r sees the true rows up to r - step, and
    of the guesses of each step its own line's only. Keys and values are kept by step."""

    def __init__(self, num_layers: int) -> None:
        self.step = 0
        self._held: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(num_layers)]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        group = q.shape[1] // k.shape[1]
        k, v = (one[0].repeat_interleave(group, dim=0) for one in (k, v))  # [Hq, M, D]
        held = self._held[layer]
        held.append((k, v))
        q, scale, num = q[0], 1.0 / math.sqrt(q.shape[3]), q.shape[2]
        row = torch.arange(num)
        true = (q @ held[0][0].mT * scale).masked_fill(row[:, None] - row[None, :] < self.step, -math.inf)
        scores, values = [true], [held[0][1]]
        for step in range(1, self.step + 1):
            back = self.step - step
            shifted = [torch.nn.functional.pad(one, (0, 0, back, 0))[:, :num] for one in held[step]]
            scores.append((q * shifted[0]).sum(-1, keepdim=True) * scale)
            values.append(shifted[1])
        weights = torch.cat(scores, dim=-1)
        if self.step:  # rows without so many rows before them see nothing true: kept finite, and not trained
            weights = torch.where(row[:, None] < self.step, 0.0, weights)
        weights = weights.softmax(-1)
        mixed = weights[..., :num] @ values[0]
        for idx, one in enumerate(values[1:]):
            mixed = mixed + weights[..., num + idx, None] * one
        return mixed[None], None


def _joined(found: list[list[tuple[Tensor, Tensor]]]) -> list[tuple[Tensor, Tensor]]:
    return [(torch.cat([one for one, _ in some]), torch.cat([one for _, one in some])) for some in found if some]


def columns_of(ids: Tensor, vocab_size: int) -> Tensor:
    """int64 [V]: a token's column in a reduced vocabulary, -1 for a token that is not in it."""
    columns = torch.full((vocab_size,), -1, dtype=torch.int64)
    columns[ids] = torch.arange(len(ids))
    return columns


def loss_of(laws: Sequence[tuple[Tensor, Tensor]], columns: Tensor) -> Tensor:
    """Cross-entropy, deeper levels less. Labels outside the reduced vocabulary cannot be learnt and are left out."""
    losses = [
        DECAY**depth * torch.nn.functional.cross_entropy(logits, columns[labels], ignore_index=-1)
        for depth, (logits, labels) in enumerate(laws)
        if (columns[labels] >= 0).any()
    ]
    return torch.stack(losses).sum()


@torch.no_grad()
def accuracies(
    laws: Laws, texts: Sequence[Text], embedding: Tensor, output: Tensor, columns: Tensor
) -> list[list[float]]:
    """[depth][rank]: how often the label was the drafter's token of that rank. A label outside the reduced vocabulary
    counts and has no rank."""
    hits: list[Tensor] = []
    num: list[int] = []
    for one in texts:
        for depth, (logits, labels) in enumerate(laws([one], embedding, output)):
            if depth == len(hits):
                hits.append(torch.zeros(NUM_RANKS))
                num.append(0)
            best = logits.topk(min(NUM_RANKS, logits.shape[1]), dim=-1).indices
            hits[depth][: best.shape[1]] += (best == columns[labels][:, None]).sum(0)
            num[depth] += len(labels)
    return [(one / total).tolist() for one, total in zip(hits, num, strict=True)]


def fit(
    weights: dict[str, Tensor],
    laws: Laws,
    texts: Sequence[Text],
    embedding: Tensor,
    output: Tensor,
    columns: Tensor,
    recipe: Recipe,
    *,
    work: Path | None = None,
    progress: Progress = lambda *told: None,
) -> list[float]:
    """Trains `weights` (float tensors, changed in place) and returns the loss of each step that was done here.

    work: where the state is kept, to go on from when the run is stopped. Texts are taken in an order that the seed
    decides, so that a run in two parts is the run in one.
    """
    trained = {key: one.requires_grad_() for key, one in weights.items() if one.is_floating_point()}
    moments = {key: (torch.zeros_like(one), torch.zeros_like(one)) for key, one in trained.items()}
    file = None if work is None else work / "training.safetensors"
    done = 0 if file is None else _restored(file, trained, moments)
    losses = []
    for step in range(done, recipe.num_steps):
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        chosen = torch.randint(len(texts), (recipe.batch,), generator=generator).tolist()
        with torch.autocast("cpu", torch.bfloat16, enabled=recipe.bf16):
            loss = loss_of(laws([texts[idx] for idx in chosen], embedding, output), columns)
        gradients = torch.autograd.grad(loss, list(trained.values()))
        _adam(trained, moments, gradients, step, recipe)
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            raise ValueError(f"the loss of step {step} is {losses[-1]}: take a lower rate than {recipe.rate}")
        if file is not None and ((step + 1) % recipe.checkpoint_every == 0 or step + 1 == recipe.num_steps):
            _keep(file, trained, moments, step + 1)
        progress("steps", step + 1, recipe.num_steps)
    for one in trained.values():
        one.requires_grad_(False)
    return losses


@torch.no_grad()
def _adam(
    trained: dict[str, Tensor],
    moments: dict[str, tuple[Tensor, Tensor]],
    gradients: Sequence[Tensor],
    step: int,
    recipe: Recipe,
) -> None:
    """Adam (arXiv 1412.6980) with gradients cut to norm 1: written out, so that its state is two tensors a weight."""
    total = torch.stack([one.norm() for one in gradients]).norm()
    cut = (1.0 / total.clamp(min=1.0)).item()
    share = min(1.0, (step + 1) / recipe.warm_up) * (0.55 + 0.45 * math.cos(math.pi * step / recipe.num_steps))
    for (key, weight), gradient in zip(trained.items(), gradients, strict=True):
        mean, square = moments[key]
        mean.lerp_(gradient * cut, 0.1)
        square.lerp_((gradient * cut) ** 2, 0.01)
        unbiased = (square / (1 - 0.99 ** (step + 1))).sqrt_().add_(1e-8)
        weight.addcdiv_(mean / (1 - 0.9 ** (step + 1)), unbiased, value=-recipe.rate * share)


def _keep(file: Path, trained: dict[str, Tensor], moments: dict[str, tuple[Tensor, Tensor]], done: int) -> None:
    tensors = {"done": torch.tensor(done)}
    for key, one in trained.items():
        tensors |= {f"weight.{key}": one.detach(), f"mean.{key}": moments[key][0], f"square.{key}": moments[key][1]}
    save_whole(file, tensors)


@torch.no_grad()
def _restored(file: Path, trained: dict[str, Tensor], moments: dict[str, tuple[Tensor, Tensor]]) -> int:
    """How many steps have been done. ValueError where another drafter was being trained there."""
    from safetensors.torch import load_file

    if not file.is_file():
        return 0
    held: dict[str, Any] = load_file(file)
    shapes = {f"weight.{key}": one.shape for key, one in trained.items()}
    if {key: one.shape for key, one in held.items() if key.startswith("weight.")} != shapes:
        raise ValueError(f"{file} is of another drafter than this one: take another folder, or delete it")
    for key, one in trained.items():
        one.copy_(held[f"weight.{key}"])
        moments[key][0].copy_(held[f"mean.{key}"])
        moments[key][1].copy_(held[f"square.{key}"])
    return int(held["done"])
