"""Claims about a drafter alone: its tree, its budget, and that a draft depends on the given context and coins only.

A drafter is asked as a decoder asks it, over a history of accepts. What it drafts is compared with what another
instance of it drafts for the same context, so that nothing has to be known about how it drafts. Its law stands in
`draft_law`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from specbench import claims
from specbench.cases import Case, DrafterCase
from specbench.checks.acceptance import by_depth
from specbench.claims import Facts, Misbehaviour, Violation
from specbench.loading import EXPOSE
from specbench.own_bank import OwnBank
from specbench.probe import Probe
from specbench.protocols import Coins, SeededCoins
from specbench.record import ClaimRecord
from specbench.reference.decoder import Decoder
from specbench.subjects import NotTested, Subject
from specbench.tree import DraftTree
from specbench.types import DTYPES, Sampling, VerifyResult

DECODED_TOKENS, DECODED_TOKENS_REAL = 6, 16
CHOICE_TOLERANCE = 1e-9  # of a logit in fp64: a tie
# Rows of q from two instances: rounding, never a fault of state, which moves them by far more.
LAW_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass(frozen=True)
class Answer:
    """A context and what was drafted for it. number: of the round, which picks the coins."""

    context: tuple[int, ...]
    tree: DraftTree
    number: int


def check_tree(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """Every tree of the history, and every tree of a real decode with the drafter, whose acceptance is reported.

    A drafter of which the target says what it drafts is held to that: being a tree says nothing of its tokens.
    """
    assert isinstance(case, DrafterCase)
    judged_here(subject, on_real=True)
    model = subject.bank.model(case.model)  # in its own precision: nothing is compared here
    for answer in play(subject.open_drafter(case, model=model), case, malformed=claims.MalformedDraft):
        record.num_nodes += answer.tree.num_drafts
        if case.drafter in subject.self_drafters and subject.bank.exact and answer.tree.proposal == "deterministic":
            _judge_choice(subject, case, answer)
        if case.drafter in subject.lookup_drafters:
            _judge_lookup(answer)
    if (isinstance(subject.bank, OwnBank) and subject.bank.is_called) or "oracle" not in subject.has:
        return  # there is no model that a decoder of ours could run
    drafter = _Asked(subject.open_drafter(case, model=model))
    num_tokens = DECODED_TOKENS_REAL if subject.bank.real else DECODED_TOKENS
    with subject.clock.count("oracle"):
        decoder = Decoder(model, drafter, max_nodes=max(1, case.max_nodes), max_depth=max(1, case.max_depth))
        rounds = decoder.generate(case.prompt, max_new_tokens=num_tokens).rounds
    record.note_acceptance(case.drafter, by_depth(rounds))


def check_budget(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """The case's budget, none, one, and those that the whole draft just fits into and just does not."""
    assert isinstance(case, DrafterCase)
    judged_here(subject)
    probe = subject.open_drafter(case)
    tree = _within(probe, case, case.max_nodes, case.max_depth)
    size, deepest = tree.num_drafts, int(tree.depth.max())
    others = [
        (0, case.max_depth),
        (case.max_nodes, 0),
        (1, 1),
        (size, deepest),
        (size - 1, deepest),
        (size, deepest - 1),
    ]
    for max_nodes, max_depth in others:
        if max_nodes >= 0 and max_depth >= 0:
            record.num_nodes += _within(probe, case, max_nodes, max_depth).num_drafts


