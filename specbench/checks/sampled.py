"""Claims about sampled generations: their joint law, rows of a batch, seeds, and a target's own drafts.

The joint law is known by enumeration of the oracle. Texts of a black box are counted in cells of it and judged by an
e-process; where the vocabulary has two tokens, a drafter's coins and a verifier's are gone through instead.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specbench import claims
from specbench.banks import TinyBank
from specbench.cases import DRAWN, Case, DrafterCase, SampledCase
from specbench.checks.generation import make_drafter
from specbench.checks.law import TOLERANCE, Tokens, completed, exact_law, sampling_of
from specbench.claims import Facts
from specbench.law.joint import total_variation
from specbench.law.scripted import CannotTell, law_of
from specbench.law.sequential import NULL_TV, LawTest, joint_cells, joint_law
from specbench.probe import Probe
from specbench.protocols import Coins, Drafter, LanguageModel
from specbench.record import ClaimRecord
from specbench.reference.drafters.sampled import SampledDrafter
from specbench.reference.sampling import probs
from specbench.subjects import NotTested, Subject
from specbench.tree import DraftTree, Proposal
from specbench.types import Generation, Request, Sampling

FALSE_ALARM = 1e-6  # of a whole run
MAX_CASES = 2_500  # that a run judges one of these claims on, all subjects together
ALPHA = FALSE_ALARM / MAX_CASES
LOOK_EVERY = 20  # draws
NUM_TEXTS, NUM_BATCHES = 600, 600  # a case: what the reference does in some 10 seconds
SHARE_ELSEWHERE = 0.3  # of them where computing is not exact or not ours: what coins do is the same in each precision
DRAFT_GRID = 16  # looks at a coin of a drafter over two tokens
MAX_CONTEXTS = 1_200  # that an oracle is asked for at once: of 31 tokens, three can be judged
NUM_FIRST = 4  # tokens of a row that are judged
NUM_PLACES = 4  # tokens of a text whose places are looked at together; of two rows half of them
NUM_CELLS = 16  # of about equal probability; one more holds what the law has not
NUM_SEEDS = 16
RAREST = 1e-9  # chance of what a right target is accused of, at most
SHAPES = ((1,), (), (2, 1), (), (1, 1))  # widths of drafts; rounds with none toss the fewest coins


@dataclass(frozen=True)
class Text:
    """places: where each token lies on the cumulative sums of its own law, in [0, 1]: evenly and independently drawn,
    but for the size of a token."""

    tokens: Tokens
    mass: float
    places: tuple[float, ...]


class Cells:
    """A partition of texts: a cell a text where there are few, else cells of about equal probability along an order,
    or one for each combination of halves of the tokens' laws. The last cell is for texts that have no probability."""

    def __init__(self, name: str, texts: Sequence[Text], cells: Sequence[int], size: int) -> None:
        self.name = name
        self._cell = {one.tokens: cell for one, cell in zip(texts, cells, strict=True)}
        self.law = [0.0] * (size + 1)
        for one, cell in zip(texts, cells, strict=True):
            self.law[cell] += one.mass

    def cell(self, tokens: Tokens) -> int:
        return self._cell.get(tokens, len(self.law) - 1)


class Watched:
    """What is counted of the texts of one request, and the test on it.

    groups: rows that are looked at together, and the cells of each. No row is in two groups, so that draws of several
    groups are independent. rounding: how far off a right target's law may be.
    """

    def __init__(self, groups: Mapping[tuple[int, ...], Sequence[Cells]], *, alpha: float, rounding: float) -> None:
        self.groups = groups
        self.laws = [joint_law([one.law for one in cells]) for cells in groups.values()]
        self.seen: list[Counter[int]] = [Counter() for _ in groups]
        self.test = LawTest(self.laws, alpha=alpha, null_tv=NULL_TV + rounding)

    def note(self, said: Sequence[Tokens]) -> None:
        """One text of each row."""
        for idx, (rows, cells) in enumerate(self.groups.items()):
            places = [one.cell(said[row]) for row, one in zip(rows, cells, strict=True)]
            cell = joint_cells(places, [len(one.law) for one in cells])
            self.seen[idx][cell] += 1
            self.test.note(idx, cell)


