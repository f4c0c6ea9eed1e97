"""The reference decoder as a frozen set of small pure steps, declared here and filled elsewhere.

`reference/steps.py` fills it with readable PyTorch, kernels with their twins. A planted fault is
`dataclasses.replace(steps, commit=...)`, so that the good code needs no flags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from specbench.tree import DraftTree
from specbench.types import Sampling, Stop, Taps, VerifyResult

if TYPE_CHECKING:
    from specbench.protocols import Cache, Coins, Drafter, LanguageModel


@dataclass(frozen=True)
class FlatTree:
    """A tree laid out as the rows of one forward.

    tokens, position_ids, node_of_row: int64 [M]. mask: bool [M, M], True where a row sees another row of this forward;
    every row sees the whole prefix. Ancestors stand before their descendants. row_of_node: int64 [N], the row whose
    logits, keys and values stand for a node.
    """

    tokens: Tensor
    position_ids: Tensor
    mask: Tensor
    node_of_row: Tensor
    row_of_node: Tensor

    @property
    def num_rows(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Emission:
    """What a round adds to the output once stop rules have cut it.

    finish_reason: "eos", "stop", "length" or None (go on).
    """

    tokens: tuple[int, ...]
    finish_reason: str | None


class DraftStep(Protocol):
    def __call__(
        self,
        drafter: Drafter,
        context: list[int],
        *,
        max_nodes: int,
        max_depth: int,
        sampling: Sampling,
        coins: Coins,
    ) -> DraftTree: ...


class FlattenStep(Protocol):
    def __call__(self, tree: DraftTree, prefix_len: int) -> FlatTree: ...


class ForwardStep(Protocol):
    def __call__(self, model: LanguageModel, flat: FlatTree, cache: Cache, *, taps: Taps | None = None) -> Tensor:
        """Returns logits float [M, V] and leaves M new rows in the cache."""
        ...


class ProcessStep(Protocol):
    def __call__(
        self,
        tree: DraftTree,
        target_logits: Tensor,
        *,
        context: Sequence[int],
        num_prompt: int,
        sampling: Sampling,
        stop: Stop,
    ) -> Tensor:
        """Penalties, bad words, grammar, processors and the least length, applied to target_logits float [N, V].

        context: all committed tokens, the root last, of which the first `num_prompt` are the prompt. Row i is changed
        by the history of node i: the context, then node i's own path. Each row is processed once.
        """
        ...


class WalkStep(Protocol):
    def __call__(self, tree: DraftTree, target_logits: Tensor) -> VerifyResult:
        """target_logits: float [N, V], row i follows node i."""
        ...


class SampleStep(Protocol):
    def __call__(
        self, tree: DraftTree, target_logits: Tensor, *, sampling: Sampling, coins: Coins, root_place: int = 0
    ) -> VerifyResult:
        """The walk where the temperature is above 0. target_logits: float [N, V], processed, row i follows node i.
        root_place: the absolute position of the root, for noise that hangs on it."""
        ...


class EmitStep(Protocol):
    def __call__(
        self, tree: DraftTree, result: VerifyResult, *, stop: Stop, num_remaining: int, output: Sequence[int] = ()
    ) -> Emission:
        """output: what was emitted in the rounds before, where a stop sequence may have begun."""
        ...


class CommitStep(Protocol):
    def __call__(self, cache: Cache, prefix_len: int, rows: Sequence[int]) -> None:
        """rows: the rows of the last forward to keep, the root's first, in path order."""
        ...


@dataclass(frozen=True)
class Steps:
    """One round: draft -> flatten -> forward -> process -> walk (or sample) -> emit -> commit.

    `emit` comes before `commit` because a stop rule may cut the accepted path, and rows past the cut must not be kept.
    """

    draft: DraftStep
    flatten: FlattenStep
    forward: ForwardStep
    process: ProcessStep
    walk: WalkStep
    sample: SampleStep
    emit: EmitStep
    commit: CommitStep
