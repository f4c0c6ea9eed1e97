"""The claim that draft_probs are the law that drafts were drawn from: rows are laws, and the draws follow them.

The uniform behind one draw is moved over a grid while all others stand still. A drafter that inverts cumulative sums,
one uniform a draw, then shows its law exactly, to 1 / GRID a token, and that no other draw hangs on that uniform. For
any other way of drawing the draft is repeated with other coins and counted, draws alone and by pairs, at a false-alarm
rate that is stated for a whole run. Children that were not drawn
(proposal "deterministic") owe q nothing but to lie in its support.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from specbench import claims
from specbench.cases import Case, DrafterCase
from specbench.checks.drafter import ask, judged_here
from specbench.claims import Facts
from specbench.loading import EXPOSE
from specbench.probe import Probe
from specbench.protocols import SeededCoins
from specbench.record import ClaimRecord
from specbench.subjects import NotTested, Subject
from specbench.tree import DraftTree

GRID = 16
FINE_GRID = 256  # of the same uniform, before a drafter is accused by what the sixteen show
LOOKS = (8, 24, 72, 216)  # drafts after which the counts are looked at
FALSE_ALARM = 1e-6  # of a whole run
MAX_CASES = 2_500  # that a run judges this claim on, all subjects together


class _Coins:
    """Seeded uniforms, counted; the one at `place` is replaced."""

    def __init__(self, seed: int, *, place: int = -1, value: float = 0.0) -> None:
        self._coins = SeededCoins(seed)
        self._place, self._value = place, value
        self.num_drawn = 0

    def uniform(self, num: int) -> Tensor:
        uniforms = self._coins.uniform(num)
        if 0 <= self._place - self.num_drawn < num:
            uniforms[self._place - self.num_drawn] = self._value
        self.num_drawn += num
        return uniforms


def check_law(subject: Subject, case: Case, record: ClaimRecord) -> None:
    assert isinstance(case, DrafterCase)
    judged_here(subject)
    probe = subject.open_drafter(case)
    coins = _Coins(case.seed)
    tree = ask(probe, case, list(case.prompt), coins=coins)
    if tree.draft_probs is None:
        if tree.proposal == "deterministic":
            raise NotTested(EXPOSE["law"])
        _wrong(tree, 0, f"the draft is drawn ({tree.proposal}), but draft_probs is None", "a law for each node", "None")
    _check_rows(tree)
    if tree.proposal == "deterministic" or not tree.num_drafts:
        return
    if coins.num_drawn:
        place = case.seed % coins.num_drawn
        if _shown_on_grid(probe, case, tree, coins.num_drawn, place):
            record.note_remark(f"laws of drafts: exact to 1/{GRID} a token for draws of one uniform each")
            return
    _check_counts(probe, case, tree, record)


def _check_rows(tree: DraftTree) -> None:
    """Rows of nodes with children are laws, and each child lies in their support."""
    assert tree.draft_probs is not None
    for node in range(tree.num_nodes):
        children = tree.children(node)
        if not children:
            continue
        row = tree.draft_probs[node]
        slack = max(1e-9, 8 * torch.finfo(row.dtype).eps * math.sqrt(len(row)))
        if not bool(row.isfinite().all()) or float(row.min()) < 0.0:
            token = int((~row.isfinite() | (row < 0)).nonzero()[0])
            _wrong(tree, node, f"q of node {node} is no law", "finite, >= 0", f"{float(row[token])} for token {token}")
        total = float(row.double().sum())
        if abs(total - 1.0) > slack:
            _wrong(tree, node, f"q of node {node} sums to {total:.6g}", f"1, within {slack:.1g}", f"{total:.9g}")
        for child in children:
            token = tree.token_list[child]
            if float(row[token]) == 0.0:
                what = f"node {child} was drafted although q of its parent gives its token {token} no probability"
                _wrong(tree, child, what, "more than 0", "0")


def _shown_on_grid(probe: Probe, case: DrafterCase, tree: DraftTree, num_drawn: int, place: int) -> bool:
    """Whether a sweep of one uniform has settled the draw behind it. Raises when it shows another law than q."""
    sweep = _sweep(probe, case, place, GRID)
    node = _drawn_node(tree, sweep)
    _check_stable(tree, sweep, tree.num_nodes if node is None else node)
    assert tree.draft_probs is not None
    if num_drawn != tree.num_drafts:
        return False  # draws take another number of uniforms than one
    if node is None:  # the uniform decides nothing: right where q leaves nothing to decide
        drawn = place + 1
        return bool(tree.draft_probs[tree.parent_list[drawn], tree.token_list[drawn]] >= 1.0 - 1.0 / GRID)
    parent = tree.parent_list[node]
    q = tree.draft_probs[parent].double().clone()
    if tree.proposal == "without_replacement":
        q[[tree.token_list[one] for one in tree.children(parent) if one < node]] = 0.0
        q /= q.sum()
    tokens = [one.token_list[node] for one in sweep]
    if not _in_stretches(tokens):
        return False  # not the inverse of cumulative sums
    try:
        _check_apart(tree, sweep, node)
        _check_shares(tree, node, tokens, q)
    except claims.DraftLawMismatch:
        # A generator that is seeded from the uniforms may show stretches of a few draws by chance, not of so many.
        finer = _sweep(probe, case, place, FINE_GRID)
        if any(one.num_nodes <= node or one.parent_list[node] != parent for one in finer):
            return False
        if not _in_stretches([one.token_list[node] for one in finer]):
            return False
        raise
    return True


def _sweep(probe: Probe, case: DrafterCase, place: int, num: int) -> list[DraftTree]:
    """The drafts while one uniform goes through its range and the others stay."""
    return [
        ask(probe, case, list(case.prompt), coins=_Coins(case.seed, place=place, value=(step + 0.5) / num))
        for step in range(num)
    ]


def _in_stretches(tokens: list[int]) -> bool:
    """Each token in one piece."""
    return len(set(tokens)) == 1 + sum(one != other for one, other in itertools.pairwise(tokens))


def _check_shares(tree: DraftTree, node: int, tokens: list[int], q: Tensor) -> None:
    parent = tree.parent_list[node]
    for token in sorted({*tokens, int(q.argmax())}):
        share = tokens.count(token) / GRID
        if abs(share - float(q[token])) > 1.0 / GRID + 1e-6:
            _wrong(
                tree,
                node,
                f"node {node} is drawn from another law than q of node {parent}: token {token} has probability "
                f"{float(q[token]):.3g} in draft_probs, {share:.3g} in the draws",
                f"{float(q[token]):.4g} of all uniforms, to within {1 / GRID:.2g}",
                f"{tokens.count(token)} of {GRID} uniforms on a grid",
            )


def _check_apart(tree: DraftTree, sweep: list[DraftTree], node: int) -> None:
    """Each draw has a uniform of its own, so a uniform that decides `node` decides no other: what hangs on the node's
    token stays while that token stays. Drawn with replacement, only what lies below the node may change at all."""
    alike = [one for one in sweep if one.parent_list == tree.parent_list]
    for other in range(node + 1, tree.num_nodes):
        may_follow = tree.proposal != "iid" or node in tree.path_to(other)
        groups: dict[tuple[int, ...], int] = {}
        for one in alike:
            token = one.token_list[other]
            first = groups.setdefault((one.token_list[node],) if may_follow else (), token)
            if first != token:
                _wrong(
                    tree,
                    node,
                    f"one uniform decides two draws: node {node} and node {other}",
                    f"{first} at node {other}, whatever becomes of the uniform of node {node}",
                    f"{first} and {token}",
                )


def _drawn_node(tree: DraftTree, sweep: list[DraftTree]) -> int | None:
    """The first node that the swept uniform decides; None when nothing changes, or more than a token does."""
    for node in range(1, tree.num_nodes):
        if any(one.num_nodes <= node or one.parent_list[node] != tree.parent_list[node] for one in sweep):
            return None
        if any(one.token_list[node] != tree.token_list[node] for one in sweep):
            return node
    return None


def _check_stable(tree: DraftTree, sweep: list[DraftTree], num_nodes: int) -> None:
    """q of a node depends on the path to it, so drafts that agree that far have the same rows, whatever lies below."""
    assert tree.draft_probs is not None
    for one in sweep:
        for node in range(min(num_nodes, one.num_nodes)):
            if one.draft_probs is None or not (tree.children(node) and one.children(node)):
                continue
            if one.path_tokens(node) != tree.path_tokens(node):  # where draws may end a branch, others move up
                continue
            gap = float((one.draft_probs[node].double() - tree.draft_probs[node].double()).abs().max())
            if not gap <= 1e-2:
                _wrong(
                    tree,
                    node,
                    f"q of node {node} changes with what is drawn below it, by {gap:.2g}",
                    "the same row for the same path",
                    f"rows that differ by {gap:.3g}, for drafts {tree.token_list} and {one.token_list}",
                )


@dataclass
class _Tally:
    """One event counted over draws: how often it came, and how often q says it should."""

    name: str
    num: int = 0
    seen: int = 0
    expected: float = 0.0

    def note(self, happened: bool, chance: float) -> None:
        self.num += 1
        self.seen += happened
        self.expected += chance


@dataclass
class _Pairs:
    """Products of two draws of one draft, each as its place in [0, 1] on the law it was drawn from, less one half.

    Whatever came before, the mean of a place is one half, so the products of independent draws sum up to about nothing.
    variance: of the sum, given what came before each draw.
    """

    num: int = 0
    total: float = 0.0
    variance: float = 0.0

    def note(self, earlier: tuple[float, float], later: tuple[float, float]) -> None:
        """Each draw: its place less one half, and the variance of that."""
        self.num += 1
        self.total += earlier[0] * later[0]
        self.variance += earlier[0] ** 2 * later[1]

    def allowed(self, alpha: float) -> float:
        """Freedman's inequality for martingales, by halving steps of the variance."""
        largest = max(self.num, 1) / 48  # (1/2)^2 times 1/12 a product
        steps = 8
        step = next((one for one in range(steps - 1, -1, -1) if self.variance <= largest / 2**one), 0)
        log = math.log(2 * steps / alpha)
        slack = log / 12  # a product is 1/4 at most
        return slack + math.sqrt(slack**2 + 2 * largest / 2**step * log)


