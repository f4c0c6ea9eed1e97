"""Whether rounds over static buffers give what plain decoding gives: asked of the good round and of its faults."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specbench.compare import max_error
from specbench.reference.autoregressive import generate, score_tree
from specbench.reference.model import LlamaConfig, LlamaModel, tiny_llama
from specbench.reference.session import TreeSession
from specbench.suites.kernels import DEVICE
from specbench.suites.kernels.comparisons import sampled as sampled_by_rule
from specbench.tree import UNUSED, DraftTree

SIZES = {"vocab_size": 13, "hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 4}
GROUPED = tiny_llama(LlamaConfig(**SIZES, num_kv_heads=2, head_dim=4), seed=1)
WINDOWED = tiny_llama(LlamaConfig(**SIZES, num_kv_heads=1, head_dim=6, windows=(3, None)), seed=2)
MODELS = {"grouped": GROUPED, "windowed": WINDOWED}
PROMPTS = ([1, 2, 3, 4, 5, 6, 7], [5], [3, 1, 4])
NUM_ROUNDS = 3
MAX_NODES, MAX_DEPTH = 8, 3
# Parents, and which of the next tokens (0 the first) a node drafts; None for one that is not the next. The path that is
# right is 2-5-6 in the first tree, with a row that is not used before it; 1-2 in the second, whose child is wrong.
SHAPES: tuple[tuple[tuple[int, ...], tuple[int | None, ...]], ...] = (
    ((-1, 0, 0, UNUSED, 1, 2, 5, 0), (None, None, 0, None, None, 1, 2, None)),
    ((-1, 0, 1, 2, 0, UNUSED, UNUSED, UNUSED), (None, 0, 1, None, None, None, None, None)),
    ((-1, UNUSED, UNUSED, UNUSED, UNUSED, UNUSED, UNUSED, UNUSED), (None,) * MAX_NODES),
)


def rounds_rightly(round_class: Any, model: str, *, page: int, sampled: bool = False, captured: bool = False) -> bool:
    """Whether all rounds emit what plain decoding does, or the reference's rule with the same coins, and leave the
    cache rows of the committed tokens."""
    right, num_sequences = MODELS[model], len(PROMPTS)
    sizes = {"num_sequences": num_sequences, "max_nodes": MAX_NODES, "max_depth": MAX_DEPTH, "capacity": 32}
    table = torch.randperm(num_sequences * 32 // page).view(num_sequences, -1) if page else None
    one = round_class(right.to(torch.float64, DEVICE), **sizes, page=page, page_table=table, sampled=sampled)
    one.prefill(PROMPTS)
    if captured:
        one.capture()
    texts = [list(prompt) for prompt in PROMPTS]
    generator = torch.Generator().manual_seed(7)
    for turn in range(NUM_ROUNDS):
        uniforms = torch.rand(num_sequences, MAX_NODES, generator=generator, dtype=torch.float64)
        one.uniforms.copy_(uniforms)
        one.temperatures.fill_(0.7)
        wanted = []
        for idx, text in enumerate(texts):
            parents, tokens = _tree(right, text, (idx + turn) % len(SHAPES))
            one.parents[idx] = torch.tensor(parents, dtype=torch.int32)
            one.tokens[idx, 1:] = torch.tensor(tokens[1:])
            wanted.append(_wanted(right, text, parents, tokens, uniforms[idx] if sampled else None))
        if captured:
            one.replay()
        else:
            one.step()
        if one.read() != wanted:
            return False
        for text, emitted in zip(texts, wanted, strict=True):
            text.extend(emitted)
    for idx, text in enumerate(texts):
        session = TreeSession(right)
        session.prefill(text[:-1])
        if one.prefix_lens.tolist()[idx] != len(text) - 1:
            return False
        for layer in range(right.num_layers):
            pairs = zip(one.kv(idx, layer), session.kv(layer), strict=True)
            if not all(max_error(mine.cpu(), theirs) <= 1e-11 for mine, theirs in pairs):
                return False
    return True


def _tree(model: LlamaModel, text: list[int], shape: int) -> tuple[tuple[int, ...], list[int]]:
    """Parents and tokens of a padded tree below the text's last token."""
    parents, places = SHAPES[shape]
    following = generate(model, text, max_new_tokens=MAX_DEPTH).tokens
    wrong = [(token + 1) % model.vocab_size for token in following]
    tokens = [wrong[0] if place is None else following[place] for place in places]
    return parents, [text[-1], *tokens[1:]]


def _wanted(
    model: LlamaModel, text: list[int], parents: tuple[int, ...], tokens: list[int], uniforms: Tensor | None
) -> list[int]:
    """What the round must emit."""
    used = [node for node, parent in enumerate(parents) if parent != UNUSED]
    place = {-1: -1} | {node: at for at, node in enumerate(used)}
    tree = DraftTree.of([tokens[node] for node in used], [place[parents[node]] for node in used])
    if uniforms is not None:
        p = (score_tree(model, text[:-1], tree).logits / 0.7).softmax(-1)
        (path, bonus_token), _ = sampled_by_rule(tree, p, None, uniforms)
        return [*(tree.token_list[node] for node in path), bonus_token]
    following = list(generate(model, text, max_new_tokens=MAX_DEPTH + 1).tokens)
    paths = [tree.path_tokens(node)[1:] for node in range(tree.num_nodes)]
    num_right = max(len(path) for path in paths if list(path) == following[: len(path)])
    return following[: num_right + 1]
