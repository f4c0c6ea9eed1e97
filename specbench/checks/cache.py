"""Claims about the cache between rounds: what a commit keeps, and that nothing rejected stays."""

from __future__ import annotations

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
    probe = subject.open(case)
    context = list(case.prompt)
    probe.prefill(context[:-1])
    for number, (one, next_root) in enumerate(zip(case.rounds, case.next_roots, strict=True), start=1):
        tree = DraftTree.of((context[-1], *one.tokens[1:]), one.parents)
        path = tree.path_to(one.accept)[1:]
        probe.forward_tree(tree)
        probe.commit(path)
        context += [*(tree.token_list[node] for node in path), next_root]
        when = f" after round {number}"
        _compare_cache(claims.CommitMismatch, subject, case, probe, context[:-1], record, tree, path, when)
    _compare_next_logits(claims.CommitMismatch, subject, case, probe, context, root_only(context[-1]), record)


def check_rollback(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """A forward that is not committed leaves nothing; a rejection leaves only the root; after a cut the rows that are
    left are plain decoding's, and so are the logits of a tree behind them."""
    assert isinstance(case, CommitCase)
    probe = subject.open(case)
    context = list(case.prompt)
    probe.prefill(context[:-1])
    for number, (one, next_root) in enumerate(zip(case.rounds, case.next_roots, strict=True), start=1):
        tree = DraftTree.of((context[-1], *one.tokens[1:]), one.parents)
        actual = probe.forward_tree(tree)
        expected = subject.score(case, context[:-1], tree).logits
        bound = logits_bound(subject, case, context[:-1], tree, expected)
        when = f" in round {number}"
        raise_if_logits_differ(claims.RollbackMismatch, tree, actual, expected, bound, record, when=when)
        probe.truncate(len(context) - 1)
        _compare_length(
            claims.RollbackMismatch, probe, len(context) - 1, tree, " after dropping an uncommitted forward"
        )
        probe.forward_tree(tree)
        path = tree.path_to(one.accept)[1:]
        probe.commit(path)
        context += [*(tree.token_list[node] for node in path), next_root]
        _compare_length(claims.RollbackMismatch, probe, len(context) - 1, tree, f" after round {number}")
    num_kept = max(0, len(context) - 1 - case.cut)
    probe.truncate(num_kept)
    context = context[: num_kept + 1]
    shape = case.rounds[0]
    tree = DraftTree.of((context[-1], *shape.tokens[1:]), shape.parents)
    when = f" after cutting back to {num_kept} rows"
    _compare_cache(claims.RollbackMismatch, subject, case, probe, context[:-1], record, tree, [], when)
    _compare_next_logits(claims.RollbackMismatch, subject, case, probe, context, tree, record)


def _compare_length(violation: type[Violation], probe: Probe, expected: int, tree: DraftTree, when: str) -> None:
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


def _compare_cache(
    violation: type[Violation],
    subject: Subject,
    case: CommitCase,
    probe: Probe,
    committed: list[int],
    record: ClaimRecord,
    tree: DraftTree,
    path: list[int],
    when: str,
) -> None:
    _compare_length(violation, probe, len(committed), tree, when)
    if not committed:
        return
    oracle = subject.score_text(case, committed)
    if not oracle.layers:  # the target's own model shows logits only: its own one-by-one forward fills the cache
        if not subject.exact:
            raise NotTested("name a `checkpoint`, or offer build(model, drafter), so that cache rows have an oracle")
        own = plain_kv(subject, case, committed, num_layers=int(probe.adapter.num_layers))
        oracle = NodeScores(oracle.logits, tuple(LayerTap(k=k, v=v) for k, v in own))
    bounds = cache_bounds(subject, case, committed, oracle)
    for layer, right in enumerate(oracle.layers):
        for name, actual, expected in zip("kv", probe.kv(layer), (right.k, right.v), strict=True):
            assert expected is not None
            what = f"layer {layer} {name}"
            _compare_rows(violation, what, actual, expected, bounds[layer][name], record, tree, path, when)


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
        notes[[0, *path][row - first_committed]] = f"its row is wrong <- row {row}"
    raise violation(
        Facts(
            headline=f"{what}, row {row} is off by {error:.2g}{when}",
            expected=f"within {bound}",
            actual=f"off by {error:.2g}; {_looks_like(actual, expected, row, bound)}",
            tree=tree,
            notes=notes,
        )
    )


def _looks_like(actual: Tensor, expected: Tensor, row: int, bound: Bound) -> str:
    """Says so when a wrong row holds another row's content: that names a gather by the wrong index."""
    for other in range(expected.shape[1]):
        if max_error(actual[:, row], expected[:, other]) <= bound.value:
            return f"it holds what belongs in row {other}"
    return "it holds no committed token's values"


def _compare_next_logits(
    violation: type[Violation],
    subject: Subject,
    case: CommitCase,
    probe: Probe,
    context: list[int],
    tree: DraftTree,
    record: ClaimRecord,
) -> None:
    actual = probe.forward_tree(tree)
    expected = subject.score(case, context[:-1], tree).logits
    bound = logits_bound(subject, case, context[:-1], tree, expected)
    raise_if_logits_differ(violation, tree, actual, expected, bound, record, when=" in the next round")
