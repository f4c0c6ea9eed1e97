"""The kernel benchmark without a GPU: its formulas against counted bytes, its gate against planted faults, its record.

Kernels are reached through the suite, which says first that Triton is to interpret them where there is no GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specbench.reference import attention as twin
from specbench.reference.model import LlamaConfig, tiny_llama
from specbench.reference.verify import greedy_walk
from specbench.reports.kernels import rows_of
from specbench.suites.benchmark.kernels import DEVICE, attention, rounds, verify
from specbench.suites.benchmark.kernels import __main__ as script
from specbench.suites.benchmark.kernels import clock as clock_module
from specbench.suites.benchmark.kernels.attention import QUICK, SLOW, AttentionTask, block_mask
from specbench.suites.benchmark.kernels.cells import KINDS, AttentionCell, RoundCell, VerifyCell, attention_cells
from specbench.suites.benchmark.kernels.clock import FEWEST, HostClock, times
from specbench.suites.benchmark.kernels.rows import (
    FAILED,
    NOT_RUN,
    NOT_TIMED,
    OWN,
    PEER,
    TIMED,
    WRONG,
    Contender,
    NotHere,
    measured,
    row_of,
)
from specbench.suites.kernels.comparisons import sampled
from specbench.tree import DraftTree

ROOT = Path(__file__).resolve().parents[1]
SMALL = AttentionCell(40, 6, 2, 4, 2, 16)
VERIFY = {kind: VerifyCell(kind, 5 if kind == "chain" else 10, 3, V=3000, L=2, P=6, Hkv=2, D=8) for kind in KINDS}


@pytest.fixture(scope="module")
def task() -> AttentionTask:
    return AttentionTask(SMALL, DEVICE)


def test_attention_bytes_are_those_of_the_tensors(task: AttentionTask) -> None:
    """Counted on what the launcher is given and gives back."""
    mask = attention.tree_mask(task.parents.flatten(), task.prefix_lens, cu_nodes=task.cu_nodes, max_nodes=SMALL.N)
    call, _ = QUICK[0].make(task)
    read = (task.q, task.k, task.v, mask.bits, mask.depth, task.prefix_lens, task.cu_nodes)
    assert sum(one.nbytes for one in (*read, *call())) == SMALL.num_bytes


def test_attention_operations_by_hand() -> None:
    """A root sees 2 + 1 keys, its child 2 + 2: 7 pairs, each 2 products of 8 numbers, for each of 4 heads."""
    assert AttentionCell(2, 2, 1, 4, 2, 8).num_flops == 7 * 4 * (8 + 8) * 2


def test_pairs_are_those_that_the_twin_looks_at() -> None:
    seen = sum(SMALL.P + len(twin.ancestors(tree, node)) for tree in SMALL.parents for node in range(SMALL.N))
    assert SMALL.num_pairs == seen


@pytest.mark.parametrize("num_nodes", [1, 64, 65, 256])
def test_mask_is_n_squared_bits_in_whole_words_whatever_the_prefix(num_nodes: int) -> None:
    cells = [AttentionCell(prefix, num_nodes, 2, 4, 2, 16) for prefix in (0, 1000)]
    words = {1: 1, 64: 1, 65: 2, 256: 4}[num_nodes]
    assert {cell.mask_bytes for cell in cells} == {2 * num_nodes * words * 8}
    parents = torch.tensor(cells[0].parents, dtype=torch.int32, device=DEVICE).flatten()
    lens = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    ends = torch.arange(3, dtype=torch.int32, device=DEVICE) * num_nodes
    assert attention.tree_mask(parents, lens, cu_nodes=ends, max_nodes=num_nodes).bits.nbytes == cells[0].mask_bytes


def test_dense_and_block_masks_take_what_is_told(task: AttentionTask) -> None:
    told = {one.name: one.facts(SMALL).get("mask_bytes") for one in (*QUICK, *SLOW)}
    assert told["sdpa, dense mask"] == attention._dense_mask(task).untyped_storage().nbytes()
    lists = block_mask(task)
    counts = lists.kv_num_blocks.nbytes + lists.full_kv_num_blocks.nbytes
    named = lists.kv_indices.nbytes  # of both lists together each block is named once
    assert told["flex_attention, block mask"] == task.visible.nbytes + 2 * named + counts


def test_block_mask_is_the_one_that_torch_makes() -> None:
    """Blocks of 128 x 128: of the 300 rows of the prefix two are whole. Torch calls no block whole whose last rows are
    behind the end, which costs it a mask that nobody needs."""
    from torch.nn.attention.flex_attention import create_block_mask

    one = AttentionTask(AttentionCell(300, 130, 2, 2, 1, 16), DEVICE)
    mine = block_mask(one)
    right = create_block_mask(mine.mask_mod, 2, None, 130, 430, device=DEVICE)
    assert torch.equal(mine.to_dense(), right.to_dense())
    assert (mine.full_kv_num_blocks[0].tolist(), right.full_kv_num_blocks[0].tolist()) == ([[2, 2]], [[2, 0]])


def test_greedy_bytes_are_logits_and_the_moved_rows() -> None:
    one = verify.GreedyTask(VERIFY["greedy"], DEVICE)
    moved = one.cache[:, :, :4].nbytes  # four rows of every sequence and layer, keys and values, read and written
    assert VERIFY["greedy"].num_bytes == one.logits.nbytes + 2 * moved


def test_round_multiplies_every_weight_but_embeddings_and_norms() -> None:
    cell = RoundCell(3, 2, P=4, L=2, hidden=16, inner=24, V=13, Hq=4, Hkv=2, D=4)
    model = tiny_llama(LlamaConfig(13, 16, 24, 2, 4, 2, 4), seed=0)
    matrices = {name: one for name, one in model._weights.items() if one.dim() == 2 and "embed" not in name}
    assert cell.num_weights == sum(one.numel() for one in matrices.values())


def test_grid_is_the_issues_and_begins_with_what_targets_speak_of() -> None:
    cells = list(attention_cells())
    assert len(set(cells)) == 4 * 6 * 3
    assert all(cell.B == 8 and cell.P >= 8192 for cell in cells[:18]) and not cells[18].is_target


def right_answer(one: AttentionTask, **changed: Tensor) -> tuple[Tensor, Tensor, bool]:
    """The twin's, row by row in fp64; its inputs may be changed."""
    given = {name: changed.get(name, getattr(one, name)).cpu() for name in ("q", "k", "v", "parents", "prefix_lens")}
    given["parents"] = given["parents"].flatten()
    out, lse = twin.tree_attention(*given.values(), one.scale, cu_nodes=one.cu_nodes.cpu())
    return out.bfloat16().to(DEVICE), lse.float().to(DEVICE), True


