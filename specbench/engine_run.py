"""Engines on a sentinel or a real model: every mode asked the same requests, judged by its tokens; a table, a page."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specbench.audit import Audit, Output, audit_greedy, audit_outputs, counted, first_wrong, no_tokens
from specbench.careless import Careless
from specbench.engine_models import RealModel, SentinelModel, ended
from specbench.engines import REFUSALS, Answer, Engine, Files, Missing, Request, Settings
from specbench.engines.apart import Died
from specbench.law.sequential import ALPHA
from specbench.record import BUG, EQUAL, NOT_TESTED
from specbench.reference.sentinel import DTYPES
from specbench.regret import Oracle, Plain, audit_ties, plain_of
from specbench.types import Sampling

GREEDY = Sampling(0.0)
MOST_TRIES = 3  # at a smaller case of what is wrong
# Whose activations are rounded as our own forward's in that dtype; those of a quantised file are not.
_OUR_DTYPES = DTYPES | {"f32": DTYPES["fp32"]}


@dataclass(frozen=True)
class Result:
    """One mode of an engine in one format of the weights. num_*: sums over the requests, None where it does not say.
    smallest: of what is wrong on a sentinel, the shortest request that fails by itself."""

    engine: str
    model: str
    sampling: str
    mode: str
    weights: str
    audit: Audit
    num_forwards: int | None
    num_drafted: int | None
    num_kept: int | None
    seconds: float
    drafts: bool = False
    smallest: str = ""

    @property
    def drafting(self) -> str:
        """What shows that drafts were verified."""
        if self.num_drafted:
            return f"{self.num_kept} of {self.num_drafted} drafts kept"
        if self.num_forwards:
            return f"{self.audit.num_tokens / self.num_forwards:.2f} tokens a forward"
        return "it does not say" if self.drafts else "-"

    def as_fields(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "audit"}
        return own | self.audit.as_fields()

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Result:
        audit = Audit(**{name: fields[name] for name in Audit.__dataclass_fields__})
        own = {name: fields[name] for name in cls.__dataclass_fields__ if name != "audit"}
        return cls(audit=audit, **own)


@dataclass(frozen=True)
class _Run:
    """What one mode answered. refused, raised: a sentence, or empty. answers: one for each output."""

    mode: str
    outputs: tuple[Output, ...]
    answers: tuple[Answer, ...]
    refused: str
    raised: str
    seconds: float


def run_engines(
    engines: Mapping[str, Engine],
    model: SentinelModel | RealModel,
    *,
    weights: Sequence[str] | None,
    modes: Sequence[str] | None,
    sampling: Sampling = GREEDY,
    max_new_tokens: int,
    tell: Callable[[str], None],
) -> Iterator[Result]:
    """Those that are installed, one after the other. weights, modes: None takes the first format that the model has,
    and every mode that it can judge. tell: is given each line as it comes."""
    for name, engine in engines.items():
        try:
            tell(f"{engine.version()} on {model.name}")
        except Missing as missing:
            tell(f"{name} is not installed: {missing}; or let `specbench engines {name} --env DIR` install it apart")
            continue
        for one in run_engine(
            engine, model, weights=weights, modes=modes, sampling=sampling, max_new_tokens=max_new_tokens
        ):
            audit = one.audit
            tell(f"  {one.weights:5} {one.mode:26} {audit.verdict:10}  {audit.sentence}; {one.drafting}")
            yield one


def run_engine(
    engine: Engine,
    model: SentinelModel | RealModel,
    *,
    weights: Sequence[str] | None = None,
    modes: Sequence[str] | None = None,
    sampling: Sampling = GREEDY,
    max_new_tokens: int,
) -> Iterator[Result]:
    """One result a mode and format, as it comes. ValueError names an unknown mode or format."""
    for what, given, known in (("mode", modes, engine.modes), ("weights", weights, engine.weights)):
        for one in given or ():
            if one not in known:
                raise ValueError(f"{what} = {one!r} must be one of {'; '.join(known)}")
    if sampling.temperature and not model.has_law:
        raise ValueError(f"{model.name} has no law that sampled tokens could be held against: take a sentinel")
    with tempfile.TemporaryDirectory(prefix="specbench-engines-") as folder:
        for one in weights or (_first_format(engine, model),):
            files = model.write(Path(folder) / one, one)
            runs = _Runs(engine, model, files, one, sampling, max_new_tokens)
            if isinstance(model, SentinelModel):
                yield from _judged_by_program(runs, model, modes or [*engine.modes])
            else:
                yield from _judged_by_ties(runs, model, modes)


def _first_format(engine: Engine, model: SentinelModel | RealModel) -> str:
    """The engine's first that the model has; a real model's GGUF file before what other engines read as folders."""
    if isinstance(model, RealModel) and model.gguf_format in engine.weights:
        return model.gguf_format
    return next((one for one in engine.weights if one in model.formats), engine.weights[0])


@dataclass(frozen=True)
class _Runs:
    """An engine with all that it is asked, but for the mode."""

    engine: Engine
    model: SentinelModel | RealModel
    files: Files
    weights: str
    sampling: Sampling
    max_new_tokens: int

    def run(self, mode: str, requests: Mapping[str, Request] | None = None) -> _Run:
        """requests: None for all of the model's."""
        requests = requests or self.model.requests(self.max_new_tokens)
        started, refused, raised = time.perf_counter(), "", ""
        answers: list[Answer] = []
        settings = Settings(
            mode,
            self.weights,
            temperature=self.sampling.temperature,
            top_k=self.sampling.top_k,
            top_p=self.sampling.top_p,
            min_p=self.sampling.min_p,
        )
        try:
            answers.extend(self.engine.generate(self.files, [*requests.values()], settings))
        except REFUSALS as error:
            refused = _line(error)
        except Died as error:
            raised = _line(error)
        except Exception as error:  # an engine may raise anything; the other modes go on
            raised = f"raised {type(error).__name__}: {_line(error)}"
        else:
            if len(answers) != len(requests):
                raised = f"gave {len(answers)} answers to {len(requests)} requests"
        outputs = tuple(
            Output(one.prompt, answer.tokens, name, mode, one.max_new_tokens, answer.logprobs)
            for (name, one), answer in zip(requests.items(), answers, strict=False)
        )
        return _Run(mode, outputs, tuple(answers), refused, raised, time.perf_counter() - started)

    def result(self, run: _Run, audit: Audit, *, smallest: str = "") -> Result:
        """audit: by the tokens; what else there is to say of the mode comes here."""
        num_forwards, num_drafted, num_kept = (
            _sum([getattr(one, name) for one in run.answers]) for name in ("num_forwards", "num_drafted", "num_kept")
        )
        if run.raised and audit.verdict != BUG:
            after = f"after {counted(len(run.answers), 'answer')} of {len(self.model.requests(1))} it {run.raised}"
            audit = replace(audit, verdict=BUG, num_wrong=1, sentence=after)
        elif run.refused and audit.verdict != BUG:
            audit = replace(audit, verdict=NOT_TESTED, num_wrong=0, sentence=f"refused: {run.refused}")
        elif audit.verdict != BUG and self.engine.modes[run.mode].drafts and num_drafted == 0:
            audit = replace(audit, verdict=NOT_TESTED, sentence="no draft was verified")
        return Result(
            engine=self.engine.version(),
            model=self.model.name,
            sampling=_described(self.sampling),
            mode=run.mode,
            weights=self.weights,
            audit=audit,
            num_forwards=num_forwards,
            num_drafted=num_drafted,
            num_kept=num_kept,
            seconds=run.seconds,
            drafts=self.engine.modes[run.mode].drafts,
            smallest=smallest,
        )


