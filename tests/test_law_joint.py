"""specbench.law.joint and toys: lossless rules give the target's joint law exactly, planted wrong ones do not."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest

from specbench.law.enumeration import Enumeration, Law, outcomes
from specbench.law.joint import draft_law, joint_law, round_law, target_law, total_variation
from specbench.law.survey import draftings
from specbench.law.toys import START, Drafting, Parents, Toy, depth_of, draft, is_chain
from specbench.reference.verify.chance import RuleFn
from specbench.reference.verify.rules import RULES
from specbench.tree import DraftTree
from specbench.types import VerifyResult

F = Fraction
ONE: Parents = (-1, 0)
CHAIN: Parents = (-1, 0, 1)
UNEVEN: Parents = (-1, 0, 0, 1)
TWO_TWO: Parents = (-1, 0, 0, 1, 1, 2, 2)
LOSSLESS = [(name, drafting) for name, rule in RULES.items() if rule.is_lossless for drafting in draftings(rule)]


def variation(function: RuleFn, toy: Toy, shape: Parents, drafting: Drafting, num_tokens: int) -> Fraction:
    law = joint_law(function, toy, shape, drafting, num_tokens)
    return total_variation(law, target_law(toy, num_tokens))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "drafting"), LOSSLESS)
def test_lossless_rule_has_the_targets_joint_law_over_many_rounds(name: str, drafting: Drafting, seed: int) -> None:
    rule, toy = RULES[name], Toy(3, seed, greedy=name == "greedy")
    shape = CHAIN if rule.only_chains or drafting == "race" else UNEVEN
    assert variation(rule.verify, toy, shape, drafting, 4) == F(0)


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if not rule.is_lossless])
def test_lossy_rule_has_another_law(name: str) -> None:
    shape = (-1, 0, 1, 2)
    assert all(variation(RULES[name].verify, Toy(3, seed), shape, "iid", 4) > 0 for seed in range(3))


def test_rounds_that_are_left_are_completed_by_plain_draws() -> None:
    """One round of the rule that accepts nothing and says 0; then p: P(0, x, y) is p(x | 0) p(y | 0, x)."""
    toy = Toy(3, 1)
    found = joint_law(lambda *rest: VerifyResult((), 0), toy, CHAIN, "iid", 3, num_rounds=1)
    expected = {
        (0, x, y): toy.p((*START, 0))[x] * toy.p((*START, 0, x))[y]
        for x in range(3)
        for y in range(3)
        if toy.p((*START, 0))[x] * toy.p((*START, 0, x))[y]
    }
    assert found == expected


def test_round_emits_its_whole_path_and_the_token_behind_it() -> None:
    """The rule that accepts whatever is drafted and then says 2: P(x, 2, y) is q(x) q(y | 0, x, 2)."""
    toy = Toy(3, 1)
    found = joint_law(lambda *rest: VerifyResult((1,), 2), toy, ONE, "iid", 3)
    q = {(x, 2, y): toy.q(START)[x] * toy.q((*START, x, 2))[y] for x in range(3) for y in range(3)}
    assert found == {text: mass for text, mass in q.items() if mass}


def test_drafter_and_target_that_race_agree_as_their_closed_form_says() -> None:
    """P(both pick i) = 1 / sum over k of max(p_k/p_i, q_k/q_i) (Daliri, Musco and Suresh)."""

    def agreement(p: Law, q: Law) -> Fraction:
        both = [(a, b) for a, b in zip(p, q, strict=True) if a and b]
        return sum((1 / sum(max(c / a, d / b) for c, d in zip(p, q, strict=True)) for a, b in both), F(0))

    toys = [Toy(4, seed) for seed in range(8)]
    found = [round_law(RULES["gumbel"].verify, toy, START, ONE, "race").expected_accepted for toy in toys]
    assert found == [agreement(toy.p(START), toy.q(START)) for toy in toys]


def test_single_draft_is_accepted_with_the_overlap_of_p_and_q() -> None:
    toys = [Toy(size, seed) for size in (3, 4, 5) for seed in range(5)]
    found = [round_law(RULES["chain"].verify, toy, START, ONE, "iid").expected_accepted for toy in toys]
    assert found == [sum(map(min, toy.p(START), toy.q(START))) for toy in toys]


def test_total_variation_by_hand() -> None:
    """|1/2 - 1/4| + |1/2 - 0| + |0 - 3/4| = 3/2, half of it 3/4."""
    assert total_variation({"a": F(1, 2), "b": F(1, 2)}, {"a": F(1, 4), "c": F(3, 4)}) == F(3, 4)


def _residual(p: Law, q: Law) -> list[Fraction]:
    left = [max(one - other, F(0)) for one, other in zip(p, q, strict=True)]
    return [one / sum(left) for one in left] if any(left) else list(p)


def redraws_from_p(
    tree: DraftTree, target_probs: Sequence[Law], draft_probs: Sequence[Law] | None, chance: Enumeration
) -> VerifyResult:
    assert draft_probs is not None
    for node in range(1, tree.num_nodes):
        token = tree.token_list[node]
        if not chance.accept(target_probs[node - 1][token] / draft_probs[node - 1][token]):
            return VerifyResult(tuple(range(1, node)), chance.draw(target_probs[node - 1]))
    return VerifyResult(tuple(range(1, tree.num_nodes)), chance.draw(target_probs[-1]))


def tries_siblings(
    tree: DraftTree,
    target_probs: Sequence[Law],
    draft_probs: Sequence[Law] | None,
    chance: Enumeration,
    *,
    fault: str,
) -> VerifyResult:
    """Recursive rejection with one thing wrong, written here and not taken from the reference."""
    node, path = 0, []
    while True:
        p = list(target_probs[node])
        q = list(draft_probs[node]) if draft_probs is not None else [F(1, 2)] * len(p)
        for child in tree.children(node):
            token = tree.token_list[child]
            if fault == "sibling not struck":
                if chance.accept(p[token]):
                    break
                continue  # p should lose the token
            if chance.accept(p[token] / q[token] if q[token] else F(0)):
                break
            point = [F(one == token) for one in range(len(p))]
            p = _residual(p, point if fault == "one-hot residual" else q)
            q[token] = F(0)  # and q should be normalised
            if fault != "q not normalised":
                q = [one / sum(q) for one in q] if any(q) else q
        else:
            return VerifyResult(tuple(path), chance.draw(p))
        path.append(child)
        node = child


PLANTED: dict[str, tuple[Parents, Drafting]] = {
    "one-hot residual": (TWO_TWO, "without_replacement"),
    "q not normalised": (TWO_TWO, "without_replacement"),
    "sibling not struck": (TWO_TWO, "deterministic"),
    "p/q on a deterministic tree": (UNEVEN, "deterministic"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_wrong_rule_is_seen(fault: str) -> None:
    shape, drafting = PLANTED[fault]

    def rule(tree: DraftTree, p: Sequence[Law], q: Sequence[Law] | None, chance: Enumeration) -> VerifyResult:
        return tries_siblings(tree, p, q, chance, fault=fault)

    found = [joint_law(rule, Toy(3, seed), shape, drafting, 4, num_rounds=1) for seed in range(6)]
    assert max(total_variation(law, target_law(Toy(3, seed), 4)) for seed, law in enumerate(found)) > 0


def test_rule_without_its_planted_fault_is_exact() -> None:
    def rule(tree: DraftTree, p: Sequence[Law], q: Sequence[Law] | None, chance: Enumeration) -> VerifyResult:
        return tries_siblings(tree, p, q, chance, fault="none")

    found = joint_law(rule, Toy(3, 0), TWO_TWO, "without_replacement", 4, num_rounds=1)
    assert total_variation(found, target_law(Toy(3, 0), 4)) == 0


@pytest.mark.parametrize("seed", range(6))
def test_redrawing_from_p_is_off_by_what_its_formula_says(seed: int) -> None:
    """It says x with min(p, q)(x) + (1 - beta) p(x), beta = sum of min(p, q): off by sum |min(p, q) - beta p| / 2."""
    toy = Toy(4, seed)
    p, kept = toy.p(START), [*map(min, toy.p(START), toy.q(START))]
    expected = sum(abs(one - sum(kept) * mass) for one, mass in zip(kept, p, strict=True)) / 2
    assert variation(redraws_from_p, toy, ONE, "iid", 1) == expected


def test_siblings_without_replacement_are_drawn_from_what_is_left() -> None:
    """P(a, then b) = q(a) q(b) / (1 - q(a))."""
    toy = Toy(4, 2)
    q = toy.q(START)
    found = {
        tuple(drafted.tree.token_list[1:]): mass
        for drafted, mass in draft_law(toy, START, (-1, 0, 0), "without_replacement")
    }
    expected = {(a, b): q[a] * q[b] / (1 - q[a]) for a in range(4) for b in range(4) if a != b and q[a] * q[b]}
    assert found == expected


def test_rows_of_a_drafted_tree_are_those_of_its_contexts() -> None:
    toy = Toy(3, 0)
    trees = [drafted for _, drafted in outcomes(lambda chance: draft(toy, (0, 2), TWO_TWO, "iid", chance))]
    contexts = [[(0, *one.tree.path_tokens(node)) for node in range(one.tree.num_nodes)] for one in trees]
    expected = [(tuple(map(toy.p, at)), tuple(map(toy.q, at))) for at in contexts]
    assert [(one.target_probs, one.draft_probs) for one in trees] == expected


def test_exhausted_draft_law_leaves_children_out() -> None:
    toys = [Toy(3, seed) for seed in range(40)]
    toy = next(one for one in toys if sum(mass > 0 for mass in one.q(START)) == 1)
    sizes = {drafted.tree.num_nodes for drafted, _ in draft_law(toy, START, (-1, 0, 0), "without_replacement")}
    assert sizes == {2}


def test_deterministic_drafts_are_the_likeliest_tokens_of_q() -> None:
    toy = Toy(5, 1)
    ((drafted, _),) = draft_law(toy, START, (-1, 0, 0), "deterministic")
    q = toy.q(START)
    assert drafted.tree.token_list[1:] == sorted(range(5), key=lambda token: (-q[token], token))[:2]


def test_rows_of_toys_are_laws_and_of_every_kind() -> None:
    rows = [(toy.p(at), toy.q(at)) for seed in range(20) for toy in [Toy(3, seed)] for at in [START, (0, 1), (0, 1, 2)]]
    assert all(sum(law) == 1 and min(law) >= 0 for row in rows for law in row)
    kinds = {
        "equal": any(p == q for p, q in rows),
        "disjoint": any(not any(map(min, p, q)) for p, q in rows),
        "zeros": any(0 in p and 0 not in q for p, q in rows) and any(0 in q and 0 not in p for p, q in rows),
    }
    assert kinds == {"equal": True, "disjoint": True, "zeros": True}


def test_toy_is_the_same_on_every_machine() -> None:
    """`printf '3/0/(0, 1)' | sha256sum` is 7790bd40f7...7c4410...: modulo 7, weights 0, 1, 2 and 5, 5, 2."""
    toy = Toy(3, 0)
    assert (toy.p((0, 1)), toy.q((0, 1))) == ((0, F(1, 3), F(2, 3)), (F(5, 12), F(5, 12), F(1, 6)))


def test_shapes_know_their_depth_and_whether_they_are_chains() -> None:
    shapes = [(-1,), CHAIN, UNEVEN, TWO_TWO]
    assert [(depth_of(one), is_chain(one)) for one in shapes] == [(0, True), (2, True), (2, False), (2, False)]