def test_gate_takes_the_twins_answer(task: AttentionTask) -> None:
    assert task.wrong(right_answer(task)) == ""
    assert task.checked == "4 of 4 sequences x key heads, against fp64"


def without_row(one: AttentionTask, row: int) -> dict[str, Tensor]:
    """A key that no query would look at."""
    k = one.k.clone()
    k[:, row] = -4.0
    return {"k": k}


ALTERED: dict[str, Callable[[AttentionTask], tuple[Any, ...]]] = {
    "first row of the prefix left out": lambda one: right_answer(one, **without_row(one, 0)),
    "last row of the prefix left out": lambda one: right_answer(one, **without_row(one, one.cell.P - 1)),
    "own row left out": lambda one: right_answer(one, **without_row(one, one.cell.P)),
    "a chain's mask": lambda one: right_answer(one, parents=torch.arange(-1, one.cell.N - 1).repeat(one.cell.B, 1)),
    "everybody's first tree": lambda one: right_answer(one, parents=one.parents[:1].expand(one.cell.B, -1)),
    "zeros": lambda one: (torch.zeros_like(one.q), None, True),
    "no mask": lambda one: (*right_answer(one)[:2], False),
    "heads in turn": lambda one: (right_answer(one)[0].flip(1), None, True),
    "lse of another base": lambda one: (right_answer(one)[0], right_answer(one)[1] * 1.4427, True),
    "one number is NaN": lambda one: (right_answer(one)[0].flatten().put_(*NAN).view(one.q.shape), None, True),
}
NAN = torch.tensor([7], device=DEVICE), torch.tensor([torch.nan], dtype=torch.bfloat16, device=DEVICE)


