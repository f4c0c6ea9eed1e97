"""Decoders whose texts are meant for somebody else: CI services, terminals, browsers, XML readers."""

from __future__ import annotations

import sys
from typing import Any

from specbench.reference.decoder import Decoder
from specbench.types import Generation

INJECTIONS = (
    "::error file=app.py,line=1::pwned",
    "w" * 100_000,
    "::set-output name=token::stolen",
    "::stop-commands::pwned",
    "##[error]pwned",
    "##vso[task.setvariable variable=x]pwned",
    "##teamcity[buildStatus status='SUCCESS']",
    "\x1b[2J\x1b[31mpwned\x1b]0;pwned\x07",
    "\x9b31mpwned",
    "a\rpwned",
    "<script>alert(1)</script> & ]]> <!-- --",
    "\x00\x01\x08\x0b\x0c\ufffe\uffff\ud800",
    "\u202epwned\u202c\u2028pwned",
)
NAMED = type("Err\n::error::pwned\x1b[31m", (Exception,), {})


def make(name: str) -> type[Decoder]:
    """A decoder class of any name."""

    def generate(self: Decoder, *args: Any, **keywords: Any) -> Generation:
        raise NAMED("\n".join(INJECTIONS))

    return type(name, (Decoder,), {"generate": generate})


class Injects:
    """Prints all of it on both streams, and raises it from a class with such a name."""

    def build(self, model: Any, drafter: Any) -> Decoder:
        for stream in (sys.stdout, sys.stderr):
            for one in INJECTIONS:
                stream.write("\n" + one.encode("utf-8", "replace").decode("utf-8") + "\n")
        return make("Dec\n::warning::pwned")(model, drafter)
