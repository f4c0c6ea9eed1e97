"""What kernels are asked, drawn small: shapes and a seed, from which tensors are filled. Dead memory is poisoned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from specbench.cases import CODES, AttentionCase
from specbench.suites.kernels import DEVICE
from specbench.tree import PROPOSALS, UNUSED, DraftTree, Proposal
from specbench.types import DTYPES

BLOCK = 64  # rows that kernels take at once: prefixes and trees are drawn around it
PREFIXES = (0, 1, 2, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3)
SIZES = (1, 2, 3, 5, 8, 9)  # nodes
RARE_SIZES = (31, 33, 63, 64, 65, 70)
VOCABS = (1, 2, 3, 17, 4096, 4097, 9000)
MOVED = (torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.uint8)


@st.composite
def shapes(draw: st.DrawFn, *, sizes: Sequence[int] = SIZES, rare: Sequence[int] = RARE_SIZES) -> tuple[int, ...]:
    """Parents of one tree. Mostly small; chains, stars and whatever lies between."""
    num_nodes = draw(st.sampled_from(rare if rare and draw(st.integers(0, 9)) == 9 else sizes))
    kind = draw(st.sampled_from(["any", "any", "chain", "star", "recent"]))
    parents = [-1]
    for node in range(1, num_nodes):
        lowest = {"any": 0, "chain": node - 1, "star": 0, "recent": max(0, node - 4)}[kind]
        parents.append(draw(st.integers(lowest, 0 if kind == "star" else node - 1)))
    return tuple(parents)


def scrambled(parents: Sequence[int], seed: int) -> tuple[int, ...]:
    """The same tree with its nodes in another order, the root still first: parents may stand behind their children."""
    order = [0, *(1 + torch.randperm(len(parents) - 1, generator=torch.Generator().manual_seed(seed))).tolist()]
    place = {node: at for at, node in enumerate(order)}
    return tuple(-1 if parents[node] < 0 else place[parents[node]] for node in order)


def attention_case(trees: Sequence[tuple[int, ...]], prefix_lens: Sequence[int], **more: Any) -> AttentionCase:
    """Dead memory is NaN."""
    return AttentionCase(trees=tuple(trees), prefix_lens=tuple(prefix_lens), dead=1, **more)


@st.composite
def attention_cases(draw: st.DrawFn) -> AttentionCase:
    trees = draw(st.lists(shapes(), min_size=1, max_size=3))
    seed = draw(st.integers(0, 2**16))
    if draw(st.booleans()):
        trees = [scrambled(one, seed) for one in trees]
    if draw(st.integers(0, 3)) == 3:
        trees[-1] = (*trees[-1], UNUSED)
    dtype = draw(st.sampled_from(["fp64", "fp64", *DTYPES]))
    num_splits = draw(st.sampled_from([1, 0, 2, 3]))
    return attention_case(
        trees,
        [draw(st.sampled_from(PREFIXES)) for _ in trees],
        num_key_heads=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 2, 3, 4])),
        head_dim=draw(st.sampled_from([8, 8, 16, 5, 64, 80, 96, 128, 256])),
        dtype=dtype,
        page=draw(st.sampled_from([0, 0, 1, 3, 16])),
        codes=draw(st.sampled_from(["", "", "", *CODES])),
        window=draw(st.sampled_from([0, 0, 1, 2, 5, BLOCK, BLOCK + 2])),
        soft_cap=draw(st.sampled_from([0, 0, 150])),
        alibi=draw(st.sampled_from([0, 0, 1])),
        large=draw(st.sampled_from([0, 0, 0, 1])),
        strided=draw(st.sampled_from([0, 1])),
        num_splits=num_splits,
        seed=seed,
    )


def on_device(given: list[Any], extra: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments where kernels run."""
    moved = {name: _there(one) for name, one in extra.items()}
    return [_there(one) for one in given], moved


def _there(one: Any) -> Any:
    return one.to(DEVICE) if isinstance(one, Tensor) else one


