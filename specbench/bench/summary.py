"""From rows to what is told: a summary as JSON, lines for a terminal, and two runs held against each other. No torch.

A setting that the gate did not pass has no speed-up, here or anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from specbench.bench import metrics
from specbench.bench.metrics import (
    Interval,
    acceptance_of,
    breakdown_of,
    geometric_interval,
    geometric_mean,
    speedup_of,
)
from specbench.bench.rows import Gate, Row, Run, Setting, differences
from specbench.bench.sweep import Candidate, Costs, knee, predicted, recommendation
from specbench.sanitize import plain as printable

SUMMARY_SCHEMA = 1
UNVERIFIED = "unverified"
MOST_OF_A_NAME = 60  # characters


def summary_of(run: Run) -> dict[str, Any]:
    """JSON, NaN as null. Speed-ups are against `baseline`, the faster of the plain settings over all prompts."""
    baseline = baseline_of(run)
    settings = {name: _told(run, setting, baseline) for name, setting in run.settings.items() if run.of(name)}
    found = {
        "schema": SUMMARY_SCHEMA,
        **{name: run.header[name] for name in ("definition", "machine", "versions", "command", "started")},
        "definitions": metrics.__doc__,
        "baseline": baseline,
        "num_prompts": len({one.prompt for one in run.rows}),
        "load": _span([one.load for one in run.rows]),
        "settings": settings,
        "duels": _duels(run),
        "curves": _curves(run, settings, baseline),
        "cost": [dict(one) for one in run.others.get("cost", ())],
    }
    found["recommendation"] = recommendation(_candidates(run, settings), baseline=baseline or "plain decoding")
    return _without_nan(found)


def baseline_of(run: Run) -> str | None:
    """The plain setting that passed and needs the least time a token (geometric mean over the prompts that all of them
    have); one for the whole run, since the faster of two noisy times prompt by prompt would be faster than either."""
    plain = [name for name, one in run.settings.items() if one.is_plain and run.of(name) and _passed(run, name)]
    if not plain:
        return None
    first = plain[0]
    return max(plain, key=lambda name: speedup_of(run.pairs(first, name), num_resamples=1).decode.value)


def _passed(run: Run, name: str) -> bool:
    return name in run.gates and run.gates[name].passed


def _told(run: Run, setting: Setting, baseline: str | None) -> dict[str, Any]:
    rows = run.of(setting.name)
    gate = run.gates.get(setting.name) or Gate(setting.name, "NOT TESTED", "the run ended before it was judged")
    phases = [one.phases for one in rows if one.phases is not None]
    parts = breakdown_of(phases) if phases else None
    told: dict[str, Any] = {
        "setting": setting.as_fields(),
        "verdict": gate.verdict,
        "sentence": gate.sentence,
        "law_checked": gate.law_checked,
        "num_rows": len(rows),
        "num_tokens": sum(len(one.tokens) for one in rows),
        "seconds_a_token": _median(one.timing.seconds_a_token for one in rows),
        "tokens_a_second": _median(one.timing.tokens_a_second for one in rows),
        "first_seconds": _median(one.first_seconds for one in rows),
        "acceptance": _acceptance(rows),
        "breakdown": None if parts is None else asdict(parts),
        "looping": sum(one.looping for one in rows) / len(rows),
        "memory": next((dict(one) for one in run.others.get("memory", ()) if one["setting"] == setting.name), None),
        "speedup": None,
    }
    if gate.passed and baseline is not None:
        told["speedup"] = asdict(speedup_of(run.pairs(baseline, setting.name)))
    return told


def _acceptance(rows: Sequence[Row]) -> dict[str, Any]:
    """Over all rows, and the pooled length by category."""
    found = acceptance_of([one.rounds for one in rows])
    by_category: dict[str, list[Row]] = {}
    for one in rows:
        by_category.setdefault(one.category, []).append(one)
    return {
        **asdict(found),
        "by_depth": [{**asdict(one), "conditional": one.conditional, "joint": one.joint} for one in found.by_depth],
        "by_category": {
            name: acceptance_of([one.rounds for one in some]).length for name, some in sorted(by_category.items())
        },
    }


def _duels(run: Run) -> list[dict[str, Any]]:
    """Our decoder against transformers' on the same drafts, setting by setting, and the best of each over the grid that
    both ran. The ratio says how many times as fast ours is."""
    own, theirs = (
        {
            _shape(one): name
            for name, one in run.settings.items()
            if one.side == side and one.layout == "tree_mask" and _timed(run, name)
        }
        for side in ("own", "transformers")
    )
    shared = [shape for shape in own if shape in theirs]
    duels = [
        {"what": f"{own[shape]} against {theirs[shape]}", **_duel(run, theirs[shape], own[shape])} for shape in shared
    ]
    grid = [shape for shape in shared if shape[0]]
    if len(grid) > 1 and "" in {shape[0] for shape in shared}:
        plain = theirs[next(shape for shape in shared if not shape[0])]
        best = [
            max((side[shape] for shape in grid), key=lambda name: speedup_of(run.pairs(plain, name)).decode.value)
            for side in (own, theirs)
        ]
        what = f"our best of the shared grid ({best[0]}) against transformers' ({best[1]})"
        duels.append({"what": what, **_duel(run, best[1], best[0])})
    return duels


def _shape(one: Setting) -> tuple[Any, ...]:
    return one.drafter, one.gamma, one.width, one.temperature


def _timed(run: Run, name: str) -> bool:
    return bool(run.of(name)) and _passed(run, name)


def _duel(run: Run, theirs: str, ours: str) -> dict[str, Any]:
    """same_text: where ties have not led the two apart, so that the drafts were the same too."""
    found, same = speedup_of(run.pairs(theirs, ours)), speedup_of(run.pairs(theirs, ours, same_text=True))
    told = {"decode": found.decode, "end_to_end": found.end_to_end, "same_text": same.decode}
    return {"ours": ours, "theirs": theirs, **{name: asdict(one) for name, one in told.items()}}


def _curves(run: Run, settings: Mapping[str, Mapping[str, Any]], baseline: str | None) -> list[dict[str, Any]]:
    """Of each drafter of our own with several gammas: measured and predicted by gamma, the knee, both optima."""
    families: dict[tuple[Any, ...], dict[int, str]] = {}
    for name, one in run.settings.items():
        if one.side == "own" and one.drafter and name in settings and settings[name]["speedup"]:
            families.setdefault((one.drafter, one.width, one.layout, one.temperature, one.batch), {})[one.gamma] = name
    curves = []
    for (drafter, width, layout, temperature, batch), names in families.items():
        if len(names) < 2:
            continue
        measured = {gamma: Interval(**settings[name]["speedup"]["decode"]) for gamma, name in sorted(names.items())}
        curve: dict[str, Any] = {
            "drafter": drafter,
            "width": width,
            "layout": layout,
            "temperature": temperature,
            "batch": batch,
            "measured": {gamma: asdict(one) for gamma, one in measured.items()},
            "knee": knee(measured),
            "best": max(measured, key=lambda gamma: measured[gamma].value),
            "predicted": None,
            "predicted_best": None,
        }
        if width == 1 and batch == 1 and baseline is not None:
            curve["predicted"] = _predicted(run, names[max(names)], baseline)
        if curve["predicted"]:
            curve["predicted_best"] = max(curve["predicted"], key=lambda gamma: curve["predicted"][gamma])
        curves.append(curve)
    return curves


def _predicted(run: Run, deepest: str, baseline: str) -> dict[int, float] | None:
    """Speed-up by gamma, told as the measured one is: prompt by prompt against the baseline's own time there, and the
    geometric mean of that. Over all tokens at once it would be below it: prompts that accept little have most rounds.
    None where costs are not known."""
    rows = run.of(deepest)
    if (costs := costs_of(run, rows)) is None:
        return None
    pairs = run.pairs(baseline, deepest)
    found = {}
    for gamma in range(1, run.settings[deepest].gamma + 1):
        ratios = []
        for pair in pairs:
            rounds = [one for row in rows if row.prompt == pair.prompt for one in row.later_rounds]
            seconds = predicted(rounds, costs, gamma)
            ratios.append(median(one.seconds_a_token for one in pair.baseline) / seconds)
        found[gamma] = geometric_mean([one for one in ratios if math.isfinite(one)])
    return found


def costs_of(run: Run, rows: Sequence[Row]) -> Costs | None:
    """Of the rounds of rows. None without a measured curve of forwards, without phases, and where the drafted depth is
    not told."""
    known = [one for one in run.others.get("cost", ()) if one["model"] == "own"]
    told = [one for one in rows if one.phases is not None and one.num_rows is not None]
    rounds = [one for row in told for one in row.later_rounds]  # phases begin behind the first
    if not known or not rounds or any(one.nodes is None for one in rounds):
        return None
    parts = breakdown_of(one.phases for one in told if one.phases is not None)
    forward = {int(width): float(seconds) for width, seconds in known[-1]["seconds"].items()}
    costs = Costs(forward, 0.0, 0.0)
    depth = sum(one.depth or 0 for one in rounds)
    forwards = sum(costs.forward_of((one.nodes or 0) + 1) for one in rounds)
    rest = parts.host + parts.commit + parts.verify - forwards
    return Costs(forward, parts.draft / depth if depth else 0.0, rest / len(rounds))


def _candidates(run: Run, settings: Mapping[str, Mapping[str, Any]]) -> list[Candidate]:
    """Settings of ours, or of a target, that draft and have a speed-up."""
    found = []
    for name, told in settings.items():
        setting = run.settings[name]
        if setting.is_plain or setting.side == "transformers" or not told["speedup"]:
            continue
        parts, rows = told["breakdown"], run.of(name)
        costs = costs_of(run, rows)
        told_rows = [one for one in rows if one.num_rows is not None]
        num_rounds = sum(len(one.rounds) for one in told_rows)
        ratio = None
        if costs is not None and num_rounds:
            usual = sum(one.num_rows or 0 for one in told_rows) / num_rounds
            ratio = costs.ratio(usual, setting.batch)
        total = sum(parts.values()) if parts else 0.0
        found.append(
            Candidate(
                name,
                Interval(**told["speedup"]["decode"]),
                told["acceptance"]["length"],
                draft_share=parts["draft"] / total if total else None,
                host_share=(parts["host"] + parts["commit"]) / total if total else None,
                cost_ratio=ratio,
            )
        )
    return found


@dataclass(frozen=True)
class Change:
    """One setting in two runs. ratio: seconds a token before / after, below 1 where it became slower; where there is an
    anchor, divided by the anchor's own."""

    setting: str
    ratio: Interval
    verdict: str  # "slower", "faster", "no difference shown", "wrong now", "anchor"

    @property
    def is_regression(self) -> bool:
        return self.verdict in ("slower", "wrong now")


