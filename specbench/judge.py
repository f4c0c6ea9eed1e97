"""Judging one claim on one subject: draw cases, run the check, reduce, render, record. The only place that does.

A `RunSession` holds what a whole run shares: target, subjects, the record, clock and watchdog.
"""

from __future__ import annotations

import math
import platform
import resource
import shlex
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import replace

import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test

import specbench
from specbench import claims
from specbench.ambient import KeptSurroundings, streams_that_stay_open
from specbench.budget import budget_sentence, exceeded, rarity
from specbench.cases import (
    AttentionCase,
    Case,
    CommitCase,
    GenerationCase,
    LawCase,
    SampledCase,
    WalkCase,
    decode,
    encode,
    tokens_of,
)
from specbench.checks import CHECKS
from specbench.checks.cells import coverage_lines, note_round
from specbench.claims import CLAIMS, KERNEL_LEVEL, Claim, Facts, Misbehaviour, Violation
from specbench.clock import Clock
from specbench.coverage import depth_of
from specbench.failures import render
from specbench.fixed import fixed_cases, kernel_cases, sweep_cases
from specbench.kernel_bank import KernelBank
from specbench.loading import Target, TargetError, check_command
from specbench.machines import MAX_OPS, machine_for
from specbench.models import DEFAULT_MODEL
from specbench.naming.evidence import Evidence, examine, root_of
from specbench.naming.kernels import likely_fault
from specbench.naming.scene import Finding, find
from specbench.naming.suspect import as_line
from specbench.profiles import Profile
from specbench.record import BUG, EQUAL, NOISE, NOT_TESTED, ClaimRecord, RunRecord, share_sentence
from specbench.reduce import reduce_case
from specbench.strategies import case_kind, strategy_for
from specbench.subjects import NotTested, Subject, Unavailable, make_subjects
from specbench.watchdog import Watchdog

# Cases tried while a failure is made smaller; on a real model, and where laws are judged by draws, each costs seconds.
MAX_CHECKS = 400
MAX_CHECKS_REAL = 10
NUM_LOOKED_AT = 6  # cases of a claim that nobody has judged yet, while a failure above it is named
SECONDS_NAMING = 60  # of a run
NUM_COMPARED = 8  # further cases of a claim, on which a suspected fault has to do what the target does


class Failed(Exception):
    """A claim does not hold; the text is the rendered message."""


class Skipped(Exception):
    """A claim was not tested; the text says what to expose or run."""


