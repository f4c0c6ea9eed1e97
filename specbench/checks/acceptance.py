"""Acceptance by depth, recomputed from rounds, and the claim that a target's own numbers add up to them."""

from __future__ import annotations

from collections.abc import Sequence

from specbench import claims
from specbench.cases import Case, GenerationCase
from specbench.checks.generation import make_drafter, rounds_of
from specbench.claims import Facts
from specbench.record import ClaimRecord
from specbench.subjects import Subject
from specbench.tree import DraftTree
from specbench.types import Generation, Round, Stop

ROUNDING = 1e-6  # of a ratio that a target may have computed in fp32


def by_depth(rounds: Sequence[Round]) -> list[tuple[int, int]]:
    """(accepted, verified) at depth 1, 2, ...: a round verifies depth d when its first d - 1 drafts were accepted and
    the last of these has a child; it accepts there when one of those children was. Rounds without drafts verify
    nothing."""
    counts: list[tuple[int, int]] = []
    for one in rounds:
        tree = DraftTree.of(one.tokens, one.parents)
        for depth in range(1, len(one.path) + 2):
            last = one.path[depth - 2] if depth > 1 else 0
            if not tree.children(last):
                break
            if len(counts) < depth:
                counts.append((0, 0))
            accepted, verified = counts[depth - 1]
            counts[depth - 1] = (accepted + (len(one.path) >= depth), verified + 1)
    return counts


def check_acceptance(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """Rounds give the output token by token, a stop cuts the last one only, and the numbers beside them are theirs.
    No round refuses a draft and then says the same. The instance has served another request: its counts must not be
    among them."""
    assert isinstance(case, GenerationCase)
    plain = subject.plain_text(case, case.prompt, case.max_new_tokens) if "oracle" in subject.has else ()
    stop = Stop((plain[case.eos_idx % len(plain)],)) if plain and case.eos_idx >= 0 else Stop()
    probe = subject.open(case, drafter=make_drafter(subject, case))
    probe.generate(case.prompt, max_new_tokens=min(3, case.max_new_tokens))
    generation, shown = probe.generate_and_report(case.prompt, max_new_tokens=case.max_new_tokens, stop=stop)
    rounds = rounds_of(generation, case)
    record.num_rounds += len(rounds)
    record.num_tokens += len(generation.tokens)
    num_emitted = 0
    for number, one in enumerate(rounds, start=1):
        said = [*(one.tokens[node] for node in one.path), one.bonus_token]
        num_emitted += len(one.emitted)
        is_cut = len(one.emitted) < len(said)
        if list(one.emitted) != said[: len(one.emitted)] or not one.emitted or (is_cut and number < len(rounds)):
            _wrong(
                f"round {number} says {list(one.emitted)} was emitted, but its path and bonus token are {said}",
                f"{said}{', or its beginning' if number == len(rounds) else ''}",
                str(list(one.emitted)),
                one,
            )
        lost = _lost(one)
        if lost and number < len(rounds):
            _wrong(
                f"round {number} refuses node {lost}, and then says its token {one.bonus_token}: acceptance is lost",
                f"path {DraftTree.of(one.tokens, one.parents).path_to(lost)[1:]}",
                f"path {list(one.path)}, bonus token {one.bonus_token}",
                one,
            )
    if num_emitted != len(generation.tokens):
        _wrong(
            f"the rounds emitted {num_emitted} tokens, the output has {len(generation.tokens)}",
            f"{len(generation.tokens)} tokens",
            f"{[len(one.emitted) for one in rounds]} by round",
        )
    expected = numbers(generation)
    for name, value in shown.items():
        if name in expected and abs(value - expected[name]) > ROUNDING * max(1.0, abs(expected[name])):
            _wrong(
                f"{name} is {value:g}, its rounds say {expected[name]:g}",
                f"{expected[name]:g}   {DEFINITIONS[name]}",
                f"{value:g}",
            )


DEFINITIONS = {
    "acceptance_length": "accepted drafts + 1 a target forward, pooled over rounds",
    "acceptance_rate": "accepted drafts / drafted depth, pooled over rounds",
    "num_accepted": "accepted drafts, the bonus tokens not among them",
    "num_drafted": "drafted nodes, the roots not among them",
}


def numbers(generation: Generation) -> dict[str, float]:
    """What rounds add up to, by name. Without a drafted level there is no rate."""
    rounds = generation.rounds
    if not rounds:
        return {}
    accepted = sum(len(one.path) for one in rounds)
    levels = sum(int(DraftTree.of(one.tokens, one.parents).depth.max()) for one in rounds)
    found = {
        "acceptance_length": accepted / len(rounds) + 1,
        "num_accepted": float(accepted),
        "num_drafted": float(sum(len(one.tokens) - 1 for one in rounds)),
    }
    return {**found, "acceptance_rate": accepted / levels} if levels else found


def _lost(one: Round) -> int:
    """A node that spells the path and the bonus token of its round; 0 when there is none, as there should be."""
    tree = DraftTree.of(one.tokens, one.parents)
    said = [*(one.tokens[node] for node in one.path), one.bonus_token]
    return next((node for node in range(1, tree.num_nodes) if tree.path_tokens(node)[1:] == said), 0)


def _wrong(headline: str, expected: str, actual: str, one: Round | None = None) -> None:
    tree = None if one is None else DraftTree.of(one.tokens, one.parents)
    raise claims.AcceptanceMismatch(
        Facts(headline=headline, expected=expected, actual=actual, source="recomputed from the rounds", tree=tree)
    )
