"""What `specbench faults` prints and writes: the table, the rates, JSON, and both parts of docs/faults.md.

Judging is `fault_run`'s, what the page says of the bank `fault_catalogue`'s.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from statistics import median

import specbench
from specbench.fault_catalogue import CLASSES, catalogue, markdown_table
from specbench.fault_run import BANK, LIMIT, PROFILE, FaultResult, Naming, faults_of, run_faults
from specbench.reference.faults.equivalent import EQUIVALENT
from specbench.reference.faults.fault import SUBJECT, Fault

SCHEMA = 1
MANY_NODES = 3  # drafted nodes of a reduced case that are still thought through at a glance
MEASURED = "## Measured"
SURVIVED, LOST = "SURVIVED", "LOST"
HEADING = ("fault", "class", "caught by", "cases", "seconds", "nodes", "named", "which is")
NUMBERS = (3, 4, 5)  # columns of HEADING


@dataclass(frozen=True)
class FaultRun:
    """A run. seconds: on the wall. command: what repeats it. is_whole: it was not interrupted."""

    results: tuple[FaultResult, ...]
    seed: int
    num_workers: int
    seconds: float
    command: str
    is_whole: bool = True

    @property
    def caught(self) -> list[FaultResult]:
        return [one for one in self.results if one.caught_by]

    @property
    def survived(self) -> list[FaultResult]:
        return [one for one in self.results if not one.caught_by and not one.is_lost]

    @property
    def lost(self) -> list[FaultResult]:
        return [one for one in self.results if one.is_lost]

    @property
    def is_good(self) -> bool:
        return len(self.caught) == len(self.results)


def report(
    faults: Sequence[Fault],
    *,
    seed: int,
    num_workers: int,
    command: str,
    bank: str = BANK,
    limit: float = LIMIT,
) -> FaultRun:
    """Judges the faults; prints a line for each as it comes, and the rates at the end. Interrupted, it reports what has
    been judged by then."""
    started, is_whole = time.perf_counter(), True
    widths, results = _widths(faults), {}
    print(_line(HEADING, widths), flush=True)
    try:
        for result in run_faults(faults, seed=seed, num_workers=num_workers, bank=bank, limit=limit):
            print(_line(_cells(result), widths), flush=True)
            results[result.fault] = result
    except KeyboardInterrupt:
        is_whole = False
    in_order = tuple(results[one.id] for one in faults if one.id in results)
    run = FaultRun(in_order, seed, num_workers, time.perf_counter() - started, command, is_whole)
    print("", *summary(run), sep="\n")
    if not is_whole:
        print(f"interrupted: {len(in_order)} of {len(faults)} faults were judged")
    return run


def listing(faults: Sequence[Fault]) -> str:
    """Ids, classes, catching claims and what each needs, without judging anything."""
    widths = [max(len(getattr(one, name)) for one in faults) for name in ("id", "fault_class", "claim")]
    return "\n".join(_line((one.id, one.fault_class, one.claim, one.subtle), [*widths, 0]) for one in faults)


def summary(run: FaultRun) -> list[str]:
    """What was caught, how fast, how small, and how well it was named."""
    caught = run.caught
    lines = [f"caught {_share(len(caught), len(run.results))}"]
    lines += [f"{SURVIVED} {one.fault}: {one.remark}, and no other claim catches it" for one in run.survived]
    lines += [f"{LOST} {one.fault}: {one.remark}" for one in run.lost]
    lines += [
        f"{one.fault} was caught by {one.caught_by}: {one.remark}" for one in caught if one.caught_by != one.claim
    ]
    if caught:
        slowest = max(caught, key=lambda one: one.seconds)
        lines.append(
            f"seconds to catch: median {median(one.seconds for one in caught):.2f}, largest {slowest.seconds:.2f} "
            f"({slowest.fault}); with reducing and naming: median {median(one.seconds_total for one in caught):.1f}"
        )
    sizes = {one.fault: one.nodes for one in caught if one.nodes is not None}
    if sizes:
        large = [f"{fault} ({nodes})" for fault, nodes in sizes.items() if nodes > MANY_NODES]
        lines.append(
            f"drafted nodes of the reduced case: median {median(sizes.values()):g}, above {MANY_NODES}: "
            + ", ".join([str(len(large)), *large])
        )
    if caught:
        lines += [f"named right {how}: {rate.in_words(len(caught))}" for how, rate in naming_rates(caught).items()]
        lines.append(
            f"near copies taken out, itself included: median {median(one.num_near_copies for one in caught):g}"
        )
    workers = f"{run.num_workers} worker{'s' if run.num_workers > 1 else ''}"
    lines.append(f"{run.seconds:.0f} s with {workers}, {PROFILE.name} on {SUBJECT}, seed {run.seed}")
    return lines


@dataclass(frozen=True)
class NamingRate:
    """How often the right class came first, and among three; how often another one came first, or none at all."""

    first: int
    among_three: int
    wrong: int
    unknown: int

    @classmethod
    def of(cls, namings: Sequence[Naming]) -> NamingRate:
        first = sum(one.rank == 1 for one in namings)
        unknown = sum(not one.fault_class for one in namings)
        among_three = sum(one.rank is not None and one.rank <= 3 for one in namings)
        return cls(first, among_three, len(namings) - first - unknown, unknown)

    def in_words(self, total: int) -> str:
        return (
            f"first {_share(self.first, total)}, among three {_share(self.among_three, total)}; "
            f"wrong {self.wrong}, unknown {self.unknown}"
        )


def naming_rates(results: Sequence[FaultResult]) -> dict[str, NamingRate]:
    """By what the bank was left without."""
    return {
        "by the full bank": NamingRate.of([one.full for one in results]),
        "without itself and near copies": NamingRate.of([one.without_copies for one in results]),
        "without its whole class": NamingRate.of([one.without_class for one in results]),
    }


def as_json(run: FaultRun) -> str:
    """Everything: with what it was measured, counts, rates, the lines of the summary, and an object a fault."""
    return json.dumps(
        {
            "schema": SCHEMA,
            "version": specbench.__version__,
            "environment": {
                "python": platform.python_version(),
                "machine": platform.machine(),
                **{name: metadata.version(name) for name in ("torch", "transformers", "hypothesis")},
            },
            "command": run.command,
            "profile": PROFILE.name,
            "subject": SUBJECT,
            "seed": run.seed,
            "workers": run.num_workers,
            "seconds": run.seconds,
            "is_whole": run.is_whole,
            "counts": {"caught": len(run.caught), "survived": len(run.survived), "lost": len(run.lost)},
            "named": {how: asdict(rate) for how, rate in naming_rates(run.caught).items()},
            "summary": summary(run),
            "faults": [asdict(one) for one in run.results],
        },
        indent=1,
    )


def page(run: FaultRun) -> str:
    """docs/faults.md: the catalogue, then the rates and the table of a run."""
    lines = [MEASURED, "", "```bash", run.command, "```", "", *(f"- {line}" for line in summary(run)), ""]
    lines += ["Seconds are those to the failing case; nodes are the drafted ones of the reduced case.", ""]
    lines += markdown_table(HEADING, [_cells(one) for one in run.results])
    return "\n".join([*_catalogue(), *lines]) + "\n"


def renew(file: Path) -> None:
    """Writes the catalogue anew, and keeps what the page says of the last run."""
    lines = file.read_text(encoding="utf-8").splitlines()
    measured = lines[lines.index(MEASURED) :] if MEASURED in lines else []
    file.write_text("\n".join([*_catalogue(), *measured]).rstrip("\n") + "\n", encoding="utf-8")


def _catalogue() -> list[str]:
    return [*catalogue(faults_of(BANK).values(), EQUIVALENT), ""]


def _cells(result: FaultResult) -> tuple[str, ...]:
    if result.is_lost:
        return (result.fault, result.fault_class, LOST, "", "", "", "", "")
    if not result.caught_by:
        return (result.fault, result.fault_class, SURVIVED, str(result.cases), f"{result.seconds:.2f}", "", "", "")
    named = result.full.fault_class
    verdict = "unknown" if not named else "right" if named == result.fault_class else "wrong"
    nodes = "" if result.nodes is None else str(result.nodes)
    caught_by = result.caught_by if result.caught_by == result.claim else f"{result.caught_by} (not {result.claim})"
    return (
        *(result.fault, result.fault_class, caught_by),
        *(str(result.cases), f"{result.seconds:.2f}", nodes, named, verdict),
    )


def _widths(faults: Sequence[Fault]) -> list[int]:
    """Known before the first result, so that lines can be shown as they come."""
    columns = (
        [HEADING[0], *(one.id for one in faults)],
        [HEADING[1], *(one.fault_class for one in faults)],
        [HEADING[2], *(one.claim for one in faults)],
    )
    classes = max(len(name) for group in CLASSES.values() for name in group)
    return [*(max(len(text) for text in column) for column in columns), 5, 7, 5, classes, 0]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(
        cell.rjust(width) if column in NUMBERS else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ).rstrip()


def _share(count: int, total: int) -> str:
    return f"{count} of {total}" + (f" ({100 * count / total:.1f} %)" if total else "")
