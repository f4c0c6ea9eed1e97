"""The gate, end to end: ledger, case files, summary, annotations, JUnit and redaction in processes of their own.

One run serves several tests where they look at the same thing from several sides.
"""

# ruff: noqa: E501
from __future__ import annotations

import json
import re
import shlex
import tempfile
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from test_plugin import FAULT, ROOT, WRONG, forked

import specbench.judge
from specbench.case_files import MAX_LINE, read_case_file
from specbench.gate import Gate
from specbench.record import BUG, EQUAL, NOT_TESTED, ClaimRecord, RunRecord, read
from specbench.redact import Redactor

LEAKING = ROOT / "tests" / "targets" / "leaking.py"
MASK_ONLY = "sees_the_prefix and tiny-fp64"  # tree.mask on one subject


@dataclass(frozen=True)
class Ran:
    """One run in a folder of its own, with everything that it wrote there."""

    code: int
    out: str
    folder: Path

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.out.splitlines()]

    @property
    def record(self) -> RunRecord:
        return read(self.folder / "report.json")

    @property
    def only(self) -> ClaimRecord:
        (one,) = self.record.claims
        return one


def gate_run(folder: Path, target: str, keyword: str, *options: str, **environment: str) -> Ran:
    """`pytest suites/consistency` on a target, records and case files in `folder`. FOLDER in options stands for it."""
    arguments = ["suites/consistency", "--specbench-model", "none", "-p", "no:cacheprovider", "-rA",
                 "-W", "ignore::pytest.PytestAssertRewriteWarning", "--hypothesis-profile=quick",
                 f"--specbench-json={folder / 'report.json'}", f"--junitxml={folder / 'junit.xml'}",
                 *(["--target", target] if target else []), *(["-k", keyword] if keyword else []),
                 *(one.replace("FOLDER", str(folder)) for one in options)]  # fmt: skip
    code = forked(arguments, folder / "out.txt", environment)
    return Ran(code, (folder / "out.txt").read_text(encoding="utf-8", errors="replace"), folder)


KEPT: list[tempfile.TemporaryDirectory[str]] = []  # removed when this process ends; forked ones skip that


def kept_folder() -> Path:
    """For a run that several tests look at."""
    KEPT.append(tempfile.TemporaryDirectory(prefix="specbench-gate-"))
    return Path(KEPT[-1].name)


def ledger_file(folder: Path, claim: str, *, mode: str = "run", subject: str = "tiny-fp64") -> str:
    entry = {"claim": claim, "subject": subject, "issue": "#12", "mode": mode, "why": "the mask builder"}
    path = folder / "known.json"
    path.write_text(json.dumps({"schema": 1, "entries": [entry]}))
    return f"--specbench-ledger={path}"


def test_the_processes_below_start_with_what_they_need() -> None:
    assert specbench.judge.CHECKS


# the ledger


def test_a_known_failure_is_reported_as_known_and_does_not_fail_the_run(tmp_path: Path) -> None:
    ran = gate_run(tmp_path, FAULT, MASK_ONLY, ledger_file(tmp_path, "tree.m*"), "--specbench-require=tree.mask")
    assert (ran.code, ran.only.verdict, ran.only.known) == (0, BUG, "#12"), ran.out
    assert any(re.fullmatch(r"tree\.mask +KNOWN +KNOWN .*", line) for line in ran.lines), ran.out
    assert any(line.startswith("KNOWN tree.mask on tiny-fp64: #12: MaskMismatch: node ") for line in ran.lines)
    assert "1 xfailed" in ran.lines[-1] and "passed" not in ran.lines[-1]


def test_an_entry_that_no_longer_fails_fails_the_run_and_says_to_remove_it(tmp_path: Path) -> None:
    ran = gate_run(tmp_path, "", MASK_ONLY, ledger_file(tmp_path, "tree.mask"))
    sentence = (
        f"ledger {tmp_path / 'known.json'}, entries[0]: tree.mask holds on tiny-fp64, though #12 says that it fails: "
        "remove the entry"
    )
    assert (ran.code, ran.only.verdict, ran.only.known, ran.record.problems) == (1, EQUAL, "", [sentence])
    assert sentence in ran.lines


def test_an_entry_is_not_called_stale_by_a_run_that_left_a_subject_of_it_out(tmp_path: Path) -> None:
    ran = gate_run(tmp_path, "", MASK_ONLY, ledger_file(tmp_path, "tree.mask", subject="tiny-*"))
    assert (ran.code, ran.record.problems) == (0, [])


