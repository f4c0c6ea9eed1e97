"""What a run found, as plain data: verdicts by claim and subject, counts, times. Written as JSON and as the table.

Standard library only, so that reports and the plugin read it without torch.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

EQUAL, NOISE, BUG, NOT_TESTED = "EQUAL", "NOISE", "BUG", "NOT TESTED"
KNOWN = "KNOWN"  # no verdict: how a cell is shown that the ledger speaks of
_SEVERITY = {NOT_TESTED: 0, EQUAL: 1, NOISE: 2, BUG: 3}


@dataclass
class ClaimRecord:
    """One claim on one subject. Counts are sums over its cases.

    num_tokens: emitted tokens compared, to the first that differs. num_differing: generations with such a token.
    num_ties: tokens from there on that are not the oracle's argmax, each excused below the measured noise bound.
    num_identical: generations equal to plain decoding.
    worst: largest error found, as a share of its bound. thresholds: threshold -> [equal tokens, tokens].
    largest_rounding: the largest move below rounding where bit-identity was asked for.
    layouts: tree layout -> [rounds, rows, bytes of masks, bytes of drafted keys and values].
    num_flips, num_plain_flips: tokens that are not the oracle's argmax, of num_flip_tokens each, in the target's output
    and in plain decoding's own where the two part. num_worse, num_better: generations in which the target has more, or
    fewer (see `budget`).
    acceptance: drafter -> by depth from 1 on [drafts accepted, drafts verified]. remarks: sentences for the footer.
    rounds_by_cell: coverage cell (see `coverage`) -> rounds.
    detail: what the footer adds in words. shrunk_drafts: drafted nodes of the smallest failing case.
    likely: which fault it may be, the likeliest first, "unknown" where nothing fits and "" where nobody looked.
    known: the issue by which the ledger knows that this fails, or why it is not judged. The verdict stays what it is.
    """

    claim: str
    subject: str
    verdict: str = NOT_TESTED
    reason: str = ""
    num_cases: int = 0
    num_nodes: int = 0
    num_rounds: int = 0
    num_tokens: int = 0
    num_ties: int = 0
    num_differing: int = 0
    num_generations: int = 0
    num_identical: int = 0
    worst: float = 0.0
    largest_rounding: float = 0.0
    thresholds: dict[str, list[int]] = field(default_factory=dict)
    layouts: dict[str, list[int]] = field(default_factory=dict)
    detail: str = ""
    seconds: float = 0.0
    message: str = ""
    replay: str = ""
    shrunk_drafts: int | None = None
    num_flips: int = 0
    num_plain_flips: int = 0
    num_flip_tokens: int = 0
    num_worse: int = 0
    num_better: int = 0
    known: str = ""
    rounds_by_cell: dict[str, int] = field(default_factory=dict)
    acceptance: dict[str, list[list[int]]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    likely: str = ""

    def __post_init__(self) -> None:
        self._places: set[object] = set()  # no field: it is of use while judging only, and JSON has no sets

    def note_case(self, *, nodes: int = 0, rounds: int = 0, tokens: int = 0) -> None:
        self.num_cases += 1
        self.num_nodes += nodes
        self.num_rounds += rounds
        self.num_tokens += tokens

    def note_generation(self, *, identical: bool) -> None:
        self.num_generations += 1
        self.num_identical += identical

    def note_threshold(self, threshold: float, num_equal: int, num_tokens: int) -> None:
        equal, total = self.thresholds.get(str(threshold), [0, 0])
        self.thresholds[str(threshold)] = [equal + num_equal, total + num_tokens]

    def note_rounding(self, size: float) -> None:
        """A difference where none was expected, too small for a fault; `size` is shown."""
        self.largest_rounding = max(self.largest_rounding, size)

    def note_flips(self, place: object, flips: int, plain_flips: int, tokens: int) -> None:
        """One generation against plain decoding's. place: where the two part; cases that part at one and the same
        place show one and the same event, which counts once."""
        if place in self._places:
            return
        self._places.add(place)
        self.num_flips += flips
        self.num_plain_flips += plain_flips
        self.num_flip_tokens += tokens
        self.num_worse += flips > plain_flips
        self.num_better += flips < plain_flips

    def note_acceptance(self, drafter: str, by_depth: Sequence[Sequence[int]]) -> None:
        """by_depth: (accepted, verified) at depth 1, 2, ... of some rounds."""
        known = self.acceptance.setdefault(drafter, [])
        known += [[0, 0] for _ in by_depth[len(known) :]]
        for level, counts in zip(known, by_depth, strict=False):
            level[:] = [old + new for old, new in zip(level, counts, strict=True)]

    def note_remark(self, sentence: str) -> None:
        """A sentence about how a claim was judged, shown once."""
        if sentence not in self.remarks:
            self.remarks.append(sentence)

    def note_cell(self, cell: str) -> None:
        self.rounds_by_cell[cell] = self.rounds_by_cell.get(cell, 0) + 1

    def note_layout(self, layout: str, *, rounds: int, rows: int, mask_bytes: int, kv_bytes: int) -> None:
        old = self.layouts.get(layout, [0, 0, 0, 0])
        self.layouts[layout] = [a + b for a, b in zip(old, (rounds, rows, mask_bytes, kv_bytes), strict=True)]

    def note_share(self, share_of_bound: float) -> None:
        """An error inside its bound, as a share of that bound."""
        self.worst = max(self.worst, share_of_bound)


@dataclass
class RunRecord:
    """A whole run: what was judged, with what, and every claim record. ledger: the file of known failures. problems:
    what fails the run as a whole: ledger entries that no longer fail, required claims that were not tested. coverage:
    lines that say which cells of states were reached."""

    target: str
    version: str
    profile: str
    seed: int
    environment: dict[str, str] = field(default_factory=dict)
    subjects: list[str] = field(default_factory=list)
    models: dict[str, str] = field(default_factory=dict)
    prompts: list[str] = field(default_factory=list)
    claims: list[ClaimRecord] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0
    ended: str = "in progress"
    ledger: str = ""
    problems: list[str] = field(default_factory=list)
    coverage: list[str] = field(default_factory=list)

    def find(self, claim: str, subject: str) -> ClaimRecord | None:
        for one in self.claims:
            if (one.claim, one.subject) == (claim, subject):
                return one
        return None

    def note_seconds(self, clock: Mapping[str, float], *, total: float) -> None:
        """clock: seconds counted as "target", "oracle" and "other"; what is left of `total` went into loading."""
        self.seconds = {
            "target": clock.get("target", 0.0),
            "oracle": clock.get("oracle", 0.0),
            "drawing and comparing": clock.get("other", 0.0),
            "loading": max(0.0, total - sum(clock.values())),
            "total": total,
        }

    def verdict_of(self, claim: str) -> str:
        """The most severe verdict over subjects."""
        verdicts = [one.verdict for one in self.claims if one.claim == claim]
        return max(verdicts, key=_SEVERITY.__getitem__, default=NOT_TESTED)

    def shown_verdict(self, claim: str) -> str:
        """The same, but KNOWN where the ledger speaks of a subject and no other one fails: never shown as passed."""
        mine = [one for one in self.claims if one.claim == claim]
        if any(one.known for one in mine) and not any(one.verdict == BUG and not one.known for one in mine):
            return KNOWN
        return self.verdict_of(claim)

    def write(self, path: Path) -> None:
        """JSON, replaced atomically so that a reader never sees half a file."""
        text = json.dumps({"schema": 1, **asdict(self)}, indent=1, ensure_ascii=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(name).chmod(0o644)  # a temporary file is its owner's alone, a report is not
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def read(path: Path) -> RunRecord:
    """The run behind a JSON file. ValueError when it is not one of ours."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict) or data.pop("schema", None) != 1:
        raise ValueError(f"{path}: not a specbench run record of schema 1")
    try:
        claims = [ClaimRecord(**one) for one in data.pop("claims")]
        return RunRecord(**data, claims=claims)
    except (KeyError, TypeError) as error:  # fields are only ever added, with defaults
        raise ValueError(
            f"{path}: a run record of schema 1 with other fields, of a newer specbench? ({error})"
        ) from error