@pytest.mark.parametrize("fault", ALTERED)
def test_gate_catches(fault: str) -> None:
    """Behind 1,500 rows, so that one row more or less is little of the whole."""
    one = AttentionTask(AttentionCell(1500, 6, 2, 4, 2, 16), DEVICE)
    assert one.wrong(right_answer(one)) == ""
    assert one.wrong(ALTERED[fault](one)) != ""


@pytest.mark.parametrize("contender", [*QUICK, *SLOW], ids=lambda one: one.name)
def test_every_contender_is_right_or_says_what_is_missing(contender: Contender) -> None:
    one = AttentionTask(AttentionCell(150, 5, 2, 4, 2, 16), DEVICE)
    row = measured(one, contender, None)
    missing = {"sdpa cudnn, dense mask", "sdpa cudnn, no mask", "flashinfer, packed mask"} if DEVICE == "cpu" else set()
    assert row["status"] == (NOT_RUN if contender.name in missing else NOT_TIMED), row["why"]
    assert "seconds" not in row and row["why"]


@pytest.mark.parametrize("kind", KINDS)
def test_acceptance_of_kernels_and_of_torch_is_right(kind: str) -> None:
    one = verify.task_of(VERIFY[kind], DEVICE)
    rows = [measured(one, contender, None) for contender in verify.contenders_of(VERIFY[kind])]
    assert [row["status"] for row in rows] == [NOT_TIMED, NOT_TIMED], rows


def test_planned_path_is_the_reference_walk() -> None:
    one = verify.GreedyTask(VERIFY["greedy"], DEVICE)
    cell = one.cell
    for tree in range(cell.B):
        rows = slice(tree * cell.N, (tree + 1) * cell.N)
        told = greedy_walk(
            DraftTree.of(one.tokens[rows].tolist(), one.parents[rows].tolist()), one.logits[rows].cpu().double()
        )
        assert (list(told.path), told.bonus_token) == (one.path[tree].tolist(), int(one.bonus_tokens[tree]))


@pytest.mark.parametrize("kind", ["tree", "chain"])
def test_torch_samples_as_the_reference_rule(kind: str) -> None:
    one = verify.task_of(VERIFY[kind], DEVICE)
    cell = one.cell
    for tree in range(cell.B):
        rows = slice(tree * cell.N, (tree + 1) * cell.N)
        p = one.logits[rows].cpu().double().softmax(-1)
        q = None if one.draft_probs is None else one.draft_probs[rows].cpu().double()
        draft = DraftTree.of(one.tokens[rows].tolist(), one.parents[rows].tolist())
        (path, bonus), num_coins = sampled(draft, p, q, one.uniforms[tree].cpu().double())
        assert one._right[tree] == (list(path), bonus, num_coins)


def greedy_fault(change: str) -> str:
    """What the gate says of torch's answer when something is off."""
    one = verify.GreedyTask(VERIFY["greedy"], DEVICE)
    call, answer_of = verify.contenders_of(one.cell)[1].make(one)
    path, num_accepted, bonus_tokens = answer_of(call())
    if change == "rows":
        one.reset()
    elif change == "other row":
        one.cache[0, 0, one.cell.P + 7] += 1
    return one.wrong(
        (
            path + int(change == "path"),
            num_accepted - int(change == "num"),
            bonus_tokens.roll(1) if change == "bonus" else bonus_tokens,
        )
    )