def compare(before: Run, after: Run, *, force: bool = False) -> list[Change]:
    """Every setting that both have, on the prompts and token counts that both have. A change is told where the 95 %
    interval over prompts leaves 1 out.

    A machine that is slower today slows all settings alike, which no interval over prompts knows of. So times are taken
    relative to an anchor, transformers' plain decoding in the same run, where both runs have it; its own change is
    shown and is nobody's regression. ValueError for another machine or definition, unless forced, and for runs without
    a setting in common.
    """
    told = [
        f"{what}: {one}"
        for what in ("machine", "definition")
        for one in differences(_comparable(before, what), _comparable(after, what))
    ]
    if told and not force:
        raise ValueError(
            f"these runs are of another machine or definition ({'; '.join(told[:4])}): what differs between them may "
            "be that; say --force to compare them all the same"
        )
    anchor = next((name for name, one in before.settings.items() if _is_anchor(one) and _timed(after, name)), None)
    changes = []
    for name, setting in before.settings.items():
        if after.settings.get(name) != setting or not before.of(name) or not after.of(name):
            continue
        if not _passed(after, name) and _passed(before, name):
            changes.append(Change(name, Interval(math.nan, math.nan, math.nan, 0), "wrong now"))
        elif _passed(after, name) and _passed(before, name):
            changes.append(_change(name, before, after, anchor))
    if not changes:
        raise ValueError("the runs have no setting in common that passed the gate in the first of them")
    return changes


