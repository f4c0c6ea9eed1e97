"""Fenced code blocks of a Markdown file, each with the HTML comment that stands right before it. Standard library only.

As a command it prints the one block marked `<!-- ci: NAME -->`, for .ci/run to execute: blocks.py FILE NAME.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^(```+|~~~+)\s*(\w*)")
COMMENT = re.compile(r"^<!--\s*(.*?)\s*-->$")


@dataclass(frozen=True)
class Block:
    """language: the word after the fence. marker: the text of the comment before it, "" without one."""

    line: int
    language: str
    marker: str
    text: str


def blocks_of(markdown: str) -> list[Block]:
    blocks: list[Block] = []
    marker, fence, start = "", None, 0
    lines = markdown.split("\n")
    for idx, line in enumerate(lines):
        if fence is not None:
            if line.rstrip() == fence[1]:
                blocks.append(Block(start + 1, fence[2], marker, "\n".join(lines[start + 1 : idx]) + "\n"))
                fence, marker = None, ""
        elif opening := FENCE.match(line):
            fence, start = opening, idx
        elif comment := COMMENT.match(line):
            marker = comment[1]
        elif line.strip():
            marker = ""
    if fence is not None:
        raise ValueError(f"line {start + 1}: the code block is never closed")
    return blocks


def main() -> int:
    file, name = sys.argv[1:]
    found = [block for block in blocks_of(Path(file).read_text("utf-8")) if block.marker == f"ci: {name}"]
    if len(found) != 1:
        print(f"{file} has {len(found)} code blocks marked <!-- ci: {name} -->, must have exactly one", file=sys.stderr)
        return 1
    print(found[0].text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
