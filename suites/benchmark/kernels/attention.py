"""Tree attention's contenders, and the gate before their times: what each must give, computed in fp64.

Peers get what they would ask for: query heads packed into rows where that saves them loads, and masks in their own
form, built before the clock starts. The floor is dense attention of the same rows over the same keys with no mask at
all: by torch's kernels, and by our own without its tree.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from specbench.compare import measured_bound, rms_error
from specbench.kernels import tree_attention as kernel
from specbench.kernels.tree_mask import tree_mask
from specbench.suites.benchmark.kernels.cells import ELEMENT, AttentionCell
from specbench.suites.benchmark.kernels.clock import Call
from specbench.suites.benchmark.kernels.rows import FLOOR, OWN, PEER, Contender, NotHere

DTYPE = torch.bfloat16
CHECK_FLOPS = 2e12  # in fp64 a cell, about a second
MOST_CHECKED = 64  # sequences x key heads
BLOCK = 128  # of FlexAttention's block mask
NEEDLES = 48  # of a prefix: the most splits that a GPU of 132 multiprocessors makes of it
AIM = 8.0  # length of what all queries share


class AttentionTask:
    """Inputs of a cell on a device, and what is right.

    Some 48 rows of each prefix (its first and last, and the first of each stretch) and all rows of the trees are
    needles: every query points at them, so that together they weigh several times as much as the rest, each the same.
    A kernel that leaves one out is then wrong by more than bf16 is, however long the prefix.
    """

    def __init__(self, cell: AttentionCell, device: str) -> None:
        self.kernel, self.cell = "tree_attention", cell
        self.device, self.scale = device, cell.D**-0.5
        generator = torch.Generator(device).manual_seed(cell.P + cell.N)
        rows, num_keys = cell.B * cell.N, cell.P + cell.N

        def numbers(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=DTYPE, device=device)

        aim = cell.D**-0.5  # in each dimension, of a vector of length one
        self.q = numbers(rows, cell.Hq, cell.D) + AIM * aim
        self.k = numbers(cell.B, num_keys, cell.Hkv, cell.D)
        self.v = numbers(cell.B, num_keys, cell.Hkv, cell.D)
        needles = {0, cell.P - 1, *range(0, cell.P, max(1, cell.P // NEEDLES)), *range(cell.P, num_keys)}
        lift = math.log(8 * cell.P / NEEDLES + 1) * math.sqrt(cell.D) / AIM
        for row in needles:
            self.k[:, row] = lift * aim
        self.parents = torch.tensor(cell.parents, dtype=torch.int32, device=device)
        self.prefix_lens = torch.full((cell.B,), cell.P, dtype=torch.int32, device=device)
        self.cu_nodes = torch.arange(cell.B + 1, dtype=torch.int32, device=device) * cell.N
        self.visible = _visible(cell.parents).to(device)  # bool [B, N, N]
        self.checked = ""
        self._known: dict[tuple[int, int, bool], list[tuple[Tensor, float]]] = {}

    def wrong(self, answer: Any) -> str:
        """answer: out, lse or None, and whether it was asked to look at masks."""
        out, lse, is_masked = answer
        if out.isnan().any():
            return "out holds NaN"
        places = self._places()
        self.checked = f"{len(places)} of {self.cell.B * self.cell.Hkv} sequences x key heads, against fp64"
        cell, group = self.cell, self.cell.Hq // self.cell.Hkv
        for b, head in places:
            given = [out.view(cell.B, cell.N, cell.Hkv, group, cell.D)[b, :, head]]
            given += [] if lse is None else [lse.view(cell.B, cell.N, cell.Hkv, group)[b, :, head]]
            for what, mine, (right, plain) in zip(("out", "lse"), given, self._right(b, head, is_masked), strict=False):
                scale = float(right.pow(2).mean().sqrt())
                dtype = DTYPE if what == "out" else torch.float32
                bound = measured_bound(plain, scale, dtype, pooled=True).value
                error = rms_error(mine, right)
                if not error <= bound:
                    where = f"sequence {b}, key head {head}"
                    return f"{what} of {where} is off by {error:.2g} (root mean square), must be within {bound:.2g}"
        return ""

    def _places(self) -> list[tuple[int, int]]:
        """Sequences and key heads that are looked at: all, or the first, the last and some between."""
        cell = self.cell
        total = cell.B * cell.Hkv
        num = min(total, MOST_CHECKED, max(2, int(CHECK_FLOPS / (cell.num_flops / total))))
        chosen = torch.linspace(0, total - 1, num).round().to(torch.int64).tolist()
        return [(one // cell.Hkv, one % cell.Hkv) for one in chosen]

    def _right(self, b: int, head: int, is_masked: bool) -> list[tuple[Tensor, float]]:
        """out [N, G, D] and lse [N, G] in fp64, each with the error that plain bf16 makes."""
        where = (b, head, is_masked)
        if where not in self._known:
            exact, plain = (self._dense(*where, dtype) for dtype in (torch.float64, DTYPE))
            self._known[where] = [(one, rms_error(other, one)) for one, other in zip(exact, plain, strict=True)]
        return self._known[where]

    def _dense(self, b: int, head: int, is_masked: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """As `reference.attention` computes a row, all rows of one sequence and key head at once."""
        cell, group = self.cell, self.cell.Hq // self.cell.Hkv
        q = self.q.view(cell.B, cell.N, cell.Hkv, group, cell.D)[b, :, head].to(dtype)
        keys, values = (one[b, :, head].to(dtype) for one in (self.k, self.v))
        scores = self.scale * (q @ keys.mT).to(torch.promote_types(dtype, torch.float32))  # [N, G, P + N]
        if is_masked:
            scores[:, :, cell.P :].masked_fill_(~self.visible[b][:, None], -math.inf)
        return scores.softmax(-1).to(dtype) @ values, scores.logsumexp(-1)


def _visible(parents: list[list[int]]) -> Tensor:
    """bool [B, N, N]: each node's ancestors and itself."""
    above = torch.tensor(parents)
    num_trees, num_nodes = above.shape
    seen = torch.zeros(num_trees, num_nodes, num_nodes, dtype=torch.bool)
    for node in range(num_nodes):
        if node:
            seen[:, node] = seen[torch.arange(num_trees), above[:, node]]
        seen[:, node, node] = True
    return seen


