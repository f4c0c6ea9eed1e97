"""What a sentinel checkpoint computes, in integers: a dilated automaton over the tokens, and its laws.

Layer l holds a state per position, s_0[t] the token itself, and s_{l+1}[t] = T_l[s_l[t]][s_l[t - 2^l]], with T_l a
Latin square. After L layers the state depends on each of the last 2^L tokens along exactly one path, and rows and
columns of a Latin square are permutations: another token in one place always gives another state, the next token.
No tensors and no floats, except in `law`, which is the softmax of integers over 8.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

NUM_SYMBOLS = 16
BOS = NUM_SYMBOLS  # the token, and the state of its position at every layer
VOCAB_SIZE = NUM_SYMBOLS + 1
MAX_LAYERS = 10
NUM_REPEATED = 48  # tokens of its own continuation that a prompt of `prompts_for` holds

Table = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Program:
    """The next token after a context: token ids as the model sees them, BOS first, then symbols.

    tables: of layer l, [16][17]: T_l[own state][fetched state]; the last column is for BOS, which stands in before the
    first symbol. first: the next token after BOS alone. law_logits: [17][17], after final state i (16: BOS alone) the
    logit of each token in eighths; the largest is the next token's.
    """

    tables: tuple[Table, ...]
    first: int
    law_logits: Table

    def __post_init__(self) -> None:
        if not 1 <= self.num_layers <= MAX_LAYERS:
            raise ValueError(f"tables has {self.num_layers} layers, must have 1 to {MAX_LAYERS}")
        for layer, table in enumerate(self.tables):
            if len(table) != NUM_SYMBOLS or any(len(row) != VOCAB_SIZE for row in table):
                raise ValueError(f"tables[{layer}] must have {NUM_SYMBOLS} rows of {VOCAB_SIZE} states")
            if any(not 0 <= state < NUM_SYMBOLS for row in table for state in row):
                raise ValueError(f"tables[{layer}] must hold states between 0 and {NUM_SYMBOLS - 1}")
        if not 0 <= self.first < NUM_SYMBOLS:
            raise ValueError(f"first = {self.first} must be a symbol, 0 to {NUM_SYMBOLS - 1}")
        if len(self.law_logits) != VOCAB_SIZE or any(len(row) != VOCAB_SIZE for row in self.law_logits):
            raise ValueError(f"law_logits must have {VOCAB_SIZE} rows of {VOCAB_SIZE} numbers")

    @classmethod
    def seeded(cls, seed: int, *, receptive_field: int = 64) -> Program:
        """A random program; the same seed gives the same one everywhere, in any version of Python."""
        num_layers = receptive_field.bit_length() - 1
        if receptive_field != 1 << num_layers or not 1 <= num_layers <= MAX_LAYERS:
            raise ValueError(f"receptive_field = {receptive_field} must be a power of two from 2 to {1 << MAX_LAYERS}")
        draws = _Draws(seed)
        tables = tuple(_table(draws) for _ in range(num_layers))
        first = draws.below(NUM_SYMBOLS)
        laws = tuple(_law_row(draws, top) for top in [*range(NUM_SYMBOLS), first])
        return cls(tables, first, laws)

    @property
    def num_layers(self) -> int:
        return len(self.tables)

    @property
    def receptive_field(self) -> int:
        """How many of the last tokens decide the next one."""
        return 1 << self.num_layers

    def states(self, context: Sequence[int]) -> list[list[int]]:
        """[L + 1][S]: row 0 is the context, row l + 1 the states after layer l; position 0 stays BOS."""
        rows: list[list[int]] = [[] for _ in range(self.num_layers + 1)]
        for token in _checked(context):
            self._append(rows, token)
        return rows

    def next_token(self, context: Sequence[int]) -> int:
        return self._token_of(self.states(context)[-1][-1])

    def next_tokens(self, context: Sequence[int]) -> list[int]:
        """[S]: entry t is the next token after context[: t + 1], what a model's argmax gives at position t."""
        return [self._token_of(state) for state in self.states(context)[-1]]

    def continuation(self, context: Sequence[int], num: int) -> list[int]:
        """The next `num` tokens, greedily; L table look-ups each."""
        rows, made = self.states(context), []
        for _ in range(num):
            made.append(self._token_of(rows[-1][-1]))
            self._append(rows, made[-1])
        return made

    def law(self, context: Sequence[int]) -> list[float]:
        """[V]: the probability of each token after the context at temperature 1; float64 of exact logits."""
        row = self.law_logits[self.states(context)[-1][-1]]
        masses = [math.exp(eighths / 8) for eighths in row]
        return [mass / math.fsum(masses) for mass in masses]

    def drafter(self, agreement: float, *, seed: int = 0) -> Program:
        """The same program but for a seeded share of the pairs in its last table, where it gives another token.

        agreement: share of the 256 pairs that stay, rounded to the nearest; `agreement_with` says it exactly. What
        follows BOS alone, and what is fetched before the first symbol, stays as it is.
        """
        if not 0 <= agreement <= 1:
            raise ValueError(f"agreement = {agreement} must be between 0 and 1, the share of contexts that agree")
        draws = _Draws(seed)
        num_other = NUM_SYMBOLS**2 - round(agreement * NUM_SYMBOLS**2)
        last = [list(row) for row in self.tables[-1]]
        for pair in draws.permutation(NUM_SYMBOLS**2)[:num_other]:
            own, fetched = divmod(pair, NUM_SYMBOLS)
            last[own][fetched] = (last[own][fetched] + 1 + draws.below(NUM_SYMBOLS - 1)) % NUM_SYMBOLS
        return replace(self, tables=(*self.tables[:-1], tuple(tuple(row) for row in last)))

    def with_cut_laws(self) -> Program:
        """The same states; of each law only the likeliest token is left, or in every other state all but that one (the
        rest get the logit of BOS): about half of its mass.

        A drafter with such laws q is refused about every other time, and what is drawn then matters most: a token that
        is drawn from p itself instead of the residual is off by a total variation of up to a quarter.
        """
        laws = []
        for state, row in enumerate(self.law_logits):
            top = row.index(max(row))
            laws.append(tuple(one if (token == top) == (state % 2 == 0) else -512 for token, one in enumerate(row)))
        return replace(self, law_logits=tuple(laws))

    def renamed(self, order: Sequence[int]) -> Program:
        """The same program for a vocabulary in which symbol i is called order[i], at every layer."""
        if sorted(order) != list(range(NUM_SYMBOLS)):
            raise ValueError(f"order must hold each of 0 to {NUM_SYMBOLS - 1} once")
        names = [*order, BOS]
        old = sorted(range(VOCAB_SIZE), key=names.__getitem__)

        def renamed(table: Table) -> Table:
            """Row, column and entry: all three are states."""
            return tuple(tuple(names[table[own][fetched]] for fetched in old) for own in old[: len(table)])

        laws = tuple(tuple(self.law_logits[state][token] for token in old) for state in old)
        return Program(tuple(renamed(table) for table in self.tables), names[self.first], laws)

    def agreement_with(self, target: Program) -> Fraction:
        """The probability that both give the same next token after uniformly random symbols, at least a field of them.

        The two states that meet in the last table belong to disjoint halves of the field; each is uniform, because a
        Latin square maps a uniform state to a uniform one. So every pair has 1/256.
        """
        if self.tables[:-1] != target.tables[:-1]:
            raise ValueError("target must share all tables but the last, as a program and its drafter() do")
        pairs = [(own, fetched) for own in range(NUM_SYMBOLS) for fetched in range(NUM_SYMBOLS)]
        same = sum(self.tables[-1][own][fetched] == target.tables[-1][own][fetched] for own, fetched in pairs)
        return Fraction(same, len(pairs))

    def as_json(self) -> dict[str, object]:
        """For a program in another language: three fields named as here, lists of integers."""
        return {"tables": self.tables, "first": self.first, "law_logits": self.law_logits}

    @classmethod
    def from_json(cls, read: dict[str, object]) -> Program:
        missing = [name for name in ("tables", "first", "law_logits") if name not in read]
        if missing:
            raise ValueError(f"a program has the fields tables, first and law_logits; {missing[0]} is missing")
        tables, first, laws = read["tables"], read["first"], read["law_logits"]
        if not isinstance(tables, Iterable) or not isinstance(first, int) or not isinstance(laws, Iterable):
            raise ValueError("a program's tables and law_logits must be lists, first a number")
        return cls(tuple(_as_table(table) for table in tables), first, _as_table(laws))

    def _append(self, rows: list[list[int]], token: int) -> None:
        """One more position. Positions before the first symbol are BOS at every layer."""
        position, state = len(rows[0]), token
        rows[0].append(token)
        for layer, table in enumerate(self.tables):
            if state != BOS:
                state = table[state][rows[layer][max(0, position - (1 << layer))]]
            rows[layer + 1].append(state)

    def _token_of(self, state: int) -> int:
        return self.first if state == BOS else state


