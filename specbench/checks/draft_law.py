"""The claim that draft_probs are the law that drafts were drawn from: rows are laws, and the draws follow them.

A drafter that inverts q's cumulative sums, one uniform a draw, shows at every depth of a few drafts that each token is
the one its own uniform stands for. Of other inverses each uniform is moved over a grid while all others stand still:
that shows a law exactly, to 1 / GRID a token, and that no other draw hangs on that uniform. For any other way of
drawing the draft is repeated with other coins and counted, draws alone and by pairs, at a false-alarm rate that is
stated for a whole run. Children that were not drawn (proposal "deterministic") owe q nothing but to lie in its support.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
DEEP_NODES, DEEP_DEPTH = 8, 4  # a budget for drafts that are deeper than a case asks for
MOST_SWEEPS = 8  # of a draft
TEMPERATURES = (0.3, 0.5, 0.7, 1.4, 2.0, 3.0)  # of draws, over that of the q that they are held against
MOST_PLACES = 64  # of uniforms that are drawn in strata of their own
LAW_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of a cumulative sum; 1e-2 of half precision


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


class _Strata:
    """Uniforms of which each lies in every sixteenth of [0, 1] once in steps 0 to GRID - 1, in an order of its own."""

    def __init__(self, seed: int, step: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        orders = torch.stack([torch.randperm(GRID, generator=generator) for _ in range(MOST_PLACES)])
        inside = torch.rand(MOST_PLACES, generator=generator, dtype=torch.float64)
        self._values = (orders[:, step] + inside) / GRID  # float64 [MOST_PLACES]
        self.drawn: list[float] = []

    def uniform(self, num: int) -> Tensor:
        places = torch.arange(len(self.drawn), len(self.drawn) + num) % MOST_PLACES
        self.drawn += self._values[places].tolist()
        return self._values[places].clone()


@dataclass(frozen=True)
class _Asked:
    """A case, its draft, and how many uniforms that took."""

    case: DrafterCase
    tree: DraftTree
    num_drawn: int


def check_law(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """The case's draft, and the one for a larger budget: a law may be wrong at the deepest drafts alone."""
    assert isinstance(case, DrafterCase)
    judged_here(subject)
    probe = subject.open_drafter(case)
    larger = replace(case, max_nodes=max(case.max_nodes, DEEP_NODES), max_depth=max(case.max_depth, DEEP_DEPTH))
    asked, deeper = _ask(probe, case), _ask(probe, larger)
    if asked.tree.draft_probs is None and asked.tree.proposal == "deterministic":
        raise NotTested(EXPOSE["law"])
    looked_at = [deeper] if _begins(deeper.tree, asked.tree) else [asked, deeper]
    for one in looked_at:
        if one.tree.draft_probs is None and one.tree.proposal != "deterministic":
            what = f"the draft is drawn ({one.tree.proposal}), but draft_probs is None"
            _wrong(one.tree, 0, what, "a law for each node", "None")
        if one.tree.draft_probs is not None:
            _check_rows(one.tree)
    drawn = [
        one
        for one in looked_at
        if one.tree.draft_probs is not None and one.tree.proposal != "deterministic" and one.tree.num_drafts
    ]
    open_ones = [one for one in drawn if not _shown_by_inverse(probe, one, record)]
    if open_ones:
        one = open_ones[case.seed % len(open_ones)]
        _check_counts(probe, one.case, one.tree, record)


def _ask(probe: Probe, case: DrafterCase) -> _Asked:
    coins = _Coins(case.seed)
    return _Asked(case, ask(probe, case, list(case.prompt), coins=coins), coins.num_drawn)


def _begins(tree: DraftTree, start: DraftTree) -> bool:
    """Whether the first nodes are those of the other draft."""
    num = start.num_nodes
    return tree.token_list[:num] == start.token_list and tree.parent_list[:num] == start.parent_list


def _shown_by_inverse(probe: Probe, asked: _Asked, record: ClaimRecord) -> bool:
    """Whether each draw is settled by its one uniform. Raises where that shows another law than q."""
    case, tree, num_drawn = asked.case, asked.tree, asked.num_drawn
    if not num_drawn:
        return False
    start = case.seed % num_drawn
    if num_drawn != tree.num_drafts:  # draws take another number of uniforms than one
        _check_stable(tree, _sweep(probe, case, start, GRID), 1)
        return False
    depth = _depth_of_inverses(probe, case)
    if depth is not None:
        record.note_remark(
            f"laws of drafts: exact to 1/{GRID} a token for every draw, of one uniform each, down to depth {depth}"
        )
        return True
    places = [(start + step) % num_drawn for step in range(min(num_drawn, MOST_SWEEPS))]
    are_shown = [_shown_on_grid(probe, case, tree, place) for place in places]
    if all(are_shown):
        record.note_remark(
            f"laws of drafts: exact to 1/{GRID} a token for {len(places)} of {num_drawn} draws of a draft, of one "
            f"uniform each, down to depth {int(tree.depth.max())}"
        )
    return all(are_shown)


