"""What kind of fault it looks like, without knowing any: from the claim that fails first and the wrong answers' shape.

`classes_of` reads like the table that an engineer would work through: the lowest claim that fails says where to look,
what the case cannot do without (a window, grouped heads, pages) and the first answer that is wrong say what it is. Each
suspect comes with the reason, the likeliest first. Nothing here looks at the fault bank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from specbench.cases import (
    BatchCase,
    Case,
    CommitCase,
    DrafterCase,
    GenerationCase,
    LawCase,
    LongCase,
    TreeCase,
    WalkCase,
)
from specbench.checks.cache import planned
from specbench.checks.walk import longest_path, winners_of
from specbench.claims import Misbehaviour
from specbench.compare import max_error, scale_of
from specbench.naming import laws
from specbench.naming.batches import Batch, batches
from specbench.naming.fingerprint import Pair
from specbench.naming.scene import PROMPT, Scene
from specbench.naming.trace import Leaf
from specbench.naming.walks import Walked, keeps_at_gap, walk, walked
from specbench.tree import PROPOSALS, DraftTree

Visible = tuple[tuple[int, ...], tuple[int, ...]]  # prefix rows and nodes
Reason = tuple[str, str]  # a fault class and why it is suspected
MIN_ROWS_OF_CAPACITY = 3  # what a wrong computation needs to show at the most
SMALL = 0.02  # of the scale: what rounding or a slightly wrong constant does

# What is wrong with what rows see and where they stand, in the order in which it decides.
SEEN_WRONGLY = {
    "before": "mask-leak",
    "ahead": "mask-future",
    "later": "mask-leak",
    "missing": "mask-missing-ancestor",
    "beyond": "sliding-window",
    "position": "position-ids",
}

# Claims that explain the failure of a claim when they fail themselves, in the order in which a round goes through them.
_TREE = ("tree.mask", "tree.positions", "tree.attention_weights", "tree.layers", "tree.logits")
_ROUND = (*_TREE, "kv.commit", "greedy.walk")
EXPLAINED_BY: dict[str, tuple[str, ...]] = {
    **{claim: _TREE[:idx] for idx, claim in enumerate(_TREE)},
    "tree.noninterference": _TREE,
    "tree.sensitivity": _TREE,
    "tree.long": _TREE,
    "kv.commit": _TREE,
    **dict.fromkeys(
        ("kv.rollback", "kv.dead_rows", "kv.fork", "kv.pages", "kv.chunked", "kv.abort"), (*_TREE, "kv.commit")
    ),
    "kv.machine": (*_TREE, "kv.commit", "kv.rollback", "kv.abort", "kv.chunked", "kv.fork"),
    "verify.batch": ("greedy.walk",),
    "greedy.lossless": _ROUND,
    **dict.fromkeys(("greedy.repeatable", "progress", "threshold.consistency"), (*_ROUND, "greedy.lossless")),
    **dict.fromkeys(
        ("stop.eos", "stop.max_tokens", "stop.sequences", "stop.min_tokens", "stop.every_index", "stop.resume"),
        (*_ROUND, "greedy.lossless"),
    ),
    **dict.fromkeys(
        ("processors.penalties", "processors.bad_words", "processors.grammar", "processors.history"),
        (*_ROUND, "greedy.lossless"),
    ),
    "batch.solo": (*_ROUND, "greedy.lossless", "verify.batch"),
    "batch.join": (*_ROUND, "greedy.lossless", "verify.batch", "batch.solo"),
    "ranks.agree": ("greedy.lossless",),
    **dict.fromkeys(("law.params", "law.support", "law.acceptance_bound"), ("law.exact",)),
    "law.q": ("drafter.law", "law.exact"),
    "law.joint": ("law.exact", "law.params"),
    "law.rows": ("law.exact", "law.params", "law.joint"),
    "law.accepted": ("law.exact", "law.params"),
    "metrics.acceptance": ("greedy.lossless",),
}


# What makes a claim another one than a plain round: where a target breaks down there, it is that.
_BEHIND = {
    "kv.abort": "abort-path",
    "kv.chunked": "chunked-prefill/prefix-cache",
    "kv.dead_rows": "mask-prefix/padding",
    "kv.fork": "kv-slot/page-mapping",
    "kv.pages": "kv-slot/page-mapping",
    "processors.grammar": "grammar-state",
    "processors.penalties": "logits-processor-state",
    "processors.bad_words": "logits-processor-state",
    "processors.history": "logits-processor-state",
    "ranks.agree": "rank-divergence",
}
_OF_SIZES = ("size", "shape", "out of bounds", "out of range")  # words of what torch raises


def classes_of(scene: Scene) -> list[Reason]:
    """Suspected classes, the likeliest first, each once."""
    found: dict[str, str] = {}
    for fault_class, reason in _suspected(scene):
        found.setdefault(fault_class, reason)
    return list(found.items())


def _suspected(scene: Scene) -> Iterator[Reason]:
    family = scene.claim.split(".")[0]
    if isinstance(scene.violation, Misbehaviour):
        yield from _misbehaves(scene)
        return
    yield from _by_claim.get(scene.claim, _by_family.get(family, _nothing))(scene)


def _nothing(scene: Scene) -> Iterator[Reason]:
    return iter(())


def _misbehaves(scene: Scene) -> Iterator[Reason]:
    """It raises, or answers what cannot be an answer: such a thing has no shape, and what brings it about has."""
    facts = scene.violation.facts
    if "(the vocabulary)" in scene.headline:
        yield "tokenizer/vocab", "a token outside the target's vocabulary"
    if scene.claim.startswith(("tree.", "kv.")):
        yield from _by_model(scene, scene.needed_model)
    if scene.claim in _BEHIND:
        yield _BEHIND[scene.claim], "what this claim does beyond a plain round brings it about"
    if any(word in facts.headline for word in _OF_SIZES) or facts.actual.startswith("IndexError"):
        yield "capacity/out-of-range", "a buffer or an index does not fit"
    if "nan" in scene.headline:
        yield "dtype/precision", "what is answered is no number"


# One verification forward


def _tree(scene: Scene) -> Iterator[Reason]:
    yield from _by_model(scene, scene.needed_model)
    if scene.needs_pages:
        yield "kv-slot/page-mapping", "only paged caches fail"
    yield from _seen(scene)
    for pair in scene.taps:
        yield from _computed(scene, pair)
    yield from _by_moves(scene)
    yield from _rows_of_logits(scene)


def _by_model(scene: Scene, needed: str) -> Iterator[Reason]:
    if needed == "recurrence":
        yield "recurrent-state-rollback", "only models with recurrent layers fail"
    if needed == "window":
        yield "sliding-window", "only models with a window fail"
    if needed == "groups":
        yield "GQA-head-mapping", "only models with grouped heads (1 < Hkv < Hq) fail"


def _seen(scene: Scene) -> Iterator[Reason]:
    """Where rows stand and what they see, over all tapped forwards. Masks and positions are what a forward begins with,
    weights follow from both."""
    masks: dict[str, str] = {}
    positions: dict[str, str] = {}
    masses: dict[str, str] = {}
    for pair in scene.taps:
        target, right, tree = pair.target.leaves, pair.right.leaves, _tree_of(pair.case)
        for leaf in pair.wrong:
            if leaf.name != "taps" or leaf not in target or leaf not in right:
                continue
            if leaf.part[0] == "position":
                positions.setdefault("position", f"node {leaf.part[1]} stands at position {target[leaf]}")
            if leaf.part[0] == "mask":
                masks |= _visibility(tree, int(leaf.part[1]), target[leaf], right[leaf], "is let to see") | masks
            if leaf.part[0] == "weights":
                node, num_nodes = int(leaf.part[2]), tree.num_nodes
                for seen, wanted in zip(*(_supports(one[leaf], num_nodes) for one in (target, right)), strict=True):
                    masses |= _visibility(tree, node, seen, wanted, "puts mass on") | masses
    has_drafts = scene.case.num_drafts > 0
    for node, seen in (scene.influence if has_drafts and not scene.taps else {}).items():
        wanted = tuple(scene.rich_tree.path_to(node))
        masses |= _visibility(scene.rich_tree, node, ((), seen), ((), wanted), "moves with") | masses
    # A leak to what came before is one, however much it shows besides; who sees its own descendants looks ahead.
    for found in (masks, positions, masses):
        for name, fault_class in SEEN_WRONGLY.items():
            if name in found:
                yield fault_class, found[name]


def _computed(scene: Scene, pair: Pair) -> Iterator[Reason]:
    """What the first layer that is wrong makes of what it sees."""
    names = ("weights", "k", "v", "attention_output", "hidden_state")
    both = pair.target.leaves.keys() & pair.right.leaves.keys()
    computed = [leaf for leaf in pair.wrong if leaf.name == "taps" and leaf.part[0] in names and leaf in both]
    if not computed:
        return
    first = computed[0]
    # All layers from the first wrong one on are wrong: what its own inputs are decides.
    here = [leaf.part[0] for leaf in computed if leaf.part[1] == first.part[1]]
    size = max(
        _relative(pair.target.leaves.get(leaf), pair.right.leaves.get(leaf))
        for leaf in computed
        if leaf.part[1] == first.part[1]
    )
    if isinstance(scene.case, LongCase):  # what is small there is one row among many
        if "k" not in here and "v" not in here:
            yield "mask-missing-ancestor", "keys and values are right, and a long context is attended to wrongly"
    elif size < SMALL:
        yield "dtype/precision", f"all is right but for {size:.1g} of the scale"
    if "k" in here and "v" not in here:
        yield "position-ids", "keys are wrong and values are right: what turns keys is the position"
    if "weights" in here and "k" not in here and not _root_is_wrong(computed):
        yield "position-ids", "keys are right, and the weights of drafted rows alone are wrong"
    num_rows = len(getattr(scene.case, "prompt", ())) + scene.case.num_drafts
    if num_rows > MIN_ROWS_OF_CAPACITY:  # smaller cases were tried and hold
        yield "capacity/out-of-range", f"it takes {num_rows} rows: fewer are right"
    if "weights" in here or "attention_output" in here:
        yield "GQA-head-mapping", "keys and values are right, what the heads make of them is not"
    yield "dtype/precision", "what is seen is right, what is computed from it is not"


def _root_is_wrong(computed: list[Leaf]) -> bool:
    return any(leaf.part[2] == 0 for leaf in computed)


def _visibility(tree: DraftTree, node: int, seen: Visible, wanted: Visible, verb: str) -> dict[str, str]:
    """What is wrong with what a node sees, by the names of `SEEN_WRONGLY`."""
    found: dict[str, str] = {}
    extra, missing = set(seen[1]) - set(wanted[1]), set(wanted[1]) - set(seen[1])
    ahead = {one for one in extra if node in tree.path_to(one)}
    later = {one for one in extra - ahead if one > node}
    before = extra - ahead - later
    for name, nodes, where in (
        ("before", before, "which is not on its path"),
        ("ahead", ahead, "which is drafted behind it"),
        ("later", later, "which is not on its path"),
    ):
        if nodes:
            found[name] = f"node {node} {verb} node {min(nodes)}, {where}"
    if len(seen[1]) > len(set(seen[1])):
        found["before"] = f"node {node} sees a node twice"
    if missing:
        found["missing"] = f"node {node} misses node {min(missing)} on its path"
    prefix, wanted_prefix = set(seen[0]), set(wanted[0])
    if wanted_prefix - prefix:
        found["missing"] = f"node {node} misses prefix row {min(wanted_prefix - prefix)}"
    if prefix - wanted_prefix:
        found["beyond"] = f"node {node} {verb} prefix row {min(prefix - wanted_prefix)}, which has left the window"
    return found


def _supports(weights: Tensor, num_nodes: int) -> list[Visible]:
    """What each head sees: prefix rows and nodes that carry mass."""
    num_prefix = weights.shape[-1] - num_nodes
    supports = []
    for head in weights:
        columns = (head > 0).nonzero().flatten().tolist()
        nodes = tuple(one - num_prefix for one in columns if one >= num_prefix)
        supports.append((tuple(one for one in columns if one < num_prefix), nodes))
    return supports


def _by_moves(scene: Scene) -> Iterator[Reason]:
    """What the two claims about perturbation say by themselves."""
    if scene.claim == "tree.noninterference":
        yield "mask-leak", "a node's logits move with a token that is not on its path"
    if scene.claim == "tree.sensitivity":
        yield "mask-missing-ancestor", "a node's logits do not move as they should with a token on its path"
    if scene.claim == "tree.long" and isinstance(scene.case, LongCase):
        case = scene.case
        if case.chunk:
            yield "chunked-prefill/prefix-cache", "only a prompt in pieces fails"
        if case.num_nodes <= 2:
            yield "mask-prefix/padding", f"a prefix of {case.prefix_len} tokens is enough"
            yield "position-ids", f"a prefix of {case.prefix_len} tokens is enough"
        else:
            yield "mask-missing-ancestor", f"it takes a tree of {case.num_nodes} nodes"


def _rows_of_logits(scene: Scene) -> Iterator[Reason]:
    wrong = [leaf for leaf in scene.wrong if leaf.name == "forward_tree"]
    if not wrong:
        return
    rows = [scene.right(leaf) for leaf in wrong]
    if len(wrong) > 1 and all(any(_alike(scene.actual(leaf), row) for row in rows) for leaf in wrong):
        yield "tree-construction", "each wrong row of logits is another node's"
    size = _relative(scene.actual(wrong[0]), scene.right(wrong[0]))
    if size < SMALL:
        yield "dtype/precision", f"logits are off by {size:.1g} of their scale"
    if scene.actual(wrong[0]) is None or scene.right(wrong[0]) is None:
        return
    columns = (scene.actual(wrong[0]) != scene.right(wrong[0])).nonzero().flatten().tolist()
    if 0 < len(columns) < len(scene.right(wrong[0])) / 2:
        yield "tokenizer/vocab", f"only {len(columns)} columns of the vocabulary are wrong"
    if scene.influence and not any(leaf.part == ("row", 0) for leaf in wrong):
        yield "position-ids", "rows move with what they should see, the root is right and drafted rows are wrong"


# The cache between rounds


def _cache(scene: Scene) -> Iterator[Reason]:
    needed, claim = scene.needed_model, scene.claim
    if needed == "recurrence":
        yield "recurrent-state-rollback", "only models with recurrent layers fail"
    if needed == "window":
        yield "sliding-window", "only models with a window fail"
    if claim == "kv.commit" and scene.needs_other_trees:
        yield "static-buffer-stale", "rounds of one and the same tree are right, a tree after another one is not"
    if claim == "kv.abort":
        yield "abort-path", "a round that was dropped leaves something behind"
    if claim == "kv.chunked":
        yield "chunked-prefill/prefix-cache", "only a prompt in pieces or behind a kept prefix fails"
    if claim == "kv.dead_rows":
        yield "mask-prefix/padding", "what stands in rows that no one may read changes the logits"
    if claim == "kv.pages":
        yield from _pages(scene)
    if claim == "kv.fork" or scene.needs_pages:
        yield "kv-slot/page-mapping", "two sequences share rows" if claim == "kv.fork" else "only paged caches fail"
    if needed == "groups":
        yield "GQA-head-mapping", "only models with grouped heads (1 < Hkv < Hq) fail"
    for pair in (scene.rich, scene.pair):
        if pair is not None:
            yield from _first_state(scene, pair)


def _pages(scene: Scene) -> Iterator[Reason]:
    facts = scene.violation.facts
    counts = [re.match(r"(\d+) pages", one) for one in (facts.actual, facts.expected)]
    if all(counts):
        actual, right = (int(one[1]) for one in counts if one)
        if actual > right:
            yield "memory", f"{actual} pages are in use instead of {right}"
    yield "kv-slot/page-mapping", "pages in use are not what the rows need"


def _first_state(scene: Scene, pair: Pair) -> Iterator[Reason]:
    """The first answer that is wrong: a length, a row of keys or values, or logits behind a cache that is right."""
    target, right = pair.target.leaves, pair.right.leaves
    first = next((leaf for leaf in pair.wrong if leaf.name in ("cache_len", "kv", "forward_tree")), None)
    if first is None or first not in target or first not in right:
        return
    if first.name == "cache_len":
        yield from _lengths(scene, pair, target[first] - right[first])
        return
    if first.name == "forward_tree":
        if scene.claim == "kv.rollback":
            yield "kv-not-rolled-back", "behind a cut the cache is as long as it should be, and the logits are wrong"
        yield "position-ids", "the cache is right, and the logits behind it are wrong"
        yield "kv-stale-after-reject", "the cache shows the right rows, and the logits are computed from others"
        return
    rows = [leaf for leaf in pair.wrong if leaf.name == "kv" and leaf.number == first.number]
    if any(leaf not in target or leaf not in right for leaf in rows):
        yield "kv-off-by-one", "a layer holds too many or too few rows"
        return
    size = max(_relative(target[leaf], right[leaf]) for leaf in rows)
    if size < SMALL:
        yield "dtype/precision", f"rows are off by {size:.1g} of their scale"
    if any(_is_someone_elses(scene, pair, leaf) for leaf in rows):
        yield "kv-wrong-path-compacted", "a row holds what belongs to another node"
    which = {leaf.part[0] for leaf in rows}
    if which == {"k"} and all(_same_size(target[leaf], right[leaf]) for leaf in rows):
        yield "kv-stale-after-reject", "keys are as long as they should be and point elsewhere: turned for another row"
        yield "position-ids", "keys are as long as they should be and point elsewhere: they are turned wrongly"
    if len(which) == 1:
        moved, stayed = ("values", "keys") if which == {"k"} else ("keys", "values")
        yield "kv-wrong-path-compacted", f"{moved} are right and {stayed} are not"
    yield "kv-wrong-path-compacted", "the right number of rows, with other content"
    yield "kv-stale-after-reject", "the right number of rows, with other content"


def _lengths(scene: Scene, pair: Pair, extra: int) -> Iterator[Reason]:
    reason = f"{abs(extra)} row{'' if abs(extra) == 1 else 's'} too {'many' if extra > 0 else 'few'}"
    first = planned(pair.case)[0] if isinstance(pair.case, CommitCase) else None
    if extra > 0 and scene.claim in ("kv.rollback", "kv.machine"):
        yield "kv-not-rolled-back", f"{reason} behind a cut or a forward that was dropped"
    if first is not None and extra == first.tree.num_drafts - len(first.path):
        yield "kv-not-rolled-back", f"{reason}: as many as drafts were rejected"
    if abs(extra) == 1:
        yield "kv-off-by-one", reason
    yield "kv-not-rolled-back", reason if extra > 0 else f"{reason}: rolled back too far"
    yield "kv-off-by-one", reason


def _is_someone_elses(scene: Scene, pair: Pair, leaf: Leaf) -> bool:
    """Whether a wrong row is that of some node of some round, or of another committed token."""
    case, actual = pair.case, pair.target.leaves[leaf]
    if not isinstance(case, CommitCase):
        return False
    which = str(leaf.part[0])
    for one in planned(case):
        for layer in scene.subject.score(case, one.before[:-1], one.tree).layers:
            rows = getattr(layer, which)
            if rows is not None and any(
                rows.shape[::2] == actual.shape and _alike(rows[:, node], actual) for node in range(rows.shape[1])
            ):
                return True
    others = [value for other, value in pair.right.leaves.items() if other.name == "kv" and other.part[0] == which]
    return any(_alike(actual, one) for one in others)


# Acceptance


def _walk(scene: Scene) -> Iterator[Reason]:
    case = scene.case
    if not isinstance(case, WalkCase):
        return
    tried = walked(scene.subject)
    if keeps_at_gap(scene.subject, 4.0) and not keeps_at_gap(scene.subject, 6.0, token=4):
        yield "accept-rule/residual-wrong", "a draft is kept that is its parent's second choice"
    yield from _of_walks(tried)
    if not any(one.is_wrong for one in tried):  # so it takes what the plain ones leave out
        if keeps_at_gap(scene.subject, 0.5):
            yield "greedy-vs-sampling", "a draft is kept that is nearly as likely as the target's choice"
        if any(len(one) > 1 for one in case.winners):
            yield "tie-breaking", "only rows with several largest logits fail"
        if case.flavour == 1:
            yield "dtype/precision", "only rows whose two largest logits lie close together fail"
            yield "greedy-vs-sampling", "only rows whose two largest logits lie close together fail"
        if not _fails_renamed(scene, case):
            yield "tokenizer/vocab", "only large token ids fail"
        siblings = [(case.parents[node], case.tokens[node]) for node in range(1, len(case.tokens))]
        if len(set(siblings)) < len(siblings):
            yield "accept-wrong-branch", "only trees with the same token twice below a node fail"
        if case.flavour:
            yield "greedy-vs-sampling", "only rows with unusual logits fail"
    right = longest_path(case, [min(one) for one in winners_of(case)])
    alone = walk(scene.subject, case, tuple(right))
    if alone is not None:
        yield from _of_walks([alone])


def _of_walks(walks: list[Walked]) -> Iterator[Reason]:
    """What answers of a verifier have in common where they are wrong."""
    wrong = [one for one in walks if one.is_wrong]
    if not wrong:
        return
    if all(one.path == one.right for one in wrong):
        if all(one.bonus_of_child for one in wrong):
            yield (
                "accept-off-by-one",
                "every path is right, the token behind it is what the refused draft's row says",
            )
        yield "bonus/correction-token-wrong", "every path is right, and the token behind it is not"
    kept = [one for one in wrong if one.kept is not None]
    if kept and all(one.kept_by_itself for one in kept):
        yield "row-self", "what is wrongly kept is what its own row says"
    if all(not one.is_chain for one in wrong):
        if all(one.path == one.right for one in wrong):
            yield "bonus/correction-token-wrong", "chains are right; off the leftmost path the last token is not"
        yield "accept-wrong-branch", "chains are right; with siblings another path is taken"
    longer = [len(one.path) - len(one.right) for one in wrong if one.path != one.right]
    if longer and all(not one.right and len(one.path) == 1 for one in wrong):
        yield "accept-draft-first-unverified", "a first draft is kept where nothing should be, and all else is right"
    if longer and all(abs(one) == 1 for one in longer):
        yield "accept-off-by-one", f"one draft {'more' if longer[0] > 0 else 'less'} is kept than the target says"
    if longer:
        yield "accept-off-by-one", "another number of drafts is kept than the target says"
        yield "accept-wrong-branch", "another path is kept than the target says"
    yield "bonus/correction-token-wrong", "the token behind the path is wrong"


def _fails_renamed(scene: Scene, case: WalkCase) -> bool:
    """The same tree over the lowest ids."""
    used = sorted({*case.tokens, *(token for one in case.winners for token in one)})
    low = {token: idx for idx, token in enumerate(used)}
    renamed = replace(
        case,  # no token of which is in the last column then
        tokens=tuple(low[token] for token in case.tokens),
        winners=tuple(tuple(low[token] for token in one) for one in case.winners),
        vocab_size=max(len(used) + 1, case.vocab_size),
    )
    return scene.fails_with(renamed)


def _verify_batch(scene: Scene) -> Iterator[Reason]:
    """Each tree alone is verified rightly: in what must trees differ for several not to be?"""
    if "greedy.walk" not in scene.held:
        return
    tried = {one.differs: one for one in batches(scene.subject)}
    failing = {differs: one for differs, one in tried.items() if one.wrong}
    if any(one.is_shuffled for one in failing.values()):
        yield "batch-cross-talk", "the answers are right and stand in another order"
    accepts = failing.get("accepts")
    if accepts is not None and accepts.misses_bonus_only and all(not accepts.right[idx].path for idx in accepts.wrong):
        yield "accept-padding/placeholder", "only where nothing is accepted, the token is read from another row"
    elif "shapes" in failing and not accepts and "nothing" not in failing:
        yield "accept-wrong-branch", "only trees of equal size and other parents are decided wrongly"
    if failing.keys() == {"zero"} or any(_says_nobodys(one) for one in failing.values()):
        yield "accept-padding/placeholder", "behind a smaller tree its padding is taken for a draft or for a row"
    if failing and "nothing" not in failing:
        yield "batch-raggedness", f"only trees of other {' or '.join(failing)} are decided wrongly"
    if "nothing" in failing and failing["nothing"].wrong == [len(failing["nothing"].right) - 1]:
        yield "batch-raggedness", "of an odd number of equal trees only the last is decided wrongly"
    yield "batch-cross-talk", "each tree alone is verified rightly, several are not"
    yield "batch-raggedness", "each tree alone is verified rightly, several are not"


def _says_nobodys(batch: Batch) -> bool:
    """Whether a wrong token behind a path is one that no row says."""
    said = frozenset().union(*batch.said)
    return any(batch.answers[idx].bonus_token not in said for idx in batch.wrong)


# Whole generations


def _lossless(scene: Scene) -> Iterator[Reason]:
    tokens = [leaf for leaf in scene.wrong if leaf.part[:1] == ("token",)]
    if tokens and tokens[0].number > 0 and "tokens, must have" in scene.headline:
        yield "loop-state-stale", "a first request ends where it should, the next one on the same instance does not"
    if tokens and not any(leaf in _both(scene) for leaf in tokens):
        yield "eos/stop/max-length", "every token is right, and there are too many or too few of them"
    if scene.wrong and scene.wrong[0].number > 0 and _fails_without_drafts(scene):
        yield from _stale(scene)  # a request before it is all it takes
    yield from _first_round(scene)
    if {"tree.logits", "greedy.walk"} <= scene.held:
        yield "loop-state-stale", "a round alone is right, several in a row are not"


def _first_round(scene: Scene) -> Iterator[Reason]:
    """The first round that is not the good decoder's."""
    for leaf in scene.wrong:
        actual, right = scene.actual(leaf), scene.right(leaf)
        if leaf.part[:1] != ("round",) or actual is None or right is None:
            continue
        tokens, parents, path, bonus, emitted, prefix_len = (one == two for one, two in zip(actual, right, strict=True))
        number = leaf.part[1]
        if tokens and parents and path and bonus and not emitted:
            yield "bonus/correction-token-wrong", f"round {number} decides rightly and emits other tokens"
        elif tokens and parents and not path:
            yield from _of_paths(actual[2], right[2], number)
        elif tokens and parents and not bonus:
            yield (
                "bonus/correction-token-wrong",
                f"round {number} keeps the right path, goes on with another token",
            )
        elif not prefix_len:
            yield "kv-off-by-one", f"round {number} begins behind another number of cached rows"
        else:
            yield "loop-state-stale", f"round {number} is given another draft"
        return


