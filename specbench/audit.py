"""A verdict on an engine from its tokens alone, on a sentinel checkpoint: no logits, no forward, no excuse.

Whoever runs the engine writes what it said as JSON lines. Each token is judged behind the text that the engine itself
had written so far, so that one wrong token is counted once and does not make the next ones wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specbench.law.sequential import ALPHA, LawTest
from specbench.record import BUG, EQUAL, NOT_TESTED
from specbench.reference.sampling import probs
from specbench.reference.sentinel import BOS, NUM_SYMBOLS, Program, prompts_for
from specbench.types import Sampling

LOOK_EVERY = 50  # draws
IMPOSSIBLE = 1e-12  # a probability that no draw of a run meets: BOS has 1e-30 where nothing is filtered
MARGIN, LEAST_MARGIN = 10, 9.0  # of a sentinel's logits; what is left of it in the worst of precisions


@dataclass(frozen=True)
class Request:
    """What an engine is to be asked. prompt: token ids, BOS first; text: the same in symbols, BOS left out."""

    name: str
    prompt: tuple[int, ...]
    text: str
    max_new_tokens: int

    def as_line(self) -> str:
        fields = {
            "id": self.name,
            "prompt": self.prompt,
            "text": self.text,
            "max_new_tokens": self.max_new_tokens,
        }
        return json.dumps(fields)


@dataclass(frozen=True)
class Output:
    """What it said. mode: a name for how the engine decoded, judged apart from other modes. max_new_tokens: as asked
    for, None where that is not known. logprobs: of each token's place (token, log probability) of the likeliest and of
    the token itself, in any order; empty where it does not say. end_implied: the last token is an end token that the
    engine left out."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    name: str = ""
    mode: str = ""
    max_new_tokens: int | None = None
    logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    end_implied: bool = False


@dataclass(frozen=True)
class Edge:
    """A filter's edge that falls on equal logits, so that it may as rightly keep the one as the other token, or both.

    at: the edge, in eighths. above: the law of the tokens above it, whichever of those at the edge are kept."""

    at: int
    above: tuple[float, ...]


@dataclass(frozen=True)
class Audit:
    """The verdict on one mode. wrong: tokens, or outputs that ended early. sentence: what was found, in words. facts:
    the numbers behind it, of a real model."""

    mode: str
    verdict: str
    num_outputs: int
    num_tokens: int
    num_wrong: int
    sentence: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def as_fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def requests_for(program: Program, symbols: str, *, max_new_tokens: int, seed: int) -> list[Request]:
    """`reference.sentinel.prompts_for` as requests."""
    return [
        Request(name, tuple(prompt), "".join(symbols[token] for token in prompt[1:]), max_new_tokens)
        for name, prompt in prompts_for(program, seed=seed).items()
    ]


def audit_greedy(program: Program, outputs: Iterable[Output]) -> list[Audit]:
    """Every token must be the program's, and there must be as many as were asked for; a sentinel never ends by itself.

    EQUAL or BUG for each mode, NOT TESTED for one without tokens. There is no NOISE: the program's token leads by 10,
    and where logprobs are shown it must lead there by 9.
    """
    return [_audit_mode(program, mode, some) for mode, some in _by_mode(outputs).items()]


def audit_sampled(
    program: Program,
    outputs: Iterable[Output],
    sampling: Sampling,
    *,
    temperature_last: bool = False,
    alpha: float = ALPHA,
) -> list[Audit]:
    """Of a sentinel with a law head: tokens drawn under `sampling` must follow the law behind the text before each.

    temperature_last: the engine filters at temperature 1 and changes it afterwards, as llama.cpp does. alpha: the
    chance that a right engine is accused in all modes together. EQUAL says what would have been seen.
    """
    modes = _by_mode(outputs)
    laws = laws_of(program, sampling, temperature_last=temperature_last)
    edges = edges_of(program, laws, sampling)
    return [_audit_law(program, mode, some, laws.tolist(), edges, alpha / len(modes)) for mode, some in modes.items()]


def audit_outputs(
    program: Program,
    outputs: Iterable[Output],
    sampling: Sampling,
    *,
    temperature_last: bool = False,
    alpha: float = ALPHA,
) -> list[Audit]:
    """`audit_greedy` at temperature 0, else `audit_sampled`."""
    if not sampling.temperature:
        return audit_greedy(program, outputs)
    return audit_sampled(program, outputs, sampling, temperature_last=temperature_last, alpha=alpha)


def no_tokens(mode: str, num_outputs: int = 0) -> Audit:
    return Audit(mode, NOT_TESTED, num_outputs, 0, 0, "no tokens to judge")