def share_lower_bound(num_equal: int, num_tokens: int, *, confidence: float = 0.95) -> float:
    """Exact one-sided (Clopper-Pearson) lower bound of a binomial share: the p at which so many would be this rare."""
    if num_tokens == 0 or num_equal == 0:
        return 0.0
    if num_equal == num_tokens:
        return (1.0 - confidence) ** (1.0 / num_tokens)
    low, high = 0.0, num_equal / num_tokens
    for _ in range(60):  # bisection: the tail grows with p
        middle = (low + high) / 2
        if _upper_tail(num_equal, num_tokens, middle) < 1.0 - confidence:
            low = middle
        else:
            high = middle
    return low


def _upper_tail(num_equal: int, num_tokens: int, p: float) -> float:
    """P(X >= num_equal) for X ~ Binomial(num_tokens, p), summed over the differing tokens, which are few."""
    if p <= 0.0:
        return 0.0
    total = 0.0
    for num_differing in range(num_tokens - num_equal + 1):
        same = num_tokens - num_differing
        total += math.exp(
            math.lgamma(num_tokens + 1)
            - math.lgamma(same + 1)
            - math.lgamma(num_differing + 1)
            + same * math.log(p)
            + num_differing * math.log1p(-p)
        )
    return min(total, 1.0)