@pytest.mark.parametrize("change", ["rows", "other row", "path", "num", "bonus"])
def test_gate_of_greedy_acceptance_catches(change: str) -> None:
    assert greedy_fault("") == "" and greedy_fault(change) != ""


def stand_in(make: Callable[[Any], Any]) -> Contender:
    return Contender("stand-in", OWN, make)


class Doubtful:
    """A task whose answers are right while they are 0."""

    kernel, cell, checked = "tree_attention", SMALL, "all"

    def wrong(self, answer: Any) -> str:
        return f"{answer} must be 0" if answer else ""


def test_right_one_is_timed() -> None:
    row = measured(Doubtful(), stand_in(lambda task: (lambda: 0, lambda answer: answer)), HostClock())
    assert (row["status"], row["why"], row["checked"]) == (TIMED, "", "all")
    assert set(row["seconds"]) == {"median", "q25", "q75", "min", "n"} and row["seconds"]["n"] >= FEWEST


def test_wrong_one_gets_no_time_and_is_not_called_again() -> None:
    calls: list[int] = []
    row = measured(Doubtful(), stand_in(lambda task: (lambda: calls.append(1), lambda answer: 7)), HostClock())
    assert (row["status"], row["why"], "seconds" in row, len(calls)) == (WRONG, "7 must be 0", False, 1)


def test_one_that_turns_wrong_while_it_is_timed_gets_no_time() -> None:
    state = [0]

    def call() -> list[int]:
        state[0] += 1
        return state

    row = measured(Doubtful(), stand_in(lambda task: (call, lambda answer: answer[0] > 5)), HostClock())
    assert (row["status"], "seconds" in row) == (WRONG, False) and row["why"].startswith("after ")


def missing(task: Any) -> Any:
    raise NotHere("nobody installed it")


def broken(task: Any) -> Any:
    raise IndexError("one\n too far")


def test_missing_and_broken_ones_have_rows_that_say_so() -> None:
    rows = [measured(Doubtful(), stand_in(make), HostClock()) for make in (missing, broken)]
    told = [(row["status"], row["why"]) for row in rows]
    assert told == [(NOT_RUN, "nobody installed it"), (FAILED, "IndexError: one too far")]


class FakeCuda:
    """Writes down in which order a clock asks the device."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.seconds = 0.0

    def get_device_properties(self, device: int) -> Any:
        return SimpleNamespace(L2_cache_size=100)

    def current_stream(self) -> Any:
        return SimpleNamespace(wait_stream=lambda other: None)

    Stream = current_stream

    def stream(self, one: Any) -> Any:
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        self.log.append("wait")

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(replay=lambda: self.log.append("replay"))

    def graph(self, one: Any) -> Any:
        self.log.append("capture")
        return contextlib.nullcontext()

    def Event(self, *, enable_timing: bool) -> Any:
        return SimpleNamespace(
            record=lambda: self.log.append("event"),
            synchronize=lambda: self.log.append("wait"),
            elapsed_time=lambda other: 250.0,  # milliseconds
        )


def test_a_call_is_captured_after_warm_ups_and_timed_behind_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    flush = SimpleNamespace(zero_=lambda: cuda.log.append("flush"))
    sizes: list[int] = []

    def empty(size: int, **_: Any) -> Any:
        sizes.append(size)
        return flush

    monkeypatch.setattr(clock_module, "torch", SimpleNamespace(cuda=cuda, empty=empty, int8=None))
    clock = clock_module.CudaClock()
    assert sizes == [2**28]
    timed = clock.prepared(lambda: cuda.log.append("call") or "answer")
    assert cuda.log == ["call", "call", "call", "wait", "capture", "call"]
    cuda.log.clear()
    assert timed() == "answer"
    assert clock.once(timed) == 0.25
    assert cuda.log == ["replay", "flush", "event", "replay", "event", "wait"]


def test_statistics_of_known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three warm-ups, then ten times of 0.1 to 1.0 seconds."""
    monkeypatch.setattr(clock_module, "WARM_SECONDS", 0.0)
    given = iter([9.0, 9.0, 9.0, *(number / 10 for number in range(1, 11))])
    found = times(lambda call: next(given), lambda: None)
    assert found == pytest.approx({"median": 0.55, "q25": 0.325, "q75": 0.775, "min": 0.1, "n": 10})