def _of_paths(path: tuple[int, ...], right: tuple[int, ...], number: Any) -> Iterator[Reason]:
    if not right and len(path) == 1:
        yield "accept-draft-first-unverified", f"round {number} keeps a first draft that no row says"
    if path[: len(right)] == right or right[: len(path)] == path:
        yield "accept-off-by-one", f"round {number} keeps {len(path)} drafts, the target says {len(right)}"
    yield "accept-wrong-branch", f"round {number} takes another path than the target says"


def _metrics(scene: Scene) -> Iterator[Reason]:
    if _goes_another_way(scene):
        yield from _first_round(scene)
    yield "metric-wrong", "the tokens are right, and the reported number is not the rounds'"


def _goes_another_way(scene: Scene) -> bool:
    """Whether rounds begin where no round of the good decoder's begins: something else is decided, not just told."""
    if scene.pair is None:
        return False
    begins = [
        {value[5] for leaf, value in trace.leaves.items() if leaf.part[:1] == ("round",)}
        for trace in (scene.pair.target, scene.pair.right)
    ]
    return not begins[0] <= begins[1]


def _repeatable(scene: Scene) -> Iterator[Reason]:
    if "made behind another text" in scene.headline:
        yield "loop-state-stale", "drafts of an earlier request are verified"
    yield from _stale(scene)


