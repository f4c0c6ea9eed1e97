"""A whole verification round of B sequences over static buffers, fit for a CUDA graph: tree masks, the model's forward
over all trees' rows, acceptance, the accepted rows moved up, the new lengths and roots.

    for every sequence b:   rows of tree b behind prefix_lens[b]  ->  path, bonus token
                            prefix_lens[b] += 1 + |path|,   tokens[b, 0] = bonus token

Shapes do not change, nothing is allocated for keeps and no value is read on the host: what a round decided is read
between rounds. Draft trees are written into `tokens` and `parents` by the caller, on the device if it likes. Stop rules
are the caller's too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from specbench.kernels.commit_kv import commit_kv, pointers_of
from specbench.kernels.launch import CannotRun
from specbench.kernels.tree_attention import tree_attention
from specbench.kernels.tree_mask import tree_mask
from specbench.kernels.verify_greedy import verify_greedy
from specbench.kernels.verify_sample import verify_sample
from specbench.tree import UNUSED

MAX_PIECE = 1024  # rows that a prefill computes at once
WARM_UPS = 2  # rounds before a capture: the first compiles the kernels

Attend = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Any]]


class RowsModel(Protocol):
    """What a round needs of a model, as `reference.model.LlamaModel` has it."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def layer_windows(self) -> tuple[int | None, ...]: ...
    @property
    def cache_spec(self) -> Any: ...
    def rows(self, tokens: Tensor, position_ids: Tensor, attend: Attend) -> Tensor: ...