def test_a_quarantined_claim_is_not_judged_and_reported_as_known(tmp_path: Path) -> None:
    """The target would end the process with code 3."""
    entry = ledger_file(tmp_path, "greedy.lossless", mode="quarantine")
    ran = gate_run(tmp_path, f"{WRONG}:Leaving", "plain_decodings and tiny-fp64", entry)
    assert (ran.code, ran.only.verdict, ran.only.known, ran.only.num_cases) == (0, NOT_TESTED, "#12", 0), ran.out
    assert "KNOWN greedy.lossless on tiny-fp64: #12: quarantined by the ledger, #12: the mask builder" in ran.lines


def test_a_quarantined_claim_that_is_required_was_not_tested(tmp_path: Path) -> None:
    entry = ledger_file(tmp_path, "greedy.lossless", mode="quarantine")
    require = "--specbench-require=greedy.lossless"
    ran = gate_run(tmp_path, f"{WRONG}:Leaving", "plain_decodings and tiny-fp64", entry, require)
    assert (ran.code, ran.only.known) == (1, "#12")
    assert (
        "NOT TESTED, but --specbench-require asks for greedy.lossless: quarantined by the ledger, #12: the mask builder"
    ) in ran.lines


def test_a_replay_shows_a_known_failure_in_full(tmp_path: Path) -> None:
    replay = "--specbench-replay=tree.mask@tiny-fp64@TreeCase,tokens=0.0.0,parents=-1.0.0"
    ran = gate_run(tmp_path, FAULT, "", ledger_file(tmp_path, "tree.mask"), replay)
    assert (ran.code, ran.only.known, "  reproduce specbench check" in ran.out) == (1, "", True)


USAGE = {
    "no subject": ("tree.mask", "nowhere-*", "run", ", entries[0]: subject 'nowhere-*' matches no subject of this run; it has tiny-fp64"),
    "no claim": ("tree.msk", "tiny-*", "run", ", entries[0]: no claim 'tree.msk'; did you mean tree.mask?"),
    "no mode": ("tree.mask", "tiny-*", "skip", ", entries[0]: mode = 'skip' must be run or quarantine"),
}  # fmt: skip


@pytest.mark.parametrize("kind", USAGE)
def test_a_wrong_ledger_ends_with_exit_code_4_and_its_sentence(kind: str, tmp_path: Path) -> None:
    claim, subject, mode, sentence = USAGE[kind]
    ran = gate_run(tmp_path, "", MASK_ONLY, ledger_file(tmp_path, claim, subject=subject, mode=mode))
    (line,) = [line for line in ran.lines if line.startswith("ERROR")]
    assert (ran.code, line.startswith(f"ERROR: ledger {tmp_path / 'known.json'}{sentence}")) == (4, True), ran.out
    assert not (tmp_path / "report.json").exists()


# case files


@cache
def faulty() -> Ran:
    """A planted fault on one subject, in a GitHub workflow, everything written."""
    folder = kept_folder()
    return gate_run(folder, FAULT, MASK_ONLY, GITHUB_ACTIONS="true", GITHUB_STEP_SUMMARY=str(folder / "summary.md"))


def test_a_failure_writes_its_case_beside_the_record() -> None:
    case = read_case_file(faulty().folder / "cases" / "tree.mask@tiny-fp64.json")
    assert (case.replay, case.seed, case.target, case.model) == (
        faulty().only.replay, faulty().record.seed, FAULT, "none",
    )  # fmt: skip
    assert set(case.versions) == {"specbench", "python", "torch", "transformers", "device", "machine"}


def test_a_case_file_reproduces_the_failure_word_for_word_without_a_seed(tmp_path: Path) -> None:
    case_file = faulty().folder / "cases" / "tree.mask@tiny-fp64.json"
    again = gate_run(tmp_path, FAULT, "", f"--specbench-replay={case_file}")
    assert (again.code, again.only.message, again.only.replay) == (1, faulty().only.message, faulty().only.replay)
    assert not (tmp_path / "cases").exists()


def test_a_file_that_is_no_case_ends_with_exit_code_4(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"schema": 1, "module": "os"}')
    ran = gate_run(tmp_path, FAULT, "", "--specbench-replay=FOLDER/x.json")
    assert (ran.code, [line for line in ran.lines if line.startswith("ERROR")]) == (
        4,
        [
            f"ERROR: case file {tmp_path / 'x.json'}: unknown field 'module'; it has schema, claim, subject, case, "
            "seed, profile, model, target, versions"
        ],
    )


def failed_record(replay: str) -> tuple[ClaimRecord, RunRecord]:
    message = f"MaskMismatch: a      [claim tree.mask, level 3]\n\n  reproduce specbench check m:A --replay {shlex.quote(replay)}"
    record = ClaimRecord("tree.mask", "tiny-fp64", BUG, message=message, replay=replay)
    return record, RunRecord("m:A", "0", "quick", 5, claims=[record])