def _comparable(run: Run, what: str) -> dict[str, Any]:
    """Which settings and prompts there were differs harmlessly: those that both have are compared."""
    return {name: value for name, value in run.header[what].items() if name not in ("settings", "prompts")}


def _is_anchor(setting: Setting) -> bool:
    return setting.side == "transformers" and setting.is_plain


def _change(name: str, before: Run, after: Run, anchor: str | None) -> Change:
    ratios = _ratios(name, before, after)
    if anchor is not None and name != anchor:
        drift = _ratios(anchor, before, after)
        ratios = {prompt: one / drift[prompt] for prompt, one in ratios.items() if prompt in drift}
    found = geometric_interval([one for one in ratios.values() if math.isfinite(one)])
    if name == anchor:
        return Change(name, found, "anchor")
    return Change(name, found, "slower" if found.high < 1 else "faster" if found.low > 1 else "no difference shown")


def _ratios(name: str, before: Run, after: Run) -> dict[str, float]:
    """Seconds a token before / after, by prompt, where both gave the same number of tokens."""
    times = [_by_prompt(run.of(name)) for run in (before, after)]
    return {key[0]: times[0][key] / times[1][key] for key in times[0] if key in times[1]}


def _by_prompt(rows: Iterable[Row]) -> dict[tuple[str, int], float]:
    """The median time a token by prompt and number of tokens."""
    found: dict[tuple[str, int], list[float]] = {}
    for one in rows:
        found.setdefault((one.prompt, len(one.tokens)), []).append(one.timing.seconds_a_token)
    return {key: median(some) for key, some in found.items()}