CLAIMED_SHARE = 0.9999


def share_sentence(num_equal: int, num_tokens: int) -> str:
    """The consistency share with its exact lower bound, and whether that is enough to claim 99.99 %."""
    if num_tokens == 0:
        return "no tokens compared"
    bound = share_lower_bound(num_equal, num_tokens)
    text = (
        f"{num_equal} of {num_tokens} tokens equal ({_percent(num_equal / num_tokens)} %), "
        f"at least {_percent(bound)} % at 95 % confidence"
    )
    if bound >= CLAIMED_SHARE:
        return text
    if num_equal == num_tokens:
        return f"{text}: not enough tokens for {100 * CLAIMED_SHARE:.2f} %"
    return f"{text}: below {100 * CLAIMED_SHARE:.2f} %"


def _percent(share: float) -> str:
    """Rounded down: 29,999 of 30,000 is not 100 %, and a lower bound must not grow by being printed."""
    return f"{math.floor(share * 1e5) / 1e3:g}"


def table(run: RunRecord) -> str:
    """The verdict table: claims down, subjects across, counts to the right."""
    rows = table_rows(run)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def table_rows(run: RunRecord) -> list[list[str]]:
    """The table as cells, its heading first."""
    subjects = run.subjects
    short = {EQUAL: "EQUAL", NOISE: "NOISE", BUG: "BUG", NOT_TESTED: "-"}
    rows = [["claim", "verdict", *subjects, "cases", "nodes", "seconds"]]
    for claim in dict.fromkeys(one.claim for one in run.claims):
        mine = [one for one in run.claims if one.claim == claim]
        cells = [run.find(claim, subject) for subject in subjects]
        rows.append(
            [
                claim,
                run.shown_verdict(claim),
                *((KNOWN if one.known else short[one.verdict]) if one else "" for one in cells),
                str(sum(one.num_cases for one in mine)),
                str(sum(one.num_nodes for one in mine)),
                f"{sum(one.seconds for one in mine):.1f}",
            ]
        )
    return rows


def footer(run: RunRecord) -> list[str]:
    """Lines below the table: what was judged, shares, cases, time, memory, and every reason for NOT TESTED."""
    lines = [f"{name}: {text}" for name, text in run.models.items()]
    if run.prompts:
        lines.append(f"prompts: {', '.join(run.prompts)}")
    for one in run.claims:
        if one.detail:
            lines.append(f"{one.claim} on {one.subject}: {one.detail}")
        lines += [f"{one.claim} on {one.subject}: {remark}" for remark in one.remarks]
    lines += acceptance_lines(run)
    lines += [*known_lines(run), *not_tested_lines(run)]
    lines += run.coverage
    cases, nodes = sum(one.num_cases for one in run.claims), sum(one.num_nodes for one in run.claims)
    rounds = sum(one.num_rounds for one in run.claims)
    lines.append(f"{cases} cases, {nodes} nodes, {rounds} rounds")
    if run.seconds:
        lines.append("seconds: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in run.seconds.items()))
    if run.peak_bytes:
        lines.append(f"peak memory {run.peak_bytes / 2**30:.2f} GiB")
    return lines


def acceptance_lines(run: RunRecord) -> list[str]:
    """One line a subject: each drafter's acceptance by depth. Nothing where no drafter was judged."""
    lines = []
    for one in run.claims:
        drafters = [
            f"{name} " + (" ".join(f"{accepted}/{verified}" for accepted, verified in levels) or "none drafted")
            for name, levels in one.acceptance.items()
        ]
        if drafters:
            lines.append(f"acceptance by depth on {one.subject}: {'; '.join(drafters)}")
    if lines:
        lines.append(
            "acceptance by depth: drafts accepted / verified at depth 1, 2, ...; a round verifies depth d when its "
            "first d - 1 drafts were accepted and a draft goes on there"
        )
    return lines


def known_lines(run: RunRecord) -> list[str]:
    """One line a cell that the ledger speaks of: the issue, and how it fails or why it is not judged."""
    return [
        f"KNOWN {one.claim} on {one.subject}: {one.known}: {one.message.partition(chr(10))[0] or one.reason}"
        for one in run.claims
        if one.known
    ]


def not_tested_lines(run: RunRecord) -> list[str]:
    """One line a reason, with the first four cells that it stands for."""
    reasons: dict[str, list[str]] = {}
    for one in run.claims:
        if one.verdict == NOT_TESTED and one.reason and not one.known:
            reasons.setdefault(one.reason, []).append(f"{one.claim} ({one.subject})")
    lines = []
    for reason, who in reasons.items():
        shown = ", ".join(who[:4]) + (f" and {len(who) - 4} more" if len(who) > 4 else "")
        lines.append(f"NOT TESTED {shown}: {reason}")
    return lines
