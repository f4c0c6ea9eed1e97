"""The reference decoder: draft, verify as a tree, keep what the target would have said, repeat.

At least one token is emitted every round, the correction after a fully rejected draft included. Greedy only: sampled
acceptance rules are separate work, and beam search is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from specbench.protocols import Coins, Drafter, LanguageModel, SeededCoins
from specbench.reference.session import TreeSession
from specbench.reference.steps import STEPS
from specbench.reference.verify import threshold_walk
from specbench.steps import Steps
from specbench.tree import DraftTree, root_only
from specbench.types import GREEDY, NEVER_STOP, Generation, Round, Sampling, Stop, VerifyResult, as_token_ids


class Decoder(TreeSession):
    """A speculative decoder over one model and one drafter (None decodes plainly). Levels 0 to 3.

    max_nodes, max_depth: the most drafts and the deepest level asked of the drafter in a round.
    """

    def __init__(
        self,
        model: LanguageModel,
        drafter: Drafter | None = None,
        *,
        steps: Steps = STEPS,
        cache: str = "contiguous",
        max_nodes: int = 64,
        max_depth: int = 16,
    ) -> None:
        super().__init__(model, steps=steps, cache=cache)
        self._drafter = drafter
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
        refuse_unsupported(sampling)
        context = list(as_token_ids(prompt, argument="prompt", vocab_size=self.vocab_size))
        if not context:
            raise ValueError("prompt is empty: it must hold at least one token (the root of the first tree)")
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens = {max_new_tokens} must be >= 0")
        num_prompt, coins = len(context), SeededCoins(seed)
        rounds: list[Round] = []
        finish_reason = None if max_new_tokens else "length"
        self.prefill(context[:-1])
        while finish_reason is None:
            num_remaining = num_prompt + max_new_tokens - len(context)
            one, finish_reason = self._round(context, num_remaining, sampling, stop, coins)
            rounds.append(one)
            context.extend(one.emitted)
        return Generation(tuple(context[num_prompt:]), finish_reason, tuple(rounds))

    def _round(
        self, context: list[int], num_remaining: int, sampling: Sampling, stop: Stop, coins: Coins
    ) -> tuple[Round, str | None]:
        tree = root_only(context[-1])
        # The bonus token is always emitted, so a draft deeper than what remains without it is work thrown away.
        max_depth = min(self._max_depth, num_remaining - 1)
        if self._drafter is not None and max_depth > 0:
            tree = self.steps.draft(
                self._drafter,
                context,
                max_nodes=self._max_nodes,
                max_depth=max_depth,
                sampling=sampling,
                coins=coins,
            )
        prefix_len = self.cache_len
        target_logits = self.forward_tree(tree)
        flat = self.last_flat
        assert flat is not None
        result = self.steps.walk(tree, target_logits)
        emission = self.steps.emit(tree, result, stop=stop, num_remaining=num_remaining)
        if not 1 <= len(emission.tokens) <= num_remaining:
            raise ValueError(f"a round emitted {len(emission.tokens)} tokens, must emit 1 to {num_remaining}")
        # A stop rule may have cut the path; the last emitted token is the next root and stays uncached.
        self.commit(result.path[: len(emission.tokens) - 1])
        record = Round(
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
        return record, emission.finish_reason

    def verify(
        self, tree: DraftTree, target_logits: Tensor, *, sampling: Sampling = GREEDY, coins: Coins | None = None
    ) -> VerifyResult:
        """Level 2: the acceptance rule alone. target_logits: float [N, V], row i follows node i."""
        refuse_unsupported(sampling)
        return self.steps.walk(tree, target_logits)

    def with_threshold(self, threshold: float) -> Decoder:
        """LOSSY: the same decoder, accepting a draft while the target's probability of it exceeds `threshold`."""
        return Decoder(
            self.model,
            self._drafter,
            steps=replace(self.steps, walk=threshold_walk(threshold)),
            cache=self._cache_kind,
            max_nodes=self._max_nodes,
            max_depth=self._max_depth,
        )


def refuse_unsupported(sampling: Sampling) -> None:
    """ValueError for what this decoder does not do, rather than an answer to another question."""
    if sampling.num_beams != 1:
        raise ValueError(
            f"num_beams = {sampling.num_beams} must be 1: beam search ranks several texts at once, so there is no "
            "single plain-decoding output for a verified draft to equal"
        )
    if sampling.temperature != 0.0:
        raise ValueError(
            f"temperature = {sampling.temperature} must be 0.0: this decoder verifies greedily, "
            "and sampling with a greedy rule would change the law"
        )
