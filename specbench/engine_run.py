"""Engines on a sentinel: every mode asked the same requests, each judged by its tokens; a table, a page, JSON."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.audit import Audit, Output, audit_greedy, requests_for
from specbench.engines import Answer, Engine, Files, Missing
from specbench.record import BUG, EQUAL, NOT_TESTED
from specbench.reference.sentinel import DTYPES, GGUF_TYPES, SYMBOLS, Program, Sentinel, export, export_gguf

AGREEMENT = 0.6  # of the drafter: it is refused often enough


@dataclass(frozen=True)
class Result:
    """One mode of an engine in one format of the weights. num_*: sums over the requests, None where it does not say."""

    engine: str
    mode: str
    weights: str
    audit: Audit
    num_forwards: int | None
    num_drafted: int | None
    num_kept: int | None
    seconds: float

    @property
    def drafting(self) -> str:
        """What shows that drafts were verified."""
        if self.num_drafted:
            return f"{self.num_kept} of {self.num_drafted} drafts kept"
        if self.num_forwards:
            return f"{self.audit.num_tokens / self.num_forwards:.2f} tokens a forward"
        return "-"

    def as_fields(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "audit"}
        return own | self.audit.as_fields()


def run_engines(
    engines: Mapping[str, Engine],
    *,
    weights: Sequence[str] | None,
    modes: Sequence[str] | None,
    max_new_tokens: int,
    seed: int,
    tell: Callable[[str], None],
) -> Iterator[Result]:
    """Those that are installed, one after the other. weights, modes: None takes the first format and every mode. tell:
    is given each line as it comes."""
    for name, engine in engines.items():
        try:
            tell(engine.version())
        except Missing as missing:
            tell(f"{name} is not installed: {missing}")
            continue
        chosen = {"weights": weights or engine.formats[:1], "modes": modes or engine.modes}
        for one in run_engine(engine, **chosen, max_new_tokens=max_new_tokens, seed=seed):
            audit = one.audit
            tell(f"  {one.weights:5} {one.mode:26} {audit.verdict:10}  {audit.sentence}; {one.drafting}")
            yield one


def run_engine(
    engine: Engine, *, weights: Sequence[str], modes: Sequence[str], max_new_tokens: int, seed: int
) -> Iterator[Result]:
    """One result a mode and format, as it comes. ValueError names an unknown mode or format."""
    for name, given, known in (("mode", modes, engine.modes), ("weights", weights, engine.formats)):
        for one in given:
            if one not in known:
                raise ValueError(f"{name} = {one!r} must be one of {'; '.join(known)}")
    program = Program.seeded(seed)
    with tempfile.TemporaryDirectory(prefix="specbench-sentinel-") as folder:
        for one in weights:
            files = _written(program, Path(folder) / one, one, seed=seed)
            for mode in modes:
                yield _judged(engine, files, program, mode, one, max_new_tokens=max_new_tokens, seed=seed)


def _judged(
    engine: Engine, files: Files, program: Program, mode: str, weights: str, *, max_new_tokens: int, seed: int
) -> Result:
    requests = [one for one in requests_for(program, SYMBOLS, max_new_tokens=max_new_tokens, seed=seed) if one.text]
    asked = [(one.prompt, one.max_new_tokens) for one in requests]
    started, failed = time.perf_counter(), ""
    answers: list[Answer] = []
    try:
        answers.extend(engine.generate(files, asked, mode=mode, weights=weights))
    except Exception as error:  # an engine may raise anything; the other modes go on
        failed = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    outputs = [
        Output(one.prompt, answer.tokens, one.name, mode, one.max_new_tokens)
        for one, answer in zip(requests, answers, strict=False)
    ]
    audits = audit_greedy(program, outputs)
    audit = audits[0] if audits else Audit(mode, NOT_TESTED, 0, 0, 0, "no tokens to judge")
    if failed and audit.verdict != BUG:
        audit = Audit(mode, NOT_TESTED, len(outputs), audit.num_tokens, 0, f"it raised {failed}")
    num_forwards, num_drafted, num_kept = (
        _sum([getattr(one, name) for one in answers]) for name in ("num_forwards", "num_drafted", "num_kept")
    )
    if audit.verdict == EQUAL and not mode.startswith("plain") and num_drafted == 0:
        audit = Audit(mode, NOT_TESTED, len(outputs), audit.num_tokens, 0, "no draft was verified")
    seconds = time.perf_counter() - started
    return Result(engine.version(), mode, weights, audit, num_forwards, num_drafted, num_kept, seconds)


def _written(program: Program, folder: Path, weights: str, *, seed: int) -> Files:
    """Only what an engine of that format reads."""
    folder.mkdir()
    files = Files(folder / "target", folder / "drafter", folder / "target.gguf", folder / "drafter.gguf")
    drafter = program.drafter(AGREEMENT, seed=seed)
    for one, where, gguf in (
        (program, files.target, files.target_gguf),
        (drafter, files.drafter, files.drafter_gguf),
    ):
        if weights in GGUF_TYPES:
            export_gguf(Sentinel(one), gguf, kind=weights)
        if weights in DTYPES:
            export(Sentinel(one), where, dtype=weights)
    return files


def _sum(numbers: Sequence[int | None]) -> int | None:
    told = [one for one in numbers if one is not None]
    return sum(told) if told else None


PAGE = """# Engines that nobody here wrote

Each mode is asked the same greedy requests on a [sentinel](sentinel.md), whose next token is known by integers
and leads by 10, and is judged by its tokens alone: EQUAL, BUG with the first wrong token, or NOT TESTED where
nothing was drafted or where it does not run. The drafter agrees with the target in three contexts of five, so
that drafts are kept and refused; for prompt lookup and n-gram modes some prompts repeat their own continuation,
with tokens spoilt. *drafting* shows that drafts were really verified. An engine is installed by itself:
`specbench engines NAME` says how.
"""


def page(results: Sequence[Result], command: str) -> str:
    return "\n".join([PAGE, f"<!-- output of: {command} -->", *table(results), ""])


def table(results: Sequence[Result]) -> list[str]:
    """Markdown lines."""
    lines = [
        "| engine | weights | mode | verdict | tokens | drafting | s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in results:
        note = "" if one.audit.verdict == EQUAL else f": {one.audit.sentence}"
        lines.append(
            f"| {one.engine} | {one.weights} | {one.mode} | {one.audit.verdict}{note} | {one.audit.num_tokens:,} | "
            f"{one.drafting} | {one.seconds:.1f} |"
        )
    return lines