def accepted_lengths(
    target: Program, drafter: Program, context: Sequence[int], *, num_rounds: int, gamma: int
) -> list[int]:
    """How many of the `gamma` drafts of a chain a greedy target accepts in each round, the bonus token not counted."""
    accepted, so_far = [], list(context)
    for _ in range(num_rounds):
        drafts, wanted = drafter.continuation(so_far, gamma), target.continuation(so_far, gamma + 1)
        num = next((idx for idx in range(gamma) if drafts[idx] != wanted[idx]), gamma)
        accepted.append(num)
        so_far += wanted[: num + 1]
    return accepted


def repeating_prompt(program: Program, x: Sequence[int], num: int, *, corrupted: Sequence[int] = ()) -> list[int]:
    """[BOS, *x, *c, *x] with c the program's `num` next tokens after x: what follows is c again, to the last token.

    x: as many symbols as the receptive field, so that nothing before them matters. corrupted: places in c where the
    prompt holds another symbol; prompt lookup then drafts it, and must see it refused.
    """
    if len(x) != program.receptive_field:
        raise ValueError(f"x has {len(x)} symbols, must have {program.receptive_field}, the program's receptive field")
    if bad := [place for place in corrupted if not 0 <= place < num]:
        raise ValueError(f"corrupted place {bad[0]} must be between 0 and {num - 1}, a place in the continuation")
    shown = program.continuation([BOS, *x], num)
    for place in corrupted:
        shown[place] = (shown[place] + 1) % NUM_SYMBOLS
    return [BOS, *x, *shown, *x]


