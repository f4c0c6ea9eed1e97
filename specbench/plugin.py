"""The pytest plugin: options, profiles, the `judge` fixture, the verdict table, JSON, exit codes.

It is loaded in every pytest run of an environment that has specbench, so it must cost nothing and change nothing there:
torch is imported only when a suite asks for the run session.
"""

from __future__ import annotations

import difflib
import fnmatch
import importlib.util
import math
import os
import random
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from specbench.annotations import MODES, wanted
from specbench.bench import ONE_AFTER_THE_OTHER
from specbench.case_files import is_case_file, read_case_file
from specbench.claims import CLAIMS, KERNEL_CLAIMS, KERNEL_COLUMN
from specbench.exit_codes import FAILED
from specbench.gate import Gate
from specbench.ledger import Ledger, load_ledger
from specbench.models import DEFAULT_MODEL, unknown_name
from specbench.profiles import PROFILES, profile_named
from specbench.record import BUG, NOT_TESTED, RunRecord, footer, table
from specbench.redact import Redactor
from specbench.sanitize import plain
from specbench.watchdog import EXIT_HUNG, Watchdog

if TYPE_CHECKING:
    from specbench.isolation import IsolatedSession
    from specbench.judge import RunSession

SESSION = pytest.StashKey["RunSession | IsolatedSession"]()
REQUIRED = pytest.StashKey["list[str]"]()
PROBLEM = pytest.StashKey[str]()
GATE = pytest.StashKey[Gate]()
REPLAY = pytest.StashKey[str]()  # the replay string, empty without one
REPLAY_SEED = pytest.StashKey["int | None"]()  # the seed that a case file names

BENCHMARKS = "specbench.suites.benchmark"
MAX_CAPTURED = 20_000  # characters of what a target printed or of a message it had a part in, and of one sentence
MAX_SENTENCE = 2_000
USUAL_MEMORY = 16.0  # GiB
MAX_MEMORY = 2**30  # GiB; a system counts bytes in 63 bits


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("specbench", "specbench: conformance of speculative decoders")
    group.addoption(
        "--specbench-target",
        metavar="TARGET",
        help="package.module:attribute, ./file.py:attribute, or 'cmd: COMMAND' for an engine that speaks JSON lines",
    )
    group.addoption(
        "--specbench-python",
        metavar="PYTHON",
        help="run the target in this interpreter, of another environment for instance, and talk to it in JSON lines",
    )
    group.addoption(
        "--specbench-model",
        metavar="NAME_OR_PATH",
        default=DEFAULT_MODEL,
        help="real model to judge on: a fetched name, a folder, a hub id (safetensors only), or none",
    )
    group.addoption("--specbench-device", metavar="DEVICE", default="cpu", help="cpu (default) or cuda")
    group.addoption(
        "--specbench-timeout",
        metavar="SECONDS",
        type=float,
        default=300.0,
        help="longest that one call of the target may take; 0 for no limit",
    )
    group.addoption(
        "--specbench-isolate",
        action="store_true",
        help="run the target in its own process: one that hangs, exits or crashes fails its claim, and the run goes on",
    )
    group.addoption(
        "--specbench-memory",
        metavar="GIB",
        type=float,
        help="with --specbench-isolate, what the target's process may allocate (default 16); 0 for no limit",
    )
    group.addoption(
        "--specbench-replay",
        metavar="STRING_OR_FILE",
        help="run the one case that a failure printed, or its case file (.json)",
    )
    group.addoption(
        "--specbench-require",
        metavar="CLAIMS_OR_LEVEL",
        help="claim ids (globs allowed) or levels, comma-separated, for which NOT TESTED fails",
    )
    group.addoption(
        "--specbench-json",
        metavar="FILE",
        default=".specbench/report.json",
        help="where the run record goes (default .specbench/report.json)",
    )
    group.addoption("--specbench-ledger", metavar="FILE", help="known failures, each with its issue (JSON)")
    group.addoption(
        "--specbench-cases",
        metavar="DIR",
        help="where the cases of failures go (default: cases, beside the run record)",
    )
    group.addoption(
        "--specbench-summary",
        metavar="FILE",
        help="append a Markdown summary (default: $GITHUB_STEP_SUMMARY where it is set)",
    )
    group.addoption(
        "--specbench-annotations",
        choices=MODES,
        default="auto",
        help="print GitHub's ::error lines: auto (in a GitHub workflow), on or off",
    )
    group.addoption(
        "--specbench-redact",
        action="store_true",
        help="write no prompt, token id or word of the target anywhere: short pseudonyms stand for them",
    )
    group.addoption(
        "--benchmark",
        action="store_true",
        dest="specbench_benchmark",
        help="run the benchmark suite and nothing else: `pytest suites/benchmark --benchmark-only` from anywhere",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "claim(id): the specbench claim that a test judges")
    _register_profiles()
    _check_profile(config)
    _check_limits(config)
    _name_the_target(config)
    _choose_benchmarks(config)
    config.stash[REQUIRED] = _required_claims(config.getoption("--specbench-require"))
    try:
        config.stash[REPLAY], config.stash[REPLAY_SEED] = _replay(config)
        config.stash[GATE] = _gate(config)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