def job(**changed: Any) -> script.Job:
    good = stand_in(lambda task: (lambda: 0, lambda answer: answer))
    usual = {"kernel": "tree_attention", "cell": SMALL, "contenders": (good, good), "task": Doubtful}
    return script.Job(**(usual | changed))


def run(tmp_path: Path, one: script.Job, *, clock: Any = None, deadline: float = float("inf")) -> list[dict[str, Any]]:
    with (tmp_path / "rows").open("w") as file:
        script.run_jobs([one], clock, script.Record(file), deadline=deadline, minutes=9)
    return rows_of((tmp_path / "rows").read_text())


def test_without_a_clock_rows_have_bytes_and_operations_and_no_time(tmp_path: Path) -> None:
    rows = run(tmp_path, job())
    assert [(row["status"], row["bytes"], row["flops"], "seconds" in row) for row in rows] == [
        (NOT_TIMED, SMALL.num_bytes, SMALL.num_flops, False)
    ] * 2


def test_what_time_does_not_reach_is_told(tmp_path: Path) -> None:
    rows = run(tmp_path, job(), clock=HostClock(), deadline=0.0)
    assert [(row["status"], row["why"]) for row in rows] == [(NOT_RUN, "the run's 9 minutes were used up")] * 2


def test_what_memory_does_not_hold_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "free_bytes", lambda: 1000)
    rows = run(tmp_path, job(needed_bytes=1001), clock=HostClock())
    assert {(row["status"], row["why"]) for row in rows} == {
        (NOT_RUN, "does not fit: takes 1,001 bytes, 1,000 are free")
    }


def test_inputs_that_cannot_be_built_are_told(tmp_path: Path) -> None:
    rows = run(tmp_path, job(task=lambda: 1 / 0), clock=HostClock())
    assert {(row["status"], row["why"]) for row in rows} == {
        (FAILED, "its inputs: ZeroDivisionError: division by zero")
    }


def test_rows_are_on_disk_before_the_next_is_measured(tmp_path: Path) -> None:
    """What a run that is killed leaves."""
    seen = []

    def look(task: Any, contender: Contender, clock: Any) -> dict[str, Any]:
        seen.append(len((tmp_path / "rows").read_text().splitlines()))
        return row_of("tree_attention", SMALL, contender, NOT_RUN, "")

    run(tmp_path, job(row=look), clock=HostClock())
    assert seen == [0, 1]


def test_real_contenders_go_through_the_whole_path(tmp_path: Path) -> None:
    """With the host's clock, whose times nobody looks at."""
    cell = AttentionCell(20, 3, 1, 2, 1, 16)
    rows = run(
        tmp_path,
        job(cell=cell, contenders=QUICK[:2], task=lambda: AttentionTask(cell, DEVICE)),
        clock=HostClock() if DEVICE == "cpu" else script.CudaClock(),
    )
    assert [(row["contender"], row["status"]) for row in rows] == [
        ("tree_attention", TIMED),
        ("sdpa, dense mask", TIMED),
    ], rows


def test_rounds_are_timed_by_launches_and_as_a_graph() -> None:
    cell = RoundCell(3, 2, P=4, L=1, hidden=16, inner=24, V=13, Hq=2, Hkv=1, D=8)
    one = rounds.RoundTask(cell, rounds.fused_round, DEVICE)
    clock = HostClock() if DEVICE == "cpu" else script.CudaClock()
    told = [
        (row["status"], row["why"])
        for row in (rounds.round_row(one, contender, clock) for contender in rounds.CONTENDERS)
    ]
    second = (NOT_RUN, "a CUDA graph needs a CUDA device") if DEVICE == "cpu" else (TIMED, "")
    assert told == [(TIMED, ""), second]
    assert one.wrong([[1]]) != ""


