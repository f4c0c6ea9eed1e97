"""The steps of a round in readable PyTorch, gathered in `STEPS`. Each is a pure function of its arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specbench.protocols import Cache, Coins, Drafter, LanguageModel
from specbench.reference.layouts import flatten_tree_mask
from specbench.reference.processors import process_row
from specbench.reference.sampling import probs
from specbench.reference.verify import CoinChance, Rule, greedy_walk, rule_for
from specbench.steps import Emission, FlatTree, SampleStep, Steps
from specbench.tree import DraftTree
from specbench.types import Sampling, Stop, Taps, VerifyResult


def draft(
    drafter: Drafter, context: list[int], *, max_nodes: int, max_depth: int, sampling: Sampling, coins: Coins
) -> DraftTree:
    """Ask the drafter; ValueError when the tree does not hang below the last committed token."""
    tree = drafter.draft(list(context), max_nodes=max_nodes, max_depth=max_depth, sampling=sampling, coins=coins)
    if tree.token_list[0] != context[-1]:
        raise ValueError(f"draft tree has root token {tree.token_list[0]}, must be {context[-1]} (last of the context)")
    return tree


def forward(model: LanguageModel, flat: FlatTree, cache: Cache, *, taps: Taps | None = None) -> Tensor:
    """One target forward over the rows of the tree only: the prefix is read from the cache, never encoded again."""
    return model.forward(flat, cache, taps=taps)


def process(
    tree: DraftTree,
    target_logits: Tensor,
    *,
    context: Sequence[int],
    num_prompt: int,
    sampling: Sampling,
    stop: Stop,
) -> Tensor:
    """Each row once, with the history of its own node: what is committed, then the node's path."""
    if not sampling.changes_logits and not stop.min_new_tokens:
        return target_logits
    histories = [[*context, *tree.path_tokens(node)[1:]] for node in range(tree.num_nodes)]
    rows = [
        process_row(row, history, num_prompt=num_prompt, sampling=sampling, stop=stop)
        for row, history in zip(target_logits, histories, strict=True)
    ]
    return torch.stack(rows)


def sample(
    tree: DraftTree, target_logits: Tensor, *, sampling: Sampling, coins: Coins, root_place: int = 0
) -> VerifyResult:
    """The lossless rule that is usual for how the tree's drafts were made."""
    return sample_by(rule_for(tree))(tree, target_logits, sampling=sampling, coins=coins, root_place=root_place)


def sample_by(rule: Rule) -> SampleStep:
    """The step that accepts by one rule, over the target's law after all sampling parameters."""

    def step(
        tree: DraftTree, target_logits: Tensor, *, sampling: Sampling, coins: Coins, root_place: int = 0
    ) -> VerifyResult:
        p = probs(target_logits, sampling).tolist()
        q = None if tree.draft_probs is None else tree.draft_probs.double().tolist()
        return rule.verify(tree, p, q, CoinChance(coins, root_place=root_place))

    return step


def emit(
    tree: DraftTree, result: VerifyResult, *, stop: Stop, num_remaining: int, output: Sequence[int] = ()
) -> Emission:
    """Accepted drafts and the bonus token, cut behind the first end token or stop sequence, then at the limit."""
    tokens = [*(tree.token_list[node] for node in result.path), result.bonus_token][:num_remaining]
    for num_kept in range(1, len(tokens) + 1):
        if reason := stop.reason_at([*output, *tokens[:num_kept]]):
            return Emission(tuple(tokens[:num_kept]), reason)
    return Emission(tuple(tokens), "length" if len(tokens) == num_remaining else None)


def commit(cache: Cache, prefix_len: int, rows: Sequence[int]) -> None:
    """Keep the prefix, the root's row and the accepted path's rows, contiguous and in order."""
    cache.commit(prefix_len, rows)


STEPS = Steps(
    draft=draft,
    flatten=flatten_tree_mask,
    forward=forward,
    process=process,
    walk=greedy_walk,
    sample=sample,
    emit=emit,
    commit=commit,
)