def _stale(scene: Scene) -> Iterator[Reason]:
    """A first request is answered rightly, the same one after others is not."""
    if _fails_without_drafts(scene) and not scene.mixes_unlike_texts:
        yield "chunked-prefill/prefix-cache", "no draft is needed: what is kept of a text that begins alike is enough"
    yield "static-buffer-stale", "a first request is answered rightly, the same one after others is not"
    yield "loop-state-stale", "a first request is answered rightly, the same one after others is not"


def _fails_without_drafts(scene: Scene) -> bool:
    case = scene.case
    return isinstance(case, GenerationCase) and (not case.rounds or scene.fails_with(replace(case, rounds=())))


def _threshold(scene: Scene) -> Iterator[Reason]:
    if "greedy.walk" in scene.held:
        yield "row-self", "the greedy walk is right, the threshold rule reads another row"


def _processors(scene: Scene) -> Iterator[Reason]:
    if "greedy.lossless" not in scene.held:
        return
    if scene.claim == "processors.grammar":
        yield "grammar-state", "the output leaves the grammar, or the best token that it allows"
    yield "logits-processor-state", "without penalties and bans the same text is right"


def _stop(scene: Scene) -> Iterator[Reason]:
    if "greedy.lossless" not in scene.held:
        return
    first = next((leaf for leaf in scene.wrong if leaf.part[:1] == ("token",)), None)
    if scene.claim in ("stop.eos", "stop.max_tokens") and first and first in _both(scene):
        return  # another token, and not another end
    yield "eos/stop/max-length", "tokens are right up to the end, and the end is not"


