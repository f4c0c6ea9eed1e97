"""Suffix lookup: what has followed the longest ending of the text that stood in it before, by how often it did.

Kept is a suffix automaton of the prompt and output so far (Blumer et al. 1985): each state is a set of endings that
have occurred at the same places, `count` says at how many. A token costs constant time on average, and no ending is
too long to be found. A node's score is the product of the shares that its tokens have among what followed
(SuffixDecoding, arXiv 2411.04975).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from specbench.protocols import Coins
from specbench.tree import DraftTree, root_only
from specbench.types import Sampling


@dataclass
class _State:
    """longest: length of its longest ending. link: the state of the longest ending that has occurred elsewhere too."""

    longest: int
    link: int
    count: int
    following: dict[int, int] = field(default_factory=dict)


class SuffixAutomaton:
    """All substrings of the tokens given so far."""

    def __init__(self) -> None:
        self.states = [_State(0, -1, 0)]
        self.last = 0  # of the whole text

    def append(self, token: int) -> None:
        states = self.states
        new = len(states)
        states.append(_State(states[self.last].longest + 1, 0, 0))
        at = self.last
        while at >= 0 and token not in states[at].following:
            states[at].following[token] = new
            at = states[at].link
        if at >= 0:
            states[new].link = self._ending(at, token)
        self.last = at = new
        while at >= 0:  # every ending of the text has occurred once more
            states[at].count += 1
            at = states[at].link

    def _ending(self, at: int, token: int) -> int:
        """The state of the longest ending of `at` with `token` behind it and of no longer one: split off if need be."""
        states = self.states
        whole = states[at].following[token]
        if states[whole].longest == states[at].longest + 1:
            return whole
        part, old = len(states), states[whole]
        states.append(_State(states[at].longest + 1, old.link, old.count, dict(old.following)))
        old.link = part
        while at >= 0 and states[at].following.get(token) == whole:
            states[at].following[token] = part
            at = states[at].link
        return part


class SuffixDrafter:
    """num_nodes: drafts, at most. gamma: their depth. min_match: the shortest ending that is looked up. factor: no node
    is deeper than `factor` times the ending is long. least_score: of a node."""

    def __init__(
        self,
        *,
        num_nodes: int = 8,
        gamma: int = 8,
        min_match: int = 1,
        factor: float = 2.0,
        least_score: float = 0.1,
    ) -> None:
        for name, value in (("num_nodes", num_nodes), ("gamma", gamma), ("min_match", min_match)):
            if value < 1:
                raise ValueError(f"{name} = {value} must be >= 1")
        self._num_nodes, self._gamma, self._min_match = num_nodes, gamma, min_match
        self._factor, self._least_score = factor, least_score
        self.reset()

    def reset(self) -> None:
        self._automaton = SuffixAutomaton()
        self._text: list[int] = []
        # Of each token read: whether it was what had most often followed what stood before it; None where nothing had.
        self.hits: list[bool | None] = []

    def read(self, context: list[int]) -> int:
        """Takes in what a context has more than the last one, or all of another text. Returns the length of its longest
        ending that has stood in it before."""
        if context[: len(self._text)] != self._text:
            self.reset()
        for token in context[len(self._text) :]:
            likeliest = self._likeliest()
            self.hits.append(None if likeliest is None else likeliest == token)
            self._automaton.append(token)
        self._text = list(context)
        states = self._automaton.states
        return states[states[self._automaton.last].link].longest if context else 0

    def _likeliest(self) -> int | None:
        """What has most often followed the longest ending, the first to do so among equals."""
        states = self._automaton.states
        start = states[self._automaton.last].link
        if start < 0 or states[start].longest < self._min_match:
            return None
        return max(states[start].following.items(), key=lambda one: states[one[1]].count)[0]

    def draft(
        self, context: list[int], *, max_nodes: int, max_depth: int, sampling: Sampling, coins: Coins
    ) -> DraftTree:
        match, states = self.read(context), self._automaton.states
        start = states[self._automaton.last].link
        depth = min(self._gamma, max_depth, int(self._factor * match))
        if match < self._min_match or depth < 1 or max_nodes < 1:
            return root_only(context[-1])
        tokens, parents = [context[-1]], [-1]
        # (-score, order of arrival, parent, token, state, depth): the likeliest first, of equals the earliest seen.
        candidates: list[tuple[float, int, int, int, int, int]] = []
        num_seen = 0

        def look(node: int, state: int, score: float, level: int) -> None:
            nonlocal num_seen
            while not states[state].following:  # it ends the text: what a shorter ending was followed by, as in a loop
                state = states[state].link
            if states[state].longest < self._min_match:
                return
            total = sum(states[one].count for one in states[state].following.values())
            for token, following in states[state].following.items():
                share = score * states[following].count / total
                if share >= self._least_score and level <= depth:
                    heapq.heappush(candidates, (-share, num_seen, node, token, following, level))
                    num_seen += 1

        look(0, start, 1.0, 1)
        while candidates and len(tokens) <= min(self._num_nodes, max_nodes):
            negative, _, parent, token, state, level = heapq.heappop(candidates)
            tokens.append(token)
            parents.append(parent)
            look(len(tokens) - 1, state, -negative, level + 1)
        return DraftTree.of(tokens, parents)
