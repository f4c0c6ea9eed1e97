"""Sampled acceptance that leaves another law than the target's: a wrong ratio, residual, row or coin.

Each is one method of a walk that is otherwise right. Laws are lists of floats; p is the target's law, q the draft's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specbench.cases import LawCase
from specbench.protocols import Coins
from specbench.reference.faults.fault import Fault
from specbench.reference.sampling import probs
from specbench.reference.verify import CoinChance
from specbench.reference.verify.block import block_verification
from specbench.reference.verify.chance import Law, inverse_cdf
from specbench.reference.verify.laws import excess, normalised, ratio, residual, struck
from specbench.steps import Steps
from specbench.tree import DraftTree
from specbench.types import Sampling, VerifyResult

TINY = 1e-12

# What the total variations in the records belong to: two siblings that were chosen, drawn with replacement or without,
# and a chain that was drawn,
# of two models.
CHOSEN = LawCase(vocab_size=3, seed=482, parents=(-1, 0, 0), proposal="deterministic")
DRAWN = LawCase(vocab_size=3, seed=482, parents=(-1, 0, 0), proposal="iid")
DISTINCT = LawCase(vocab_size=3, seed=482, parents=(-1, 0, 0), proposal="without_replacement")
CHAIN = LawCase(vocab_size=3, seed=767, parents=(-1, 0, 1), proposal="iid")
OTHER_CHAIN = replace(CHAIN, seed=482)


class Walk:
    """The usual lossless rule for trees of every proposal, a method a decision.

    A chosen draft counts as drawn from the point at it, which makes striking it the residual. p judges drafts, p_rest
    is what refused ones are taken from, p_bonus what follows a full path: in the good walk they are the same rows.
    """

    def __init__(self, tree: DraftTree, target_logits: Tensor, sampling: Sampling, coins: Coins) -> None:
        self.tree, self.coins = tree, coins
        self.p: list[list[float]] = self.laws(target_logits, sampling).tolist()
        self.p_rest = self.p_bonus = self.p
        self.q: list[list[float]] = [] if tree.draft_probs is None else tree.draft_probs.double().tolist()

    def laws(self, target_logits: Tensor, sampling: Sampling) -> Tensor:
        return probs(target_logits, sampling)

    def result(self) -> VerifyResult:
        path = [0]
        while (kept := self.kept_child(path[-1])) is not None:
            path.append(kept)
        node = path[-1]
        return VerifyResult(tuple(path[1:]), self.draw(self.correction(node) if self.tried(node) else self.bonus(node)))

    def kept_child(self, node: int) -> int | None:
        law: Law = self.p[node]
        q: Law = self.q[node] if self.q else []
        self.rest: Law = self.p_rest[node]
        for child in self.tried(node):
            drawn_from = self.proposed(child, q)
            if self.keeps(child, law, drawn_from):
                return child
            law, self.rest = self.left(child, law, drawn_from), self.left(child, self.rest, drawn_from)
            q = self.q_left(child, q) if self.q else q
        return None

    def tried(self, node: int) -> list[int]:
        return self.tree.children(node)

    def proposed(self, child: int, q: Law) -> Law:
        return q if self.q else self.point(self.token(child))

    def keeps(self, child: int, p: Law, q: Law) -> bool:
        return self.accept_coin(child) < self.chance(p[self.token(child)], q[self.token(child)])

    def chance(self, p: float, q: float) -> float:
        return min(1.0, ratio(p, q))

    def left(self, child: int, p: Law, q: Law) -> Law:
        return residual(p, q)

    def q_left(self, child: int, q: Law) -> Law:
        return struck(q, self.token(child)) if self.tree.proposal == "without_replacement" else q

    def correction(self, node: int) -> Law:
        return self.rest

    def bonus(self, node: int) -> Law:
        return self.p_bonus[node]

    def accept_coin(self, child: int) -> float:
        return self.coin()

    def coin(self) -> float:
        return float(self.coins.uniform(1))

    def draw(self, law: Law) -> int:
        return inverse_cdf(law, self.coin())

    def token(self, node: int) -> int:
        return self.tree.token_list[node]

    def parent(self, node: int) -> int:
        return self.tree.parent_list[node]

    def point(self, token: int) -> list[float]:
        return [float(one == token) for one in range(len(self.p[0]))]


def accepting(kind: type[Walk]) -> Callable[[Steps], Steps]:
    """Steps that accept by a kind of walk."""

    def plant(steps: Steps) -> Steps:
        def sample(
            tree: DraftTree, target_logits: Tensor, *, sampling: Sampling, coins: Coins, root_place: int = 0
        ) -> VerifyResult:
            return kind(tree, target_logits, sampling, coins).result()

        return replace(steps, sample=sample)

    return plant


class _FromP(Walk):
    def correction(self, node: int) -> Law:
        return self.p[node]


class _Absolute(Walk):
    def left(self, child: int, p: Law, q: Law) -> Law:
        return normalised([abs(target - draft) for target, draft in zip(p, q, strict=True)]) if p != q else p


class _Reversed(Walk):
    def left(self, child: int, p: Law, q: Law) -> Law:
        return residual(q, p)


class _NotNormalised(Walk):
    def left(self, child: int, p: Law, q: Law) -> Law:
        return excess(p, q)

    def draw(self, law: Law) -> int:
        return super().draw(law) if any(law) else 0


class _Unscaled(Walk):
    """The uniform is compared with sums that do not reach one; what lies beyond them is the last token's."""

    def left(self, child: int, p: Law, q: Law) -> Law:
        return excess(p, q) if child == self.tried(self.parent(child))[-1] else residual(p, q)

    def draw(self, law: Law) -> int:
        beyond = max(0.0, 1.0 - sum(law))
        return super().draw([*law[:-1], law[-1] + beyond])


