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
    """id: stable name. level: the adapter level it judges. needs: capabilities. look_at: where such a fault lives.
    share: of a profile's cases, less than 1 where one case is as much work as many."""

    id: str
    level: int
    must: str
    needs: tuple[str, ...]
    look_at: str
    share: float = 1.0


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


class LongContextMismatch(Violation):
    claim_id = "tree.long"


class MachineMismatch(Violation):
    claim_id = "kv.machine"


class DeadRowRead(Violation):
    claim_id = "kv.dead_rows"


class ForkMismatch(Violation):
    claim_id = "kv.fork"


class PageLeak(Violation):
    claim_id = "kv.pages"


class ChunkMismatch(Violation):
    claim_id = "kv.chunked"


class AbortMismatch(Violation):
    claim_id = "kv.abort"


class BatchVerifyMismatch(Violation):
    claim_id = "verify.batch"


class StaleState(Violation):
    claim_id = "greedy.repeatable"


class StopSequenceMismatch(Violation):
    claim_id = "stop.sequences"


class MinTokensMismatch(Violation):
    claim_id = "stop.min_tokens"


class StopIndexMismatch(Violation):
    claim_id = "stop.every_index"


class ResumeMismatch(Violation):
    claim_id = "stop.resume"


class PenaltyMismatch(Violation):
    claim_id = "processors.penalties"


class BadWordEmitted(Violation):
    claim_id = "processors.bad_words"


class GrammarViolation(Violation):
    claim_id = "processors.grammar"


class HistoryMismatch(Violation):
    claim_id = "processors.history"


class BatchMismatch(Violation):
    claim_id = "batch.solo"


class JoinMismatch(Violation):
    claim_id = "batch.join"


class RankDivergence(Violation):
    claim_id = "ranks.agree"


class AcceptanceMismatch(Violation):
    claim_id = "metrics.acceptance"


class MalformedDraft(Violation):
    claim_id = "drafter.tree"


class BudgetExceeded(Violation):
    claim_id = "drafter.budget"


class DraftLawMismatch(Violation):
    claim_id = "drafter.law"


class DraftPeeks(Violation):
    claim_id = "drafter.no_peeking"


class DraftNotDeterministic(Violation):
    claim_id = "drafter.deterministic"


class DrafterStale(Violation):
    claim_id = "drafter.state"


class SelfDraftRejected(Violation):
    claim_id = "drafter.self_draft"


class LawMismatch(Violation):
    claim_id = "law.exact"


class LawUnderParameters(Violation):
    claim_id = "law.params"


class ImpossibleToken(Violation):
    claim_id = "law.support"


class BoundExceeded(Violation):
    claim_id = "law.acceptance_bound"


class DraftedLawMismatch(Violation):
    claim_id = "law.q"


class JointLawMismatch(Violation):
    claim_id = "law.joint"


class RowsDepend(Violation):
    claim_id = "law.rows"


class KeepsTooMany(Violation):
    claim_id = "law.accepted"


class SeedIgnored(Violation):
    claim_id = "law.seed"


class TemperatureZero(Violation):
    claim_id = "greedy.temperature_zero"


class SamplerMismatch(Violation):
    claim_id = "sampler.law"


class AttentionMismatch(Violation):
    claim_id = "attention.out"


class AttentionBatchMismatch(Violation):
    claim_id = "attention.batch"


class AttentionOrderMismatch(Violation):
    claim_id = "attention.any_order"


class UnusedRowMismatch(Violation):
    claim_id = "attention.unused_rows"


class AttentionPagesMismatch(Violation):
    claim_id = "attention.paged"


class AttentionWindowMismatch(Violation):
    claim_id = "attention.window"


class SoftCapMismatch(Violation):
    claim_id = "attention.soft_cap"


class AlibiMismatch(Violation):
    claim_id = "attention.alibi"


class AttentionCodesMismatch(Violation):
    claim_id = "attention.quantised"


class AttentionStridesMismatch(Violation):
    claim_id = "attention.strides"


class DeadMemoryRead(Violation):
    claim_id = "attention.dead_memory"


