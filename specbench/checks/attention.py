"""The claims about a tree-attention kernel (level 4): its answer against `reference.attention` in fp64.

In fp64 an answer must be right to 1e-9. In lower precisions its error, pooled over a case, may be twice that of the
same formula computed plainly in the same dtype, plus 4 eps x scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specbench.cases import AttentionCase, Case
from specbench.claims import VIOLATIONS, Facts, Misbehaviour
from specbench.compare import Bound, exact_bound, max_error, measured_bound, rms_error, scale_of
from specbench.kernel_bank import KernelBank
from specbench.loading import EXPOSE
from specbench.record import ClaimRecord
from specbench.reference import attention as reference
from specbench.subjects import NotTested, Subject
from specbench.tree import UNUSED, DraftTree
from specbench.types import DTYPES

STORED = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}  # dtype, its largest number
DEAD = 50.0  # scale of what stands in rows that count for nothing, where it is not NaN
LARGE = {torch.float16: 128.0}  # times as large as usual queries are where scores are; a product must not overflow
LARGEST = 1024.0  # in other dtypes
FAR = 2**25  # numbers from one row to the next, of strided = 2
NUM_SHOWN = 4
DECLARE = "what a kernel cannot do it says by dtypes, head_dims, groups, page_sizes or codes"


@dataclass(frozen=True)
class Difference:
    """what: "out" or "lse". error: as the bound measures it. row, head: where it is largest, `largest` there."""

    what: str
    error: float
    bound: Bound
    row: int
    head: int
    largest: float

    def __str__(self) -> str:
        return f"{self.what} is off by {self.error:.2g}, must be within {self.bound}"


def check_out(subject: Subject, case: Case, record: ClaimRecord, *, claim: str) -> None:
    """`out`, and the lse of rows without a node; that of others has a claim of its own."""
    assert isinstance(case, AttentionCase)
    asked = Asked(subject, case)
    found = [asked.compared("out", record)]
    if claim == "attention.unused_rows":
        found.append(asked.lse_of_unused())
    asked.tell(claim, found)


def check_lse(subject: Subject, case: Case, record: ClaimRecord) -> None:
    assert isinstance(case, AttentionCase)
    asked = Asked(subject, case)
    if asked.lse is None:
        raise NotTested(EXPOSE["lse"])
    asked.tell("attention.lse", [asked.compared("lse", record)])


class Asked:
    """A kernel's answer to a case beside the right one. NotTested when the case needs what the kernel does not take."""

    def __init__(self, subject: Subject, case: AttentionCase) -> None:
        if reason := subject.missing(case.options):
            raise NotTested(reason)
        bank = subject.bank
        assert isinstance(bank, KernelBank)
        self.case = case
        self.inputs, self.options = arguments(case)
        given = {name: one for name, one in call_options(case, self.options).items() if name in subject.has}
        inputs = [_on(one, bank.device) for one in self.inputs]
        given = {name: _on(one, bank.device) for name, one in given.items()}
        try:
            self.out, self.lse = subject.open_kernel().attention(inputs, given)
        except Misbehaviour as wrong:
            raise Misbehaviour(
                replace(wrong.facts, source="specbench.protocols.TreeAttention", remark=DECLARE)
            ) from None
        with subject.clock.count("oracle"):
            self.right = reference.tree_attention(*self.inputs, **self.options)
            self.plain = eager(case, self.inputs, self.options)

    def compared(self, what: str, record: ClaimRecord | None = None) -> Difference | None:
        """How one of "out" and "lse" is wrong; its share of the bound is noted where it is not."""
        idx = ("out", "lse").index(what)
        mine = self.out if what == "out" else self.lse
        assert mine is not None
        found = difference(self.case, what, mine, self.right[idx], None if self.plain is None else self.plain[idx])
        if record is not None and found.error <= found.bound.value:
            record.note_share(found.error / found.bound.value)
        return found if not found.error <= found.bound.value else None

    def lse_of_unused(self) -> Difference | None:
        """Where the lse of a row without a node is not -inf."""
        rows = [parent == UNUSED for one in self.case.trees for parent in one]
        if self.lse is None or bool(self.lse[rows].isneginf().all()):
            return None
        first = int((~self.lse.isneginf() & torch.tensor(rows)[:, None]).flatten().nonzero()[0])
        return Difference("lse", math.inf, exact_bound(1.0), *divmod(first, self.lse.shape[1]), math.inf)

    def tell(self, claim: str, found: list[Difference | None]) -> None:
        """Raises the claim's violation for the first difference there is."""
        first = next((one for one in found if one is not None), None)
        if first is None:
            return
        mine = self.out if first.what == "out" else self.lse
        assert mine is not None
        right = self.right[("out", "lse").index(first.what)]
        tree, node = place_of(self.case, first.row)
        seen = f"row {first.row}" if len(self.case.trees) == 1 else f"row {first.row} (node {node} of tree {tree})"
        is_unused = self.case.trees[tree][node] == UNUSED
        drawn = None if is_unused else _drawn(self.case.trees[tree])
        off = "NaN" if bool(mine[first.row, first.head].isnan().any()) else f"off by {first.largest:.2g}"
        raise VIOLATIONS[claim](
            Facts(
                headline=f"{first.what} of {seen}{', which holds no node,' if is_unused else ''} in query head "
                f"{first.head} is {off}",
                expected=_shown(right[first.row, first.head]),
                actual=_shown(mine[first.row, first.head]),
                source="specbench.reference.attention in fp64",
                remark=f"over the case {first.error:.2g}, must be within {first.bound}",
                tree=drawn,
                notes={} if drawn is None else {node: "this row"},
            )
        )