def _replay(config: pytest.Config) -> tuple[str, int | None]:
    """The replay string, from a case file if one is named, and that file's seed."""
    text = config.getoption("--specbench-replay") or ""
    if not is_case_file(text):
        return text, None
    case = read_case_file(Path(config.invocation_params.dir) / text, name=text)
    return case.replay, case.seed


def _gate(config: pytest.Config) -> Gate:
    """ValueError when an option is wrong."""
    folder = Path(config.invocation_params.dir)
    ledger = config.getoption("--specbench-ledger")
    cases = config.getoption("--specbench-cases")
    redact = config.getoption("--specbench-redact")
    summary = config.getoption("--specbench-summary") or os.environ.get("GITHUB_STEP_SUMMARY")
    model = config.getoption("--specbench-model")
    if redact:
        if config.option.capture not in ("fd", "sys"):
            raise ValueError("--specbench-redact cannot hide what the target prints itself: leave -s and --capture out")
        # What a target prints, logs or warns of may hold prompts; pytest would show it below a failure.
        config.option.showcapture = "no"
        config.option.disable_warnings = True
    usual = None if redact else _json_path(config).parent / "cases"
    return Gate(
        folder=folder,
        ledger=load_ledger(folder / ledger, name=ledger) if ledger else Ledger(),
        redactor=Redactor() if redact else None,
        cases=folder / cases if cases else usual,
        summary=folder / summary if summary else None,
        annotate=wanted(config.getoption("--specbench-annotations"), os.environ),
        replaying=bool(config.stash[REPLAY]),
        model="" if model == DEFAULT_MODEL else model,
    )


def _name_the_target(config: pytest.Config) -> None:
    """With --specbench-python the target is a command, and called so wherever its name is shown or passed on."""
    python, name = config.getoption("--specbench-python"), config.getoption("--specbench-target")
    if not python:
        return
    if not name:
        raise pytest.UsageError("--specbench-python needs --specbench-target: what to run in that interpreter")
    from specbench.loading import through_shim

    try:
        config.option.specbench_target = through_shim(python, name)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


def _choose_benchmarks(config: pytest.Config) -> None:
    """--benchmark: the suite stands in for paths that were not named, wherever pytest was started."""
    if not config.getoption("specbench_benchmark"):
        return
    if config.getoption("numprocesses", None) or config.getoption("dist", "no") != "no":
        raise pytest.UsageError(ONE_AFTER_THE_OTHER)
    if not config.pluginmanager.has_plugin("benchmark"):
        raise pytest.UsageError("--benchmark needs pytest-benchmark: leave out -p no:benchmark")
    if config.args_source != pytest.Config.ArgsSource.ARGS:
        spec = importlib.util.find_spec(BENCHMARKS)
        assert spec is not None and spec.submodule_search_locations
        config.args[:] = [str(spec.submodule_search_locations[0])]
        config.args_source = pytest.Config.ArgsSource.ARGS
    config.option.benchmark_only = True  # pytest-benchmark looks at it when it is configured, which is after us