# Batches, ranks, drafters, numbers


def _batch(scene: Scene) -> Iterator[Reason]:
    """A row of a batch is not what it is alone. What the smallest case still has is needed."""
    case = scene.case
    if not isinstance(case, BatchCase):
        return
    rows = case.rows
    lengths = {len(row.prompt) for row in rows}
    joins = scene.claim == "batch.join"
    drafts = any(row.rounds for row in rows) and not scene.fails_with(_without_drafts(case))
    if len(rows) == 1 and "tokens, must have" in scene.headline:
        yield "eos/stop/max-length", "a row alone that joins late ends elsewhere"
    penalties = {(row.repetition, row.presence, row.frequency) for row in rows}
    if penalties != {(100, 0, 0)} and not joins:
        if len(penalties) > 1 and not scene.fails_with(_of_one_sampling(case)):
            yield "batch-cross-talk", "rows with other penalties than their neighbours are needed"
        yield "logits-processor-state", "only rows with penalties fail"
    if case.batch_layout == "left_padded":
        yield "mask-prefix/padding", "only the left-padded layout fails"
        yield "position-ids", "only the left-padded layout fails"
    if "made behind another text" in scene.headline:
        yield "batch-cross-talk", "a row verifies what was drafted for another one"
    if not joins and "tokens, must have" not in scene.headline and _has_twins(case):
        if not scene.fails_with(_of_unlike_prompts(case)):
            yield "kv-slot/page-mapping", "only rows with the same prompt fail"
    if len({row.max_new_tokens for row in rows}) > 1 and not scene.fails_with(_of_one_length(case)):
        yield "batch-cross-talk", "rows that go on while others end are needed"
    if drafts and not joins and "verify.batch" in scene.held:
        yield "kv-wrong-path-compacted", "only rows with drafts fail, and several trees are verified rightly"
    if drafts:
        yield "batch-raggedness", "only rows with drafts fail"
    if len(lengths) > 1 and not joins and not scene.fails_with(_prompts_of_one_length(case)):
        yield "mask-prefix/padding", "prompts of unequal length are needed"
    yield "batch-cross-talk", "each row alone is right"
    yield "batch-raggedness", "each row alone is right"


