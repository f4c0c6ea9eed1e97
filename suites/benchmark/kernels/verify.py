"""Acceptance and the moving of rows: our kernels against the same in torch, without a step to the host either.

Greedy answers are right by construction: the winner of each row on a planned path is the next node's token. Sampled
ones are torch's in fp64, with coins that lie so far from every edge that fp32 falls on the same side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specbench.kernels.commit_kv import commit_kv, pointers_of
from specbench.kernels.verify_greedy import verify_greedy
from specbench.kernels.verify_sample import verify_sample
from specbench.suites.benchmark.kernels.cells import KINDS, NUM_ACCEPTED, VerifyCell
from specbench.suites.benchmark.kernels.clock import Call
from specbench.suites.benchmark.kernels.rows import OWN, PEER, Contender

DTYPE = torch.bfloat16
SLACK = 1e-4  # by which coins may move without another answer
ATTEMPTS = 50  # coins drawn for a tree, until they lie far from edges
LEAD = 14.0  # of likely tokens' logits


class GreedyTask:
    """A path of NUM_ACCEPTED nodes behind as many that are no part of it: rows are moved to where none is read, so that
    a call may be repeated."""

    def __init__(self, cell: VerifyCell, device: str) -> None:
        if cell.N < 2 * NUM_ACCEPTED + 1:
            raise ValueError(f"N = {cell.N} must be at least {2 * NUM_ACCEPTED + 1}: a path and as many other nodes")
        self.kernel, self.cell, self.device = KINDS["greedy"], cell, device
        self.checked = f"paths and bonus tokens of {cell.B} trees, and all rows of the trees in {2 * cell.L} buffers"
        generator = torch.Generator().manual_seed(cell.B)
        path = [NUM_ACCEPTED + 1 + step for step in range(NUM_ACCEPTED)]
        above = _grown(cell.N, generator)
        for node, parent in zip(path, [0, *path], strict=False):
            above[node] = parent
        tokens = torch.stack([torch.randperm(cell.V, generator=generator)[: cell.N + 1] for _ in range(cell.B)])
        winners = tokens[:, cell.N :].repeat(1, cell.N)  # no node carries that one
        for node, child in zip([0, *path], path, strict=False):
            winners[:, node] = tokens[:, child]
        self.path = torch.tensor([path] * cell.B)
        self.bonus_tokens = winners[:, path[-1]]
        self.tokens = tokens[:, : cell.N].flatten().to(device)
        self.parents = torch.tensor(above, dtype=torch.int32).repeat(cell.B).to(device)
        self.max_depth = _deepest(above)
        self.cu_nodes = torch.arange(cell.B + 1, dtype=torch.int32, device=device) * cell.N
        self.prefix_lens = torch.full((cell.B,), cell.P, dtype=torch.int32, device=device)
        there = torch.Generator(device).manual_seed(cell.B)
        rows = cell.B * cell.N
        self.logits = torch.randn(rows, cell.V, generator=there, dtype=DTYPE, device=device)
        self.logits[torch.arange(rows, device=device), winners.flatten().to(device)] = LEAD
        shape = (2 * cell.L, cell.B, cell.P + cell.N, cell.Hkv, cell.D)
        self.cache = torch.randn(shape, generator=there, dtype=DTYPE, device=device)  # [2 L, B, P + N, Hkv, D]
        self._rows = self.cache[:, :, cell.P :].clone()

    def reset(self) -> None:
        self.cache[:, :, self.cell.P :] = self._rows

    def wrong(self, answer: Any) -> str:
        path, num_accepted, bonus_tokens = (one.cpu() for one in answer)
        if num_accepted.tolist() != [NUM_ACCEPTED] * self.cell.B:
            return f"num_accepted is {num_accepted.tolist()}, must be {NUM_ACCEPTED} everywhere"
        if not torch.equal(path[:, :NUM_ACCEPTED].to(torch.int64), self.path):
            return "a path is another one"
        if not torch.equal(bonus_tokens, self.bonus_tokens):
            return f"bonus tokens are {bonus_tokens.tolist()}, must be {self.bonus_tokens.tolist()}"
        right = self._rows.clone()
        right[:, :, 1 : NUM_ACCEPTED + 1] = self._rows[:, :, self.path[0]]
        return "" if torch.equal(self.cache[:, :, self.cell.P :], right) else "rows of the cache are not those moved up"


def _own_greedy(task: GreedyTask) -> tuple[Call, Callable[[Any], Any]]:
    task.reset()
    buffers = list(task.cache.unbind(0))
    pointers = pointers_of(buffers)

    def call() -> Any:
        found = verify_greedy(task.logits, task.tokens, task.parents, cu_nodes=task.cu_nodes, max_depth=task.max_depth)
        commit_kv(buffers, task.prefix_lens, found.path, found.num_accepted, pointers=pointers)
        return found

    return call, tuple


def _torch_greedy(task: GreedyTask) -> tuple[Call, Callable[[Any], Any]]:
    task.reset()

    def call() -> Any:
        path, num_accepted, bonus_tokens = torch_walk(task.logits, task.tokens, task.parents, task.cell, task.max_depth)
        torch_commit(task.cache, task.prefix_lens, path, num_accepted)
        return path, num_accepted, bonus_tokens

    return call, tuple


def torch_walk(
    logits: Tensor, tokens: Tensor, parents: Tensor, cell: VerifyCell, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """path int64 [B, max_depth], num_accepted int64 [B], bonus_tokens int64 [B]; siblings carry different tokens."""
    winners = logits.argmax(-1).view(cell.B, cell.N)
    tokens, parents = tokens.view(cell.B, cell.N), parents.view(cell.B, cell.N)
    at = torch.zeros(cell.B, 1, dtype=torch.int64, device=logits.device)
    goes_on = torch.ones_like(at, dtype=torch.bool)
    path = []
    for _ in range(max_depth):
        fits = (parents == at) & (tokens == winners.gather(1, at))
        goes_on = goes_on & fits.any(1, keepdim=True)
        at = torch.where(goes_on, fits.to(torch.int8).argmax(1, keepdim=True), at)
        path.append(torch.where(goes_on, at, -1))
    found = torch.cat(path, dim=1)
    return found, (found >= 0).sum(1), winners.gather(1, at)[:, 0]


def torch_commit(cache: Tensor, prefix_lens: Tensor, path: Tensor, num_accepted: Tensor) -> None:
    """cache: [2 L, B, S, Hkv, D]; all layers at once."""
    steps = torch.arange(path.shape[1], device=cache.device)
    destination = prefix_lens[:, None] + 1 + steps
    source = torch.where(steps < num_accepted[:, None], prefix_lens[:, None] + path, destination)
    sequences = torch.arange(len(path), device=cache.device)[:, None]
    cache[:, sequences, destination] = cache[:, sequences, source]


class SampleTask:
    """Trees of chosen drafts, or chains drawn from q; each row's likely tokens are its children's and one more."""

    def __init__(self, cell: VerifyCell, device: str) -> None:
        self.kernel, self.cell, self.device = KINDS[cell.kind], cell, device
        generator = torch.Generator().manual_seed(cell.B)
        rows = cell.B * cell.N
        is_chain = cell.kind == "chain"
        above = [list(range(-1, cell.N - 1)) if is_chain else _grown(cell.N, generator) for _ in range(cell.B)]
        tokens = torch.randint(cell.V, (cell.B, cell.N), generator=generator)
        there = torch.Generator(device).manual_seed(cell.B)
        likely = torch.zeros(rows, cell.V, dtype=DTYPE, device=device)
        likely[torch.arange(rows), torch.randint(cell.V, (rows,), generator=generator)] = LEAD
        parents = torch.tensor(above)
        row = torch.arange(cell.B)[:, None] * cell.N + parents
        likely[row[:, 1:].flatten(), tokens[:, 1:].flatten()] = LEAD
        self.logits = likely + torch.randn(rows, cell.V, generator=there, dtype=DTYPE, device=device)
        self.draft_probs = None
        if is_chain:
            noise = torch.randn(rows, cell.V, generator=there, dtype=DTYPE, device=device)
            self.draft_probs = (likely + noise).softmax(-1)
        self.tokens, self.parents = tokens.flatten().to(device), parents.flatten().to(torch.int32).to(device)
        self.cu_nodes = torch.arange(cell.B + 1, dtype=torch.int32, device=device) * cell.N
        self.temperatures = torch.ones(cell.B, device=device)
        self.max_depth = max(_deepest(one) for one in above)
        self.uniforms, self._right = self._settled(there)
        self.checked = f"paths, bonus tokens and coins of {cell.B} trees"

    def _settled(self, generator: torch.Generator) -> tuple[Tensor, list[Any]]:
        """Coins float32 [B, N] with which no answer changes when they are moved by SLACK, and these answers."""
        num_trees, num_nodes = self.cell.B, self.cell.N
        uniforms = torch.zeros(num_trees, num_nodes, device=self.device)
        answers: list[Any] = [None] * num_trees
        p = _probs(self.logits, self.temperatures, self.cell, torch.float64)
        for _ in range(ATTEMPTS):
            drawn = torch.rand(num_trees, num_nodes, generator=generator, device=self.device)
            moved = [(drawn + shift).clamp(0.0, 1.0) for shift in (0.0, SLACK, -SLACK)]
            told = [_told(_accepted(self, p, one)) for one in moved]
            for tree in range(num_trees):
                if answers[tree] is None and told[0][tree] == told[1][tree] == told[2][tree]:
                    answers[tree], uniforms[tree] = told[0][tree], drawn[tree]
            if None not in answers:
                return uniforms, answers
        raise ValueError(f"no coins in {ATTEMPTS} draws lie far from all edges: take more peaked logits")

    def wrong(self, answer: Any) -> str:
        for tree, (mine, right) in enumerate(zip(_told(answer), self._right, strict=True)):
            if mine != right:
                return f"tree {tree}: path, bonus token and coins are {mine}, must be {right}"
        return ""


def _own_sample(task: SampleTask) -> tuple[Call, Callable[[Any], Any]]:
    def call() -> Any:
        return verify_sample(
            task.logits, task.tokens, task.parents, task.uniforms, task.temperatures, cu_nodes=task.cu_nodes,
            max_nodes=task.cell.N, max_depth=task.max_depth, draft_probs=task.draft_probs,
        )  # fmt: skip

    return call, tuple


def _torch_sample(task: SampleTask) -> tuple[Call, Callable[[Any], Any]]:
    def call() -> Any:
        p = _probs(task.logits, task.temperatures, task.cell, torch.float32)
        return _accepted(task, p, task.uniforms)

    return call, tuple


def _probs(logits: Tensor, temperatures: Tensor, cell: VerifyCell, dtype: torch.dtype) -> Tensor:
    """[B, N, V]."""
    return (logits.view(cell.B, cell.N, cell.V).to(dtype) / temperatures[:, None, None]).softmax(-1)


def _accepted(task: SampleTask, p: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """path [B, max_depth], num_accepted, bonus_tokens and num_coins [B]."""
    tokens, parents = (one.view(task.cell.B, task.cell.N) for one in (task.tokens, task.parents))
    if task.draft_probs is not None:
        return torch_chain(p, task.draft_probs.view(p.shape), tokens, uniforms)
    return torch_tree(p, tokens, parents, uniforms, task.max_depth)


def torch_chain(p: Tensor, q: Tensor, tokens: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """p: [B, N, V], row i follows node i. q: alike, drafts of row i's child. uniforms: [B, N], one a decision."""
    num_trees, num_nodes = tokens.shape
    drafted = tokens[:, 1:, None]
    kept = uniforms[:, :-1] < p[:, :-1].gather(2, drafted)[..., 0] / q[:, :-1].gather(2, drafted)[..., 0]
    num_accepted = kept.long().cumprod(1).sum(1)
    is_whole = num_accepted == num_nodes - 1
    num_coins = torch.where(is_whole, num_accepted, num_accepted + 1) + 1
    trees = torch.arange(num_trees, device=p.device)
    last = p[trees, num_accepted]
    weights = torch.where(is_whole[:, None], last, (last - q[trees, num_accepted]).clamp(min=0))
    steps = torch.arange(1, num_nodes, device=p.device)
    path = torch.where(steps <= num_accepted[:, None], steps, -1)
    return path, num_accepted, _drawn(weights, uniforms.gather(1, num_coins[:, None] - 1)), num_coins


