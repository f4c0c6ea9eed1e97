"""Every kernel compiled ahead of time, without a GPU: `python -m specbench.kernels.compiled` prints a table.

Registers, spilled bytes and shared memory of named specialisations on three targets, as the compilers tell them. Exit
code 1 where one spills more than MAX_SPILLED bytes, or does not compile.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before kernels are defined

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specbench.kernels import commit_kv, draft_topk, tree_attention, tree_mask, verify_greedy, verify_sample
from specbench.tree import UNUSED

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
MAX_SPILLED = 256  # bytes a thread
POINTERS: Mapping[str, Mapping[str, str]] = {
    "attention": {
        **dict.fromkeys(("bits",), "*i64"),
        **dict.fromkeys(("depth", "cu_nodes", "prefix_lens", "page_table"), "*i32"),
        **dict.fromkeys(("alibi_slopes", "k_scale", "v_scale", "part_out", "part_lse"), "*fp32"),
    },
    "merge": {"part_out": "*fp32", "part_lse": "*fp32", "lse": "*fp32"},
    "mask": {
        **dict.fromkeys(("parents", "cu_nodes", "prefix_lens", "depth"), "*i32"),
        **dict.fromkeys(("bits", "position_ids"), "*i64"),
    },
    "argmax": {"best": "*fp32", "winner": "*i32"},
    "walk": {
        "best": "*fp32",
        **dict.fromkeys(("winner", "cu_nodes", "reached", "path", "num_accepted"), "*i32"),
        **dict.fromkeys(("tokens", "parents", "bonus_tokens"), "*i64"),
    },
    "drafting": {
        **dict.fromkeys(("logits",), "*bf16"),
        **dict.fromkeys(("best", "tops", "sums", "log_probs", "scores", "new_scores", "tree_scores"), "*fp32"),
        **dict.fromkeys(
            ("chosen", "parents", "frontier", "new_parents", "new_frontier", "kept", "tree_parents"), "*i32"
        ),
        **dict.fromkeys(("tokens", "child_tokens", "new_tokens", "tree_tokens"), "*i64"),
    },
    "commit": {
        "pointers": "*i64",
        **dict.fromkeys(("prefix_lens", "path", "num_accepted", "page_table"), "*i32"),
    },
}
DTYPES = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}


@dataclass(frozen=True)
class Specialisation:
    """kernel: the jitted function. types: of its pointers. constants: its constexpr arguments."""

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4


@dataclass(frozen=True)
class Cost:
    """registers: of a thread. spilled: bytes a thread (on NVIDIA its whole stack). shared: bytes a program."""

    registers: int
    spilled: int
    shared: int


def attention(
    name: str,
    dtype: str = "bf16",
    *,
    head_dim: int = 128,
    group: int = 4,
    page: int = 0,
    codes: int = 0,
    cap: float = 0.0,
    window: bool = False,
    bias: bool = False,
    splits: bool = True,
    rows: int = 64,
) -> Specialisation:
    """As the launcher cuts up a tree of `rows` rows and heads on a GPU."""
    cached = {0: f"*{dtype}", 1: "*i8", 2: "*u8"}[codes]
    block_dim, size = int(triton.next_power_of_2(head_dim)), DTYPES[dtype].primitive_bitwidth // 8
    cut = tree_attention.plan(
        1, 8, rows, 8192, row_bytes=block_dim * size, element_size=size, is_coded=codes > 0, num_processors=132
    )
    constants = {
        "QUERY_HEADS": 8 * group,
        "GROUP": group,
        "PAGE": page,
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": block_dim,
        "BLOCK_ROWS": cut.block_rows,
        "PREFIX_BLOCK": cut.prefix_block,
        "TREE_BLOCK": cut.tree_block,
        "SCALE": head_dim**-0.5,
        "CAP": cap,
        "HAS_SPLITS": splits,
        "HAS_WINDOW": window,
        "HAS_BIAS": bias,
        "CODES": codes,
        "ACC": tl.float32,
        "DOT": DTYPES[dtype],
    }
    types = {**POINTERS["attention"], "q": f"*{dtype}", "k": cached, "v": cached}
    if not splits:
        types["part_out"] = f"*{dtype}"
    return Specialisation(f"attention, {name}", tree_attention.tree_attention_kernel, types, constants, cut.num_warps)


def argmax(dtype: str) -> Specialisation:
    types = {**POINTERS["argmax"], "logits": f"*{dtype}"}
    constants = {"NUM_STRETCHES": verify_greedy.NUM_STRETCHES, "BLOCK": verify_greedy.VOCAB_BLOCK}
    return Specialisation(f"argmax, {dtype}", verify_greedy.argmax_kernel, types, constants)


def sampling(name: str, step: str, **constants: bool) -> Specialisation:
    """A step of `verify_sample`, bf16 logits and q."""
    types = {
        **dict.fromkeys(("logits", "draft_probs"), "*bf16"),
        **dict.fromkeys(("temperatures", "tops", "sums", "masses", "uniforms", "shares"), "*fp32"),
        **dict.fromkeys(("cu_nodes", "last_nodes", "num_struck", "path", "num_accepted", "num_coins"), "*i32"),
        **dict.fromkeys(("tokens", "parents", "struck", "bonus_tokens"), "*i64"),
    }
    kernel = getattr(verify_sample, f"{step}_kernel")
    named = {name: kind for name, kind in types.items() if name in kernel.arg_names}
    given = {"NUM_STRETCHES": verify_greedy.NUM_STRETCHES, "ACC": tl.float32, "BLOCK": verify_greedy.VOCAB_BLOCK}
    if step != "walk":
        return Specialisation(f"sampling, {name}", kernel, named, {**given, **constants})
    given |= {"BLOCK": verify_sample.NODE_BLOCK, "VOCAB_BLOCK": verify_greedy.VOCAB_BLOCK}
    warps = verify_sample.warps_of_walk(constants["HAS_Q"])
    return Specialisation(f"sampling, {name}", kernel, named, {**given, **constants}, warps)


def drafting(name: str, step: str, **constants: int) -> Specialisation:
    """A step of `draft_topk`, bf16 logits and fp32 scores."""
    kernel = getattr(draft_topk, f"{step}_kernel")
    types = {name: kind for name, kind in POINTERS["drafting"].items() if name in kernel.arg_names}
    return Specialisation(f"drafting, {name}", kernel, types, constants)


def commit(page: int) -> Specialisation:
    constants = {"ELEMENT": tl.int16, "NUM_HEADS": 8, "WIDTH": 128, "PAGE": page, "MAX_PATH": 16, "COLUMNS": 512}
    where = f"pages of {page}" if page else "contiguous"
    return Specialisation(f"commit, {where}", commit_kv.commit_kv_kernel, POINTERS["commit"], constants)


SPECIALISATIONS: Sequence[Specialisation] = (
    attention("bf16 128"),
    attention("bf16 128, 128 rows", rows=128),
    attention("bf16 128, 128 rows in one pass", rows=128, splits=False),
    attention("bf16 128, one query head a key head", group=1),
    attention("bf16 128, 16 rows", rows=16),
    attention("fp16 128", "fp16"),
    attention("fp32 64", "fp32", head_dim=64),
    attention("bf16 64", head_dim=64),
    attention("bf16 80", head_dim=80),
    attention("bf16 96", head_dim=96),
    attention("bf16 256", head_dim=256),
    attention("fp32 256", "fp32", head_dim=256),
    attention("bf16 128, pages of 16", page=16),
    attention("bf16 128, window", window=True),
    attention("bf16 128, soft-cap and ALiBi", cap=30.0, bias=True),
    attention("bf16 128, int8 rows", codes=1),
    attention("bf16 128, fp8 rows, pages of 16", codes=2, page=16),
    Specialisation(
        "merge, bf16 128",
        tree_attention.merge_kernel,
        {**POINTERS["merge"], "out": "*bf16"},
        {"HEAD_DIM": 128, "BLOCK_DIM": 128, "BLOCK": 4, "ACC": tl.float32},
    ),
    Specialisation(
        "mask, 256 nodes",
        tree_mask.tree_mask_kernel,
        POINTERS["mask"],
        {"UNUSED": UNUSED, "WORDS": 4, "BLOCK": tree_mask.BLOCK},
    ),
    argmax("bf16"),
    Specialisation(
        "walk", verify_greedy.walk_kernel, POINTERS["walk"], {"NUM_STRETCHES": verify_greedy.NUM_STRETCHES, "BLOCK": 64}
    ),
    sampling("sums", "sums"),
    sampling("walk", "walk", HAS_Q=False, STRIKE=False),
    sampling("walk, q", "walk", HAS_Q=True, STRIKE=False),
    sampling("walk, q without replacement", "walk", HAS_Q=True, STRIKE=True),
    *(sampling(f"{step}{', q' * has_q}", step, HAS_Q=has_q) for step in ("masses", "draw") for has_q in (False, True)),
    drafting("best of a block", "block", BLOCK=verify_greedy.VOCAB_BLOCK),
    drafting("best of 64 blocks, 8 each", "merge", BLOCKS=64, BLOCK=512),
    drafting("128 children", "expand", UNUSED=UNUSED, BLOCK=128),
    drafting("keep", "keep", BLOCK=draft_topk.BLOCK),
    drafting("select", "select", UNUSED=UNUSED, BLOCK=draft_topk.BLOCK),
    commit(0),
    commit(16),
)


def compiled(one: Specialisation, target: GPUTarget) -> Cost:
    """What the compilers say of it."""
    names = one.kernel.arg_names
    plain = {name: "i64" if name.endswith("_stride") else "i32" for name in names}
    signature = {**plain, **one.types, **dict.fromkeys(one.constants, "constexpr")}
    # As at a launch: pointers and strides that are multiples of 16.
    aligned = [name for name in names if name in one.types or (name.endswith("_stride") and name not in one.constants)]
    source = ASTSource(
        one.kernel,
        {name: signature[name] for name in names},
        constexprs={(names.index(name),): value for name, value in one.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    made = triton.compile(source, target=target, options={"num_warps": one.num_warps})
    registers, spilled = _of_amd(made.asm["amdgcn"]) if target.backend == "hip" else _of_nvidia(made.asm["cubin"])
    return Cost(registers, spilled, made.metadata.shared)


def _of_amd(assembly: str) -> tuple[int, int]:
    found = {name: int(number) for name, number in re.findall(r"\.(vgpr_count|vgpr_spill_count): +(\d+)", assembly)}
    return found["vgpr_count"], 4 * found["vgpr_spill_count"]


def _of_nvidia(cubin: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", told.stdout)
    if found is None:
        raise ValueError(f"{tool} does not tell registers: {told.stdout[:200]}")
    return int(found[1]), int(found[2])


def rows(names: Sequence[str], targets: Sequence[str]) -> Iterator[tuple[str, str, Cost | str]]:
    """For each target and specialisation (all whose name holds one of `names`): what it costs, or why it fails."""
    for one in SPECIALISATIONS:
        if names and not any(name in one.name for name in names):
            continue
        for target in targets:
            try:
                yield one.name, target, compiled(one, TARGETS[target])
            except Exception as error:  # a compiler raises what it likes
                yield one.name, target, " ".join(str(error).split())[:200]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m specbench.kernels.compiled", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of names; none: all")
    parser.add_argument("--target", action="append", choices=TARGETS, help="may be repeated (default: all)")
    args = parser.parse_args(arguments)
    print("| kernel | target | registers | spilled bytes | shared bytes |\n| --- | --- | --- | --- | --- |")
    failed = num = 0
    for name, target, cost in rows(args.names, args.target or [*TARGETS]):
        num += 1
        if isinstance(cost, str):
            failed += 1
            print(f"| {name} | {target} | does not compile: {cost} | | |", flush=True)
            continue
        failed += cost.spilled > MAX_SPILLED
        print(f"| {name} | {target} | {cost.registers} | {cost.spilled} | {cost.shared:,} |", flush=True)
    if not num:
        print(f"no specialisation has {' or '.join(args.names)} in its name", file=sys.stderr)
        return 2
    if failed:
        print(f"{failed} of {num} do not compile or spill more than {MAX_SPILLED} bytes", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
