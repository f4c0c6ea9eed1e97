"""The exit codes of a run, in one place: what each means, as they really come out. Stable: a gate may rely on them.

A target that ends the process leaves with a code of its own, unless it is judged in a process of its own.
"""

from __future__ import annotations

from specbench.watchdog import EXIT_HUNG

HELD = 0
FAILED = 1
INTERRUPTED = 2
INTERNAL = 3
UNUSABLE = 4
NOTHING_RAN = 5
HUNG = EXIT_HUNG

EXIT_CODES: dict[int, str] = {
    HELD: "every tested claim holds, or fails as the ledger says",
    FAILED: "a claim fails, a required one was not tested, or a ledger entry no longer fails",
    INTERRUPTED: "interrupted, or a test file could not be imported",
    INTERNAL: "pytest or one of its plugins broke, not the target",
    UNUSABLE: "a wrong option, target, model, ledger or case, told in one sentence; nothing was judged",
    NOTHING_RAN: "no test was selected: -k, -m or a path left nothing over",
    HUNG: "a call of the target hung past the timeout; the table so far is printed, the record written",
}


def markdown() -> str:
    """The table as the README shows it."""
    return "\n".join(
        ["| exit code | meaning |", "|---|---|", *(f"| {code} | {text} |" for code, text in EXIT_CODES.items())]
    )
