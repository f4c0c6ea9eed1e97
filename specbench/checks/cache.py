"""Claims about the cache between rounds: what a commit keeps, and that nothing rejected stays.

A target may be its own oracle, so the oracle is asked for everything before the target's rounds begin: asking it
between two of them would disturb the very cache that is judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specbench import claims
from specbench.cases import Case, CommitCase
from specbench.checks.noise import cache_bounds, logits_bound, plain_kv
from specbench.checks.tree import raise_if_logits_differ
from specbench.claims import Facts, Violation
from specbench.compare import Bound, compare_rows, max_error
from specbench.probe import Probe
from specbench.record import ClaimRecord
from specbench.reference.autoregressive import NodeScores
from specbench.subjects import NotTested, Subject
from specbench.tree import DraftTree, root_only
from specbench.types import LayerTap


def check_commit(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """After every round: the length, then keys and values of every layer, equal plain decoding's over the committed
    tokens; after the last one also the next logits."""
    assert isinstance(case, CommitCase)
    rounds = planned(case)
    caches = [expected_cache(subject, case, one.after[:-1]) for one in rounds]
    last = rounds[-1].after
    next_logits = expected_logits(subject, case, last[:-1], root_only(last[-1]))
    probe = subject.open(case)
    probe.prefill(case.prompt[:-1])
    for one, cache in zip(rounds, caches, strict=True):
        probe.forward_tree(one.tree)
        probe.commit(one.path)
        compare_cache(claims.CommitMismatch, probe, cache, record, one.tree, one.path, f" after round {one.number}")
    compare_logits(claims.CommitMismatch, probe, next_logits, record, " in the next round")


def check_rollback(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """A forward that is not committed leaves nothing; a rejection leaves only the root; after a cut, made in two steps,
    the rows that are left are plain decoding's, and so are the logits of a tree behind them."""
    assert isinstance(case, CommitCase)
    rounds = planned(case)
    logits = [expected_logits(subject, case, one.before[:-1], one.tree) for one in rounds]
    num_kept = max(0, len(rounds[-1].after) - 1 - case.cut)
    kept = rounds[-1].after[: num_kept + 1]
    tree = DraftTree.of((kept[-1], *case.rounds[0].tokens[1:]), case.rounds[0].parents)
    cache = expected_cache(subject, case, kept[:-1])
    next_logits = expected_logits(subject, case, kept[:-1], tree)
    probe = subject.open(case)
    # Another text first, left in the middle of a round: a prefill starts over.
    probe.prefill(case.prompt)
    probe.forward_tree(rounds[0].tree)
    probe.prefill(case.prompt[:-1])
    for one, expected in zip(rounds, logits, strict=True):
        compare_logits(claims.RollbackMismatch, probe, expected, record, f" in round {one.number}")
        num_before = len(one.before) - 1
        probe.truncate(num_before)
        compare_length(claims.RollbackMismatch, probe, num_before, one.tree, " after dropping an uncommitted forward")
        probe.forward_tree(one.tree)
        probe.commit(one.path)
        compare_length(claims.RollbackMismatch, probe, len(one.after) - 1, one.tree, f" after round {one.number}")
    probe.truncate(max(num_kept, len(rounds[-1].after) - 1 - case.cut // 2))
    probe.truncate(num_kept)
    compare_cache(claims.RollbackMismatch, probe, cache, record, tree, [], f" after cutting back to {num_kept} rows")
    compare_logits(claims.RollbackMismatch, probe, next_logits, record, " in the next round")


@dataclass(frozen=True)
class PlannedRound:
    """before, after: all tokens, the root last, on both sides of the round. path: what it commits."""

    number: int
    tree: DraftTree
    path: list[int]
    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True)
class ExpectedCache:
    """windows: by layer how many rows it reads, its own included, None for all; empty when the model does not say."""

    committed: tuple[int, ...]
    layers: tuple[LayerTap, ...]
    bounds: list[dict[str, Bound]]
    windows: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class ExpectedLogits:
    tree: DraftTree
    logits: Tensor
    bound: Bound


def planned(case: CommitCase) -> list[PlannedRound]:
    rounds: list[PlannedRound] = []
    before = case.prompt
    for number, (one, next_root) in enumerate(zip(case.rounds, case.next_roots, strict=True), start=1):
        tree = DraftTree.of((before[-1], *one.tokens[1:]), one.parents)
        path = tree.path_to(one.accept)[1:]
        after = (*before, *(tree.token_list[node] for node in path), next_root)
        rounds.append(PlannedRound(number, tree, path, before, after))
        before = after
    return rounds


def expected_cache(subject: Subject, case: Case, committed: tuple[int, ...]) -> ExpectedCache:
    if not committed:
        return ExpectedCache((), (), [])
    oracle = subject.score_text(case, committed)
    if not oracle.layers:  # the target's own model shows logits only: its own one-by-one forward fills the cache
        if not subject.exact:
            raise NotTested("name a `checkpoint`, or offer build(model, drafter), so that cache rows have an oracle")
        num_layers = int(subject.open(case).adapter.num_layers)
        own = plain_kv(subject, case, committed, num_layers=num_layers)
        oracle = NodeScores(oracle.logits, tuple(LayerTap(k=k, v=v) for k, v in own))
    windows = getattr(subject.bank.model(case.model), "layer_windows", ())
    return ExpectedCache(committed, oracle.layers, cache_bounds(subject, case, committed, oracle), windows)


def expected_logits(subject: Subject, case: Case, prefix: Sequence[int], tree: DraftTree) -> ExpectedLogits:
    logits = subject.score(case, prefix, tree).logits
    return ExpectedLogits(tree, logits, logits_bound(subject, case, prefix, tree, logits))


def compare_length(violation: type[Violation], probe: Probe, expected: int, tree: DraftTree, when: str) -> None:
    actual = probe.cache_len
    if actual != expected:
        raise violation(
            Facts(
                headline=f"the cache holds {actual} rows{when}, must hold {expected}",
                expected=f"{expected} rows (committed tokens without the root)",
                actual=f"{actual} rows",
                source="committed tokens",
                tree=tree,
            )
        )


def compare_cache(
    violation: type[Violation],
    probe: Probe,
    expected: ExpectedCache,
    record: ClaimRecord,
    tree: DraftTree,
    path: list[int],
    when: str,
) -> None:
    num_committed = len(expected.committed)
    compare_length(violation, probe, num_committed, tree, when)
    for layer, right in enumerate(expected.layers):
        for name, actual, wanted in zip("kv", probe.kv(layer), (right.k, right.v), strict=True):
            assert wanted is not None
            what, bound = f"layer {layer} {name}", expected.bounds[layer][name]
            window = expected.windows[layer] if expected.windows else None
            if window is not None:  # a layer that slides may hold its last rows only
                least = min(num_committed, window - 1)
                if not least <= actual.shape[1] <= num_committed:
                    raise violation(
                        Facts(
                            f"{what} holds {actual.shape[1]} rows{when}, must hold at least {least}",
                            f"the last {least} to {num_committed} rows (window {window}, {num_committed} committed)",
                            f"{actual.shape[1]} rows",
                            source="committed tokens and the layer's window",
                            tree=tree,
                        )
                    )
                wanted = wanted[:, num_committed - actual.shape[1] :]
            first_row = num_committed - wanted.shape[1]
            _compare_rows(violation, what, actual, wanted, bound, record, tree, path, when, first_row=first_row)


def _compare_rows(
    violation: type[Violation],
    what: str,
    actual: Tensor,
    expected: Tensor,
    bound: Bound,
    record: ClaimRecord,
    tree: DraftTree,
    path: list[int],
    when: str,
    *,
    first_row: int,
) -> None:
    if actual.shape != expected.shape:
        wanted, got = list(expected.shape), list(actual.shape)
        raise violation(Facts(f"{what} has shape {got}{when}, must be {wanted}", str(wanted), str(got), tree=tree))
    rows = compare_rows(actual, expected, bound, row_dim=1)
    record.note_share(rows.share)
    if not rows.wrong:
        return
    row, error = next(iter(rows.wrong.items()))
    first_committed = actual.shape[1] - 1 - len(path)  # the root's row; the path's rows follow
    notes = {0: "root"} | dict.fromkeys(path, "committed")
    if row >= first_committed and path:
        notes[[0, *path][row - first_committed]] = f"its row is wrong <- row {first_row + row}"
    raise violation(
        Facts(
            headline=f"{what}, row {first_row + row} is off by {error:.2g}{when}",
            expected=f"within {bound}",
            actual=f"off by {error:.2g}; {_looks_like(actual, expected, row, bound, first_row)}",
            tree=tree,
            notes=notes,
        )
    )


def _looks_like(actual: Tensor, expected: Tensor, row: int, bound: Bound, first_row: int) -> str:
    """Says so when a wrong row holds another row's content: that names a gather by the wrong index."""
    for other in range(expected.shape[1]):
        if max_error(actual[:, row], expected[:, other]) <= bound.value:
            return f"it holds what belongs in row {first_row + other}"
    return "it holds no committed token's values"


def compare_logits(
    violation: type[Violation], probe: Probe, expected: ExpectedLogits, record: ClaimRecord, when: str
) -> None:
    actual = probe.forward_tree(expected.tree)
    raise_if_logits_differ(violation, expected.tree, actual, expected.logits, expected.bound, record, when=when)
