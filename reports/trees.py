"""Failures of a consistency run: which claims fail, and the smallest failing tree of each, drawn as SVG.

The tree is read back from the drawing in the failure's message, with the notes beside its nodes; a record holds no
other form of it that needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from specbench.record import BUG, EQUAL, KNOWN, NOISE, NOT_TESTED, ClaimRecord, RunRecord
from specbench.reports.table import Table, count, text
from specbench.reports.theme import ACCENT, INK, PAPER, SOFT
from specbench.sanitize import plain

MOST_TREES = 6
MAX_NOTE = 80
INDENT = " " * 12  # of a message's second and later lines, behind the label
ROW, STEP, LEFT, LETTER = 26, 30, 22, 6.4  # units: a node's height, an edge's width, the margin, a letter's width
_NODE = re.compile(r"((?:│  |   )*)(├─ |└─ )?(-?\d+)(?:\s+(.*))?")


@dataclass(frozen=True)
class DrawnNode:
    """parent: its index, -1 for the root. note: what the message says beside it."""

    token: str
    parent: int
    note: str


def tree_of(message: str) -> list[DrawnNode]:
    """Of the drawing behind the label `tree`. Empty where there is none."""
    lines = message.splitlines()
    start = next((idx for idx, line in enumerate(lines) if line.startswith("  tree      ")), None)
    if start is None:
        return []
    nodes: list[DrawnNode] = []
    above: list[int] = []  # the node at each depth on the way down to the last one
    for idx, line in enumerate(lines[start:]):
        found = _NODE.fullmatch(line[len(INDENT) :])
        if found is None or (idx > 0 and not line.startswith(INDENT)):
            break
        depth = len(found[1]) // 3 + 1 if found[2] else 0
        if (depth == 0) != (not nodes) or depth > len(above):
            break
        above[depth:] = [len(nodes)]
        note = plain(found[4] or "", MAX_NOTE, one_line=True).strip()
        nodes.append(DrawnNode(found[3], above[depth - 1] if depth else -1, note))
    return nodes


def drawing(nodes: Sequence[DrawnNode]) -> str:
    """An SVG file: a row a node, its children below and to the right. A node that is spoken of wears a thick ring, one
    that was accepted is filled."""
    depths: list[int] = []
    for one in nodes:
        depths.append(depths[one.parent] + 1 if one.parent >= 0 else 0)
    half = [max(10.0, LETTER * len(one.token) / 2 + 5) for one in nodes]
    lefts = [LEFT + STEP * depth for depth in depths]
    ends = [lefts[idx] + 2 * half[idx] + 8 + LETTER * len(one.note) for idx, one in enumerate(nodes)]
    width, height = max(ends, default=0.0) + 8, ROW * len(nodes) + 8
    parts = []
    for idx, one in enumerate(nodes):
        x, y = lefts[idx], ROW * idx + ROW / 2 + 4
        if one.parent >= 0:
            start, top = lefts[one.parent] + 2, ROW * one.parent + ROW + 2
            line = f"M{start:g} {top:g}V{y:g}H{x - 10:g}"
            parts.append(f'<path d="{line}" style="fill: none; stroke: {SOFT}; stroke-width: 1.2"/>')
        accepted = one.note.startswith(("accepted", "committed", "root"))
        spoken_of = bool(one.note) and not accepted
        fill, colour = (ACCENT, PAPER) if accepted else (PAPER, INK)
        stroke = INK if spoken_of else ACCENT if accepted else SOFT
        parts.append(
            f'<rect x="{x - 10:g}" y="{y - 9:g}" width="{2 * half[idx]:g}" height="18" rx="9" '
            f'style="fill: {fill}; stroke: {stroke}; stroke-width: {2 if spoken_of else 1.2}"/>'
        )
        parts.append(_text(x - 10 + half[idx], y, one.token, colour, "middle"))
        if one.note:
            parts.append(_text(x + 2 * half[idx] - 2, y, one.note, INK if spoken_of else SOFT, "start"))
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}">'
        f'<rect width="100%" height="100%" style="fill: {PAPER}"/>{"".join(parts)}</svg>\n'
    )


def _text(x: float, y: float, said: str, colour: str, anchor: str) -> str:
    style = f"font: 11px sans-serif; fill: {colour}; text-anchor: {anchor}"
    return f'<text x="{x:g}" y="{y + 4:g}" style="{style}">{escape(said)}</text>'


def failures(run: RunRecord) -> list[ClaimRecord]:
    """Those that the ledger does not know, the smallest case first."""
    found = [one for one in run.claims if one.verdict == BUG and not one.known]
    return sorted(found, key=lambda one: (one.shrunk_drafts is None, one.shrunk_drafts or 0))


def counts(run: RunRecord) -> Table:
    cells = [KNOWN if one.known else one.verdict for one in run.claims]
    names = (BUG, KNOWN, NOISE, EQUAL, NOT_TESTED)
    rows = tuple({"verdict": name, "cells": cells.count(name)} for name in names)
    columns = (text("verdict", "verdict"), count("cells", "n claims x subjects"))
    return Table("consistency", "Verdicts of the consistency run", columns, rows)


def failing(run: RunRecord) -> Table:
    rows = tuple(
        {
            "claim": one.claim,
            "subject": one.subject,
            "drafts": one.shrunk_drafts,
            "cases": one.num_cases,
            "first_line": one.message.partition("\n")[0],
            "likely": one.likely,
            "replay": one.replay,
        }
        for one in failures(run)
    )
    columns = (
        text("claim", "claim"),
        text("subject", "subject"),
        count("drafts", "drafts of the smallest case"),
        count("cases", "n cases"),
        text("first_line", "what differs"),
        text("likely", "likely"),
        text("replay", "replay"),
    )
    return Table("failures", "What fails", columns, rows)


def nodes_table(name: str, nodes: Sequence[DrawnNode]) -> Table:
    rows = tuple(
        {"node": idx, "parent": one.parent if one.parent >= 0 else None, "token": one.token, "note": one.note}
        for idx, one in enumerate(nodes)
    )
    columns = (count("node", "node"), count("parent", "parent"), text("token", "token"), text("note", "note"))
    return Table(name, "The tree", columns, rows)