class LseMismatch(Violation):
    claim_id = "attention.lse"


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
            "tree.long",
            3,
            "hold for prefixes of thousands of tokens and trees of hundreds of nodes what holds for small ones",
            ("tree", "oracle", "build"),
            "index types, block boundaries and buffer sizes of attention and mask",
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
            "kv.machine",
            3,
            "after any sequence of prefill, draft, verify, commit, truncate, plain step, abort, fork, reset and "
            "resume, hold exactly the rows of the committed tokens and give plain decoding's next logits",
            ("tree", "kv", "oracle"),
            "the operation named last, and what it leaves to the next one",
            share=0.5,
        ),
        Claim(
            "kv.dead_rows",
            3,
            "never let what lies beyond the committed rows (rejected rows, free slots, padding, static buffers) reach"
            " an answer",
            ("tree", "oracle", "poison"),
            "the length that attention reads to, or the mask over the padding",
        ),
        Claim(
            "kv.fork",
            3,
            "let neither of two sequences that share a prefix see or change the other's tokens",
            ("tree", "oracle", "fork"),
            "copy on write of shared rows or pages",
            share=0.5,
        ),
        Claim(
            "kv.pages",
            3,
            "hold as many pages as the committed rows need, and none after a reset",
            ("tree", "pages"),
            "what frees pages on a cut, a rejection and a reset",
        ),
        Claim(
            "kv.chunked",
            3,
            "build the same cache whether a prompt arrives whole, in chunks, or behind a kept prefix",
            ("tree", "kv", "oracle", "extend"),
            "positions and mask of the later chunks",
        ),
        Claim(
            "kv.abort",
            3,
            "leave no trace of a round that was dropped before its commit",
            ("tree", "oracle", "abort"),
            "what an aborted round leaves in cache, buffers and drafter",
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
            "verify.batch",
            2,
            "decide each tree of a batch as it decides that tree alone",
            ("verify_batch",),
            "offsets into the flattened logits, and padding of the smaller trees",
        ),
        Claim(
            "greedy.lossless",
            1,
            "with temperature 0, emit exactly the tokens the target model emits one by one",
            ("generate", "oracle"),
            "the round loop",
        ),
        Claim(
            "greedy.repeatable",
            1,
            "give the same answer to the same request, whatever requests the instance has served in between",
            ("generate", "oracle"),
            "buffers, masks and token lists that are not cleared between requests or rounds",
            share=0.5,
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
            "stop.sequences",
            1,
            "end with the last token of the first stop sequence, also when it spans rounds, and keep nothing beyond it",
            ("generate", "oracle", "stop_sequences"),
            "the stop test at the seam of two rounds and inside an accepted run",
            share=0.5,
        ),
        Claim(
            "stop.min_tokens",
            1,
            "emit no end token and end at no stop sequence among the first min_new_tokens tokens",
            ("generate", "oracle", "min_new_tokens"),
            "the least length applied to drafted rows, each by its own depth",
            share=0.5,
        ),
        Claim(
            "stop.every_index",
            1,
            "end where plain decoding ends, for an end token, a limit and a least length at every index of a run",
            ("generate", "oracle"),
            "the order of the end-token test and the length cut",
            share=0.1,
        ),
        Claim(
            "stop.resume",
            1,
            "go on after a stop as plain decoding of the whole text does",
            ("generate", "oracle", "session"),
            "what the cut left in cache, processors and drafter",
            share=0.5,
        ),
        Claim(
            "processors.penalties",
            1,
            "apply repetition, presence and frequency penalties to each drafted row with that row's own history",
            ("generate", "oracle", "penalties"),
            "which tokens a drafted row's penalty counts: rejected ones, accepted ones twice, its own path",
            share=0.5,
        ),
        Claim(
            "processors.bad_words",
            1,
            "emit no forbidden token sequence, also when it spans drafts and rounds, and lose nothing else",
            ("generate", "oracle", "bad_words"),
            "the history that the ban on a drafted row looks at",
            share=0.5,
        ),
        Claim(
            "processors.grammar",
            1,
            "judge each drafted row in the grammar state that its own path leads to",
            ("generate", "oracle", "grammar"),
            "the automaton's rollback between siblings and after a rejection",
            share=0.5,
        ),
        Claim(
            "processors.history",
            1,
            "call a logits processor once for each row, with the committed text and the row's own path as history",
            ("generate", "oracle", "processors"),
            "the token list that processors are given",
            share=0.5,
        ),
        Claim(
            "batch.solo",
            1,
            "give every row of a ragged batch the output of its solo run",
            ("generate_batch", "oracle"),
            "padding, unequal accept lengths, rows without drafts",
        ),
        Claim(
            "batch.join",
            1,
            "give rows that finish early, are condensed away or join late the output of their solo runs",
            ("generate_batch", "oracle"),
            "row indices after the batch is condensed or grows",
        ),
        Claim(
            "ranks.agree",
            1,
            "choose the same drafts and tokens on every rank of a lock-step group",
            ("generate", "ranks"),
            "decisions that each rank takes for itself instead of hearing them from one",
            share=0.5,
        ),
        Claim(
            "cost.rows",
            1,
            "forward each node and the root once a round, accepted ones at most once more, and never the prefix again",
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
        Claim(
            "metrics.acceptance",
            1,
            "report rounds that add up to the output: accepted drafts, bonus tokens and what a stop cut off",
            ("generate", "rounds"),
            "the acceptance counters",
        ),
        Claim(
            "drafter.tree",
            5,
            "draft a well-formed tree below the last token of the context: parents before children, token ids in the "
            "vocabulary, no duplicate siblings unless drawn with replacement; and in it what the target says it drafts",
            ("draft",),
            "the order of nodes and the parents after sorting or pruning, and whose row a node's children come from",
        ),
        Claim(
            "drafter.budget",
            5,
            "draft at most max_nodes nodes and max_depth levels, and nothing when either is 0",
            ("draft",),
            "the count against the budget (the root is not counted)",
        ),
        Claim(
            "drafter.law",
            5,
            "name in draft_probs the very law that the children of each node were drawn from",
            ("draft",),
            "temperature, filters and buffers between the draw and the law that is handed on",
            share=0.5,
        ),
        Claim(
            "drafter.no_peeking",
            5,
            "draft from the given context alone",
            ("draft",),
            "state that other texts have left behind",
        ),
        Claim(
            "drafter.deterministic",
            5,
            "draft the same tree for the same context, budget and coins",
            ("draft",),
            "randomness that does not come from the coins",
        ),
        Claim(
            "drafter.state",
            5,
            "draft after any accept history what a fresh drafter drafts for the same context",
            ("draft",),
            "the drafter's own cache after partial and full accepts",
        ),
        Claim(
            "drafter.self_draft",
            1,
            "accept every draft when the target is its own drafter",
            ("generate", "rounds", "oracle"),
            "the drafter's cache, positions and hidden states after an accept: the output stays right, only "
            "acceptance falls",
        ),
        Claim(
            "greedy.temperature_zero",
            2,
            "at temperature 0 follow the argmax, whatever the coins, and however the drafts were drawn",
            ("verify",),
            "where temperature 0 is told from other temperatures",
        ),
        Claim(
            "law.exact",
            2,
            "at temperature 1 emit tokens in exactly the target's joint law, whatever is drafted",
            ("verify", "sampling"),
            "the acceptance test and the residual: which p, which q, and what a refused sibling leaves",
            share=0.05,
        ),
        Claim(
            "law.params",
            2,
            "emit the law that temperature, top_k, top_p and min_p make of the target's logits",
            ("verify", "sampling"),
            "the order of the sampling parameters, and whether all of them reach acceptance, residual and bonus",
            share=0.1,
        ),
        Claim(
            "law.support",
            2,
            "never emit a token of probability zero, at whatever coins, and come to an end",
            ("verify", "sampling"),
            "comparisons at the ends of [0, 1), empty residuals, and padding columns",
        ),
        Claim(
            "law.acceptance_bound",
            2,
            "accept no more drafts than a lossless rule can",
            ("verify", "sampling"),
            "the acceptance test: more than the optimum is accepted only at the cost of the law",
            share=0.1,
        ),
        Claim(
            "law.q",
            5,
            "emit the target's law when the target's own drafter drafts and its own verifier judges",
            ("draft", "verify", "sampling", "build"),
            "what the drafter hands on as draft_probs, and which row of it the verifier reads",
            share=0.1,
        ),
        Claim(
            "law.joint",
            1,
            "at temperatures above 0 generate texts in the target's joint law, over rounds and seeds",
            ("generate", "sampling", "oracle", "build"),
            "coins that are used twice, and what a round leaves to the next one",
            share=0.03,
        ),
        Claim(
            "law.rows",
            1,
            "give each row of a sampled batch the law of its own prompt, independent of the other rows",
            ("generate_batch", "sampling", "oracle", "build"),
            "coins, parameters and offsets that rows share",
            share=0.03,
        ),
        Claim(
            "law.accepted",
            1,
            "in sampled generations keep a first draft no more often than a lossless rule can",
            ("generate", "rounds", "sampling", "oracle", "build"),
            "the acceptance test that generation really uses, by its rounds: drafts kept too often cost the law",
            share=0.015,
        ),
        Claim(
            "law.seed",
            1,
            "give the same text for the same seed, and other texts for other seeds",
            ("generate", "sampling"),
            "randomness that the seed does not reach, or a seed that is never used",
            share=0.2,
        ),
        Claim(
            "sampler.law",
            6,
            "turn logits into the law that the sampling parameters ask for, and draw from it",
            ("sampler",),
            "the order of the filters, what ties at their edges, and the end of the cumulative sums",
        ),
        Claim(
            "attention.out",
            4,
            "give every row the softmax average over its prefix, its ancestors and itself, in every head",
            ("attention",),
            "the mask, the group of heads, the scale, or the last block of a stretch of keys",
        ),
        Claim(
            "attention.batch",
            4,
            "give each sequence of a ragged batch what it gets alone: by its own tree, prefix and keys",
            (
                "attention",
                "cu_nodes",
            ),
            "where the rows of a sequence begin: in the mask, in the prefix lengths, in the cache",
        ),
        Claim(
            "attention.any_order",
            4,
            "read ancestors from the parents, also where a parent stands behind its child",
            (
                "attention",
                "any_order",
            ),
            "a mask that is looked at below the diagonal only",
        ),
        Claim(
            "attention.unused_rows",
            4,
            "give a row that holds no node zeros and an lse of -inf, never NaN, and other rows nothing of it",
            (
                "attention",
                "unused_rows",
            ),
            "rows that see nothing: 0 / 0, exp(-inf + inf)",
        ),
        Claim(
            "attention.paged",
            4,
            "find the rows of each sequence through its own page table, whatever the size of a page",
            (
                "attention",
                "page_table",
            ),
            "pages: their table, and a row's place inside one",
        ),
        Claim(
            "attention.window",
            4,
            "let each row see as many positions as the window holds, counted by depth and not by row",
            (
                "attention",
                "window",
            ),
            "the window's edge, in the prefix and in the tree",
        ),
        Claim(
            "attention.soft_cap",
            4,
            "cap scores as soft_cap * tanh(score / soft_cap), before any bias and before the softmax",
            (
                "attention",
                "soft_cap",
            ),
            "the order of scale, cap and bias",
        ),
        Claim(
            "attention.alibi",
            4,
            "add each head's slope times the distance of positions, counted by depth and not by row",
            (
                "attention",
                "alibi_slopes",
            ),
            "the slopes of heads, and the positions",
        ),
        Claim(
            "attention.quantised",
            4,
            "multiply the codes of keys and values by the scales of their own row and head",
            (
                "attention",
                "k_scale",
            ),
            "scales and codes of keys and values",
        ),
        Claim(
            "attention.strides",
            4,
            "read queries, keys and values where their strides say, 2^31 numbers away too",
            (
                "attention",
                "strides",
            ),
            "strides, and offsets that do not fit into 32 bits",
        ),
        Claim(
            "attention.dead_memory",
            4,
            "never read rows behind a sequence's last one, or pages of nobody, not even to multiply them by zero",
            (
                "attention",
                "dead_rows",
            ),
            "loads behind the last row that no mask guards",
        ),
        Claim(
            "attention.lse",
            4,
            "return the natural logarithm of the summed exponentials of each row's scores, with every option it takes",
            (
                "attention",
                "lse",
            ),
            "the base of the logarithm, the maximum that was taken off, and the merge of partial results",
        ),
    )
}

# Columns of the table whose names begin so are those of a kernel, which level 4 is judged on, and nothing else.
KERNEL_COLUMN = "kernel-"
KERNEL_LEVEL = 4
KERNEL_CLAIMS = tuple(one for one in CLAIMS if CLAIMS[one].level == KERNEL_LEVEL)
DECODER_CLAIMS = tuple(one for one in CLAIMS if one not in KERNEL_CLAIMS)  # what all other columns are for

VIOLATIONS: dict[str, type[Violation]] = {one.claim_id: one for one in Violation.__subclasses__() if one.claim_id}
