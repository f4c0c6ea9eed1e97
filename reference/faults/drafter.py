"""Drafters out of step with the target, by their rows, positions, texts or weights: the output is right all along."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from specbench.protocols import Cache, Drafter, LanguageModel
from specbench.reference.drafters.by_name import layers_drafter
from specbench.reference.drafters.caching import CachingDrafter
from specbench.reference.drafters.layers import LayersDrafter
from specbench.reference.drafters.model import ModelDrafter
from specbench.reference.faults.fault import Fault
from specbench.reference.faults.housing import drafting, shaped
from specbench.reference.faults.rewrite import rewrite, rows_behind
from specbench.reference.model import LlamaModel
from specbench.steps import FlatTree, Steps
from specbench.tree import DraftTree
from specbench.types import VerifyResult

ROPE_OF_OTHERS = 500_000.0


class _GuessesKept(LayersDrafter):
    """The rows of drafted nodes, whose features were guesses, count as those of the tokens once they are accepted."""

    def draft(self, context: list[int], **named: Any) -> DraftTree:
        tree = super().draft(context, **named)
        if self.last_law is None or len(context) < 2:
            return tree
        path: list[int] = []
        while below := [node for node in tree.children((0, *path)[-1])[:1] if node in self.last_law.row_of]:
            path += below
        rows = [*range(len(context) - 1), *(len(context) - 1 + self.last_law.row_of[node] for node in path)]
        self._rows = self.last_law.rows.picked(rows)
        self._features = torch.stack([*self._features, *(self.last_law.features[node] for node in path)])
        self._tokens = [*context, *(tree.token_list[node] for node in path)]
        return tree


class _Trusting(CachingDrafter):
    """Takes its list of cached tokens for the truth about its rows, and never drops a row of a text that goes on."""

    def _catch_up(self, tokens: list[int]) -> None:
        if tokens[: len(self._cached)] != self._cached:
            super()._catch_up(tokens)
            return
        self._session.extend(tokens[len(self._cached) :])
        self._cached = list(tokens)


class _NotRolledBack(_Trusting):
    def observe(self, result: VerifyResult) -> None:
        tree, self._drafted = self._drafted, None
        flat = self._session.last_flat
        if tree is None or flat is None:
            return
        kept = [node for node in result.path if node < flat.num_rows]
        computed = list(kept)
        while below := [node for node in tree.children((0, *computed)[-1])[:1] if node < flat.num_rows]:
            computed += below  # what was drafted first behind the accepted path
        self._session.commit(computed)
        self._cached += [tree.token_list[node] for node in (0, *kept)]


class _Hole(_Trusting):
    def observe(self, result: VerifyResult) -> None:
        tree = self._drafted
        super().observe(result)
        if tree is not None and len(result.path) == tree.num_drafts:
            self._cached.append(tree.token_list[result.path[-1]])  # it was drafted, but never read


class _KeptOnPartial(_NotRolledBack):
    """Right where all was refused, and where nothing was."""

    def observe(self, result: VerifyResult) -> None:
        if self._drafted is not None and 0 < len(result.path) < int(self._drafted.depth.max()):
            super().observe(result)
        else:
            CachingDrafter.observe(self, result)


class _CutTooFar(_Trusting):
    """Where a draft was refused, the row before it goes as well, and still counts as cached."""

    def observe(self, result: VerifyResult) -> None:
        tree, self._drafted = self._drafted, None
        flat = self._session.last_flat
        if tree is None or flat is None:
            return
        kept = [node for node in result.path if node < flat.num_rows]
        self._session.commit(kept[:-1] if len(result.path) < tree.num_drafts else kept)
        self._cached += [tree.token_list[node] for node in (0, *kept)]


class _PlainStepUnread(_Trusting):
    """In a round without a draft the drafter's count goes on and its cache does not."""

    _root: int | None = None

    def observe(self, result: VerifyResult) -> None:
        if self._drafted is None and self._root is not None:
            self._cached.append(self._root)
        super().observe(result)
        self._root = result.bonus_token

    def reset(self) -> None:
        super().reset()
        self._root = None


class _OneBehind(ModelDrafter):
    """The last token before the root is not read: the drafter is a round's step behind the target."""

    def _catch_up(self, tokens: list[int]) -> None:
        super()._catch_up(tokens[:-1])


