"""What the rows of a benchmark say, as tables and sentences: `specbench.bench.summary`, laid out. Nothing is drawn.

A setting is verified when its gate said EQUAL or NOISE. Only verified settings have a speed or a speed-up here; what
the others drafted and accepted is shown and marked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from specbench.bench.rows import Gate, Row, Run, Setting
from specbench.bench.summary import summary_of
from specbench.record import BUG, EQUAL, NOISE, NOT_TESTED, share_lower_bound
from specbench.reports.table import MISSING, Column, Table, count, mebibytes, milliseconds, named, ratio, share, text
from specbench.sanitize import plain

PHASES = ("draft", "verify", "commit", "host")
PARTS = ("weights", "cache", "tree", "logits")


class Study:
    """A run and its summary, looked at once. ValueError where the rows cannot be summed up."""

    def __init__(self, run: Run) -> None:
        self.run = run
        try:
            self.settings: dict[str, Setting] = run.settings
            self.summary: dict[str, Any] = summary_of(run)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"these rows cannot be summed up: {type(error).__name__} {error}") from None
        self.told: dict[str, dict[str, Any]] = self.summary["settings"]
        self.baseline: str | None = self.summary["baseline"]
        drafting = [name for name in self.told if not self.settings[name].is_plain and self.speedup(name)]
        # Verified settings that draft, the fastest first.
        self.ranked = sorted(drafting, key=lambda name: -self.told[name]["speedup"]["decode"]["value"])
        self.best = self.ranked[0] if self.ranked else None
        plain = [name for name in self.settings if self.settings[name].is_plain]
        # Then plain decodings, then the unverified, each as the header has them.
        self.order = list(dict.fromkeys([*self.ranked, *plain, *self.settings]))

    def speedup(self, name: str) -> Mapping[str, Any] | None:
        """None without a verdict that passed, and where no prompt was timed on both sides."""
        found = self.told.get(name, {}).get("speedup")
        return found if found and found["decode"]["value"] is not None else None

    def gate(self, name: str) -> Gate:
        return self.run.gates.get(name) or Gate(name, NOT_TESTED, "no verdict was recorded")

    def is_verified(self, name: str) -> bool:
        return self.gate(name).passed

    @property
    def drafting(self) -> list[str]:
        """Those that say what their rounds accepted, unverified ones among them."""
        return [
            name
            for name in self.order
            if name in self.told and not self.settings[name].is_plain and self.told[name]["acceptance"]["num_rounds"]
        ]

    @property
    def shown(self) -> list[str]:
        """Of each drafter the first in `order`, the fastest where any has a speed-up, and plain decodings; as tables
        name them."""
        found: dict[tuple[str, str], str] = {}
        for name in self.order:
            found.setdefault((self.settings[name].side, self.settings[name].drafter), named(name))
        return [*found.values()]


@dataclass(frozen=True)
class Headline:
    """sentence: what an engineer with one minute reads. place: on which machine and model. facts: (label, value) beside
    it. notes: below it."""

    sentence: str
    place: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


def headline(study: Study) -> Headline:
    wrong = [name for name in study.settings if study.gate(name).verdict == BUG]
    has = "has" if len(wrong) == 1 else "have"
    notes = [f"{_counted(len(wrong), 'setting')} gave wrong output (BUG) and {has} no speed-up."] if wrong else []
    place, best, baseline = place_of(study), study.best, study.baseline
    if baseline is None:
        sentence = "No speed-up can be given: no plain decoding was both right and timed."
        return Headline(sentence, place, notes=tuple(notes))
    if best is None:
        return Headline("No setting has a speed-up: none was both verified and timed.", place, notes=tuple(notes))
    told, gate = study.told[best], study.gate(best)
    decode = told["speedup"]["decode"]
    over = f"over {_counted(decode['n'], 'prompt')}"
    if decode["low"] is None:
        interval = f"{over}, too few for an interval"
    else:
        interval = f"95 % interval {decode['low']:.2f} to {decode['high']:.2f} {over}"
    times, name, other = f"{decode['value']:.2f}×", _brief(best), _brief(baseline)
    if (decode["low"] or 0.0) > 1:
        sentence = f"{name} decodes {times} as fast as {other} ({interval})"
    else:
        sentence = f"No setting is shown to be faster than {other}: the best, {name}, is at {times} ({interval})"
    right = {
        EQUAL: "its output was right: plain decoding's, token for token",
        NOISE: "its output was right but for ties that rounding explains",
    }[gate.verdict]
    if gate.law_checked:
        right = "its draws were right: their law was checked"
    before = study.told[baseline]
    facts = [
        (
            "output",
            gate.verdict if gate.law_checked else f"{gate.verdict}, {gate.num_equal} of {gate.num_outputs} equal",
        ),
        ("time a token", _from_to(before["seconds_a_token"], told["seconds_a_token"])),
        ("time to the first token", _from_to(before["first_seconds"], told["first_seconds"])),
    ]
    if told["acceptance"]["length"] is not None:
        facts.append(("acceptance length", f"{told['acceptance']['length']:.2f} tokens a forward"))
    notes.insert(0, str(study.summary["recommendation"]))
    if len(study.ranked) > 1:
        fastest = f"{name} is the fastest of {len(study.ranked)} verified settings"
        notes.append(f"{fastest}; the interval does not allow for that choice.")
    return Headline(f"{sentence}, and {right}.", place, tuple(facts), tuple(notes))


def _brief(name: str) -> str:
    return plain(name, 60, one_line=True)


def place_of(study: Study) -> str:
    """`AMD EPYC (2 cores, cpu), SmolLM2 in bf16`, of what the header tells."""
    definition, machine = study.run.header["definition"], study.run.header["machine"]
    where = machine.get("device_name") or machine.get("processor") or "an unnamed machine"
    cores = machine.get("num_cores")
    details = ", ".join(str(one) for one in (f"{cores} cores" if cores else "", machine.get("device")) if one)
    model = definition.get("model") or definition.get("weights") or "an unnamed model"
    dtype = definition.get("dtype")
    return f"{where}{f' ({details})' if details else ''}, {model}{f' in {dtype}' if dtype else ''}"


def verdicts(study: Study) -> Table:
    """law: whether the law of the draws was checked, told where anything was drawn."""
    rows = []
    for name in study.order:
        gate, speedup = study.gate(name), (study.speedup(name) or {}).get("decode", {})
        is_compared = gate.num_outputs > 0 and gate.law_checked is None  # draws are not asked to be equal
        rows.append(
            {
                "setting": name,
                "verdict": gate.verdict,
                **{end: speedup.get(end) for end in ("low", "high")},
                "speedup": speedup.get("value"),
                "n": speedup.get("n"),
                "equal": gate.num_equal if is_compared else None,
                "outputs": gate.num_outputs or None,
                "at_least": share_lower_bound(gate.num_equal, gate.num_outputs) if is_compared else None,
                "law": {None: "greedy", True: "checked", False: "not checked"}[gate.law_checked],
                "sentence": gate.sentence,
            }
        )
    law = (text("law", "law"),) if any(row["law"] != "greedy" for row in rows) else ()
    if not law:
        rows = [{name: value for name, value in row.items() if name != "law"} for row in rows]
    columns = (
        text("setting", "setting"),
        text("verdict", "verdict"),
        ratio("speedup", "speed-up"),
        ratio("low", "from"),
        ratio("high", "to"),
        count("n", "n prompts"),
        count("equal", "equal"),
        count("outputs", "of outputs"),
        share("at_least", "equal, at least"),
        *law,
        text("sentence", "what was found"),
    )
    return Table("verdicts", "Verdict and speed-up of every setting", columns, tuple(rows), _marked(study, rows))


def _marked(study: Study, rows: Sequence[Mapping[str, Any]]) -> frozenset[int]:
    return frozenset(idx for idx, row in enumerate(rows) if row["setting"] == study.best)


def speeds(study: Study) -> Table:
    """Of those that have a speed-up: who was not verified has no speed either."""
    rows = []
    for name in study.order:
        if (speedup := study.speedup(name)) is None:
            continue
        decode, whole, told = speedup["decode"], speedup["end_to_end"], study.told[name]
        rows.append(
            {
                "setting": name,
                "role": "baseline" if name == study.baseline else "",
                "n": decode["n"],
                "speedup": decode["value"],
                "low": decode["low"],
                "high": decode["high"],
                "end_to_end": whole["value"],
                "end_to_end_low": whole["low"],
                "end_to_end_high": whole["high"],
                "tokens_a_second": told["tokens_a_second"],
                "seconds_a_token": told["seconds_a_token"],
                "first_seconds": told["first_seconds"],
                "left_out": len(speedup["left_out"]),
            }
        )
    columns = (
        text("setting", "setting"),
        text("role", ""),
        count("n", "n prompts"),
        ratio("speedup", "speed-up"),
        ratio("low", "from"),
        ratio("high", "to"),
        ratio("end_to_end", "end to end"),
        ratio("end_to_end_low", "from"),
        ratio("end_to_end_high", "to"),
        Column("tokens_a_second", "tokens/s", 1),
        milliseconds("seconds_a_token", "a token"),
        milliseconds("first_seconds", "first token", 0),
        count("left_out", "prompts left out"),
    )
    return Table("speedups", "Speed-up and speed", columns, tuple(rows), _marked(study, rows))


def categories(study: Study) -> Table:
    rows = [
        {"setting": name, "category": category, "n": num, "speedup": value}
        for name in study.order
        if (speedup := study.speedup(name)) is not None and name != study.baseline
        for category, (value, num) in speedup["categories"].items()
    ]
    columns = (
        text("setting", "setting"),
        text("category", "category"),
        count("n", "n prompts"),
        ratio("speedup", "speed-up"),
    )
    return Table("categories", "Speed-up by category: points, no intervals", columns, tuple(rows))


def duels(study: Study) -> Table:
    """The ratio says how many times as fast ours is."""
    rows = [
        {
            "what": one["what"],
            "n": one["decode"]["n"],
            "speedup": one["decode"]["value"],
            "low": one["decode"]["low"],
            "high": one["decode"]["high"],
            "end_to_end": one["end_to_end"]["value"],
        }
        for one in study.summary["duels"]
    ]
    columns = (
        text("what", "what"),
        count("n", "n prompts"),
        ratio("speedup", "times as fast"),
        ratio("low", "from"),
        ratio("high", "to"),
        ratio("end_to_end", "end to end"),
    )
    return Table("duels", "Beside transformers, on the same drafts", columns, tuple(rows))


def gammas(study: Study) -> Table:
    """Measured and predicted by gamma, the best curve first. mark: the knee, and the optimum that costs and acceptance
    predict."""
    rows = []
    for curve in sorted(study.summary["curves"], key=lambda curve: -max(map(_value, curve["measured"].values()))):
        by_gamma = {int(gamma): one for gamma, one in curve["measured"].items()}
        predicted = {int(gamma): one for gamma, one in (curve["predicted"] or {}).items()}
        for gamma in sorted({*by_gamma, *predicted}):
            measured = by_gamma.get(gamma, {})
            marks = {"knee": curve["knee"], "measured best": curve["best"], "predicted best": curve["predicted_best"]}
            rows.append(
                {
                    "curve": _curve_name(curve),
                    "gamma": gamma,
                    "n": measured.get("n"),
                    "speedup": measured.get("value"),
                    "low": measured.get("low"),
                    "high": measured.get("high"),
                    "predicted": predicted.get(gamma),
                    "mark": ", ".join(word for word, at in marks.items() if at == gamma),
                }
            )
    columns = (
        text("curve", "curve"),
        count("gamma", "γ"),
        count("n", "n prompts"),
        ratio("speedup", "measured"),
        ratio("low", "from"),
        ratio("high", "to"),
        ratio("predicted", "predicted"),
        text("mark", ""),
    )
    return Table("gamma", "Speed-up by drafted length γ", columns, tuple(rows))


def _value(interval: Mapping[str, Any]) -> float:
    return interval["value"] or 0.0


def _curve_name(curve: Mapping[str, Any]) -> str:
    """Its drafter, and what of a setting is not as usual."""
    unusual = [
        f"{name.replace('_', ' ')} {curve[name]}"
        for name, usual in (("width", 1), ("layout", "tree_mask"), ("temperature", 0.0), ("batch", 1))
        if curve[name] != usual
    ]
    return ", ".join([str(curve["drafter"]), *unusual])


def acceptances(study: Study) -> Table:
    rows = []
    for name in study.drafting:
        found = study.told[name]["acceptance"]
        rows.append(
            {
                "setting": name,
                "verified": study.is_verified(name),
                **{key: found[key] for key in ("num_requests", "num_rounds", "length", "length_per_request", "rate")},
                "forwards_a_token": found["forwards_a_token"],
            }
        )
    columns = (
        text("setting", "setting"),
        text("verified", "verified"),
        count("num_requests", "n requests"),
        count("num_rounds", "n rounds"),
        Column("length", "length, pooled", 2),
        Column("length_per_request", "length, per request", 2),
        share("rate", "rate"),
        Column("forwards_a_token", "forwards a token", 3),
    )
    return Table("acceptance", "Acceptance", columns, tuple(rows), _marked(study, rows))


def ladder(study: Study) -> Table:
    """The settings of our own decoder in the order in which they were run; none where the run was not of the preset
    `ladder`. A setting that is not verified has no speed-up."""
    words = str(study.run.header["command"]).split()
    is_ladder = ("--preset", "ladder") in pairwise(words)
    rows = []
    for name, setting in study.settings.items() if is_ladder else ():
        if setting.side != "own" or name not in study.told:
            continue
        speedup = (study.speedup(name) or {}).get("decode", {})
        rows.append(
            {
                "setting": name,
                "verdict": study.gate(name).verdict,
                "num_rounds": study.told[name]["acceptance"]["num_rounds"],
                "length": study.told[name]["acceptance"]["length"],
                "speedup": speedup.get("value"),
                **{end: speedup.get(end) for end in ("low", "high")},
            }
        )
    columns = (
        text("setting", "step"),
        text("verdict", "verdict"),
        count("num_rounds", "n rounds"),
        Column("length", "tokens a forward", 2),
        ratio("speedup", "speed-up"),
        ratio("low", "from"),
        ratio("high", "to"),
    )
    return Table("ladder", "Step by step", columns, tuple(rows), _marked(study, rows))


def depths(study: Study) -> Table:
    names = ("depth", "drafted", "reached", "accepted", "conditional", "joint")
    rows = [
        {"setting": name, "verified": study.is_verified(name), **{key: one[key] for key in names}}
        for name in study.drafting
        for one in study.told[name]["acceptance"]["by_depth"]
    ]
    columns = (
        text("setting", "setting"),
        text("verified", "verified"),
        count("depth", "depth"),
        count("drafted", "n drafted"),
        count("reached", "n reached"),
        count("accepted", "n accepted"),
        share("conditional", "conditional"),
        share("joint", "joint"),
    )
    return Table("depths", "Acceptance by depth", columns, tuple(rows))


def lengths(study: Study) -> Table:
    rows = []
    for name in study.drafting:
        found = study.told[name]["acceptance"]
        rows += [
            {
                "setting": name,
                "verified": study.is_verified(name),
                "length": int(accepted) + 1,
                "rounds": num,
                "share": num / found["num_rounds"],
            }
            for accepted, num in found["histogram"].items()
        ]
    columns = (
        text("setting", "setting"),
        text("verified", "verified"),
        count("length", "length of a round"),
        count("rounds", "n rounds"),
        share("share", "share of rounds"),
    )
    return Table("lengths", "Rounds by acceptance length", columns, tuple(rows))


def phases(study: Study) -> Table:
    """Of those that have a speed-up: a token and a round behind the first arrival, over the rows that tell."""
    rows = []
    for name in study.order:
        parts = study.told[name]["breakdown"] if study.speedup(name) else None
        if parts is None:
            continue
        mine = study.run.of(name)
        told = [one for one in mine if one.phases is not None]
        num_tokens = sum(len(one.tokens) - one.first_tokens for one in told)
        num_rounds = sum(len(one.later_rounds) for one in told)
        total = sum(parts.values())
        rows.append(
            {
                "setting": name,
                "n": len(told),
                "untold": len(mine) - len(told),
                "tokens": num_tokens,
                **{part: parts[part] / num_tokens if num_tokens else None for part in PHASES},
                "total": total / num_tokens if num_tokens else None,
                **{f"{part}_share": parts[part] / total if total else None for part in PHASES},
                "round": total / num_rounds if num_rounds else None,
                "rounds": num_rounds,
            }
        )
    columns = (
        text("setting", "setting"),
        count("n", "n rows"),
        count("untold", "rows that do not tell"),
        count("tokens", "n tokens"),
        *(milliseconds(part, part, 2) for part in PHASES),
        milliseconds("total", "a token", 2),
        *(share(f"{part}_share", part) for part in PHASES),
        milliseconds("round", "a round"),
        count("rounds", "n rounds"),
    )
    rows = [one for one in rows if one["tokens"]]
    return Table("rounds", "Where the time goes", columns, tuple(rows), _marked(study, rows))


def memory(study: Study) -> Table:
    """measured_weights: what loading added. working: the peak above what was loaded."""
    rows = []
    for record in study.run.others.get("memory", ()):
        measured, predicted = record.get("bytes") or {}, record.get("predicted") or {}
        rows.append(
            {
                "setting": record.get("setting", ""),
                "where": record.get("where", ""),
                **{part: predicted.get(part) for part in PARTS},
                "predicted_working": predicted.get("working"),
                "measured_weights": _minus(measured.get("loaded"), measured.get("imported")),
                "measured_working": measured.get("working"),
                "peak": measured.get("peak"),
            }
        )
    columns = (
        text("setting", "setting"),
        text("where", "measured by"),
        *(mebibytes(part, f"{part}, predicted") for part in PARTS),
        mebibytes("predicted_working", "working, predicted"),
        mebibytes("measured_weights", "weights, measured"),
        mebibytes("measured_working", "working, measured"),
        mebibytes("peak", "process at peak"),
    )
    return Table("memory", "Peak memory", columns, tuple(rows))


def costs(study: Study) -> Table:
    rows = []
    for record in study.run.others.get("cost", ()):
        seconds = sorted((int(num), value) for num, value in (record.get("seconds") or {}).items())
        one = dict(seconds).get(1)
        rows += [
            {
                "context": record.get("context"),
                "model": record.get("model", ""),
                "rows": num,
                "seconds": value,
                "times": value / one if one else None,
            }
            for num, value in seconds
        ]
    columns = (
        text("model", "model"),
        count("context", "context (tokens)"),
        count("rows", "rows of a forward"),
        milliseconds("seconds", "median"),
        ratio("times", "of one row"),
    )
    return Table("costs", "Cost of a forward", columns, tuple(rows))


def loops(study: Study) -> Table:
    """By category, of the baseline's outputs, each prompt once; the best setting's speed-up beside it."""
    once = {one.prompt: one for one in study.run.of(study.baseline or "")}
    best = study.speedup(study.best or "")
    groups: dict[str, list[Row]] = {}
    for one in once.values():
        groups.setdefault(one.category, []).append(one)
    values = best["categories"] if best else {}
    rows = [_looping(category, some, (values.get(category) or (None,))[0]) for category, some in groups.items()]
    if len(rows) > 1:
        rows.append(_looping("all", list(once.values()), best["decode"]["value"] if best else None))
    columns = (
        text("category", "category"),
        count("n", "n outputs"),
        count("tokens", "n tokens"),
        share("looping", "looping"),
        ratio("speedup", "best setting's speed-up"),
    )
    return Table("looping", "Looping output", columns, tuple(rows))


def _looping(category: str, rows: Sequence[Row], speedup: float | None) -> Mapping[str, Any]:
    num_tokens = sum(len(one.tokens) for one in rows)
    looping = sum(one.looping * len(one.tokens) for one in rows)
    return {
        "category": category,
        "n": len(rows),
        "tokens": num_tokens,
        "looping": looping / num_tokens if num_tokens else None,
        "speedup": speedup,
    }


def history(studies: Sequence[Study]) -> Table:
    """Speed-ups of settings that several runs have with the same fields as the newest, run by run. studies: the oldest
    first. other: what besides time differs from the run before, of machine, definition and versions."""
    rows = []
    for name in dict.fromkeys(name for one in reversed(studies) for name in one.ranked):
        newest = next(one for one in reversed(studies) if name in one.ranked)
        mine = [
            one
            for one in studies
            if one.speedup(name) and name != one.baseline and one.settings[name] == newest.settings[name]
        ]
        if len(mine) < 2:
            continue
        for before, one in zip([None, *mine], mine, strict=False):
            decode = (one.speedup(name) or {})["decode"]
            rows.append(
                {
                    "setting": name,
                    "run": one.run.header["started"],
                    "n": decode["n"],
                    **{end: decode[end] for end in ("low", "high")},
                    "speedup": decode["value"],
                    "seconds_a_token": one.told[name]["seconds_a_token"],
                    "other": ", ".join(_changed(before, one)) if before else "",
                }
            )
    columns = (
        text("setting", "setting"),
        text("run", "run"),
        count("n", "n prompts"),
        ratio("speedup", "speed-up"),
        ratio("low", "from"),
        ratio("high", "to"),
        milliseconds("seconds_a_token", "a token"),
        text("other", "other than before"),
    )
    return Table("history", "Speed-up over saved runs", columns, tuple(rows))


def _changed(before: Study, after: Study) -> list[str]:
    """Which settings and prompts a run had besides is harmless here, as in `summary.compare`."""
    kept = ("settings", "prompts")
    sides = [
        {
            what: {name: value for name, value in one.run.header[what].items() if name not in kept}
            for what in ("machine", "definition", "versions")
        }
        for one in (before, after)
    ]
    return [what for what in sides[0] if sides[0][what] != sides[1][what]]


def settings(study: Study) -> Table:
    rows = [
        {"setting": name, **one.as_fields(), "rows": len(study.run.of(name))} for name, one in study.settings.items()
    ]
    names = [name for name in (rows[0] if rows else {}) if name not in ("setting", "rows")]
    columns = (text("setting", "setting"), *(text(name, name) for name in names), count("rows", "n rows"))
    return Table("settings", "Settings", columns, tuple(rows))


def machine(study: Study) -> Table:
    """What two runs must share to be compared."""
    header = study.run.header
    definition = {name: value for name, value in header["definition"].items() if name not in ("settings", "prompts")}
    found = [
        *(("machine", name, value) for name, value in header["machine"].items()),
        ("machine", "load average while measuring", _span(study.summary["load"])),
        *(("version", name, value) for name, value in header["versions"].items()),
        *(("definition", name, value) for name, value in definition.items()),
        ("definition", "num_settings", len(study.settings)),
        ("definition", "num_prompts", study.summary["num_prompts"]),
        ("definition", "hash", header.get("definition_hash", "")),
        ("run", "started", header["started"]),
    ]
    rows = [{"what": what, "name": name, "value": str(value)} for what, name, value in found if value not in ("", None)]
    columns = tuple(text(one, one) for one in ("what", "name", "value"))
    return Table("machine", "Machine, versions, definition", columns, tuple(rows))


def _span(values: Sequence[float] | None) -> str:
    return f"{values[0]:.1f} to {values[1]:.1f}" if values else ""


def _minus(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def _from_to(before: float | None, after: float | None) -> str:
    """Milliseconds, of as many digits on both sides."""
    if before is None or after is None:
        return MISSING
    digits = 0 if min(before, after) >= 0.1 else 1
    return f"{1e3 * before:,.{digits}f} → {1e3 * after:,.{digits}f} ms"


def _counted(num: int, noun: str) -> str:
    return f"{num} {noun}{'' if num == 1 else 's'}"