def _own(task: AttentionTask, *, prefix_only: bool = False) -> tuple[Call, Callable[[Any], Any]]:
    cell = task.cell
    mask = tree_mask(task.parents.flatten(), task.prefix_lens, cu_nodes=task.cu_nodes, max_nodes=cell.N)
    lens = task.prefix_lens + cell.N if prefix_only else task.prefix_lens

    def call() -> tuple[Tensor, Tensor]:
        return kernel.tree_attention(
            task.q, task.k, task.v, mask, lens, task.scale,
            cu_nodes=task.cu_nodes, max_nodes=cell.N, prefix_only=prefix_only,
        )  # fmt: skip

    return call, lambda result: (*result, not prefix_only)


def _own_floor(task: AttentionTask) -> tuple[Call, Callable[[Any], Any]]:
    return _own(task, prefix_only=True)


def _plan(cell: AttentionCell) -> Mapping[str, Any]:
    """How the launch is cut up on the GPU that is here, and what that adds to the fewest bytes and operations."""
    if not torch.cuda.is_available():
        return {"mask_bytes": cell.mask_bytes}
    num_processors = torch.cuda.get_device_properties(0).multi_processor_count
    group = cell.Hq // cell.Hkv
    cut = kernel.plan(
        cell.B, cell.Hkv, cell.N * group, cell.P + cell.N,
        row_bytes=cell.D * ELEMENT, element_size=ELEMENT, is_coded=False, num_processors=num_processors,
    )  # fmt: skip
    results = cell.B * cell.N * cell.Hq
    return {
        "mask_bytes": cell.mask_bytes,
        "programs": cell.B * cell.Hkv * cut.num_row_blocks * max(1, cut.num_splits),
        "slots": num_processors * kernel.RESIDENT[cut.block_rows],
        "partial_bytes": 2 * (cut.num_splits + 1) * results * (cell.D + 1) * 4 if cut.num_splits else 0,
        "used_rows": cell.N * group / (cut.num_row_blocks * cut.block_rows),
    }