def check_joint(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """The same request with one seed after the other, until the e-process has seen enough."""
    assert isinstance(case, SampledCase)
    can_be_enumerated(subject)
    sampling = sampling_of(case)
    texts, rounding = law_and_rounding(subject, case, Request(case.prompt, case.max_new_tokens, sampling))
    partitions = partitions_of(texts)
    watched = [Watched({(0,): [one]}, alpha=ALPHA / len(partitions), rounding=rounding) for one in partitions]
    probe = subject.open(case, drafter=drafter_of(subject, case))
    num_tokens, most = len(texts[0].tokens), num_draws(subject, NUM_TEXTS)
    seen: Counter[Tokens] = Counter()
    for num in range(1, most + 1):
        seed = case.seed + num - 1
        generation = probe.generate(case.prompt, max_new_tokens=case.max_new_tokens, sampling=sampling, seed=seed)
        tokens = judged(claims.JointLawMismatch, generation, case, num_tokens)
        record.num_rounds += len(generation.rounds)
        record.num_tokens += num_tokens
        seen[tokens] += 1
        for one in watched:
            one.note([tokens])
        rejected = first_rejected(watched) if num % LOOK_EVERY == 0 else None
        if rejected is not None:
            raise claims.JointLawMismatch(
                Facts(
                    headline=f"{num} sampled texts of {num_tokens} tokens do not follow the joint law of the target "
                    f"(e-value {rejected.test.e_value:.1e}, {rejected.groups[0,][0].name})",
                    **_shares(texts, seen),
                    source=f"the product of the oracle's own laws at temperature {sampling.temperature:g}",
                    remark=_how(case, seed),
                )
            )
    _note_seen(record, f"{most} sampled texts", watched)


def check_rows(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """Batches with seeds of their own, again and again: the law of each row's first tokens, and whether any two rows
    go together."""
    assert isinstance(case, SampledCase)
    can_be_enumerated(subject)
    requests = requests_of(case, subject.vocab_size(case.model))
    num_tokens = min(NUM_FIRST, case.max_new_tokens)
    laws = [law_and_rounding(subject, case, replace(one, max_new_tokens=num_tokens)) for one in requests]
    pairs = list(itertools.combinations(range(len(requests)), 2))
    alpha = ALPHA / (1 + len(pairs))
    alone: dict[tuple[int, ...], list[Cells]] = {
        (row,): partitions_of(texts)[:1] for row, (texts, _) in enumerate(laws)
    }
    watched = [Watched(alone, alpha=alpha, rounding=max(one for _, one in laws))]
    for pair in pairs:
        halves = [by_places(laws[row][0], NUM_PLACES // 2) for row in pair]
        watched.append(Watched({pair: halves}, alpha=alpha, rounding=sum(laws[row][1] for row in pair)))
    probe, most = subject.open(case, drafter=drafter_of(subject, case)), num_draws(subject, NUM_BATCHES)
    seen: list[Counter[Tokens]] = [Counter() for _ in requests]
    for num in range(1, most + 1):
        first = case.seed + (num - 1) * len(requests)
        batch = probe.generate_batch([replace(one, seed=first + row) for row, one in enumerate(requests)])
        said = [
            judged(claims.RowsDepend, one, case, len(texts[0].tokens))
            for one, (texts, _) in zip(batch, laws, strict=True)
        ]
        record.num_tokens += sum(map(len, said))
        for row, tokens in enumerate(said):
            seen[row][tokens] += 1
        for one in watched:
            one.note(said)
        rejected = first_rejected(watched) if num % LOOK_EVERY == 0 else None
        if rejected is not None:
            of_rows = _alone_facts if rejected is watched[0] else _pair_facts
            raise claims.RowsDepend(
                replace(
                    of_rows(rejected, num, [texts for texts, _ in laws], seen),
                    remark=_how(case, first + len(requests) - 1),
                )
            )
    _note_seen(record, f"{most} sampled batches", watched)


def check_seed(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """One seed again, behind another request, and on a fresh instance; then other seeds."""
    assert isinstance(case, SampledCase)
    sampling = sampling_of(case)

    def generate(probe: Probe, seed: int, prompt: tuple[int, ...] = case.prompt) -> Tokens:
        answer = probe.generate(prompt, max_new_tokens=case.max_new_tokens, sampling=sampling, seed=seed)
        record.num_tokens += len(answer.tokens)
        return answer.tokens

    probe = subject.open(case, drafter=_by_context(subject, case))
    first = generate(probe, case.seed)
    if subject.exact:  # elsewhere rounding may take a coin to the other side of a step
        again = {"asked again": generate(probe, case.seed)}
        generate(probe, case.seed + 1, (*case.prompt, case.prompt[0]))
        again["asked again behind another request"] = generate(probe, case.seed)
        again["on a fresh instance"] = generate(subject.open(case, drafter=_by_context(subject, case)), case.seed)
        for how, tokens in again.items():
            if tokens != first:
                raise claims.SeedIgnored(
                    Facts(
                        headline=f"seed {case.seed}, {how}, gives another text",
                        expected=str(list(first)),
                        actual=str(list(tokens)),
                        source="the first answer to the same request and seed",
                    )
                )
    others = [generate(probe, case.seed + 1 + idx) for idx in range(NUM_SEEDS)]
    chance, reason = chance_of_equal(subject, case, sampling, first)
    if all(tokens == first for tokens in others):
        if chance is not None and chance >= RAREST:
            record.note_remark(f"one text was so likely that {NUM_SEEDS} seeds gave it with probability {chance:.1g}")
            return
        raise claims.SeedIgnored(
            Facts(
                headline=f"{NUM_SEEDS} other seeds give the text of seed {case.seed}: {reason}",
                expected="not always the same text",
                actual=f"{NUM_SEEDS + 1} times {list(first)}",
                source=f"seeds {case.seed} to {case.seed + NUM_SEEDS}, temperature {sampling.temperature:g}",
            )
        )


def check_own_drafts(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """Every coin of the target's drafter, and on each draft every coin of its verifier."""
    assert isinstance(case, DrafterCase)
    if not (isinstance(subject.bank, TinyBank) and subject.exact and subject.vocab_size(case.model) == 2):
        raise NotTested("drafts and coins are gone through in tiny-fp64 alone, over a vocabulary of two tokens")
    sampling = Sampling(temperature=case.temperature / 100)
    verifier = subject.open(case)
    emitted: dict[Tokens, float] = {}
    likeliest: tuple[float, DraftTree] = (0.0, DraftTree.of([0], [-1]))
    proposals, only_chains = subject.law_drafts
    for tree, weight in drafts_of(subject, case, sampling):
        if tree.proposal not in proposals or (only_chains and not _is_chain(tree)):
            raise NotTested(
                f"the drafter {case.drafter} makes drafts that the verifier is not made for, by its own word "
                f"(proposals = {', '.join(proposals)}{', only_chains' * only_chains})"
            )
        logits = subject.score(case, case.prompt[:-1], tree).logits
        for result, mass in exact_law(
            lambda coins, tree=tree, logits=logits: verifier.verify(tree, logits, sampling=sampling, coins=coins)
        ).items():
            text = (*(tree.token_list[node] for node in result.path), result.bonus_token)
            emitted[text] = emitted.get(text, 0.0) + weight * mass
        record.num_nodes += tree.num_drafts
        likeliest = max(likeliest, (weight, tree), key=lambda one: one[0])
    num_tokens = max(map(len, emitted))

    def row_behind(text: Tokens) -> list[float]:
        row: list[float] = probs(subject.rows(case, [*case.prompt, *text])[-1], sampling).tolist()
        return row

    right, actual = completed({(): 1.0}, row_behind, num_tokens), completed(emitted, row_behind, num_tokens)
    distance = total_variation(actual, right)
    if distance > TOLERANCE:
        worst = max({**right, **actual}, key=lambda text: abs(actual.get(text, 0.0) - right.get(text, 0.0)))
        raise claims.DraftedLawMismatch(
            Facts(
                headline=f"drafts of {case.drafter!r}, judged by the target's own verifier at temperature "
                f"{sampling.temperature:g}: the law of {num_tokens} token{'s' * (num_tokens > 1)} is off by a total "
                f"variation of {distance:.3g}",
                expected=f"{right.get(worst, 0.0):.6f} for {list(worst)}",
                actual=f"{actual.get(worst, 0.0):.6f}",
                source="the product of the oracle's own laws",
                remark="every coin of drafter and verifier gone through",
                tree=likeliest[1],
            )
        )


def drafts_of(subject: Subject, case: DrafterCase, sampling: Sampling) -> list[tuple[DraftTree, float]]:
    """Each draft that the target's drafter can make of the case, and its probability."""
    probe = subject.open_drafter(case)
    trees: dict[Any, DraftTree] = {}

    def draft(coins: Coins) -> Any:
        tree = probe.draft(
            list(case.prompt),
            max_nodes=case.max_nodes,
            max_depth=case.max_depth,
            sampling=sampling,
            coins=coins,
        )
        # Rounded: a cache that is filled by the first draft may move the last bit of q in the second.
        rows = (
            None
            if tree.draft_probs is None
            else tuple(map(tuple, tree.draft_probs.double().round(decimals=9).tolist()))
        )
        key = (tuple(tree.token_list), tuple(tree.parent_list), tree.proposal, rows)
        trees.setdefault(key, tree)
        return key

    try:
        return [(trees[key], mass) for key, mass in law_of(draft, grid=DRAFT_GRID).items()]
    except CannotTell as reason:
        raise NotTested(
            f"the law of the drafter {case.drafter} cannot be found by going through its coins: {reason}"
        ) from None


def text_law(model: LanguageModel, prompt: Tokens, sampling: Sampling, num_tokens: int) -> list[Text]:
    """Every text of `num_tokens` tokens that can follow; of fewer where there are too many contexts to ask for."""
    texts = [Text((), 1.0, ())]
    for _ in range(num_tokens):
        if len(texts) > MAX_CONTEXTS:
            break
        batch = torch.tensor([[*prompt, *one.tokens] for one in texts])
        rows = probs(model.causal(batch)[:, -1], sampling)
        middles = rows.cumsum(dim=-1) - rows / 2
        texts = [
            Text((*one.tokens, token), one.mass * mass, (*one.places, middle[token]))
            for one, row, middle in zip(texts, rows.tolist(), middles.tolist(), strict=True)
            for token, mass in enumerate(row)
            if mass
        ]
    return texts


def partitions_of(texts: Sequence[Text]) -> list[Cells]:
    """Different orders show different faults: a wrong first token, a wrong last one, a wrong temperature, coins that
    are used twice."""
    if len(texts) <= NUM_CELLS:
        return [Cells("one by one", texts, range(len(texts)), len(texts))]
    orders: dict[str, Any] = {
        "by their first tokens": lambda one: one.tokens,
        "by their last tokens": lambda one: one.tokens[::-1],
        "by their probability": lambda one: (one.mass, one.tokens),
    }
    return [*(_in_order(name, sorted(texts, key=key)) for name, key in orders.items()), by_places(texts)]


def by_places(texts: Sequence[Text], most: int = NUM_PLACES) -> Cells:
    """In which half of its own law each of the first tokens lies: coins that are used twice make halves go together."""
    num_places = min(most, len(texts[0].places))
    cells = [joint_cells([one.places[idx] >= 0.5 for idx in range(num_places)], [2] * num_places) for one in texts]
    return Cells("by the halves of their laws that tokens lie in", texts, cells, 2**num_places)


def _in_order(name: str, texts: Sequence[Text]) -> Cells:
    before, cells = 0.0, []
    for one in texts:
        cells.append(min(int((before + one.mass / 2) * NUM_CELLS), NUM_CELLS - 1))
        before += one.mass
    return Cells(name, texts, cells, NUM_CELLS)


def law_and_rounding(subject: Subject, case: SampledCase, request: Request) -> tuple[list[Text], float]:
    """The oracle's texts, and twice what plain decoding's law in the subject's precision is off: no fault of a
    target."""
    asked = (request.prompt, request.sampling, request.max_new_tokens)
    with subject.clock.count("oracle"):
        texts = text_law(subject.oracle(case), *asked)
        if subject.exact:
            return texts, 0.0
        plain = text_law(subject.bank.model(case.model), *asked)
    right, own = ({one.tokens: one.mass for one in law} for law in (texts, plain))
    return texts, 2 * float(total_variation(right, own))


def first_rejected(watched: Sequence[Watched]) -> Watched | None:
    return next((one for one in watched if one.test.is_rejected), None)


def requests_of(case: SampledCase, vocab_size: int) -> list[Request]:
    """Rows 0 and 1 ask the same, the others something else at another temperature."""
    sampling = sampling_of(case)
    requests = []
    for row in range(case.num_rows):
        prompt = (
            case.prompt if row < 2 else (*case.prompt[: row - 2], *((one + row) % vocab_size for one in case.prompt))
        )
        other = sampling if row < 2 else replace(sampling, temperature=4 * sampling.temperature)
        requests.append(Request(prompt, case.max_new_tokens, sampling=other))
    return requests


def chance_of_equal(
    subject: Subject, case: SampledCase, sampling: Sampling, tokens: Tokens
) -> tuple[float | None, str]:
    """How probable it is that as many other seeds give this text, None where no oracle says; and how to say so."""
    if "oracle" not in subject.has or not tokens:
        usual = RAREST ** (1 / (NUM_SEEDS * max(len(tokens), 1)))
        return None, f"by chance only where each of {len(tokens)} tokens has a probability of {usual:.2f} or more"
    rows = probs(subject.rows(case, [*case.prompt, *tokens])[len(case.prompt) - 1 : -1], sampling)
    mass = float(rows[range(len(tokens)), list(tokens)].prod())
    return mass**NUM_SEEDS, f"by chance with probability {mass**NUM_SEEDS:.1g}"


def can_be_enumerated(subject: Subject) -> None:
    if subject.bank.real:
        raise NotTested("the joint law of texts is known for tiny models, whose tokens can be gone through")


def num_draws(subject: Subject, number: int) -> int:
    is_ours = isinstance(subject.bank, TinyBank) and subject.exact
    return number if is_ours else int(number * SHARE_ELSEWHERE)


def judged(violation: type[claims.Violation], generation: Generation, case: SampledCase, num_tokens: int) -> Tokens:
    """The tokens that are looked at, of an output that has as many as were asked for."""
    if len(generation.tokens) != case.max_new_tokens:
        raise violation(
            Facts(
                headline=f"a sampled output has {len(generation.tokens)} tokens, must have {case.max_new_tokens}",
                expected=f"{case.max_new_tokens} tokens",
                actual=str(list(generation.tokens)),
                source="max_new_tokens, no end token given",
            )
        )
    return generation.tokens[:num_tokens]


def drafter_of(subject: Subject, case: SampledCase) -> Drafter | None:
    """Drafts that are drawn and often refused, or those that the case's script or its other words say."""
    if "build" not in subject.has or case.drafter != DRAWN:
        return make_drafter(subject, case)
    return wavering_over(subject, case, SHAPES)


def wavering_over(
    subject: Subject, case: SampledCase, shapes: Sequence[tuple[int, ...]], *, kind: type[Wavering] | None = None
) -> Wavering:
    """A drafter for the target of a case, of what its verifier takes. NotTested where that is no drawn draft."""
    proposals, only_chains = subject.law_drafts
    drawn: list[Any] = [one for one in proposals if one != "deterministic"]
    if not drawn:
        raise NotTested("the target's verifier takes no drawn drafts, by its own word (proposals)")
    proposal: Proposal = drawn[case.seed % len(drawn)]
    shapes = [(1,) * len(one) for one in shapes] if only_chains else shapes
    model, kind = subject.bank.model(case.model), kind or Wavering
    return kind(model, shapes, first=case.seed // len(drawn), proposal=proposal)


class Wavering(SampledDrafter):
    """Draws from its model's law moved on by a token, and says so: in any round many drafts are refused, and some kept.
    shapes: widths of the drafts in turn, by the length of the context; first: where they begin."""

    def __init__(
        self, model: LanguageModel, shapes: Sequence[tuple[int, ...]], *, first: int, proposal: Proposal
    ) -> None:
        super().__init__(model, proposal=proposal)
        self._shapes, self._first = shapes, first

    def draft(self, context: list[int], **asked: Any) -> DraftTree:
        self._widths = self._shapes[(self._first + len(context)) % len(self._shapes)]
        return super().draft(context, **asked)

    def _law(self, logits: Tensor, temperature: float) -> Tensor:
        return super()._law(logits, temperature).roll(1)


def _by_context(subject: Subject, case: SampledCase) -> Drafter | None:
    """A script goes on where the request before has left it, so that equal seeds may meet other drafts."""
    return None if case.drafter == "scripted" else drafter_of(subject, case)


def _is_chain(tree: DraftTree) -> bool:
    return tree.parent_list == list(range(-1, tree.num_nodes - 1))


def _worst_text(texts: Sequence[Text], seen: Counter[Tokens]) -> tuple[float, Tokens, float]:
    """How far the share of one text is off at most, the text, and its probability."""
    law, num = {one.tokens: one.mass for one in texts}, seen.total()
    off, tokens = max((abs(law.get(text, 0.0) - seen[text] / num), text) for text in {**law, **seen})
    return off, tokens, law.get(tokens, 0.0)


def _shares(texts: Sequence[Text], seen: Counter[Tokens]) -> dict[str, Any]:
    _, tokens, mass = _worst_text(texts, seen)
    return {
        "expected": f"{list(tokens)} with probability {mass:.3g}",
        "actual": f"{seen[tokens]} of {seen.total()} draws",
    }


def _alone_facts(rejected: Watched, num: int, laws: Sequence[Sequence[Text]], seen: Sequence[Counter[Tokens]]) -> Facts:
    """The row that is furthest from its law."""
    worst = max(range(len(laws)), key=lambda row: _worst_text(laws[row], seen[row]))
    return Facts(
        headline=f"row {worst} of {len(laws)} does not follow the law of its own prompt over {num} batches "
        f"(e-value of all rows {rejected.test.e_value:.1e})",
        **_shares(laws[worst], seen[worst]),
        source="the oracle's law behind the row's prompt, at its temperature",
    )


def _pair_facts(rejected: Watched, num: int, laws: Sequence[Sequence[Text]], seen: Sequence[Counter[Tokens]]) -> Facts:
    """The combination of halves that comes too often."""
    ((one, two),) = rejected.groups
    (counts,), (law,) = rejected.seen, rejected.laws
    worst = max(counts, key=lambda cell: counts[cell] / num - law[cell])
    return Facts(
        headline=f"rows {one} and {two} of {len(laws)} depend on each other over {num} batches "
        f"(e-value {rejected.test.e_value:.1e})",
        expected=f"a probability of {law[worst]:.3g} that their tokens lie in these halves of their laws",
        actual=f"{counts[worst]} of {num} batches",
        source="the product of the laws of both rows",
    )


def _note_seen(record: ClaimRecord, what: str, watched: Sequence[Watched]) -> None:
    smallest = min(one.test.detectable_tv() for one in watched)
    record.note_remark(
        f"{what}: would have shown a total variation of {smallest:.2f} as often as not, false alarms at most "
        f"{FALSE_ALARM:g} a run"
    )


def _how(case: SampledCase, last_seed: int) -> str:
    drafts = "drafts that are drawn" if case.drafter == DRAWN else f"drafter {case.drafter}"
    return f"{drafts}, seeds {case.seed} to {last_seed}; false alarms at most {FALSE_ALARM:g} a run"