def _without_drafts(case: BatchCase) -> BatchCase:
    return replace(case, rows=tuple(replace(row, rounds=()) for row in case.rows))


def _of_one_length(case: BatchCase) -> BatchCase:
    longest = max(row.max_new_tokens for row in case.rows)
    return replace(case, rows=tuple(replace(row, max_new_tokens=longest) for row in case.rows))


def _prompts_of_one_length(case: BatchCase) -> BatchCase:
    """Shorter ones grow at their beginning: what made rows differ stays."""
    longest = max(len(row.prompt) for row in case.rows)
    grown = ((*PROMPT * longest, *row.prompt)[-longest:] for row in case.rows)
    return replace(case, rows=tuple(replace(row, prompt=one) for row, one in zip(case.rows, grown, strict=True)))


def _of_one_sampling(case: BatchCase) -> BatchCase:
    one = next(row for row in case.rows if (row.repetition, row.presence, row.frequency) != (100, 0, 0))
    rows = (
        replace(row, repetition=one.repetition, presence=one.presence, frequency=one.frequency) for row in case.rows
    )
    return replace(case, rows=tuple(rows))


def _has_twins(case: BatchCase) -> bool:
    return len({row.prompt for row in case.rows}) < len(case.rows)


def _of_unlike_prompts(case: BatchCase) -> BatchCase:
    """The same with another first token in each row."""
    rows = (replace(row, prompt=(idx, *row.prompt[1:])) for idx, row in enumerate(case.rows))
    return replace(case, rows=tuple(rows))