def _depth_of_inverses(probe: Probe, case: DrafterCase) -> int | None:
    """The depth of drafts whose every token is where its own uniform lies on the cumulative sums of q, in the order of
    ids; None where one is not, or has no uniform of its own."""
    depth = 0
    for step in range(GRID):
        coins = _Strata(case.seed, step)
        one = ask(probe, case, list(case.prompt), coins=coins)
        if one.draft_probs is None or len(coins.drawn) != one.num_drafts or one.num_drafts > MOST_PLACES:
            return None
        slack = LAW_TOLERANCE.get(one.draft_probs.dtype, 1e-2)
        _check_rows(one)
        for node, q in _laws_of_draws(one):
            token, uniform = one.token_list[node], coins.drawn[node - 1]
            end = float(q[: token + 1].sum())
            if not end - float(q[token]) - slack <= uniform <= end + slack:
                return None
        depth = max(depth, int(one.depth.max()))
    return depth


def _laws_of_draws(tree: DraftTree) -> Iterator[tuple[int, Tensor]]:
    """Each draft with the law that it was drawn from, float64 [V]: q of its parent, of which the siblings before it are
    struck out where draws are without replacement. Siblings stand in the order of the draws."""
    assert tree.draft_probs is not None
    for node in range(1, tree.num_nodes):
        parent = tree.parent_list[node]
        q = tree.draft_probs[parent].double().clone()
        if tree.proposal == "without_replacement":
            q[[tree.token_list[one] for one in tree.children(parent) if one < node]] = 0.0
        yield node, q / q.sum()


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


def _shown_on_grid(probe: Probe, case: DrafterCase, tree: DraftTree, place: int) -> bool:
    """Whether a sweep of one uniform has settled the draw behind it. Raises when it shows another law than q."""
    sweep = _sweep(probe, case, place, GRID)
    node = _drawn_node(tree, sweep)
    _check_stable(tree, sweep, tree.num_nodes if node is None else node)
    assert tree.draft_probs is not None
    if node is None:  # the uniform decides nothing: right where q leaves nothing to decide
        drawn = place + 1
        return bool(tree.draft_probs[tree.parent_list[drawn], tree.token_list[drawn]] >= 1.0 - 1.0 / GRID)
    parent, q = tree.parent_list[node], dict(_laws_of_draws(tree))[node]
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


class _Counts:
    """Draws counted: by depth, first children apart from later ones, how often a draw is its law's first choice and how
    often it lies in the upper half, and what temperature they may have been made at; below the root also each token,
    and how often two siblings are alike."""

    def __init__(self, vocab_size: int) -> None:
        self.tallies: dict[tuple[int, bool, str], _Tally] = {}
        self.temperatures: dict[int, _Temperatures] = {}  # by depth
        self.by_token = [0] * vocab_size
        self.num_alike = self.num_siblings = 0
        self.pairs = _Pairs()

    @staticmethod
    def num_looked_at(vocab_size: int, levels: int) -> int:
        """Of statistics, each of which may give a false alarm."""
        return vocab_size + 5 * levels + 2

    def note(self, one: DraftTree) -> None:
        places: dict[int, tuple[float, float]] = {}
        for node, q in _laws_of_draws(one):
            token, siblings = one.token_list[node], one.children(one.parent_list[node])
            order = q.sort(descending=True, stable=True)
            upper = order.indices[: 1 + int((order.values.cumsum(0) < 0.5).sum())].tolist()
            for name, tokens in (("the most probable token", upper[:1]), ("the upper half of q", upper)):
                key = int(one.depth[node]), node != siblings[0], name
                tally = self.tallies.setdefault(key, _Tally(_named(*key)))
                tally.note(token in tokens, float(q[tokens].sum()))
            self.temperatures.setdefault(int(one.depth[node]), _Temperatures()).note(q, token)
            places[node] = _place(q, token)
        self._note_pairs(one, places)
        children = one.children(0)
        if children:
            self.by_token[one.token_list[children[0]]] += 1
        if len(children) > 1 and one.proposal == "iid":
            self.num_siblings += 1
            self.num_alike += one.token_list[children[0]] == one.token_list[children[1]]

    def _note_pairs(self, one: DraftTree, places: dict[int, tuple[float, float]]) -> None:
        for node in range(one.num_nodes):
            children = one.children(node)
            if children and node:
                self.pairs.note(places[node], places[children[0]])
            if len(children) > 1:
                self.pairs.note(places[children[0]], places[children[1]])