def _judged_by_program(runs: _Runs, model: SentinelModel, modes: Sequence[str]) -> Iterator[Result]:
    for mode in modes:
        run = runs.run(mode)
        alpha, last = ALPHA / len(runs.engine.modes), runs.engine.temperature_last
        audits = audit_outputs(model.program, run.outputs, runs.sampling, temperature_last=last, alpha=alpha)
        audit = audits[0] if audits else no_tokens(mode)
        is_reduced = audit.verdict == BUG and not runs.sampling.temperature and not isinstance(runs.engine, Careless)
        yield runs.result(run, audit, smallest=_smallest(runs, model, run) if is_reduced else "")


def _smallest(runs: _Runs, model: SentinelModel, run: _Run) -> str:
    """The first few wrong outputs, those of the shortest prompts first, are asked for again, alone: no further than the
    first wrong token, then whole."""
    requests, wrong = runs.model.requests(runs.max_new_tokens), []
    for one in run.outputs:
        place = first_wrong(model.program, one)
        if place is not None:
            wrong.append((len(one.prompt), place, one.name))
    tries = [(name, num) for _, place, name in sorted(wrong)[:MOST_TRIES] for num in (place + 1, runs.max_new_tokens)]
    for name, num in tries:
        alone = {name: replace(requests[name], max_new_tokens=num)}
        again = runs.run(run.mode, alone)
        if any(audit.verdict == BUG for audit in audit_greedy(model.program, again.outputs)):
            said = list(again.outputs[0].tokens)
            right = model.program.continuation(alone[name].prompt, len(said))
            return (
                f"prompt {list(alone[name].prompt)} ({name}), {num} new tokens, alone: it gives {said}, "
                f"and must give {right}"
            )
    return "no single request fails by itself, so that it takes several, or more tokens behind the wrong one"