def laws_of(program: Program, sampling: Sampling, *, temperature_last: bool) -> Tensor:
    """float64 [17, 17]: what is drawn after each final state."""
    rows = torch.tensor(program.law_logits, dtype=torch.float64) / 8
    if not temperature_last:
        return probs(rows, sampling)
    filtered = probs(rows, replace(sampling, temperature=1.0)).log()
    return (filtered / sampling.temperature).softmax(dim=-1)


def edges_of(program: Program, laws: Tensor, sampling: Sampling) -> dict[int, Edge]:
    """By state, where a filter's edge falls on tokens with equal logits."""
    if sampling.top_k is None and sampling.top_p is None and sampling.min_p is None:
        return {}
    found = {}
    for state, row in enumerate(program.law_logits):
        law = laws[state].tolist()
        lowest = min(logit for logit, mass in zip(row, law, strict=True) if mass > 0)
        if row.count(lowest) > 1:
            above = [mass if logit > lowest else 0.0 for logit, mass in zip(row, law, strict=True)]
            total = math.fsum(above)
            found[state] = Edge(lowest, tuple(mass / total for mass in above) if total > 0 else ())
    return found


def read_outputs(file: str | Path, symbols: str) -> list[Output]:
    """JSON lines: `prompt` and `output` as token ids, or `text` and `output_text` in symbols; `id`, `mode` and
    `max_new_tokens` as one likes. ValueError says which line is wrong, and how."""
    found = []
    try:
        text = Path(file).read_text("utf-8")
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{file} is no text in UTF-8: it must hold JSON lines") from None
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines() knows ends of lines that JSON does not
        if line.strip():
            try:
                found.append(_read_line(json.loads(line), symbols))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{file}, line {number}: {error}") from None
    if not found:
        raise ValueError(f"{file} holds no line: write one a request, with its prompt and the engine's output")
    return found


def _read_line(fields: Any, symbols: str) -> Output:
    if not isinstance(fields, dict):
        raise ValueError('must be an object such as {"prompt": [16, 3], "output": [7, 0]}')
    if "prompt" in fields and "output" in fields:
        prompt, tokens = _ids("prompt", fields["prompt"]), _ids("output", fields["output"])
    elif "text" in fields and "output_text" in fields:
        prompt = (BOS, *_ids_of_text("text", fields["text"], symbols))
        tokens = _ids_of_text("output_text", fields["output_text"], symbols)
    else:
        raise ValueError("must have prompt and output (token ids), or text and output_text (symbols)")
    most = fields.get("max_new_tokens")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise ValueError(f"max_new_tokens = {most!r} must be an int of at least 1")
    if not prompt or prompt[0] != BOS or not all(0 <= token < BOS for token in prompt[1:]):
        raise ValueError(f"prompt must begin with BOS, token {BOS}, and hold symbols, 0 to {BOS - 1}, behind it")
    return Output(prompt, tokens, str(fields.get("id", "")), str(fields.get("mode", "")), most)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in value):
        raise ValueError(f"{name} must be a list of token ids")
    return tuple(value)