class RunSession:
    """Made once a run. target: None judges the reference decoder itself."""

    def __init__(
        self,
        target: Target,
        *,
        model: str,
        profile: Profile,
        seed: int,
        device: str,
        timeout: float,
        on_hang: Callable[[str], None],
        watchdog: Watchdog | None = None,
        naming: bool = False,
    ) -> None:
        """watchdog: instead of one of our own that calls `on_hang` after `timeout` seconds. naming: say of a failure
        which fault it is likely to be."""
        _check_device(device)
        # An fp32 claim is about fp32: TF32 keeps ten bits of a product's mantissa.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        self.target = target
        self.model = model
        self.profile = profile
        self.clock = Clock()
        self.watchdog = Watchdog(timeout, on_hang) if watchdog is None else watchdog
        self.started = time.perf_counter()
        self.current_replay = ""
        self.current: tuple[str, str] | None = None  # claim and subject in progress, for whoever reports a hang
        self.subjects: dict[str, Subject | Unavailable] = {
            one.name: one
            for one in make_subjects(
                target, model=model, profile=profile, device=device, clock=self.clock, watchdog=self.watchdog
            )
        }
        self.run = RunRecord(
            target=target.name,
            version=specbench.__version__,
            profile=profile.name,
            seed=seed,
            environment=_environment(device),
            subjects=list(self.subjects),
            models={name: one.description for name, one in self.subjects.items()},
        )
        self._num_threads = torch.get_num_threads()
        self._surroundings = KeptSurroundings()
        self._naming = naming
        self.evidence: Evidence | None = None  # of the last failure
        self._evidence: dict[tuple[str, str], Evidence] = {}
        self._seconds_naming = 0.0
        self._looks: dict[tuple[str, str], Finding | bool] = {}

    def judge(self, claim_id: str, subject_name: str, *, only: Case | None = None) -> ClaimRecord:
        """Runs a claim on a subject, or on one given case. Raises Failed or Skipped; the record is kept in any case."""
        claim, subject = CLAIMS[claim_id], self.subjects[subject_name]
        record = ClaimRecord(claim_id, subject_name)
        self.run.claims.append(record)
        self.current = (claim_id, subject_name)
        started = time.perf_counter()
        try:
            if isinstance(subject, Unavailable):
                raise NotTested(subject.reason)
            if reason := subject.missing(claim.needs):
                raise NotTested(reason)
            with self.clock.count("other"), streams_that_stay_open():
                try:
                    self._judge(claim, subject, record, only)
                finally:
                    self._check_surroundings(claim, subject, record)
        except NotTested as reason:
            record.verdict, record.reason = NOT_TESTED, str(reason)
            raise Skipped(str(reason)) from None
        except TargetError as error:  # a factory that fails on one model of the bank
            record.verdict, record.message, record.replay = BUG, str(error), self.current_replay
            raise Failed(f"{error}      [claim {claim.id}, level {claim.level}]") from None
        finally:
            record.seconds = time.perf_counter() - started
            self.current = None
        return record

    def finish(self) -> RunRecord:
        """Settles what the run as a whole shows."""
        self.run.note_seconds(self.clock.seconds, total=time.perf_counter() - self.started)
        self.run.coverage = coverage_lines(
            self.run.claims,
            [one for one in self.subjects.values() if isinstance(one, Subject)],
            whole_table=self.profile.name == "thorough",
        )
        unit = 1 if sys.platform == "darwin" else 1024
        self.run.ended = "finished"
        self.run.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return self.run

    def close(self) -> None:
        """Ends what would outlive a run that is not going to be."""
        self.watchdog.close()

    def _judge(self, claim: Claim, subject: Subject, record: ClaimRecord, only: Case | None) -> None:
        # Two threads cost tiny tensors more than they bring; a real model wants them all.
        torch.set_num_threads(self._num_threads if subject.bank.real else 1)
        if only is not None:
            _check_fits(only, subject)
        cases = fixed_cases(claim.id, subject, self.profile) if only is None else [only]
        if cases is None:
            swept = sweep_cases(claim.id, subject, self.profile)
            if claim.id.startswith(("law.", "attention.")):  # cheaper than what is drawn, and smaller
                self._check_all(claim, subject, swept, record, reduce=claim.level == KERNEL_LEVEL)
                swept = []
            self._check_drawn(claim, subject, record)
            self._check_all(claim, subject, swept, record, reduce=True)
        else:
            self.run.prompts = sorted({*self.run.prompts, *subject.used_prompts})
            # A replay shows the very case it was given, however it came to be.
            self._check_all(claim, subject, cases, record, reduce=only is None)
        self._settle(record, subject)
        if only is None:
            self._check_budget(claim, subject, record)

    def _check_budget(self, claim: Claim, subject: Subject, record: ClaimRecord) -> None:
        """More flips than plain decoding's own are a BUG, though each one alone would be excused as a tie."""
        rounding = [one for one in self.subjects.values() if isinstance(one, Subject) and not one.exact]
        num_tests = len(rounding) * sum("generate" in one.needs and "oracle" in one.needs for one in CLAIMS.values())
        if not exceeded(record.num_worse, record.num_better, num_tests=num_tests):
            return
        unequal = record.num_worse + record.num_better
        facts = Facts(
            headline=f"NOISE budget exceeded: more flipped tokens than plain decoding in {record.num_worse} of "
            f"{unequal} generations",
            expected=f"about {unequal / 2:.0f} of {unequal}: as often as not",
            actual=f"{record.num_worse} of {unequal}, as by rounding alone "
            f"{rarity(record.num_worse, record.num_better)}",
            source=f"plain decoding in {str(subject.noise_dtype).removeprefix('torch.')} on the same weights",
            remark=budget_sentence(record),
        )
        words = [*self._command, f"--hypothesis-seed={self.run.seed}", f"--hypothesis-profile={self.profile.name}"]
        violation = claims.VIOLATIONS[claim.id](facts)
        command = shlex.join(words)
        text = render(violation, claim, Case(), subject=subject.name, run=self.run, command=command)
        record.verdict, record.message = BUG, text
        raise Failed(text)

    def _check_all(
        self, claim: Claim, subject: Subject, cases: list[Case], record: ClaimRecord, *, reduce: bool
    ) -> None:
        for case in cases:
            try:
                self._check(claim, subject, case, record)
            except Violation as violation:
                self.watchdog.note_case(self.current_replay)  # it goes on with this one: reducing, naming
                self._fail(violation, claim, subject, case, record, reduce=reduce)

    def _check_drawn(self, claim: Claim, subject: Subject, record: ClaimRecord) -> None:
        failing: list[Case] = []
        draw = seed(zlib.crc32(f"{self.run.seed} {claim.id} {subject.name}".encode()))
        num_examples = self.profile.max_examples * subject.bank.share_of_examples * claim.share
        how = _drawing(math.ceil(num_examples))

        def try_one(case: Case) -> None:
            trial = record if not failing else ClaimRecord(claim.id, subject.name)  # a second look is not counted
            try:
                self._check(claim, subject, case, trial)
            except Violation:
                failing.append(case)
                raise

        def run() -> None:
            if claim.id == "kv.machine":
                run_state_machine_as_test(draw(machine_for(subject, try_one)), settings=how)
            else:
                draw(how(given(strategy_for(claim.id, subject))(try_one)))()

        try:
            run()
        except Violation as violation:
            self._fail(violation, claim, subject, failing[-1], record)
        except Flaky:
            if not failing:
                raise
            facts = Facts(
                headline="the target is not deterministic: one and the same case failed and then did not",
                expected="equal answers to equal questions",
                actual="different ones",
                source="the same case, asked again",
            )
            self._fail(Misbehaviour(facts), claim, subject, failing[-1], record)

    def _check(self, claim: Claim, subject: Subject, case: Case, record: ClaimRecord) -> None:
        self.current_replay = f"{claim.id}@{subject.name}@{encode(case)}"
        self.watchdog.note_case(self.current_replay)
        CHECKS[claim.id](subject, case, record)
        rounds = 0 if isinstance(case, GenerationCase) else case.num_rounds
        record.note_case(nodes=case.num_drafts, rounds=rounds)
        if isinstance(case, CommitCase):
            for one in case.rounds:
                note_round(record, subject, case, one.parents, depth_of(one.parents, one.accept))

    def _check_surroundings(self, claim: Claim, subject: Subject, record: ClaimRecord) -> None:
        """What a target did to torch or to the weights it did to the oracle as well: nothing just found can be relied
        on."""
        replaced, rewritten = self._surroundings.restore(), subject.rewritten_models()
        if replaced:
            facts = Facts(
                headline=f"the target replaced {', '.join(replaced[:4])}, which plain decoding is computed with",
                expected="torch as it was imported",
                actual=f"{len(replaced)} of its functions replaced (they are put back)",
                source="a target may wrap what it calls, never what others call",
            )
        elif rewritten:
            facts = Facts(
                headline="the target changed the weights of the model that it was handed",
                expected="the weights as they were",
                actual=f"weights of model {', '.join(map(str, rewritten))} written to in place",
                source="a target that needs other weights makes a copy",
            )
        else:
            return
        self._fail(
            Misbehaviour(facts), claim, subject, decode(self.current_replay.split("@", 2)[2]), record, reduce=False
        )

    def _fail(
        self,
        violation: Violation,
        claim: Claim,
        subject: Subject,
        case: Case,
        record: ClaimRecord,
        *,
        reduce: bool = True,
    ) -> None:
        if reduce:
            case, violation = self._reduced(violation, claim, subject, case)
        replay = f"{claim.id}@{subject.name}@{encode(case)}"
        words = [*self._command, "--replay", replay]
        if subject.bank.real and self.model != DEFAULT_MODEL:
            words += ["--specbench-model", self.model]
        command = shlex.join(words)
        record.verdict, record.replay, record.shrunk_drafts = BUG, replay, case.num_drafts
        record.message = render(violation, claim, case, subject=subject.name, run=self.run, command=command)
        if self._naming and isinstance(case, AttentionCase):
            record.likely = self._named_kernel(violation, claim, subject, case)
        elif self._naming:  # last of all: a target that hangs while it is looked at has its verdict already
            record.likely = self._named(Finding(claim.id, case, violation), subject)
        if record.likely:
            record.message = render(
                violation, claim, case, subject=subject.name, run=self.run, command=command, likely=record.likely
            )
        raise Failed(record.message) from None

    def _named(self, finding: Finding, subject: Subject) -> str:
        """What the fault is likely to be. What a claim below explains is named there, once, and a column in which
        nothing can be compared goes by the exact one."""
        known = self._evidence.get((finding.claim, subject.name))
        if known is None and not subject.exact:
            known = next((one for (claim, _), one in self._evidence.items() if claim == finding.claim), None)
        if known is None and self._seconds_naming > SECONDS_NAMING:
            return f"not looked for: {SECONDS_NAMING} s of this run went into other failures; replay this one alone"
        if known is None:
            started = time.perf_counter()
            root, held = root_of(finding, lambda claim: self._look(claim, subject))
            known = self._evidence.get((root.claim, subject.name))
            if known is None:
                known = examine(subject, root, held=held, others=self._drawn(CLAIMS[root.claim], subject))
                self._evidence[root.claim, subject.name] = known
            self._evidence[finding.claim, subject.name] = known
            self._seconds_naming += time.perf_counter() - started
        self.evidence = known
        return as_line(known.rank())

    def _named_kernel(self, violation: Violation, claim: Claim, subject: Subject, case: AttentionCase) -> str:
        if isinstance(violation, Misbehaviour):
            return ""  # the sentence says it all
        more = [one for one in kernel_cases(claim.id, subject) if isinstance(one, AttentionCase)]
        return likely_fault(subject, claim.id, case, more)

    def _look(self, claim_id: str, subject: Subject) -> Finding | bool:
        """How a claim fails on a subject, else whether it is known to hold: as this run has judged it, or by a few
        cases drawn for the purpose."""
        record = self.run.find(claim_id, subject.name)
        if record is not None and record.verdict in (EQUAL, NOISE):
            return True
        if record is not None and record.verdict == BUG and record.replay:
            return find(subject, claim_id, parse_replay(record.replay)[2]) or False
        if (claim_id, subject.name) not in self._looks:
            look = self._drawn_look(CLAIMS[claim_id], subject)
            make = self.target.make
            if isinstance(look, Finding) and make is not None:
                # What fails behind earlier cases alone explains nothing: that is the failure to be explained.
                look = find(subject.twin(replace(self.target, adapter=make())), claim_id, look.case) or False
            self._looks[claim_id, subject.name] = look
        return self._looks[claim_id, subject.name]

    def _drawn(self, claim: Claim, subject: Subject) -> list[Case]:
        """Some more cases of a claim, whatever the target makes of them: the same in every run, and in a replay."""
        drawn: list[Case] = []
        takes_its_time = claim.id in ("kv.machine", "tree.long") or claim.id.startswith("law.")
        if not subject.bank.real and not takes_its_time:
            draw = given(strategy_for(claim.id, subject))
            num_cases = math.ceil(NUM_COMPARED * claim.share)
            seed(1)(_drawing(num_cases)(draw(lambda case: drawn.append(case))))()
        return drawn

    def _drawn_look(self, claim: Claim, subject: Subject) -> Finding | bool:
        if subject.bank.real or subject.missing(claim.needs) or claim.id == "kv.machine":
            return False
        failing: list[Finding] = []

        def try_one(case: Case) -> None:
            try:
                CHECKS[claim.id](subject, case, ClaimRecord(claim.id, subject.name))
            except Violation as violation:
                failing.append(Finding(claim.id, case, violation))
                raise

        how = _drawing(math.ceil(NUM_LOOKED_AT * subject.bank.share_of_examples * claim.share))
        try:
            seed(0)(how(given(strategy_for(claim.id, subject))(try_one)))()
        except (Violation, Flaky):
            case, violation = self._reduced(failing[-1].violation, claim, subject, failing[-1].case)
            return Finding(claim.id, case, violation)
        except (NotTested, TargetError):
            return False
        return True

    @property
    def _command(self) -> list[str]:
        return check_command(None if self.target.is_reference else self.target.name)

    def _reduced(self, violation: Violation, claim: Claim, subject: Subject, case: Case) -> tuple[Case, Violation]:
        """The smallest case that fails in the same way, and how it fails."""
        found = {case: violation}

        def fails(smaller: Case) -> bool:
            if not _fits(smaller, subject):
                return False
            try:
                self._check(claim, subject, smaller, ClaimRecord(claim.id, subject.name))
            except Violation as same:
                found[smaller] = same
                return type(same) is type(violation)
            except NotTested:
                pass
            return False

        is_compiled = isinstance(subject.bank, KernelBank) and subject.bank.limits.only_fixed_shapes
        takes_seconds = is_compiled or subject.bank.real or isinstance(case, SampledCase) or claim.id == "law.q"
        max_checks = MAX_CHECKS_REAL if takes_seconds else MAX_CHECKS
        smallest = reduce_case(case, fails, max_checks=max_checks)
        return smallest, found[smallest]

    def _settle(self, record: ClaimRecord, subject: Subject) -> None:
        """EQUAL or NOISE, and what the table adds in words."""
        noisy = (
            record.num_differing
            or record.num_ties
            or record.largest_rounding
            or (not subject.exact and record.worst > 0)
        )
        record.verdict = NOISE if noisy else EQUAL
        parts = []
        if record.claim == "greedy.lossless" and record.num_tokens:
            parts.append(share_sentence(record.num_tokens - record.num_differing, record.num_tokens))
            parts.append(f"{record.num_identical} of {record.num_generations} generations identical to plain decoding")
        if record.num_differing:
            parts.append(
                f"{record.num_differing} leave plain decoding at a tie; from there on {record.num_ties} tokens are not "
                "the oracle's argmax, each below the measured bound"
            )
        if flips := budget_sentence(record):
            parts.append(flips)
        if record.largest_rounding:
            parts.append(f"not bit-identical: moved by up to {record.largest_rounding:.2g}, below rounding")
        if record.worst and not subject.exact:
            parts.append(f"largest error {100 * record.worst:.0f} % of its measured bound")
        for layout, (rounds, rows, mask, kv) in record.layouts.items():
            if rounds:
                each = (
                    f"{rows / rounds:.1f} rows, mask {mask / rounds:.0f} B, drafted keys and values {kv / rounds:.0f} B"
                )
                parts.append(f"layout {layout}: {each} a round")
        for threshold, (equal, total) in record.thresholds.items():
            if total:
                parts.append(
                    f"threshold {threshold}: {100 * equal / total:.1f} % of {total} tokens equal plain decoding"
                )
        record.detail = "; ".join(parts)