def _drafter(scene: Scene) -> Iterator[Reason]:
    if "(the vocabulary)" in scene.headline:
        yield "tokenizer/vocab", "a token outside the target's vocabulary is drafted"
    yield from _by_drafter_claim.get(scene.claim, _nothing)(scene)
    yield "drafter-desync", "the drafter is out of step with the text or with the target"


def _draft_tree(scene: Scene) -> Iterator[Reason]:
    if "drafts what the model says" in scene.headline:
        choices = [*_choices(scene)]
        # Where it is always one token that is drafted wrongly, which models fail is an accident of the cases.
        if scene.needed_model == "window" and [one for one, _ in choices[:1]] != ["tokenizer/vocab"]:
            yield "sliding-window", "only models with a window fail"
        yield from choices
        yield "drafter-desync", "what is drafted is not what the model says, though it is said to be"
        yield "tokenizer/vocab", "what is drafted is not what the model says, though it is said to be"
    yield "tree-construction", "what is drafted is no tree, or not the one that it is said to be"


def _choices(scene: Scene) -> Iterator[Reason]:
    """What wrong choices of a drafter have in common, and where it chooses rightly."""
    choices = scene.choices
    wrong = [one for one in choices if one.is_wrong]
    if not wrong:
        yield "tree-construction", "with room for all the same drafter chooses rightly"
        return
    last = scene.subject.vocab_size(scene.case.model) - 1
    if all(last in one.drafted for one in wrong):
        yield "tokenizer/vocab", "whatever is drafted wrongly is the last token of the vocabulary"
    if all(one.worst_rank > last - len(one.drafted) for one in wrong):
        yield "tree-construction", "what is drafted is what the model finds least likely"
    if all(one.worst_rank <= len(one.drafted) + 1 for one in wrong):
        depths = {one.depth for one in wrong}
        if any(one.depth in depths and not one.is_wrong for one in choices):
            yield "drafter-desync", "most of what is drafted is right, and the rest is nearly right"
        yield "tree-construction", "what is drafted is among the model's best, and not the best of them"
    if not any(one.depth == 0 for one in wrong):
        if all(one.is_anothers for one in wrong):
            yield "tree-construction", "what is drafted below a node is what the model says below another one"
        if any(len(one.drafted) > 1 for one in choices):
            yield "tree-construction", "the first level is right, what is drafted below it is not"
        yield "drafter-desync", "the first draft is right, what is drafted behind it is not"
    if all(one.is_wrong for one in choices if one.depth == 0):
        yield "tokenizer/vocab", "nothing that is drafted first is what the model says"


