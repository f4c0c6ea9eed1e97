"""What becomes of a verdict once it is found: known or not, redacted or not, and into which files it goes.

A `Gate` is made once a run from the plugin's options. It judges nothing, and changes no verdict.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

from specbench.annotations import annotation_lines
from specbench.case_files import MAX_LINE, CaseFile, case_file_name
from specbench.ledger import Entry, Ledger
from specbench.record import BUG, ClaimRecord, RunRecord
from specbench.redact import Redactor
from specbench.sanitize import plain
from specbench.summary import append, markdown

MAX_MESSAGE = 20_000
MAX_PROPERTY = 2_000
_REPRODUCE = re.compile(r"^  reproduce .*", re.MULTILINE)


@dataclass
class Gate:
    """folder: where relative paths start. cases: the folder of case files, None for none. model: --specbench-model.

    replaying: one case is looked at. The ledger says nothing then, and no case file is written.
    """

    folder: Path
    ledger: Ledger = field(default_factory=Ledger)
    redactor: Redactor | None = None
    cases: Path | None = None
    summary: Path | None = None
    annotate: bool = False
    replaying: bool = False
    model: str = ""

    def entry(self, claim: str, subject: str) -> Entry | None:
        return None if self.replaying else self.ledger.find(claim, subject)

    def quarantined(self, run: RunRecord, claim: str, subject: str) -> ClaimRecord | None:
        """The record of a claim that is not to be judged, added to the run; None for every other one."""
        entry = self.entry(claim, subject)
        if entry is None or not entry.quarantined:
            return None
        record = ClaimRecord(claim, subject, reason=entry.reason, known=entry.issue)
        run.claims.append(record)
        return record

    def settle(self, record: ClaimRecord, run: RunRecord) -> None:
        """After a claim was judged: its case file, its issue, and its message as it may be shown."""
        case_file = self._write_case(record, run)
        entry = self.entry(record.claim, record.subject)
        if record.verdict == BUG and entry is not None:
            record.known = entry.issue
        if self.redactor is not None:
            self._redact(record, run, self.redactor, case_file)
        elif case_file and len(record.replay) > MAX_LINE:
            record.message = record.message.replace(shlex.quote(record.replay), shlex.quote(case_file))
        record.message = plain(record.message, MAX_MESSAGE)

    def sentence(self, text: str) -> str:
        """A sentence that is not a record's message, as it may be shown."""
        return plain(text if self.redactor is None else self.redactor.sentence(text), MAX_MESSAGE)

    def properties(self, record: ClaimRecord, level: int) -> list[tuple[str, str]]:
        """For JUnit: what a dashboard reads without parsing messages."""
        found = {
            "claim": record.claim,
            "level": str(level),
            "subject": record.subject,
            "verdict": record.verdict,
            "cases": str(record.num_cases),
            "known": record.known,
            "reason": record.reason,
            "replay": record.replay,
        }
        return [(f"specbench.{name}", plain(text, MAX_PROPERTY, one_line=True)) for name, text in found.items() if text]

    def hide(self, run: RunRecord) -> None:
        """The command line may hold a case."""
        if self.redactor is not None and "arguments" in run.environment:
            run.environment["arguments"] = "withheld"

    def close(self, run: RunRecord, problems: list[str]) -> None:
        """After the last claim. problems: of the run as a whole, to which stale ledger entries are added."""
        run.ledger = self.ledger.path
        run.problems = [*problems, *([] if self.replaying else self.ledger.stale(run))]
        if self.summary is not None:
            try:
                append(self.summary, markdown(run, problems=run.problems, command=self.command(run)))
            except OSError as error:
                sys.stderr.write(f"specbench: the summary could not be written to {self.summary}: {error}\n")

    def lines(self, run: RunRecord | None, problems: list[str]) -> list[str]:
        """What stands below everything else on the terminal. run: None when nothing was judged."""
        return annotation_lines(run.claims if run else [], problems=problems) if self.annotate else []

    def command(self, run: RunRecord) -> str:
        """Repeats the whole run."""
        words = ["specbench", "check", *([] if run.target == "specbench.reference" else [run.target])]
        words += [f"--hypothesis-profile={run.profile}", f"--hypothesis-seed={run.seed}"]
        words += ["--specbench-model", self.model] if self.model else []
        words += ["--specbench-ledger", self.ledger.path] if self.ledger.path else []
        return shlex.join(words)

    def _write_case(self, record: ClaimRecord, run: RunRecord) -> str:
        """The path of the case file as a command line names it; empty when there is none."""
        if record.verdict != BUG or not record.replay or self.replaying or self.cases is None:
            return ""
        names = ("specbench", "python", "torch", "transformers", "device", "machine")
        versions = {"specbench": run.version, **run.environment}
        path = self.cases / case_file_name(record.claim, record.subject)
        case = CaseFile(
            claim=record.claim,
            subject=record.subject,
            case=record.replay.split("@", 2)[2],
            seed=run.seed,
            profile=run.profile,
            model=self.model,
            target=plain(run.target, 300, one_line=True),
            versions={name: plain(versions[name], 200, one_line=True) for name in names if name in versions},
        )
        try:
            case.write(path)
        except OSError as error:
            sys.stderr.write(f"specbench: the case file could not be written to {path}: {error}\n")
            return ""
        shown = os.path.relpath(path, self.folder)
        return str(path) if shown.startswith("..") else shown

    def _redact(self, record: ClaimRecord, run: RunRecord, redactor: Redactor, case_file: str) -> None:
        if record.message:
            found = _REPRODUCE.search(record.message)
            reproduce = found[0].removeprefix("  reproduce ") if found else ""
            if record.replay or " --replay " in reproduce:
                command = reproduce.partition(" --replay ")[0]
                reproduce = f"{command} --replay {shlex.quote(case_file)}"
                if not case_file:
                    reproduce = "with --specbench-cases DIR the case is kept in a file there"
            record.message = redactor.message(record.message, target=run.target, reproduce=reproduce)
        record.replay = ""