def test_script_writes_rows_page_and_drawings_and_makes_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "all_jobs", lambda device: iter([job(contenders=QUICK)]))
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: False)
    assert script.main(["--out", str(tmp_path), "--check-minutes", "0"]) == 0
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(made) == {"kernels.jsonl", "kernels.md", "roofline.svg", "roofline.png", "peers.svg", "peers.png"}
    rows = [json.loads(line) for line in made["kernels.jsonl"].splitlines()]
    assert [row["row"] for row in rows] == ["run", "check", *["time"] * len(QUICK)]
    for name in set(made) - {"kernels.jsonl"}:
        (tmp_path / name).unlink()
    assert script.main(["--out", str(tmp_path), "--report"]) == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == made


@pytest.mark.parametrize("bad", ["wrong", "failed"])
def test_run_in_which_ours_is_wrong_is_not_good(bad: str) -> None:
    own, peer = (row_of("round", SMALL, Contender("x", role, missing), bad) for role in (OWN, PEER))
    assert script.is_good([peer]) and not script.is_good([peer, own])
    assert not script.is_good([{"row": "check", "status": "failed"}])


def pytest_run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    # These tests may run in a worker of xdist, under which nothing is timed.
    environment = {name: one for name, one in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)


@pytest.mark.skipif(DEVICE != "cpu", reason="with a GPU the suite takes times: run it where there is none")
def test_suite_without_a_gpu_tells_bytes_and_operations() -> None:
    """By hand: 1,025 keys and values of 8 x 128 numbers (4,198,400 bytes), 32 x 128 of query and output (16,384), lse
    (128), one word of mask (8), depth, length and two ends (16); 1,025 pairs x 32 heads x 2 products x 128 x 2."""
    done = pytest_run(ROOT, "suites/benchmark/kernels", "--benchmark-only")
    cell = "tree_attention P=1024 N=1 B=1 Hq=32 Hkv=8 D=128"
    assert done.returncode == 0, done.stdout
    assert f"{cell}: 4,214,936 bytes, 16,793,600 operations; a time needs a CUDA device" in done.stdout
    assert "80 skipped" in done.stdout


def test_xdist_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """Where it is asked for by name, and where workers come upon it in a folder above."""
    pytest.importorskip("xdist", reason="install pytest-xdist to see it refused")
    inner = tmp_path / "all" / "benchmark"
    inner.mkdir(parents=True)
    (inner / "conftest.py").write_text((ROOT / "suites" / "benchmark" / "conftest.py").read_text("utf-8"))
    (inner / "test_one.py").write_text("def test_one(): pass\n")
    sentence = "suites/benchmark takes times one after the other, in one process: leave out xdist's -n"
    named = pytest_run(tmp_path, "all/benchmark", "-n", "1")
    assert (named.returncode, named.stderr.strip()) == (4, f"ERROR: {sentence}")
    above = pytest_run(tmp_path, "all", "-n", "1")
    assert above.returncode == 1 and sentence in above.stdout


def test_pytest_benchmark_is_given_the_clocks_seconds(tmp_path: Path) -> None:
    """A made-up clock, each of whose calls takes a quarter of a second."""
    (tmp_path / "test_one.py").write_text(
        "import pytest\n"
        "from specbench.suites.benchmark.played import PLAYED\n"
        "@pytest.mark.benchmark(timer=PLAYED.read)\n"
        "def test_one(benchmark):\n"
        "    benchmark.pedantic(PLAYED.once, args=(lambda call: 0.25, None), rounds=5, warmup_rounds=2)\n"
        "    assert benchmark.stats.stats.data == [0.25] * 5\n"
    )
    done = pytest_run(ROOT, str(tmp_path / "test_one.py"), "-p", "no:xdist", "--benchmark-only")
    assert done.returncode == 0, done.stdout