def _ids_of_text(name: str, value: Any, symbols: str) -> tuple[int, ...]:
    """A character that is no symbol becomes token -1, which nothing says rightly."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string of the symbols {symbols}")
    return tuple(symbols.find(one) for one in value)


def _by_mode(outputs: Iterable[Output]) -> dict[str, list[Output]]:
    modes: dict[str, list[Output]] = {}
    for one in outputs:
        modes.setdefault(one.mode, []).append(one)
    return modes


def _audit_mode(program: Program, mode: str, outputs: Sequence[Output]) -> Audit:
    num_tokens, wrong = 0, []
    for number, one in enumerate(outputs, start=1):
        name = one.name or f"output {number}"
        for place, (token, right) in enumerate(_judged(program, one)):
            num_tokens += 1
            if token != right:
                wrong.append(f"{name}, token {place}: {token}, must be {right}")
            elif (margin := _shown_margin(one, place)) < LEAST_MARGIN:
                wrong.append(f"{name}, token {place}: {token} {_lead(margin)}, must lead by {MARGIN}")
        if early := _ends_early(one):
            wrong.append(f"{name} {early}")
    if not num_tokens and not wrong:
        return no_tokens(mode, len(outputs))
    what = f"of {num_tokens} tokens in {counted(len(outputs), 'output')}"
    if not wrong:
        return Audit(mode, EQUAL, len(outputs), num_tokens, 0, f"all {what} are the program's")
    sentence = f"{counted(len(wrong), 'mistake')} in {what.removeprefix('of ')}; first: {'; '.join(wrong[:3])}"
    return Audit(mode, BUG, len(outputs), num_tokens, len(wrong), sentence)


def _audit_law(
    program: Program,
    mode: str,
    outputs: Sequence[Output],
    laws: list[list[float]],
    edges: Mapping[int, Edge],
    alpha: float,
) -> Audit:
    judged = {state: len(laws) + idx for idx, state in enumerate(one for one in edges if edges[one].above)}
    test = LawTest([*laws, *(edges[state].above for state in judged)], alpha=alpha)
    num_tokens, num_at_edge = 0, 0

    def bug(sentence: str) -> Audit:
        return Audit(mode, BUG, len(outputs), test.num_draws, 1, sentence)

    for number, one in enumerate(outputs, start=1):
        name = one.name or f"output {number}"
        num_tokens += len(one.tokens)
        for place, (token, state) in enumerate(_behind(program, one)):
            edge = edges.get(state)
            if not 0 <= token < len(laws[state]) or (edge is None and laws[state][token] < IMPOSSIBLE):
                return bug(f"{name}, token {place}: {token}, which has no probability there")
            if edge is None:
                test.note(state, token)
            elif program.law_logits[state][token] < edge.at:
                return bug(f"{name}, token {place}: {token}, which has no probability there")
            elif program.law_logits[state][token] == edge.at:
                num_at_edge += 1
                continue
            else:
                test.note(judged[state], token)
            if test.num_draws % LOOK_EVERY == 0 and test.is_rejected:
                return bug(f"{test.num_draws} tokens do not follow the law (e-value {test.e_value:.1e})")
        if early := _ends_early(one):
            return bug(f"{name} {early}")
    if not test.num_draws:
        return no_tokens(mode, len(outputs))
    if test.is_rejected:
        return bug(f"{test.num_draws} tokens do not follow the law (e-value {test.e_value:.1e})")
    sentence = (
        f"{test.num_draws} tokens follow the law, as far as they can tell: a total variation of "
        f"{test.detectable_tv():.2f} would have shown as often as not"
    )
    if num_at_edge:
        sentence += f"; not judged: {num_at_edge} at a filter's edge, among equals"
    if num_unread := num_tokens - test.num_draws - num_at_edge:
        sentence += f"; not judged: {num_unread} behind a BOS, where a sentinel has no state"
    return Audit(mode, EQUAL, len(outputs), test.num_draws, 0, sentence)


def _judged(program: Program, one: Output) -> Iterator[tuple[int, int]]:
    """Each token and the one that should stand there, up to the first that is no symbol."""
    tokens = _readable(one)
    right = program.next_tokens([*one.prompt, *tokens[:-1]]) if tokens else []
    yield from zip(tokens, right[len(one.prompt) - 1 :], strict=True)


def first_wrong(program: Program, one: Output) -> int | None:
    """The place of the first token that is not the program's."""
    return next((place for place, (token, right) in enumerate(_judged(program, one)) if token != right), None)


def _behind(program: Program, one: Output) -> Iterator[tuple[int, int]]:
    """Each token and the final state behind which it stands."""
    tokens = _readable(one)
    states = program.states([*one.prompt, *tokens[:-1]])[-1] if tokens else []
    yield from zip(tokens, states[len(one.prompt) - 1 :], strict=True)


def _shown_margin(one: Output, place: int) -> float:
    """By how much the token leads in its logprobs, at most; below 0 where another one does. inf where they are not
    shown. Where the token's own is all that is shown, the rest of the mass lies on sixteen others."""
    told = dict(one.logprobs[place]) if place < len(one.logprobs) else {}
    if not told:
        return math.inf
    token = one.tokens[place]
    others = [logprob for other, logprob in told.items() if other != token]
    if token not in told:
        return -math.inf
    if others:
        return told[token] - max(others)
    rest = -math.expm1(min(0.0, told[token]))
    return told[token] - math.log(rest / NUM_SYMBOLS) if rest > 0 else math.inf


def _lead(margin: float) -> str:
    if math.isinf(margin):
        return "is not among its likeliest"
    return f"leads by {margin:.2f}" if margin >= 0 else f"is {-margin:.2f} behind another one"


def _readable(one: Output) -> tuple[int, ...]:
    """The tokens up to and with the first that is no symbol: behind it the program has no state."""
    end = next((place for place, token in enumerate(one.tokens) if not 0 <= token < BOS), len(one.tokens) - 1)
    return one.tokens[: end + 1]


def _ends_early(one: Output) -> str:
    if one.max_new_tokens is None or len(one.tokens) == one.max_new_tokens:
        return ""
    return f"has {len(one.tokens)} tokens, must have {one.max_new_tokens}"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