def _register_profiles() -> None:
    """Known to Hypothesis before its own plugin looks --hypothesis-profile up."""
    from hypothesis import settings

    for one in PROFILES.values():
        # Hypothesis switches derandomize on and the database off where CI is set; we say both ourselves.
        settings.register_profile(one.name, max_examples=one.max_examples, derandomize=False, database=None)


def _check_profile(config: pytest.Config) -> None:
    """Hypothesis would end the run with a traceback when it does not know --hypothesis-profile."""
    from hypothesis import settings
    from hypothesis.errors import InvalidArgument

    name = config.getoption("hypothesis_profile", None)
    hooks = config.hook.pytest_configure.get_hookimpls()
    if not name or any(os.path.basename(one.plugin_name) == "conftest.py" for one in hooks):
        return  # a conftest's own pytest_configure comes after ours and may still register it
    try:
        settings.get_profile(name)
    except InvalidArgument as error:
        known = dict.fromkeys([*PROFILES, *getattr(settings, "_profiles", ())])  # Hypothesis has no public list
        raise pytest.UsageError(f"--hypothesis-profile: {unknown_name('profile', name, known)}") from error


def _check_limits(config: pytest.Config) -> None:
    timeout, memory = config.getoption("--specbench-timeout"), config.getoption("--specbench-memory")
    if not 0 <= timeout < math.inf:
        raise pytest.UsageError(f"--specbench-timeout {timeout:g} must be >= 0 and finite (seconds; 0 for no limit)")
    if memory is None:
        return
    if not 0 <= memory < MAX_MEMORY:
        raise pytest.UsageError(f"--specbench-memory {memory:g} must be >= 0 and < 2**30 (GiB; 0 for no limit)")
    if not config.getoption("--specbench-isolate"):
        raise pytest.UsageError("--specbench-memory needs --specbench-isolate: it limits the target's own process")


def _required_claims(text: str | None) -> list[str]:
    if text is None:
        return []
    words = [one.strip() for one in text.split(",") if one.strip()]
    if not words:
        raise pytest.UsageError("--specbench-require is empty: it must name claims (globs allowed) or levels")
    required: list[str] = []
    for word in words:
        if word.isdigit():
            found = [claim.id for claim in CLAIMS.values() if claim.level == int(word)]
        else:
            found = fnmatch.filter(CLAIMS, word)
        if not found:
            near = difflib.get_close_matches(word, CLAIMS, n=3, cutoff=0.75)
            levels = sorted({claim.level for claim in CLAIMS.values()})
            hint = f"did you mean {' or '.join(near)}?" if near else f"claims: {', '.join(CLAIMS)}; levels: {levels}"
            raise pytest.UsageError(f"--specbench-require: no claim or level {word!r}; {hint}")
        required += found
    return required


def run_session(config: pytest.Config) -> RunSession | IsolatedSession:
    """The run's session, made on first use: only a suite needs torch and models."""
    if SESSION in config.stash:
        return config.stash[SESSION]
    if hasattr(config, "workerinput"):
        raise pytest.UsageError("the claims are judged in one process, whose table they share: leave out xdist's -n")
    from specbench.claims import Misbehaviour
    from specbench.judge import parse_replay

    name = config.getoption("--specbench-target")
    try:
        if replay := config.stash[REPLAY]:
            parse_replay(replay)
        session = _isolated(config, name) if config.getoption("--specbench-isolate") else _in_process(config, name)
        config.stash[SESSION] = session
        config.stash[GATE].ledger.check_subjects(list(session.subjects))
        config.stash[GATE].hide(session.run)
    except ValueError as error:
        raise _unusable(config, str(error)) from error
    except Misbehaviour as error:  # a target with its own model is asked for a first row of logits
        raise _unusable(config, f"target {name!r}: {error}") from error
    except SystemExit as error:
        raise _unusable(config, f"target {name!r}: SystemExit while it was loaded: {error}") from error
    except OSError as error:  # transformers' word for a checkpoint that it cannot read or reach
        sentence = f"the model cannot be loaded: {str(error).strip().splitlines()[0]}"
        raise _unusable(config, sentence) from error
    return session


