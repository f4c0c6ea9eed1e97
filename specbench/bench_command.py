"""`specbench bench` and `specbench compare`: options, progress and files; what is measured is decided in `bench`."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specbench import models
from specbench.bench.rows import RowFile, Run, Setting, header_of, read
from specbench.engines import Missing

ROWS, SUMMARY, REPORT = "rows.jsonl", "summary.json", "report"
BATCH_WIDTHS = (1, 2, 3, 5, 9, 17)  # of each text
LONG = "retrieval"  # the category of long texts


@dataclass(frozen=True)
class Preset:
    """num_each: prompts a category. drafters: of our own side, with gamma and width. grid: gammas of the lookup that
    both stacks run. as_paths: drafters that run once more, each path of a tree written out whole. with_trained: the
    trained drafters that there are too, and over the first of them the adaptive ones."""

    num_each: int
    max_new_tokens: int
    repetitions: int
    grid: tuple[int, ...]
    drafters: tuple[tuple[str, int, int], ...]
    as_paths: tuple[tuple[str, int, int], ...] = ()
    with_trained: bool = False


LADDER, _TREE = "ladder", ("early_exit", 3, 2)
TRAINED_SHAPE, ADAPTIVE = (4, 2), (("adaptive", 16, 1), ("router", 16, 1))
# Drafters that cannot be had over a model are left out of a preset, and named.
PRESETS = {
    "laptop": Preset(
        2, 40, 1, (3, 5, 10), (("ngram", 4, 2), ("suffix", 8, 1), ("early_exit", 2, 1)), with_trained=True
    ),
    "quick": Preset(1, 12, 1, (4,), (("ngram", 4, 1),)),
    # The steps of docs/ladder.md, in their order.
    LADDER: Preset(2, 40, 1, (), (("ngram", 4, 1), ("early_exit", 3, 1), _TREE), as_paths=(_TREE,), with_trained=True),
}


def add_options(one: argparse.ArgumentParser, count: Callable[[str], int]) -> None:
    one.add_argument(
        "--preset",
        choices=PRESETS,
        default="laptop",
        help="laptop (default): ten minutes; quick: one; ladder: step by step",
    )
    one.add_argument("--model", metavar="MODEL", help="a name, folder or hub id (default smollm2, or the target's own)")
    one.add_argument("--target", metavar="TARGET", help="as for check, with generate: measured beside our own decoder")
    one.add_argument("--draft-model", default="", metavar="DIR", help="a small model as one more drafter")
    one.add_argument(
        "--trained", action="append", default=[], metavar="DIR", help="a folder of train-drafter (default: the shipped)"
    )
    one.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="bf16", help="of weights (default bf16)")
    one.add_argument("--device", default="cpu", metavar="DEVICE", help="cpu (default) or cuda")
    one.add_argument("--threads", type=count, metavar="N", help="of torch (default: as it chooses)")
    one.add_argument(
        "--drafters",
        type=_drafters,
        metavar="LIST",
        help="NAME:GAMMA or NAME:GAMMA:WIDTH, comma-separated, GAMMA a number or range: lookup:1-16,ngram:4:2",
    )
    one.add_argument("--layout", choices=("tree_mask", "path_batch"), default="tree_mask", help="of our trees")
    one.add_argument("--temperature", type=_temperature, default=0.0, metavar="T", help="0 (default) is greedy")
    one.add_argument("--workload", default="specbench", metavar="NAME", help="as for workload (default: ours)")
    one.add_argument("--prompts", type=count, metavar="N", help="of each category (default: the preset's)")
    one.add_argument(
        "--context", type=_lengths, metavar="LIST", help="prompts of these lengths in tokens, comma-separated: 128,1024"
    )
    one.add_argument(
        "--batch", type=count, default=1, metavar="N", help="texts at once, of our own decoder (default 1)"
    )
    one.add_argument("--max-new-tokens", type=count, metavar="N", help="default: the preset's")
    one.add_argument("--repetitions", type=count, metavar="N", help="default: the preset's")
    one.add_argument("--no-memory", action="store_true", help="start no processes that measure peak memory")
    one.add_argument("--out", type=Path, default=Path("bench"), metavar="DIR", help=f"{ROWS}, {SUMMARY}, {REPORT}/")
    one.add_argument("--resume", action="store_true", help=f"go on with the rows that {ROWS} has")


def add_compare_options(one: argparse.ArgumentParser) -> None:
    one.add_argument("before", type=Path, metavar="A", help=f"a folder that bench wrote, or its {ROWS}")
    one.add_argument("after", type=Path, metavar="B", help="the same, later")
    one.add_argument("--force", action="store_true", help="runs of other machines or definitions too")


def _drafters(text: str) -> tuple[tuple[str, int, int], ...]:
    found = []
    for part in text.split(","):
        name, *numbers = part.strip().split(":")
        first, _, last = (numbers[0] if numbers else "").partition("-")
        width = numbers[1] if len(numbers) > 1 else "1"
        if not 1 <= len(numbers) <= 2 or not all(one.isdecimal() and int(one) for one in (first, last or "1", width)):
            raise argparse.ArgumentTypeError(f"{part!r} must be NAME:GAMMA or NAME:GAMMA:WIDTH, such as lookup:1-16")
        gammas = range(int(first), int(last or first) + 1)
        if not gammas:
            raise argparse.ArgumentTypeError(f"{part!r} has a range that ends before it begins")
        found += [(name, gamma, int(width)) for gamma in gammas]
    return tuple(found)


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number >= 0, 0 for greedy decoding")
    return value


def _lengths(text: str) -> tuple[int, ...]:
    parts = [one.strip() for one in text.split(",")]
    if not all(one.isdecimal() and int(one) >= 2 for one in parts) or len(set(parts)) < len(parts):
        raise argparse.ArgumentTypeError(f"{text!r} must be different numbers >= 2, comma-separated, such as 128,1024")
    return tuple(map(int, parts))


def settings_of(
    args: argparse.Namespace, *, has_target: bool, has_plain_target: bool, trained: Sequence[str] = ()
) -> list[Setting]:
    """Plain decoding of both stacks first, the drafters after it; the lookup in both stacks, gamma by gamma. Batches
    are our own decoder's alone: `generate` does not look up drafts for several texts. trained: kinds of the trained
    drafters that there are.
    """
    common = {"layout": args.layout, "temperature": args.temperature, "batch": args.batch}
    preset = PRESETS[args.preset]
    drafters = args.drafters or (*(("lookup", gamma, 1) for gamma in preset.grid), *preset.drafters)
    if preset.with_trained and trained and not args.drafters and args.batch == 1:
        drafters = (*drafters, *((kind, *TRAINED_SHAPE) for kind in trained), *ADAPTIVE)
    if args.draft_model and not any(name == "model" for name, _, _ in drafters):
        drafters = (*drafters, ("model", 4, 1))
    sampled = {"temperature": args.temperature}
    found = [Setting("plain", **common)]
    if args.batch == 1:
        found.append(Setting("transformers", side="transformers", **sampled))
    for name, gamma, width in drafters:
        shape = f"{gamma}" if width == 1 else f"{gamma}x{width}"
        found.append(Setting(f"{name} {shape}", drafter=name, gamma=gamma, width=width, **common))
        if name == "lookup" and args.batch == 1:
            theirs = {"side": "transformers", "drafter": "lookup", "gamma": gamma}
            found.append(Setting(f"transformers lookup {gamma}", **theirs, **sampled))
    if not args.drafters:
        for name, gamma, width in preset.as_paths:
            paths = {**common, "layout": "path_batch"}
            found.append(Setting(f"{name} {gamma}x{width} as paths", drafter=name, gamma=gamma, width=width, **paths))
    if has_plain_target:
        found.append(Setting("target plain", side="target", **sampled))
    if has_target:
        found.append(Setting("target", side="target", drafter="own", **sampled))
    return found


def bench(args: argparse.Namespace) -> int:
    """0: every setting passed the gate. 1: one is a BUG. 2: it cannot be measured."""
    try:
        return _bench(args)
    except (ValueError, RuntimeError, OSError, Missing) as error:
        print(f"specbench: {error}", file=sys.stderr)
        return 2


def _bench(args: argparse.Namespace) -> int:
    from transformers.utils import logging

    logging.disable_progress_bar()
    made = prepared(args, load_generator(args.target))
    plan = made.plan
    header = header_of(plan.definition, command=_command(args), device=args.device)
    file = RowFile(args.out / ROWS, header, resume=args.resume)
    progress = Progress()
    try:
        gated(made, file, progress)
        if not args.no_memory:
            _memory(args, plan, made.folder, file, progress)
    finally:
        progress.end()
        run = read(file.path)
        if run.rows:
            _tell(run, args.out)
    return int(any(one.verdict == "BUG" for one in run.gates.values()))


@dataclass(frozen=True)
class Prepared:
    """All that a run needs, and nothing measured yet. plan, sides: of `bench.loop` and `bench.sides`. folder: of the
    model. ends: its end tokens."""

    plan: Any
    sides: Any
    folder: str
    ends: tuple[int, ...]


def prepared(args: argparse.Namespace, adapter: Any, items: Sequence[Any] = ()) -> Prepared:
    """args: as `add_options` has them. adapter: a target's, or None. items: prompts in tokens, for a model without a
    tokenizer; none are the workload's. ValueError for what cannot be measured."""
    import torch

    from specbench.bench.costs import CONTEXT
    from specbench.bench.loop import WARM_UP, Plan, with_later_turns
    from specbench.bench.sides import Sides
    from specbench.reference.decoder import Decoder
    from specbench.shipped import digest_of, trained_for
    from specbench.types import DTYPES

    model = models.fetched(str(args.model or getattr(adapter, "checkpoint", None) or models.DEFAULT_MODEL))
    if args.threads:
        torch.set_num_threads(args.threads)
    preset, has_plain = PRESETS[args.preset], callable(getattr(adapter, "with_drafter", None))
    trained = trained_for(model.path, args.trained)
    settings = settings_of(args, has_target=adapter is not None, has_plain_target=has_plain, trained=tuple(trained))
    ends: tuple[int, ...] = ()
    if not items and args.context:
        items, ends = _items_of_length(model.path, args.workload, args.prompts or preset.num_each, args.context)
    elif not items:
        items, ends = _items(model.path, args.workload, args.prompts or preset.num_each)
    if args.batch > 1 and adapter is not None:
        raise ValueError("--batch is our own decoder's: leave --target out")
    num_new = args.max_new_tokens or preset.max_new_tokens
    spare = max(num_new, WARM_UP, CONTEXT + max(_widths(args.batch)))
    sides = Sides(
        model.path,
        DTYPES[args.dtype],
        longest=max(len(one.tokens) for one in items) + spare,
        device=args.device,
        draft_model=args.draft_model,
        trained=trained,
        target=adapter,
    )
    if any(one.prompt is not None for one in items):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=False)
        items = with_later_turns(items, Decoder(sides.model), tokenizer, ends, num_new)
        sides.reserve(max(len(one.tokens) for one in items) + spare)
    if args.batch > 1:
        items = _in_batches(items, args.batch)
    plan = Plan(
        items=tuple(items),
        settings=tuple(_had(settings, sides, needed=bool(args.drafters))),
        weights=model.label,
        dtype=args.dtype,
        threads=torch.get_num_threads(),
        max_new_tokens=num_new,
        repetitions=args.repetitions or preset.repetitions,
        forward=str(getattr(sides.model, "name", "")),
        draft_model=args.draft_model,
        trained={kind: digest_of(folder) for kind, folder in trained.items()},
        target=args.target or "",
        device=args.device,
    )
    return Prepared(plan, sides, model.path, ends)


