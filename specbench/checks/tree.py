"""Claims about one verification forward: what a row sees, where it stands, and what comes out, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor

from specbench import claims
from specbench.cases import Case, PerturbedCase, TreeCase
from specbench.checks.noise import LAYER_FIELDS, layer_bounds, logits_bound
from specbench.claims import Facts, Misbehaviour
from specbench.compare import Bound, compare_rows, max_error, row_errors, scale_of
from specbench.probe import Probe, describe
from specbench.record import ClaimRecord
from specbench.subjects import NotTested, Subject
from specbench.tree import DraftTree
from specbench.types import Taps


def check_mask(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """taps.mask, row by row: the whole prefix, then exactly the nodes on the row's own path, each once."""
    tree, prefix_len, taps = _tapped(subject, case)
    mask, node_of_row = _required(taps.mask, "taps.mask"), _node_of_row(taps, tree)
    for row, node in enumerate(node_of_row):
        hidden = [place for place in range(prefix_len) if not mask[row, place]]
        seen = [node_of_row[other] for other in range(len(node_of_row)) if mask[row, prefix_len + other]]
        if hidden or sorted(seen) != tree.path_to(node):
            raise claims.MaskMismatch(_visibility_facts(tree, node, prefix_len, hidden, seen, "is let to see"))


