"""Rows whose penalties, bans and grammar states look at the wrong history, or at none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specbench.reference.faults.fault import Fault
from specbench.reference.processors import process_row
from specbench.steps import Steps
from specbench.tree import DraftTree
from specbench.types import GREEDY, NEVER_STOP, Sampling, Stop

Plant = Callable[[Steps], Steps]
COUNTED = ("frequency_penalty", "presence_penalty")
PENALTIES = ("repetition_penalty", *COUNTED)


@dataclass(frozen=True)
class _Row:
    """What a row follows. context: all committed tokens, of which the first `num_prompt` are the prompt."""

    tree: DraftTree
    node: int
    context: Sequence[int]
    num_prompt: int

    @property
    def prompt(self) -> list[int]:
        return list(self.context[: self.num_prompt])

    @property
    def output(self) -> list[int]:
        return list(self.context[self.num_prompt :])

    @property
    def path(self) -> list[int]:
        """Tokens of the node's path below the root."""
        return self.tree.path_tokens(self.node)[1:]

    @property
    def history(self) -> list[int]:
        """The right one."""
        return [*self.context, *self.path]

    @property
    def is_leaf(self) -> bool:
        return not self.tree.children(self.node)


# What is done to the logits [V] of one row.
RowRule = Callable[[_Row, Tensor, int, Sampling, Stop], Tensor]


def _by_row(rule: Callable[[], RowRule]) -> Plant:
    """rule: makes one with fresh state."""

    def plant(steps: Steps) -> Steps:
        process_one = rule()

        def process(
            tree: DraftTree,
            target_logits: Tensor,
            *,
            context: Sequence[int],
            num_prompt: int,
            sampling: Sampling,
            stop: Stop,
        ) -> Tensor:
            rows = [
                process_one(_Row(tree, node, context, num_prompt), row, num_prompt, sampling, stop)
                for node, row in enumerate(target_logits)
            ]
            return torch.stack(rows)

        return replace(steps, process=process)

    return plant


def _process(
    row: Tensor, history: Sequence[int], num_prompt: int, sampling: Sampling, stop: Stop = NEVER_STOP
) -> Tensor:
    return process_row(row, history, num_prompt=num_prompt, sampling=sampling, stop=stop)


def _only(sampling: Sampling, *names: str) -> Sampling:
    return Sampling(**{name: getattr(sampling, name) for name in names})


def _without(sampling: Sampling, *names: str) -> Sampling:
    return replace(sampling, **{name: getattr(GREEDY, name) for name in names})


# The history that a row is processed with.
History = Callable[[_Row], Sequence[int]]


def _history(make: Callable[[], History]) -> Plant:
    """Everything is given another history."""

    def rule() -> RowRule:
        history = make()
        return lambda row, logits, num_prompt, sampling, stop: _process(
            logits, history(row), num_prompt, sampling, stop
        )

    return _by_row(rule)


def _history_of(part: tuple[str, ...], make: Callable[[], History]) -> Plant:
    """Only the rules named in `part` are given another history; the repetition penalty comes before them all."""

    def rule() -> RowRule:
        history = make()

        def process_one(row: _Row, logits: Tensor, num_prompt: int, sampling: Sampling, stop: Stop) -> Tensor:
            if "repetition_penalty" not in part:
                logits = _process(logits, row.history, num_prompt, _only(sampling, "repetition_penalty"))
            logits = _process(logits, history(row), num_prompt, _only(sampling, *part))
            rest = _without(sampling, *part, "repetition_penalty")
            return _process(logits, row.history, num_prompt, rest, stop)

        return process_one

    return _by_row(rule)


def _leaves_without(part: tuple[str, ...]) -> Plant:
    def process_one(row: _Row, logits: Tensor, num_prompt: int, sampling: Sampling, stop: Stop) -> Tensor:
        if row.is_leaf and row.tree.num_drafts:
            sampling = _without(sampling, *part)
        return _process(logits, row.history, num_prompt, sampling, stop)

    return _by_row(lambda: process_one)


