"""Two tokenizers side by side: whether their ids mean the same, and which ids spell one token where they do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

SHOWN = 3  # differing tokens in a sentence


class OtherVocabulary(ValueError):
    """The drafter's ids are not the target's; the text shows the first that differ."""


def read_vocabulary(folder: str | Path) -> dict[str, int]:
    """Token to id, as the folder's tokenizer has it. No code of the folder is run."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise OtherVocabulary(f"{folder} has no tokenizer that can be read: {first}") from None
    return dict(tokenizer.get_vocab())


def check_same(target: Mapping[str, int], drafter: Mapping[str, int]) -> None:
    """OtherVocabulary unless every id means the same token in both."""
    theirs, ours = ({idx: token for token, idx in one.items()} for one in (drafter, target))
    differing = [idx for idx in sorted({*ours, *theirs}) if ours.get(idx) != theirs.get(idx)]
    if differing:
        shown = "; ".join(
            f"{idx} is {_said(ours.get(idx))} for the target, {_said(theirs.get(idx))} for the drafter"
            for idx in differing[:SHOWN]
        )
        more = f" and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
        raise OtherVocabulary(
            f"the drafter has another vocabulary ({len(drafter)} tokens, the target {len(target)}): {shown}{more}; "
            "ask for it mapped by token"
        )


@dataclass(frozen=True)
class VocabularyMap:
    """to_target: the target's id of each drafter id that spells one of its tokens. to_drafter: how each token of the
    target is read, by one id or, where the drafter has no such token, by the ids that its tokenizer spells it with."""

    to_target: Mapping[int, int]
    to_drafter: Mapping[int, tuple[int, ...]]

    @classmethod
    def of(cls, target: Any, drafter: Any) -> VocabularyMap:
        """target, drafter: transformers tokenizers. OtherVocabulary when they share no token."""
        ours, theirs = target.get_vocab(), drafter.get_vocab()
        shared = {theirs[token]: idx for token, idx in ours.items() if token in theirs}
        if not shared:
            raise OtherVocabulary(
                f"the target's {len(ours)} tokens and the drafter's {len(theirs)} have none in common"
            )
        read: dict[int, tuple[int, ...]] = {}
        for token, idx in ours.items():
            if token in theirs:
                read[idx] = (theirs[token],)
            else:
                read[idx] = tuple(drafter(target.decode([idx]), add_special_tokens=False)["input_ids"])
        return cls(shared, read)

    @cached_property
    def num_shared(self) -> int:
        return len(self.to_target)

    def read(self, tokens: list[int]) -> list[int]:
        """The target's tokens in the drafter's ids, token by token: a longer text only adds to the end."""
        return [one for token in tokens for one in self.to_drafter.get(token, ())]


def _said(token: str | None) -> str:
    return "nothing" if token is None else repr(token)
