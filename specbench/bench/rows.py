"""Rows of a benchmark: JSON lines, one record each, written as they come and read back by whoever reports. No torch.

Schema 1. Every line is an object with a `kind`; a reader ignores kinds and fields that it does not know.

    header   first line. schema; definition (all that decides what the rows mean: weights, the name of our forward,
             draft_model and target where they were named, dtype, device, threads, seed, max_new_tokens, repetitions,
             settings by name with their fields, prompts as {id: [category, number of tokens]}, prompts_hash of all
             their tokens); definition_hash; machine; versions; command; started (UTC)
    plain    the text that all settings are held to and that says how many tokens are asked for: prompt; tokens, of our
             own plain decoding, up to an end token
    row      one generation. key (a hash of what decides it: the setting's fields, the prompt's tokens, how many new
             ones, the repetition, and of the definition what is common to all rows); setting; prompt; category;
             repetition; num_prompt; num_tokens; tokens (what was emitted; of a batch, text by text); seconds;
             first_seconds and first_tokens (when the first tokens came, and how many at once); rounds [[nodes, depth,
             accepted, emitted], ...], nodes and depth null where a decoder does not say, the list empty where it says
             nothing; first_rounds, how many of them, at its beginning, ended with the first arrival (one a text);
             phases {draft, verify, commit, decode} in seconds behind the first arrival, decode being all of them, null
             where only the whole is seen; num_rows (that the target computed after prefill) or null; looping (share of
             the tokens); load (the machine's load average of a minute, before the row)
    gate     the verdict on one setting: setting; verdict (EQUAL, NOISE, BUG, NOT TESTED); sentence; num_outputs;
             num_tokens; num_equal; law_checked (above temperature 0; null at 0); facts. The last one of a setting
             counts. A setting without EQUAL or NOISE has no speed-up
    cost     seconds of one target forward by its rows: model; context; seconds {"1": s, ...} (medians)
    memory   a setting in a process of its own: setting; bytes {imported, loaded, peak, working} as measured, total of
             the machine or device; predicted {weights, cache, tree, logits, working}; where (cpu: VmHWM; cuda: torch's
             allocator and the device)

Times are seconds of `time.perf_counter`. A row is written once it is whole; a run that was stopped goes on with
`resume`, which needs the same definition, machine and versions, and drops a line that was torn.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import specbench
from specbench.bench.metrics import Pair, RoundCounts, Timing

SCHEMA = 1
SIDES = ("own", "transformers", "target")
PACKAGES = ("torch", "transformers", "triton", "numpy")


@dataclass(frozen=True)
class Setting:
    """One way of decoding. side: whose decoder, of SIDES. drafter: "" for plain decoding, a target's is "own". gamma:
    drafts in depth; width: candidates a node. cache, layout: of our own decoder. temperature: 0 is greedy. batch: texts
    at once."""

    name: str
    side: str = "own"
    drafter: str = ""
    gamma: int = 0
    width: int = 1
    layout: str = "tree_mask"
    cache: str = "preallocated"
    temperature: float = 0.0
    batch: int = 1

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"setting {self.name}: batch = {self.batch} must be >= 1")
        if self.side not in SIDES:
            raise ValueError(f"side = {self.side!r} must be one of {', '.join(SIDES)}")
        if bool(self.drafter) != bool(self.gamma) and self.side != "target":
            raise ValueError(f"setting {self.name}: gamma = {self.gamma} must be 0 without a drafter, >= 1 with one")

    @property
    def is_plain(self) -> bool:
        return not self.drafter

    def as_fields(self) -> dict[str, Any]:
        """Without the name, which decides nothing."""
        return {name: value for name, value in asdict(self).items() if name != "name"}


@dataclass(frozen=True)
class Row:
    """One generation, as in the file."""

    key: str
    setting: str
    prompt: str
    category: str
    repetition: int
    num_prompt: int
    tokens: tuple[int, ...]
    seconds: float
    first_seconds: float
    first_tokens: int = 1
    rounds: tuple[RoundCounts, ...] = ()
    phases: Mapping[str, float] | None = None
    num_rows: int | None = None
    looping: float = 0.0
    load: float = 0.0
    first_rounds: int = 1

    @property
    def later_rounds(self) -> tuple[RoundCounts, ...]:
        """Behind the first arrival, as the phases are."""
        return self.rounds[self.first_rounds :]

    @property
    def timing(self) -> Timing:
        return Timing(self.seconds, self.first_seconds, len(self.tokens), self.first_tokens)

    def as_record(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        rounds = [[one.nodes, one.depth, one.accepted, one.emitted] for one in self.rounds]
        return {"kind": "row", **fields, "num_tokens": len(self.tokens), "tokens": list(self.tokens), "rounds": rounds}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Row:
        own = {name: record[name] for name in cls.__dataclass_fields__ if name in record}
        rounds = tuple(RoundCounts(*one) for one in record["rounds"])
        return cls(**own | {"tokens": tuple(record["tokens"]), "rounds": rounds})


@dataclass(frozen=True)
class Gate:
    """The verdict on a setting's outputs."""

    setting: str
    verdict: str
    sentence: str
    num_outputs: int = 0
    num_tokens: int = 0
    num_equal: int = 0
    law_checked: bool | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return self.verdict in ("EQUAL", "NOISE")

    def as_record(self) -> dict[str, Any]:
        return {"kind": "gate", **{name: getattr(self, name) for name in self.__dataclass_fields__}}