def _had(settings: Sequence[Setting], sides: Any, *, needed: bool) -> Iterator[Setting]:
    """The settings whose drafters can be had. needed: ValueError for one that cannot, instead of a note."""
    for one in settings:
        try:
            sides.check(one)
        except ValueError as error:
            if needed:
                raise
            print(f"specbench: {one.name} is left out: {error}", file=sys.stderr)
        else:
            yield one


def gated(made: Prepared, file: RowFile, progress: Progress) -> None:
    """Plain texts, the cost of a forward, every row, and a gate for every setting: what the file lacks of them."""
    from specbench.bench.costs import CONTEXT
    from specbench.bench.loop import measure, plain_texts
    from specbench.bench.sides import OwnSide

    plan, sides = made.plan, made.sides
    progress.say("plain texts, by which all are judged")
    plain = plain_texts(plan, OwnSide(sides.model, Setting("plain")).decoder, made.ends, file)
    is_sampled = any(one.temperature for one in plan.settings)
    sizes = {one.id: one.num_texts for one in plan.items}
    nums = {name: plan.max_new_tokens if is_sampled else len(one) // sizes[name] for name, one in plain.items()}
    if not any(one["kind"] == "cost" for one in file.records):
        seconds = sides.forward_seconds(_widths(plan.settings[0].batch))
        measured = {str(width): one for width, one in seconds.items()}
        file.append({"kind": "cost", "model": "own", "context": CONTEXT, "seconds": measured})
    measure(plan, sides.make, nums, file, tell=progress)
    _judge(plan, made.folder, plain, file, progress)


def load_generator(name: str | None) -> Any:
    """The adapter of a target that generates. ValueError for any other."""
    if name is None:
        return None
    from specbench.loading import TargetError, load_target

    try:
        adapter = load_target(name).adapter
    except TargetError as error:
        raise ValueError(str(error)) from None
    if not callable(getattr(adapter, "generate", None)):
        raise ValueError(f"target {name!r} has no generate(prompt, *, max_new_tokens, sampling, stop, seed) to measure")
    return adapter


def _items(folder: str, workload: str, num_each: int) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """So many prompts of each category of a workload, in the model's tokens as far as they are known yet: first turns;
    and its end tokens."""
    from transformers import AutoTokenizer

    from specbench.bench.loop import Item
    from specbench.workloads.chat import encode
    from specbench.workloads.load import load
    from specbench.workloads.workload import sample

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    found = load(workload)
    for note in found.notes:
        print(f"specbench: {note}", file=sys.stderr)
    chosen = sample(found, num_each).prompts
    ends = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    return tuple(
        Item(one.id, one.category, tuple(encode(one, tokenizer)), prompt=one if len(one.turns) > 1 else None)
        for one in chosen
    ), ends


def _items_of_length(
    folder: str, workload: str, num_each: int, lengths: Sequence[int]
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """So many prompts at each length, which is their category: of a workload's passages with a question where it has
    any, cut or filled in the middle with further passages. ValueError for a length that the model has no positions
    for."""
    from transformers import AutoConfig, AutoTokenizer

    from specbench.bench.loop import Item
    from specbench.prompts import encode_text
    from specbench.workloads.chat import encode, fitted
    from specbench.workloads.load import load
    from specbench.workloads.workload import sample

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    limit = getattr(AutoConfig.from_pretrained(folder, trust_remote_code=False), "max_position_embeddings", None)
    if limit is not None and max(lengths) >= limit:
        raise ValueError(f"--context {max(lengths)} must be < {limit}, the positions that the model has")
    found = load(workload)
    long = [one for one in found.prompts if one.category == LONG] or list(found.prompts)
    found = replace(found, prompts=tuple(long))
    chosen = sample(found, num_each).prompts
    items = []
    for length in lengths:
        for one in chosen:
            others = [other.turns[0] for other in found.prompts if other.id != one.id]
            filler = encode_text("\n\n".join(others), tokenizer) if others else []
            tokens = fitted(encode(one, tokenizer), length, filler)
            items.append(Item(f"{one.id} at {length}", f"{length} tokens", tokens))
    ends = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    return tuple(items), ends


def _command(args: argparse.Namespace) -> str:
    """As it was asked for, without where it was written and what was there already."""
    words = ["specbench", "bench", "--preset", args.preset]
    for folder in args.trained:
        words += ["--trained", folder]
    for name in ("model", "target", "draft_model", "threads", "prompts", "max_new_tokens", "repetitions"):
        if getattr(args, name):
            words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    if args.context:
        words += ["--context", ",".join(map(str, args.context))]
    if args.drafters:
        words += ["--drafters", ",".join(":".join(map(str, one)) for one in args.drafters)]
    given = {"workload": "specbench", "dtype": "bf16", "device": "cpu", "layout": "tree_mask", "temperature": 0.0}
    given["batch"] = 1
    for name, default in given.items():
        if getattr(args, name) != default:
            words += [f"--{name}", str(getattr(args, name))]
    return shlex.join(words)


def _in_batches(items: Sequence[Any], batch: int) -> tuple[Any, ...]:
    """So many neighbours each, every prompt once; what is left over is left out, and told."""
    groups = [items[start : start + batch] for start in range(0, len(items) - batch + 1, batch)]
    if not groups:
        raise ValueError(f"--batch {batch} needs as many prompts, there are {len(items)}: ask for more by --prompts")
    if left := len(items) % batch:
        print(f"specbench: {left} of {len(items)} prompts fill no batch of {batch} and are left out", file=sys.stderr)
    found = []
    for first, *others in groups:
        same = all(one.category == first.category for one in others)
        category = first.category if same else f"batch of {batch}"
        more = tuple((one.id, one.tokens) for one in others)
        found.append(replace(first, category=category, others=more))
    return tuple(found)


def _widths(batch: int) -> tuple[int, ...]:
    """Rows of the forwards whose cost is measured."""
    from specbench.bench.costs import WIDTHS

    more = [batch * width for width in BATCH_WIDTHS] if batch > 1 else []
    return tuple(sorted({*WIDTHS, *more}))


def _judge(plan: Any, folder: str, plain: dict[str, tuple[int, ...]], file: RowFile, progress: Progress) -> None:
    """A gate for each setting, held against plain decoding of its own stack, which is held against ours: where that is
    a BUG, against ours, and to the oracle."""
    from specbench.bench.verdicts import Judge
    from specbench.regret import Oracle
    from specbench.types import DTYPES

    dtype = DTYPES[plan.dtype]
    judge = Judge(plan.items, plain, oracle=lambda: Oracle(folder, weights=dtype), dtype=dtype)
    run = read(file.path)
    own_plain = {one.side: one.name for one in reversed(plan.settings) if one.is_plain}
    verdicts = {name: one.verdict for name, one in run.gates.items()}
    last = {one["setting"]: one["kind"] for one in file.records if one["kind"] in ("row", "gate")}
    for setting in plan.settings:
        if last.get(setting.name) == "gate":  # a run that goes on, and has no new row of it
            continue
        progress.say(f"judging {setting.name}")
        reference, name = dict(plain), own_plain.get(setting.side, "")
        is_right = verdicts.get(name) != "BUG"
        if not setting.is_plain and name and is_right:
            reference |= {one.prompt: one.tokens for one in run.of(name)}
        gate = judge.judge(setting, run.of(setting.name), reference, is_right=is_right)
        verdicts[setting.name] = gate.verdict
        file.append(gate.as_record())


def _memory(args: argparse.Namespace, plan: Any, folder: str, file: RowFile, progress: Progress) -> None:
    """Of every setting that the file lacks, on the longest prompt. A target's memory is its own process's affair."""
    from specbench.bench.memory import measured
    from specbench.shipped import trained_for

    known = {one["setting"] for one in file.records if one["kind"] == "memory"}
    item, trained = max(plan.items, key=lambda one: len(one.tokens)), trained_for(folder, args.trained)
    for setting in plan.settings:
        if setting.name in known or setting.side == "target":
            continue
        progress.say(f"memory of {setting.name}")
        record = measured(
            setting,
            folder=folder,
            dtype=plan.dtype,
            prompt=item.tokens,
            num=plan.max_new_tokens,
            threads=plan.threads,
            device=plan.device,
            draft_model=args.draft_model,
            trained=trained,
        )
        file.append(record)


def _tell(run: Run, folder: Path) -> None:
    from specbench.bench.summary import lines, summary_of
    from specbench.reports.report import write

    summary = summary_of(run)
    (folder / SUMMARY).write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print("\n".join(lines(summary)))
    print(f"\nrows and summary: {folder}{os.sep}{ROWS}, {SUMMARY}")
    print(f"page: {write([folder], folder / REPORT)}")


class Progress:
    """A line on stderr that is renewed, where that is a terminal; nothing in a log."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._begun: tuple[float, int] | None = None  # when, and with how many rows there already

    def __call__(self, done: int, total: int, what: str) -> None:
        if self._begun is None:
            self._begun = time.monotonic(), done
        spent, new = time.monotonic() - self._begun[0], done - self._begun[1]
        left = f", {(total - done) * spent / new / 60:.1f} min left" if new else ""
        self.say(f"{done}/{total} rows{left}: {what}")

    def say(self, text: str) -> None:
        if self._shown:
            sys.stderr.write(f"\r\x1b[K{text[:100]}")
            sys.stderr.flush()

    def end(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")


def compare(args: argparse.Namespace) -> int:
    """0: no regression is shown. 1: one is. 2: the runs cannot be compared."""
    from specbench.bench import summary

    try:
        runs = [read(one / ROWS if one.is_dir() else one) for one in (args.before, args.after)]
        changes = summary.compare(*runs, force=args.force)
    except (ValueError, OSError) as error:
        print(f"specbench: {error}", file=sys.stderr)
        return 2
    print("\n".join(summary.comparison_table(changes)))
    return int(any(one.is_regression for one in changes))


def add_diagnose_options(one: argparse.ArgumentParser) -> None:
    one.add_argument("folder", type=Path, metavar="DIR", help=f"a folder that bench wrote, or its {ROWS}")
    one.add_argument("--setting", metavar="NAME", help="one setting alone (default: every one that drafts)")


def diagnose(args: argparse.Namespace) -> int:
    """0: told. 2: there is nothing to be told of."""
    from specbench.bench import diagnosis

    try:
        found = diagnosis.diagnose(read(args.folder / ROWS if args.folder.is_dir() else args.folder))
        if args.setting is not None:
            names = [one.setting for one in found]
            if args.setting not in names:
                raise ValueError(models.unknown_name("setting", args.setting, names))
            found = [one for one in found if one.setting == args.setting]
    except (ValueError, OSError) as error:
        print(f"specbench: {error}", file=sys.stderr)
        return 2
    print("\n".join(diagnosis.told(found)))
    return 0