def comparison_table(changes: Sequence[Change]) -> list[str]:
    """Lines of text."""
    width = max(len(one.setting) for one in changes)
    lines = []
    for one in changes:
        times = "" if math.isnan(one.ratio.value) else f"  {interval(asdict(one.ratio))}"
        lines.append(f"{one.setting:{width}}  {one.verdict}{times}")
    return lines


def lines(summary: Mapping[str, Any]) -> list[str]:
    """For a terminal: which setting to use, and a line for each. The page of `reports` has the rest."""
    table = [("setting", "verdict", "speed-up [95 %], n", "ms a token", "tokens a forward", "peak MiB")]
    for name, told in summary["settings"].items():
        memory = told["memory"]
        cells = (
            interval(told["speedup"]["decode"]) if told["speedup"] else UNVERIFIED,
            _number(told["seconds_a_token"], 1000, ".1f"),
            _number(told["acceptance"]["length"], 1, ".2f"),
            _number(memory["bytes"]["peak"] if memory else None, 2**-20, ".0f"),
        )
        table.append((printable(name, MOST_OF_A_NAME, one_line=True), told["verdict"], *cells))
    widths = [max(len(row[idx]) for row in table) for idx in range(len(table[0]))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    wrong = [
        printable(f"{name}: {told['sentence']}", 2_000, one_line=True)
        for name, told in summary["settings"].items()
        if told["verdict"] != "EQUAL"
    ]
    return [printable(summary["recommendation"], 2_000, one_line=True), "", *shown, *([""] if wrong else []), *wrong]


def interval(one: Mapping[str, Any]) -> str:
    """`1.32x [1.25, 1.40], 16`; a dash where there is no number."""
    if not _is_number(one["value"]):
        return "-"
    ends = f" [{one['low']:.2f}, {one['high']:.2f}]" if _is_number(one["low"]) else ""
    return f"{one['value']:.2f}x{ends}, {one['n']}"


def _number(value: float | None, factor: float, form: str) -> str:
    return f"{value * factor:{form}}" if _is_number(value) and value is not None else "-"


def _is_number(value: float | None) -> bool:
    return value is not None and not math.isnan(value)


def _median(values: Iterable[float]) -> float | None:
    finite = [one for one in values if math.isfinite(one)]
    return median(finite) if finite else None


def _span(values: Sequence[float]) -> list[float]:
    return [min(values), max(values)] if values else [0.0, 0.0]


def _without_nan(value: Any) -> Any:
    """JSON has no NaN; keys become strings, so that what is written is what is read."""
    if isinstance(value, Mapping):
        return {str(key): _without_nan(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