def torch_tree(
    p: Tensor, tokens: Tensor, parents: Tensor, uniforms: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Nodes are tried in order, as parents precede their children and siblings are tried in turn."""
    num_trees, num_nodes = tokens.shape
    trees = torch.arange(num_trees, device=p.device)
    at, used, num_accepted = (torch.zeros(num_trees, dtype=torch.int64, device=p.device) for _ in range(3))
    left = torch.ones(num_trees, dtype=p.dtype, device=p.device)
    refused = torch.zeros(num_trees, num_nodes, dtype=torch.bool, device=p.device)
    path = torch.full((num_trees, max_depth + 1), -1, dtype=torch.int64, device=p.device)
    for node in range(1, num_nodes):
        token = tokens[:, node]
        is_tried = parents[:, node] == at
        is_again = (refused & (parents == at[:, None]) & (tokens == token[:, None])).any(1)
        share = torch.where(is_again, 0.0, p[trees, at, token])
        coin = uniforms.gather(1, used[:, None])[:, 0]
        is_kept = is_tried & (coin < torch.where(left > 0, share / left, 0.0))
        is_refused = is_tried & ~is_kept
        used = used + is_tried
        refused[:, node] = is_refused
        left = torch.where(is_kept, 1.0, left - torch.where(is_refused, share, 0.0))
        place = torch.where(is_kept, num_accepted, max_depth)  # the last column is nobody's
        path.scatter_(1, place[:, None], torch.where(is_kept, node, -1)[:, None])
        at = torch.where(is_kept, node, at)
        num_accepted = num_accepted + is_kept
    weights = p[trees, at].clone()
    is_struck = refused & (parents == at[:, None])
    gone = torch.zeros_like(weights).scatter_add_(1, tokens, is_struck.to(weights.dtype))
    weights = torch.where(gone > 0, 0.0, weights)
    return path[:, :max_depth], num_accepted, _drawn(weights, uniforms.gather(1, used[:, None])), used + 1


def _drawn(weights: Tensor, coins: Tensor) -> Tensor:
    """The first token at which the weights [B, V], summed up, exceed their total times the coin [B, 1]."""
    summed = weights.cumsum(1)
    goals = coins.to(summed.dtype) * summed[:, -1:]
    return torch.searchsorted(summed, goals, right=True)[:, 0].clamp(max=weights.shape[1] - 1)


def _told(answer: Any) -> list[tuple[list[int], int, int]]:
    """For each tree its path, bonus token and number of coins."""
    path, num_accepted, bonus_tokens, num_coins = (one.tolist() for one in answer)
    return [
        (row[:num], token, coins)
        for row, num, token, coins in zip(path, num_accepted, bonus_tokens, num_coins, strict=True)
    ]


def _grown(num_nodes: int, generator: torch.Generator) -> list[int]:
    """Parents of a tree, each node below any earlier one."""
    return [-1, *(int(torch.randint(node, (), generator=generator)) for node in range(1, num_nodes))]


def _deepest(parents: list[int]) -> int:
    depth = [0] * len(parents)
    for node, parent in enumerate(parents[1:], start=1):
        depth[node] = depth[parent] + 1
    return max(depth)


def task_of(cell: VerifyCell, device: str) -> GreedyTask | SampleTask:
    return GreedyTask(cell, device) if cell.kind == "greedy" else SampleTask(cell, device)


def contenders_of(cell: VerifyCell) -> tuple[Contender, ...]:
    if cell.kind == "greedy":
        return Contender("kernels", OWN, _own_greedy), Contender("torch", PEER, _torch_greedy)
    return Contender("kernels", OWN, _own_sample), Contender("torch", PEER, _torch_sample)