class _NextRow(Walk):
    def left(self, child: int, p: Law, q: Law) -> Law:
        return residual(self.p[child], q)


class _OneHotResidual(Walk):
    def left(self, child: int, p: Law, q: Law) -> Law:
        return residual(p, self.point(self.token(child)))


class _OneHotAcceptance(Walk):
    def chance(self, p: float, q: float) -> float:
        return p


class _EqualOrRatio(Walk):
    def keeps(self, child: int, p: Law, q: Law) -> bool:
        return self.draw(p) == self.token(child) or super().keeps(child, p, q)


class _SecondAgainstP(Walk):
    def keeps(self, child: int, p: Law, q: Law) -> bool:
        return super().keeps(child, self.p[self.parent(child)], q)


class _LastRefusal(Walk):
    def left(self, child: int, p: Law, q: Law) -> Law:
        return residual(self.p[self.parent(child)], q)


class _AsDrawn(Walk):
    def proposed(self, child: int, q: Law) -> Law:
        if self.q:
            return q
        tokens = [self.token(one) for one in self.tried(self.parent(child))]
        return [tokens.count(token) / len(tokens) for token in range(len(self.p[0]))]


class _NotStruck(Walk):
    def left(self, child: int, p: Law, q: Law) -> Law:
        return super().left(child, p, q) if self.q else p


class _StruckOnly(Walk):
    def left(self, child: int, p: Law, q: Law) -> Law:
        return super().left(child, p, q) if self.q else excess(p, self.point(self.token(child)))

    def draw(self, law: Law) -> int:
        return super().draw(law) if any(law) else 0


class _Merged(Walk):
    def tried(self, node: int) -> list[int]:
        children = {self.token(child): child for child in reversed(self.tree.children(node))}
        return sorted(children.values())


class _Unconditional(Walk):
    def q_left(self, child: int, q: Law) -> Law:
        return q


class _AlwaysConditioned(Walk):
    def q_left(self, child: int, q: Law) -> Law:
        return struck(q, self.token(child))


class _QOf(Walk):
    """q is read in another row."""

    def row(self, child: int) -> int:
        raise NotImplementedError

    def proposed(self, child: int, q: Law) -> Law:
        return self.q[self.row(child)] if self.q else super().proposed(child, q)


class _QOfChild(_QOf):
    def row(self, child: int) -> int:
        return child


