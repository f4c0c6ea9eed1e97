"""The reference decoder: draft, verify as a tree, keep what the target would have said, repeat.

At least one token is emitted every round, the correction after a fully rejected draft included. At temperature 0 the
argmax is followed, above it a lossless acceptance rule keeps the target's law. Beam search is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from specbench.lockstep import Group
from specbench.protocols import Cache, Coins, Drafter, LanguageModel
from specbench.reference.batch import BATCH_STEPS, BatchSteps, DrafterFor, Draw, generate_batch
from specbench.reference.batch_layouts import can_batch
from specbench.reference.sampling import probs, sample
from specbench.reference.session import TreeSession
from specbench.reference.steps import STEPS, sample_by
from specbench.reference.verify import SharedNoise, rule_named, threshold_walk
from specbench.steps import Emission, FlatTree, Steps
from specbench.tree import DraftTree, root_only
from specbench.types import (
    GREEDY,
    NEVER_STOP,
    Generation,
    Request,
    Round,
    Sampling,
    Stop,
    TargetState,
    VerifyResult,
    as_token_ids,
)

Decision = TypeVar("Decision")


class Decoder(TreeSession):
    """A speculative decoder over one model and one drafter (None decodes plainly). Levels 0 to 3, and 6.

    max_nodes, max_depth: the most drafts and the deepest level asked of the drafter in a round. batch_steps: what a
    batch does besides. group: ranks that decode in lock step; what the first one drafts and accepts is what all use.
    """

    features = ("stop_sequences", "min_new_tokens", "penalties", "bad_words", "grammar", "processors", "sampling")

    def __init__(
        self,
        model: LanguageModel,
        drafter: Drafter | None = None,
        *,
        steps: Steps = STEPS,
        cache: str = "contiguous",
        max_nodes: int = 64,
        max_depth: int = 16,
        batch_steps: BatchSteps = BATCH_STEPS,
        group: Group | None = None,
    ) -> None:
        super().__init__(
            model,
            steps=steps,
            cache=cache,
            keeps_states=getattr(drafter, "reads_target_state", False),
            state_layers=getattr(drafter, "state_layers", ()),
        )
        self._drafter = drafter
        self._batch_steps = batch_steps
        self._group = group
        self._max_nodes = max_nodes
        self._max_depth = max_depth

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        stop: Stop = NEVER_STOP,
        seed: int = 0,
    ) -> Generation:
        """Level 1. Tokens equal plain decoding's; `rounds` records every round."""
        self.reset()
        return DecodingSession(self).generate(
            prompt, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop, seed=seed
        )

    @property
    def generate_batch(self) -> Callable[..., list[Generation]]:
        """Level 1: `generate_batch(requests, *, drafter_for=None)`, one answer a request as `generate` gives it.

        drafter_for: Request -> the drafter of that row. Without it this decoder's drafter is given the contexts of all
        rows in turn, so it must keep nothing between calls that a context does not say. There is no such method over a
        model that cannot compute rows of several sequences at once.
        """
        if not can_batch(self.model):
            kind = type(self.model).__name__
            raise AttributeError(f"generate_batch is not offered over a {kind}, which has no rows() and attention()")
        return self._generate_batch

    def _generate_batch(
        self, requests: Sequence[Request], *, drafter_for: DrafterFor | None = None
    ) -> list[Generation]:
        for request in requests:
            refuse_unsupported(request.sampling)
        return generate_batch(self, requests, steps=self._batch_steps, drafter_for=drafter_for)

    def session(self) -> DecodingSession:
        """A text that is continued turn by turn on this decoder, whose cache it keeps."""
        self.reset()
        return DecodingSession(self)

    def round(
        self,
        context: list[int],
        *,
        num_prompt: int,
        num_remaining: int,
        sampling: Sampling,
        stop: Stop,
        coins: Coins,
    ) -> tuple[Round, str | None]:
        """Draft, verify, emit, commit. context: all tokens so far, the root last, all but the root cached."""
        state = None if self.states is None else TargetState(self.states)
        tree = self.draft_round(context, num_remaining=num_remaining, sampling=sampling, coins=coins, state=state)
        prefix_len = self.cache_len
        target_logits = self.forward_tree(tree)
        flat = self.last_flat
        assert flat is not None
        result, emission = self.decide(
            tree,
            target_logits,
            context,
            num_prompt=num_prompt,
            num_remaining=num_remaining,
            sampling=sampling,
            stop=stop,
            coins=coins,
        )
        # A stop rule may have cut the path; the last emitted token is the next root and stays uncached.
        self.commit(result.path[: len(emission.tokens) - 1])
        return self.record(tree, flat, result, emission, prefix_len), emission.finish_reason

    def draft_round(
        self,
        context: list[int],
        *,
        num_remaining: int,
        sampling: Sampling,
        coins: Coins,
        state: TargetState | None = None,
    ) -> DraftTree:
        """The drafter's tree below the root, or the root alone. state: for a drafter that reads it."""
        # The bonus token is always emitted, so a draft deeper than what remains without it is work thrown away.
        max_depth = min(self._max_depth, num_remaining - 1)
        if self._drafter is None or max_depth <= 0:
            return self.agreed(root_only(context[-1]))
        drafter = self._drafter if state is None else _Informed(self._drafter, state)
        return self.agreed(
            self.steps.draft(
                drafter, context, max_nodes=self._max_nodes, max_depth=max_depth, sampling=sampling, coins=coins
            )
        )

    def decide(
        self,
        tree: DraftTree,
        target_logits: Tensor,
        context: Sequence[int],
        *,
        num_prompt: int,
        num_remaining: int,
        sampling: Sampling,
        stop: Stop,
        coins: Coins,
    ) -> tuple[VerifyResult, Emission]:
        """What the target's logits float [N, V] accept, and what of it is emitted; the drafter is told, if it asks."""
        logits = self.process(tree, target_logits, context, num_prompt=num_prompt, sampling=sampling, stop=stop)
        result = self.agreed(self.accept(tree, logits, sampling=sampling, coins=coins, root_place=len(context) - 1))
        emission = self.conclude(tree, result, context, num_prompt=num_prompt, num_remaining=num_remaining, stop=stop)
        return result, emission

    def process(
        self,
        tree: DraftTree,
        target_logits: Tensor,
        context: Sequence[int],
        *,
        num_prompt: int,
        sampling: Sampling,
        stop: Stop,
    ) -> Tensor:
        """The target's logits float [N, V] as the walk is to see them."""
        return self.steps.process(
            tree, target_logits, context=context, num_prompt=num_prompt, sampling=sampling, stop=stop
        )

    def accept(
        self, tree: DraftTree, logits: Tensor, *, sampling: Sampling, coins: Coins | None, root_place: int = 0
    ) -> VerifyResult:
        """By argmax at temperature 0, which no coin touches, else by the sampling rule. logits: float [N, V]."""
        if sampling.temperature == 0.0:
            return self.steps.walk(tree, logits)
        if coins is None:
            raise ValueError(
                f"coins = None must be given at temperature {sampling.temperature}: there is a draw to make"
            )
        return self.steps.sample(tree, logits, sampling=sampling, coins=coins, root_place=root_place)

    def conclude(
        self,
        tree: DraftTree,
        result: VerifyResult,
        context: Sequence[int],
        *,
        num_prompt: int,
        num_remaining: int,
        stop: Stop,
    ) -> Emission:
        """What of an accepted path is emitted; the drafter is told, if it asks."""
        emission = self.steps.emit(tree, result, stop=stop, num_remaining=num_remaining, output=context[num_prompt:])
        if not 1 <= len(emission.tokens) <= num_remaining:
            raise ValueError(f"a round emitted {len(emission.tokens)} tokens, must emit 1 to {num_remaining}")
        observe = getattr(self._drafter, "observe", None)
        if observe is not None:
            observe(result)
        return emission

    @property
    def drafter_observes(self) -> bool:
        """Whether the drafter is told after each round what was accepted."""
        return hasattr(self._drafter, "observe")

    def record(
        self, tree: DraftTree, flat: FlatTree, result: VerifyResult, emission: Emission, prefix_len: int
    ) -> Round:
        """The record of a round that has been decided."""
        return Round(
            tokens=tuple(tree.token_list),
            parents=tuple(tree.parent_list),
            path=result.path,
            bonus_token=result.bonus_token,
            emitted=emission.tokens,
            prefix_len=prefix_len,
            num_rows=flat.num_rows,
            mask_bytes=flat.mask.numel() * flat.mask.element_size(),
            kv_bytes=self.kv_bytes(flat.num_rows),
        )

    def agreed(self, own: Decision) -> Decision:
        """The first rank's decision where there are ranks: rounding and seeds may let each come to another one."""
        return own if self._group is None else self._group.broadcast(own)

    def new_cache(self) -> Cache:
        """An empty cache of this decoder's kind, for a row of a batch."""
        return self.model.new_cache(self._cache_kind)

    def verify(
        self, tree: DraftTree, target_logits: Tensor, *, sampling: Sampling = GREEDY, coins: Coins | None = None
    ) -> VerifyResult:
        """Level 2: the acceptance rule alone. target_logits: float [N, V], row i follows node i."""
        refuse_unsupported(sampling)
        return self.accept(tree, target_logits, sampling=sampling, coins=coins)

    def verify_batch(
        self,
        trees: Sequence[DraftTree],
        flat_logits: Tensor,
        cu_nodes: Sequence[int] | Tensor,
        *,
        sampling: Sampling = GREEDY,
        coins: Coins | None = None,
    ) -> list[VerifyResult]:
        """Level 2 for B trees at once. flat_logits: float [sum N, V]. cu_nodes: B+1 ints, where each tree's rows begin
        and end. ValueError when they do not fit the trees."""
        refuse_unsupported(sampling)
        expected = [0]
        for tree in trees:
            expected.append(expected[-1] + tree.num_nodes)
        given = [int(one) for one in cu_nodes]
        if given != expected:
            raise ValueError(f"cu_nodes = {given} must be {expected} (0, then the nodes of the trees summed up)")
        if len(flat_logits) != expected[-1]:
            raise ValueError(f"flat_logits has {len(flat_logits)} rows, must have {expected[-1]} (nodes of all trees)")
        if sampling.temperature == 0.0:
            return self._batch_steps.verify(self.steps.walk, trees, flat_logits, given)
        draws = [Draw(self, sampling, coins) for _ in trees]
        return self._batch_steps.sample(draws, trees, flat_logits, given)

    def probs(self, logits: Tensor, sampling: Sampling) -> Tensor:
        """Level 6: float64 [V], the law that sampling parameters make of a row of logits float [V]."""
        return probs(logits, sampling)

    def sample(self, probs: Tensor, coins: Coins) -> int:
        """Level 6: a token drawn from a law float64 [V]."""
        return sample(probs, coins)

    def with_threshold(self, threshold: float) -> Decoder:
        """LOSSY: the same decoder, accepting a draft while the target's probability of it exceeds `threshold`."""
        return self._like(self._drafter, replace(self.steps, walk=threshold_walk(threshold)))

    def with_rule(self, name: str) -> Decoder:
        """The same decoder with one acceptance rule at temperatures above 0, one of `reference.verify.RULES`. A rule
        that is lossy keeps being so; ValueError when it meets a tree that it is not made for."""
        return self._like(self._drafter, replace(self.steps, sample=sample_by(rule_named(name))))

    def with_drafter(self, drafter: Drafter | None) -> Decoder:
        """The same decoder over another drafter, with nothing cached."""
        return self._like(drafter, self.steps)

    def _like(self, drafter: Drafter | None, steps: Steps) -> Decoder:
        return Decoder(
            self._unheard,
            drafter,
            steps=steps,
            cache=self._cache_kind,
            max_nodes=self._max_nodes,
            max_depth=self._max_depth,
            batch_steps=self._batch_steps,
            group=self._group,
        )


