"""Gate: what a setting said on the prompts is judged before any speed-up is given.

Greedy tokens are held against plain decoding of the same stack. What is the same is EQUAL; what differs is judged by
`specbench.regret`: NOISE where every difference is a tie within a bound measured on the reference's plain forward in
that dtype, BUG otherwise. In fp32 that bound is some 1e-4 of a logit, so that nothing but a true tie passes. Plain
decoding, by which the others are judged, is itself held to the oracle in fp64, token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from specbench.audit import Output
from specbench.bench.loop import Item
from specbench.bench.rows import Gate, Row, Setting
from specbench.record import EQUAL, NOT_TESTED
from specbench.regret import FEWEST_ERRORS, Oracle, Plain, audit_ties, plain_of

LAW = "the law of its draws was not checked here: `specbench check` judges it"


class Judge:
    """oracle: called when something differs, for the model in fp64 with the weights that the sides have."""

    def __init__(
        self,
        items: Sequence[Item],
        plain: Mapping[str, Sequence[int]],
        *,
        oracle: Callable[[], Oracle],
        dtype: torch.dtype,
    ) -> None:
        """plain: our own plain decoding by prompt, whose errors give the bound."""
        self._items = {one.id: one for one in items}
        self._plain = plain
        self._oracle, self._dtype = oracle, dtype
        self._known: tuple[Oracle, Plain] | None = None

    def judge(
        self, setting: Setting, rows: Sequence[Row], reference: Mapping[str, Sequence[int]], *, is_right: bool = True
    ) -> Gate:
        """reference: plain decoding of the same stack, by prompt; to be equal to it proves nothing where it is not
        `is_right`. A text that differs between repetitions counts once for each."""
        outputs = list(dict.fromkeys(text for one in rows for text in self._outputs(one)))
        num_tokens = sum(len(one.tokens) for one in outputs)
        if not outputs:
            return Gate(setting.name, NOT_TESTED, "nothing was measured")
        if setting.temperature:
            return Gate(setting.name, NOT_TESTED, LAW, len(outputs), num_tokens, law_checked=False)
        right = {
            name: text
            for item in self._items.values()
            if item.id in reference
            for (name, _), text in zip(item.texts, item.split(reference[item.id]), strict=True)
        }
        num_equal = sum(right[one.name] == one.tokens for one in outputs)
        if is_right and num_equal == len(outputs) and not setting.is_plain:
            what = f"all {num_tokens} tokens are plain decoding's"
            return Gate(setting.name, EQUAL, what, len(outputs), num_tokens, num_equal)
        oracle, plain = self._errors()
        texts = [Output(one.prompt, right[one.name], one.name) for one in outputs]
        audit = audit_ties(oracle, plain, outputs, texts)
        facts = {name: value for name, value in audit.facts.items() if name != "by_margin"}
        return Gate(setting.name, audit.verdict, audit.sentence, len(outputs), num_tokens, num_equal, facts=facts)

    def _outputs(self, row: Row) -> list[Output]:
        item = self._items[row.prompt]
        return [
            Output(prompt, text, name, row.setting)
            for (name, prompt), text in zip(item.texts, item.split(row.tokens), strict=True)
        ]

    def _errors(self) -> tuple[Oracle, Plain]:
        """Of as many plain texts as give enough errors; our forward shows one a token in each of four shapes."""
        if self._known is None:
            oracle, texts, num = self._oracle(), list[Output](), 0
            for item, tokens in ((self._items[name], tokens) for name, tokens in self._plain.items()):
                for (name, prompt), text in zip(item.texts, item.split(tokens), strict=True):
                    texts.append(Output(prompt, text, name))
                num += len(tokens)
                if num >= FEWEST_ERRORS:
                    break
            self._known = oracle, plain_of(oracle, texts, self._dtype)
        return self._known