def _inner_rows_raw(row: _Row, logits: Tensor, num_prompt: int, sampling: Sampling, stop: Stop) -> Tensor:
    return _process(logits, row.history, num_prompt, sampling if row.is_leaf else GREEDY, stop)


def _only_root_processed(row: _Row, logits: Tensor, num_prompt: int, sampling: Sampling, stop: Stop) -> Tensor:
    return logits if row.node else _process(logits, row.history, num_prompt, sampling, stop)


def _committed_only(row: _Row) -> Sequence[int]:
    return row.context


def _in_memory_order(row: _Row) -> Sequence[int]:
    """Every node before this one in memory, whichever branch it is in."""
    return [*row.context, *row.tree.token_list[1 : row.node + 1]]


def _with_siblings(row: _Row) -> Sequence[int]:
    """Each node of the path together with its siblings."""
    beside = [
        row.tree.token_list[child]
        for node in row.tree.path_to(row.node)[:-1]
        for child in row.tree.children(node)
        if child not in row.tree.path_to(row.node)
    ]
    return [*row.context, *beside, *row.path]


def _without_root(row: _Row) -> Sequence[int]:
    return [*row.context[:-1], *row.path]


def _path_twice(row: _Row) -> Sequence[int]:
    return [*row.context, *2 * row.path]


def _root_twice(row: _Row) -> Sequence[int]:
    return [*row.context, *(row.context[-1:] if row.node else ()), *row.path]


def _of_this_round(row: _Row) -> Sequence[int]:
    return [*row.prompt, *row.path]


def _leftmost_at_its_depth(row: _Row) -> Sequence[int]:
    depth = len(row.path)
    first = next(node for node in range(row.tree.num_nodes) if int(row.tree.depth[node]) == depth)
    return [*row.context, *row.tree.path_tokens(first)[1:]]


def _rejected_counted() -> History:
    drafted: list[int] = []

    def history(row: _Row) -> Sequence[int]:
        if row.node == 0 and not row.output:  # another text
            drafted.clear()
        out = [*row.context, *drafted, *row.path]
        if row.node == row.tree.num_nodes - 1:
            drafted.extend(row.tree.token_list[1:])
        return out

    return history


def _fed(choose: Callable[[list[int]], list[int]]) -> Callable[[], History]:
    """The output is what `choose` takes of each round's tokens, one after the other."""

    def make() -> History:
        fed: list[int] = []
        num_seen = 0

        def history(row: _Row) -> Sequence[int]:
            nonlocal num_seen
            if row.node == 0:
                if not row.output:
                    fed.clear()
                    num_seen = 0
                fed.extend(choose(row.output[num_seen:]))
                num_seen = len(row.output)
            return [*row.prompt, *fed, *row.path]

        return history

    return make


def _prompt_counted(row: _Row, logits: Tensor, num_prompt: int, sampling: Sampling, stop: Stop) -> Tensor:
    logits = _process(logits, row.history, num_prompt, _only(sampling, "repetition_penalty"))
    logits = _process(logits, row.history, 0, _only(sampling, *COUNTED))
    return _process(logits, row.history, num_prompt, _without(sampling, *PENALTIES), stop)


def _presence_by_count(row: _Row, logits: Tensor, num_prompt: int, sampling: Sampling, stop: Stop) -> Tensor:
    both = sampling.frequency_penalty + sampling.presence_penalty
    sampling = replace(sampling, frequency_penalty=both, presence_penalty=0.0)
    return _process(logits, row.history, num_prompt, sampling, stop)


def _repetition_of_output(row: _Row, logits: Tensor, num_prompt: int, sampling: Sampling, stop: Stop) -> Tensor:
    logits = _process(logits, row.history[num_prompt:], 0, _only(sampling, "repetition_penalty"))
    return _process(logits, row.history, num_prompt, _without(sampling, "repetition_penalty"), stop)