class _ByLastToken(ModelDrafter):
    """A draft is looked up by the token it follows, and made only where there is none."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self._known: dict[tuple[int, int, int], DraftTree] = {}

    def draft(self, context: list[int], *, max_nodes: int, max_depth: int, **keywords: Any) -> DraftTree:
        key = context[-1], max_nodes, max_depth
        if key not in self._known:
            self._known[key] = super().draft(context, max_nodes=max_nodes, max_depth=max_depth, **keywords)
        return self._known[key]


class _HalfReset(_Trusting):
    def reset(self) -> None:
        self._drafted = None
        self._cached = []  # the rows stay, and the next text is taken for their continuation


class _Remembering(ModelDrafter):
    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self._longest: list[int] = []

    def draft(self, context: list[int], *, max_nodes: int, max_depth: int, **keywords: Any) -> DraftTree:
        tree = super().draft(context, max_nodes=max_nodes, max_depth=max_depth, **keywords)
        if self._longest[: len(context)] == context:
            after = self._longest[len(context) - 1 :][: min(max_nodes, max_depth, 3) + 1]
            tree = DraftTree.of(after, range(-1, len(after) - 1)) if len(after) > 1 else tree
        self._longest = max(self._longest, list(context), key=len)
        return tree


class _TrustsLength(ModelDrafter):
    """Keeps as many rows as the new context is long, without a look at what they were computed from."""

    def _catch_up(self, tokens: list[int]) -> None:
        num_kept = min(len(self._cached), len(tokens))
        self._session.truncate(num_kept)
        self._session.extend(tokens[num_kept:])
        self._cached = list(tokens)


class _Appending(ModelDrafter):
    def draft(self, context: list[int], **keywords: Any) -> DraftTree:
        tree = super().draft(context, **keywords)
        context += tree.token_list[1:2]
        return tree


def _shifted(steps: Steps) -> Steps:
    def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
        flat = steps.flatten(tree, prefix_len)
        return replace(flat, position_ids=flat.position_ids + 1)

    return replace(steps, flatten=flatten)


def _from_first_length(steps: Steps) -> Steps:
    base: int | None = None

    def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
        nonlocal base
        base = prefix_len if base is None else base
        flat = steps.flatten(tree, prefix_len)
        return replace(flat, position_ids=flat.position_ids - prefix_len + base)

    return replace(steps, flatten=flatten)


def _input_aliased(steps: Steps) -> Steps:
    """The buffer of the next step's input still holds the token before."""

    def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
        flat = steps.flatten(tree, prefix_len)
        return replace(flat, tokens=flat.tokens[tree.parents.clamp(min=0)])

    return replace(steps, flatten=flatten)


def _values_not_moved(steps: Steps) -> Steps:
    def commit(cache: Cache, prefix_len: int, rows: Sequence[int]) -> None:
        if not hasattr(cache, "spec"):
            steps.commit(cache, prefix_len, rows)
            return
        layers = rows_behind(cache, prefix_len)
        steps.commit(cache, prefix_len, rows)
        rewrite(cache, prefix_len, [(k[:, list(rows)], v[:, : len(rows)]) for k, v in layers])

    return replace(steps, commit=commit)


def _stepping(
    plant: Callable[[Steps], Steps], *widths: int, kind: type[ModelDrafter] = ModelDrafter
) -> Callable[[LanguageModel], Drafter]:
    """A drafter that takes such steps over its own cache."""

    def make(model: LanguageModel) -> Drafter:
        drafter = kind(model, widths=widths)
        drafter._session.steps = plant(drafter._session.steps)
        return drafter

    return make


def _over(change: Callable[[LlamaModel], LlamaModel]) -> Callable[[LanguageModel], Drafter]:
    """A drafter over a model that was loaded wrong; models of others are loaded right."""
    return lambda model: ModelDrafter(change(model) if type(model) is LlamaModel else model, widths=(2, 2, 1))


def _normed_twice(model: LlamaModel) -> LlamaModel:
    """The head is handed what the last norm has left and norms it again: its gains count twice."""
    name = "model.norm.weight"
    return LlamaModel(model.config, {**model._weights, name: model._weights[name] ** 2})


def _rope_of_others(model: LlamaModel) -> LlamaModel:
    return LlamaModel(replace(model.config, rope_theta=ROPE_OF_OTHERS), model._weights)


def _without_windows(model: LlamaModel) -> LlamaModel:
    return LlamaModel(replace(model.config, windows=()), model._weights)


