"""Drafters that break their word, and targets whose output is right all the same: only drafts or numbers show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from specbench.protocols import Coins, Drafter, LanguageModel
from specbench.reference.decoder import Decoder
from specbench.reference.drafters.caching import CachingDrafter
from specbench.reference.drafters.model import ModelDrafter
from specbench.reference.drafters.sampled import SampledDrafter, inverse_cdf
from specbench.reference.faults.fault import Fault
from specbench.reference.target import ReferenceTarget
from specbench.steps import FlatTree
from specbench.tree import DraftTree
from specbench.types import Generation, Sampling, VerifyResult


class _DuplicateSiblings(ModelDrafter):
    def draft(self, context: list[int], *, max_nodes: int, **keywords: Any) -> DraftTree:
        tree = super().draft(context, max_nodes=max_nodes, **keywords)
        if not 0 < tree.num_drafts < max_nodes:
            return tree
        return DraftTree.of([*tree.token_list, tree.token_list[1]], [*tree.parent_list, 0])


class _OneLayerOff(ModelDrafter):
    def draft(self, context: list[int], **keywords: Any) -> Any:
        tree = super().draft(context, **keywords)
        depth = tree.depth.tolist()
        parents = [
            # Counted from the start of the node's own layer instead of its parent's.
            parent if level < 2 else parent - depth.index(level - 1) + depth.index(level)
            for parent, level in zip(tree.parent_list, depth, strict=True)
        ]
        return SimpleNamespace(tokens=tree.token_list, parents=parents)


class _RootCounted(ModelDrafter):
    def draft(self, context: list[int], *, max_nodes: int, **keywords: Any) -> DraftTree:
        return super().draft(context, max_nodes=max_nodes + 1, **keywords)


class _AnyDepth(ModelDrafter):
    def draft(self, context: list[int], *, max_depth: int, **keywords: Any) -> DraftTree:
        return super().draft(context, max_depth=len(self._widths), **keywords)


class _BeforeTemperature(SampledDrafter):
    def draft(self, context: list[int], *, sampling: Sampling, **keywords: Any) -> DraftTree:
        tree = super().draft(context, sampling=sampling, **keywords)
        assert tree.draft_probs is not None
        raw = tree.draft_probs**sampling.temperature if sampling.temperature else tree.draft_probs
        return replace(tree, draft_probs=raw / raw.sum(dim=-1, keepdim=True).clamp(min=1e-300))


class _SharedRow(SampledDrafter):
    def draft(self, context: list[int], **keywords: Any) -> DraftTree:
        tree = super().draft(context, **keywords)
        assert tree.draft_probs is not None
        written = tree.draft_probs.any(dim=-1)
        if not bool(written.any()):
            return tree
        last = tree.draft_probs[int(written.nonzero()[-1])]
        return replace(tree, draft_probs=torch.where(written[:, None], last, tree.draft_probs))


class _Argmax(SampledDrafter):
    def _draws(self, q: Tensor, num: int, coins: Coins) -> list[int]:
        return [int(q.argmax())] if num else []


class _OwnGenerator(SampledDrafter):
    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self._generator = torch.Generator().manual_seed(0)

    def _draws(self, q: Tensor, num: int, coins: Coins) -> list[int]:
        uniforms = torch.rand(num, generator=self._generator, dtype=torch.float64)
        return [inverse_cdf(q, float(one)) for one in uniforms]


class _Trusting(CachingDrafter):
    """Takes its list of cached tokens for the truth about its rows, and never drops a row of a text that goes on."""

    def _catch_up(self, tokens: list[int]) -> None:
        if tokens[: len(self._cached)] != self._cached:
            super()._catch_up(tokens)
            return
        self._session.extend(tokens[len(self._cached) :])
        self._cached = list(tokens)


class _NotRolledBack(_Trusting):
    def observe(self, result: VerifyResult) -> None:
        tree, self._drafted = self._drafted, None
        flat = self._session.last_flat
        if tree is None or flat is None:
            return
        computed = list(range(1, flat.num_rows))  # of a chain: all its rows, the refused ones too
        self._session.commit(computed)
        self._cached += [tree.token_list[node] for node in (0, *result.path) if node < flat.num_rows]


class _Hole(_Trusting):
    def observe(self, result: VerifyResult) -> None:
        tree = self._drafted
        super().observe(result)
        if tree is not None and len(result.path) == tree.num_drafts:
            self._cached.append(tree.token_list[result.path[-1]])  # it was drafted, but never read


class _HalfReset(_Trusting):
    def reset(self) -> None:
        self._drafted = None
        self._cached = []  # the rows stay, and the next text is taken for their continuation


class _Remembering(ModelDrafter):
    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self._longest: list[int] = []

    def draft(self, context: list[int], *, max_nodes: int, max_depth: int, **keywords: Any) -> DraftTree:
        tree = super().draft(context, max_nodes=max_nodes, max_depth=max_depth, **keywords)
        if self._longest[: len(context)] == context:
            after = self._longest[len(context) - 1 :][: min(max_nodes, max_depth, 3) + 1]
            tree = DraftTree.of(after, range(-1, len(after) - 1)) if len(after) > 1 else tree
        self._longest = max(self._longest, list(context), key=len)
        return tree


class _TrustsLength(ModelDrafter):
    """Keeps as many rows as the new context is long, without a look at what they were computed from."""

    def _catch_up(self, tokens: list[int]) -> None:
        num_kept = min(len(self._cached), len(tokens))
        self._session.truncate(num_kept)
        self._session.extend(tokens[num_kept:])
        self._cached = list(tokens)


class _Appending(ModelDrafter):
    def draft(self, context: list[int], **keywords: Any) -> DraftTree:
        tree = super().draft(context, **keywords)
        context += tree.token_list[1:2]
        return tree


class _Shifted(ModelDrafter):
    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model, widths=(1, 1, 1))
        steps = self._session.steps

        def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
            flat = steps.flatten(tree, prefix_len)
            return replace(flat, position_ids=flat.position_ids + 1)

        self._session.steps = replace(steps, flatten=flatten)


class _BonusCounted(Decoder):
    def generate(self, *arguments: Any, **keywords: Any) -> Generation:
        one = super().generate(*arguments, **keywords)
        return _Counted(one.tokens, one.finish_reason, one.rounds)


class _Counted(Generation):
    @property
    def acceptance_rate(self) -> float:
        levels = sum(int(DraftTree.of(one.tokens, one.parents).depth.max()) for one in self.rounds)
        return sum(len(one.path) + 1 for one in self.rounds) / max(1, levels)


def _drafting(drafter: Callable[[LanguageModel], Drafter], *, itself: bool = False) -> Callable[[], ReferenceTarget]:
    """A target whose only drafter is the faulty one; itself: which it calls a self-drafter."""
    return lambda: ReferenceTarget(drafters={"faulty": drafter}, self_drafters=("faulty",) if itself else ())


def _tree_drafter(kind: type[ModelDrafter]) -> Callable[[LanguageModel], Drafter]:
    return lambda model: kind(model, widths=(2, 2, 1))


FAULTS = (
    Fault(
        "duplicate_siblings",
        "tree-construction",
        "the best draft is proposed twice below the root",
        "any draft with room for one more node",
        "drafter.tree",
        target=_drafting(_DuplicateSiblings),
    ),
    Fault(
        "parent_layer_off",
        "tree-construction",
        "parents are counted from the start of the node's own layer",
        "a draft of two levels",
        "drafter.tree",
        target=_drafting(_tree_drafter(_OneLayerOff)),
    ),
    Fault(
        "root_in_budget",
        "tree-construction",
        "the node limit is compared with a count that leaves a node out",
        "a limit below the size of the whole draft",
        "drafter.budget",
        target=_drafting(_tree_drafter(_RootCounted)),
    ),
    Fault(
        "depth_ignored",
        "tree-construction",
        "the drafter's own depth is drafted whatever max_depth says",
        "a limit below that depth",
        "drafter.budget",
        target=_drafting(_AnyDepth),
    ),
    Fault(
        "q_before_temperature",
        "q-not-matching",
        "draft_probs are taken before the temperature, drafts are drawn after it",
        "a temperature other than 1",
        "drafter.law",
        target=_drafting(_BeforeTemperature),
    ),
    Fault(
        "q_shared_buffer",
        "q-not-matching",
        "every row of draft_probs is the buffer that the last draft step wrote",
        "a draft of two levels",
        "drafter.law",
        target=_drafting(_SharedRow),
    ),
    Fault(
        "argmax_draft_soft_q",
        "q-not-matching",
        "the most probable token is drafted, and handed on with the soft law as if it had been drawn",
        "a temperature above 0",
        "drafter.law",
        target=_drafting(_Argmax),
    ),
    Fault(
        "drafter_not_rolled_back",
        "drafter-desync",
        "the drafter keeps the rows of refused drafts and goes on behind them",
        "a partial accept; the output stays right",
        "drafter.state",
        target=_drafting(_NotRolledBack, itself=True),
    ),
    Fault(
        "drafter_hole",
        "kv-off-by-one",
        "the last draft counts as cached although it was never read",
        "a full accept; the output stays right",
        "drafter.state",
        target=_drafting(_Hole, itself=True),
    ),
    Fault(
        "drafter_half_reset",
        "loop-state-stale",
        "a reset forgets the drafter's tokens and keeps its rows",
        "a second request on the same drafter",
        "drafter.no_peeking",
        target=_drafting(_HalfReset),
    ),
    Fault(
        "drafter_other_request",
        "batch-cross-talk",
        "the drafter proposes what another request went on with",
        "a request that begins like an earlier, longer one",
        "drafter.no_peeking",
        target=_drafting(_Remembering),
    ),
    Fault(
        "drafter_trusts_length",
        "kv-stale-after-reject",
        "the drafter keeps as many cached rows as the context is long, whatever they were computed from",
        "a text unlike the one before it",
        "drafter.no_peeking",
        target=_drafting(_TrustsLength),
    ),
    Fault(
        "drafter_changes_context",
        "drafter-desync",
        "the drafter appends its draft to the list that it was given",
        "any draft",
        "drafter.no_peeking",
        target=_drafting(_Appending),
    ),
    Fault(
        "drafter_own_generator",
        "rng/seed",
        "drafts are drawn by a generator of the drafter's own instead of the coins",
        "a temperature above 0",
        "drafter.deterministic",
        target=_drafting(_OwnGenerator),
    ),
    Fault(
        "drafter_position",
        "drafter-desync",
        "the drafter's nodes stand one position too far on",
        "any self-draft; the output stays right, only acceptance falls",
        "drafter.self_draft",
        target=_drafting(_Shifted, itself=True),
    ),
    Fault(
        "bonus_counted",
        "metric-wrong",
        "the bonus token counts as an accepted draft",
        "any generation with drafts",
        "metrics.acceptance",
        target=lambda: ReferenceTarget(decoder=_BonusCounted),
    ),
)
