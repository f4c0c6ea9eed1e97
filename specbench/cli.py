"""The command line: thin calls of pytest and of the library. Nothing is decided here, nothing heavy is imported early.

Exit codes: 0 done, 1 impossible (a sentence on stderr says why), 2 the command line was wrong, or an interrupt, after
which what was found so far is printed and written; `check` gives pytest's;
141, as a shell shows it, when the reader of the output has left.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import specbench
from specbench import bench_command, engine_command, models, plan_command, sampling_options, server_command
from specbench.profiles import PROFILES
from specbench.training import command as train_command

SUITE = "specbench.suites.consistency"
KERNEL_CLAIMS = "specbench.suites.kernels.test_target"  # level 4; without a target it has nothing to judge
READER_LEFT = 141  # 128 + SIGPIPE
INTERRUPTED = 2  # as pytest has it


def main(argv: Sequence[str] | None = None) -> int:
    try:
        try:
            return _main(argv)
        finally:
            sys.stdout.flush()  # here, and not while Python ends, where nobody could catch what it raises
    except BrokenPipeError:
        if not _reader_left():
            raise
        return READER_LEFT
    except KeyboardInterrupt:
        print("\nspecbench: interrupted", file=sys.stderr)
        return INTERRUPTED


def _reader_left() -> bool:
    """Whether stdout is the pipe that broke. What was still to be written there then goes nowhere."""
    try:
        print(flush=True)  # what failed to be written is not always kept, so that flushing alone may succeed
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return True
    return False


def _main(argv: Sequence[str] | None) -> int:
    args, pytest_args = _parser().parse_known_args(argv)
    if pytest_args and args.command != "check":
        args.parser.error(f"unrecognized arguments: {' '.join(pytest_args)}")
    try:
        return int(args.run(args, pytest_args))
    except models.ModelError as error:
        print(f"specbench: {error}", file=sys.stderr)
        return 1


def check(args: argparse.Namespace, pytest_args: list[str]) -> int:
    import pytest

    # `-p` names the plugin as its entry point does: loaded once when installed, loaded at all in a bare checkout.
    command = ["-p", "specbench.plugin", "--pyargs", SUITE]
    if args.target is not None:
        command += [KERNEL_CLAIMS, "--specbench-target", args.target]
    if args.replay is not None:
        command += ["--specbench-replay", args.replay]
    return int(pytest.main(command + pytest_args))


def soak(args: argparse.Namespace, pytest_args: list[str]) -> int:
    from specbench.loading import Target, TargetError, load_target
    from specbench.reference.target import ReferenceTarget
    from specbench.soak import soak as run

    try:
        target = load_target(args.target) if args.target else Target("reference", ReferenceTarget(), is_reference=True)
        return 1 if run(target, num_seeds=args.seeds, first_seed=args.first_seed) else 0
    except TargetError as error:
        print(f"specbench: {error}", file=sys.stderr)
        return 2


def faults(args: argparse.Namespace, pytest_args: list[str]) -> int:
    from datetime import datetime, timezone

    from specbench import fault_report, fault_run

    if args.list and args.json is not None:
        args.parser.error("--json needs a run, and --list makes none")
    try:
        today = datetime.now(timezone.utc).date()
        part = None if args.part is None else fault_run.part_named(args.part, today=today)
        chosen = fault_run.choose(args.ids, part)
        _open_once(args.json, args.markdown)
    except (ValueError, OSError) as error:
        return _refused(error)
    if args.list:
        print(fault_report.listing(chosen))
        if args.markdown is not None:
            fault_report.renew(args.markdown)
        return 0
    words = [*args.ids, *([] if part is None else ["--part", f"{part[0]}/{part[1]}"]), "--seed", str(args.seed)]
    command = shlex.join(["specbench", "faults", *words])
    print(f"{len(chosen)} faults: {command}", flush=True)
    num_workers = args.workers or fault_run.default_workers()
    run = fault_report.report(chosen, seed=args.seed, num_workers=num_workers, command=command)
    if args.json is not None:
        args.json.write_text(fault_report.as_json(run), encoding="utf-8")
    if args.markdown is not None:
        args.markdown.write_text(fault_report.page(run), encoding="utf-8")
    return int(not run.is_good) if run.is_whole else INTERRUPTED


def controls(args: argparse.Namespace, pytest_args: list[str]) -> int:
    from specbench import control_run, fault_run
    from specbench.loading import TargetError

    names = {one: control_run.NAMES.get(one, one) for one in args.targets} or control_run.NAMES
    num_workers = args.workers or fault_run.default_workers()
    try:
        _open_once(args.json)
        num_accusations = control_run.run(
            names, num_cases=args.cases, num_workers=num_workers, seed=args.seed, json_path=args.json
        )
    except (TargetError, OSError) as error:
        return _refused(error)
    return 1 if num_accusations else 0


def law(args: argparse.Namespace, pytest_args: list[str]) -> int:
    from specbench.law import survey

    if args.lossiness and (args.rules or args.json or args.markdown):
        args.parser.error("--lossiness draws every lossy rule, and takes no RULE, --json or --markdown")
    for file in args.lossiness:
        if file.suffix not in (".png", ".json"):
            args.parser.error(f"--lossiness {file} must end in .png or .json")
    try:
        rules = survey.rules_named(args.rules)
        _open_once(args.json, args.markdown, *args.lossiness)
    except (ValueError, OSError) as error:
        return _refused(error)
    if args.lossiness:
        return _lossiness(args)
    num_models = args.models or survey.NUM_MODELS
    command = shlex.join(["specbench", "law", *args.rules, "--seed", str(args.seed), "--models", str(num_models)])
    done = survey.survey(rules, seed=args.seed, num_models=num_models, tell=lambda line: print(line, flush=True))
    print("", survey.summary(done), sep="\n")
    if args.json is not None:
        args.json.write_text(survey.as_json(done, command=command), encoding="utf-8")
    if args.markdown is not None:
        args.markdown.write_text(survey.as_markdown(done), encoding="utf-8")
    return int(not done.is_good) if done.is_whole else INTERRUPTED


def _lossiness(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from specbench.law import lossiness
    from specbench.reports.lossiness import figure

    num_models = args.models or lossiness.NUM_MODELS
    command = shlex.join(["specbench", "law", "--seed", str(args.seed), "--models", str(num_models)])
    drawn = []
    for curve in lossiness.curves(seed=args.seed, num_models=num_models):
        print(lossiness.table(curve), flush=True)
        drawn.append(curve)
    for file in args.lossiness:
        if file.suffix == ".json":
            file.write_text(lossiness.as_json(drawn, command=f"{command} --lossiness FILE.json"), encoding="utf-8")
        else:
            title = f"{lossiness.DRAFTS}; means of {num_models} models"
            figure([asdict(curve) for curve in drawn], title=title).savefig(file, dpi=150)
    return 0


def _open_once(*files: Path | None) -> None:
    """Whether they can be written is told now, and not when all is computed."""
    named = [file for file in files if file is not None]
    for file in named:
        file.open("a").close()
    if len({file.resolve() for file in named}) < len(named):
        raise ValueError(f"{named[-1]} is named twice: one report would overwrite the other")


def _refused(error: ValueError | OSError) -> int:
    said = f"cannot write {error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
    print(f"specbench: {said}", file=sys.stderr)
    return 2


def claims(args: argparse.Namespace, pytest_args: list[str]) -> int:
    from specbench import claim_list

    print({"markdown": claim_list.as_markdown, "json": claim_list.as_json}.get(args.form, claim_list.as_text)())
    return 0


def architectures(args: argparse.Namespace, pytest_args: list[str]) -> int:
    from specbench.architectures import survey, table

    findings = survey()
    print(table(findings, markdown=args.markdown))
    return int(any(one.verdict == "wrong" for one in findings))


def model_fetch(args: argparse.Namespace, pytest_args: list[str]) -> int:
    models.fetch(args.name, force=args.force)
    return 0


def model_path(args: argparse.Namespace, pytest_args: list[str]) -> int:
    print(models.fetched(args.name).path)
    return 0


def sentinel_export(args: argparse.Namespace, pytest_args: list[str]) -> int:
    from specbench.reference import sentinel

    try:
        program = sentinel.Program.seeded(args.seed, receptive_field=args.receptive_field)
        target = sentinel.Sentinel(program, args.variant, args.law)
        drafter = None if args.drafter_agreement is None else program.drafter(args.drafter_agreement, seed=args.seed)
        if drafter is not None and args.law:
            drafter = drafter.with_cut_laws()
        if args.gguf is not None:
            sentinel.check_gguf(target, args.gguf)  # before anything is written
        print(f"{sentinel.export(target, args.folder, dtype=args.dtype)}: {target.described}, {args.dtype}")
        if args.gguf is not None:
            print(sentinel.export_gguf(target, args.folder / "sentinel.gguf", kind=args.gguf))
        if drafter is not None:
            twin = sentinel.Sentinel(drafter, args.variant, args.law)
            where = sentinel.export(twin, args.folder / "drafter", dtype=args.dtype)
            print(f"{where}: its drafter, the same next token after {drafter.agreement_with(program)} of contexts")
            if args.gguf is not None:
                print(sentinel.export_gguf(twin, where / "sentinel.gguf", kind=args.gguf))
    except (ValueError, OSError) as error:
        return _refused(error)
    return 0


def sentinel_prompts(args: argparse.Namespace, pytest_args: list[str]) -> int:
    from specbench import audit
    from specbench.reference import sentinel

    try:
        program, symbols = sentinel.load_program(args.folder), sentinel.SYMBOLS
        if not 0 <= args.seed < 2**63:
            raise ValueError(f"--seed {args.seed} must be between 0 and 2^63 - 1")
    except (ValueError, OSError) as error:
        return _refused(error)
    for one in audit.requests_for(program, symbols, max_new_tokens=args.max_new_tokens, seed=args.seed):
        print(one.as_line())
    return 0


def sentinel_audit(args: argparse.Namespace, pytest_args: list[str]) -> int:
    from specbench import audit
    from specbench.record import BUG
    from specbench.reference import sentinel

    try:
        program = sentinel.load_program(args.folder)
        outputs = audit.read_outputs(args.outputs, sentinel.SYMBOLS)
        sampling = sampling_options.sampling_of(args)
        if sampling.temperature and not sentinel.has_law(args.folder):
            raise ValueError(f"{args.folder} has no law to draw from: export one with --law, or audit at temperature 0")
        audits = audit.audit_outputs(program, outputs, sampling)
        if args.json:
            text = json.dumps({"schema": 1, "audits": [one.as_fields() for one in audits]}, indent=2) + "\n"
            args.json.write_text(text, encoding="utf-8")
    except (ValueError, OSError) as error:
        return _refused(error)
    width = max(len(one.mode) for one in audits)
    for one in audits:
        print(f"{one.mode:{width}}{'  ' * bool(width)}{one.verdict:10}  {one.sentence}")
    return int(any(one.verdict == BUG for one in audits))


def engines(args: argparse.Namespace, pytest_args: list[str]) -> int:
    return engine_command.run(args)


def server(args: argparse.Namespace, pytest_args: list[str]) -> int:
    return server_command.run(args)


def drafters(args: argparse.Namespace, pytest_args: list[str]) -> int:
    from specbench.drafters import run as drafter_run
    from specbench.record import BUG

    found, is_whole = [], True
    try:
        _open_once(args.markdown)
        target = None if args.model == "none" else models.fetched(args.model)
        profile = None if args.no_claims else PROFILES[args.profile]
        for one in drafter_run.run_drafters(
            args.names or None,
            target_folder=None if target is None else target.path,
            max_new_tokens=args.max_new_tokens,
            profile=profile,
            seed=args.seed,
            tell=lambda line: print(line, flush=True),
        ):
            found.append(one)
    except KeyboardInterrupt:
        is_whole = False
    except (ValueError, OSError) as error:
        return _refused(error)
    if args.markdown:
        words = ["specbench", "drafters", *args.names]
        args.markdown.write_text(drafter_run.page(found, shlex.join(words)), encoding="utf-8")
    return int(any(BUG in one.verdicts.values() for one in found)) if is_whole else INTERRUPTED


def exits(args: argparse.Namespace, pytest_args: list[str]) -> int:
    from specbench import exits as study
    from specbench.types import DTYPES

    try:
        _open_once(args.markdown)
        found = study.survey(
            models.fetched(args.model).path,
            dtype=DTYPES[args.dtype],
            num_each=args.prompts,
            max_new_tokens=args.max_new_tokens,
            tell=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except (ValueError, OSError) as error:
        return _refused(error)
    text = f"{study.table(found)}\n\n{study.DEFINITIONS}\n"
    print(text, end="")
    if args.markdown is not None:
        args.markdown.write_text(text, encoding="utf-8")
    return 0


def workload(args: argparse.Namespace, pytest_args: list[str]) -> int:
    from specbench.sanitize import plain
    from specbench.workloads import listing, load
    from specbench.workloads.workload import sample

    try:
        found = load.load(args.name, layout=args.layout, config=args.config, split=args.split)
        found = found if args.sample is None else sample(found, args.sample, seed=args.seed)
        text = listing.listing(found, None if args.tokenizer is None else listing.tokenizer_in(args.tokenizer))
    except ValueError as error:  # it may repeat what stands in a stranger's file
        return _refused(ValueError(plain(str(error), 2000, one_line=True)))
    print(text)
    return 0


def train_drafter(args: argparse.Namespace, pytest_args: list[str]) -> int:
    try:
        return train_command.run(args, shlex.join(["specbench", *sys.argv[1:]]))
    except (ValueError, OSError) as error:
        return _refused(error)


def bench(args: argparse.Namespace, pytest_args: list[str]) -> int:
    return bench_command.bench(args)


def compare(args: argparse.Namespace, pytest_args: list[str]) -> int:
    return bench_command.compare(args)


def diagnose(args: argparse.Namespace, pytest_args: list[str]) -> int:
    return bench_command.diagnose(args)


def plan(args: argparse.Namespace, pytest_args: list[str]) -> int:
    return plan_command.plan(args)


def report(args: argparse.Namespace, pytest_args: list[str]) -> int:
    from specbench.reports.report import write

    try:
        print(write(args.files, args.out))
    except (ValueError, OSError) as error:
        return _refused(error)
    return 0


def usage(args: argparse.Namespace, pytest_args: list[str]) -> int:
    args.parser.print_help()
    return 2


class _Parser(argparse.ArgumentParser):
    """argparse, but an unknown word answers with near matches (STYLE 22) in every supported Python."""

    def _check_value(self, action: argparse.Action, value: str) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(None, models.unknown_name("command", value, action.choices))

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of at least 1")
    return int(text)


def _parser() -> _Parser:
    parser = _Parser(prog="specbench", description="Is your speculative decoder right?", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"specbench {specbench.__version__}")
    parser.set_defaults(run=usage, parser=parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    one = commands.add_parser("check", help="judge a target; further arguments go to pytest", allow_abbrev=False)
    one.add_argument(
        "target", nargs="?", metavar="TARGET", help="pkg.mod:attr or ./file.py:attr; none: the reference decoder"
    )
    one.add_argument(
        "--replay", metavar="STRING_OR_FILE", help="a failure's replay string or case file: run that case alone"
    )
    one.set_defaults(run=check, parser=one)

    one = commands.add_parser("soak", help="the quick cases again and again, each time with another seed")
    one.add_argument("target", nargs="?", metavar="TARGET", help="as for check; none: the reference decoder")
    one.add_argument("--seeds", type=int, default=100, metavar="N", help="how many (default 100)")
    one.add_argument("--first-seed", type=int, metavar="SEED", help="count up from this one instead of drawing them")
    one.set_defaults(run=soak, parser=one)

    one = commands.add_parser(
        "faults",
        help="judge the planted faults: which claim catches each, how fast, and what it is taken for",
        allow_abbrev=False,
    )
    one.add_argument("ids", nargs="*", metavar="ID", help="planted faults; none: all of them")
    one.add_argument("--part", metavar="N/M", help="every M-th of them from the N-th on; auto: another fifth every day")
    one.add_argument(
        "--seed", type=int, default=7, metavar="SEED", help="of the cases that are drawn (default 7, as docs/faults.md)"
    )
    one.add_argument("--workers", type=_count, metavar="N", help="processes (default: one a core)")
    one.add_argument("--json", type=Path, metavar="FILE", help="write all of it as JSON")
    one.add_argument("--markdown", type=Path, metavar="FILE", help="write the catalogue and what was measured")
    one.add_argument("--list", action="store_true", help="judge none: list them, and renew the catalogue in --markdown")
    one.set_defaults(run=faults, parser=one)

    one = commands.add_parser(
        "controls",
        help="judge right decoders that do unusual things: none of them may be accused",
        allow_abbrev=False,
    )
    one.add_argument("targets", nargs="*", metavar="TARGET", help="as for check, right ones; none: our controls")
    one.add_argument("--cases", type=_count, default=20_000, metavar="N", help="in all (default 20,000)")
    one.add_argument("--seed", type=int, metavar="SEED", help="of the cases; drawn and printed unless given")
    one.add_argument("--workers", type=_count, metavar="N", help="processes (default: one a core)")
    one.add_argument("--json", type=Path, metavar="FILE", help="write the counts and every accusation as JSON")
    one.set_defaults(run=controls, parser=one)

    one = commands.add_parser(
        "law",
        help="the exact law of every acceptance rule: lossless or not, what it accepts, and the optimum",
        allow_abbrev=False,
    )
    one.add_argument("rules", nargs="*", metavar="RULE", help="acceptance rules; none: all of them")
    one.add_argument("--seed", type=int, default=0, metavar="SEED", help="of the first toy model (default 0)")
    one.add_argument("--models", type=_count, metavar="N", help="toy models a vocabulary (default: about a minute's)")
    one.add_argument("--json", type=Path, metavar="FILE", help="write every case with its fractions as JSON")
    one.add_argument("--markdown", type=Path, metavar="FILE", help="write the table as Markdown")
    one.add_argument(
        "--lossiness",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="instead: what lossy rules gain and lose over their parameters, drawn (.png) or as data (.json)",
    )
    one.set_defaults(run=law, parser=one)

    one = commands.add_parser("claims", help="list the claims: id, level, MUST sentence, needs", allow_abbrev=False)
    form = one.add_mutually_exclusive_group()
    form.add_argument("--markdown", dest="form", action="store_const", const="markdown", help="as a Markdown table")
    form.add_argument("--json", dest="form", action="store_const", const="json", help="as JSON")
    one.set_defaults(run=claims, parser=one)

    one = commands.add_parser(
        "architectures",
        help="run every tiny transformers model: which hold, which are refused, why",
        allow_abbrev=False,
    )
    one.add_argument("--markdown", action="store_true", help="as a Markdown table")
    one.set_defaults(run=architectures, parser=one)

    model = commands.add_parser("model", help="real models: fetch one, or say where it is", allow_abbrev=False)
    model.set_defaults(run=usage, parser=model)
    actions = model.add_subparsers(dest="action", metavar="ACTION")
    one = actions.add_parser("fetch", help="download a known model once into the cache", allow_abbrev=False)
    one.add_argument("name", metavar="NAME", help=f"one of: {', '.join(models.MODELS)}")
    one.add_argument("--force", action="store_true", help="fetch again even when it is there")
    one.set_defaults(run=model_fetch, parser=one)
    one = actions.add_parser("path", help="print the folder of a fetched model", allow_abbrev=False)
    one.add_argument("name", metavar="NAME", help=f"a folder, or one of: {', '.join(models.MODELS)}")
    one.set_defaults(run=model_path, parser=one)

    model = commands.add_parser("sentinel", help="checkpoints whose next token is exactly known", allow_abbrev=False)
    model.set_defaults(run=usage, parser=model)
    actions = model.add_subparsers(dest="action", metavar="ACTION")
    one = actions.add_parser("export", help="write one as a folder that transformers loads", allow_abbrev=False)
    one.add_argument("folder", type=Path, metavar="DIR", help="a new or empty folder")
    one.add_argument(
        "--receptive-field", type=_count, default=64, metavar="N", help="tokens that decide: 64 (default), 256, 2^n"
    )
    one.add_argument("--dtype", default="bf16", metavar="DTYPE", help="bf16 (default), fp16 or fp32")
    one.add_argument(
        "--variant", default="llama", metavar="NAME", help="llama (default), gqa, tied, window, qwen2 or gemma"
    )
    one.add_argument("--seed", type=int, default=0, metavar="SEED", help="of the program (default 0)")
    one.add_argument("--law", action="store_true", help="logits of a known law, instead of 10 for the next token")
    one.add_argument(
        "--drafter-agreement", type=float, metavar="X", help="a drafter too, in DIR/drafter, that agrees on this share"
    )
    one.add_argument(
        "--gguf", metavar="KIND", help="DIR/sentinel.gguf too: f32, f16, bf16, q8_0 or q4_0 (llama, gqa and tied)"
    )
    one.set_defaults(run=sentinel_export, parser=one)
    one = actions.add_parser("prompts", help="what to ask an engine, as JSON lines", allow_abbrev=False)
    one.add_argument("folder", type=Path, metavar="DIR", help="a folder that export has written")
    one.add_argument("--max-new-tokens", type=_count, default=200, metavar="N", help="of each request (default 200)")
    one.add_argument("--seed", type=int, default=0, metavar="SEED", help="of the prompts (default 0)")
    one.set_defaults(run=sentinel_prompts, parser=one)
    one = actions.add_parser("audit", help="judge an engine by the tokens that it said", allow_abbrev=False)
    one.add_argument("folder", type=Path, metavar="DIR", help="the folder whose model the engine ran")
    one.add_argument("outputs", type=Path, metavar="FILE", help="JSON lines: prompt and output, in ids or in text")
    greedy, others = "of the engine (default 0: greedy)", "of the engine, at a temperature"
    sampling_options.add(one, _count, temperature=greedy, others=others)
    one.add_argument("--json", type=Path, metavar="FILE", help="the verdicts as data")
    one.set_defaults(run=sentinel_audit, parser=one)

    one = commands.add_parser("engines", help="engines that others wrote, on a sentinel", allow_abbrev=False)
    engine_command.add_options(one, _count)
    one.set_defaults(run=engines, parser=one)

    one = commands.add_parser("server", help="a running server, on a sentinel or a real model", allow_abbrev=False)
    server_command.add_options(one, _count)
    one.set_defaults(run=server, parser=one)

    one = commands.add_parser("drafters", help="drafters that others wrote", allow_abbrev=False)
    one.add_argument("names", nargs="*", metavar="NAME", help="of the drafter; none: all of them")
    one.add_argument(
        "--model", default="smollm2", metavar="MODEL", help="acceptance is measured on (default smollm2), or none"
    )
    one.add_argument("--profile", choices=PROFILES, default="standard", help="of the claims (default standard)")
    one.add_argument("--no-claims", action="store_true", help="measure acceptance alone")
    one.add_argument("--max-new-tokens", type=_count, default=24, metavar="N", help="of each text (default 24)")
    one.add_argument("--seed", type=int, default=0, metavar="SEED", help="of the claims (default 0)")
    one.add_argument("--markdown", type=Path, metavar="FILE", help="the results as a page: docs/drafters.md")
    one.set_defaults(run=drafters, parser=one)

    one = commands.add_parser("exits", help="how often each layer already says what the last one says")
    one.add_argument(
        "model", nargs="?", default="smollm2", metavar="MODEL", help="a name, folder or hub id (default smollm2)"
    )
    one.add_argument("--prompts", type=_count, default=2, metavar="N", help="of each category (default 2)")
    one.add_argument("--max-new-tokens", type=_count, default=32, metavar="N", help="of each answer (default 32)")
    one.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="of weights (default fp32)")
    one.add_argument("--markdown", type=Path, metavar="FILE", help="write the table as Markdown")
    one.set_defaults(run=exits, parser=one)

    one = commands.add_parser("workload", help="prompts to measure on: categories, how many, how long")
    one.add_argument(
        "name", nargs="?", default="specbench", metavar="NAME", help="ours (default), a known one, a file, or a hub id"
    )
    one.add_argument("--layout", metavar="LAYOUT", help="of the file; none: told by its columns")
    one.add_argument("--config", metavar="CONFIG", help="of a hub id or folder that has several")
    one.add_argument("--split", metavar="SPLIT", help="of a hub id or folder that has several")
    one.add_argument("--sample", type=_count, metavar="N", help="so many prompts of each category")
    one.add_argument("--seed", type=int, default=0, metavar="SEED", help="of the sample (default 0)")
    one.add_argument("--tokenizer", metavar="MODEL", help="smollm2 or a folder: lengths in its tokens")
    one.set_defaults(run=workload, parser=one)
    one = commands.add_parser(
        "train-drafter", help="train a drafter on what a target itself writes", allow_abbrev=False
    )
    train_command.add_options(one, _count)
    one.set_defaults(run=train_drafter, parser=one)

    one = commands.add_parser("bench", help="speed-up, acceptance and memory, once the output is proved right")
    bench_command.add_options(one, _count)
    one.set_defaults(run=bench, parser=one)

    one = commands.add_parser("compare", help="two runs of bench: exit code 1 where one setting became slower")
    bench_command.add_compare_options(one)
    one.set_defaults(run=compare, parser=one)

    one = commands.add_parser("diagnose", help="why a setting of a run of bench is not faster, with the numbers")
    bench_command.add_diagnose_options(one)
    one.set_defaults(run=diagnose, parser=one)

    one = commands.add_parser("plan", help="peak memory before it is run: does it fit, and which tree does")
    plan_command.add_options(one, _count)
    one.set_defaults(run=plan, parser=one)

    one = commands.add_parser("report", help="recorded runs as a page, figures, CSV and Markdown", allow_abbrev=False)
    one.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="rows of a benchmark, or of several runs; --json of `engines`; --lossiness of `law`; a check's record",
    )
    one.add_argument(
        "--out",
        type=Path,
        default=Path("specbench-report"),
        metavar="DIR",
        help="a new folder, or an earlier report's (default specbench-report)",
    )
    one.set_defaults(run=report, parser=one)
    return parser


if __name__ == "__main__":
    sys.exit(main())
