"""Sections as one HTML page that needs nothing else: no script, no font, no image from elsewhere. And as Markdown.

Every text is escaped here, whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from specbench.record import BUG, EQUAL, NOISE, NOT_TESTED
from specbench.reports.bench import Headline
from specbench.reports.sections import Drawing, Listing, Section
from specbench.reports.table import Column, Table, raw
from specbench.reports.theme import DARK, LIGHT, for_page, variables
from specbench.sanitize import plain
from specbench.summary import fenced, inline

MARK = "<!-- written by specbench report -->"
SIGNS = {EQUAL: "●", NOISE: "◐", BUG: "✕", NOT_TESTED: "○"}  # beside a verdict's colour
MOST_ROWS = 400  # of a table in the page; CSV has all

_CSS = """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
"Noto Sans",sans-serif;font-variant-numeric:tabular-nums;-webkit-text-size-adjust:100%;text-size-adjust:100%}
main,header,footer{max-width:77rem;margin:0 auto;padding:0 1.5rem}
header{padding-top:3.5rem}
.eyebrow{margin:0 0 1.25rem;color:var(--soft);font-size:.875rem;overflow-wrap:anywhere}
h1{margin:0;max-width:34em;font-size:clamp(1.35rem,1rem + 1.6vw,2rem);line-height:1.3;font-weight:600;
letter-spacing:-.012em;overflow-wrap:anywhere;text-wrap:pretty}
h2{margin:0 0 .35rem;font-size:1.3rem;line-height:1.3;font-weight:600;letter-spacing:-.01em}
h3{margin:0 0 .75rem;font-size:.9375rem;font-weight:600;overflow-wrap:anywhere}
.place{margin:.9rem 0 0;font-size:1.0625rem;overflow-wrap:anywhere}
.note{max-width:52em;margin:.6rem 0 0;color:var(--soft);overflow-wrap:anywhere}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(11rem,1fr));gap:1.25rem 2rem;margin:2.25rem 0 0;
padding:1.25rem 0;border-top:2px solid var(--accent);border-bottom:1px solid var(--line)}
.facts div{min-width:0}
.facts dt{color:var(--soft);font-size:.8125rem}
.facts dd{margin:.1rem 0 0;font-size:1.0625rem;font-weight:600;overflow-wrap:anywhere}
nav{margin-top:1.5rem}
nav ul{display:flex;flex-wrap:wrap;gap:.35rem 1.25rem;margin:0;padding:0;list-style:none;font-size:.875rem}
a{color:var(--accent);text-underline-offset:.2em;text-decoration-thickness:1px}
h2+.pair{margin-top:1.5rem}
section{margin-top:3.5rem;padding-top:2rem;border-top:1px solid var(--line)}
.finding{max-width:46em;margin:0 0 1.75rem;color:var(--soft);overflow-wrap:anywhere}
.pair{display:grid;grid-template-columns:minmax(0,504px) minmax(0,1fr);gap:2rem 3.5rem;align-items:start}
.pair.alone{grid-template-columns:minmax(0,1fr)}
.drawings,.notes{min-width:0}
.notes p{margin:0 0 .8rem;max-width:44em;color:var(--soft);font-size:.875rem;overflow-wrap:anywhere}
.alone .notes{columns:2 24em;column-gap:3.5rem}
.alone .notes p{break-inside:avoid}
.notes dfn,.notes b{color:var(--ink);font-style:normal;font-weight:600}
figure{margin:0 0 2rem}
figure:last-child{margin-bottom:0}
figure svg{display:block;overflow:visible}
.fluid svg{width:100%;height:auto}
figure svg text{font-family:inherit}
.wide.fluid svg{min-width:44rem}
.scroll{overflow-x:auto;-webkit-overflow-scrolling:touch}
.scroll:focus-visible,a:focus-visible,summary:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
table{border-collapse:collapse;font-size:.875rem;line-height:1.4}
caption{padding:0 0 .6rem;text-align:left;font-weight:600;font-size:.9375rem}
th,td{padding:.42rem .9rem .42rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
th{color:var(--soft);font-weight:500;vertical-align:bottom;border-bottom-color:var(--soft)}
th.n,td.n{text-align:right}
td.n{white-space:nowrap}
td.t{min-width:7.5em;max-width:26em;overflow-wrap:anywhere}
td.long{min-width:17em}
td.short{white-space:nowrap}
tr.best td{font-weight:600;color:var(--accent)}
td.v{white-space:nowrap}
.bad{color:var(--s2);font-weight:600}
.dim{color:var(--soft)}
details{margin:.6rem 0 0}
summary{cursor:pointer;color:var(--soft);font-size:.875rem;overflow-wrap:anywhere}
details>.scroll,details>pre{margin-top:.75rem}
.block{margin-top:2rem}
pre{margin:0;padding:.9rem 1.1rem;overflow-x:auto;background:var(--panel);border-radius:.4rem;
font:.8125rem/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
footer{margin-top:4rem;padding-bottom:3rem;color:var(--soft);font-size:.8125rem}
@media(max-width:56rem){.pair{grid-template-columns:minmax(0,1fr)}}
@media(max-width:34rem){main,header,footer{padding-left:1rem;padding-right:1rem}header{padding-top:2rem}
section{margin-top:2.5rem;padding-top:1.5rem}.facts{grid-template-columns:1fr 1fr;gap:1rem 1.25rem}
td.t{min-width:5.5em;max-width:16em}td.long{min-width:14em}th,td{padding-right:.65rem}}
@media print{
body{font-size:10pt}main,header,footer{max-width:none;padding:0}header{padding-top:0}nav{display:none}
section{margin-top:1.5rem;padding-top:1rem}.pair{grid-template-columns:minmax(0,26rem) minmax(0,1fr);gap:1rem 1.5rem}
figure,tr,h2,h3,.facts{break-inside:avoid}h2,h3,.finding{break-after:avoid}
.notes p{font-size:8.5pt;margin-bottom:.5rem}
.scroll{overflow:visible}table{font-size:7.5pt}th,td{padding:.2rem .5rem .2rem 0}
td.t,td.long{min-width:0}td.n,td.v,td.short{white-space:normal}pre{white-space:pre-wrap;overflow-wrap:anywhere}
.wide.fluid svg{min-width:0}
details:not([open]){display:none}a{color:inherit;text-decoration:none}
}
"""


def html(headline: Headline, sections: Sequence[Section], *, title: str, eyebrow: str) -> str:
    """The whole page."""
    dark = f"@media screen and (prefers-color-scheme:dark){{:root{{{variables(DARK)}}}}}"
    style = f":root{{color-scheme:light dark;{variables(LIGHT)}}}{dark}{_CSS}"
    links = "".join(f'<li><a href="#{one.id}">{_text(one.title)}</a></li>' for one in sections)
    facts = "".join(f"<div><dt>{_text(label)}</dt><dd>{_text(value)}</dd></div>" for label, value in headline.facts)
    return "\n".join(
        [
            "<!DOCTYPE html>",
            MARK,
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            # Whatever stood in it: nothing runs, nothing is fetched.
            """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">""",
            f"<title>{_text(title)}</title>",
            f"<style>{style}</style>",
            "</head>",
            "<body>",
            "<header>",
            f'<p class="eyebrow">{_text(eyebrow)}</p>',
            f"<h1>{_text(headline.sentence)}</h1>",
            f'<p class="place">{_text(headline.place)}</p>' if headline.place else "",
            *(f'<p class="note">{_text(one)}</p>' for one in headline.notes),
            f'<dl class="facts">{facts}</dl>' if facts else "",
            f"<nav><ul>{links}</ul></nav>" if len(sections) > 1 else "",
            "</header>",
            "<main>",
            *map(_section, sections),
            "</main>",
            "<footer>Numbers with all their digits are in data/*.csv, figures in figures/, beside this page.</footer>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _section(one: Section) -> str:
    notes = "".join(f"<p>{_definition(text)}</p>" for text in one.definitions)
    figures = "".join(_drawing(drawing, one) for drawing in one.drawings if not drawing.is_wide)
    wide = "".join(f'<div class="block">{_drawing(drawing, one)}</div>' for drawing in one.drawings if drawing.is_wide)
    pair = f'<div class="drawings">{figures}</div>' if figures else ""
    return "\n".join(
        [
            f'<section id="{one.id}">',
            f"<h2>{_text(one.title)}</h2>",
            f'<p class="finding">{_text(one.finding)}</p>' if one.finding else "",
            # The verdicts come before their definitions: a table is read first, and a figure stands beside them.
            "" if figures else "".join(f'<div class="block">{_table(table)}</div>' for table in one.tables),
            f'<div class="pair{"" if figures else " alone block"}">{pair}<div class="notes">{notes}</div></div>',
            wide,
            "".join(f'<div class="block">{_table(table)}</div>' for table in one.tables) if figures else "",
            "".join(_folded(table) for table in one.folded),
            "".join(map(_listing, one.listings)),
            "</section>",
        ]
    )


def _definition(text: str) -> str:
    """`word: what it means`, the word set off."""
    word, colon, rest = text.partition(":")
    if colon and len(word) <= 40:
        return f"<dfn>{_text(word)}</dfn>:{_text(rest)}"
    return _text(text)


def _drawing(one: Drawing, section: Section) -> str:
    """With its numbers below it, unless the section shows them anyway."""
    label = escape(plain(f"{one.title}; its numbers are in data/{one.table.name}.csv", 300, one_line=True), quote=True)
    image = f'role="img" aria-label="{label}"'
    svg = for_page(one.svg, one.name, is_fluid=one.is_fluid).replace("<svg", f"<svg {image}", 1)
    if one.is_wide:
        svg = f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">{svg}</div>'
    kinds = "wide " * one.is_wide + "fluid" * one.is_fluid
    numbers = "" if one.table in section.tables else _folded(one.table)
    return f'<figure class="{kinds}"><h3>{_text(one.title)}</h3>{svg}{numbers}</figure>'


def _folded(table: Table) -> str:
    said = f"{table.title}: {len(table.rows)} row{'' if len(table.rows) == 1 else 's'}, data/{table.name}.csv"
    return f"<details><summary>{_text(said)}</summary>{_table(table, caption=False)}</details>"


def _table(table: Table, *, caption: bool = True) -> str:
    head = "".join(f'<th scope="col"{_class(one)}>{_text(one.label)}</th>' for one in table.columns)
    body = []
    for idx, row in enumerate(table.rows[:MOST_ROWS]):
        cells = "".join(_cell(one, row[one.name]) for one in table.columns)
        body.append(f"<tr{' class=best' if idx in table.marked else ''}>{cells}</tr>")
    title = f"<caption>{_text(table.title)}</caption>" if caption else ""
    rest = len(table.rows) - MOST_ROWS
    more = f'<p class="dim">{rest} more rows are in data/{table.name}.csv.</p>' if rest > 0 else ""
    label = escape(table.title, quote=True)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table data-name="{table.name}">{title}'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>{more}"
    )


def _class(one: Column) -> str:
    return " class=n" if one.is_number else ""


def _cell(column: Column, value: Any) -> str:
    """A number carries all its digits in `value`."""
    if value is None:
        return f'<td class="{"n" if column.is_number else "t"} dim">{_text(column.shown(None))}</td>'
    if column.is_number:
        return f'<td class=n><data value="{escape(raw(value))}">{_text(column.shown(value))}</data></td>'
    if column.name == "verdict" and value in SIGNS:
        kind = " bad" if value == BUG else " dim" if value == NOT_TESTED else ""
        return f'<td class="v{kind}"><span aria-hidden="true">{SIGNS[value]} </span>{_text(value)}</td>'
    size = "long" if len(value) > 60 else "short" if len(value) <= 16 else ""
    return f'<td class="t {size}">{_text(value)}</td>'


def _listing(one: Listing) -> str:
    if one.is_open:
        return f'<div class="block"><h3>{_text(one.title)}</h3><pre>{escape(one.text)}</pre></div>'
    return f"<details><summary>{_text(one.title)}</summary><pre>{escape(one.text)}</pre></details>"


def _text(text: str) -> str:
    return escape(plain(text, 2_000, one_line=True))


def markdown(headline: Headline, sections: Sequence[Section], *, title: str) -> str:
    """The headline, what was found, the open tables, and where the rest is."""
    lines = [f"# {_inline(title)}", "", f"**{_inline(headline.sentence)}**", ""]
    for note in (headline.place, *headline.notes):
        lines += [_inline(note), ""] if note else []
    for one in sections:
        lines += [f"## {_inline(one.title)}", ""]
        lines += [_inline(one.finding), ""] if one.finding else []
        for drawing in one.drawings:
            files = [f"[data](data/{drawing.table.name}.csv)"]
            kind = "svg" if drawing.png is None else "png"
            files.append(f"[figure](figures/{drawing.name}.{kind})")
            lines += [f"{_inline(drawing.title)}: {', '.join(files)}", ""]
        for table in one.tables:
            rows = [[_inline(column.label) for column in table.columns]]
            rows += [[_inline(cell) for cell in table.cells(row)] for row in table.rows]
            told = ["| " + " | ".join(cells) + " |" for cells in rows]
            marks = "".join("---:|" if column.is_number else "---|" for column in table.columns)
            lines += [told[0], f"|{marks}", *told[1:], ""]
        lines += [f"- {_inline(text)}" for text in one.definitions]
        lines += [""] if one.definitions else []
        for listing in one.listings:
            if listing.is_open:
                lines += [f"{_inline(listing.title)}:", "", *fenced(listing.text), ""]
    return "\n".join(lines)


def _inline(text: str) -> str:
    """A colon before a space begins no link, emoji or command."""
    return inline(text).replace("&#58; ", ": ")
