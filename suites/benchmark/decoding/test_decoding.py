"""Decoders as benchmarks of pytest's: `pytest suites/benchmark/decoding --benchmark-only`, with `--target` or without.

What is measured is `specbench bench --preset quick`, in turns and behind the gate. Then each setting is handed to
pytest-benchmark, for its table, `--benchmark-autosave` and `--benchmark-compare`: one round is a repetition of all
prompts, and its time is seconds a token behind the first. A setting that the gate did not pass is marked in its
extra_info and has no speed-up there; one that is a BUG fails.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import pytest

from specbench.bench.rows import Row, RowFile, Run, header_of, read
from specbench.bench_command import ROWS, Prepared, Progress, add_options, gated, load_generator, prepared, settings_of
from specbench.models import DEFAULT_MODEL
from specbench.record import BUG
from specbench.reference.model import LlamaConfig, tiny_llama
from specbench.suites.benchmark.played import PLAYED

NO_MODEL = "none"
TINY = LlamaConfig(256, 64, 128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16)  # of bytes, with seed 0
TINY_PROMPT = 64  # bytes


@dataclass(frozen=True)
class Measured:
    """run: all rows and gates. summary: of `bench.summary`."""

    run: Run
    summary: dict[str, Any]


def options(config: pytest.Config) -> argparse.Namespace:
    """As of `specbench bench --preset quick`."""
    parser = argparse.ArgumentParser()
    add_options(parser, int)
    model, target = config.getoption("--specbench-model"), config.getoption("--specbench-target")
    words = ["--preset", "quick", "--device", config.getoption("--specbench-device")]
    words += [] if model in (DEFAULT_MODEL, NO_MODEL) else ["--model", model]
    words += ["--dtype", "fp32"] if model == NO_MODEL else []
    return parser.parse_args([*words, *(["--target", target] if target else [])])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    args = options(metafunc.config)
    names = [one.name for one in settings_of(args, has_target=bool(args.target), has_plain_target=bool(args.target))]
    metafunc.parametrize("name", names, ids=[one.replace(" ", "_") for one in names])


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """All settings at once: they take turns, so that a machine that slows down slows all of them."""
    from specbench.bench.summary import summary_of

    args = options(request.config)
    try:
        made = _prepared(args, request.config, tmp_path_factory)
        command = "pytest suites/benchmark/decoding --benchmark-only"
        header = header_of(made.plan.definition, command=command, device=args.device)
        file = RowFile(tmp_path_factory.mktemp("rows") / ROWS, header)
        gated(made, file, Progress())
    except (ValueError, RuntimeError, OSError) as error:
        pytest.exit(f"specbench: {error}", returncode=pytest.ExitCode.USAGE_ERROR)
    run = read(file.path)
    return Measured(run, summary_of(run))


def _prepared(args: argparse.Namespace, config: pytest.Config, temporary: pytest.TempPathFactory) -> Prepared:
    """Without a model a tiny one of random weights, which is asked the workload's bytes."""
    adapter = load_generator(args.target)
    if config.getoption("--specbench-model") != NO_MODEL or getattr(adapter, "checkpoint", None):
        return prepared(args, adapter)
    import torch

    from specbench.bench.loop import Item
    from specbench.workloads.load import load
    from specbench.workloads.workload import sample

    folder = temporary.mktemp("model") / "tiny"
    tiny_llama(TINY, seed=0).to(torch.float32).save(folder)
    args.model = str(folder)
    prompts = sample(load(), 1).prompts
    items = [Item(one.id, one.category, tuple(one.turns[0].encode()[-TINY_PROMPT:])) for one in prompts]
    return prepared(args, adapter, items)


def repetitions(rows: list[Row]) -> list[float]:
    """Seconds a token behind the first, over all prompts, by repetition."""
    found = []
    for repetition in sorted({one.repetition for one in rows}):
        some = [one for one in rows if one.repetition == repetition]
        num_tokens = sum(len(one.tokens) - one.first_tokens for one in some)
        if num_tokens:
            found.append(sum(one.seconds - one.first_seconds for one in some) / num_tokens)
    return found


@pytest.mark.benchmark(timer=PLAYED.read, group="decoding, seconds a token")
def test_decoding(name: str, measured: Measured, benchmark: Any) -> None:
    told = measured.summary["settings"].get(name)
    if told is None:
        pytest.skip(f"{name} was not measured: the target has no with_drafter(None), which is its plain decoding")
    seconds = repetitions(measured.run.of(name))
    if not seconds:
        pytest.skip(f"{name} gave all its tokens at once: there is no time behind the first")
    next_one: Callable[[], float] = cycle(seconds).__next__
    benchmark.pedantic(PLAYED.once, args=(next_one,), rounds=len(seconds))
    benchmark.extra_info.update(extra_info(name, measured))
    if told["verdict"] == BUG:
        pytest.fail(f"{name}: {told['sentence']}", pytrace=False)


def extra_info(name: str, measured: Measured) -> dict[str, Any]:
    """speedup: of decoding against `baseline`, None where the gate did not pass."""
    summary = measured.summary
    told, definition = summary["settings"][name], summary["definition"]
    return {
        "verdict": told["verdict"],
        "sentence": told["sentence"],
        "unverified": told["speedup"] is None,
        "speedup": told["speedup"]["decode"] if told["speedup"] else None,
        "baseline": summary["baseline"],
        "acceptance_length": told["acceptance"]["length"],
        "num_tokens": told["num_tokens"],
        "num_prompts": summary["num_prompts"],
        "first_seconds": told["first_seconds"],
        "model": definition["weights"],
        "dtype": definition["dtype"],
        "threads": definition["threads"],
    }