def _drawing(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        stateful_step_count=MAX_OPS,
        deadline=None,
        database=None,  # a run is reproduced by its seed or a replay string, not by what is left on a disk
        derandomize=False,
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=Verbosity.quiet,
        # Not Phase.shrink: `reduce` knows what a tree is, and comes to as small a case in far fewer tries.
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )


def quiet_session(
    target: Target,
    *,
    profile: Profile,
    seed: int,
    watchdog: Watchdog | None = None,
    naming: bool = False,
) -> RunSession:
    """On tiny models and the CPU, without a time limit: for many runs in a row."""
    return RunSession(
        target,
        model="none",
        profile=profile,
        seed=seed,
        device="cpu",
        timeout=0,
        on_hang=lambda sentence: None,
        watchdog=watchdog,
        naming=naming,
    )


def parse_replay(text: str) -> tuple[str, str, Case]:
    """`claim@subject@case` taken apart. ValueError says which part is wrong."""
    parts = text.split("@", 2)
    if len(parts) != 3:
        raise ValueError(f"replay string {text[:60]!r} must be claim@subject@case, as a failure prints it")
    if parts[0] not in claims.CLAIMS:
        raise ValueError(f"replay string names claim {parts[0]!r}: expected one of {', '.join(claims.CLAIMS)}")
    case = decode(parts[2])
    if type(case) is not case_kind(parts[0]):
        wanted, given = case_kind(parts[0]).__name__, type(case).__name__
        raise ValueError(f"replay string: {parts[0]} is judged on a {wanted}, this is a {given}")
    return parts[0], parts[1], case


