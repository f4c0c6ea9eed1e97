"""What a correct speculative decoder must do: one claim an id, each with its MUST sentence and its own exception class.

A claim's `needs` are capabilities (see `loading.py`); a target without one of them is NOT TESTED on that claim, with
the sentence that says what to expose. How a claim is checked stands in `checks/`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specbench.tree import DraftTree


@dataclass(frozen=True)
class Claim:
    """id: stable name. level: the adapter level it judges. needs: capabilities. look_at: where such a fault lives."""

    id: str
    level: int
    must: str
    needs: tuple[str, ...]
    look_at: str


@dataclass(frozen=True)
class Facts:
    """What a check found. `failures.render` turns it into text; checks write no layout.

    headline: what differs and where, readable alone. expected, actual: the two values, expected from `source`.
    remark: one line under `actual`, the margin of a differing token for instance.
    tree, notes: the tree to draw and a note beside each node that matters.
    """

    headline: str
    expected: str
    actual: str
    source: str = "reference.autoregressive"
    remark: str = ""
    tree: DraftTree | None = None
    notes: dict[int, str] = field(default_factory=dict)


class Violation(AssertionError):
    """A claim does not hold on one case. One subclass per claim, so that shrinking never slides to another fault."""

    claim_id: str = ""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts.headline)
        self.facts = facts


class Misbehaviour(Violation):
    """The target raised, or returned what cannot be an answer: wrong type, shape, NaN, a token out of range."""


class MaskMismatch(Violation):
    claim_id = "tree.mask"


class PositionMismatch(Violation):
    claim_id = "tree.positions"


class LogitsMismatch(Violation):
    claim_id = "tree.logits"


class LayerMismatch(Violation):
    claim_id = "tree.layers"


class Interference(Violation):
    claim_id = "tree.noninterference"


class Insensitivity(Violation):
    claim_id = "tree.sensitivity"


class AttentionMassMismatch(Violation):
    claim_id = "tree.attention_weights"


class CommitMismatch(Violation):
    claim_id = "kv.commit"


class RollbackMismatch(Violation):
    claim_id = "kv.rollback"


class RowCountMismatch(Violation):
    claim_id = "cost.rows"


class WalkMismatch(Violation):
    claim_id = "greedy.walk"


class GreedyMismatch(Violation):
    claim_id = "greedy.lossless"


class NoProgress(Violation):
    claim_id = "progress"


class EosMismatch(Violation):
    claim_id = "stop.eos"


class MaxTokensMismatch(Violation):
    claim_id = "stop.max_tokens"


class ThresholdMismatch(Violation):
    claim_id = "threshold.consistency"


CLAIMS: dict[str, Claim] = {
    claim.id: claim
    for claim in (
        Claim(
            "tree.mask",
            3,
            "let every drafted row attend to the whole prefix, its own ancestors and itself, and to nothing else",
            ("tree", "taps"),
            "the mask builder",
        ),
        Claim(
            "tree.positions",
            3,
            "give every drafted row the position prefix length + depth, siblings the same one",
            ("tree", "taps"),
            "the position ids of the tree",
        ),
        Claim(
            "tree.attention_weights",
            3,
            "put attention mass on exactly the visible rows, in every layer and head, summing to one",
            ("tree", "taps"),
            "the attention of one layer or head: the mask it is given, or how it applies it",
        ),
        Claim(
            "tree.layers",
            3,
            "compute in every layer the keys, values, attention output and hidden state that plain decoding computes",
            ("tree", "taps", "oracle"),
            "the first layer named, and what feeds it",
        ),
        Claim(
            "tree.logits",
            3,
            "give every node the logits that plain decoding gives after that node's own path",
            ("tree", "oracle"),
            "mask, positions, or cache contents",
        ),
        Claim(
            "tree.noninterference",
            3,
            "leave a node's logits bit-identical when a token off its path changes",
            ("tree",),
            "the mask: a row reads a draft that is not its ancestor",
        ),
        Claim(
            "tree.sensitivity",
            3,
            "move a node's logits as plain decoding does when a token on its path or in the prefix changes",
            ("tree", "oracle"),
            "the mask: a row misses an ancestor or part of the prefix",
        ),
        Claim(
            "kv.commit",
            3,
            "keep, after a commit, exactly the keys and values of the committed tokens, contiguous and in order",
            ("tree", "kv", "oracle"),
            "the gather of the accepted path: which rows, keys and values both, and the length",
        ),
        Claim(
            "kv.rollback",
            3,
            "drop every rejected row, and be able to cut back to any committed length and go on from there",
            ("tree", "kv", "oracle"),
            "the crop after a rejection",
        ),
        Claim(
            "greedy.walk",
            2,
            "accept a draft if and only if it is the argmax (lowest id on ties) of its parent's row, "
            "and add the argmax of the last accepted row",
            ("verify",),
            "the verifier: which row judges a draft, which row gives the bonus token",
        ),
        Claim(
            "greedy.lossless",
            1,
            "with temperature 0, emit exactly the tokens the target model emits one by one",
            ("generate", "oracle"),
            "the round loop",
        ),
        Claim(
            "progress",
            1,
            "emit at least one token every round, the correction after a fully rejected draft included",
            ("generate",),
            "the round loop after a rejection",
        ),
        Claim(
            "stop.eos",
            1,
            "end with the first end token, wherever in an accepted run it falls, and keep nothing beyond it",
            ("generate", "oracle"),
            "the stop test inside an accepted run",
        ),
        Claim(
            "stop.max_tokens",
            1,
            "emit exactly max_new_tokens tokens when no end token comes first, and keep nothing beyond them",
            ("generate", "oracle"),
            "the length cut inside an accepted run",
        ),
        Claim(
            "cost.rows",
            1,
            "forward at most one row a node and the root in each round, and never encode the prefix again",
            ("generate", "rounds", "build"),
            "what is passed to the target forward each round",
        ),
        Claim(
            "threshold.consistency",
            1,
            "under threshold acceptance (lossy), accept exactly the drafts whose target probability exceeds the "
            "threshold; at 0.5 and above that loses nothing",
            ("generate", "rounds", "threshold", "oracle"),
            "the threshold rule: which row's probability is compared",
        ),
    )
}

VIOLATIONS: dict[str, type[Violation]] = {one.claim_id: one for one in Violation.__subclasses__() if one.claim_id}