@pytest.mark.parametrize(("num_chars", "is_named"), [(MAX_LINE, False), (MAX_LINE + 1, True)])
def test_a_case_too_long_for_a_command_line_is_named_by_its_file(
    num_chars: int, is_named: bool, tmp_path: Path
) -> None:
    start = "tree.mask@tiny-fp64@TreeCase,tokens="
    replay = start + "1." * ((num_chars - len(start)) // 2) + "1" * ((num_chars - len(start)) % 2)
    record, run = failed_record(replay)
    Gate(folder=tmp_path, cases=tmp_path / "cases").settle(record, run)
    last = record.message.splitlines()[-1]
    assert len(replay) == num_chars
    assert last == (
        "  reproduce specbench check m:A --replay " + ("cases/tree.mask@tiny-fp64.json" if is_named else replay)
    )
    assert read_case_file(tmp_path / "cases" / "tree.mask@tiny-fp64.json").replay == replay


def test_a_folder_that_cannot_be_written_costs_the_case_file_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cases").write_text("a file")
    record, run = failed_record("tree.mask@tiny-fp64@TreeCase")
    Gate(folder=tmp_path, cases=tmp_path / "cases").settle(record, run)
    assert (record.replay, capsys.readouterr().err.startswith("specbench: the case file could not be written to ")) == (
        "tree.mask@tiny-fp64@TreeCase", True,
    )  # fmt: skip


# job summary, annotations, JUnit


def test_in_a_github_workflow_a_summary_is_appended() -> None:
    text = (faulty().folder / "summary.md").read_text()
    assert text.startswith(
        f"## specbench: {FAULT.replace('_', '&#95;').replace(':', '&#58;')}\n\n1 BUG (1 cells)\n\n| claim |"
    )
    assert f"```text\n{faulty().only.message}\n```" in text
    assert f"specbench check {FAULT} --hypothesis-profile=quick --hypothesis-seed={faulty().record.seed}" in text


def test_in_a_github_workflow_a_bug_is_annotated() -> None:
    (line,) = [line for line in faulty().lines if line.startswith("::")]
    assert line.startswith("::error title=BUG tree.mask on tiny-fp64::MaskMismatch: node ")
    assert line.endswith(f"%0Areproduce specbench check {FAULT} --replay {faulty().only.replay}")


def test_elsewhere_nothing_is_annotated_or_summed_up(tmp_path: Path) -> None:
    ran = gate_run(tmp_path, FAULT, MASK_ONLY)
    assert (ran.code, [line for line in ran.lines if line.startswith("::")]) == (1, [])


def test_a_summary_can_be_asked_for_and_annotations_switched_off(tmp_path: Path) -> None:
    ran = gate_run(
        tmp_path, FAULT, MASK_ONLY, "--specbench-summary=FOLDER/s.md", "--specbench-annotations=off",
        GITHUB_ACTIONS="true", GITHUB_STEP_SUMMARY=str(tmp_path / "other.md"),
    )  # fmt: skip
    assert (ran.code, [line for line in ran.lines if line.startswith("::")]) == (1, [])
    assert ((tmp_path / "s.md").exists(), (tmp_path / "other.md").exists()) == (True, False)


def junit(folder: Path) -> list[ET.Element]:
    return list(ET.parse(folder / "junit.xml").getroot().iter("testcase"))


def test_junit_holds_the_verdict_as_properties() -> None:
    (case,) = junit(faulty().folder)
    found = {one.get("name"): one.get("value") for one in case.iter("property")}
    assert found == {
        "specbench.claim": "tree.mask",
        "specbench.level": "3",
        "specbench.subject": "tiny-fp64",
        "specbench.verdict": BUG,
        "specbench.cases": str(faulty().only.num_cases),
        "specbench.replay": faulty().only.replay,
    }


def test_what_a_target_prints_reaches_no_log_as_a_command_or_an_escape(tmp_path: Path) -> None:
    source = (
        "class Printing:\n"
        "    dtype = 'fp64'\n"
        "    def logits(self, tokens):\n"
        "        import torch\n"
        "        return torch.nn.functional.one_hot(torch.tensor(tokens), 7).double()\n"
        "    def generate(self, prompt, *, max_new_tokens, sampling, stop, seed):\n"
        "        print('::add-mask::e\\n\\x1b[2J::error::boo\\n' + 'x' * 200_000)\n"
        "        raise RuntimeError('\\n::error::from the target\\x1b[31m')\n"
    )
    (tmp_path / "printing.py").write_text(source)
    ran = gate_run(tmp_path, f"{tmp_path / 'printing.py'}:Printing", "plain_decodings", GITHUB_ACTIONS="true")
    commands = [line for line in ran.lines if line.startswith("::")]
    assert (ran.code, len(commands), commands[0].startswith("::error title=BUG greedy.lossless on own::")) == (
        1,
        1,
        True,
    )
    assert ("\x1b" in ran.out, len(ran.out) < 120_000) == (False, True)


# redaction


@cache
def redacted(name: str, *options: str) -> Ran:
    folder = kept_folder()
    return gate_run(
        folder, f"{LEAKING}:{name}", "plain_decodings or token_limit", "--specbench-redact", "--hypothesis-seed=3", "-v",
        *options, GITHUB_ACTIONS="true", GITHUB_STEP_SUMMARY=str(folder / "summary.md"),
    )  # fmt: skip


OUTPUTS = ("out.txt", "report.json", "junit.xml", "summary.md")


@pytest.mark.parametrize("name", ["Wrong", "Telling", "Chatting"])
@pytest.mark.parametrize("output", OUTPUTS)
def test_a_redacted_run_holds_no_token_and_no_word_of_the_target(output: str, name: str) -> None:
    """The target fails on a prompt with a token of at least 5000: such numbers are tokens and nothing else."""
    ran = redacted(name, "--specbench-cases=FOLDER/private")
    text = (ran.folder / output).read_text()
    tokens = re.findall(r"(?<![\w.])[5-8]\d\d\d(?![\w.])", text)
    assert (ran.code, tokens, "Alice" in text, "Case,prompt" in text) == (1, [], False, False)


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_redacted_run_in_a_process_of_its_own_leaks_nothing_either(output: str) -> None:
    """There the worker renders the message, and what the target prints comes back through a file."""
    text = (redacted("Telling", "--specbench-isolate").folder / output).read_text()
    assert (re.findall(r"(?<![\w.])[5-8]\d\d\d(?![\w.])", text), "Alice" in text) == ([], False)


@pytest.mark.parametrize("name", ["Wrong", "Telling", "Chatting"])
def test_a_redacted_run_that_was_asked_for_cases_can_be_replayed(name: str, tmp_path: Path) -> None:
    """And the case is the proof that the tokens looked for above are those of the failure."""
    ran = redacted(name, "--specbench-cases=FOLDER/private")
    path = ran.folder / "private" / "greedy.lossless@own.json"
    assert f"--replay {path}" in ran.out
    assert re.search(r"prompt=(\d+\.)*[5-8]\d\d\d", read_case_file(path).case)
    again = gate_run(tmp_path, f"{LEAKING}:{name}", "", f"--specbench-replay={path}")
    assert (again.code, again.only.verdict, re.search(r"[5-8]\d\d\d", again.only.message) is not None) == (1, BUG, True)


def test_a_redacted_run_writes_no_case_unasked_and_says_how_to_get_one() -> None:
    ran = redacted("Wrong")
    assert (list(ran.folder.glob("**/cases")), ran.record.claims[0].replay) == ([], "")
    assert "  reproduce with --specbench-cases DIR the case is kept in a file there" in ran.lines


def test_a_redacted_message_still_says_what_differs_and_where() -> None:
    first = redacted("Wrong").record.find("greedy.lossless", "own")
    assert first is not None
    lines = first.message.splitlines()
    assert (
        lines[0]
        == "GreedyMismatch: output differs from autoregressive decoding at token 0      [claim greedy.lossless, level 1]"
    )
    assert re.fullmatch(
        r"  prompt    #[0-9a-f]{8} \(\d+ tokens\)   model 0, cache contiguous, layout tree_mask", lines[3]
    )
    assert re.fullmatch(r"  expected  \[t[0-9a-f]{6}.*\]   reference.autoregressive", lines[5])


def test_redaction_refuses_to_show_what_the_target_prints(tmp_path: Path) -> None:
    ran = gate_run(tmp_path, f"{LEAKING}:Wrong", "plain_decodings", "--specbench-redact", "-s")
    assert (ran.code, [line for line in ran.lines if line.startswith("ERROR")]) == (
        4,
        ["ERROR: --specbench-redact cannot hide what the target prints itself: leave -s and --capture out"],
    )


def test_a_redacted_hang_names_the_call_alone() -> None:
    gate = Gate(folder=Path(), redactor=Redactor(b"key"))
    assert gate.sentence("D.generate() did not return within 2 s: Alice") == (
        "D.generate() did not return within 2 s (details withheld by --specbench-redact)"
    )