def _fits(case: Case, subject: Subject) -> bool:
    try:
        _check_fits(case, subject)
    except Failed:
        return False
    return True


def _check_fits(case: Case, subject: Subject) -> None:
    """A replayed case must lie inside the subject it is replayed on; Failed says where it does not."""
    if not 0 <= case.model < subject.bank.num_models:
        raise Failed(f"replay string: model = {case.model} must be < {subject.bank.num_models} on {subject.name}")
    if isinstance(case, AttentionCase):
        if not isinstance(subject.bank, KernelBank):
            raise Failed(f"replay string: {subject.name} is no column of a kernel")
        if case.dtype != subject.bank.label:
            raise Failed(f"replay string: dtype = {case.dtype} must be {subject.bank.label} on {subject.name}")
        nearest = subject.bank.limits.nearest(case)
        for name in ("head_dim", "group", "page"):
            given, known = getattr(case, name), getattr(nearest, name)
            if given != known:
                raise Failed(
                    f"replay string: {name} = {given} is none that the kernel declares; the nearest is {known}"
                )
        return
    for name, value, known in (("cache", case.cache, subject.cache_kinds), ("layout", case.layout, subject.layouts)):
        if value not in known:
            raise Failed(f"replay string: {name} = {value!r} must be one of {', '.join(known)} on {subject.name}")
    if isinstance(case, WalkCase | LawCase):
        return
    vocab_size = subject.vocab_size(case.model)
    for token in tokens_of(case):
        if not 0 <= token < vocab_size:
            raise Failed(f"replay string: token {token} must be >= 0 and < {vocab_size} (vocabulary of {subject.name})")


def _check_device(device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--specbench-device {device!r} must be cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--specbench-device cuda: torch finds no CUDA device here; leave the option out to run on the CPU"
        )


def _environment(device: str) -> dict[str, str]:
    import transformers

    return {
        "device": f"device {device}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tf32": "off",
        "machine": platform.machine(),
        "arguments": " ".join(sys.argv[1:]),
    }