@dataclass(frozen=True)
class Run:
    """A file that was read. others: records of kinds besides header, row and gate, by kind."""

    header: Mapping[str, Any]
    rows: tuple[Row, ...]
    gates: Mapping[str, Gate]
    others: Mapping[str, tuple[Mapping[str, Any], ...]]

    @property
    def settings(self) -> dict[str, Setting]:
        return {name: Setting(name, **fields) for name, fields in self.header["definition"]["settings"].items()}

    def of(self, setting: str) -> list[Row]:
        return [one for one in self.rows if one.setting == setting]

    def pairs(self, baseline: str, setting: str, *, same_text: bool = False) -> list[Pair]:
        """The prompts that both were timed on with the same number of tokens, in the order of the rows. same_text: only
        those on which both said the same tokens, where ties have not led them apart."""
        by_prompt: dict[str, dict[str, list[Row]]] = {}
        for one in self.rows:
            if one.setting in (baseline, setting):
                by_prompt.setdefault(one.prompt, {}).setdefault(one.setting, []).append(one)
        found = []
        for prompt, sides in by_prompt.items():
            rows = [one for some in sides.values() for one in some]
            texts = {one.tokens if same_text else len(one.tokens) for one in rows}
            if len(sides) == len({baseline, setting}) and len(texts) == 1:
                timings = [tuple(one.timing for one in sides[name]) for name in (baseline, setting)]
                found.append(Pair(prompt, rows[0].category, *timings))
        return found


def key_of(fields: Mapping[str, Any]) -> str:
    """Of what defines a row or a run: the first 16 digits of the sha256 of its JSON, keys sorted."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def header_of(definition: Mapping[str, Any], *, command: str, device: str = "cpu") -> dict[str, Any]:
    return {
        "kind": "header",
        "schema": SCHEMA,
        "definition": dict(definition),
        "definition_hash": key_of(definition),
        "machine": machine(device),
        "versions": versions(),
        "command": command,
        "started": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def machine(device: str = "cpu") -> dict[str, Any]:
    """What two runs must share to be compared. device_name: of a CUDA device, "" on the CPU."""
    name = ""
    if device.startswith("cuda"):
        import torch

        name = torch.cuda.get_device_name(device)
    return {
        "system": platform.system(),
        "processor": _processor(),
        "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "device": device,
        "device_name": name,
    }


def versions() -> dict[str, str]:
    found = {"specbench": specbench.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


class RowFile:
    """A file that grows by whole lines. `keys` are those of the rows that it has."""

    def __init__(self, path: Path, header: Mapping[str, Any], *, resume: bool = False) -> None:
        """ValueError when the file is there and not to be resumed, or is of another definition, machine or versions."""
        self.path = path
        self.keys: set[str] = set()
        self.records: list[Mapping[str, Any]] = []
        if path.exists() and path.stat().st_size:
            if not resume:
                raise ValueError(f"{path} is there: name another file, or go on with it by --resume")
            self._resume(header)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")
        self.append(header)

    def append(self, record: Mapping[str, Any]) -> None:
        """On disk when this returns, as far as the system's cache."""
        line = json.dumps(record, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self._note(record)

    def _note(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)
        if record["kind"] == "row":
            self.keys.add(record["key"])

    def _resume(self, header: Mapping[str, Any]) -> None:
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]  # a run that was killed may have torn its last line
        for record in _records(whole, self.path):
            self._note(record)
        known = self.records[0]
        for name in ("definition_hash", "machine", "versions"):
            if known[name] != header[name]:
                what = "definition" if name == "definition_hash" else name
                told = next(differences(known[what], header[what]), "the same words")
                raise ValueError(
                    f"{self.path} is of another {what} ({told}): its rows cannot be gone on with; name another file"
                )
        if whole != text:
            self.path.write_text(whole, encoding="utf-8")


def read(path: Path) -> Run:
    """ValueError where it is not such a file. A torn last line is left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a file of rows: it is no UTF-8") from None
    records = list(_records(text[: text.rfind("\n") + 1], path))
    others: dict[str, list[Mapping[str, Any]]] = {}
    rows, gates = [], {}
    try:
        for one in records[1:]:
            if one["kind"] == "row":
                rows.append(Row.from_record(one))
            elif one["kind"] == "gate":
                gates[one["setting"]] = Gate(**{name: one[name] for name in Gate.__dataclass_fields__ if name in one})
            else:
                others.setdefault(one["kind"], []).append(one)
        if not isinstance(records[0]["definition"], Mapping):
            raise TypeError("definition")
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a file of rows: a record lacks or has a wrong {error}") from None
    return Run(records[0], tuple(rows), gates, {kind: tuple(some) for kind, some in others.items()})


def _records(text: str, path: Path) -> Iterator[Mapping[str, Any]]:
    """Header first. ValueError names the line."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path} is not a file of rows: it holds no whole line")
    for num, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            raise ValueError(f"{path} is not a file of rows: line {num} is no JSON") from None
        if not isinstance(record, dict) or "kind" not in record or (num == 1) != (record["kind"] == "header"):
            raise ValueError(f"{path} is not a file of rows: line {num} must be a {'header' if num == 1 else 'record'}")
        if num == 1 and record.get("schema") != SCHEMA:
            raise ValueError(f"{path} has rows of schema {record.get('schema')}, this version reads {SCHEMA}")
        yield record


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """`threads: 2, now 4`, for each field that is not the same on both sides."""
    for name in _names(one, other):
        before, now = one.get(name), other.get(name)
        if before != now:
            shown = [json.dumps(value, ensure_ascii=True) for value in (before, now)]
            yield f"{name}: {shown[0]}, now {shown[1]}" if max(map(len, shown)) <= 60 else f"{name}: another"


def _names(*mappings: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name for one in mappings for name in one))