def difference(case: AttentionCase, what: str, mine: Tensor, right: Tensor, plain: Tensor | None) -> Difference:
    """How far an answer is from the right one. plain: the same formula in the case's own dtype, None in fp64."""
    dtype = DTYPES[case.dtype]
    if plain is None:
        bound, error = exact_bound(scale_of(right)), max_error(mine, right)
    else:
        # Keys and values are of order one: a result that happens to be small is a difference of such. Larger scores are
        # rounded by more: an lse is one of them, and by an error of its score a weight is off.
        gain = gain_of(case)
        scale = max(gain, scale_of(right)) if what == "lse" else gain * max(1.0, scale_of(right))
        eps = dtype if what == "out" else torch.promote_types(dtype, torch.float32)
        bound = measured_bound(rms_error(plain, right), scale, eps, pooled=True)
        error = rms_error(mine, right)
    if not torch.equal(mine.isneginf(), right.isneginf()):
        error = math.inf  # a row sees something or it does not
    row, head, largest = _worst(mine, right)
    return Difference(what, error, bound, row, head, largest)


def eager(case: AttentionCase, inputs: list[Any], options: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """The formula computed plainly in the case's dtype, whose error sets the bound; None in fp64."""
    dtype = DTYPES[case.dtype]
    return None if dtype == torch.float64 else reference.tree_attention(*inputs, **options, dtype=dtype)


def arguments(case: AttentionCase) -> tuple[list[Any], dict[str, Any]]:
    """What `reference.attention.tree_attention` takes: q, k, v, parents, prefix_lens and scale, and its keywords.

    Rows behind a sequence's last one, and pages that no table names, are filled as `case.dead` says, scales too.
    """
    generator = torch.Generator().manual_seed(case.seed)
    beyond = torch.Generator().manual_seed(case.seed + 1)  # so that live numbers are the same whatever stands there
    dtype = DTYPES[case.dtype]

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    sizes = [len(one) for one in case.trees]
    lengths = [prefix_len + size for prefix_len, size in zip(case.prefix_lens, sizes, strict=True)]
    num_query_heads, num_sequences = case.num_key_heads * case.group, len(sizes)
    q = (gain_of(case) * numbers(sum(sizes), num_query_heads, case.head_dim)).to(dtype)
    extra: dict[str, Any] = {"cu_nodes": boundaries(sizes)}
    if case.page:
        num_pages = [-(-length // case.page) for length in lengths]
        total = sum(num_pages) + 2
        free = torch.randperm(total, generator=generator).tolist()
        table = torch.zeros(num_sequences, max(num_pages), dtype=torch.int32)  # unused entries name a page of others
        for sequence, num in enumerate(num_pages):
            table[sequence, :num] = torch.tensor([free.pop() for _ in range(num)], dtype=torch.int32)
        extra["page_table"] = table
        first = (total, case.page)
    else:
        first = (num_sequences, max(lengths) + 3)
    stored, scales = [], []
    for _ in "kv":
        shape = (*first, case.num_key_heads, case.head_dim)
        rows = DEAD * torch.randn(shape, generator=beyond, dtype=torch.float64)
        if case.dead:
            rows.fill_(math.nan)
        for sequence, length in enumerate(lengths):
            for row in range(length):
                where = (sequence, row)
                if case.page:
                    where = (int(extra["page_table"][sequence, row // case.page]), row % case.page)
                rows[where] = numbers(case.num_key_heads, case.head_dim)
        cached, step = _cached(rows, case.codes, dtype)
        stored.append(cached)
        scales.append(step)
    if case.strided:
        stored = [one.transpose(1, 2).contiguous().transpose(1, 2) for one in stored]
    if case.strided == 2:
        stored[0] = _far_apart(stored[0])
    if case.codes:
        extra |= {"k_scale": scales[0], "v_scale": scales[1]}
    if case.window:
        extra["window"] = case.window
    if case.soft_cap:
        extra["soft_cap"] = case.soft_cap / 100
    if case.alibi:
        extra["alibi_slopes"] = numbers(num_query_heads).abs().to(torch.promote_types(dtype, torch.float32))
    parents = torch.tensor([parent for one in case.trees for parent in one], dtype=torch.int32)
    prefix_lens = torch.tensor(case.prefix_lens, dtype=torch.int32)
    return [q, *stored, parents, prefix_lens, 1.0 / math.sqrt(case.head_dim)], extra


def call_options(case: AttentionCase, options: dict[str, Any]) -> dict[str, Any]:
    """What a kernel is given besides, if it takes it: the reference's keywords, and two that only steer the work."""
    return {**options, "max_nodes": max(len(one) for one in case.trees), "num_splits": case.num_splits}


def boundaries(sizes: list[int]) -> Tensor:
    """cu_nodes int32 [B+1]."""
    return torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32)


def gain_of(case: AttentionCase) -> float:
    """By how much queries, and scores with them, are larger than usual. A power of two, which rounds nothing."""
    return LARGE.get(DTYPES[case.dtype], LARGEST) if case.large else 1.0


def place_of(case: AttentionCase, row: int) -> tuple[int, int]:
    """The tree and the node of a row."""
    for tree, parents in enumerate(case.trees):
        if row < len(parents):
            return tree, row
        row -= len(parents)
    raise ValueError(f"row = {row} must be < the number of rows")


def _cached(rows: Tensor, codes: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows float64 [.., Hkv, D] as they are cached, and scales [.., Hkv]; NaN rows have NaN scales."""
    if not codes:
        return rows.to(dtype), torch.empty(0)
    code_dtype, largest = STORED[codes]
    scales = (rows.abs().amax(dim=-1) / largest).to(torch.promote_types(dtype, torch.float32))
    scaled = rows / scales.double()[..., None]
    if code_dtype == torch.int8:
        return scaled.nan_to_num(nan=99.0).round().to(torch.int8), scales
    return scaled.to(torch.float32).to(code_dtype), scales


def _far_apart(rows: Tensor) -> Tensor:
    """The same numbers with `FAR` others between the beginnings of two rows: memory that is never touched."""
    stride = (FAR * rows.shape[1], FAR, *rows.stride()[2:])
    far = torch.empty_strided(rows.shape, stride, dtype=rows.dtype)
    return far.copy_(rows)


def _on(one: Any, device: str) -> Any:
    return one.to(device) if isinstance(one, Tensor) else one


def _worst(mine: Tensor, right: Tensor) -> tuple[int, int, float]:
    """Row, head and size of the largest error."""
    wide, expected = mine.double(), right.double()
    errors = torch.where(wide == expected, 0.0, wide - expected).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    errors = errors.reshape(*mine.shape[:2], -1).amax(dim=-1)
    row, head = divmod(int(errors.argmax()), mine.shape[1])
    return row, head, float(errors[row, head])


def _drawn(parents: tuple[int, ...]) -> DraftTree | None:
    """The tree with its node numbers for tokens, where parents precede children."""
    try:
        return DraftTree.of(range(len(parents)), parents)
    except ValueError:
        return None


def _shown(numbers: Tensor) -> str:
    flat = numbers.double().reshape(-1)
    told = ", ".join(f"{one:.4g}" for one in flat[:NUM_SHOWN].tolist())
    return f"{told}, ..." if len(flat) > NUM_SHOWN else told