def check_no_peeking(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """The instance has read on before it is asked, once one text and once another; it must not show. Nor may it keep
    hold of the list that it was given, or change it."""
    assert isinstance(case, DrafterCase)
    judged_here(subject)
    vocab_size = subject.vocab_size(case.model)
    ahead = case.followers or case.prompt[:2]
    others = tuple((token + 1) % vocab_size for token in ahead)
    answers = []
    for text in (ahead, others):
        probe = subject.open_drafter(case)
        ask(probe, case, [*case.prompt, *text])
        _next_request(probe)
        answers.append(ask(probe, case, _unchanged(case.prompt)))
    what = f"the draft depends on what was read before: {list(ahead)} or {list(others)} behind the context"
    _compare(
        claims.DraftPeeks, subject, case, answers[0], answers[1], what, record, source=f"having read {list(ahead)}"
    )
    if not subject.makes_fresh_drafters:
        return
    probe = subject.open_drafter(case)
    unrelated = [(token + 1) % vocab_size for token in case.prompt]
    ask(probe, case, [*unrelated, *ahead])  # longer, and nothing in common: a cache that trusts lengths keeps its rows
    _next_request(probe)
    used = ask(probe, case, list(case.prompt))
    what = f"the draft depends on an unrelated text read before: {[*unrelated, *ahead]}"
    _compare(claims.DraftPeeks, subject, case, answers[0], used, what, record, source="not having read it")
    grown = list(case.prompt)
    probe = subject.open_drafter(case)
    ask(probe, case, grown)
    if grown != list(case.prompt):
        raise claims.DraftPeeks(
            Facts(
                headline="draft() changed the context list that it was given",
                expected=str(list(case.prompt)),
                actual=str(grown),
                source="the list as it was handed over",
            )
        )
    grown.append(ahead[0])  # a decoder may go on with the list; whoever kept it sees what is committed later
    used = ask(probe, case, grown, number=1)
    fresh = ask(subject.open_drafter(case), case, [*case.prompt, ahead[0]], number=1)
    what = "the draft differs when the context is the very list of the call before, grown by a token"
    _compare(claims.DraftPeeks, subject, case, fresh, used, what, record, source="a fresh copy of the context")


def check_deterministic(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """Asked twice, and a fresh instance once."""
    assert isinstance(case, DrafterCase)
    judged_here(subject)
    probe = subject.open_drafter(case)
    first, second = (ask(probe, case, list(case.prompt)) for _ in range(2))
    what = "the same question, asked twice of one instance, is answered by two drafts"
    _compare(claims.DraftNotDeterministic, subject, case, first, second, what, record, source="the first answer")
    if subject.makes_fresh_drafters:
        fresh = ask(subject.open_drafter(case), case, list(case.prompt))
        what = "two fresh instances draft differently for the same context, budget and coins"
        _compare(claims.DraftNotDeterministic, subject, case, first, fresh, what, record, source="the first instance")


def check_state(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """After each round of the history the draft is a fresh instance's for the same context."""
    assert isinstance(case, DrafterCase)
    judged_here(subject, on_real=True)
    if not subject.makes_fresh_drafters:
        raise NotTested(EXPOSE["fresh"])
    answers = list(play(subject.open_drafter(case), case))
    # On a real model only the last: a fresh instance reads the whole context each time.
    for answer in answers[-1:] if subject.bank.real else answers:
        fresh = ask(subject.open_drafter(case), case, list(answer.context), number=answer.number)
        what = f"after {_history(case, answer.number)} the draft is not what a fresh drafter drafts"
        _compare(claims.DrafterStale, subject, case, fresh, answer.tree, what, record, source="a fresh drafter")


def play(probe: Probe, case: DrafterCase, *, malformed: type[Violation] = Misbehaviour) -> Iterator[Answer]:
    """The history as a decoder would make it: draft, tell what was accepted, go on with the longer context. The last
    answer is for the context after all rounds."""
    context = list(case.prompt)
    for number, (accept, follower) in enumerate(zip(case.accepts, case.followers, strict=True)):
        if number == case.other_at and _next_request(probe):
            ask(probe, case, context[::-1], number=number, malformed=malformed)
            _next_request(probe)
        path: list[int] = []
        if accept >= 0:
            tree = ask(probe, case, context, number=number, malformed=malformed)
            yield Answer(tuple(context), tree, number)
            node = 1 + (accept - 1) % tree.num_drafts if accept and tree.num_drafts else 0
            path = tree.path_to(node)[1:]
            follower = _correction(tree, node, follower, probe.vocab_size)
            context += [tree.token_list[one] for one in path]
        if probe.observes:
            probe.observe(VerifyResult(tuple(path), follower))
        context.append(follower)
    number = len(case.accepts)
    yield Answer(tuple(context), ask(probe, case, context, number=number, malformed=malformed), number)


def ask(
    probe: Probe,
    case: DrafterCase,
    context: list[int],
    *,
    number: int = 0,
    coins: Coins | None = None,
    malformed: type[Violation] = Misbehaviour,
) -> DraftTree:
    """One draft within the case's budget. number: of the round; coins: those of the round unless given."""
    return probe.draft(
        context,
        max_nodes=case.max_nodes,
        max_depth=case.max_depth,
        sampling=Sampling(temperature=case.temperature / 100),
        coins=SeededCoins(case.seed + number) if coins is None else coins,
        malformed=malformed,
    )


def judged_here(subject: Subject, *, on_real: bool = False) -> None:
    """Drafters are asked in fp64, where no draft hangs on a rounding tie; other columns would repeat that. on_real:
    once on a real model too."""
    bank = subject.bank
    if bank.exact or isinstance(bank, OwnBank) or (on_real and bank.real and bank.dtype == torch.float32):
        return
    raise NotTested(
        "drafters are judged in fp64, their trees and state once on a real model too: drafts do not depend on the "
        "target's precision"
    )


class _Asked:
    """A target's drafter for a decoder of ours: each answer is checked on the way."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe

    def draft(
        self, context: list[int], *, max_nodes: int, max_depth: int, sampling: Sampling, coins: Coins
    ) -> DraftTree:
        return self._probe.draft(
            context,
            max_nodes=max_nodes,
            max_depth=max_depth,
            sampling=sampling,
            coins=coins,
            malformed=claims.MalformedDraft,
        )

    def observe(self, result: VerifyResult) -> None:
        if self._probe.observes:
            self._probe.observe(result)


def _within(probe: Probe, case: DrafterCase, max_nodes: int, max_depth: int) -> DraftTree:
    tree = probe.draft(
        list(case.prompt),
        max_nodes=max_nodes,
        max_depth=max_depth,
        sampling=Sampling(temperature=case.temperature / 100),
        coins=SeededCoins(case.seed),
    )
    allowed = max_nodes if max_depth else 0
    size, deepest = tree.num_drafts, int(tree.depth.max())
    if size > allowed or deepest > max_depth:
        too_much = f"{size} nodes" if size > allowed else f"{deepest} levels"
        raise claims.BudgetExceeded(
            Facts(
                headline=f"draft() returned {too_much} for max_nodes = {max_nodes}, max_depth = {max_depth}",
                expected=f"at most {allowed} nodes below the root, {max_depth} levels",
                actual=f"{size} nodes, {deepest} levels",
                source="the budget of the call",
                tree=tree,
            )
        )
    return tree


def _judge_choice(subject: Subject, case: DrafterCase, answer: Answer) -> None:
    """The children of each node are the model's most probable tokens there: as many as there are children."""
    tree = answer.tree
    logits = subject.score(case, answer.context[:-1], tree).logits
    for node in range(tree.num_nodes):
        drafted = [tree.token_list[child] for child in tree.children(node)]
        if not drafted:
            continue
        left_out = logits[node].double().clone()
        left_out[drafted] = -torch.inf
        worst = min(drafted, key=lambda token: float(logits[node, token]))
        gap = float(left_out.max() - logits[node, worst])
        if gap > CHOICE_TOLERANCE:
            best = logits[node].sort(descending=True, stable=True).indices[: len(drafted)].tolist()
            raise claims.MalformedDraft(
                Facts(
                    headline=f"a drafter that drafts what the model says drafts {drafted} below node {node}, where the "
                    f"model's most probable are {best}",
                    expected=f"{best} below node {node}",
                    actual=str(drafted),
                    source="the model's own row behind that node",
                    remark=f"token {worst} lies {gap:.2g} below token {int(left_out.argmax())}",
                    tree=tree,
                    notes={node: f"must be followed by {best}"},
                )
            )


def _judge_lookup(answer: Answer) -> None:
    """The root and each path below it stand in the text already, the path's own tokens at most overlapping."""
    context, tree = list(answer.context), answer.tree
    for path in tree.paths():
        drafted = [tree.token_list[node] for node in path[1:]]
        text, length = [*context, *drafted], len(path)
        if drafted and not any(text[start : start + length] == text[-length:] for start in range(len(context) - 1)):
            raise claims.MalformedDraft(
                Facts(
                    headline=f"a drafter that looks up the context drafts {drafted}, which has not followed "
                    f"{context[-1]} in it",
                    expected=f"what stands behind an earlier {context[-1]}",
                    actual=str(drafted),
                    source=f"the context {context}",
                    tree=tree,
                    notes={path[-1]: "not in the context"},
                )
            )


def _next_request(probe: Probe) -> bool:
    """Tells a drafter that another text begins; False when it has no way to be told."""
    if not callable(getattr(probe.adapter, "reset", None)):
        return False
    probe.reset()
    return True


def _unchanged(tokens: Sequence[int]) -> list[int]:
    return list(tokens)


def _correction(tree: DraftTree, node: int, token: int, vocab_size: int | None) -> int:
    """The token that follows a node: not one that it has drafted, since that would have been accepted."""
    drafted = {tree.token_list[child] for child in tree.children(node)}
    size = token + len(drafted) + 1 if vocab_size is None else vocab_size
    return next((one % size for one in range(token, token + size) if one % size not in drafted), token)


def _compare(
    violation: type[Violation],
    subject: Subject,
    case: DrafterCase,
    expected: DraftTree,
    actual: DraftTree,
    what: str,
    record: ClaimRecord,
    *,
    source: str,
) -> None:
    """Two drafts for the same context must be one; where the drafter declares a low precision, within its own noise."""
    node = _first_difference(expected, actual)
    gap = _law_gap(expected, actual, actual.num_nodes if node is None else node)
    noise = _noise(subject, case, expected)
    if noise is not None:
        if node is not None and (gap is None or expected.draft_probs is None):
            raise NotTested(
                "show draft_probs, so that a rounding tie of a drafter that computes below fp64 can be told from a "
                "wrong draft"
            )
        if gap is not None and gap <= noise:
            record.num_ties += node is not None
            return
    elif node is None and (gap is None or gap <= _tolerance(expected)):
        return
    if node is None and gap is None:
        return
    where = "" if node is None else f": node {node}"
    told = "" if node is not None or gap is None else f": the same tokens, draft_probs off by {gap:.2g}"
    raise violation(
        Facts(
            headline=f"{what}{where}{told}",
            expected=_shown(expected),
            actual=_shown(actual),
            source=source,
            remark=f"context {list(case.prompt)} and what was accepted, drafter {case.drafter!r}",
            tree=actual,
            notes={} if node is None or node >= actual.num_nodes else {node: _instead(expected, node)},
        )
    )


def _first_difference(expected: DraftTree, actual: DraftTree) -> int | None:
    """The first node that only one has, or that has another token or parent."""
    pairs = zip(expected.token_list, expected.parent_list, strict=True)
    for node, (one, other) in enumerate(
        zip(pairs, zip(actual.token_list, actual.parent_list, strict=True), strict=False)
    ):
        if one != other:
            return node
    return None if expected.num_nodes == actual.num_nodes else min(expected.num_nodes, actual.num_nodes)


def _law_gap(expected: DraftTree, actual: DraftTree, num_nodes: int) -> float | None:
    """The largest difference of q over the first nodes, as far as they have children; None where there is no q."""
    if expected.draft_probs is None or actual.draft_probs is None:
        return None
    rows = [
        node
        for node in range(min(num_nodes, expected.num_nodes, actual.num_nodes))
        if expected.children(node) and actual.children(node)
    ]
    mine, its = expected.draft_probs[rows].double(), actual.draft_probs[rows].double()
    gaps = (mine - its).abs().nan_to_num(nan=torch.inf)
    gaps[(mine == its) | (mine.isnan() & its.isnan())] = 0.0  # that a row is none is the business of `draft_law`
    return float(gaps.max()) if rows else 0.0


def _tolerance(tree: DraftTree) -> float:
    assert tree.draft_probs is not None
    return LAW_TOLERANCE.get(tree.draft_probs.dtype, 1e-2)


def _noise(subject: Subject, case: DrafterCase, tree: DraftTree) -> float | None:
    """How far the q of two honest instances may be apart, for a drafter that declares less than fp64; None in fp64.

    Measured: an instance that reads the prompt at once against one that reads its last token after the rest.
    """
    declared = getattr(subject.target.adapter, "dtype", None)
    if not isinstance(subject.bank, OwnBank) or declared not in DTYPES or declared == "fp64":
        return None
    if tree.draft_probs is None or not subject.makes_fresh_drafters:
        return 0.0
    at_once = ask(subject.open_drafter(case), case, list(case.prompt))
    probe = subject.open_drafter(case)
    for length in range(1, len(case.prompt)):
        ask(probe, case, list(case.prompt[:length]))
    stepped = ask(probe, case, list(case.prompt))
    shared = _first_difference(at_once, stepped)
    gap = _law_gap(at_once, stepped, at_once.num_nodes if shared is None else shared) or 0.0
    return 2.0 * gap + 4.0 * torch.finfo(DTYPES[declared]).eps


def _shown(tree: DraftTree) -> str:
    return f"tokens {tree.token_list}, parents {tree.parent_list}"


def _instead(expected: DraftTree, node: int) -> str:
    if node >= expected.num_nodes:
        return "must not be"
    return f"must be {expected.token_list[node]} below node {expected.parent_list[node]}"


def _history(case: DrafterCase, number: int) -> str:
    """The rounds before in words: `accepts 2, 0, plain step`."""
    said = ["plain step" if one < 0 else str(one) for one in case.accepts[:number]]
    return f"accepts {', '.join(said)}" if said else "no round"