def _prompt_forgotten(row: _Row, logits: Tensor, num_prompt: int, sampling: Sampling, stop: Stop) -> Tensor:
    rule = _repetition_of_output if row.output else _in_order
    return rule(row, logits, num_prompt, sampling, stop)


def _in_order(row: _Row, logits: Tensor, num_prompt: int, sampling: Sampling, stop: Stop) -> Tensor:
    return _process(logits, row.history, num_prompt, sampling, stop)


def _repetition_by_count(row: _Row, logits: Tensor, num_prompt: int, sampling: Sampling, stop: Stop) -> Tensor:
    for token in row.history:
        logits = _process(logits, [token], 1, _only(sampling, "repetition_penalty"))
    return _process(logits, row.history, num_prompt, _without(sampling, "repetition_penalty"), stop)


def _repetition_last(row: _Row, logits: Tensor, num_prompt: int, sampling: Sampling, stop: Stop) -> Tensor:
    logits = _process(logits, row.history, num_prompt, _without(sampling, "repetition_penalty"), stop)
    return _process(logits, row.history, num_prompt, _only(sampling, "repetition_penalty"))


def _divides_all(row: _Row, logits: Tensor, num_prompt: int, sampling: Sampling, stop: Stop) -> Tensor:
    logits = logits.clone()
    logits[sorted(set(row.history))] /= sampling.repetition_penalty
    return _process(logits, row.history, num_prompt, _without(sampling, "repetition_penalty"), stop)


def _with_bans(change: Callable[[_Row, tuple[tuple[int, ...], ...]], list[tuple[int, ...]]]) -> Plant:
    """Other bans than were asked for."""

    def process_one(row: _Row, logits: Tensor, num_prompt: int, sampling: Sampling, stop: Stop) -> Tensor:
        bans = tuple(change(row, sampling.bad_words))
        return _process(logits, row.history, num_prompt, replace(sampling, bad_words=bans), stop)

    return _by_row(lambda: process_one)


