"""The acceptance rules by exact enumeration in fractions: what each emits, how much it keeps, and what breaks it.

Laws are random and depend on the text; the joint law of the path, the bonus token and what the target says after them
is compared, so equality is equality. The enumeration stands here on its own, apart from `specbench.law`.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from torch import Tensor

import specbench.reference.verify.block
import specbench.reference.verify.chain
import specbench.reference.verify.deterministic
import specbench.reference.verify.k_seq
import specbench.reference.verify.recursive
import specbench.reference.verify.traversal
from specbench.protocols import SeededCoins
from specbench.reference.drafters.gumbel import GumbelDrafter
from specbench.reference.model import LlamaConfig, tiny_llama
from specbench.reference.sampling import probs
from specbench.reference.verify import RULES, CoinChance, Law, SharedNoise, rule_for, rule_named
from specbench.reference.verify.entropy import deferred_rejection
from specbench.reference.verify.k_seq import valid_rho
from specbench.reference.verify.laws import ratio, residual, struck
from specbench.reference.verify.relaxed import relaxed_acceptance
from specbench.reference.verify.typical import typical_acceptance
from specbench.tree import DraftTree, Proposal, chain, root_only
from specbench.types import Sampling, VerifyResult

F = Fraction
V = 3
Text = tuple[int, ...]
LOSSLESS = [name for name, rule in RULES.items() if rule.is_lossless and name != "greedy"]
LOSSY = [name for name, rule in RULES.items() if not rule.is_lossless]
SHAPES = {"chain of 2": (1, 1), "chain of 3": (1, 1, 1), "(2, 1)": (2, 1), "(2, 2)": (2, 2)}
SEEDS = range(6)


def few(widths: Sequence[int]) -> range:
    """Seeds for a shape: the widest has thousands of outcomes."""
    return SEEDS if math.prod(widths) < 4 else SEEDS[:2]


# ---- enumeration: a decision is a branch of a script


class Script:
    """Decisions by a list of choices; behind its end the first possible branch is taken and the others noted."""

    def __init__(self, choices: Sequence[int]) -> None:
        self._choices, self.made, self.others, self.weight = choices, list[int](), list[list[int]](), F(1)
        self._raced: dict[int, tuple[Law, int]] = {}

    def accept(self, probability: Fraction) -> bool:
        clipped = min(F(1), max(F(0), probability))
        return self.draw([1 - clipped, clipped]) == 1

    def draw(self, law: Law) -> int:
        total, possible = sum(law), [token for token, weight in enumerate(law) if weight > 0]
        if len(self.made) < len(self._choices):
            choice = self._choices[len(self.made)]
        else:
            choice = possible[0]
            self.others += [[*self.made, other] for other in possible[1:]]
        self.made.append(choice)
        self.weight *= law[choice] / total
        return choice

    def race(self, law: Law, place: int) -> int:
        """The second who races at a place is drawn given what the first picked with the same noise."""
        if place not in self._raced:
            self._raced[place] = (law, self.draw(law))
            return self._raced[place][1]
        first, pick = self._raced[place]
        return self.draw([picked_both(law, first, token, pick) for token in range(len(law))])


def picked_both(p: Law, q: Law, i: int, k: int) -> Fraction:
    """P(argmax p/e = i and argmax q/e = k) for a vector e of independent exponentials.

    i = k: e_i is the first of exponentials with rates max(p_j/p_i, q_j/q_i). Otherwise r = e_k/e_i lies between
    p_k/p_i and q_k/q_i, every other e_j above e_i max(p_j/p_i, r q_j/q_k), and the density of r is the inverse square
    of a sum of those rates, integrated piece by piece.
    """
    if not p[i] or not q[k]:
        return F(0)
    others = [j for j in range(len(p)) if j not in (i, k)]
    if i == k:
        return 1 / (1 + sum(max(p[j] / p[i], q[j] / q[i]) for j in others))
    low, high = p[k] / p[i], (q[k] / q[i] if q[i] else None)
    if high is not None and low >= high:
        return F(0)
    lines = [(p[j] / p[i], q[j] / q[k]) for j in others]
    bends = sorted(a / b for a, b in lines if b and low < a / b and (high is None or a / b < high))
    total = F(0)
    for start, end in itertools.pairwise([low, *bends, high]):
        probe = start + 1 if end is None else (start + end) / 2
        flat = 1 + sum(a for a, b in lines if a >= b * probe)
        slope = 1 + sum(b for a, b in lines if a < b * probe)
        total += 1 / (slope * (flat + slope * start))
        total -= 0 if end is None else 1 / (slope * (flat + slope * end))
    return total


def outcomes(run: Callable[[Script], object]) -> Iterator[tuple[Fraction, object]]:
    todo: list[list[int]] = [[]]
    while todo:
        script = Script(todo.pop())
        outcome = run(script)
        yield script.weight, outcome
        todo += script.others


# ---- toy models


@dataclass(frozen=True)
class Toy:
    """Random laws over three tokens for every text; some probabilities are zero."""

    seed: int

    def p(self, text: Text) -> Law:
        return drawn_law(f"{self.seed} p {text}")

    def q(self, text: Text) -> Law:
        return drawn_law(f"{self.seed} q {text}")


@functools.cache
def drawn_law(name: str) -> tuple[Fraction, ...]:
    generator = random.Random(name)
    weights = [0]
    while sum(weights) == 0:
        weights = [generator.randrange(6) for _ in range(V)]
    return tuple(F(weight, sum(weights)) for weight in weights)


@functools.cache
def tree_of(tokens: Text, parents: Text, proposal: Proposal) -> DraftTree:
    return DraftTree(torch.tensor(tokens), torch.tensor(parents), None, proposal)


def grow(toy: Toy, widths: Sequence[int], proposal: Proposal, script: Script, *, races: bool) -> tuple[DraftTree, list]:
    """A tree drafted from q as the proposal says, and the text of each node."""
    tokens, parents, texts, level = [0], [-1], [()], [0]
    for depth, width in enumerate(widths):
        below = []
        for node in level:
            left = toy.q(texts[node])
            for rank in range(width):
                if not sum(left):
                    break
                if proposal == "deterministic":
                    token = sorted(range(V), key=lambda one, q=left: (-q[one], one))[rank]
                elif races:
                    token = script.race(left, depth + 1)
                else:
                    token = script.draw(left)
                if proposal == "without_replacement":
                    left = [F(0) if one == token else weight for one, weight in enumerate(left)]
                below.append(len(tokens))
                tokens.append(token)
                parents.append(node)
                texts.append((*texts[node], token))
        level = below
    return tree_of(tuple(tokens), tuple(parents), proposal), texts


def judged(
    function: Callable, toy: Toy, widths: Sequence[int], proposal: Proposal, *, races: bool = False
) -> Iterator[tuple[Fraction, tuple[Text, int]]]:
    """Every outcome of one round: its probability, the text it emits and how many drafts it kept."""

    def run(script: Script) -> tuple[Text, int]:
        tree, texts = grow(toy, widths, proposal, script, races=races)
        q = None if proposal == "deterministic" else [toy.q(text) for text in texts]
        result = function(tree, [toy.p(text) for text in texts], q, script)
        assert tree.is_path(result.path)
        return (*(tree.token_list[node] for node in result.path), result.bonus_token), len(result.path)

    return outcomes(run)


def distance(
    function: Callable, toy: Toy, widths: Sequence[int], proposal: Proposal, *, races: bool = False
) -> Fraction:
    """Total variation of one round, completed by the target to one token more than the tree is deep, to the target."""
    length = len(widths) + 1
    law: Counter[Text] = Counter()
    for weight, (text, _) in judged(function, toy, widths, proposal, races=races):
        for rest in itertools.product(range(V), repeat=length - len(text)):
            law[(*text, *rest)] += weight * chance_of(toy, text, rest)
    assert sum(law.values()) == 1
    plain = {text: chance_of(toy, (), text) for text in itertools.product(range(V), repeat=length)}
    return sum((abs(law[text] - plain[text]) for text in plain), F(0)) / 2


def chance_of(toy: Toy, text: Text, rest: Text) -> Fraction:
    return math.prod((toy.p((*text, *rest[:idx]))[token] for idx, token in enumerate(rest)), start=F(1))


def mean_kept(
    function: Callable, toy: Toy, widths: Sequence[int], proposal: Proposal, *, races: bool = False
) -> Fraction:
    return sum((weight * num for weight, (_, num) in judged(function, toy, widths, proposal, races=races)), F(0))


# ---- lossless rules


CASES = [
    pytest.param(name, proposal, widths, id=f"{name}-{proposal}-{shape}")
    for name in LOSSLESS
    for proposal in RULES[name].proposals
    for shape, widths in SHAPES.items()
    if not (RULES[name].only_chains and max(widths) > 1)
]


@pytest.mark.parametrize(("name", "proposal", "widths"), CASES)
def test_a_lossless_rule_emits_exactly_the_targets_joint_law(name, proposal, widths):
    distances = [distance(RULES[name].verify, Toy(seed), widths, proposal) for seed in few(widths)]
    assert set(distances) == {0}


@pytest.mark.parametrize("widths", [(1, 1), (1, 1, 1)], ids=str)
def test_the_gumbel_rule_is_exact_when_drafter_and_target_share_their_noise(widths):
    distances = [distance(RULES["gumbel"].verify, Toy(seed), widths, "iid", races=True) for seed in SEEDS]
    assert set(distances) == {0}


@pytest.mark.parametrize("seed", range(6))
def test_the_closed_form_of_a_shared_race_has_both_laws_as_margins(seed):
    p, q = drawn_law(f"{seed} margin p"), drawn_law(f"{seed} margin q")
    joint = [[picked_both(p, q, i, k) for k in range(V)] for i in range(V)]
    assert ([sum(row) for row in joint], [sum(row) for row in zip(*joint, strict=True)]) == (list(p), list(q))


def test_the_gumbel_rule_keeps_a_draft_as_often_as_the_closed_form_says():
    """p = (1/2, 1/2, 0), q = (1/4, 1/2, 1/4): 1/(1 + 2) for token 0, with q_1/q_0 = 2; 1/(1 + 1 + 1/2) for token 1
    with p_0/p_1 = 1; and q_2 counts in both: 1/(1 + 2 + 1) + 1/(1 + 1 + 1/2)."""
    p, q = [F(1, 2), F(1, 2), F(0)], [F(1, 4), F(1, 2), F(1, 4)]
    assert sum(picked_both(p, q, token, token) for token in range(V)) == F(1, 4) + F(2, 5)


# ---- what is kept, by formulas


@pytest.mark.parametrize("seed", SEEDS)
def test_one_draft_is_kept_with_the_overlap_of_p_and_q(seed):
    toy = Toy(seed)
    overlap = sum(map(min, toy.p(()), toy.q(())))
    kept = {
        name: mean_kept(RULES[name].verify, toy, (1,), "iid")
        for name in ("chain", "recursive", "k_seq", "block", "traversal")
    }
    assert kept == dict.fromkeys(kept, overlap)


@pytest.mark.parametrize("name", ["deterministic", "sample_and_match", "gumbel"])
@pytest.mark.parametrize("seed", SEEDS)
def test_chosen_siblings_are_kept_with_the_targets_probability_of_them(name, seed):
    toy = Toy(seed)
    best = sorted(range(V), key=lambda token: (-toy.q(())[token], token))[:2]
    assert mean_kept(RULES[name].verify, toy, (2,), "deterministic") == sum(toy.p(())[token] for token in best)


@pytest.mark.parametrize("seed", SEEDS)
def test_k_seq_keeps_one_of_k_with_the_chance_that_its_rho_gives(seed):
    toy = Toy(seed)
    p, q = toy.p(()), toy.q(())
    rho = valid_rho(p, q, 2)
    beta = sum(min(draft, target / rho) for target, draft in zip(p, q, strict=True))
    assert mean_kept(RULES["k_seq"].verify, toy, (2,), "iid") == 1 - (1 - beta) ** 2


@pytest.mark.parametrize("seed", SEEDS)
def test_traversal_of_a_chain_is_block_verification(seed):
    def law(name: str) -> Counter:
        counts: Counter = Counter()
        for weight, outcome in judged(RULES[name].verify, Toy(seed), (1, 1, 1), "iid"):
            counts[outcome] += weight
        return +counts

    assert law("traversal") == law("block")


def test_block_verification_keeps_more_than_judging_one_by_one():
    means = [[mean_kept(RULES[name].verify, Toy(seed), (1, 1), "iid") for seed in SEEDS] for name in ("block", "chain")]
    assert all(block >= single for block, single in zip(*means, strict=True)) and means[0] != means[1]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", SEEDS)
def test_rho_is_valid_and_hardly_larger_than_it_must_be(k, seed):
    p, q = drawn_law(f"{seed} rho p"), drawn_law(f"{seed} rho q")

    def surplus(rho: Fraction) -> Fraction:
        beta = sum(min(draft, target / rho) for target, draft in zip(p, q, strict=True))
        return rho * beta - (1 - (1 - beta) ** k)

    rho = valid_rho(p, q, k)
    assert surplus(rho) >= 0 and (rho == 1 or surplus(rho - F(1, 1000)) < 0)


def test_rho_by_hand():
    """p = (1, 0), q = (1/2, 1/2), k = 2: beta = 1/2 for every rho up to 2, so 3/4 <= rho/2 asks for rho >= 3/2."""
    assert (valid_rho([1.0, 0.0], [0.5, 0.5], 2), valid_rho([F(1), F(0)], [F(1, 2)] * 2, 2)) == (
        pytest.approx(1.5, abs=1e-11),
        F(3, 2),
    )


# ---- lossy rules


@pytest.mark.parametrize("name", LOSSY)
def test_a_lossy_rule_shows_a_distance(name):
    """For drafts that were drawn; three deep, so that the deferred rejection has its window."""
    distances = [distance(RULES[name].verify, Toy(seed), (1, 1, 1), "iid") for seed in range(8)]
    assert max(distances) > 0


HALF = [0.5, 0.3, 0.2]
SURE = [0.9, 0.06, 0.04]


def test_typical_acceptance_by_hand():
    """HALF has entropy 1.03 and the threshold min(.09, .3 / 2.8) = .09; SURE has 0.39, min(.09, .2) = .09 as well."""
    tree = chain([0, 2, 1, 0])
    assert typical_acceptance()(tree, [HALF, SURE, HALF, SURE], None, CoinChance(Uniform(0.5))) == VerifyResult((1,), 0)


def test_typical_acceptance_lowers_its_threshold_with_the_entropy():
    """A flat law over 20 tokens has entropy ln 20: .3/20 = .015 lies below each probability .05, and .09 above."""
    flat = [[0.05] * 20] * 2
    results = [
        typical_acceptance(delta=delta)(chain([0, 7]), flat, None, CoinChance(Uniform(0.5))) for delta in (0.3, 9)
    ]
    assert results == [VerifyResult((1,), 0), VerifyResult((), 0)]


def test_typical_acceptance_takes_the_longest_path_and_the_likeliest_of_those():
    """Node 1 is likelier, but below node 2 two paths go on: node 4 has .3 and node 5 .5."""
    tree = DraftTree.of([0, 0, 1, 2, 1, 0], [-1, 0, 0, 1, 2, 2])
    laws = [HALF, SURE, HALF, HALF, HALF, SURE]
    assert typical_acceptance()(tree, laws, None, CoinChance(Uniform(0.5))) == VerifyResult((2, 5), 0)


@pytest.mark.parametrize(
    ("top_n", "delta", "expected"),
    [(10, 0.6, (1,)), (2, 0.6, ()), (10, 0.25, ()), (3, 0.31, (1,)), (10, 1.0, (1, 2))],
    ids=str,
)
def test_relaxed_acceptance_by_hand(top_n, delta, expected):
    """Token 2 is third in HALF, .3 below the first; token 1 is second in SURE, .84 below."""
    rule = relaxed_acceptance(top_n=top_n, delta=delta)
    assert rule(chain([0, 2, 1]), [HALF, SURE, HALF], None, CoinChance(Uniform(0.5))).path == expected


@pytest.mark.parametrize(
    ("window", "threshold", "expected"),
    [
        (2, 0.3, VerifyResult((1, 2, 3), 0)),
        (3, 0.3, VerifyResult((), 0)),
        (2, 1.02, VerifyResult((1, 2, 3), 0)),
        (2, 1.04, VerifyResult((), 0)),
    ],
    ids=str,
)
def test_deferred_rejection_by_hand(window, threshold, expected):
    """The first draft has p/q = .2/.8 and is refused by coins of .5; the two behind it have p = q. H(HALF) = 1.03."""
    tree = DraftTree(torch.tensor([0, 2, 1, 0]), torch.tensor([-1, 0, 1, 2]), None, "iid")
    q = [[0.1, 0.1, 0.8], SURE, HALF, HALF]
    rule = deferred_rejection(window=window, threshold=threshold)
    assert rule(tree, [HALF, SURE, HALF, SURE], q, CoinChance(Uniform(0.5))) == expected


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((HALF, [0.1, 0.1, 0.8]), (HALF, HALF), (1, 2)),
        ((HALF, [0.1, 0.1, 0.8]), (HALF, [0.1, 0.1, 0.8]), ()),
        (([0.5, 0.5, 0.0], [0.1, 0.1, 0.8]), (HALF, HALF), ()),
        ((HALF, [0.5, 0.5, 0.0]), (HALF, HALF), ()),
    ],
    ids=["deferred", "the next is refused too", "p is zero", "q is zero"],
)
def test_a_rejection_is_deferred_only_for_a_possible_draft_with_a_kept_one_behind_it(first, second, expected):
    tree = tree_of((0, 2, 2), (-1, 0, 1), "iid")
    p, q = zip(first, second, (HALF, HALF), strict=True)
    assert deferred_rejection(window=1)(tree, p, q, CoinChance(Uniform(0.5))).path == expected


# ---- planted mistakes


def one_hot_residual(tree, target_probs, draft_probs, chance):
    """A chain drawn from q, judged by p/q, whose refused draft is struck from p as if it had been chosen."""
    node = 0
    for child in range(1, tree.num_nodes):
        p, q, token = target_probs[node], draft_probs[node], tree.token_list[child]
        if not chance.accept(ratio(p[token], q[token])):
            left = struck(p, token)
            return VerifyResult(tuple(range(1, child)), chance.draw(left if any(left) else p))
        node = child
    return VerifyResult(tuple(range(1, tree.num_nodes)), chance.draw(target_probs[node]))


def ratio_on_a_chosen_tree(tree, target_probs, draft_probs, chance):
    return RULES["recursive"].function(
        tree, target_probs, [TOY.q(tuple(tree.path_tokens(i)[1:])) for i in range(tree.num_nodes)], chance
    )


TOY = Toy(1)
verify = specbench.reference.verify
# name: rule, proposal, widths, the attribute that is replaced, and with what
PLANTED = {
    "resample from p": ("chain", "iid", (1, 1), (verify.chain, "residual"), lambda p, q: list(p)),
    "no renormalised q": (
        "without_replacement",
        "without_replacement",
        (2, 2),
        (verify.recursive, "struck"),
        lambda q, token: [F(0) if one == token else weight for one, weight in enumerate(q)],
    ),
    "rejected sibling not zeroed": (
        "deterministic",
        "deterministic",
        (2, 2),
        (verify.deterministic, "struck"),
        lambda p, token: list(p),
    ),
    "block verification with a token-wise residual": (
        "block",
        "iid",
        (1, 1, 1),
        (verify.block, "residual"),
        lambda p, q, scale: residual(p, q),
    ),
    "traversal with a token-wise residual": (
        "traversal",
        "iid",
        (2, 2),
        (verify.traversal, "residual"),
        lambda p, q, scale: residual(p, q),
    ),
    "traversal with a q that keeps what was refused": (
        "traversal",
        "without_replacement",
        (2, 2),
        (verify.traversal, "struck"),
        lambda q, token: list(q),
    ),
    "k-SEQ with another rho in its residual": (
        "k_seq",
        "iid",
        (2, 1),
        (verify.k_seq, "_residual"),
        lambda p, q, rho, k: verify.laws.residual(p, q),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_shows_a_distance(name, monkeypatch):
    rule, proposal, widths, (module, attribute), wrong = PLANTED[name]
    monkeypatch.setattr(module, attribute, wrong)
    assert max(distance(RULES[rule].verify, Toy(seed), widths, proposal) for seed in few(widths)) > 0


def test_q_conditioned_on_siblings_drawn_with_replacement_shows_a_distance():
    assert max(distance(RULES["without_replacement"].function, Toy(seed), (2, 1), "iid") for seed in SEEDS) > 0


def test_a_one_hot_residual_for_drawn_drafts_shows_a_distance():
    assert max(distance(one_hot_residual, Toy(seed), (1, 1), "iid") for seed in SEEDS) > 0


def test_the_ratio_test_on_chosen_drafts_shows_a_distance():
    assert distance(ratio_on_a_chosen_tree, TOY, (2, 2), "deterministic") > F(1, 10)


# ---- odd laws and odd coins


class Uniform:
    """Coins that always fall alike."""

    def __init__(self, value: float) -> None:
        self._value = value

    def uniform(self, num: int) -> Tensor:
        return torch.full((num,), self._value, dtype=torch.float64)

    def exponential(self, place: int, vocab_size: int) -> Tensor:
        return torch.arange(1, vocab_size + 1, dtype=torch.float64) * (1 + self._value)


ODD = {
    "p equals q": ([0.5, 0.5, 0.0], [0.5, 0.5, 0.0]),
    "disjoint supports": ([0.5, 0.5, 0.0], [0.0, 0.0, 1.0]),
    "q zero for the draft": ([0.25, 0.25, 0.5], [0.0, 0.0, 1.0]),
    "q is all zeros": ([0.5, 0.0, 0.5], [0.0, 0.0, 0.0]),
    "one-hot p, flat q": ([0.0, 1.0, 0.0], [1 / 3, 1 / 3, 1 / 3]),
    "flat p, one-hot q": ([1 / 3, 1 / 3, 1 / 3], [0.0, 1.0, 0.0]),
    "both one-hot": ([0.0, 1.0, 0.0], [0.0, 1.0, 0.0]),
    "p equals q but for rounding": ([0.1 + 0.2, 0.7, 0.0], [0.3, 0.7, 0.0]),
}
LEAST, LARGEST = 0.0, 1 - 2**-53


@pytest.mark.parametrize("uniform", [LEAST, 0.5, LARGEST])
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", RULES)
def test_no_rule_emits_what_the_target_cannot_say(name, odd, uniform):
    """All trees of two levels, drafts that q cannot give included; nothing divides by zero."""
    p, q = ODD[odd]
    impossible = []
    for proposal in RULES[name].proposals:
        for parents in ((-1, 0, 1), (-1, 0, 0, 1, 1)):
            if RULES[name].only_chains and parents != (-1, 0, 1):
                continue
            for drafts in itertools.product(range(V), repeat=len(parents) - 1):
                tree = tree_of((0, *drafts), parents, proposal)
                result = RULES[name].verify(tree, [p] * len(parents), [q] * len(parents), CoinChance(Uniform(uniform)))
                emitted = [*(tree.token_list[node] for node in result.path), result.bonus_token]
                impossible += [(drafts, emitted)] if any(p[token] == 0 for token in emitted) else []
    assert impossible == []


@pytest.mark.parametrize("name", [name for name in RULES if "iid" in RULES[name].proposals])
def test_the_root_alone_is_plain_decoding(name):
    """Every rule but the argmax ones draws its bonus from p, by the inverse of the cumulative sums or by race."""
    tree = DraftTree(torch.tensor([0]), torch.tensor([-1]), None, "iid")
    result = RULES[name].verify(tree, [[0.2, 0.3, 0.5]], [[0.0] * 3], CoinChance(Uniform(0.6)))
    assert result == VerifyResult((), 2 if name != "gumbel" else 0)


# ---- what is refused


@pytest.mark.parametrize(
    ("name", "tree", "message"),
    [
        (
            "recursive",
            chain([0, 1]),
            "proposal = 'deterministic' must be iid for the rule recursive: take the rule deterministic",
        ),
        (
            "chain",
            tree_of((0, 1, 2), (-1, 0, 0), "without_replacement"),
            "tree has a node with 2 children, must be a chain for the rule chain: take the rule without_replacement",
        ),
        (
            "block",
            tree_of((0, 1), (-1, 0), "iid"),
            "draft_probs = None must be N laws q for the rule block: have the drafter name what it drew from, or take "
            "a rule that needs no q (deterministic, sample_and_match)",
        ),
    ],
    ids=["proposal", "wide tree", "no q"],
)
def test_a_rule_refuses_what_it_is_not_made_for(name, tree, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        RULES[name].verify(tree, [HALF] * tree.num_nodes, None, CoinChance(Uniform(0.5)))


@pytest.mark.parametrize("num_columns", [2, 4], ids=["smaller", "larger"])
def test_a_drafter_of_another_vocabulary_must_name_its_law_over_the_targets(num_columns):
    message = (
        f"draft_probs has {num_columns} columns, must have 3 as the target's logits: have a drafter of another "
        "vocabulary name its law over the target's ids, 0 where it has none"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        RULES["chain"].verify(
            tree_of((0, 0), (-1, 0), "iid"), [HALF] * 2, [[1.0] * num_columns] * 2, CoinChance(Uniform(0.5))
        )


def test_an_unknown_rule_is_answered_with_near_names_and_all_names():
    message = f"rule = 'traversel' must be one of {', '.join(RULES)}; did you mean traversal?"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        rule_named("traversel")


@pytest.mark.parametrize(
    ("proposal", "name"),
    [("deterministic", "deterministic"), ("iid", "recursive"), ("without_replacement", "without_replacement")],
)
def test_each_proposal_has_its_usual_rule(proposal, name):
    assert rule_for(tree_of((0, 1), (-1, 0), proposal)).name == name


def test_a_race_without_noise_is_refused():
    message = (
        "coins = SeededCoins must have exponential(place, vocab_size), noise that drafter and target share: take "
        "SharedNoise(seed)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        CoinChance(SeededCoins(0)).race(HALF, 1)


def test_a_law_without_mass_is_refused():
    message = "law of 2 tokens has no token of positive probability to draw: look at who made it"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        CoinChance(SeededCoins(0)).draw([0.0, 0.0])


# ---- chance by coins, and noise that is shared


@pytest.mark.parametrize(
    ("uniform", "probability", "expected"),
    [
        (0.0, 0.0, False),
        (0.0, 1e-300, True),
        (0.5, 0.5, False),
        (0.49, 0.5, True),
        (LARGEST, 1.0, True),
        (0.9, 7.0, True),
    ],
)
def test_a_coin_below_the_probability_accepts(uniform, probability, expected):
    assert CoinChance(Uniform(uniform)).accept(probability) is expected


def test_a_race_is_the_argmax_with_gumbel_noise_of_its_place():
    """argmax(log p + g) with g = -log e, for many places."""
    law, noise = [0.1, 0.0, 0.6, 0.3], SharedNoise(5)
    picks = [CoinChance(SharedNoise(5), root_place=40).race(law, place) for place in range(200)]
    gumbel = [-noise.exponential(40 + place, 4).log() for place in range(200)]
    assert picks == [int((torch.tensor(law).double().log() + one).argmax()) for one in gumbel]


def test_noise_is_a_function_of_seed_and_place_alone():
    tossed = SharedNoise(3)
    tossed.uniform(1000)
    assert torch.equal(tossed.exponential(7, 5), SharedNoise(3).exponential(7, 5))


def test_noise_of_another_place_or_seed_is_another():
    noises = [SharedNoise(seed).exponential(place, 5) for seed in (0, 1, 11) for place in (0, 1, 11)]
    assert len({tuple(one.tolist()) for one in noises}) == 9


def test_noise_is_exponential():
    """20,000 values of one place each; mean 1 and P(e > 2) = exp(-2), four standard deviations."""
    values = torch.cat([SharedNoise(1).exponential(place, 4) for place in range(5000)])
    num_above = int((values > 2).sum())
    expected = 20_000 * math.exp(-2)
    assert (
        abs(values.mean() - 1) < 4 / 20_000**0.5
        and abs(num_above - expected) < 4 * (expected * (1 - math.exp(-2))) ** 0.5
    )


# ---- the Gumbel drafter


MODEL = tiny_llama(LlamaConfig(31, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8), seed=0)
SAMPLING = Sampling(temperature=1.5, top_k=12)
PROMPT = [3, 1, 4, 1, 5]


def drafted(gamma: int, context: list[int], seed: int = 9) -> DraftTree:
    drafter = GumbelDrafter(MODEL, gamma=gamma)
    return drafter.draft(context, max_nodes=8, max_depth=8, sampling=SAMPLING, coins=SharedNoise(seed))


def decoded(draft: Callable[[list[int]], DraftTree], num: int) -> tuple[list[int], int]:
    """Rounds of the rule `gumbel` over the tiny model: the first `num` tokens and how many drafts were kept."""
    model, text, num_kept = MODEL, list(PROMPT), 0
    while len(text) < len(PROMPT) + num:
        tree = draft(text)
        rows = [
            probs(model.logits([*text[:-1], *tree.path_tokens(node)])[-1], SAMPLING).tolist()
            for node in range(tree.num_nodes)
        ]
        result = RULES["gumbel"].verify(tree, rows, None, CoinChance(SharedNoise(9), root_place=len(text) - 1))
        num_kept += len(result.path)
        text += [*(tree.token_list[node] for node in result.path), result.bonus_token]
    return text[len(PROMPT) : len(PROMPT) + num], num_kept


def test_the_output_under_gumbel_coupling_is_bit_equal_with_any_drafter_and_with_none():
    plain, _ = decoded(lambda text: root_only(text[-1]), 24)
    unrelated = decoded(lambda text: DraftTree.of([text[-1], 1, 2, 1, 3], [-1, 0, 0, 1, 1]), 24)[0]
    other_noise = decoded(lambda text: drafted(3, text, seed=10), 24)[0]
    assert [decoded(lambda text: drafted(3, text), 24)[0], unrelated, other_noise] == [plain] * 3


def test_the_target_as_its_own_gumbel_drafter_is_always_right():
    """24 tokens in rounds of 3 drafts and a bonus each."""
    assert decoded(lambda text: drafted(3, text), 24)[1] == 18


def test_a_gumbel_drafter_is_the_argmax_of_q_and_the_noise_of_each_place():
    model, noise = MODEL, SharedNoise(9)
    text = list(PROMPT)
    for place in range(5, 8):
        q = probs(model.logits(text)[-1], SAMPLING)
        text.append(int((q.log() - noise.exponential(place, len(q)).log()).argmax()))
    assert drafted(3, PROMPT).token_list == text[4:]


@pytest.mark.parametrize(("max_nodes", "max_depth", "num"), [(8, 8, 4), (2, 8, 2), (8, 1, 1), (0, 8, 0)])
def test_a_gumbel_drafter_keeps_to_its_budget(max_nodes, max_depth, num):
    drafter = GumbelDrafter(MODEL, gamma=4)
    tree = drafter.draft(PROMPT, max_nodes=max_nodes, max_depth=max_depth, sampling=SAMPLING, coins=SharedNoise(0))
    assert tree.num_drafts == num


def test_a_gumbel_drafter_names_what_it_picked_from():
    tree = drafted(2, PROMPT)
    assert tree.draft_probs is not None and tree.draft_probs.sum(dim=1).tolist() == pytest.approx([1.0, 1.0, 0.0])


def test_a_gumbel_drafter_asks_for_shared_noise():
    with pytest.raises(ValueError, match=r"^coins = SeededCoins must have exponential"):
        GumbelDrafter(MODEL).draft(PROMPT, max_nodes=4, max_depth=4, sampling=SAMPLING, coins=SeededCoins(0))