class Round:
    """Sequences, their caches and their trees. Read and written between rounds:

    tokens: int64 [B, N], parents: int32 [B, N], the trees, N = max_nodes; node 0 is the root, set by the round before;
    rows that are not used have the parent UNUSED. temperatures: float64 [B], above 0, 1 at first; uniforms: float64
    [B, N], new ones for every round; both for `sampled` rounds. emitted: int64 [B, max_depth + 1], the accepted tokens
    and the bonus token, -1 behind them. num_accepted: int32 [B]. prefix_lens: int32 [B].

    capacity: rows a sequence, of which the last N are for its tree. page: rows a page; 0 for one piece a sequence.
    page_table: int32 [B, capacity / page], the pages of each sequence, in order where not given.
    """

    def __init__(
        self,
        model: RowsModel,
        *,
        num_sequences: int,
        max_nodes: int,
        max_depth: int,
        capacity: int,
        page: int = 0,
        page_table: Tensor | None = None,
        sampled: bool = False,
    ) -> None:
        if not 1 <= max_nodes < capacity:
            raise ValueError(f"max_nodes = {max_nodes} must be at least 1 and below capacity = {capacity}")
        if not hasattr(model, "rows"):
            raise CannotRun(f"a round cannot run a {type(model).__name__}: give it rows(tokens, position_ids, attend)")
        if page and capacity % page:
            raise ValueError(f"capacity = {capacity} must be a multiple of page = {page}")
        spec = model.cache_spec
        self._model = model
        self._max_nodes, self._max_depth, self._capacity, self._page = max_nodes, max_depth, capacity, page
        self._sampled = sampled
        device, dtype = torch.device(spec.device), spec.dtype
        self.tokens = torch.zeros(num_sequences, max_nodes, dtype=torch.int64, device=device)
        self.parents = torch.full((num_sequences, max_nodes), UNUSED, dtype=torch.int32, device=device)
        self.parents[:, 0] = -1
        self.prefix_lens = torch.zeros(num_sequences, dtype=torch.int32, device=device)
        self.emitted = torch.full((num_sequences, max_depth + 1), -1, dtype=torch.int64, device=device)
        self.num_accepted = torch.zeros(num_sequences, dtype=torch.int32, device=device)
        self.temperatures = torch.ones(num_sequences, dtype=torch.float64, device=device)
        self.uniforms = torch.zeros(num_sequences, max_nodes, dtype=torch.float64, device=device)

        num_pages = capacity // page if page else 0
        first = (num_sequences * num_pages, page) if page else (num_sequences, capacity)
        self._page_table = None
        if page:
            in_order = torch.arange(first[0], dtype=torch.int32, device=device).view(num_sequences, num_pages)
            self._page_table = in_order if page_table is None else page_table.to(device, torch.int32).contiguous()
            ordered = self._page_table.flatten().sort().values
            if self._page_table.shape != in_order.shape or not torch.equal(ordered, in_order.flatten()):
                raise ValueError(
                    f"page_table must hold each of the pages 0 to {first[0] - 1} once, as {in_order.shape}"
                )
        # Rows that nobody wrote are zeros: a product of 0 and garbage may be NaN.
        self._keys, self._values = (
            [torch.zeros(*first, one.num_heads, width, dtype=dtype, device=device) for one, width in layers]
            for layers in (
                [(one, one.key_dim) for one in spec.layers],
                [(one, one.value_dim) for one in spec.layers],
            )
        )
        if any(one.key_dim != one.value_dim for one in spec.layers):
            raise CannotRun("tree_attention cannot run where keys and values differ in width: take kernels.steps")
        self._buffers = [*self._keys, *self._values]
        if len({one.shape for one in self._buffers}) > 1:
            raise CannotRun("commit_kv cannot move layers of different shapes in one launch: take kernels.steps")
        self._pointers = pointers_of(self._buffers)
        self._cu_nodes = torch.arange(num_sequences + 1, dtype=torch.int32, device=device) * max_nodes
        rows = torch.arange(num_sequences * max_nodes, device=device)
        self._sequences, self._nodes = rows // max_nodes, rows % max_nodes  # of each row
        self._longest = 0  # what the host knows of prefix_lens: none is longer
        self._is_prefilled = False
        self._graph: Any = None

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Starts over with one prompt a sequence: all tokens but the last are cached, the last one is the root."""
        if len(prompts) != len(self.tokens) or not all(prompts):
            raise ValueError(f"prompts: {len(prompts)} given, must be {len(self.tokens)} with at least one token each")
        longest = max(map(len, prompts)) - 1
        self._check_room(longest)
        device = self.tokens.device
        self.prefix_lens.zero_()
        for start in range(0, longest, MAX_PIECE):
            pieces = [list(prompt[:-1][start : start + MAX_PIECE]) for prompt in prompts]
            sizes = [len(one) for one in pieces]
            cu_nodes = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32, device=device)
            chains = [node - 1 for size in sizes for node in range(size)]
            self._forward(
                torch.tensor([token for one in pieces for token in one], dtype=torch.int64, device=device),
                torch.tensor(chains, dtype=torch.int32, device=device),
                torch.tensor([idx for idx, size in enumerate(sizes) for _ in range(size)], device=device),
                torch.tensor([node for size in sizes for node in range(size)], device=device),
                cu_nodes,
                max(sizes),
            )
            self.prefix_lens += torch.tensor(sizes, dtype=torch.int32, device=device)
        self.tokens[:, 0] = torch.tensor([prompt[-1] for prompt in prompts], dtype=torch.int64, device=device)
        self._longest = longest
        self._is_prefilled = True

    def step(self) -> None:
        """One round, launch by launch."""
        self._make_room()
        self._round()

    def replay(self) -> None:
        """One round by the graph that `capture` recorded."""
        if self._graph is None:
            raise CannotRun("no CUDA graph of this round: call capture() first")
        self._make_room()
        self._graph.replay()

    def capture(self) -> None:
        """Records the round as a CUDA graph. Lengths and roots are as before; CannotRun where there is no CUDA."""
        if self.tokens.device.type != "cuda":
            raise CannotRun(
                f"a CUDA graph cannot be captured on {self.tokens.device}: move the model to a GPU, or call step()"
            )
        self._check_room(self._longest)
        changed = (self.tokens, self.prefix_lens, self.emitted, self.num_accepted)
        before = [one.clone() for one in changed]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._round()  # rows behind prefix_lens are overwritten, which no sequence has yet
                for one, old in zip(changed, before, strict=True):
                    one.copy_(old)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._round()
        self._graph = graph

    def read(self) -> list[list[int]]:
        """What the last round emitted, per sequence; the host waits for it. ValueError where logits were NaN."""
        emitted, num_accepted, lens = self.emitted.tolist(), self.num_accepted.tolist(), self.prefix_lens.tolist()
        self._longest = max(lens)
        found = [row[: num + 1] for row, num in zip(emitted, num_accepted, strict=True)]
        for idx, row in enumerate(found):
            if row[-1] < 0:
                raise ValueError(
                    f"sequence {idx}: no token follows: there was no round yet, its target logits hold NaN, or its "
                    "temperature is not above 0"
                )
        return found

    def kv(self, sequence: int, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the committed rows, each [Hkv, P, D]."""
        rows = torch.arange(int(self.prefix_lens[sequence]), device=self.tokens.device)
        where = self._places(torch.full_like(rows, sequence), rows)
        return tuple(one[layer].flatten(0, 1)[where].transpose(0, 1) for one in (self._keys, self._values))  # type: ignore[return-value]

    @torch.no_grad()
    def _round(self) -> None:
        max_nodes = self._max_nodes
        tokens, parents = self.tokens.flatten(), self.parents.flatten()
        logits = self._forward(tokens, parents, self._sequences, self._nodes, self._cu_nodes, max_nodes)
        if self._sampled:
            result: Any = verify_sample(
                logits, tokens, parents, self.uniforms, self.temperatures,
                cu_nodes=self._cu_nodes, max_nodes=max_nodes, max_depth=self._max_depth,
            )  # fmt: skip
        else:
            result = verify_greedy(logits, tokens, parents, cu_nodes=self._cu_nodes, max_depth=self._max_depth)
        commit_kv(
            self._buffers,
            self.prefix_lens,
            result.path,
            result.num_accepted,
            page_table=self._page_table,
            pointers=self._pointers,
        )
        accepted = self.tokens.gather(1, result.path.clamp(min=0).to(torch.int64))
        self.emitted[:, :-1] = torch.where(result.path >= 0, accepted, -1)
        self.emitted[:, -1].fill_(-1)
        self.emitted.scatter_(1, result.num_accepted.to(torch.int64)[:, None], result.bonus_tokens[:, None])
        self.num_accepted.copy_(result.num_accepted)
        self.prefix_lens += 1 + result.num_accepted
        # A row of NaN has no token, and -1 would be looked up in the embedding: `read` says so.
        self.tokens[:, 0] = result.bonus_tokens.clamp(min=0)

    def _forward(
        self, tokens: Tensor, parents: Tensor, sequences: Tensor, nodes: Tensor, cu_nodes: Tensor, max_nodes: int
    ) -> Tensor:
        """tokens int64 [R], parents int32 [R], the sequence and node of each row. Their keys and values are cached
        behind prefix_lens. Returns float [R, V]."""
        mask = tree_mask(parents, self.prefix_lens, cu_nodes=cu_nodes, max_nodes=max_nodes)
        where = self._places(sequences, self.prefix_lens[sequences].to(torch.int64) + nodes)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
            for cached, new in ((self._keys[layer], k), (self._values[layer], v)):
                cached.flatten(0, 1).index_copy_(0, where, new[0].transpose(0, 1))
            out, _ = tree_attention(
                q[0].transpose(0, 1),
                self._keys[layer],
                self._values[layer],
                mask,
                self.prefix_lens,
                1.0 / math.sqrt(q.shape[3]),
                cu_nodes=cu_nodes,
                max_nodes=max_nodes,
                page_table=self._page_table,
                window=self._model.layer_windows[layer],
            )
            return out.transpose(0, 1)[None], None

        return self._model.rows(tokens[None], mask.position_ids, attend)[0]

    def _places(self, sequences: Tensor, rows: Tensor) -> Tensor:
        """int64 [R]: where cache rows stand when all pages or sequences are one behind the other."""
        if self._page_table is None:
            return sequences * self._capacity + rows
        return self._page_table[sequences, rows // self._page].to(torch.int64) * self._page + rows % self._page

    def _check_room(self, longest: int) -> None:
        if longest + self._max_nodes > self._capacity:
            raise ValueError(
                f"a prefix of up to {longest} rows and a tree of {self._max_nodes} do not fit into capacity = "
                f"{self._capacity}: read() tells the true lengths, or take a larger one"
            )

    def _make_room(self) -> None:
        if not self._is_prefilled:
            raise ValueError("a round has no text to go on: call prefill(prompts) first")
        self._check_room(self._longest)
        self._longest += 1 + self._max_depth
