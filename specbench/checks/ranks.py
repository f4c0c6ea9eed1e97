"""The claim about ranks in lock step: two of them, whose logits differ by rounding and whose drafters by seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specbench import claims
from specbench.cases import Case, CommitRound, GenerationCase
from specbench.checks.generation import scripts_of
from specbench.claims import Facts
from specbench.compare import first_difference
from specbench.lockstep import LockStep, OutOfStep
from specbench.protocols import Cache, LanguageModel
from specbench.record import ClaimRecord
from specbench.reference.decoder import Decoder
from specbench.reference.drafters.scripted import ScriptedDrafter
from specbench.steps import FlatTree
from specbench.subjects import Subject
from specbench.tree import DraftTree
from specbench.types import Generation, Taps
from specbench.wrapping import WrappedModel

NUM_RANKS = 2
WAIT = 60.0  # seconds a rank waits for the other: no limit on a slow target, only on one that never comes


def check_agree(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """A rank that decides for itself says other tokens at nearly every step: tokens are tied in pairs, and rounding
    breaks each tie one way on one rank and the other way on the other."""
    assert isinstance(case, GenerationCase)
    meeting = LockStep(NUM_RANKS, timeout=WAIT)
    models = [TiedModel(subject.bank.model(case.model), rank) for rank in range(NUM_RANKS)]
    probes = [
        subject.open(case, drafter=_drafter(case, model, rank), model=model, group=meeting.groups[rank])
        for rank, model in enumerate(models)
    ]
    answers = probes[0].generate_in_lockstep(probes[1:], meeting, case.prompt, max_new_tokens=case.max_new_tokens)
    if isinstance(answers, OutOfStep):
        raise claims.RankDivergence(
            Facts(
                headline=str(answers),
                expected="every rank calls broadcast equally often and in the same order",
                actual=str(answers),
                source="lock step",
            )
        )
    record.num_rounds += len(answers[0].rounds)
    record.num_tokens += len(answers[0].tokens)
    _check_equal(answers[0], answers[1])
    counts = [group.num_broadcasts for group in meeting.groups]
    if len(set(counts)) > 1:
        raise claims.RankDivergence(
            Facts(
                headline=f"rank 0 has called broadcast {counts[0]} times, rank 1 {counts[1]} times",
                expected=str(counts[0]),
                actual=str(counts[1]),
                source="rank 0",
            )
        )


class TiedModel(WrappedModel):
    """`model` with the logits of tokens 0 and 1, 2 and 3, ... tied in pairs, up to rounding that differs by rank."""

    def __init__(self, model: LanguageModel, rank: int) -> None:
        super().__init__(model)
        self._rank = rank

    def forward(self, flat: FlatTree, cache: Cache, *, taps: Taps | None = None) -> Tensor:
        return self._tied(super().forward(flat, cache, taps=taps))

    def causal(self, tokens: Tensor, *, taps: Taps | None = None) -> Tensor:
        return self._tied(super().causal(tokens, taps=taps))

    def logits(self, tokens: Sequence[int]) -> Tensor:
        return self._tied(super().logits(tokens))

    def _tied(self, logits: Tensor) -> Tensor:
        """logits: float [..., V]. The second of a pair gets the first one's, moved by a few units in the last place."""
        tied = logits.clone()
        first = logits[..., 0 : logits.shape[-1] // 2 * 2 : 2]
        few_units = 4 * torch.finfo(logits.dtype).eps * float(logits.abs().max())
        tied[..., 1::2] = first + (few_units if self._rank == 0 else -few_units)
        return tied


def _drafter(case: GenerationCase, model: TiedModel, rank: int) -> ScriptedDrafter:
    """Rank 0 plays the case's script. The others play it with other tokens and a node less in each tree, or without
    any draft, and expect what plain decoding says on their own rank."""
    rounds = case.rounds if rank == 0 else [_other_seed(one, model.vocab_size) for one in case.rounds]
    plain = Decoder(model).generate(case.prompt, max_new_tokens=case.max_new_tokens + 3).tokens
    return ScriptedDrafter([*case.prompt, *plain], scripts_of(rounds), vocab_size=model.vocab_size)


def _other_seed(one: CommitRound, vocab_size: int) -> CommitRound:
    # By the size of the tree one node less or no draft at all, so that a short script holds both.
    num_nodes = max(1, len(one.tokens) - 1) if len(one.tokens) % 2 else 1
    tokens = tuple((token + 1) % vocab_size for token in one.tokens[:num_nodes])
    return replace(one, tokens=tokens, parents=one.parents[:num_nodes], accept=min(one.accept, num_nodes - 1))


def _check_equal(first: Generation, second: Generation) -> None:
    at = first_difference(first.tokens, second.tokens)
    if at is not None:
        raise claims.RankDivergence(
            Facts(
                headline=f"rank 1 emits another token than rank 0 at token {at}",
                expected=str(list(first.tokens)),
                actual=str(list(second.tokens)),
                source="rank 0",
            )
        )
    for number, (ours, theirs) in enumerate(zip(first.rounds, second.rounds, strict=False), start=1):
        for name in ("tokens", "parents", "path", "bonus_token"):
            expected, actual = getattr(ours, name), getattr(theirs, name)
            if expected != actual:
                what = {"tokens": "draft", "parents": "draft tree", "bonus_token": "bonus token"}.get(name, name)
                raise claims.RankDivergence(
                    Facts(
                        headline=f"round {number}: rank 1 has another {what} than rank 0",
                        expected=str(expected),
                        actual=str(actual),
                        source="rank 0",
                        tree=DraftTree.of(ours.tokens, ours.parents),
                    )
                )
    if len(first.rounds) != len(second.rounds):
        raise claims.RankDivergence(
            Facts(
                headline=f"rank 1 takes {len(second.rounds)} rounds, rank 0 {len(first.rounds)}",
                expected=str(len(first.rounds)),
                actual=str(len(second.rounds)),
                source="rank 0",
            )
        )