def _place(q: Tensor, token: int) -> tuple[float, float]:
    """Where the middle of a token's stretch lies on the cumulative sums of q, less one half; the variance of that."""
    middles = q.cumsum(dim=0) - q / 2 - 0.5
    return float(middles[token]), float((q * middles**2).sum())


def _check_counts(probe: Probe, case: DrafterCase, tree: DraftTree, record: ClaimRecord) -> None:
    """The first child of each node over drafts with other coins: how often it is q's first choice, and how often it
    lies in q's upper half, by Hoeffding's bound for draws that may depend on those before; at the root also each token,
    exactly. And whether the draw of a child goes with that of its parent, or of the sibling before it.

    Siblings stand in the order of the draws, so the first is drawn from q as it is, with and without replacement.
    """
    assert tree.draft_probs is not None
    root = tree.draft_probs[0].double()
    alpha = FALSE_ALARM / MAX_CASES / (len(LOOKS) * (len(root) + 3))
    pairs = _Pairs()
    tallies = [_Tally("the most probable token"), _Tally("the upper half of q")]
    by_token = [0] * len(root)
    num_drafts = 0
    for look in LOOKS:
        while num_drafts < look:
            num_drafts += 1
            one = ask(probe, case, list(case.prompt), coins=_Coins(case.seed + 1_000 + num_drafts))
            if one.draft_probs is None:
                _wrong(one, 0, "draft_probs is there for some draws only", "a law for each node", "None")
            _check_rows(one)
            _note_draws(one, tallies, by_token)
            _note_pairs(one, pairs)
        _judge_tallies(tree, tallies, by_token, root, alpha)
        if abs(pairs.total) > pairs.allowed(alpha):
            _wrong(
                tree,
                0,
                f"draws of one draft are not independent: their places on q go together by {pairs.total:.1f} over "
                f"{pairs.num} pairs",
                f"0, give or take {pairs.allowed(alpha):.1f} (false-alarm rate {FALSE_ALARM:g} a run)",
                f"{pairs.total:.1f}",
            )
    resolution = max(math.sqrt(math.log(2 / alpha) / (2 * max(1, one.num))) for one in tallies)
    record.note_remark(
        f"laws of drafts by counting: {num_drafts} drafts would have shown a shift of {min(1.0, resolution):.2f}, "
        f"false alarms at most {FALSE_ALARM:g} a run"
    )


