"""The Hypothesis state machine behind `kv.machine`: rules append operations, the whole sequence is judged at its end.

Few rules with choices inside: Hypothesis leaves out whole rules now and then, and with many small ones commits were
rare. Nothing here touches a target (`checks.machine` does).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from specbench.cases import TOKEN_OPS, Case, MachineCase, Op
from specbench.strategies import places, trees
from specbench.subjects import Subject

MAX_OPS = 14
MAX_DRAFTS = 12


def machine_for(subject: Subject, judge: Callable[[Case], None]) -> type[RuleBasedStateMachine]:
    """A machine class for one subject; `judge` raises when the sequence of operations fails."""
    token = st.integers(0, max(subject.vocab_size(idx) for idx in range(subject.bank.num_models)) - 1)
    few_tokens = st.lists(token, min_size=1, max_size=8)

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.place: dict[str, object] = {}
            self.ops: list[Op] = []

        @initialize(place=places(subject), prompt=few_tokens)
        def prefill_first(self, place: dict[str, object], prompt: list[int]) -> None:
            self.place = place
            self._add("prefill", *prompt)

        @rule(data=st.data(), node=st.integers(0, MAX_DRAFTS), root=token)
        def round(self, data: st.DataObject, node: int, root: int) -> None:
            """A draft and its forward; mostly committed, now and then left, aborted, or overtaken by a plain step."""
            vocab_size = subject.vocab_size(int(str(self.place["model"])))
            tokens, parents = data.draw(trees(vocab_size, root=0, max_drafts=MAX_DRAFTS))
            self.ops.append(Op("draft", tokens, parents))
            ending = data.draw(st.sampled_from(["commit", "commit", "commit", "abort", "step", ""]), label="ending")
            if ending == "commit":
                self._add("commit", node % len(parents), root)
            elif ending:
                self._add(ending, *([root] if ending == "step" else []))

        @rule(how=st.sampled_from(["resume", "chunk", "step", "prefill"]), tokens=few_tokens)
        def known_tokens(self, how: str, tokens: list[int]) -> None:
            self._add(how, *(tokens[:1] if how == "step" else tokens))

        @rule(how=st.sampled_from(["truncate"] * 5 + ["reset"]), num_cut=st.integers(0, 12))
        def cut(self, how: str, num_cut: int) -> None:
            self._add(how, *([num_cut] if how == "truncate" else []))

        @rule(sequence=st.integers(0, 2), root=token)
        def branch(self, sequence: int, root: int) -> None:
            """Two forks at most; then the one or the other goes on by a step."""
            if sum(op.name == "fork" for op in self.ops) < 2:
                self._add("fork")
            else:
                self._add("switch", sequence)
                self._add("step", root)

        def _add(self, name: str, *numbers: int) -> None:
            self.ops.append(Op(name, numbers))

        def teardown(self) -> None:
            if self.ops:
                vocab_size = subject.vocab_size(int(str(self.place["model"])))
                ops = tuple(_within(op, vocab_size) for op in self.ops)
                judge(MachineCase(**self.place, ops=ops))  # type: ignore[arg-type]

    return Machine


def _within(op: Op, vocab_size: int) -> Op:
    """The operation with its tokens in the vocabulary of the model that was drawn."""
    if op.name in TOKEN_OPS:
        return replace(op, numbers=tuple(number % vocab_size for number in op.numbers))
    return replace(op, numbers=(op.numbers[0], op.numbers[1] % vocab_size)) if op.name == "commit" else op