class _Temperatures:
    """Likelihoods of draws had they been made at another temperature than q's, over their likelihoods: of right draws
    each product is 1 in the mean whatever came before, so that their mean reaches 1 / alpha with probability alpha at
    most, at any time (Ville's inequality)."""

    def __init__(self) -> None:
        self._logs = [0.0] * len(TEMPERATURES)
        self.num = 0

    def note(self, q: Tensor, token: int) -> None:
        logs = q[q > 0].log()
        self.num += 1
        for idx, temperature in enumerate(TEMPERATURES):
            normaliser = float((logs / temperature).logsumexp(dim=0))
            self._logs[idx] += float(q[token].log()) * (1 / temperature - 1) - normaliser

    @property
    def log_e_value(self) -> float:
        return float(torch.tensor(self._logs, dtype=torch.float64).logsumexp(dim=0)) - math.log(len(TEMPERATURES))

    @property
    def likeliest(self) -> float:
        return TEMPERATURES[self._logs.index(max(self._logs))]


def _named(depth: int, is_later: bool, name: str) -> str:
    return f"{name} at depth {depth}" + " among later siblings" * is_later


def _check_counts(probe: Probe, case: DrafterCase, tree: DraftTree, record: ClaimRecord) -> None:
    """Drafts with other coins: how often each draw is its law's first choice, and how often it lies in the upper half,
    by Hoeffding's bound for draws that may depend on those before; whether another temperature explains them better; at
    the root also each token, and two siblings that are alike, exactly. And whether the draw of a child goes with that
    of its parent, or of the sibling before it.
    """
    assert tree.draft_probs is not None
    root = tree.draft_probs[0].double()
    counts = _Counts(len(root))
    num_looked_at = counts.num_looked_at(len(root), max(case.max_depth, 1))
    alpha = FALSE_ALARM / MAX_CASES / (len(LOOKS) * num_looked_at)
    num_drafts = 0
    for look in LOOKS:
        while num_drafts < look:
            num_drafts += 1
            one = ask(probe, case, list(case.prompt), coins=_Coins(case.seed + 1_000 + num_drafts))
            if one.draft_probs is None:
                _wrong(one, 0, "draft_probs is there for some draws only", "a law for each node", "None")
            _check_rows(one)
            counts.note(one)
        _judge_counts(tree, counts, root, alpha)
    firsts = [one for (_, is_later, _), one in counts.tallies.items() if not is_later]
    resolution = max((math.sqrt(math.log(2 / alpha) / (2 * one.num)) for one in firsts), default=1.0)
    deepest = max((depth for depth, _, _ in counts.tallies), default=0)
    record.note_remark(
        f"laws of drafts by counting: {num_drafts} drafts would have shown a shift of {min(1.0, resolution):.2f} "
        f"down to depth {deepest}, false alarms at most {FALSE_ALARM:g} a run"
    )


def _judge_counts(tree: DraftTree, counts: _Counts, root: Tensor, alpha: float) -> None:
    for one in counts.tallies.values():
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
    for depth, heat in counts.temperatures.items():
        if heat.log_e_value >= -math.log(alpha):
            _wrong(
                tree,
                0,
                f"draws at depth {depth} do not follow draft_probs: {heat.num} of them are as if drawn at about "
                f"{heat.likeliest:g} times the temperature",
                f"an e-value below {1 / alpha:.1e} (false-alarm rate {FALSE_ALARM:g} a run)",
                f"an e-value of e^{heat.log_e_value:.0f}",
            )
    num = sum(counts.by_token)
    for token, seen in enumerate(counts.by_token):
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
    num, same = counts.num_siblings, min(1.0, float((root**2).sum()))
    if num and 0.0 < same < 1.0 and _tail(counts.num_alike, num, same) < alpha / 2:
        _wrong(
            tree,
            0,
            f"two siblings are not drawn independently: they are the same token in {counts.num_alike} of {num} drafts, "
            f"which q says of {num * same:.1f}",
            f"about {num * same:.1f} of {num} (false-alarm rate {FALSE_ALARM:g} a run)",
            str(counts.num_alike),
        )
    pairs = counts.pairs
    if abs(pairs.total) > pairs.allowed(alpha):
        _wrong(
            tree,
            0,
            f"draws of one draft are not independent: their places on q go together by {pairs.total:.1f} over "
            f"{pairs.num} pairs",
            f"0, give or take {pairs.allowed(alpha):.1f} (false-alarm rate {FALSE_ALARM:g} a run)",
            f"{pairs.total:.1f}",
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