def _in_process(config: pytest.Config, name: str | None) -> RunSession:
    from specbench.judge import RunSession
    from specbench.loading import COMMAND_PREFIX, Target, load_target
    from specbench.reference.target import ReferenceTarget

    timeout = config.getoption("--specbench-timeout")
    target = Target("specbench.reference", ReferenceTarget(), is_reference=True)
    if name:
        limit = 0.0 if name.startswith(COMMAND_PREFIX) else timeout  # a command's client keeps the time
        loading = Watchdog(limit, lambda sentence: _leave(config, sentence))
        with loading.guard("loading it"):
            target = load_target(name, timeout=timeout, on_hang=lambda sentence: _leave(config, sentence))
        loading.close()
    return RunSession(
        target,
        model=config.getoption("--specbench-model"),
        profile=profile_named(config.getoption("hypothesis_profile", None)),
        seed=_seed(config),
        device=config.getoption("--specbench-device"),
        timeout=0.0 if target.keeps_time else timeout,
        on_hang=lambda sentence: _leave(config, sentence),
        naming=True,
    )


def _isolated(config: pytest.Config, name: str | None) -> IsolatedSession:
    from specbench.isolation import IsolatedSession

    memory = config.getoption("--specbench-memory")
    return IsolatedSession(
        name,
        model=config.getoption("--specbench-model"),
        profile=profile_named(config.getoption("hypothesis_profile", None)),
        seed=_seed(config),
        device=config.getoption("--specbench-device"),
        timeout=config.getoption("--specbench-timeout"),
        memory=USUAL_MEMORY if memory is None else memory,
    )


def _seed(config: pytest.Config) -> int:
    seed = config.getoption("hypothesis_seed", None)
    seed = config.stash[REPLAY_SEED] if seed is None else seed
    if seed is None:
        return random.SystemRandom().randrange(2**32)
    try:
        number = int(seed)
    except ValueError:
        number = -1
    if not 0 <= number < 2**64:
        raise ValueError(f"--hypothesis-seed {plain(str(seed), 40)!r} must be a whole number >= 0 and < 2**64")
    return number


