"""From texts and states of a target to a drafter's folder, with what is to be known of it in training.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from specbench.reference.drafters.heads import MarkovHeads
from specbench.reference.drafters.layers import DraftLayers, LayersConfig
from specbench.reference.drafters.trained import ROUTER, WIDEST, load_drafter
from specbench.training import KINDS
from specbench.training.fit import Recipe, accuracies, columns_of, fit, heads_laws, layers_laws
from specbench.training.router import fit_router, places_of
from specbench.training.texts import Progress, frequent_ids, read_texts

HELD_BACK = 20  # every so many-th text is not trained on, and tells the accuracies


def train(
    target: Any,
    folder: Path,
    out: Path,
    *,
    kind: str,
    recipe: Recipe,
    num_ids: int = 8192,
    depth: int = 4,
    num_layers: int | None = None,
    intermediate_size: int | None = None,
    about: dict[str, Any] | None = None,
    progress: Progress = lambda *told: None,
) -> dict[str, Any]:
    """Trains a drafter of one of KINDS for `target` (a model with `states`, `embedding`, `head` and a `config` of our
    Llama) on the texts in `folder`, and writes it to `out`, with a router fitted to the texts that were held back where
    they are long enough. Returns what training.json says: the recipe, the losses, and accuracies [depth][rank] on texts
    that were held back. about: goes into it as it is."""
    if kind not in KINDS:
        raise ValueError(f"kind = {kind!r} must be one of {', '.join(KINDS)}")
    texts = list(read_texts(folder))
    kept_back, used = texts[::HELD_BACK], [one for idx, one in enumerate(texts) if idx % HELD_BACK]
    if not used:
        raise ValueError(f"{folder} holds {len(texts)} text, must hold at least 2: one of {HELD_BACK} is held back")
    vocab_size = target.embedding.shape[0]
    ids = frequent_ids(used, num_ids=num_ids, vocab_size=vocab_size)
    columns = columns_of(ids, vocab_size)
    embedding, output = target.embedding.float(), target.head[ids].float()
    drafter: MarkovHeads | DraftLayers
    if kind.startswith("heads"):
        drafter = MarkovHeads.untrained(target, ids, num_heads=depth, conditioned=kind == "heads", seed=recipe.seed)
        weights, laws = drafter.weights, partial(heads_laws, drafter)
    else:
        reads_features = kind == "feature"
        sizes = target.config
        config = LayersConfig(
            hidden_size=sizes.hidden_size,
            intermediate_size=intermediate_size or sizes.intermediate_size,
            num_layers=num_layers or (1 if reads_features else 2),
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            vocab_size=vocab_size,
            num_ids=len(ids),
            reads_features=reads_features,
            rms_norm_eps=sizes.rms_norm_eps,
            rope_theta=sizes.rope_theta,
        )
        drafter = DraftLayers.untrained(config, ids, seed=recipe.seed)
        weights, laws = drafter.own, partial(layers_laws, drafter, depth=depth)
    losses = fit(weights, laws, used, embedding, output, columns, recipe, work=out, progress=progress)
    found = accuracies(laws, kept_back, embedding, output, columns)
    told = {
        "kind": kind,
        "recipe": asdict(recipe),
        "num_texts": len(used),
        "num_tokens": sum(len(one.tokens) - one.start for one in used),
        "num_held_back": len(kept_back),
        "accuracies": [[round(one, 4) for one in row] for row in found],
        "last_losses": [round(one, 4) for one in losses[-10:]],
        **(about or {}),
    }
    if isinstance(drafter, MarkovHeads):
        drafter.save(out)
    else:
        drafter.write(out)
    (out / "training.json").write_text(json.dumps(told, indent=2) + "\n", "utf-8")
    places = places_of(load_drafter(out, target, shape=WIDEST), kept_back, progress=progress)
    if places:  # texts may be too short for the deepest arm
        fit_router(places, seed=recipe.seed).save(out / ROUTER)
    return told


def accuracy_table(found: Sequence[Sequence[float]]) -> str:
    """One line a depth: how often the label was the first, one of the first three, one of the first ten tokens."""
    lines = ["depth  first  of 3  of 10"]
    for depth, row in enumerate(found, start=1):
        lines.append(f"{depth:5d}  {row[0]:5.3f}  {sum(row[:3]):5.3f}  {sum(row):5.3f}")
    return "\n".join(lines)
