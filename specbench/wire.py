"""A target behind a command: an adapter of levels 0, 1, 2 and 5 that speaks JSON lines with an engine (docs/wire.md).

It starts engines and starts them afresh after a crash; how lines are exchanged stands in `wire_process.py`, what they
hold in `wire_values.py`.
"""

from __future__ import annotations

import os
import shlex
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from specbench import shim
from specbench.protocols import Coins
from specbench.tree import DraftTree
from specbench.types import Generation, Request, Sampling, Stop, VerifyResult
from specbench.wire_process import MAX_LINE, Engine, EngineHung, WireError
from specbench.wire_values import (
    Capabilities,
    as_generation,
    as_matrix,
    as_object,
    as_tree,
    as_verify_result,
    field,
    written,
)

# Uniforms sent for each node, the root included: to accept it, to draw what follows it, and as many to spare.
UNIFORMS_PER_NODE = 4
MAX_ENGINES = 3  # at once; each may hold a model
MAX_HANGS = 3  # waited for in one run; shrinking a case that hangs would try hundreds


class Command:
    """A command line that starts engines. timeout: seconds for one answer, 0 for no limit. on_hang: told the sentence
    at the `MAX_HANGS`-th hang, for instance to end the run; without it every hang is an `EngineHung` and no more.

    An engine holds what build_from made last, so adapters that live at the same time have an engine each, up to
    `MAX_ENGINES`; that of an adapter which is gone serves the next one.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        timeout: float = 300.0,
        max_line: int = MAX_LINE,
        on_hang: Callable[[str], None] | None = None,
    ) -> None:
        self.argv = tuple(argv)
        self._timeout = timeout
        self._max_line = max_line
        self._on_hang = on_hang
        self._num_hangs = 0
        self._leases: list[_Lease] = []  # least recently used first
        weakref.finalize(self, _close_all, self._leases, os.getpid())

    @property
    def name(self) -> str:
        return f"cmd: {shlex.join(self.argv)}"

    def adapter(self) -> WireAdapter:
        """An adapter over an engine started for it, whose answer to hello says what it can do.

        WireError when it cannot be started or does not say.
        """
        for one in [one for one in self._leases if one.holder() is None]:
            self._end(one)
        if len(self._leases) >= MAX_ENGINES:
            self._end(self._leases[0])
        lease = self._start()
        adapter = WireAdapter(self, lease.capabilities)
        adapter.take(lease)
        return adapter

    def lend(self, *, for_build: bool) -> _Lease:
        """An engine that no living adapter uses; for_build: it may have built something before."""
        self._leases[:] = [one for one in self._leases if one.engine.is_running]
        for one in self._leases:
            if one.holder() is None and (for_build or not one.has_built):
                return one
        if len(self._leases) < MAX_ENGINES:
            return self._start()
        oldest = self._leases[0]
        if for_build:
            return oldest
        self._end(oldest)
        return self._start()

    def note_use(self, lease: _Lease) -> None:
        self._leases.sort(key=lambda one: one is lease)

    def ask(self, engine: Engine, method: str, params: Mapping[str, Any]) -> Any:
        """The result of one request; hangs are counted."""
        try:
            return engine.request(method, params)
        except EngineHung as error:
            self._num_hangs += 1
            if self._num_hangs >= MAX_HANGS and self._on_hang is not None:
                self._on_hang(str(error))
            raise

    def close(self) -> None:
        """Ends every engine."""
        _close_all(self._leases, os.getpid())

    def _end(self, lease: _Lease) -> None:
        self._leases.remove(lease)
        lease.engine.close()

    def _start(self) -> _Lease:
        engine = Engine(self.argv, timeout=self._timeout, max_line=self._max_line)
        lease = _Lease(engine, Capabilities.of_hello(self.ask(engine, "hello", {})))
        self._leases.append(lease)
        return lease


class _Lease:
    """An engine and the adapter that uses it now."""

    def __init__(self, engine: Engine, capabilities: Capabilities) -> None:
        self.engine = engine
        self.capabilities = capabilities
        self.has_built = False
        self._holder: weakref.ref[WireAdapter] | None = None

    def holder(self) -> WireAdapter | None:
        return None if self._holder is None else self._holder()

    def hold(self, adapter: WireAdapter | None) -> None:
        self._holder = None if adapter is None else weakref.ref(adapter)


class WireAdapter:
    """What the engine says it can do, as the methods of `protocols.py`; a method it does not list is no attribute here.

    dtype: in which the engine computes. features: what it honours. vocab_size, checkpoint: None when it names none.
    """

    def __init__(
        self, command: Command, capabilities: Capabilities, folders: tuple[str, str | None] | None = None
    ) -> None:
        self._command = command
        self._folders = folders  # what build_from was given; None: the engine's own model
        self._lease: _Lease | None = None
        self._has_state = False
        self._describe(capabilities)

    def __getattr__(self, name: str) -> Any:
        capabilities = self.__dict__.get("_capabilities")  # not there while an instance is being copied
        if capabilities is not None and name in capabilities.methods:
            return getattr(self, f"_{name}")
        raise AttributeError(f"the engine does not list {name!r} among its methods")

    def take(self, lease: _Lease) -> None:
        """Use this engine from now on."""
        self._lease = lease
        lease.hold(self)
        self._command.note_use(lease)

    def _describe(self, capabilities: Capabilities) -> None:
        self._capabilities = capabilities
        self.dtype = capabilities.dtype
        self.features = capabilities.features
        self.vocab_size = capabilities.vocab_size
        self.checkpoint = capabilities.checkpoint

    def _build_from(self, checkpoint: str, drafter_checkpoint: str | None) -> WireAdapter:
        if self._lease is not None and self._lease.holder() is self:
            self._lease.hold(None)  # who builds needs no engine for itself
        folders = (str(checkpoint), None if drafter_checkpoint is None else str(drafter_checkpoint))
        built = WireAdapter(self._command, self._capabilities, folders)
        built._renew()
        return built

    def _logits(self, tokens: Sequence[int]) -> Tensor:
        result = self._ask("logits", {"tokens": list(tokens)})
        return as_matrix(field(result, "logits", "logits"), "logits")

    def _generate(
        self, prompt: list[int], *, max_new_tokens: int, sampling: Sampling, stop: Stop, seed: int
    ) -> Generation | list[int]:
        params = {"prompt": prompt, "max_new_tokens": max_new_tokens, "sampling": sampling, "stop": stop, "seed": seed}
        return as_generation(self._ask("generate", params), "generate")

    def _generate_batch(self, requests: Sequence[Request]) -> list[Generation | list[int]]:
        answers = field(self._ask("generate_batch", {"requests": list(requests)}), "generations", "generate_batch")
        if not isinstance(answers, list):
            raise WireError(f"generate_batch: generations must be a list, got {shim.short(answers)}")
        places = [f"generate_batch: generations[{idx}]" for idx in range(len(answers))]
        return [as_generation(as_object(one, where), where) for one, where in zip(answers, places, strict=True)]

    def _verify(self, tree: DraftTree, target_logits: Tensor, *, sampling: Sampling, coins: Coins) -> VerifyResult:
        uniforms = coins.uniform(UNIFORMS_PER_NODE * tree.num_nodes).tolist()
        params = {"tree": tree, "target_logits": target_logits, "sampling": sampling, "uniforms": uniforms}
        return as_verify_result(self._ask("verify", params))

    def _draft(
        self, context: list[int], *, max_nodes: int, max_depth: int, sampling: Sampling, coins: Coins
    ) -> DraftTree:
        limits = {"max_nodes": max_nodes, "max_depth": max_depth}
        uniforms = coins.uniform(UNIFORMS_PER_NODE * (max_nodes + 1)).tolist()
        tree = as_tree(self._ask("draft", {"context": context, **limits, "sampling": sampling, "uniforms": uniforms}))
        self._has_state = True
        return tree

    def _observe(self, result: VerifyResult) -> None:
        self._ask("observe", {"path": list(result.path), "bonus_token": result.bonus_token}, empty=True)
        self._has_state = True

    def _reset(self) -> None:
        self._ask("reset", {}, empty=True)
        self._has_state = False

    def _ask(self, method: str, params: dict[str, Any], *, empty: bool = False) -> dict[str, Any]:
        """empty: nothing is expected in the result."""
        use_base64 = self._capabilities.use_base64
        params = {name: written(value, name, use_base64=use_base64) for name, value in params.items()}
        result = self._command.ask(self._engine(), method, params)
        return {} if empty else as_object(result, method)

    def _engine(self) -> Engine:
        """The adapter's engine; another one after a crash, or when too many adapters live at once."""
        lease = self._lease
        if lease is None or not lease.engine.is_running:
            lease = self._renew()
        elif lease.holder() is not self:
            if self._has_state:
                raise WireError(f"only {MAX_ENGINES} drafters with a state can live at once, and this one is too old")
            lease = self._renew()
        self._command.note_use(lease)
        return lease.engine

    def _renew(self) -> _Lease:
        lease = self._command.lend(for_build=self._folders is not None)
        self.take(lease)
        if self._folders is not None:
            lease.has_built = True
            checkpoint, drafter_checkpoint = self._folders
            params = {"checkpoint": checkpoint, "drafter_checkpoint": drafter_checkpoint}
            said = self._command.ask(lease.engine, "build_from", params)
            self._describe(lease.capabilities.after_build(said))
        return lease


def _close_all(leases: list[_Lease], pid: int) -> None:
    if os.getpid() == pid:  # a forked child leaves the engines of its parent alone
        for one in leases:
            one.engine.close()
        leases.clear()