def _verifier_law(scene: Scene) -> Iterator[Reason]:
    """The law of a round: which of its decisions is off, on a single draft, on siblings, on a chain."""
    if scene.claim == "law.params" and "law.exact" in scene.held:
        if isinstance(scene.case, LawCase) and _only_drawn_fail(scene, replace(scene.case, vocab_size=4)):
            yield "q-not-matching", "at temperature 1 the law is right, elsewhere only drafts that were drawn fail"
        yield "sampling-params-one-side", "at temperature 1 and without cuts the law is right"
        return
    if "verified at once" in scene.headline:
        yield "batch-raggedness", "each tree alone has the right law, two together have not"
        yield "batch-cross-talk", "each tree alone has the right law, two together have not"
        return
    alone = laws.answered(scene.subject, (-1,), "deterministic")
    if any(not laws.alike(one.behind(()), one.p[0]) for one in alone):
        if all(max(one.behind(())) > 1 - laws.CLOSE for one in alone):
            yield "greedy-vs-sampling", "without any draft the same token is said whatever the coins"
        elif all(max(map(abs, _gaps(one.behind(()), one.p[0]))) < SMALL for one in alone):
            yield "dtype/precision", "without any draft the law is nearly right"
        yield "sampling-params-one-side", "without any draft the law is not that of the logits"
        return
    single = [one for kind in PROPOSALS for one in laws.answered(scene.subject, (-1, 0), kind)]
    found = list(_single_draft(single))
    yield from found
    if not found:
        yield from _several_drafts(scene)
    yield "accept-rule/residual-wrong", "drafts are kept, or replaced, by another law than the target's"
    yield "q-not-matching", "drafts are kept, or replaced, by another law than the target's"


def _single_draft(single: list[laws.Answered]) -> Iterator[Reason]:
    """One draft below the root: how often it is kept, and what follows."""
    wrong = [one for one in single if not laws.kept_rightly(one)]
    telling = [one for one in wrong if laws.CLOSE < one.accepted() < 1 - laws.CLOSE]
    if telling and all(laws.kept_by(one, one.p[1]) for one in telling):
        yield "row-self", "a draft is kept as often as its own row says"
    if telling and all(laws.kept_by_other_q(one) for one in telling):
        yield "q-not-matching", "a draft is kept as often as another row of q says"
    if wrong and not telling:
        yield "greedy-vs-sampling", "a draft is kept always or never, whatever the coins"
    if wrong:
        yield "accept-rule/residual-wrong", "drafts are kept too often or too seldom"
        return
    behind = [one for one in single if one.behind((1,)) and not laws.alike(one.behind((1,)), one.p[1])]
    refused = [
        one
        for one in single
        if one.behind(()) and not any(laws.alike(one.behind(()), law) for law in laws.residuals(one))
    ]
    if refused and all(one.num_coins < one.tree.num_nodes for one in refused):
        yield "rng/seed", "one coin decides whether a draft is kept, and what is said instead"
    if behind and not refused:
        yield "bonus/correction-token-wrong", "drafts are kept as they should be, what follows a kept one is off"
    if refused:
        yield "accept-rule/residual-wrong", "drafts are kept as they should be, what replaces a refused one is off"


def _several_drafts(scene: Scene) -> Iterator[Reason]:
    """A single draft is judged rightly: siblings, and a chain."""
    siblings = [one for kind in PROPOSALS for one in laws.answered(scene.subject, (-1, 0, 0), kind, most=3)]
    chains = [one for kind in PROPOSALS for one in laws.answered(scene.subject, (-1, 0, 1), kind, most=3)]
    all_refused = [one for one in siblings if one.behind(())]
    all_kept = [one for one in chains if one.behind((1, 2))]
    if any(one.num_coins < one.tree.num_nodes for one in (*all_refused, *all_kept)):
        yield "rng/seed", "one coin decides several things"
    for shape, what in (((-1, 0, 0), "siblings"), ((-1, 0, 1), "drafts behind another one")):
        if _only_drawn_fail(scene, LawCase(parents=shape)):
            yield "q-not-matching", f"a single draft is judged rightly; of {what} only those that were drawn are not"
    if any(_second_is_off(one) for one in chains if one.q is None):
        yield "row-self", "the first draft is judged rightly, one behind it by another row than its parent's"


def _only_drawn_fail(scene: Scene, case: LawCase) -> bool:
    """Whether the law is off for drafts of this shape that were drawn, and right for those that were chosen."""

    def fails(proposal: str) -> bool:
        cases = (replace(case, proposal=proposal, seed=seed) for seed in (1, 3, 4))
        return any(laws.is_off(scene.subject, one) for one in cases)

    proposals, _ = scene.subject.law_drafts
    drawn = [one for one in proposals if one != "deterministic"]
    return "deterministic" in proposals and not fails("deterministic") and any(fails(one) for one in drawn)


def _second_is_off(one: laws.Answered) -> bool:
    """Whether, behind a kept first draft of a chain, the second is kept neither by p / q nor by p alone."""
    first = one.accepted()
    if first < laws.CLOSE or one.tree.num_nodes < 3:
        return False
    second = sum(mass for result, mass in one.law.items() if len(result.path) == 2) / first
    token, p = one.tree.token_list[2], one.p[1]
    chances = [p[token]] if one.q is None or not one.q[1][token] else [p[token], min(1.0, p[token] / one.q[1][token])]
    return all(abs(second - chance) > laws.CLOSE for chance in chances)


def _gaps(law: list[float], other: list[float]) -> list[float]:
    return [one - two for one, two in zip(law, other, strict=True)]


def _support(scene: Scene) -> Iterator[Reason]:
    token = re.search(r"token (\d+) is emitted", scene.headline)
    if token and isinstance(scene.case, LawCase) and int(token[1]) >= scene.case.vocab_size:
        yield "tokenizer/vocab", "a padding column is drawn from"
    if "law.exact" in scene.held:
        yield "accept-rule/residual-wrong", "the law is right, a coin at the end of [0, 1) is not judged rightly"
    yield from _verifier_law(scene)


def _sampled(scene: Scene) -> Iterator[Reason]:
    """Whole generations: where a round alone has the right law, rounds depend on one another."""
    if scene.claim == "law.rows" and "depend" not in scene.headline:
        yield "batch-cross-talk", "a row of a batch has not the law that it has alone"
    if "greedy" in scene.headline or "one and the same" in scene.headline:
        yield "greedy-vs-sampling", "the same text comes whatever the seed"
    yield "rng/seed", "a round alone has the right law, whole texts have not"
    yield "batch-cross-talk", "a row alone has the right law, rows together have not"