def _packed(task: AttentionTask) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, Hkv, N * G, D], keys and values [B, Hkv, P + N, D]: the query heads of a group are rows of one head."""
    cell, group = task.cell, task.cell.Hq // task.cell.Hkv
    grouped = task.q.view(cell.B, cell.N, cell.Hkv, group, cell.D).transpose(1, 2)
    return grouped.reshape(cell.B, cell.Hkv, cell.N * group, cell.D), task.k.transpose(1, 2), task.v.transpose(1, 2)


def _unpacked(task: AttentionTask, out: Tensor) -> Tensor:
    """[B, Hkv, N * G, D] as [R, Hq, D]."""
    cell = task.cell
    return out.view(cell.B, cell.Hkv, cell.N, -1, cell.D).transpose(1, 2).reshape(cell.B * cell.N, cell.Hq, cell.D)


def _sdpa(task: AttentionTask, backends: list[SDPBackend], mask: Tensor | None) -> tuple[Call, Callable[[Any], Any]]:
    q, k, v = _packed(task)

    def call() -> Tensor:
        with sdpa_kernel(backends):
            try:
                return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=task.scale)
            except RuntimeError as error:
                if "No available kernel" not in str(error):
                    raise
                names = ", ".join(one.name for one in backends)
                raise NotHere(f"torch {torch.__version__} has none of {names} for this on {task.device}") from None

    return call, lambda out: (_unpacked(task, out), None, mask is not None)


def _dense_mask(task: AttentionTask) -> Tensor:
    """As numbers to add, in bf16: booleans would be turned into these in every call. Rows begin at multiples of 16
    numbers, or they would be copied."""
    cell, group = task.cell, task.cell.Hq // task.cell.Hkv
    num_keys = cell.P + cell.N
    storage = torch.zeros(cell.B, 1, cell.N * group, -(-num_keys // 16) * 16, dtype=DTYPE, device=task.device)
    hidden = ~task.visible.repeat_interleave(group, dim=1)[:, None]  # [B, 1, N * G, N]
    storage[..., cell.P : num_keys].masked_fill_(hidden, -math.inf)
    return storage[..., :num_keys]


def _efficient(task: AttentionTask) -> tuple[Call, Callable[[Any], Any]]:
    # A CPU has its own kernels. On a GPU the plain one would need all scores in memory, and is nobody's choice.
    backends = [SDPBackend.EFFICIENT_ATTENTION, *([SDPBackend.MATH] if task.device == "cpu" else [])]
    return _sdpa(task, backends, _dense_mask(task))


def _cudnn_masked(task: AttentionTask) -> tuple[Call, Callable[[Any], Any]]:
    return _cudnn(task, _dense_mask(task))


def _flash(task: AttentionTask) -> tuple[Call, Callable[[Any], Any]]:
    return _sdpa(task, [SDPBackend.FLASH_ATTENTION], None)


def _cudnn(task: AttentionTask, mask: Tensor | None = None) -> tuple[Call, Callable[[Any], Any]]:
    if task.device == "cpu":
        raise NotHere("cuDNN needs a CUDA device")
    return _sdpa(task, [SDPBackend.CUDNN_ATTENTION], mask)


def block_mask(task: AttentionTask) -> Any:
    """FlexAttention's: blocks of the prefix are whole, and only those behind it ask the mask."""
    from torch.nn.attention.flex_attention import BlockMask

    cell, visible = task.cell, task.visible
    num_blocks, num_whole = -(-(cell.P + cell.N) // BLOCK), cell.P // BLOCK
    num_row_blocks = -(-cell.N // BLOCK)

    def sees(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key < cell.P) | visible[b, row, (key - cell.P).clamp(0, cell.N - 1)]

    def blocks(first: int, num: int) -> tuple[Tensor, Tensor]:
        shape = (cell.B, 1, num_row_blocks)
        ids = torch.arange(num_blocks, dtype=torch.int32, device=task.device)
        order = torch.cat([ids[first : first + num], ids[:first], ids[first + num :]])
        return (
            torch.full(shape, num, dtype=torch.int32, device=task.device),
            order.expand(*shape, num_blocks).contiguous(),
        )

    return BlockMask.from_kv_blocks(
        *blocks(num_whole, num_blocks - num_whole),
        *blocks(0, num_whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(cell.N, cell.P + cell.N),
    )


def _flex(task: AttentionTask) -> tuple[Call, Callable[[Any], Any]]:
    from torch.nn.attention.flex_attention import flex_attention

    cell, mask = task.cell, block_mask(task)
    attend: Any = flex_attention  # uncompiled it is the plain computation, good for a check
    if task.device != "cpu":
        torch._dynamo.reset()  # or the ninth shape would be run uncompiled
        attend = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    q = task.q.view(cell.B, cell.N, cell.Hq, cell.D).transpose(1, 2).contiguous()
    k, v = task.k.transpose(1, 2), task.v.transpose(1, 2)

    def call() -> Tensor:
        return attend(q, k, v, block_mask=mask, scale=task.scale, enable_gqa=True)

    return call, lambda out: (out.transpose(1, 2).reshape(cell.B * cell.N, cell.Hq, cell.D), None, True)


def _flashinfer(task: AttentionTask) -> tuple[Call, Callable[[Any], Any]]:
    if importlib.util.find_spec("flashinfer") is None:
        raise NotHere("flashinfer is not installed")
    if task.device == "cpu":
        raise NotHere("flashinfer needs a CUDA device")
    import flashinfer

    cell = task.cell
    num_keys = cell.P + cell.N
    prefix = torch.ones(cell.B, cell.N, cell.P, dtype=torch.bool, device=task.device)
    workspace = torch.empty(2**28, dtype=torch.uint8, device=task.device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        task.cu_nodes,
        torch.arange(cell.B + 1, dtype=torch.int32, device=task.device) * num_keys,
        cell.Hq,
        cell.Hkv,
        cell.D,
        custom_mask=torch.cat([prefix, task.visible], dim=2).flatten(),
        sm_scale=task.scale,
        q_data_type=DTYPE,
    )
    k, v = (one.view(cell.B * num_keys, cell.Hkv, cell.D) for one in (task.k, task.v))
    return (lambda: wrapper.run(task.q, k, v)), lambda out: (out, None, True)


def _dense_bytes(cell: AttentionCell) -> Mapping[str, int]:
    return {"mask_bytes": cell.B * cell.N * (cell.Hq // cell.Hkv) * -(-(cell.P + cell.N) // 16) * 16 * ELEMENT}


def _block_bytes(cell: AttentionCell) -> Mapping[str, int]:
    """Booleans of the trees, and two lists of blocks."""
    blocks = -(-cell.N // BLOCK) * (-(-(cell.P + cell.N) // BLOCK) + 1)
    return {"mask_bytes": cell.B * (cell.N**2 + 2 * 4 * blocks)}


def _packed_bytes(cell: AttentionCell) -> Mapping[str, int]:
    return {"mask_bytes": cell.B * -(-cell.N * (cell.P + cell.N) // 8)}


QUICK = (
    Contender("tree_attention", OWN, _own, _plan),
    Contender("sdpa, dense mask", PEER, _efficient, _dense_bytes),
    Contender("sdpa cudnn, dense mask", PEER, _cudnn_masked, _dense_bytes),
    Contender("flashinfer, packed mask", PEER, _flashinfer, _packed_bytes),
    Contender("tree_attention without its tree", FLOOR, _own_floor),
    Contender("sdpa flash, no mask", FLOOR, _flash),
    Contender("sdpa cudnn, no mask", FLOOR, _cudnn),
)
SLOW = (Contender("flex_attention, block mask", PEER, _flex, _block_bytes),)  # compiles for each shape


def needed_bytes(cell: AttentionCell) -> int:
    """Of device memory, for all contenders and the check of one sequence and head in fp64."""
    scores = cell.N * (cell.Hq // cell.Hkv) * (cell.P + cell.N) * 8
    return cell.cache_bytes + 8 * cell.B * cell.N * cell.Hq * cell.D + 2 * _dense_bytes(cell)["mask_bytes"] + 4 * scores