def _judged_by_ties(runs: _Runs, model: RealModel, modes: Sequence[str] | None) -> Iterator[Result]:
    """Plain decoding comes first in all its shapes: it is what the others are judged by, and itself by its other
    shapes."""
    oracle = Oracle(runs.files.target)
    plain = {name: runs.run(name) for name in runs.engine.modes if name.startswith("plain")}
    dtype = _OUR_DTYPES.get(runs.weights)
    shown = {name: plain_of(oracle, _outputs(model, run), dtype) for name, run in plain.items()}
    reference = _outputs(model, plain["plain"])
    for name, run in plain.items():
        if modes is None or name in modes:
            others = _joined([one for other, one in shown.items() if other != name] or [shown[name]])
            yield runs.result(run, _tied(oracle, model, others, run, reference, runs.weights))
    for name in modes if modes is not None else [one for one in runs.engine.modes if one not in plain]:
        if name in plain:
            continue
        run = runs.run(name)
        if not runs.engine.modes[name].as_plain:
            audit = Audit(name, NOT_TESTED, len(run.outputs), 0, 0, "it rounds otherwise than plain decoding")
            yield runs.result(run, audit)
            continue
        yield runs.result(run, _tied(oracle, model, _joined([*shown.values()]), run, reference, runs.weights))


def _tied(
    oracle: Oracle, model: RealModel, plain: Plain, run: _Run, reference: Sequence[Output], weights: str
) -> Audit:
    outputs = _outputs(model, run)
    return audit_ties(oracle, plain, outputs, reference, weights=weights) if outputs else no_tokens(run.mode)


def _joined(shown: Sequence[Plain]) -> Plain:
    return Plain(
        tuple(error for one in shown for error in one.errors),
        tuple(place for one in shown for place in one.places),
        max(one.rounding for one in shown),
        shown[0].source,
    )


def _outputs(model: RealModel, run: _Run) -> list[Output]:
    return [ended(one, model.ends) for one in run.outputs]


def _described(sampling: Sampling) -> str:
    if not sampling.temperature:
        return "greedy"
    filters = {name: getattr(sampling, name) for name in ("top_k", "top_p", "min_p")}
    return ", ".join(
        [f"temperature {sampling.temperature:g}", *(f"{k} {v:g}" for k, v in filters.items() if v is not None)]
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _sum(numbers: Sequence[int | None]) -> int | None:
    told = [one for one in numbers if one is not None]
    return sum(told) if told else None


PAGE = """# Engines that nobody here wrote

Every mode is asked the same requests and judged by its tokens alone.

- On a [sentinel](sentinel.md) the next token is known by integers and leads by 10: EQUAL, or BUG with the first wrong
  token. The drafter agrees with the target in three contexts of five, so that drafts are kept and refused; for prompt
  lookup and n-gram modes some prompts repeat their own continuation, with tokens spoilt. Above temperature 0 the
  tokens are held against the exact law behind each text; *would have shown* says how far off it could still be.
- On a real model each token is held against an oracle in fp64 that reads the same text. A token's regret is how far
  its logit lies below the best. NOISE needs every regret to be within a bound that comes from the errors of this
  engine's plain decoding in all its shapes, and no more of them than plain decoding has. The drafter is the model
  itself, rounded to 4 bits.
- NOT TESTED: it refuses the mode, drafted nothing, or rounds otherwise than its plain decoding. An engine that raises,
  dies or hangs in a mode is a BUG of that mode.

*drafting* shows that drafts were really verified. What was found is told in [reproductions](reproductions/README.md),
with scripts that use the engine alone.
"""


def page(runs: Sequence[tuple[str, Sequence[Result]]]) -> str:
    """runs: commands and what they found."""
    parts = [PAGE]
    for command, results in runs:
        parts += ["## `" + command + "`", "", *table(results), ""]
        for one in results:
            if one.smallest:
                parts += [f"{one.engine}, {one.mode}, {one.weights}: smallest case: {one.smallest}", ""]
    return "\n".join(parts)


def results_of(data: Any, where: str) -> tuple[str, list[Result]]:
    """What --json has written: the command and its results. ValueError where it is something else."""
    try:
        return str(data["command"]), [Result.from_fields(one) for one in data["engines"]]
    except (KeyError, TypeError):
        raise ValueError(f"{where} is not what `specbench engines --json` writes") from None


def table(results: Sequence[Result]) -> list[str]:
    """Markdown lines."""
    lines = [
        "| engine | model | weights | sampling | mode | verdict | tokens | drafting | s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in results:
        says_enough = one.audit.verdict == EQUAL and one.sampling == "greedy" and not one.audit.facts
        note = "" if says_enough else f": {one.audit.sentence}"
        lines.append(
            f"| {one.engine} | {one.model} | {one.weights} | {one.sampling} | {one.mode} | {one.audit.verdict}{note} | "
            f"{one.audit.num_tokens:,} | {one.drafting} | {one.seconds:.1f} |"
        )
    return lines