def _note_draws(one: DraftTree, tallies: list[_Tally], by_token: list[int]) -> None:
    assert one.draft_probs is not None
    for node in range(one.num_nodes):
        children = one.children(node)
        if not children:
            continue
        token, q = one.token_list[children[0]], one.draft_probs[node].double()
        if node == 0:
            by_token[token] += 1
        order = q.sort(descending=True, stable=True)
        num_upper = 1 + int((order.values.cumsum(0) < 0.5).sum())
        upper = order.indices[:num_upper].tolist()
        tallies[0].note(token == upper[0], float(q[upper[0]]))
        tallies[1].note(token in upper, float(q[upper].sum()))


def _note_pairs(one: DraftTree, pairs: _Pairs) -> None:
    """Only draws whose law is q as it stands: first children, and all of those drawn with replacement."""
    assert one.draft_probs is not None
    places: dict[int, tuple[float, float]] = {}
    for node in range(one.num_nodes):
        q, children = one.draft_probs[node].double(), one.children(node)
        for child in children if one.proposal == "iid" else children[:1]:
            places[child] = _place(q, one.token_list[child])
        if children and node in places:
            pairs.note(places[node], places[children[0]])
        if len(children) > 1 and children[1] in places:
            pairs.note(places[children[0]], places[children[1]])