def _unusable(config: pytest.Config, sentence: str) -> pytest.UsageError:
    if SESSION in config.stash:
        config.stash[SESSION].close()
        del config.stash[SESSION]
    return pytest.UsageError(plain(sentence, MAX_SENTENCE, one_line=True))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "subject_name" not in metafunc.fixturenames:
        return
    stash, names = metafunc.config.stash, ["unusable"]
    if PROBLEM not in stash:
        try:
            names = list(run_session(metafunc.config).subjects)
        except pytest.UsageError as error:
            stash[PROBLEM] = str(error)
    metafunc.parametrize("subject_name", names)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Says what makes the run impossible. Raised while a file is collected, it would be shown as that file's error."""
    if PROBLEM in session.config.stash:
        raise pytest.UsageError(session.config.stash[PROBLEM])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Subject by subject, which keeps one real model's fp64 oracle in memory at a time; on each the claims in their own
    order, lower ones first, so that a failure can say what holds below it. A replay runs alone."""
    ours = [item for item in items if item.get_closest_marker("claim")]
    if not ours or PROBLEM in config.stash:
        return
    subjects = list(run_session(config).subjects)
    claims = list(CLAIMS)
    fitting = [one for one in ours if _is_for_kernels(_claim_of(one)) == _subject_of(one).startswith(KERNEL_COLUMN)]
    config.hook.pytest_deselected(items=[one for one in ours if one not in fitting])
    if not fitting:
        raise pytest.UsageError(_nothing_to_judge(config, _is_for_kernels(_claim_of(ours[0]))))
    ranked = sorted(fitting, key=lambda item: (subjects.index(_subject_of(item)), claims.index(_claim_of(item))))
    others = [item for item in items if not item.get_closest_marker("claim")]
    items[:] = [*others, *ranked]
    if replay := config.stash[REPLAY]:
        from specbench.judge import parse_replay

        claim, subject, _ = parse_replay(replay)
        chosen = [one for one in ranked if (_claim_of(one), _subject_of(one)) == (claim, subject)]
        if not chosen:
            names = ", ".join(subjects)
            raise pytest.UsageError(f"--specbench-replay: no subject {subject!r} in this run; it has {names}")
        config.hook.pytest_deselected(items=[one for one in items if one not in chosen])
        items[:] = chosen


def _is_for_kernels(claim: str) -> bool:
    return claim in KERNEL_CLAIMS


def _nothing_to_judge(config: pytest.Config, is_for_kernels: bool) -> str:
    name = config.getoption("--specbench-target")
    if is_for_kernels:
        return (
            f"target {name!r} is no kernel, which these claims are about: give it attention(q, k, v, parents, "
            "prefix_lens, scale) -> out, or (out, lse) (level 4)"
        )
    return f"target {name!r} is a kernel, of which these claims know nothing: run pytest suites/kernels"


def _subject_of(item: pytest.Item) -> str:
    return str(item.callspec.params["subject_name"])  # type: ignore[attr-defined]


def _claim_of(item: pytest.Item) -> str:
    marker = item.get_closest_marker("claim")
    assert marker is not None
    return str(marker.args[0])


@pytest.fixture
def judge(request: pytest.FixtureRequest, subject_name: str) -> Callable[[], None]:
    """Judges the test's claim on its subject: call it once. Passes, fails with the rendered message, or skips."""
    config = request.config
    claim = _claim_of(request.node)

    def run() -> None:
        from specbench.judge import Failed, Skipped, parse_replay
        from specbench.loading import TargetError

        session, gate, replay = run_session(config), config.stash[GATE], config.stash[REPLAY]
        problem, reason = "", ""
        record = gate.quarantined(session.run, claim, subject_name)
        try:
            if record is None:
                session.judge(claim, subject_name, only=parse_replay(replay)[2] if replay else None)
        except (Failed, TargetError) as failure:
            problem = str(failure)
        except Skipped as skipped:
            reason = str(skipped)
        except Exception as error:
            if gate.redactor is None:
                raise
            problem = f"{type(error).__name__} in specbench itself"  # its traceback would show the case
        finally:
            record = record or session.run.find(claim, subject_name)
            said = record.message if record is not None else ""
            if record is not None:
                gate.settle(record, session.run)
                request.node.user_properties.extend(gate.properties(record, CLAIMS[claim].level))
            # After every claim, so that a target which ends the process takes nothing with it but its own claim.
            _write(config, session.run)
        # Raised out here, so that pytest shows the message alone and not what was being handled.
        if problem:
            problem = record.message if record is not None and problem == said else gate.sentence(problem)
        reason = reason or (record.reason if record and record.known else "")
        if reason and claim in config.stash[REQUIRED]:
            problem = f"NOT TESTED, but --specbench-require asks for {claim}: {reason}"
        elif record is not None and record.known:
            pytest.xfail(f"KNOWN {record.known}: {problem.partition(chr(10))[0] or reason}")
        if problem:
            pytest.fail(plain(problem, MAX_CAPTURED), pytrace=False)
        if reason:
            pytest.skip(f"NOT TESTED: {plain(reason, MAX_SENTENCE, one_line=True)}")

    return run


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a target printed is shown below its failure: no terminal escapes, no CI commands, no megabytes."""
    report = yield
    if item.get_closest_marker("claim"):
        report.sections = [(name, plain(text, MAX_CAPTURED)) for name, text in report.sections]
    return report


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Iterator[None]:
    yield
    config = session.config
    if SESSION in config.stash:
        run = config.stash[SESSION].finish()
        if exitstatus == pytest.ExitCode.INTERRUPTED:
            run.ended = "interrupted"
        if run.claims:
            config.stash[GATE].close(run, _problems(config))
            _write(config, run)
    if (_problems(config) or _stale(config)) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = FAILED


def pytest_report_header(config: pytest.Config) -> list[str]:
    name = config.getoption("--specbench-target")
    return [f"specbench target: {name}"] if name else []


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if SESSION in config.stash and config.stash[SESSION].run.claims:
        for line in _summary(config, config.stash[SESSION].run):
            terminalreporter.write_line(plain(line, MAX_CAPTURED, one_line=True))
    problems = [*_problems(config), *_stale(config)]
    for line in problems:
        terminalreporter.write_line(line, red=True)
    run = config.stash[SESSION].run if SESSION in config.stash else None
    for line in config.stash[GATE].lines(run, problems):
        terminalreporter.write_line(line)


def _problems(config: pytest.Config) -> list[str]:
    """What fails the run as a whole, whatever was judged."""
    if PROBLEM in config.stash or not (untested := _required_but_untested(config)):
        return []
    return [f"required, but NOT TESTED on any subject: {', '.join(untested)}"]


def _stale(config: pytest.Config) -> list[str]:
    """Ledger entries that no longer fail."""
    gate = config.stash[GATE]
    return gate.ledger.stale(config.stash[SESSION].run) if SESSION in config.stash and not gate.replaying else []


def _required_but_untested(config: pytest.Config) -> list[str]:
    """Claims of --specbench-require that no subject was judged on, those of a suite that never ran included."""
    if config.option.collectonly:
        return []
    run = config.stash[SESSION].run if SESSION in config.stash else None
    required: list[str] = config.stash[REQUIRED]
    return [one for one in dict.fromkeys(required) if run is None or run.verdict_of(one) == NOT_TESTED]


def _summary(config: pytest.Config, run: RunRecord) -> list[str]:
    heading = (
        f"specbench {run.version}   target {run.target}   profile {run.profile}   "
        f"seed {run.seed} (repeat with --hypothesis-seed={run.seed})"
    )
    return ["", heading, "", *table(run).splitlines(), "", *footer(run), f"record: {_json_path(config)}"]


def _json_path(config: pytest.Config) -> Path:
    return Path(config.invocation_params.dir) / config.getoption("--specbench-json")


def _write(config: pytest.Config, run: RunRecord) -> None:
    try:
        run.write(_json_path(config))
    except OSError as error:
        sys.stderr.write(f"specbench: the run record could not be written to {_json_path(config)}: {error}\n")


def _leave(config: pytest.Config, sentence: str) -> None:
    """Called by the watchdog's thread: native code cannot be interrupted, so report what there is and leave."""
    gate, replay, annotated = config.stash[GATE], "", list[str]()
    sentence = gate.sentence(sentence)
    lines = [f"target {config.getoption('--specbench-target')!r}: {sentence}"]
    if SESSION in config.stash:  # not yet when the target hangs on its first question
        session = config.stash[SESSION]
        claim, subject = session.current or ("", "")
        record = session.run.find(claim, subject)
        if record is not None:
            record.verdict, record.message, record.replay = BUG, sentence, session.current_replay
            gate.settle(record, session.run)
            replay = record.replay
        run = session.finish()
        run.ended = f"hung: {sentence}"
        gate.close(run, _problems(config))
        _write(config, run)
        lines = [*_summary(config, run), "", f"{claim} on {subject}: {sentence}"]
        lines += [f"while judging --replay {replay}"] if replay else []
        annotated = gate.lines(run, run.problems)
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)
    lines = [plain(line, MAX_CAPTURED, one_line=True) for line in lines]
    sys.stdout.write("\n".join([*lines, *annotated, f"leaving with exit code {EXIT_HUNG}"]) + "\n")
    sys.stdout.flush()
    os._exit(EXIT_HUNG)