def _cut_to_what_is_there(row: _Row, bans: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
    num_output = len(row.history) - row.num_prompt
    return [one[-num_output - 1 :] for one in bans]


def _raises_behind_forbidden(row: _Row, logits: Tensor, num_prompt: int, sampling: Sampling, stop: Stop) -> Tensor:
    if sampling.grammar is not None and sampling.grammar.state_after(row.history[num_prompt:]) is None:
        raise RuntimeError("the matcher has terminated, but is asked for the next mask")
    return _process(logits, row.history, num_prompt, sampling, stop)


def _twice(steps: Steps) -> Steps:
    def process(tree: DraftTree, target_logits: Tensor, **rest: Any) -> Tensor:
        return steps.process(tree, steps.process(tree, target_logits, **rest), **rest)

    return replace(steps, process=process)


FAULTS = (
    Fault(
        "penalty_committed_only",
        "logits-processor-state",
        "penalties of a drafted row count the committed text, not the row's own path",
        "a draft below another one that repeats a token",
        "processors.penalties",
        _history(lambda: _committed_only),
        origin="sgl-project/sglang#28242",
    ),
    Fault(
        "penalty_rejected_counted",
        "logits-processor-state",
        "rejected drafts of earlier rounds are still counted",
        "the round after a rejection",
        "processors.penalties",
        _history(_rejected_counted),
        origin="osaurus-ai/vmlx-swift#357",
        subtle="the round after a rejection",
    ),
    Fault(
        "penalty_path_twice",
        "logits-processor-state",
        "the drafted path is counted twice: a set penalty hides it, one that counts does not",
        "a frequency penalty and an accepted draft",
        "processors.penalties",
        _history(lambda: _path_twice),
        origin="osaurus-ai/vmlx-swift#357",
        subtle="a penalty that counts",
        kin="counted_twice",
    ),
    Fault(
        "penalty_root_twice",
        "logits-processor-state",
        "drafted rows count the last committed token twice, once as committed and once as the block's first",
        "a frequency penalty and a drafted row",
        "processors.penalties",
        _history(lambda: _root_twice),
        origin="vllm-project/vllm#33251",
        subtle="a penalty that counts, on drafted rows only",
        kin="counted_twice",
    ),
    Fault(
        "penalty_last_of_round_only",
        "logits-processor-state",
        "of the tokens that a round emits only the last is counted afterwards",
        "a round after an accepted draft",
        "processors.penalties",
        _history_of(PENALTIES, _fed(lambda tokens: tokens[-1:])),
        origin="sgl-project/sglang#33643",
        subtle="a round after an accepted draft",
    ),
    Fault(
        "penalty_siblings_counted",
        "logits-processor-state",
        "a drafted row's penalties count the siblings of its path as well",
        "a second sibling",
        "processors.penalties",
        _history_of(PENALTIES, lambda: _with_siblings),
        subtle="width",
    ),
    Fault(
        "penalty_prompt_counted",
        "logits-processor-state",
        "frequency and presence penalties count the prompt too",
        "a token of the prompt that would be said",
        "processors.penalties",
        _by_row(lambda: _prompt_counted),
        origin="osaurus-ai/vmlx-swift#295",
    ),
    Fault(
        "presence_by_count",
        "logits-processor-state",
        "the presence penalty is subtracted each time a token stands in the output",
        "a token that was said twice",
        "processors.penalties",
        _by_row(lambda: _presence_by_count),
        subtle="a token that was said twice",
    ),
    Fault(
        "repetition_by_count",
        "logits-processor-state",
        "the repetition penalty is applied each time a token stands in the text",
        "a token that stands there twice",
        "processors.penalties",
        _by_row(lambda: _repetition_by_count),
        subtle="a token that stands there twice",
    ),
    Fault(
        "repetition_of_output_only",
        "logits-processor-state",
        "the repetition penalty leaves out the prompt",
        "a token of the prompt that would be said",
        "processors.penalties",
        _by_row(lambda: _repetition_of_output),
        kin="repetition_of_output",
    ),
    Fault(
        "prompt_forgotten",
        "logits-processor-state",
        "the repetition penalty leaves out the prompt from the second round on",
        "a second round, and a token of the prompt that would be said",
        "processors.penalties",
        _by_row(lambda: _prompt_forgotten),
        subtle="a second round",
        kin="repetition_of_output",
    ),
    Fault(
        "repetition_last",
        "logits-processor-state",
        "the repetition penalty comes after the others instead of before them",
        "a repetition penalty beside another one",
        "processors.penalties",
        _by_row(lambda: _repetition_last),
        subtle="two kinds of penalty at once",
    ),
    Fault(
        "leaves_not_penalised",
        "logits-processor-state",
        "penalties are left out in rows of leaves, where the bonus token of a full accept comes from",
        "a full accept",
        "processors.penalties",
        _leaves_without(PENALTIES),
        subtle="a full accept",
        kin="leaf_rows",
    ),
    Fault(
        "inner_rows_raw",
        "logits-processor-state",
        "only rows that give a bonus token are processed, those that judge a draft are raw",
        "a draft",
        "processors.penalties",
        _by_row(lambda: _inner_rows_raw),
        origin="vllm-project/vllm#38467",
    ),
    Fault(
        "ban_on_root_only",
        "logits-processor-state",
        "only the root's row is processed, drafted rows are judged raw",
        "any accepted draft",
        "processors.bad_words",
        _by_row(lambda: _only_root_processed),
        origin="mlx-node/mlx-node#11",
    ),
    Fault(
        "bans_in_memory_order",
        "logits-processor-state",
        "a ban is matched against the drafts before a row in memory, whichever branch they are in",
        "a ban of several tokens and a second sibling",
        "processors.bad_words",
        _history_of(("bad_words",), lambda: _in_memory_order),
        subtle="a ban of several tokens, and width",
        kin="memory_order",
    ),
    Fault(
        "bans_within_a_round",
        "logits-processor-state",
        "a ban is matched against the row's own path only: one that begins in the round before is missed",
        "a ban that spans two rounds",
        "processors.bad_words",
        _history_of(("bad_words",), lambda: _of_this_round),
        subtle="a ban that spans two rounds",
        kin="history_of_round",
    ),
    Fault(
        "single_token_bans_only",
        "logits-processor-state",
        "bans of several tokens are ignored",
        "a ban of several tokens",
        "processors.bad_words",
        _with_bans(lambda row, bans: [one for one in bans if len(one) == 1]),
        subtle="a ban of several tokens",
    ),
    Fault(
        "first_token_banned",
        "logits-processor-state",
        "of a ban of several tokens the first is forbidden instead of the last",
        "a ban of several tokens",
        "processors.bad_words",
        _with_bans(lambda row, bans: [one[:1] for one in bans]),
        subtle="a ban of several tokens",
    ),
    Fault(
        "ban_longer_than_output",
        "logits-processor-state",
        "a ban longer than the output is matched by as much of its end as there is output",
        "a ban of several tokens near the beginning",
        "processors.bad_words",
        _with_bans(_cut_to_what_is_there),
        origin="huggingface/transformers.js#1278",
        subtle="a ban longer than the output so far",
    ),
    Fault(
        "grammar_in_memory_order",
        "grammar-state",
        "the grammar state moves from node to node in memory: right on a chain, no rollback between siblings",
        "a second sibling",
        "processors.grammar",
        _history(lambda: _in_memory_order),
        origin="sgl-project/sglang#24889",
        subtle="width",
        kin="memory_order",
    ),
    Fault(
        "grammar_of_leftmost_path",
        "grammar-state",
        "masks are made for the first node of each level, and its cousins are given the same",
        "a second node at a level",
        "processors.grammar",
        _history_of(("grammar",), lambda: _leftmost_at_its_depth),
        subtle="width",
    ),
    Fault(
        "grammar_starts_each_round",
        "grammar-state",
        "the grammar starts over in every round",
        "a second round",
        "processors.grammar",
        _history_of(("grammar",), lambda: _of_this_round),
        subtle="a second round",
        kin="history_of_round",
    ),
    Fault(
        "grammar_skips_bonus_tokens",
        "grammar-state",
        "the grammar is moved on by accepted drafts, not by the bonus tokens between them",
        "a second round",
        "processors.grammar",
        _history_of(("grammar",), _fed(lambda tokens: tokens[:-1])),
        subtle="a second round",
    ),
    Fault(
        "grammar_one_round_late",
        "grammar-state",
        "the grammar is in the state before the last committed token",
        "a second round",
        "processors.grammar",
        _history_of(("grammar",), lambda: lambda row: [*row.prompt, *row.output[:-1], *row.path]),
        subtle="a second round",
    ),
    Fault(
        "grammar_not_on_leaves",
        "grammar-state",
        "the bonus token of a full accept is picked without a mask",
        "a full accept",
        "processors.grammar",
        _leaves_without(("grammar",)),
        subtle="a full accept",
        kin="leaf_rows",
    ),
    Fault(
        "grammar_raises_behind_forbidden",
        "grammar-state",
        "the matcher is asked for a mask behind a draft that it has refused, and raises",
        "a draft that the grammar forbids",
        "processors.grammar",
        _by_row(lambda: _raises_behind_forbidden),
        origin="openvinotoolkit/openvino.genai#4081",
    ),
    Fault(
        "history_without_root",
        "logits-processor-state",
        "processors are given the text without its last committed token",
        "any row",
        "processors.history",
        _history(lambda: _without_root),
        origin="ml-explore/mlx-lm#990",
    ),
    Fault(
        "rows_processed_twice",
        "logits-processor-state",
        "every row goes through the processors twice",
        "any row",
        "processors.history",
        _twice,
    ),
    Fault(
        "repetition_divides_all",
        "logits-processor-state",
        "the repetition penalty divides negative logits too, which makes their tokens likelier",
        "a row whose logits are all negative",
        "processors.penalties",
        _by_row(lambda: _divides_all),
        origin="huggingface/transformers#2302",
        subtle="negative logits",
    ),
)