class _Informed:
    """A drafter that is given the target's state with every context."""

    def __init__(self, drafter: Any, state: TargetState) -> None:
        self._drafter, self._state = drafter, state

    def draft(self, context: list[int], **named: Any) -> DraftTree:
        return self._drafter.draft(context, **named, target_state=self._state)


class DecodingSession:
    """One text on one decoder, turn by turn. What a stop rule cut off is not cached, so the next turn goes on there."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.text: list[int] = []

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        stop: Stop = NEVER_STOP,
        seed: int = 0,
    ) -> Generation:
        """Appends `prompt` (possibly empty, to go on as if the stop had not been) to the text, then up to
        `max_new_tokens` more. Penalties and stop rules count this turn's output alone."""
        decoder = self._decoder
        refuse_unsupported(sampling)
        context = [*self.text, *as_token_ids(prompt, argument="prompt", vocab_size=decoder.vocab_size)]
        if not context:
            raise ValueError("prompt is empty: it must hold at least one token (the root of the first tree)")
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens = {max_new_tokens} must be >= 0")
        num_prompt, coins = len(context), SharedNoise(seed)
        rounds: list[Round] = []
        finish_reason = None if max_new_tokens else "length"
        decoder.extend(context[decoder.cache_len : -1])
        while finish_reason is None:
            one, finish_reason = decoder.round(
                context,
                num_prompt=num_prompt,
                num_remaining=num_prompt + max_new_tokens - len(context),
                sampling=sampling,
                stop=stop,
                coins=coins,
            )
            rounds.append(one)
            context.extend(one.emitted)
        self.text = context
        return Generation(tuple(context[num_prompt:]), finish_reason, tuple(rounds))


def refuse_unsupported(sampling: Sampling) -> None:
    """ValueError for what this decoder does not do, rather than an answer to another question."""
    if sampling.num_beams != 1:
        raise ValueError(
            f"num_beams = {sampling.num_beams} must be 1: beam search ranks several texts at once, so there is no "
            "single plain-decoding output for a verified draft to equal"
        )