class _QOfRoot(_QOf):
    def row(self, child: int) -> int:
        return 0


class _QOfLast(_QOf):
    def row(self, child: int) -> int:
        return -1


class _Inverted(Walk):
    def chance(self, p: float, q: float) -> float:
        return min(1.0, ratio(q, p))


class _NoCoin(Walk):
    def keeps(self, child: int, p: Law, q: Law) -> bool:
        return p[self.token(child)] >= q[self.token(child)]


class _FirstUnjudged(Walk):
    def keeps(self, child: int, p: Law, q: Law) -> bool:
        return child == 1 or super().keeps(child, p, q)


class _HalfAgain(Walk):
    def chance(self, p: float, q: float) -> float:
        return min(1.0, 1.5 * ratio(p, q))


class _OwnRow(Walk):
    def keeps(self, child: int, p: Law, q: Law) -> bool:
        return super().keeps(child, self.p[child], q)


class _PerPath(Walk):
    """Each candidate path has its tokens drawn anew, and the longest that is followed wins."""

    def result(self) -> VerifyResult:
        best: tuple[list[int], int] | None = None
        for leaf in (node for node in range(self.tree.num_nodes) if not self.tree.children(node)):
            path, said = [0], -1
            for node in [*self.tree.path_to(leaf)[1:], None]:
                said = self.draw(self.p[path[-1]])
                if node is None or said != self.token(node):
                    break
                path.append(node)
            if best is None or len(path) > len(best[0]):
                best = path, said
        assert best is not None
        return VerifyResult(tuple(best[0][1:]), best[1])


class _PathOnly(CoinChance):
    def draw(self, law: Law) -> int:
        return 0


class _TokenwiseRest(Walk):
    """A drawn chain is kept as a block, and what follows it is drawn as if it had been judged token by token."""

    def result(self) -> VerifyResult:
        if not self.q or any(parent != node - 1 for node, parent in enumerate(self.tree.parent_list)):
            return super().result()
        path = block_verification(self.tree, self.p, self.q, _PathOnly(self.coins)).path
        last = len(path)
        is_full = last == self.tree.num_drafts
        return VerifyResult(path, self.draw(self.p[last] if is_full else residual(self.p[last], self.q[last])))


class _BonusOfParent(Walk):
    def bonus(self, node: int) -> Law:
        return self.p[max(self.parent(node), 0)]


class _BonusArgmax(Walk):
    def bonus(self, node: int) -> Law:
        return self.point(self.p[node].index(max(self.p[node])))


class _BonusRepeats(Walk):
    def bonus(self, node: int) -> Law:
        return self.point(self.token(node)) if node else self.p[0]


class _AtMost(Walk):
    def keeps(self, child: int, p: Law, q: Law) -> bool:
        return self.coin() <= self.chance(p[self.token(child)], q[self.token(child)])


class _LeftEdge(Walk):
    """The first token whose cumulative sum is at least the uniform: at a uniform of 0 that is token 0."""

    def draw(self, law: Law) -> int:
        return int(torch.searchsorted(torch.tensor(law, dtype=torch.float64).cumsum(0), self.coin() * sum(law)))


class _EndOfSums(Walk):
    """Sums in single precision may end below one, and what lies beyond them is the last column's."""

    def draw(self, law: Law) -> int:
        sums = torch.tensor(law, dtype=torch.float32).cumsum(0)
        return min(int(torch.searchsorted(sums, torch.tensor(self.coin()).float(), right=True)), len(law) - 1)


class _EmptyIsUniform(Walk):
    """A coin in single precision may be 1, which refuses even what p and q agree on."""

    def coin(self) -> float:
        return float(torch.tensor(super().coin(), dtype=torch.float32))

    def left(self, child: int, p: Law, q: Law) -> Law:
        return super().left(child, p, q) if sum(excess(p, q)) > TINY else [1 / len(p)] * len(p)


class _CoinForSiblings(Walk):
    def accept_coin(self, child: int) -> float:
        if child == self.tried(self.parent(child))[0]:
            self.shared = self.coin()
        return self.shared


