"""The pytest plugin: options, profiles, the `judge` fixture, the verdict table, JSON, exit codes.

It is loaded in every pytest run of an environment that has specbench, so it must cost nothing and change nothing there:
torch is imported only when a suite asks for the run session.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from specbench.claims import CLAIMS
from specbench.models import DEFAULT_MODEL
from specbench.profiles import PROFILES, profile_named
from specbench.record import BUG, NOT_TESTED, RunRecord, footer, table
from specbench.watchdog import EXIT_HUNG, Watchdog

if TYPE_CHECKING:
    from specbench.judge import RunSession

SESSION = pytest.StashKey["RunSession"]()
REQUIRED = pytest.StashKey["list[str]"]()
PROBLEM = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("specbench", "specbench: conformance of speculative decoders")
    group.addoption("--specbench-target", metavar="TARGET", help="package.module:attribute or ./file.py:attribute")
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
    group.addoption("--specbench-replay", metavar="STRING", help="run the one case that a failure printed")
    group.addoption(
        "--specbench-require",
        metavar="CLAIMS_OR_LEVEL",
        default="",
        help="claim ids (globs allowed) or levels, comma-separated, for which NOT TESTED fails",
    )
    group.addoption(
        "--specbench-json",
        metavar="FILE",
        default=".specbench/report.json",
        help="where the run record goes (default .specbench/report.json)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "claim(id): the specbench claim that a test judges")
    _register_profiles()
    config.stash[REQUIRED] = _required_claims(config.getoption("--specbench-require"))


def _register_profiles() -> None:
    """Known to Hypothesis before its own plugin looks --hypothesis-profile up."""
    from hypothesis import settings

    for one in PROFILES.values():
        # Hypothesis switches derandomize on and the database off where CI is set; we say both ourselves.
        settings.register_profile(one.name, max_examples=one.max_examples, derandomize=False, database=None)


def _required_claims(text: str) -> list[str]:
    required: list[str] = []
    for word in (one.strip() for one in text.split(",")):
        if not word:
            continue
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


def run_session(config: pytest.Config) -> RunSession:
    """The run's session, made on first use: only a suite needs torch and models."""
    if SESSION in config.stash:
        return config.stash[SESSION]
    if hasattr(config, "workerinput"):
        raise pytest.UsageError("the claims are judged in one process, whose table they share: leave out xdist's -n")
    from specbench.claims import Misbehaviour
    from specbench.judge import RunSession, parse_replay
    from specbench.loading import Target, load_target
    from specbench.reference.target import ReferenceTarget

    name = config.getoption("--specbench-target")
    seed = config.getoption("hypothesis_seed", None)
    try:
        target = Target("specbench.reference", ReferenceTarget(), is_reference=True)
        if name:
            loading = Watchdog(config.getoption("--specbench-timeout"), lambda sentence: _leave(config, sentence))
            with loading.guard("loading it"):
                target = load_target(name)
            loading.close()
        session = RunSession(
            target,
            model=config.getoption("--specbench-model"),
            profile=profile_named(config.getoption("hypothesis_profile", None)),
            seed=random.SystemRandom().randrange(2**32) if seed is None else int(seed),
            device=config.getoption("--specbench-device"),
            timeout=config.getoption("--specbench-timeout"),
            on_hang=lambda sentence: _leave(config, sentence),
        )
        if replay := config.getoption("--specbench-replay"):
            parse_replay(replay)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    except Misbehaviour as error:  # a target with its own model is asked for a first row of logits
        raise pytest.UsageError(f"target {name!r}: {error}") from error
    except OSError as error:  # transformers' word for a checkpoint that it cannot read or reach
        raise pytest.UsageError(f"the model cannot be loaded: {str(error).strip().splitlines()[0]}") from error
    config.stash[SESSION] = session
    return session


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
    ranked = sorted(ours, key=lambda item: (subjects.index(_subject_of(item)), claims.index(_claim_of(item))))
    others = [item for item in items if not item.get_closest_marker("claim")]
    items[:] = [*others, *ranked]
    if replay := config.getoption("--specbench-replay"):
        from specbench.judge import parse_replay

        claim, subject, _ = parse_replay(replay)
        chosen = [one for one in ranked if (_claim_of(one), _subject_of(one)) == (claim, subject)]
        if not chosen:
            names = ", ".join(subjects)
            raise pytest.UsageError(f"--specbench-replay: no subject {subject!r} in this run; it has {names}")
        config.hook.pytest_deselected(items=[one for one in items if one not in chosen])
        items[:] = chosen


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

        session = run_session(config)
        replay = config.getoption("--specbench-replay")
        problem, reason = "", ""
        try:
            session.judge(claim, subject_name, only=parse_replay(replay)[2] if replay else None)
        except (Failed, TargetError) as failure:
            problem = str(failure)
        except Skipped as skipped:
            reason = str(skipped)
        finally:
            # After every claim, so that a target which ends the process takes nothing with it but its own claim.
            _write(config, session.run)
        # Raised out here, so that pytest shows the message alone and not what was being handled.
        if reason and claim in config.stash[REQUIRED]:
            problem = f"NOT TESTED, but --specbench-require asks for {claim}: {reason}"
        if problem:
            pytest.fail(problem, pytrace=False)
        if reason:
            pytest.skip(f"NOT TESTED: {reason}")

    return run


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Iterator[None]:
    yield
    config = session.config
    if SESSION in config.stash:
        run = config.stash[SESSION].finish()
        if exitstatus == pytest.ExitCode.INTERRUPTED:
            run.ended = "interrupted"
        if run.claims:
            _write(config, run)
    if _required_but_untested(config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_report_header(config: pytest.Config) -> list[str]:
    name = config.getoption("--specbench-target")
    return [f"specbench target: {name}"] if name else []


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if SESSION in config.stash and config.stash[SESSION].run.claims:
        for line in _summary(config, config.stash[SESSION].run):
            terminalreporter.write_line(line)
    if PROBLEM not in config.stash and (untested := _required_but_untested(config)):
        terminalreporter.write_line(f"required, but NOT TESTED on any subject: {', '.join(untested)}", red=True)


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
    lines = [f"target {config.getoption('--specbench-target')!r}: {sentence}"]
    if SESSION in config.stash:  # not yet when the target hangs on its first question
        session = config.stash[SESSION]
        claim, subject = session.current or ("", "")
        record = session.run.find(claim, subject)
        if record is not None:
            record.verdict, record.message, record.replay = BUG, sentence, session.current_replay
        run = session.finish()
        run.ended = f"hung: {sentence}"
        _write(config, run)
        lines = [*_summary(config, run), "", f"{claim} on {subject}: {sentence}"]
        lines += [f"while judging --replay {session.current_replay}"] if session.current_replay else []
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)
    sys.stdout.write("\n".join([*lines, f"leaving with exit code {EXIT_HUNG}"]) + "\n")
    sys.stdout.flush()
    os._exit(EXIT_HUNG)
