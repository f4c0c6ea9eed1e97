"""Drafters that draw from another law than the one they hand on, or by other coins than they were given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specbench.protocols import Coins, LanguageModel
from specbench.reference.drafters.sampled import SampledDrafter
from specbench.reference.faults.fault import Fault
from specbench.reference.faults.housing import drafting
from specbench.reference.verify.chance import inverse_cdf
from specbench.tree import DraftTree
from specbench.types import Sampling, VerifyResult

TOP_K = 2


class _AtTemperature(SampledDrafter):
    """A drafter whose draws know the temperature."""

    temperature = 1.0

    def draft(self, context: list[int], *, sampling: Sampling, **keywords: Any) -> DraftTree:
        self.temperature = sampling.temperature
        return super().draft(context, sampling=sampling, **keywords)


class _BeforeTemperature(SampledDrafter):
    def draft(self, context: list[int], *, sampling: Sampling, **keywords: Any) -> DraftTree:
        tree = super().draft(context, sampling=sampling, **keywords)
        rows = laws_of(tree)
        return replace(tree, draft_probs=_normalised(rows**sampling.temperature if sampling.temperature else rows))


class _DrawnBeforeTemperature(_AtTemperature):
    def _draws(self, q: Tensor, num: int, coins: Coins) -> list[int]:
        return super()._draws(_normalised(q**self.temperature) if self.temperature else q, num, coins)


class _TopK(SampledDrafter):
    def _draws(self, q: Tensor, num: int, coins: Coins) -> list[int]:
        cut = torch.zeros_like(q)
        best = q.topk(min(TOP_K, len(q))).indices
        cut[best] = q[best]
        return super()._draws(cut, num, coins)


class _SharedRow(SampledDrafter):
    def draft(self, context: list[int], **keywords: Any) -> DraftTree:
        tree = super().draft(context, **keywords)
        rows = laws_of(tree)
        written = rows.any(dim=-1)
        if not bool(written.any()):
            return tree
        last = rows[int(written.nonzero()[-1])]
        return replace(tree, draft_probs=torch.where(written[:, None], last, rows))


class _ParentsRow(SampledDrafter):
    def draft(self, context: list[int], **keywords: Any) -> DraftTree:
        tree = super().draft(context, **keywords)
        return replace(tree, draft_probs=laws_of(tree)[[max(parent, 0) for parent in tree.parent_list]])


class _SiblingsRow(SampledDrafter):
    def draft(self, context: list[int], **keywords: Any) -> DraftTree:
        tree = super().draft(context, **keywords)
        order = list(range(tree.num_nodes))
        for node in range(tree.num_nodes):
            children = tree.children(node)
            for child, other in zip(children, reversed(children), strict=True):
                order[child] = other
        return replace(tree, draft_probs=laws_of(tree)[order])


class _WhatIsLeft(SampledDrafter):
    """The row is the buffer from which drawn tokens are struck: what the last sibling was drawn from."""

    def draft(self, context: list[int], **keywords: Any) -> DraftTree:
        tree = super().draft(context, **keywords)
        rows = laws_of(tree).clone()
        for node in range(tree.num_nodes):
            rows[node, [tree.token_list[child] for child in tree.children(node)[:-1]]] = 0.0
        return replace(tree, draft_probs=_normalised(rows))


class _OverDrafted(SampledDrafter):
    def draft(self, context: list[int], **keywords: Any) -> DraftTree:
        tree = super().draft(context, **keywords)
        rows = torch.zeros_like(laws_of(tree))
        for node in range(tree.num_nodes):
            drafted = [tree.token_list[child] for child in tree.children(node)]
            rows[node, drafted] = laws_of(tree)[node, drafted]
        return replace(tree, draft_probs=_normalised(rows))


class _SaysOtherwise(SampledDrafter):
    """Draws without replacement and says "iid", or the other way round."""

    def draft(self, context: list[int], **keywords: Any) -> DraftTree:
        tree = super().draft(context, **keywords)
        return replace(tree, proposal="iid" if self._proposal == "without_replacement" else "without_replacement")


class _Argmax(SampledDrafter):
    def _draws(self, q: Tensor, num: int, coins: Coins) -> list[int]:
        return [int(q.argmax())] if num else []


class _OwnGenerator(SampledDrafter):
    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self._generator = torch.Generator().manual_seed(0)

    def _draws(self, q: Tensor, num: int, coins: Coins) -> list[int]:
        uniforms = torch.rand(num, generator=self._generator, dtype=torch.float64)
        return [inverse_cdf(q.tolist(), float(one)) for one in uniforms]


class _Reseeded(_OwnGenerator):
    def draft(self, context: list[int], **keywords: Any) -> DraftTree:
        self._generator.manual_seed(0)
        return super().draft(context, **keywords)


class _CoinAnAccept(SampledDrafter):
    """Each accepted draft has cost a coin, which the next round does without."""

    _num_spent = 0

    def draft(self, context: list[int], *, coins: Coins, **keywords: Any) -> DraftTree:
        coins.uniform(self._num_spent)
        return super().draft(context, coins=coins, **keywords)

    def observe(self, result: VerifyResult) -> None:
        self._num_spent = len(result.path)


class _OneForSiblings(SampledDrafter):
    def _draws(self, q: Tensor, num: int, coins: Coins) -> list[int]:
        uniforms = coins.uniform(num)
        return [inverse_cdf(q.tolist(), float(uniforms[0])) for _ in range(num)]


class _OneForAll(SampledDrafter):
    """One uniform a draft, and every draw is made by it."""

    _uniform = 0.0

    def draft(self, context: list[int], *, coins: Coins, **keywords: Any) -> DraftTree:
        self._uniform = float(coins.uniform(1))
        return super().draft(context, coins=coins, **keywords)

    def _draws(self, q: Tensor, num: int, coins: Coins) -> list[int]:
        return [inverse_cdf(q.tolist(), self._uniform)] if num else []


class _InHalf(SampledDrafter):
    """exp() of a logit, in half precision and without the largest one taken off first."""

    def _law(self, logits: Tensor, temperature: float) -> Tensor:
        if temperature == 0.0:
            return super()._law(logits, temperature)
        return _normalised((logits / temperature).half().exp().double())

    def _draws(self, q: Tensor, num: int, coins: Coins) -> list[int]:
        return super()._draws(q.nan_to_num(1.0), num, coins)  # what has overflowed is infinitely likely


class _Rounded(SampledDrafter):
    def draft(self, context: list[int], **keywords: Any) -> DraftTree:
        tree = super().draft(context, **keywords)
        return replace(tree, draft_probs=laws_of(tree).bfloat16().double())


def laws_of(tree: DraftTree) -> Tensor:
    """float64 [N, V]."""
    assert tree.draft_probs is not None
    return tree.draft_probs


def _normalised(rows: Tensor) -> Tensor:
    """Rows of zeros stay zero."""
    return rows / rows.sum(dim=-1, keepdim=True).clamp(min=1e-300)


FAULTS = (
    Fault(
        "q_before_temperature",
        "q-not-matching",
        "draft_probs are taken before the temperature, drafts are drawn after it",
        "a temperature other than 1",
        "drafter.law",
        target=drafting(_BeforeTemperature),
        origin="huggingface/transformers#47932",
        subtle="a temperature other than 1",
    ),
    Fault(
        "drawn_before_temperature",
        "q-not-matching",
        "drafts are drawn at temperature 1, draft_probs are taken at the one that was asked for",
        "a temperature other than 1",
        "drafter.law",
        target=drafting(_DrawnBeforeTemperature),
        origin="z-lab/dflash#74",
        subtle="a temperature other than 1",
    ),
    Fault(
        "drawn_from_top_k",
        "q-not-matching",
        "drafts are drawn from the two most probable tokens, draft_probs name the whole law",
        "probability beyond the top two",
        "drafter.law",
        target=drafting(_TopK),
        subtle="a law with more than k tokens",
        origin="mlx-node/mlx-node#11",
    ),
    Fault(
        "q_shared_buffer",
        "q-not-matching",
        "every row of draft_probs is the buffer that the last draft step wrote",
        "a draft of two levels",
        "drafter.law",
        target=drafting(_SharedRow),
        subtle="depth two",
        kin="q of another row",
    ),
    Fault(
        "q_of_parent",
        "q-not-matching",
        "a node's row of draft_probs is its parent's: rows are written one step late",
        "a draft of two levels",
        "drafter.law",
        target=drafting(_ParentsRow),
        subtle="depth two",
        kin="q of another row",
    ),
    Fault(
        "q_of_sibling",
        "q-not-matching",
        "siblings have each other's rows of draft_probs",
        "a draft of two levels below two siblings",
        "drafter.law",
        target=drafting(_SiblingsRow),
        subtle="width above depth two",
        kin="q of another row",
    ),
    Fault(
        "q_of_last_draw",
        "q-not-matching",
        "draft_probs are what was left for the last sibling, the siblings before it struck out",
        "two siblings",
        "drafter.law",
        target=drafting(lambda model: _WhatIsLeft(model, proposal="without_replacement")),
        subtle="a second sibling",
    ),
    Fault(
        "q_over_drafted",
        "q-not-matching",
        "draft_probs are normalised over the drafted tokens alone",
        "any draw",
        "drafter.law",
        target=drafting(_OverDrafted),
    ),
    Fault(
        "argmax_draft_soft_q",
        "q-not-matching",
        "the most probable token is drafted, and handed on with the soft law as if it had been drawn",
        "a temperature above 0",
        "drafter.law",
        target=drafting(_Argmax),
        origin="jaymody/speculative-sampling#3",
    ),
    Fault(
        "said_to_be_iid",
        "q-not-matching",
        "siblings are drawn without replacement and said to be drawn with it",
        "two siblings",
        "drafter.law",
        target=drafting(lambda model: _SaysOtherwise(model, proposal="without_replacement")),
        subtle="a second sibling",
    ),
    Fault(
        "said_to_be_distinct",
        "q-not-matching",
        "siblings are drawn with replacement and said to be drawn without",
        "the same token drawn twice",
        "drafter.tree",
        target=drafting(lambda model: _SaysOtherwise(model, proposal="iid")),
        subtle="a token drawn twice",
    ),
    Fault(
        "drafter_own_generator",
        "rng/seed",
        "drafts are drawn by a generator of the drafter's own instead of the coins",
        "a temperature above 0",
        "drafter.deterministic",
        target=drafting(_OwnGenerator),
    ),
    Fault(
        "drafter_reseeded",
        "rng/seed",
        "the drafter's generator is seeded anew for every draft, so that each is made by the same numbers",
        "several seeds",
        "drafter.law",
        target=drafting(_Reseeded),
        subtle="several seeds",
    ),
    Fault(
        "coin_an_accept",
        "rng/seed",
        "the drafter spends a coin on every draft that was accepted, so that its draws depend on the history",
        "an accepted draft before, at a temperature above 0",
        "drafter.state",
        target=drafting(_CoinAnAccept),
        subtle="an accept in the round before",
    ),
    Fault(
        "coin_for_siblings",
        "rng/seed",
        "siblings are drawn by the first one's uniform",
        "two siblings, at a temperature above 0",
        "drafter.law",
        target=drafting(_OneForSiblings),
        subtle="a second sibling",
        kin="one uniform for two draws",
    ),
    Fault(
        "coin_for_all_depths",
        "rng/seed",
        "the levels of a draft are drawn by the same uniform",
        "a draft of two levels, at a temperature above 0: each draw alone has the right law",
        "drafter.law",
        target=drafting(lambda model: _OneForAll(model, widths=(1, 1, 1))),
        subtle="two draws together",
        kin="one uniform for two draws",
    ),
    Fault(
        "softmax_overflow",
        "dtype/precision",
        "the drafter's softmax takes exp() of logits in half precision as they are, which overflows beyond 11",
        "a large logit over a small temperature",
        "drafter.law",
        target=drafting(_InHalf),
        subtle="a large logit",
    ),
    Fault(
        "q_rounded",
        "dtype/precision",
        "draft_probs are kept in bf16, and no longer sum to one where they are used",
        "any draw",
        "drafter.law",
        target=drafting(_Rounded),
    ),
)