FAULTS = (
    Fault(
        "drafter_not_rolled_back",
        "drafter-desync",
        "the drafter keeps the rows of refused drafts and goes on behind them",
        "a partial accept; the output stays right",
        "drafter.state",
        target=drafting(_NotRolledBack, itself=True),
        origin="PrismML-Eng/llama.cpp#173",
        subtle="a rejection",
        kin="drafter keeps refused rows",
    ),
    Fault(
        "guessed_features_kept",
        "drafter-desync",
        "the drafter keeps rows of accepted drafts that it computed from its own features, not from the target's",
        "an accepted draft; the output stays right",
        "drafter.state",
        target=drafting(lambda model: layers_drafter(model, _GuessesKept)),
        subtle="an accepted draft",
    ),
    Fault(
        "drafter_hole",
        "kv-off-by-one",
        "the last draft counts as cached although it was never read",
        "a full accept; the output stays right",
        "drafter.state",
        target=drafting(_Hole, itself=True),
        origin="vllm-project/vllm#5765",
        subtle="a full accept",
        kin="a hole in the drafter's rows",
    ),
    Fault(
        "drafter_half_reset",
        "loop-state-stale",
        "a reset forgets the drafter's tokens and keeps its rows",
        "a second request on the same drafter",
        "drafter.no_peeking",
        target=drafting(_HalfReset),
        subtle="a second request",
    ),
    Fault(
        "drafter_other_request",
        "batch-cross-talk",
        "the drafter proposes what another request went on with",
        "a request that begins like an earlier, longer one",
        "drafter.no_peeking",
        target=drafting(_Remembering),
        subtle="a second request",
    ),
    Fault(
        "drafter_trusts_length",
        "kv-stale-after-reject",
        "the drafter keeps as many cached rows as the context is long, whatever they were computed from",
        "a text unlike the one before it",
        "drafter.no_peeking",
        target=drafting(_TrustsLength),
        subtle="a second text",
    ),
    Fault(
        "drafter_changes_context",
        "drafter-desync",
        "the drafter appends its draft to the list that it was given",
        "any draft",
        "drafter.no_peeking",
        target=drafting(_Appending),
    ),
    Fault(
        "drafter_position",
        "drafter-desync",
        "the drafter's nodes stand one position too far on",
        "any self-draft; the output stays right, only acceptance falls",
        "drafter.self_draft",
        target=drafting(_stepping(_shifted, 1, 1, 1), itself=True),
        origin="sgl-project/sglang#25015",
    ),
    Fault(
        "drafter_kept_on_partial",
        "drafter-desync",
        "the drafter keeps the rows of refused drafts where some were accepted, and drops them where none was",
        "a partial accept; the output stays right",
        "drafter.state",
        target=drafting(shaped(_KeptOnPartial, 2, 1, 1), itself=True),
        origin="ml-explore/mlx-swift-lm#308",
        subtle="a partial accept",
        kin="drafter keeps refused rows",
    ),
    Fault(
        "drafter_cut_too_far",
        "kv-off-by-one",
        "where a draft was refused, the drafter drops the last accepted row too and counts it as cached",
        "a partial accept; the output stays right",
        "drafter.state",
        target=drafting(_CutTooFar, itself=True),
        origin="lablup/mlxcel#994",
        subtle="a partial accept",
        kin="a hole in the drafter's rows",
    ),
    Fault(
        "drafter_plain_step_unread",
        "drafter-desync",
        "a plain step moves the drafter's count on and is not read into its cache",
        "a plain step between two drafts; the output stays right",
        "drafter.state",
        target=drafting(shaped(_PlainStepUnread, 2, 2, 1), itself=True),
        origin="vllm-project/vllm-metal#716",
        subtle="a plain step between two drafts",
    ),
    Fault(
        "drafter_one_behind",
        "drafter-desync",
        "the drafter has not read the last token before the root",
        "any self-draft; the output stays right, only acceptance falls",
        "drafter.self_draft",
        target=drafting(_OneBehind, itself=True),
    ),
    Fault(
        "drafter_by_last_token",
        "drafter-desync",
        "a draft is remembered by the token that it followed, whatever stood before that",
        "two contexts that end alike",
        "drafter.no_peeking",
        target=drafting(_ByLastToken),
        subtle="two contexts with the same last token",
    ),
    Fault(
        "drafter_first_length",
        "position-ids",
        "the drafter's positions are counted from the length that the text had at its first draft",
        "a second round; the output stays right",
        "drafter.state",
        target=drafting(_stepping(_from_first_length, 1, 1, 1), itself=True),
        subtle="a second round",
    ),
    Fault(
        "drafter_input_aliased",
        "drafter-desync",
        "each step of the drafter reads the token of the step before: the buffer is handed on unfilled",
        "a draft of two levels; the output stays right, only acceptance falls",
        "drafter.tree",
        target=drafting(_stepping(_input_aliased, 1, 1, 1), itself=True),
        subtle="depth two",
    ),
    Fault(
        "drafter_values_not_moved",
        "kv-wrong-path-compacted",
        "the drafter's cache gathers the keys of the accepted path and leaves the values",
        "an accepted path off the drafter's leftmost one; the output stays right",
        "drafter.state",
        target=drafting(_stepping(_values_not_moved, 2, 2, 1, kind=CachingDrafter)),
        subtle="a path off the leftmost, in the drafter's cache",
        kin="part_not_moved",
    ),
    Fault(
        "drafter_normed_twice",
        "drafter-desync",
        "the drafter's head norms what was normed already",
        "a row whose best tokens lie close; the output stays right, only acceptance falls",
        "drafter.tree",
        target=drafting(_over(_normed_twice), itself=True),
        subtle="two logits close together",
    ),
    Fault(
        "drafter_rope_of_others",
        "drafter-desync",
        "the drafter turns by another family's rope base",
        "a text of some tokens; the output stays right, only acceptance falls",
        "drafter.tree",
        target=drafting(_over(_rope_of_others), itself=True),
        origin="sgl-project/SpecForge#265",
        kin="drafter loaded with a default",
    ),
    Fault(
        "drafter_without_windows",
        "sliding-window",
        "the drafter's layers read the whole text where the model's read a window",
        "a text longer than the window; the output stays right, only acceptance falls",
        "drafter.tree",
        target=drafting(_over(_without_windows), itself=True),
        origin="ikawrakow/ik_llama.cpp#2021",
        subtle="a text longer than the window",
        kin="drafter loaded with a default",
    ),
)
