"""Rules that look wrong and are right (famous bug reports are of this kind), and S5: exact laws by enumeration.

Every draft outcome and every accept branch is gone through in fractions, so equality is equality; a rule that is nearly
right shows the total variation that was computed for it by hand.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from sessions import session_on

from specbench.record import EQUAL
from specbench.reference.controls.registry import CONTROLS
from specbench.reference.model import LlamaConfig, tiny_llama
from specbench.reference.verify import RULES as ACCEPTANCE
from specbench.reference.verify import Law, rule_for
from specbench.tree import DraftTree, Proposal
from specbench.types import VerifyResult

F = Fraction
P = (F(5, 10), F(3, 10), F(2, 10))
Q = (F(2, 10), F(7, 10), F(1, 10))
Rule = Callable[[DraftTree, "Branches"], VerifyResult]
Text = tuple[int, ...]


class Branches:
    """Decisions by script; what is not scripted takes the first branch that has a probability, and the rest are left to
    do. `weight` is the probability of what was decided."""

    def __init__(self, script: tuple[int, ...]) -> None:
        self._script = script
        self.decided: list[int] = []
        self.todo: list[tuple[int, ...]] = []
        self.weight = F(1)

    def accept(self, probability: Fraction) -> bool:
        return self._decide([probability, 1 - probability]) == 0

    def draw(self, law: Law) -> int:
        return self._decide(list(law))

    def _decide(self, law: list[Fraction]) -> int:
        at = len(self.decided)
        possible = [one for one, probability in enumerate(law) if probability > 0]
        if at < len(self._script):
            choice = self._script[at]
        else:
            choice = possible[0]
            self.todo += [(*self.decided, other) for other in possible[1:]]
        self.decided.append(choice)
        self.weight *= law[choice]
        return choice


def law_of(run: Callable[[Branches], Text]) -> dict[Text, Fraction]:
    """The exact law of what `run` returns, over every branch of its decisions."""
    law: Counter[Text] = Counter()
    todo: list[tuple[int, ...]] = [()]
    while todo:
        branches = Branches(todo.pop())
        law[run(branches)] += branches.weight
        todo += branches.todo
    assert sum(law.values()) == 1
    return {text: weight for text, weight in law.items() if weight}


def total_variation(one: dict[Text, Fraction], other: dict[Text, Fraction]) -> Fraction:
    return sum((abs(one.get(text, F(0)) - other.get(text, F(0))) for text in {*one, *other}), F(0)) / 2


@dataclass(frozen=True)
class Toy:
    """Context-dependent laws over three tokens, with power `sharpness` (1/temperature, a whole number) and top-k."""

    target: tuple[Law, ...]
    draft: tuple[Law, ...]
    sharpness: int = 1
    top_k: int = 3

    def p(self, text: Text) -> list[Fraction]:
        return self._shaped(self.target[sum(text) % len(self.target)])

    def q(self, text: Text) -> list[Fraction]:
        return self._shaped(self.draft[(1 + sum(text)) % len(self.draft)])

    def _shaped(self, law: Law) -> list[Fraction]:
        powers = [one**self.sharpness for one in law]
        kept = sorted(range(len(powers)), key=lambda token: (-powers[token], token))[: self.top_k]
        cut = [power if token in kept else F(0) for token, power in enumerate(powers)]
        return [one / sum(cut) for one in cut]


TOYS = {
    "p and q differ": Toy((P, (F(1, 3),) * 3), (Q, (F(1, 2), F(1, 4), F(1, 4)))),
    "p equals q": Toy((P, Q), (Q, P)),
    "p is zero somewhere": Toy(((F(0), F(1, 2), F(1, 2)), P), (Q, (F(1, 3),) * 3)),
    "q is nearly one-hot": Toy((P, Q), ((F(98, 100), F(1, 100), F(1, 100)), Q)),
    "temperature one half": Toy((P, Q), (Q, (F(1, 3),) * 3), sharpness=2),
    "top-k two on both sides": Toy((P, Q), (Q, P), top_k=2),
    "both": Toy((P, (F(1, 4), F(1, 4), F(1, 2))), (Q, P), sharpness=2, top_k=2),
}
LENGTH = 3  # tokens whose joint law is compared
WIDTHS = {"chain of two": (1, 1), "two children": (2,), "two, then one": (2, 1), "one, then two": (1, 2)}


def grow(toy: Toy, widths: Sequence[int], proposal: Proposal, branches: Branches) -> tuple[DraftTree, list[Text]]:
    """A tree drawn from q as `proposal` says, and the text of each node below the root (token 0)."""
    tokens, parents, texts = [0], [-1], [()]
    level = [0]
    for width in widths:
        below = []
        for node in level:
            q = toy.q(texts[node])
            for rank in range(width):
                if proposal == "deterministic":
                    token = sorted(range(3), key=lambda one: (-q[one], one))[rank]
                else:
                    if not sum(q):
                        break
                    token = branches.draw([one / sum(q) for one in q])
                    if proposal == "without_replacement":
                        q = [F(0) if one == token else weight for one, weight in enumerate(q)]
                below.append(len(tokens))
                tokens.append(token)
                parents.append(node)
                texts.append((*texts[node], token))
        level = below
    tree = DraftTree(torch.tensor(tokens), torch.tensor(parents), None, proposal)
    return tree, texts


def emitted(toy: Toy, widths: Sequence[int], proposal: Proposal, rule: str) -> dict[Text, Fraction]:
    """The joint law of the first tokens: one round by the rule, what is missing drawn from the target."""

    def run(branches: Branches) -> Text:
        tree, texts = grow(toy, widths, proposal, branches)
        p = [toy.p(text) for text in texts]
        if rule == "sample and match":
            result = ACCEPTANCE["sample_and_match"].function(tree, p, None, branches)
        elif rule == "draw everywhere and match":
            result = draw_everywhere_and_match(tree, p, branches)
        else:
            q = None if proposal == "deterministic" else [toy.q(text) for text in texts]
            result = rule_for(tree).function(tree, p, q, branches)
        text = (*(tree.token_list[node] for node in result.path), result.bonus_token)
        while len(text) < LENGTH:
            text = (*text, branches.draw(toy.p(text)))
        return text[:LENGTH]

    return law_of(run)


def draw_everywhere_and_match(tree: DraftTree, target_probs: Sequence[Law], branches: Branches) -> VerifyResult:
    """As the control `sampler_match` does with an argmax for a draw."""
    drawn = [branches.draw(law) for law in target_probs]
    path = [0]
    while matching := [child for child in tree.children(path[-1]) if tree.token_list[child] == drawn[path[-1]]]:
        path.append(matching[0])
    return VerifyResult(tuple(path[1:]), drawn[path[-1]])


def plain(toy: Toy) -> dict[Text, Fraction]:
    law: dict[Text, Fraction] = {}
    for text in itertools.product(range(3), repeat=LENGTH):
        weight = F(1)
        for idx, token in enumerate(text):
            weight *= toy.p(text[:idx])[token]
        if weight:
            law[text] = weight
    return law


RULES: dict[str, tuple[Proposal, str]] = {
    "siblings drawn with replacement, q each": ("iid", "rejection"),
    "siblings drawn without replacement, conditional q": ("without_replacement", "rejection"),
    "deterministic top-k siblings, else strike and renormalise": ("deterministic", "rejection"),
    "sample and match, one draw a node": ("deterministic", "sample and match"),
    "sample and match, every node drawn before any is judged": ("deterministic", "draw everywhere and match"),
}


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize("rule", RULES)
def test_s5_the_joint_law_of_three_tokens_is_exactly_the_targets(rule: str, toy: str, widths: str) -> None:
    proposal, walk = RULES[rule]
    assert emitted(TOYS[toy], WIDTHS[widths], proposal, walk) == plain(TOYS[toy])


def one_token(p: Law, propose: Callable[[Branches], int], decide: Callable[[int, Branches], int]) -> Fraction:
    """Total variation between the target and what a rule emits after one draft."""
    return total_variation(
        law_of(lambda branches: (decide(propose(branches), branches),)), {(token,): one for token, one in enumerate(p)}
    )


def kept(chance: Fraction, residual: Law, draft: int, branches: Branches) -> int:
    if branches.accept(chance):
        return draft
    total = sum(residual)
    return branches.draw([one / total for one in residual])


def strike(law: Law, token: int) -> list[Fraction]:
    return [F(0) if one == token else weight for one, weight in enumerate(law)]


def positive(p: Law, q: Law) -> list[Fraction]:
    return [max(one - other, F(0)) for one, other in zip(p, q, strict=True)]


ONE_DRAFT: dict[str, tuple[Fraction, Callable[[int, Branches], int]]] = {
    "the right rule": (F(0), lambda x, coins: kept(min(F(1), P[x] / Q[x]), positive(P, Q), x, coins)),
    "control: any draft, kept with p(x), else strike it": (F(0), lambda x, coins: kept(P[x], strike(P, x), x, coins)),
    "fault: resample from p": (F(12, 100), lambda x, coins: kept(min(F(1), P[x] / Q[x]), P, x, coins)),
    "fault: residual |p - q|": (
        F(20, 100),
        lambda x, coins: kept(min(F(1), P[x] / Q[x]), [abs(a - b) for a, b in zip(P, Q, strict=True)], x, coins),
    ),
    "fault: residual q - p": (F(40, 100), lambda x, coins: kept(min(F(1), P[x] / Q[x]), positive(Q, P), x, coins)),
    "fault: ratio test, then strike": (
        F(1, 70),
        lambda x, coins: kept(min(F(1), P[x] / Q[x]), strike(P, x), x, coins),
    ),
}


@pytest.mark.parametrize("rule", ONE_DRAFT)
def test_s5_one_draft_moves_the_law_by_what_was_computed_by_hand(rule: str) -> None:
    expected, decide = ONE_DRAFT[rule]
    assert one_token(P, lambda branches: branches.draw(Q), decide) == expected


def test_control_unfiltered_q_while_p_is_filtered_is_exact() -> None:
    """q is the law that was truly drawn from, so it need not be cut as p is."""
    p = Toy((P,), (Q,), top_k=2).p(())
    decide = lambda x, branches: kept(min(F(1), p[x] / Q[x]), positive(p, Q), x, branches)  # noqa: E731
    assert one_token(p, lambda branches: branches.draw(Q), decide) == 0


def test_control_struck_duplicates_are_harmless() -> None:
    tree = DraftTree.of((0, 1, 1), (-1, 0, 0))
    law = law_of(lambda branches: (_said(tree, rule_for(tree).function(tree, [P, P, P], None, branches)),))
    assert law == {(token,): one for token, one in enumerate(P)}


def _said(tree: DraftTree, result: VerifyResult) -> int:
    return tree.token_list[result.path[0]] if result.path else result.bonus_token


def test_control_one_draw_a_path_is_not_right_where_one_a_node_is() -> None:
    """Each path of a star draws for itself and the first match wins: what the target rarely says is favoured."""

    def run(branches: Branches) -> Text:
        for token in (1, 2):
            if branches.draw(P) == token:
                return (token,)
        return (branches.draw(P),)

    assert total_variation(law_of(run), {(token,): one for token, one in enumerate(P)}) > F(1, 10)


@pytest.mark.parametrize("claim", ["kv.dead_rows", "kv.commit", "tree.logits"])
def test_control_garbage_beyond_the_length_is_no_fault(claim: str) -> None:
    """Preallocated caches are born full of it, and this one is filled with NaN before every forward."""
    control = CONTROLS["nan_beyond_the_length"].make()
    assert session_on(control).judge(claim, "tiny-fp64").verdict == EQUAL


def test_control_a_ring_longer_than_its_window_is_by_design() -> None:
    """A block of S rows needs room for S - 1 more than the window."""
    config = LlamaConfig(31, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, windows=(3, 3))
    model = tiny_llama(config, seed=0)
    decoder = CONTROLS["ring_longer_than_its_window"].make().build(model, None, cache="ring")
    decoder.prefill(list(range(12)))
    decoder.forward_tree(DraftTree.of((12, 1, 2, 3, 4, 5), (-1, 0, 0, 1, 1, 2)))
    decoder.commit([2, 5])
    held = decoder.kv(0)[0].shape[1]
    assert 2 < held <= decoder.cache_len


def test_every_branch_is_gone_through_once() -> None:
    def run(branches: Branches) -> Text:
        return (branches.draw((F(1, 2), F(1, 4), F(1, 4))), int(branches.accept(F(1, 3))))

    expected = {
        (a, b): p * q for a, p in enumerate((F(1, 2), F(1, 4), F(1, 4))) for b, q in ((1, F(1, 3)), (0, F(2, 3)))
    }
    assert law_of(run) == expected