def _judge_tallies(tree: DraftTree, tallies: list[_Tally], by_token: list[int], root: Tensor, alpha: float) -> None:
    for one in tallies:
        allowed = math.sqrt(one.num * math.log(2 / alpha) / 2)
        if abs(one.seen - one.expected) > allowed:
            _wrong(
                tree,
                0,
                f"draws do not follow draft_probs: {one.name} came {one.seen} of {one.num} times, q says "
                f"{one.expected:.1f}",
                f"{one.expected:.1f}, give or take {allowed:.1f} (false-alarm rate {FALSE_ALARM:g} a run)",
                str(one.seen),
            )
    num = sum(by_token)
    for token, seen in enumerate(by_token):
        q = float(root[token])
        if _tail(seen, num, q) < alpha / 2:
            _wrong(
                tree,
                0,
                f"draws do not follow draft_probs: token {token} came {seen} of {num} times below the root, q says "
                f"{q:.3g}",
                f"about {num * q:.1f} of {num} (false-alarm rate {FALSE_ALARM:g} a run)",
                str(seen),
            )


def _tail(seen: int, num: int, q: float) -> float:
    """P(X <= seen) or P(X >= seen), the smaller one, for X ~ Binomial(num, q)."""
    if q <= 0.0 or q >= 1.0:
        return 1.0 if seen == round(num * q) else 0.0
    terms = [
        math.exp(
            math.lgamma(num + 1)
            - math.lgamma(one + 1)
            - math.lgamma(num - one + 1)
            + one * math.log(q)
            + (num - one) * math.log1p(-q)
        )
        for one in range(num + 1)
    ]
    return min(sum(terms[: seen + 1]), sum(terms[seen:]))


def _wrong(tree: DraftTree, node: int, headline: str, expected: str, actual: str) -> NoReturn:
    notes = {node: "here"}
    if tree.draft_probs is not None and tree.children(node):
        row = tree.draft_probs[node]
        notes[node] = ", ".join(
            f"q({tree.token_list[one]}) = {float(row[tree.token_list[one]]):.3g}" for one in tree.children(node)
        )
    raise claims.DraftLawMismatch(
        Facts(headline=headline, expected=expected, actual=actual, source="draft_probs", tree=tree, notes=notes)
    )
