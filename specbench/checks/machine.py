"""The claim about any sequence of operations: what a cache holds after each, and what the next forward says.

Operations are played on up to three sequences, the first and its forks. A target may be its own oracle, so everything
expected is computed before its first operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from specbench import claims
from specbench.cases import Case, MachineCase, Op
from specbench.checks.cache import (
    ExpectedCache,
    ExpectedLogits,
    compare_cache,
    compare_logits,
    expected_cache,
    expected_logits,
)
from specbench.checks.states import check_balance
from specbench.probe import Probe
from specbench.record import ClaimRecord
from specbench.subjects import Subject
from specbench.tree import DraftTree, root_only

MAX_SEQUENCES = 3


@dataclass(frozen=True)
class _Step:
    """One operation made concrete. act: what is done to the probes. sequence: the one it is done to. text: its tokens
    afterwards, the root last. forward: the forward inside it, if there is one."""

    name: str
    sequence: int
    act: Callable[[list[Probe]], None]
    text: tuple[int, ...]
    pending: bool = False
    forward: DraftTree | None = None
    path: tuple[int, ...] | None = None  # what is committed after the forward; None: nothing yet


@dataclass
class _Sequence:
    text: tuple[int, ...]
    pending: DraftTree | None = None


@dataclass
class _Plan:
    """Follows the operations without a target: which make sense, and what each leads to."""

    has: frozenset[str]
    sequences: list[_Sequence] = field(default_factory=lambda: [_Sequence((0,))])
    current: int = 0
    steps: list[_Step] = field(default_factory=list)

    def follow(self, op: Op) -> None:
        getattr(self, op.name)(*([op.numbers, op.parents] if op.parents else [op.numbers]))

    def prefill(self, numbers: tuple[int, ...]) -> None:
        if numbers:
            self._moved("prefill", numbers, lambda probe: probe.prefill(numbers[:-1]))

    def chunk(self, numbers: tuple[int, ...]) -> None:
        """Known tokens in two pieces."""
        self._extend("chunk", numbers, num_first=len(numbers) // 2)

    def resume(self, numbers: tuple[int, ...]) -> None:
        """The next turn: known tokens behind wherever the text was stopped."""
        self._extend("resume", numbers, num_first=0)

    def draft(self, numbers: tuple[int, ...], parents: tuple[int, ...] = (-1,)) -> None:
        one = self.sequences[self.current]
        tree = DraftTree.of((one.text[-1], *numbers[1:]), parents)
        one.pending = tree
        self._add("draft", lambda probe: None, forward=tree)

    def commit(self, numbers: tuple[int, ...]) -> None:
        one = self.sequences[self.current]
        if one.pending is None or len(numbers) != 2:
            return
        tree = one.pending
        path = tree.path_to(numbers[0] % tree.num_nodes)[1:]
        text = (*one.text, *(tree.token_list[node] for node in path), *numbers[1:])
        self._moved("commit", text, lambda probe: probe.commit(path))

    def step(self, numbers: tuple[int, ...]) -> None:
        """Plain decoding: the root alone, then some next token. It replaces a forward that was not committed."""
        one = self.sequences[self.current]
        tree = root_only(one.text[-1])
        one.text, one.pending = (*one.text, *(numbers[:1] or (0,))), None
        self._add("step", lambda probe: None, forward=tree, path=())

    def truncate(self, numbers: tuple[int, ...]) -> None:
        text = self.sequences[self.current].text
        num_kept = max(0, len(text) - 1 - sum(numbers))
        self._moved("truncate", text[: num_kept + 1], lambda probe: probe.truncate(num_kept))

    def abort(self, numbers: tuple[int, ...]) -> None:
        text = self.sequences[self.current].text
        if "abort" in self.has:
            self._moved("abort", text, lambda probe: probe.abort())
        else:
            self._moved("abort", text, lambda probe: probe.truncate(len(text) - 1))

    def fork(self, numbers: tuple[int, ...]) -> None:
        one, sequence = self.sequences[self.current], self.current
        if "fork" not in self.has or one.pending is not None or len(self.sequences) == MAX_SEQUENCES:
            return
        self.sequences.append(_Sequence(one.text))
        self.current = len(self.sequences) - 1
        self.steps.append(_Step("fork", self.current, lambda probes: probes.append(probes[sequence].fork()), one.text))

    def switch(self, numbers: tuple[int, ...]) -> None:
        self.current = sum(numbers) % len(self.sequences)

    def reset(self, numbers: tuple[int, ...]) -> None:
        text = self.sequences[self.current].text[-1:]
        if "reset" in self.has:
            self._moved("reset", text, lambda probe: probe.reset())
        else:
            self._moved("reset", text, lambda probe: probe.prefill([]))

    def _extend(self, name: str, added: tuple[int, ...], *, num_first: int) -> None:
        one = self.sequences[self.current]
        if not added or one.pending is not None:
            return
        rows = (one.text[-1], *added[:-1])

        def act(probe: Probe) -> None:
            if "extend" in self.has:
                probe.extend(rows[:num_first])
                probe.extend(rows[num_first:])
                return
            for token in rows:
                probe.forward_tree(root_only(token))
                probe.commit([])

        self._moved(name, (*one.text, *added), act)

    def _moved(self, name: str, text: tuple[int, ...], act: Callable[[Probe], None]) -> None:
        one = self.sequences[self.current]
        one.text, one.pending = text, None
        self._add(name, act)

    def _add(
        self,
        name: str,
        act: Callable[[Probe], None],
        *,
        forward: DraftTree | None = None,
        path: tuple[int, ...] | None = None,
    ) -> None:
        one, sequence = self.sequences[self.current], self.current
        pending = one.pending is not None
        self.steps.append(_Step(name, sequence, lambda probes: act(probes[sequence]), one.text, pending, forward, path))


def check_machine(subject: Subject, case: Case, record: ClaimRecord) -> None:
    """After every operation: length, keys and values of every layer, page balance; what no one may read is overwritten.
    Every forward: all logits. At last: the next logits of every sequence."""
    assert isinstance(case, MachineCase)
    plan = _Plan(subject.has)
    for op in case.ops:
        plan.follow(op)
    caches = _remembered(lambda text: expected_cache(subject, case, text))
    for step in plan.steps:
        caches(step.text[:-1])
    forwards = [_expected_forward(subject, case, step) for step in plan.steps]
    ends = [expected_logits(subject, case, one.text[:-1], root_only(one.text[-1])) for one in plan.sequences]
    probes = [subject.open(case)]
    probes[0].prefill([])
    for number, (step, forward) in enumerate(zip(plan.steps, forwards, strict=True), start=1):
        when = f" {'in' if step.forward else 'after'} operation {number}, {step.name}"
        when += f" (sequence {step.sequence})" if len(plan.sequences) > 1 else ""
        if forward is not None:
            compare_logits(claims.MachineMismatch, probes[step.sequence], forward, record, when)
            if step.path is not None:
                probes[step.sequence].commit(step.path)
        step.act(probes)
        probe = probes[step.sequence]
        tree = step.forward or root_only(step.text[-1])
        compare_cache(claims.MachineMismatch, probe, caches(step.text[:-1]), record, tree, [], when)
        if step.pending:
            continue
        if len(probes) == 1 and probe.page_size is not None:
            check_balance(claims.MachineMismatch, probe, len(step.text) - 1, tree, when.strip())
        if "poison" in subject.has:
            probe.poison()
    for sequence, (probe, expected) in enumerate(zip(probes, ends, strict=True)):
        compare_logits(claims.MachineMismatch, probe, expected, record, f" at the end of sequence {sequence}")


def _expected_forward(subject: Subject, case: MachineCase, step: _Step) -> ExpectedLogits | None:
    if step.forward is None:
        return None
    before = step.text[:-1] if step.path is None else step.text[: len(step.text) - 2 - len(step.path)]
    return expected_logits(subject, case, before, step.forward)


def _remembered(make: Callable[[tuple[int, ...]], ExpectedCache]) -> Callable[[tuple[int, ...]], ExpectedCache]:
    known: dict[tuple[int, ...], ExpectedCache] = {}

    def look_up(text: tuple[int, ...]) -> ExpectedCache:
        if text not in known:
            known[text] = make(text)
        return known[text]

    return look_up