def check_positions(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """taps.position_ids against prefix length + depth, counted here along parents."""
    tree, prefix_len, taps = _tapped(subject, case)
    positions = _required(taps.position_ids, "taps.position_ids").tolist()
    expected = [prefix_len + len(tree.path_to(node)) - 1 for node in _node_of_row(taps, tree)]
    if positions != expected:
        row = next(idx for idx, (one, two) in enumerate(zip(positions, expected, strict=False)) if one != two)
        node = _node_of_row(taps, tree)[row]
        raise claims.PositionMismatch(
            Facts(
                headline=f"node {node} has position {positions[row]}, must be {expected[row]}",
                expected=f"{expected[row]} (prefix {prefix_len} + depth {expected[row] - prefix_len})",
                actual=str(positions[row]),
                source="prefix length + depth",
                tree=tree,
                notes={node: f"position {positions[row]}  <- must be {expected[row]}"},
            )
        )


def check_attention_weights(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """taps.layers[*].attention_weights: no mass off the path or left of a window (exactly), and the rest sums to one.

    In fp64 every visible row must carry mass: nothing underflows there unless scores lie hundreds apart.
    """
    tree, prefix_len, taps = _tapped(subject, case)
    node_of_row = _node_of_row(taps, tree)
    windows = getattr(subject.bank.model(case.model), "layer_windows", None)
    eps = torch.finfo(subject.noise_dtype).eps
    for idx, layer in enumerate(taps.layers):
        if layer.attention_weights is None:
            continue
        window = windows[idx] if windows else None
        weights = layer.attention_weights.double()
        for row, node in enumerate(node_of_row):
            mass = weights[:, row].amax(dim=0)  # [P+M], the heaviest head
            weakest = weights[:, row].amin(dim=0)
            nearest = 0 if window is None else max(0, prefix_len + len(tree.path_to(node)) - window)
            path = [one for depth, one in enumerate(tree.path_to(node)) if prefix_len + depth >= nearest]
            hidden = [p for p in range(nearest, prefix_len) if subject.exact and not weakest[p] > 0]
            left = [p for p in range(min(nearest, prefix_len)) if mass[p] > 0]
            seen = [node_of_row[m] for m in range(len(node_of_row)) if mass[prefix_len + m] > 0]
            leaks = not set(seen) <= set(path) or len(set(seen)) != len(seen)
            if subject.exact and not leaks:  # what even the weakest head sees
                seen = [node_of_row[m] for m in range(len(node_of_row)) if weakest[prefix_len + m] > 0]
            if hidden or left or leaks or (subject.exact and sorted(seen) != path):
                verb = "puts attention mass on"
                facts = _visibility_facts(
                    tree, node, prefix_len, hidden, seen, verb, path=path, nearest=nearest, left=left
                )
                raise claims.AttentionMassMismatch(_in_layer(facts, idx))
        total = weights.sum(dim=-1)  # [Hq, M]
        worst = int((total - 1).abs().argmax())
        if float((total - 1).abs().max()) > max(4 * eps * weights.shape[-1], 1e-12):
            head, row = divmod(worst, total.shape[1])
            raise claims.AttentionMassMismatch(
                Facts(
                    headline=f"layer {idx}: attention of node {node_of_row[row]} in head {head} "
                    f"sums to {total[head, row]:.6g}",
                    expected="1",
                    actual=f"{total[head, row]:.6g}",
                    source="softmax",
                    tree=tree,
                )
            )
    _all_filled(taps, subject, case, ("attention_weights",))


def check_layers(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """Keys, values, attention output, hidden state of every layer and row; the first difference in that order."""
    assert isinstance(case, TreeCase)
    tree, _, taps = _tapped(subject, case)
    node_of_row = _node_of_row(taps, tree)
    oracle = subject.score(case, case.prefix, tree)
    if not oracle.layers:
        raise NotTested("give the target a `checkpoint`, or build(model, drafter), so that layers have an oracle")
    bounds = layer_bounds(subject, case, case.prefix, tree, oracle)
    for layer, right in enumerate(oracle.layers):
        for name in LAYER_FIELDS:
            actual = getattr(taps.layers[layer], name) if layer < len(taps.layers) else None
            if actual is None or getattr(right, name) is None:
                continue
            row_dim = 1 if name in ("k", "v") else 0
            expected = getattr(right, name).index_select(row_dim, torch.tensor(node_of_row))
            if actual.shape != expected.shape:
                _wrong_tap(f"layers[{layer}].{name}", f"shape {list(expected.shape)}", f"shape {list(actual.shape)}")
            bound = bounds[layer][name]
            rows = compare_rows(actual, expected, bound, row_dim=row_dim)
            record.note_share(rows.share)
            if rows.wrong:
                row, error = next(iter(rows.wrong.items()))
                raise claims.LayerMismatch(
                    Facts(
                        headline=f"layer {layer} {name} of node {node_of_row[row]} is off by {error:.2g}",
                        expected=f"within {bound}",
                        actual=f"off by {error:.2g}",
                        tree=tree,
                        notes={node_of_row[one]: f"off by {size:.2g}" for one, size in rows.wrong.items()},
                    )
                )
    _all_filled(taps, subject, case, LAYER_FIELDS)


def check_logits(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """Every node's logits against plain decoding of its own path."""
    assert isinstance(case, TreeCase)
    probe = _prefilled(subject, case)
    actual = probe.forward_tree(case.tree)
    expected = subject.score(case, case.prefix, case.tree).logits
    bound = logits_bound(subject, case, case.prefix, case.tree, expected)
    raise_if_logits_differ(claims.LogitsMismatch, case.tree, actual, expected, bound, record)


def check_noninterference(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """Change one node's token: rows of nodes that do not descend from it must not move by a single bit. A move below
    the rounding bound is shown as NOISE: a leak in fp64 is larger by seven orders."""
    assert isinstance(case, PerturbedCase)
    node = case.place - len(case.prefix)
    before = _prefilled(subject, case).forward_tree(case.tree)
    changed = case.tree.with_token(node, case.token)
    after = _prefilled(subject, case).forward_tree(changed)
    strangers = [one for one in range(case.tree.num_nodes) if node not in case.tree.path_to(one)]
    moved = [one for one in strangers if not torch.equal(before[one], after[one])]
    bound = logits_bound(subject, case, case.prefix, case.tree, before) if moved else None
    for one in moved:  # a row order that depends on tokens moves rounding, not meaning
        record.note_rounding(max_error(after[one], before[one]))
    moved = [one for one in moved if bound and max_error(after[one], before[one]) > bound.value]
    if moved:
        size = max_error(after[moved[0]], before[moved[0]])
        raise claims.Interference(
            Facts(
                headline=f"logits of node {moved[0]} moved by {size:.2g} when node {node}, not on its path, changed",
                expected="bit-identical logits",
                actual=f"moved by {size:.2g}",
                source="the same forward before the change",
                tree=case.tree,
                notes={node: f"changed to {case.token}", **dict.fromkeys(moved, "moved, must not")},
            )
        )


def check_sensitivity(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """Change one token that a node sees: its logits must move by what the oracle's move. fp64 only."""
    assert isinstance(case, PerturbedCase)
    if not subject.exact:
        raise NotTested("judged in fp64 only, where a move is told from rounding")
    before = _prefilled(subject, case).forward_tree(case.tree)
    changed = _perturbed(case)
    after = _prefilled(subject, changed).forward_tree(changed.tree)
    right_before = subject.score(case, case.prefix, case.tree).logits
    right_after = subject.score(changed, changed.prefix, changed.tree).logits
    bound = 2e-9 * max(scale_of(right_before), scale_of(right_after), 1.0)
    errors = row_errors(after - before, right_after - right_before, row_dim=0)
    wrong = [node for node, error in enumerate(errors) if error > bound]
    if wrong:
        node = wrong[0]
        expected, actual = max_error(right_after[node], right_before[node]), max_error(after[node], before[node])
        cause = (
            f"prefix token {case.place}" if case.place < len(case.prefix) else f"node {case.place - len(case.prefix)}"
        )
        raise claims.Insensitivity(
            Facts(
                headline=f"logits of node {node} moved by {actual:.3g} when {cause} changed, must by {expected:.3g}",
                expected=f"moved by {expected:.3g}",
                actual=f"moved by {actual:.3g}",
                tree=case.tree,
                notes={one: f"off by {errors[one]:.2g}" for one in wrong},
            )
        )


def raise_if_logits_differ(
    violation: type[claims.Violation],
    tree: DraftTree,
    actual: Tensor,
    expected: Tensor,
    bound: Bound,
    record: ClaimRecord,
    *,
    when: str = "",
) -> None:
    """Shared by the claims that end in a comparison of tree logits with the oracle's."""
    rows = compare_rows(actual, expected, bound, row_dim=0)
    record.note_share(rows.share)
    if rows.wrong:
        node, error = next(iter(rows.wrong.items()))
        raise violation(
            Facts(
                headline=f"logits of node {node} are off by {error:.2g}{when}",
                expected=f"within {bound}",
                actual=f"off by {error:.2g}",
                tree=tree,
                notes={one: f"off by {size:.2g}" for one, size in rows.wrong.items()},
            )
        )


def _prefilled(subject: Subject, case: TreeCase) -> Probe:
    probe = subject.open(case)
    probe.prefill(case.prefix)
    return probe


def _tapped(subject: Subject, case: Case) -> tuple[DraftTree, int, Taps]:
    assert isinstance(case, TreeCase)

    def forward() -> Taps:
        taps = Taps()
        _prefilled(subject, case).forward_tree(case.tree, taps=taps)
        _check_shapes(taps, case.tree, len(case.prefix))
        return taps

    return case.tree, len(case.prefix), subject.remember(("taps", case), forward)


def _check_shapes(taps: Taps, tree: DraftTree, prefix_len: int) -> None:
    """Misbehaviour unless the taps are tensors whose rows fit each other and the tree."""
    for one, prefix in [(taps, ""), *((layer, f"layers[{idx}].") for idx, layer in enumerate(taps.layers))]:
        for name, value in vars(one).items():
            if name != "layers" and value is not None and not isinstance(value, Tensor):
                _wrong_tap(prefix + name, "a torch tensor", describe(value))
    if taps.mask is not None and taps.mask.dtype != torch.bool:
        _wrong_tap("mask", "dtype torch.bool (True where a row may attend)", str(taps.mask.dtype))
    if taps.node_of_row is not None:
        named = taps.node_of_row.flatten().tolist()
        if taps.node_of_row.ndim != 1 or not all(
            isinstance(node, int) and 0 <= node < tree.num_nodes for node in named
        ):
            _wrong_tap("node_of_row", f"nodes >= 0 and < {tree.num_nodes}", str(named))
        if set(named) != set(range(tree.num_nodes)):
            _wrong_tap("node_of_row", f"every node 0..{tree.num_nodes - 1} at least once", str(named))
    num_rows = len(_node_of_row(taps, tree))
    wanted: list[tuple[str, Tensor | None, list[int | None]]] = [
        ("position_ids", taps.position_ids, [num_rows]),
        ("mask", taps.mask, [num_rows, prefix_len + num_rows]),
    ]
    for idx, layer in enumerate(taps.layers):
        weights = layer.attention_weights
        wanted.append((f"layers[{idx}].attention_weights", weights, [None, num_rows, prefix_len + num_rows]))
    for name, value, shape in wanted:
        if value is not None and bool(value.isnan().any()):
            _wrong_tap(name, "numbers", f"{int(value.isnan().sum())} times NaN")
        if value is not None and (
            value.ndim != len(shape) or any(w is not None and w != g for w, g in zip(shape, value.shape, strict=True))
        ):
            _wrong_tap(name, f"shape {['Hq' if one is None else one for one in shape]}", f"shape {list(value.shape)}")


def _all_filled(taps: Taps, subject: Subject, case: Case, names: Sequence[str]) -> None:
    """NotTested when a layer left something out: what was there has been compared, but a part is not the claim."""
    model = subject.bank.model(case.model)
    num_layers = model.num_layers or len(taps.layers)
    recurrence = getattr(model, "recurrence", None)  # a recurrent layer attends to nothing
    missing = [
        f"layers[{layer}].{name}"
        for layer in range(max(num_layers, 1))
        for name in names
        if not (name == "attention_weights" and recurrence and layer in recurrence.layers)
        and (layer >= len(taps.layers) or getattr(taps.layers[layer], name) is None)
    ]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise NotTested(f"fill taps.{missing[0]}{more} in forward_tree; what it fills shows no difference")


def _wrong_tap(name: str, expected: str, actual: str) -> NoReturn:
    raise Misbehaviour(Facts(f"forward_tree() must fill taps.{name} with {expected}, got {actual}", expected, actual))


def _perturbed(case: PerturbedCase) -> TreeCase:
    prompt, tokens = list(case.prompt), list(case.tokens)
    if case.place < len(case.prefix):
        prompt[case.place] = case.token
    else:
        tokens[case.place - len(case.prefix)] = case.token
    prompt[-1] = tokens[0]
    return TreeCase(case.model, case.cache, case.layout, tuple(prompt), tuple(tokens), case.parents)


def _node_of_row(taps: Taps, tree: DraftTree) -> list[int]:
    """Rows are nodes unless the target says otherwise."""
    if taps.node_of_row is None:
        return list(range(tree.num_nodes))
    return [int(node) for node in taps.node_of_row.tolist()]


def _required(value: Tensor | None, name: str) -> Tensor:
    if value is None:
        raise NotTested(f"fill {name} in forward_tree")
    return value


def _visibility_facts(
    tree: DraftTree,
    node: int,
    prefix_len: int,
    hidden: list[int],
    seen: Iterable[int],
    verb: str,
    *,
    path: list[int] | None = None,
    nearest: int = 0,
    left: Sequence[int] = (),
) -> Facts:
    """path: the nodes to be seen, all on the row's path when None. nearest: the first row in the window; left: rows of
    the prefix seen before it."""
    wanted = tree.path_to(node) if path is None else path
    seen = sorted(seen)
    extra = sorted({one for one in seen if one not in wanted or seen.count(one) > 1})
    missing = [one for one in wanted if one not in seen]
    parts = [f"{verb} node {one} {_why_not(tree, node, one, seen)}" for one in extra[:1]]
    parts += [f"{verb} prefix row {one} (left of its window)" for one in left[:1]]
    parts += [f"misses node {one} (on its path)" for one in missing[:1]]
    parts += [f"misses prefix row {one}" for one in hidden[:1]]
    notes = dict.fromkeys(extra, "seen, must not be") | dict.fromkeys(missing, "missed")
    prefix = f"prefix {nearest}..{prefix_len - 1}" if nearest < prefix_len else ""
    lost = f" without {hidden}" if hidden else ""
    more = f"prefix rows {list(left)}" if left else ""
    return Facts(
        headline=f"node {node} {' and '.join(parts)}",
        expected=" and ".join(filter(None, (prefix, f"nodes {wanted}"))),
        actual=" and ".join(filter(None, (more, prefix + lost, f"nodes {seen}"))),
        source="the node's ancestors, walked along parents",
        tree=tree,
        notes={node: "this row", **notes},
    )


def _why_not(tree: DraftTree, node: int, other: int, seen: Sequence[int]) -> str:
    if seen.count(other) > 1:
        return "twice"
    return "(left of its window)" if other in tree.path_to(node) else "(not on its path)"


def _in_layer(facts: Facts, layer: int) -> Facts:
    return replace(facts, headline=f"layer {layer}: {facts.headline}")
