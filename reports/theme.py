"""Colours and type, once for page and figures. A figure is drawn in the light colours and exported from here.

In a page the colours of a figure become the page's variables, so that one drawing serves light, dark and print. Bytes
depend on the figure alone: no date, no random id, no text of the renderer's version.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

# One accent, two greys, and series that people without red, green or blue cones tell apart; shapes tell them too.
LIGHT = {
    "ink": "#1c2127",
    "soft": "#5a6370",
    "line": "#d5dae1",
    "paper": "#fefefe",
    "panel": "#f4f6f8",
    "accent": "#0a5ea8",
    "s2": "#c94f0c",
    "s3": "#07805e",
    "s4": "#a3508b",
    "s5": "#7340d8",
    "s6": "#49545f",
}
DARK = {
    "ink": "#e6e9ed",
    "soft": "#a2abb6",
    "line": "#39414b",
    "paper": "#14181d",
    "panel": "#1d2329",
    "accent": "#64b1f4",
    "s2": "#ff9357",
    "s3": "#43cfa5",
    "s4": "#e79bd0",
    "s5": "#9c7dff",
    "s6": "#c3cbd4",
}
SERIES = ("accent", "s2", "s3", "s4", "s5", "s6")
MARKERS = "osD^vP"  # of the series, in their order
INK, SOFT, LINE, PAPER, ACCENT = (LIGHT[name] for name in ("ink", "soft", "line", "paper", "accent"))
WIDTH = 5.0  # inches: 360 units of an SVG, about the width of a phone
LARGEST = 1.4  # pixels of a page a unit

_STYLE = {
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10.0,
    "axes.titlesize": 10.0,
    "axes.labelsize": 9.5,
    "axes.edgecolor": LINE,
    "axes.facecolor": "none",
    "axes.labelcolor": SOFT,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.prop_cycle": f"cycler('color', {[LIGHT[name] for name in SERIES]})",
    "figure.facecolor": "none",
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.6,
    "text.color": INK,
    "text.parse_math": False,  # names may hold dollars
    "xtick.color": LINE,
    "xtick.labelcolor": SOFT,
    "xtick.labelsize": 9.0,
    "ytick.color": LINE,
    "ytick.labelcolor": SOFT,
    "ytick.labelsize": 9.0,
    "svg.fonttype": "none",
    "svg.hashsalt": "specbench",
    "svg.image_inline": True,
}
_NO_SVG_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
_NO_PNG_METADATA = {"Software": None}
_HEAD = re.compile(r"\A.*?(?=<svg)", re.DOTALL)
_METADATA = re.compile(r"\s*<metadata>.*?</metadata>", re.DOTALL)
_NOT_HTML = re.compile(r"<\?.*?\?>|<!.*?>|\s+xmlns(?::\w+)?=\"[^\"]*\"", re.DOTALL)
_TAG = re.compile(r"<[^>]*>")
_REFERENCE = re.compile(r'url\(#([^)]+)\)|href="#([^"]+)"')
_ID = re.compile(r' id="([^"]+)"')
_FONT = re.compile(r"font: ([\d.]+)px [^;\"]*")
_WIDTH = re.compile(r' viewBox="0 0 ([\d.]+)')
_SIZE = re.compile(r' (?:width|height)="[^"]*"')


@contextmanager
def style() -> Iterator[None]:
    """Figures are made and exported inside."""
    with mpl.rc_context(), warnings.catch_warnings():
        # A name may be in a script that the font lacks: a PNG then has boxes, SVG and table have the text.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        mpl.rcParams.update(mpl.rcParamsDefault)
        mpl.rcParams.update(_STYLE)
        yield


def as_svg(figure: Figure) -> str:
    """A file of its own: light colours on a light ground."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=_NO_SVG_METADATA, facecolor=PAPER)
    return _METADATA.sub("", file.getvalue())


def as_png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=192, metadata=_NO_PNG_METADATA, facecolor=PAPER)
    return file.getvalue()


def for_page(svg: str, prefix: str, *, is_fluid: bool = True) -> str:
    """The SVG inside an HTML page: the page's colours and type, ids that are the prefix's own. is_fluid: as wide as its
    box up to LARGEST, and not as it was drawn."""
    svg = _NOT_HTML.sub("", _METADATA.sub("", _HEAD.sub("", svg)))
    used = {name for tag in _TAG.findall(svg) for pair in _REFERENCE.findall(tag) for name in pair if name}
    return _TAG.sub(lambda found: _tag_for_page(found[0], prefix, used, is_fluid), svg).strip()


def _tag_for_page(tag: str, prefix: str, used: set[str], is_fluid: bool) -> str:
    """Tags alone are changed: a text may look like anything."""
    if tag.startswith("<svg") and is_fluid:
        tag = _WIDTH.sub(
            lambda found: f' style="max-width:{LARGEST * float(found[1]):.0f}px"{found[0]}', _SIZE.sub("", tag)
        )
    tag = _ID.sub(lambda found: f' id="{prefix}-{found[1]}"' if found[1] in used else "", tag)
    tag = tag.replace("url(#", f"url(#{prefix}-").replace('href="#', f'href="#{prefix}-')
    tag = _FONT.sub(r"font-size: \1px", tag)
    for name, colour in LIGHT.items():
        tag = tag.replace(colour, f"var(--{name})")
    return tag.replace("#000000", "var(--ink)")


def variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


def figure(height: float, *, width: float = WIDTH, **options: Any) -> Figure:
    """Inches. Laid out by what is in it."""
    return Figure(figsize=(width, height), layout="constrained", **options)
