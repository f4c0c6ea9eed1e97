"""The rules by name, with what each is good for: the drafts it keeps the target's law on, and the optimum above it.

`Rule.verify` refuses what a rule is not made for; `Rule.function` judges whatever it is given, as a planted fault may
want. The lossy ones stand here with their sources' usual numbers, their functions' factories take others.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specbench.reference.verify.block import block_verification
from specbench.reference.verify.chain import speculative_sampling
from specbench.reference.verify.chance import Chance, Law, RuleFn
from specbench.reference.verify.deterministic import strike_and_renormalise
from specbench.reference.verify.entropy import deferred_rejection
from specbench.reference.verify.greedy import greedy_acceptance
from specbench.reference.verify.gumbel import gumbel_coupling
from specbench.reference.verify.k_seq import k_sequential
from specbench.reference.verify.matching import sample_and_match
from specbench.reference.verify.recursive import conditional_rejection, recursive_rejection
from specbench.reference.verify.relaxed import relaxed_acceptance
from specbench.reference.verify.threshold import threshold_acceptance
from specbench.reference.verify.traversal import traversal_verification
from specbench.reference.verify.typical import typical_acceptance
from specbench.tree import DraftTree, Proposal
from specbench.types import VerifyResult

DRAWN: tuple[Proposal, ...] = ("iid", "without_replacement")
ANY: tuple[Proposal, ...] = ("deterministic", *DRAWN)


@dataclass(frozen=True)
class Rule:
    """An acceptance rule. proposals: the drafts that it is lossless for, or defined for where it is lossy.

    coupling: which optimum bounds its acceptance, that of rules which decide node by node or that of rules which
    couple whole paths. needs_draft_probs: whether it reads q.
    """

    name: str
    function: RuleFn
    source: str
    sentence: str
    is_lossless: bool = True
    proposals: tuple[Proposal, ...] = ANY
    only_chains: bool = False
    coupling: Literal["node", "block"] = "node"
    needs_draft_probs: bool = True

    def verify(
        self, tree: DraftTree, target_probs: Sequence[Law], draft_probs: Sequence[Law] | None, chance: Chance
    ) -> VerifyResult:
        """The function's answer; ValueError for a tree that the rule is not made for. A root alone suits every rule."""
        if not tree.num_drafts:
            return self.function(tree, target_probs, [[0.0] * len(target_probs[0])], chance)
        if tree.proposal not in self.proposals:
            raise ValueError(
                f"proposal = {tree.proposal!r} must be {' or '.join(self.proposals)} for the rule {self.name}: "
                f"take the rule {rule_for(tree).name}"
            )
        widest = max(len(tree.children(node)) for node in range(tree.num_nodes))
        if self.only_chains and widest > 1:
            raise ValueError(
                f"tree has a node with {widest} children, must be a chain for the rule {self.name}: "
                f"take the rule {rule_for(tree).name}"
            )
        if self.needs_draft_probs and draft_probs is None:
            raise ValueError(
                f"draft_probs = None must be N laws q for the rule {self.name}: have the drafter name what it drew "
                f"from, or take a rule that needs no q (deterministic, sample_and_match)"
            )
        if draft_probs is not None and len(draft_probs[0]) != len(target_probs[0]):
            raise ValueError(
                f"draft_probs has {len(draft_probs[0])} columns, must have {len(target_probs[0])} as the target's "
                "logits: have a drafter of another vocabulary name its law over the target's ids, 0 where it has none"
            )
        return self.function(tree, target_probs, draft_probs, chance)


def rule_named(name: str) -> Rule:
    """ValueError answers an unknown name with near matches and all names."""
    if name in RULES:
        return RULES[name]
    near = difflib.get_close_matches(name, RULES, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"rule = {name!r} must be one of {', '.join(RULES)}{hint}")


def rule_for(tree: DraftTree) -> Rule:
    """The lossless rule that is usual for how a tree's drafts were made."""
    return RULES["recursive" if tree.proposal == "iid" else tree.proposal]


_ALL = (
    Rule(
        "greedy",
        greedy_acceptance,
        "SpecInfer, Medusa, EAGLE at temperature 0",
        "the target's argmax is followed down the tree; lossless at temperature 0 alone",
        needs_draft_probs=False,
    ),
    Rule(
        "chain",
        speculative_sampling,
        "arXiv 2211.17192, 2302.01318",
        "a draft is kept with probability min(1, p/q), or else replaced from the positive part of p - q",
        proposals=DRAWN,
        only_chains=True,
    ),
    Rule(
        "recursive",
        recursive_rejection,
        "SpecInfer, arXiv 2305.09781",
        "siblings are tried in turn, each against the residual that the refused ones left",
        proposals=("iid",),
    ),
    Rule(
        "without_replacement",
        conditional_rejection,
        "Sequoia, arXiv 2402.12374",
        "siblings are tried in turn against the residual, q conditioned on the refused ones",
        proposals=("without_replacement",),
    ),
    Rule(
        "k_seq",
        k_sequential,
        "SpecTr, arXiv 2310.15141",
        "siblings are tried in turn against p / (rho q), with one rho for all of them",
        proposals=("iid",),
    ),
    Rule(
        "deterministic",
        strike_and_renormalise,
        "EAGLE, SGLang, n-gram drafts in vLLM",
        "a child is kept with the target's probability of it, or else struck from the law",
        needs_draft_probs=False,
    ),
    Rule(
        "sample_and_match",
        sample_and_match,
        "SpecInfer's naive sampling, Lookahead",
        "the target draws its own token at each node and the text follows what was drafted",
        needs_draft_probs=False,
    ),
    Rule(
        "block",
        block_verification,
        "arXiv 2403.10444",
        "a chain is judged as a whole, from its end",
        proposals=DRAWN,
        only_chains=True,
        coupling="block",
    ),
    Rule(
        "traversal",
        traversal_verification,
        "after arXiv 2505.12398",
        "a tree is judged leaf by leaf, from its first leaf towards the root",
        proposals=DRAWN,
        coupling="block",
    ),
    Rule(
        "gumbel",
        gumbel_coupling,
        "arXiv 2408.07978",
        "drafter and target pick with the same noise, so that the output is a function of seed and p",
        needs_draft_probs=False,
    ),
    Rule(
        "threshold",
        threshold_acceptance(0.3),
        "the classic first experiment",
        "a draft is kept while p exceeds a threshold, then the argmax is emitted",
        is_lossless=False,
        needs_draft_probs=False,
    ),
    Rule(
        "typical",
        typical_acceptance(),
        "Medusa, arXiv 2401.10774",
        "the longest path whose probabilities are not small beside the entropy is kept",
        is_lossless=False,
        needs_draft_probs=False,
    ),
    Rule(
        "relaxed",
        relaxed_acceptance(),
        "TensorRT-LLM, DeepSeek-R1 with MTP",
        "a draft near the top of the target's law is kept",
        is_lossless=False,
        needs_draft_probs=False,
    ),
    Rule(
        "entropy",
        deferred_rejection(),
        "FLy, arXiv 2511.22972; vLLM",
        "a refused draft is kept where the target is unsure and the drafts behind it are kept",
        is_lossless=False,
        proposals=DRAWN,
        only_chains=True,
    ),
)
RULES: dict[str, Rule] = {one.name: one for one in _ALL}
