"""Counting the tokens that are not the oracle's argmax, in a target's output and in plain decoding's own text.

Counted only; `specbench.budget` says how many are too many.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specbench.cases import GenerationCase
from specbench.compare import regret
from specbench.record import ClaimRecord
from specbench.reference.decoder import Decoder
from specbench.reference.model import LlamaModel
from specbench.subjects import Subject


def note_flips(
    record: ClaimRecord,
    subject: Subject,
    case: GenerationCase,
    tokens: Sequence[int],
    plain: Sequence[int],
    *,
    start: int | None,
) -> None:
    """Both counts from `start` on, the first token in which the two texts differ (None: nowhere).

    plain: what plain decoding emits in the dtype of the subject's models. A target that computes in less is compared
    with plain decoding in that precision, over whole texts: where the two part says nothing then.
    """
    if subject.exact:
        return
    model = subject.bank.model(case.model)
    if subject.noise_dtype != getattr(model, "dtype", subject.noise_dtype):
        if not isinstance(model, LlamaModel) or torch.finfo(subject.noise_dtype).bits > 16:
            return  # fp32 against fp64: nothing flips
        plain, start = _plain_text(subject, model, case, len(tokens)), 0
    if start is None:
        return
    end = min(len(tokens), len(plain))
    flips, plain_flips = (_flips(subject, case, text, start, end) for text in (tokens, plain))
    record.note_flips((case.model, *case.prompt, *plain[:start]), flips, plain_flips, end - start)


def _flips(subject: Subject, case: GenerationCase, tokens: Sequence[int], start: int, end: int) -> int:
    rows = subject.rows(case, [*case.prompt, *tokens])[len(case.prompt) - 1 : -1]  # row i judges token i
    return sum(regret(rows[idx], tokens[idx]) > 0 for idx in range(start, end))


def _plain_text(subject: Subject, model: LlamaModel, case: GenerationCase, num_tokens: int) -> tuple[int, ...]:
    def decode() -> tuple[int, ...]:
        lower = model.to(subject.noise_dtype)
        return Decoder(lower).generate(case.prompt, max_new_tokens=num_tokens).tokens

    with subject.clock.count("oracle"):
        return subject.remember(("plain in lower precision", case.model, case.prompt, num_tokens), decode)
