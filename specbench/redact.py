"""Failure texts without prompts, token ids or the target's own words: short pseudonyms stand for them.

What is not known to be harmless is masked, so a new message leaks nothing before somebody thinks of it. The key is made
anew each run: equal tokens look alike within a run, and nobody can try a vocabulary against a report.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets

from specbench.claims import CLAIMS, VIOLATIONS

WITHHELD = "details withheld by --specbench-redact"
# Words behind which a number is a place and no token, and words before which it is a count.
_PLACES = (
    "node|row|layer|round|rank|page|step|depth|position|head|instance|model|index|slot|level|length|operation|"
    r"at\ token"
)
_COUNTS = (
    "tokens|rows|nodes|rounds|layers|levels|pages|characters|bytes|generations|cases|requests|drafts|times|more|"
    r"kept\ tokens"
)
_MEASURES = r"off\ by|moved\ by|differ\ by|margin|probability|threshold|within"
_NUMBERS = re.compile(
    rf"""(?P<keep>
        \b(?:{_PLACES})s?\ (?:\[[-0-9,\ ]*\]|[0-9]+(?:\.\.[0-9]+|\ of\ [0-9]+)?)(?![0-9.]*[0-9])  # node 2, row 1 of 3
      | \b(?:path|shape)\ \[[-0-9,\ ]*\]                                              # of nodes, of sizes
      | \bpieces\ of\ \[[-0-9,\ ]*\] | \[[-0-9,\ ]*\]\ by\ (?:round|forward)\b           # of lengths, of counts
      | \bprefix\ [0-9]+\.\.[0-9]+
      | \btree\ [0-9]+\ of\ [0-9]+\b | \bfrom\ token\ [0-9]+\ on\b | \bmax_(?:nodes|depth)\ =\ [0-9]+\b
      | \bamong\ the\ first\ [0-9]+(?![0-9.]) | \bthe\ last\ [0-9]+\ to\ [0-9]+\ rows\b
      | \(window\ [0-9]+,\ [0-9]+\ committed\)
      | \b[0-9]+\ a\ page\b | \bat\ most\ [0-9]+\ for\ the\ prompt\b | \bthe\ output\ has\ [0-9]+(?![0-9.])
      | \baccepts\ (?:[0-9]+|plain\ step)(?:,\ (?:[0-9]+|plain\ step))*\b
      | \b(?:fp|bf|float|bfloat|int|uint)[0-9]+\b
      | (?<![\w.])-?[0-9]+(?:\.[0-9]+(?:e[+-]?[0-9]+)?|e[+-]?[0-9]+)(?![\w.]*[0-9])    # 0.91, 5.5e-09
      | \b(?:{_MEASURES})\ [0-9]+(?![\w.]*[0-9])
      # A count, and in the same clause what it must be: 3 pages are in use after round 2, must be 4.
      | (?<![\w.])[0-9]+\ (?:{_COUNTS})\b
        (?:,?\ (?:(?:round|operation)\ [0-9]+|[0-9]+\ (?:{_COUNTS})|\(sequence\ [0-9]+\)|[a-z_]+)(?![\w]))*
        ,\ must\ (?:be|have|hold)\ (?:at\ (?:least|most)\ )?[0-9]+(?![\w.]*[0-9]|\ \(argmax|\ below)
      | (?<![\w.])(?:[0-9]+\ of\ )?[0-9]+\ (?:{_COUNTS})\b | (?<![\w.])[0-9]+\ %
    ) | (?P<mask>[0-9]+)""",
    re.VERBOSE,
)
_QUOTED = re.compile(r"""(?<![A-Za-z])'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\"""")
_FIRST = re.compile(r"(?P<kind>\w+): (?P<headline>.*?)(?P<place> {6}\[claim (?P<claim>[\w.]+), level [0-9]\])")
_CALL = re.compile(r"(?P<call>[A-Za-z_]\w*\(\))(?: raised (?P<error>[A-Za-z_][\w.]*))?")
_HUNG = re.compile(r"(?:[A-Za-z_][\w.]*\(\)|loading it) did not return within [0-9.]+ s")
_PROMPT = re.compile(r"(?P<tokens>.*?)(?P<place> {3}model [0-9]+, cache \w+, layout \w+)?$")


class Redactor:
    """key: what pseudonyms are derived with; a fresh one by default."""

    def __init__(self, key: bytes = b"") -> None:
        self._key = key or secrets.token_bytes(32)

    def token(self, token: str) -> str:
        """`t3f9ac` for a token id in decimal."""
        return f"t{self._digest('token', token)[:6]}"

    def text(self, text: str) -> str:
        """`#1f00aa92` for anything else."""
        return f"#{self._digest('text', text)[:8]}"

    def mask(self, text: str) -> str:
        """One of our own sentences: quoted text and every number that may be a token are replaced."""
        out, end = "", 0
        for quoted in _QUOTED.finditer(text):
            out += self._numbers(text[end : quoted.start()]) + self.text(quoted[1] or quoted[2] or "")
            end = quoted.end()
        return out + self._numbers(text[end:])

    def sentence(self, text: str) -> str:
        """A sentence that may quote the target: which call, which exception, and no more."""
        hung = _HUNG.search(text)
        if hung:
            return f"{hung[0]} ({WITHHELD})"
        call = _CALL.search(text)
        if call:
            raised = f" raised {call['error']}" if call["error"] else " misbehaved"
            return f"{call['call']}{raised} ({WITHHELD})"
        return f"it fails ({WITHHELD})"

    def message(self, text: str, *, target: str, reproduce: str) -> str:
        """A rendered failure. reproduce: its last line, made by the caller. Another text is treated as a sentence."""
        lines = text.splitlines()
        first = _FIRST.match(lines[0]) if lines else None
        if first is None or first["claim"] not in CLAIMS:
            return self.sentence(text)
        own_words = first["kind"] in {one.__name__ for one in VIOLATIONS.values()}
        headline = self.mask(first["headline"]) if own_words else self.sentence(first["headline"])
        out, seen = [f"{first['kind']}: {headline}{first['place']}", ""], {""}
        for line in lines[1:]:
            label = line[2:12].strip() if line[:2] == "  " and line[2:3].strip() else ""
            value = line[12:]
            if label == "MUST" and label not in seen:
                value = CLAIMS[first["claim"]].must
            elif label == "prompt" and label not in seen:
                value = self._prompt(value)
            elif label in ("on", "narrower") and label not in seen:
                pass  # subject, seed and device; claim ids
            elif label == "reproduce" and label not in seen:
                value = reproduce
            elif label in ("expected", "actual") and label not in seen:
                value = self._value(value, target, own_words=own_words)
            elif line.strip() and (own_words or label == "tree" or label not in seen or not label):
                # The tree, and the remark under `actual`.
                out.append(self.mask(line) if own_words or _drawn(line) else f"  {'':<10}({WITHHELD})")
                continue
            else:
                continue
            seen.add(label)
            out.append(f"  {label:<10}{value}")
        return "\n".join(out)

    def _numbers(self, text: str) -> str:
        return _NUMBERS.sub(lambda found: found["keep"] or self.token(found["mask"]), text)

    def _prompt(self, value: str) -> str:
        found = _PROMPT.match(value)
        assert found is not None
        tokens, place = found["tokens"], found["place"] or ""
        count = "" if "..." in tokens else f" ({len(re.findall('[0-9]+', tokens))} tokens)"
        return f"{self.text(tokens)}{count}{place}"

    def _value(self, value: str, target: str, *, own_words: bool) -> str:
        tail = f"   {target}" if value.endswith(f"   {target}") else ""
        shown = value.removesuffix(tail)
        return f"{self.mask(shown) if own_words else self.text(shown)}{tail}"

    def _digest(self, kind: str, text: str) -> str:
        return hmac.new(self._key, f"{kind} {text}".encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def _drawn(line: str) -> bool:
    """A line of a drawn tree: nothing but branches, a token and one of our own notes."""
    return bool(re.fullmatch(r"  (?:tree| {4}) {6}[│├└─ ]*[0-9]+(?: {2,}[\w ,.:<-]*)?", line))
