"""An engine that keeps a wrong draft now and then: what the audit has to see in each engine and each precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from specbench.engines import Answer, Engine, Files, Mode, Request, Settings
from specbench.reference.sentinel import SYMBOLS, Program

GAMMA = 4
EVERY = 50  # rounds
MODE = f"plain, a wrong draft kept once in {EVERY} rounds"


class Careless:
    """engine: asked plainly for everything else, behind the kept draft too. program, drafter: whose rounds of GAMMA
    drafts are counted over all requests; in one of `every` the first draft that a verifier refuses is kept. num_kept:
    so many in the last call."""

    temperature_last = False

    def __init__(self, engine: Engine, program: Program, drafter: Program, *, every: int = EVERY) -> None:
        self._engine, self._program, self._drafter, self._every = engine, program, drafter, every
        self.requirements, self.weights = engine.requirements, engine.weights
        self.modes: Mapping[str, Mode] = {MODE: Mode()}
        self.num_kept = 0

    def version(self) -> str:
        return self._engine.version()

    def generate(self, files: Files, requests: Sequence[Request], settings: Settings) -> Iterator[Answer]:
        plans, num_rounds, self.num_kept = [], 0, 0
        for one in requests:
            pieces, num_rounds = self._pieces(one, num_rounds)
            plans.append(pieces)
        plain = Settings("plain", settings.weights)
        asked = [piece for pieces in plans for piece, _ in pieces]
        answers = self._engine.generate(files, [one for one in asked if one.max_new_tokens], plain)
        for pieces in plans:
            tokens: list[int] = []
            for piece, kept in pieces:
                if piece.max_new_tokens:
                    answer = next(answers, None)
                    if answer is None:
                        raise ValueError(f"the engine gave too few answers to {len(asked)} requests")
                    tokens += answer.tokens
                if kept is not None:
                    tokens.append(kept)
                    self.num_kept += 1
            yield Answer(tuple(tokens))

    def _pieces(self, request: Request, num_rounds: int) -> tuple[list[tuple[Request, int | None]], int]:
        """What is asked of the engine, each with the wrong draft behind it, and the rounds so far."""
        context, start = list(request.prompt), len(request.prompt)
        end = start + request.max_new_tokens
        pieces: list[tuple[Request, int | None]] = []
        while len(context) < end:
            drafts = self._drafter.continuation(context, GAMMA)
            right = self._program.continuation(context, GAMMA + 1)
            num = next((place for place in range(GAMMA) if drafts[place] != right[place]), GAMMA)
            num_rounds += 1
            if num_rounds % self._every == 0 and num < GAMMA and len(context) + num < end:
                piece = self._request(context[:start], request, len(context) + num - start)
                context += [*right[:num], drafts[num]]
                pieces.append((piece, drafts[num]))
                start = len(context)
            else:
                num_rounds -= num_rounds % self._every == 0  # all are accepted: the next round keeps one
                context += right[: num + 1]
        last = self._request(context[:start], request, end - start)
        return [*pieces, (last, None)], num_rounds

    def _request(self, prompt: Sequence[int], request: Request, num: int) -> Request:
        """The text of a sentinel goes on by a symbol a token."""
        added = "".join(SYMBOLS[token] for token in prompt[len(request.prompt) :])
        return Request(tuple(prompt), request.text + added, num)