class _CoinForDepths(Walk):
    """The n-th sibling of every level is judged by the same coin."""

    def result(self) -> VerifyResult:
        self.by_place = dict[int, float]()
        return super().result()

    def accept_coin(self, child: int) -> float:
        place = self.tried(self.parent(child)).index(child)
        if place not in self.by_place:
            self.by_place[place] = self.coin()
        return self.by_place[place]


class _CoinForBoth(Walk):
    """The coin that refused a draft draws the token in its stead."""

    def accept_coin(self, child: int) -> float:
        self.spent = self.coin()
        return self.spent

    def draw(self, law: Law) -> int:
        return inverse_cdf(law, self.spent) if hasattr(self, "spent") else super().draw(law)


class _HalfCoins(Walk):
    def coin(self) -> float:
        return float(self.coins.uniform(1).bfloat16())


_RESIDUAL, _Q, _RNG, _BONUS = (
    "accept-rule/residual-wrong",
    "q-not-matching",
    "rng/seed",
    "bonus/correction-token-wrong",
)
_REFUSED = "a refused draft that was drawn"


def fault_of(
    kind: type[Walk], name: str, fault_class: str, sentence: str, shows_when: str, claim: str = "law.exact", **more: Any
) -> Fault:
    """A walk as a planted fault."""
    return Fault(name, fault_class, sentence, shows_when, claim, accepting(kind), **more)


def off_by(tv: float, toy: LawCase) -> dict[str, Any]:
    """What a record says of how far the law is off."""
    return {"tv": tv, "toy": toy}