def prompts_for(program: Program, *, seed: int = 0) -> dict[str, list[int]]:
    """Random prompts around the ends of the receptive field, and two that repeat their own continuation with three
    tokens of it spoilt, so that prompt lookup is accepted and refused."""
    field = program.receptive_field
    lengths = [0, 1, 2, field // 2, field - 1, field, field + 1, 2 * field + 3]
    prompts = {f"random-{num}": [BOS, *random_symbols(seed + num, num)] for num in dict.fromkeys(lengths)}
    for idx in range(2):
        x = random_symbols(seed + 1_000 + idx, field)
        spoilt = (5 + idx, 17 + idx, 18 + idx)
        prompts[f"repeat-{idx}"] = repeating_prompt(program, x, NUM_REPEATED, corrupted=spoilt)
    return prompts


def random_symbols(seed: int, num: int) -> list[int]:
    """[num] uniform symbols, the same everywhere for one seed."""
    draws = _Draws(seed)
    return [draws.below(NUM_SYMBOLS) for _ in range(num)]


def _checked(context: Sequence[int]) -> Sequence[int]:
    if not len(context) or context[0] != BOS:
        raise ValueError(f"context must begin with BOS, token {BOS}: {list(context[:1])} does not")
    for position, token in enumerate(context):
        if position and not 0 <= token < NUM_SYMBOLS:
            raise ValueError(f"context[{position}] = {token} must be a symbol, 0 to {NUM_SYMBOLS - 1}")
    return context


def _as_table(rows: object) -> Table:
    if not isinstance(rows, Iterable):
        raise ValueError("a table must be a list of rows")
    return tuple(tuple(int(number) for number in row) for row in rows)


def _table(draws: _Draws) -> Table:
    """[16][17]: the addition of GF(2)^4 with rows, columns and entries renamed at random, and a column for BOS."""
    rows, columns, entries, after_bos = (draws.permutation(NUM_SYMBOLS) for _ in range(4))
    return tuple((*(entries[rows[own] ^ one] for one in columns), after_bos[own]) for own in range(NUM_SYMBOLS))


def _law_row(draws: _Draws, top: int) -> tuple[int, ...]:
    """Logits in eighths: 5 for the next token, -4 to 3.875 for other symbols, -64 for BOS; all exact in bfloat16."""
    row = [draws.below(64) - 32 for _ in range(NUM_SYMBOLS)]
    row[top] = 40
    return (*row, -512)


class _Draws:
    """splitmix64: a few lines in any language, so that a seed means one program for good."""

    def __init__(self, seed: int) -> None:
        self._state = seed % 2**64

    def below(self, limit: int) -> int:
        """Uniform in 0..limit-1, to within limit / 2^64."""
        self._state = (self._state + 0x9E3779B97F4A7C15) % 2**64
        mixed = self._state
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
        return (mixed ^ (mixed >> 31)) * limit >> 64

    def permutation(self, length: int) -> list[int]:
        order = list(range(length))
        for idx in range(length - 1, 0, -1):
            other = self.below(idx + 1)
            order[idx], order[other] = order[other], order[idx]
        return order