def _draft_law(scene: Scene) -> Iterator[Reason]:
    times = re.search(r"token \d+ came (\d+) of (\d+) times", scene.headline)
    if times and times[1] == times[2]:
        yield "rng/seed", "whatever the coins, the same token is drawn"
    if any(word in scene.headline for word in ("coin", "independent", "uniform")):
        yield "rng/seed", "one coin decides what several should"
    if "is no law" in scene.headline:
        yield "dtype/precision", "a row of draft_probs holds what is no probability"
    total = re.search(r" sums to ([0-9.e-]+)", scene.headline)
    if total and abs(float(total[1]) - 1) < SMALL:
        yield "dtype/precision", "a row of draft_probs sums to nearly one"
    elif total:
        yield "tokenizer/vocab", "a row of draft_probs lacks a part of the law"
    for fault_class in ("q-not-matching", "sampling-params-one-side", "rng/seed"):
        yield fault_class, "draft_probs are not the law that drafts are drawn from"


def _peeking(scene: Scene) -> Iterator[Reason]:
    if "changed the context" in scene.headline:
        yield "drafter-desync", "the drafter writes to the context that it shares with its decoder"
    elif "unrelated text" in scene.headline:
        yield "kv-stale-after-reject", "rows of another text are used"
    else:
        yield "loop-state-stale", "what was read before changes the draft"
        yield "batch-cross-talk", "what another request read changes the draft"


def _histories(scene: Scene) -> Iterator[Reason]:
    """Which single rounds leave a drafter in another state than a fresh one."""
    case = scene.case
    if not isinstance(case, DrafterCase):
        return
    if case.temperature:
        yield "rng/seed", "only drafts at a temperature fail: coins depend on what came before"
        return
    vocab_size = scene.subject.vocab_size(case.model)
    prompt = tuple(token % vocab_size for token in PROMPT)
    plain = replace(case, prompt=prompt, other_at=-1, followers=(1,), max_nodes=16, max_depth=4)
    drafted = scene.num_drafted(plain)
    kinds = {"refused": (0,), "first": (1,), "sideways": (2,), "deepest": (drafted,), "plain": (-1,)}
    failing = {name for name, accepts in kinds.items() if scene.fails_with(replace(plain, accepts=accepts))}
    if failing == set(kinds):
        yield "position-ids", "any second round fails"
    elif failing and failing <= {"deepest"}:
        yield "kv-off-by-one", "only a full accept leaves it behind"
    elif failing == {"sideways"}:
        yield "kv-wrong-path-compacted", "only an accept off the leftmost path fails"
    yield "drafter-desync", "after a history of accepts it drafts unlike a fresh drafter"
    yield "kv-off-by-one", "after a history of accepts it drafts unlike a fresh drafter"


def _self_draft(scene: Scene) -> Iterator[Reason]:
    if "left to emit" in scene.headline:
        yield "performance", "more is drafted and verified than can be emitted"
    yield "drafter-desync", "the target as its own drafter is refused"


def _always(fault_class: str, reason: str) -> Callable[[Scene], Iterator[Reason]]:
    return lambda scene: iter([(fault_class, reason)])


_by_drafter_claim: dict[str, Callable[[Scene], Iterator[Reason]]] = {
    "drafter.tree": _draft_tree,
    "drafter.budget": _always("tree-construction", "what is drafted is no tree within its budget"),
    "drafter.law": _draft_law,
    "drafter.no_peeking": _peeking,
    "drafter.deterministic": _always("rng/seed", "equal coins give unequal drafts"),
    "drafter.state": _histories,
    "drafter.self_draft": _self_draft,
}
_by_family: dict[str, Callable[[Scene], Iterator[Reason]]] = {
    "tree": _tree,
    "kv": _cache,
    "stop": _stop,
    "processors": _processors,
    "batch": _batch,
    "drafter": _drafter,
}
_by_claim: dict[str, Callable[[Scene], Iterator[Reason]]] = {
    "greedy.walk": _walk,
    "verify.batch": _verify_batch,
    "greedy.lossless": _lossless,
    "greedy.repeatable": _repeatable,
    "progress": _always("loop-state-stale", "generation ends although nothing ends it"),
    "ranks.agree": _always("rank-divergence", "ranks that decode the same text part"),
    "cost.rows": _always("performance", "more rows are computed than the rounds need"),
    "metrics.acceptance": _metrics,
    "law.exact": _verifier_law,
    "law.params": _verifier_law,
    "law.acceptance_bound": _verifier_law,
    "law.support": _support,
    "law.q": _always("q-not-matching", "drafter and verifier are right alone, together they are not"),
    "law.joint": _sampled,
    "law.rows": _sampled,
    "law.accepted": _always("accept-rule/residual-wrong", "drafts are kept more often than the laws allow"),
    "law.seed": _always("rng/seed", "the seed does not decide the text"),
    "greedy.temperature_zero": _always("greedy-vs-sampling", "temperature 0 is taken for another one"),
    "sampler.law": _always("sampling-params-one-side", "the law is not what the sampling parameters ask for"),
    "threshold.consistency": _threshold,
}


def _both(scene: Scene) -> set[Leaf]:
    """Leaves that the target and the good decoder both have."""
    return set() if scene.pair is None else scene.pair.target.leaves.keys() & scene.pair.right.leaves.keys()


def _tree_of(case: Case) -> DraftTree:
    assert isinstance(case, TreeCase)
    return case.tree


def _relative(one: Any, other: Any) -> float:
    """Difference as a share of the scale; infinite where there is nothing to compare."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)) or one.shape != other.shape:
        return float("inf")
    return max_error(one, other) / max(scale_of(other), 1e-30)


def _alike(one: Any, other: Any) -> bool:
    return _relative(one, other) < 1e-9


def _same_size(one: Any, other: Any) -> bool:
    """Whether two rows of keys have equal norms in each head: rotations keep them."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)) or one.shape != other.shape:
        return False
    return _alike(one.norm(dim=-1), other.norm(dim=-1))