FAULTS = (
    fault_of(
        *(_FromP, "correction_from_p", _RESIDUAL),
        "behind a refused draft the token is drawn from p, not from what p leaves",
        "a refused draft",
        origin="ShopeeLLM/Spec-RL#14",
        **off_by(0.2479339, CHOSEN),
    ),
    fault_of(
        *(_Absolute, "residual_absolute", _RESIDUAL),
        "the residual is |p - q| instead of its positive part",
        _REFUSED,
        **off_by(0.3409091, CHOSEN),
    ),
    fault_of(
        *(_Reversed, "residual_reversed", _RESIDUAL),
        "the residual is the positive part of q - p",
        "a refused draft",
        **off_by(0.4545455, CHOSEN),
    ),
    fault_of(
        *(_NotNormalised, "residual_not_normalised", _RESIDUAL),
        "the residual is not normalised before the next sibling is judged by it",
        "two siblings",
        subtle="a second sibling",
        **off_by(0.0661157, CHOSEN),
    ),
    fault_of(
        *(_Unscaled, "residual_drawn_unscaled", _RESIDUAL),
        "the residual is drawn from by a uniform on [0, 1), as if it summed to one: the last token takes the rest",
        "a refused draft",
        **off_by(0.1906543, CHAIN),
    ),
    fault_of(
        *(_NextRow, "residual_of_next_row", _RESIDUAL),
        "the residual is taken from the row of the refused draft, which follows it",
        "a refused draft",
        **off_by(0.4545455, CHOSEN),
    ),
    fault_of(
        *(_OneHotResidual, "residual_one_hot", _RESIDUAL),
        "a drawn draft is judged by p/q, and behind its refusal only its own token is taken out of p",
        _REFUSED,
        origin="SafeAILab/EAGLE#20",
        subtle="a drawn draft; a total variation below what samples show",
        **off_by(0.1010648, CHAIN),
    ),
    fault_of(
        *(_OneHotAcceptance, "acceptance_one_hot", _RESIDUAL),
        "a drawn draft is kept with probability p, and behind its refusal q is taken out of p",
        _REFUSED,
        **off_by(0.1845878, CHAIN),
    ),
    fault_of(
        *(_EqualOrRatio, "equal_or_ratio", _RESIDUAL),
        "a draft is kept where the target's own draw equals it, and else by p/q as well",
        "any draft",
        origin="alibaba/rtp-llm#1295",
        **off_by(0.2479339, CHOSEN),
    ),
    fault_of(
        *(_SecondAgainstP, "second_against_p", _RESIDUAL),
        "each sibling is judged by p itself instead of what the refused ones left",
        "two siblings",
        subtle="a second sibling",
        **off_by(0.0661157, CHOSEN),
    ),
    fault_of(
        *(_LastRefusal, "residual_of_last_refusal", _RESIDUAL),
        "of several refused siblings only the last is taken out of p",
        "two siblings",
        subtle="two refused siblings",
        **off_by(0.1298701, CHOSEN),
    ),
    fault_of(
        *(_AsDrawn, "chosen_as_drawn", _RESIDUAL),
        "siblings that were chosen are judged by p/q, as if each had been drawn from among them",
        "two chosen siblings",
        origin="apple/ml-recurrent-drafter#6",
        subtle="two chosen siblings",
        **off_by(0.3636364, CHOSEN),
    ),
    fault_of(
        *(_NotStruck, "refused_not_struck", _RESIDUAL),
        "a refused draft that was chosen is not taken out of p",
        "a refused draft that was chosen",
        subtle="a chosen draft",
        **off_by(0.2178813, CHOSEN),
    ),
    fault_of(
        *(_StruckOnly, "struck_not_renormalised", _RESIDUAL),
        "a refused draft is taken out of p, and the next sibling is judged by what is left without making it a law",
        "two chosen siblings",
        subtle="two chosen siblings",
        **off_by(0.0661157, CHOSEN),
    ),
    fault_of(
        *(_Merged, "copies_tried_once", _RESIDUAL),
        "a token that was drawn twice is tried once",
        "the same token drawn twice",
        subtle="a token drawn twice",
        **off_by(0.0318182, DRAWN),
    ),
    fault_of(
        *(_Unconditional, "q_not_conditioned", _Q),
        "q is not conditioned on the refused siblings, which cannot be drawn again, or not made a law again",
        "two siblings drawn without replacement",
        subtle="two siblings drawn without replacement",
        **off_by(0.0636364, DISTINCT),
    ),
    fault_of(
        *(_AlwaysConditioned, "q_conditioned_though_iid", _Q),
        "q is conditioned on the refused siblings, though they may be drawn again",
        "two siblings drawn with replacement",
        subtle="two siblings drawn with replacement",
        **off_by(0.0318182, DRAWN),
    ),
    fault_of(
        *(_QOfChild, "q_of_next_row", _Q),
        "a draft is judged by the q that follows it, not the one it was drawn from",
        "any drawn draft",
        kin="q of another row",
        **off_by(0.3009259, CHAIN),
    ),
    fault_of(
        *(_QOfRoot, "q_of_root_row", _Q),
        "all drafts are judged by the q of the first row",
        "a drawn draft at depth two",
        subtle="a drawn draft at depth two",
        kin="q of another row",
        **off_by(0.1075358, CHAIN),
    ),
    fault_of(
        *(_QOfLast, "q_of_last_row", _Q),
        "all drafts are judged by the q that was written last",
        "any drawn draft",
        kin="q of another row",
        **off_by(0.1247306, CHAIN),
    ),
    fault_of(
        *(_Inverted, "ratio_inverted", _RESIDUAL),
        "a draft is kept with probability q/p",
        "any draft",
        **off_by(0.8181818, CHOSEN),
    ),
    fault_of(
        *(_NoCoin, "kept_without_coin", _RESIDUAL),
        "a draft is kept where p is at least q, and no coin is tossed",
        "any draft",
        **off_by(0.5454545, CHOSEN),
    ),
    fault_of(
        *(_FirstUnjudged, "sampled_first_unverified", "accept-draft-first-unverified"),
        "the first draft is kept whatever the target says of it",
        "any draft",
        "law.acceptance_bound",
        **off_by(0.8181818, CHOSEN),
    ),
    fault_of(
        *(_HalfAgain, "ratio_half_again", _RESIDUAL),
        "a draft is kept with probability 1.5 p/q, so that more are",
        "a draft that p gives less than q",
        "law.acceptance_bound",
        **off_by(0.2121212, CHOSEN),
    ),
    fault_of(
        *(_OwnRow, "sampled_own_row", "row-self"),
        "a draft is judged by its own row, which has seen it, instead of its parent's",
        "any draft",
        **off_by(0.1590909, CHOSEN),
    ),
    fault_of(
        *(_PerPath, "drawn_anew_for_each_path", "accept-wrong-branch"),
        "the target's tokens are drawn anew for each candidate path, and the longest that is followed wins",
        "two siblings",
        subtle="a second sibling",
        **off_by(0.1652893, CHOSEN),
    ),
    fault_of(
        *(_TokenwiseRest, "block_tokenwise_residual", _RESIDUAL),
        "a chain is kept as a block, and what follows it is drawn as if it had been judged token by token",
        "a drawn chain of two, refused in part",
        subtle="a drawn chain; a total variation below what samples show",
        **off_by(0.0030303, OTHER_CHAIN),
    ),
    fault_of(
        *(_BonusOfParent, "sampled_bonus_of_parent", _BONUS),
        "behind a full path the token is drawn from the row that judged the last draft",
        "a full accept",
        **off_by(0.1157025, CHOSEN),
    ),
    fault_of(
        *(_BonusArgmax, "bonus_by_argmax", "greedy-vs-sampling"),
        "behind a full path the most probable token is taken instead of a draw",
        "a full accept",
        **off_by(0.2107438, CHOSEN),
    ),
    fault_of(
        *(_BonusRepeats, "bonus_repeats_draft", _BONUS),
        "behind a full path nothing is drawn: the last draft stands there again",
        "a full accept",
        **off_by(0.4008264, CHOSEN),
    ),
    fault_of(
        *(_AtMost, "kept_at_zero", _RESIDUAL),
        "a coin of exactly 0 keeps a draft of probability zero: it is compared by <= instead of <",
        "a coin of 0",
        "law.support",
        origin="sgl-project/sglang#35771",
        subtle="a coin of 0",
    ),
    fault_of(
        *(_LeftEdge, "drawn_at_zero", _RESIDUAL),
        "a uniform of exactly 0 draws token 0, even where it has no probability",
        "a uniform of 0",
        "law.support",
        subtle="a uniform of 0",
    ),
    fault_of(
        *(_EndOfSums, "drawn_behind_the_sums", "tokenizer/vocab"),
        "a uniform beyond cumulative sums in single precision draws the last column, which pads the vocabulary",
        "a uniform just below 1, and padding",
        "law.support",
        subtle="a uniform just below 1",
    ),
    fault_of(
        *(_EmptyIsUniform, "empty_residual_uniform", _RESIDUAL),
        "where a coin that rounds to 1 refuses a draft and no residual is left, any token of the vocabulary is drawn",
        "p and q that are equal, and a coin just below 1",
        "law.support",
        subtle="p equal to q, and a coin just below 1",
    ),
    fault_of(
        *(_CoinForSiblings, "verifiers_coin_for_siblings", _RNG),
        "all siblings are judged by one coin",
        "two siblings",
        subtle="a second sibling",
        kin="one coin for two decisions",
        **off_by(0.1010101, CHOSEN),
    ),
    fault_of(
        *(_CoinForDepths, "verifiers_coin_for_depths", _RNG),
        "drafts at all depths are judged by one coin",
        "a draft at depth two",
        subtle="a draft at depth two; the law of the first token is right",
        kin="one coin for two decisions",
        **off_by(0.0266667, CHAIN),
    ),
    fault_of(
        *(_CoinForBoth, "coin_for_refusal_and_draw", _RNG),
        "the coin that refused a draft draws the token in its stead",
        "a refused draft",
        origin="vllm-project/vllm-ascend#16370",
        kin="one coin for two decisions",
        **off_by(0.2438017, CHOSEN),
    ),
    fault_of(
        *(_HalfCoins, "coins_in_half", "dtype/precision"),
        "coins are rounded to bf16, and some of them to 1",
        "any draw",
        subtle="a total variation below what samples show",
        **off_by(0.0004710, CHOSEN),
    ),
)