@dataclass(frozen=True)
class GreedyCase:
    """num_tokens: drafts are among so many first ids; levels: so many different logits, hence ties."""

    trees: tuple[tuple[int, ...], ...]
    vocab_size: int
    num_tokens: int
    levels: int
    dtype: str
    seed: int

    @property
    def logits(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        num_rows = sum(len(one) for one in self.trees)
        rows = torch.randint(self.levels, (num_rows, self.vocab_size), generator=generator).double()
        rows[:, : self.num_tokens] += self.levels - 1  # what is drafted is often the winner
        return (rows - self.levels).to(DTYPES[self.dtype])

    @property
    def drafts(self) -> list[DraftTree]:
        generator = torch.Generator().manual_seed(self.seed + 1)
        most = min(self.num_tokens, self.vocab_size)
        return [DraftTree.of(torch.randint(most, (len(one),), generator=generator).tolist(), one) for one in self.trees]


@st.composite
def greedy_cases(draw: st.DrawFn) -> GreedyCase:
    return GreedyCase(
        trees=tuple(draw(st.lists(shapes(rare=(64, 65, 130)), min_size=1, max_size=3))),
        vocab_size=draw(st.sampled_from(VOCABS)),
        num_tokens=draw(st.sampled_from([1, 2, 4, VOCABS[-1]])),
        levels=draw(st.sampled_from([1, 2, 3, 50, 10**6])),
        dtype=draw(st.sampled_from([*DTYPES])),
        seed=draw(st.integers(0, 2**16)),
    )


@dataclass(frozen=True)
class SampleCase:
    """proposal: how drafts came from q, or "deterministic" for chosen ones, without q. peak: by how much the first ids
    lead, which chosen drafts are among. temperatures: in hundredths."""

    trees: tuple[tuple[int, ...], ...]
    vocab_size: int
    proposal: Proposal
    peak: int
    temperatures: tuple[int, ...]
    dtype: str
    seed: int

    @property
    def drafts(self) -> list[DraftTree]:
        generator = torch.Generator().manual_seed(self.seed)
        _, draft_probs, _ = self.tensors
        trees, row = [], 0
        for parents in self.trees:
            tokens = torch.randint(min(4, self.vocab_size), (len(parents),), generator=generator)
            for node in range(len(parents) if draft_probs is not None else 0):
                children = [child for child, parent in enumerate(parents) if parent == node]
                if children:
                    # More siblings than there are tokens: copies, which no rule forbids.
                    again = self.proposal == "iid" or len(children) > self.vocab_size
                    q = draft_probs[row + node]
                    tokens[children] = q.multinomial(len(children), replacement=again, generator=generator)
            trees.append(DraftTree(tokens, torch.tensor(parents), proposal=self.proposal))
            row += len(parents)
        return trees

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """logits [R, V], draft_probs float64 [R, V] or None, uniforms float64 [B, max_nodes]. Behind the rows' ends
        NaN, and in the q of nodes without children."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        num_rows = sum(len(one) for one in self.trees)
        both = torch.randn(2, num_rows, self.vocab_size, generator=generator, dtype=torch.float64)
        both[:, :, :4] += self.peak
        uniforms = torch.rand(
            len(self.trees), max(len(one) for one in self.trees), generator=generator, dtype=torch.float64
        )
        if self.proposal == "deterministic":
            return beside_nan((2 * both[0]).to(DTYPES[self.dtype])), None, uniforms
        # A q more peaked than p: siblings are often refused, and what is left of p is not far from what is left of q.
        is_inner = torch.tensor([node in one for one in self.trees for node in range(len(one))])
        q = (2 * both[1]).softmax(-1).where(is_inner[:, None], torch.nan)
        return beside_nan(both[0].to(DTYPES[self.dtype])), beside_nan(q), uniforms


def beside_nan(rows: Tensor) -> Tensor:
    """The same rows [R, V] with NaN between them in memory."""
    return torch.cat([rows, torch.full_like(rows[:, :1], torch.nan).expand(-1, 5)], dim=1)[:, : rows.shape[1]]


@st.composite
def sample_cases(draw: st.DrawFn) -> SampleCase:
    trees = draw(st.lists(shapes(rare=()), min_size=1, max_size=3))
    return SampleCase(
        trees=tuple(trees),
        vocab_size=draw(st.sampled_from(VOCABS)),
        proposal=draw(st.sampled_from(PROPOSALS)),
        peak=draw(st.sampled_from([0, 5, 9])),
        temperatures=tuple(draw(st.sampled_from([30, 100, 170])) for _ in trees),
        dtype=draw(st.sampled_from(["fp64", *DTYPES])),
        seed=draw(st.integers(0, 2**16)),
    )


@dataclass(frozen=True)
class TopkCase:
    """levels: so many different logits, hence ties. missing: of ten tokens so many have the logit -inf."""

    num_rows: int
    vocab_size: int
    k: int
    levels: int
    missing: int
    dtype: str
    seed: int

    @property
    def logits(self) -> Tensor:
        """float [R, V], NaN between the rows in memory."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.num_rows, self.vocab_size)
        rows = torch.randint(self.levels, shape, generator=generator) * (9.0 / self.levels)
        rows[torch.randint(10, shape, generator=generator) < self.missing] = -torch.inf
        return beside_nan(rows.to(DTYPES[self.dtype]))


@st.composite
def topk_cases(draw: st.DrawFn) -> TopkCase:
    return TopkCase(
        num_rows=draw(st.integers(1, 3)),
        vocab_size=draw(st.sampled_from(VOCABS)),
        k=draw(st.sampled_from([1, 2, 3, 5, 8, 17])),
        levels=draw(st.sampled_from([1, 2, 50, 10**6])),
        missing=draw(st.sampled_from([0, 0, 5, 9, 10])),
        dtype=draw(st.sampled_from([*DTYPES])),
        seed=draw(st.integers(0, 2**16)),
    )


@dataclass(frozen=True)
class GrowthCase:
    """Trees that grow for `depth` levels. levels: so many different log-probabilities, multiples of 1/8, whose sums are
    exact; hence ties. missing, bad: of twenty children so many have none, or NaN."""

    num_trees: int
    depth: int
    k: int
    width: int
    max_nodes: int
    levels: int
    missing: int
    bad: int
    dtype: str
    seed: int

    def children(self, level: int, frontier_len: int) -> tuple[Tensor, Tensor]:
        """tokens int64 [B, F, k], -1 where no child is, as `draft_topk` has it; log_probs float [B, F, k]."""
        generator = torch.Generator().manual_seed(self.seed + level)
        shape = (self.num_trees, frontier_len, self.k)
        log_probs = -torch.randint(self.levels, shape, generator=generator).to(DTYPES[self.dtype]) / 8
        fate = torch.randint(20, shape, generator=generator)
        log_probs[fate < self.missing] = -torch.inf
        log_probs[fate >= 20 - self.bad] = torch.nan
        tokens = torch.randint(9, shape, generator=generator)
        return tokens.where(log_probs.isfinite(), -1), log_probs


@st.composite
def growth_cases(draw: st.DrawFn) -> GrowthCase:
    return GrowthCase(
        num_trees=draw(st.integers(1, 2)),
        depth=draw(st.integers(1, 3)),
        k=draw(st.sampled_from([1, 2, 3, 5])),
        width=draw(st.sampled_from([1, 2, 3, 6])),
        max_nodes=draw(st.sampled_from([1, 2, 3, 7, 16, 65])),
        levels=draw(st.sampled_from([1, 2, 5, 1000])),
        missing=draw(st.sampled_from([0, 0, 3, 15, 20])),
        bad=draw(st.sampled_from([0, 0, 0, 1])),
        dtype=draw(st.sampled_from(["fp64", "fp32"])),
        seed=draw(st.integers(0, 2**16)),
    )


@dataclass(frozen=True)
class CommitCase:
    """paths: nodes of each sequence, in any order. page: rows a page, 0 for contiguous. width: 0 for scales."""

    paths: tuple[tuple[int, ...], ...]
    prefix_lens: tuple[int, ...]
    num_buffers: int
    num_heads: int
    width: int
    dtype: torch.dtype
    page: int
    strided: bool
    seed: int


@st.composite
def commit_cases(draw: st.DrawFn) -> CommitCase:
    paths = []
    for _ in range(draw(st.integers(1, 3))):
        nodes = draw(st.lists(st.integers(1, 70), unique=True, max_size=draw(st.sampled_from([3, 8, 20]))))
        paths.append(tuple(sorted(nodes) if draw(st.booleans()) else nodes))
    return CommitCase(
        paths=tuple(paths),
        prefix_lens=tuple(draw(st.sampled_from([0, 1, 5, 16, 63])) for _ in paths),
        num_buffers=draw(st.sampled_from([1, 2, 5])),
        num_heads=draw(st.sampled_from([1, 2, 3])),
        width=draw(st.sampled_from([0, 1, 5, 8, 128])),
        dtype=draw(st.sampled_from(MOVED)),
        page=draw(st.sampled_from([0, 1, 3, 16])),
        strided=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


def buffers_of(case: CommitCase) -> tuple[list[Tensor], Tensor | None]:
    """And the page table, None for contiguous ones."""
    generator = torch.Generator().manual_seed(case.seed)
    num_rows = max(case.prefix_lens) + 72
    num_sequences, first, table = len(case.paths), (len(case.paths), num_rows), None
    if case.page:
        per_sequence = -(-num_rows // case.page)
        first = (num_sequences * per_sequence, case.page)
        table = torch.randperm(first[0], generator=generator).view(num_sequences, per_sequence).to(torch.int32)
    shape = (*first, case.num_heads, *([case.width] if case.width else []))
    made = [torch.randint(-99, 99, shape, generator=generator).to(case.dtype) for _ in range(case.num_buffers)]
    if case.strided:
        made = [one.transpose(1, 2).contiguous().transpose(1, 2) for one in made]
    return [one.to(DEVICE) for one in made], None if table is None else table.to(DEVICE)
