"""Text that comes from a target, made fit to print: no control characters, no terminal escapes, no CI commands.

Every line that specbench prints or writes for people goes through `plain`. HTML, XML and Markdown escaping is the
business of whoever writes these formats; JSON keeps the text as it is, escaped by json.
"""

from __future__ import annotations

import re

# Control characters (C0 but tab and newline, DEL, C1), separators that terminals and log readers take for line ends,
# marks that reorder or hide text, lone surrogates (no encoding takes them), and non-characters that XML forbids.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff"
    "\ufeff\ufff9-\ufffb\ufffe\uffff]"
)
_LINE_ENDS = re.compile("[\t\n\r\f\v\x85\u2028\u2029]+")
# GitHub reads ::command:: at the start of a line, spaces before it allowed, and its older form ##[command] anywhere, as
# Azure Pipelines (##vso[...]) and TeamCity (##teamcity[...]) read theirs.
_COMMAND = re.compile(r"^([^\S\n]*):(?=:)", re.MULTILINE)
_OLD_COMMAND = re.compile(r"#(?=#[A-Za-z]*\[)")


def plain(text: str, limit: int, *, one_line: bool = False) -> str:
    """At most `limit` characters of `text`, cut with "...", harmless on a terminal and in the log of a CI service.

    Control characters become visible escapes such as \\x1b. one_line: newlines and tabs become spaces.
    """
    cut = text[: limit + 1].replace("\r\n", "\n")  # a message may have megabytes
    if one_line:
        cut = _LINE_ENDS.sub(" ", cut)
    cut = _UNPRINTABLE.sub(lambda found: _escape(found[0]), cut)
    cut = _OLD_COMMAND.sub("# ", _COMMAND.sub(r"\1: ", cut))
    if len(cut) <= limit and len(text) <= limit:
        return cut
    return f"{cut[: max(0, limit - 3)]}..."[:limit]


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
