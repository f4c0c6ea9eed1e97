"""Reports that count something else than they say; the output is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from specbench.reference.decoder import Decoder
from specbench.reference.faults.fault import Fault
from specbench.reference.target import ReferenceTarget
from specbench.tree import DraftTree
from specbench.types import Generation, Round


class _BonusInRate(Generation):
    @property
    def acceptance_rate(self) -> float:
        return sum(len(one.path) + 1 for one in self.rounds) / max(1, sum(_levels(one) for one in self.rounds))


class _BonusLeftOut(Generation):
    @property
    def acceptance_length(self) -> float:
        return sum(len(one.path) for one in self.rounds) / max(1, len(self.rounds))


class _BonusAfterFullAccept(Generation):
    """The bonus token counts as a draft where no correction has taken its place."""

    @property
    def num_accepted(self) -> int:
        return sum(len(one.path) + (0 < len(one.path) == _levels(one)) for one in self.rounds)


class _MeanOfRates(Generation):
    @property
    def acceptance_rate(self) -> float:
        rates = [len(one.path) / _levels(one) for one in self.rounds if _levels(one)]
        return sum(rates) / max(1, len(rates))


class _OverNodes(Generation):
    @property
    def acceptance_rate(self) -> float:
        return sum(len(one.path) for one in self.rounds) / max(1, sum(len(one.tokens) - 1 for one in self.rounds))


class _EmptyRoundsDrafted(Generation):
    """A round without drafts counts as one that has drafted a token and had it refused."""

    @property
    def acceptance_rate(self) -> float:
        return sum(len(one.path) for one in self.rounds) / max(1, sum(max(1, _levels(one)) for one in self.rounds))


class _EmptyRoundsSkipped(Generation):
    @property
    def acceptance_length(self) -> float:
        lengths = [len(one.path) + 1 for one in self.rounds if _levels(one)]
        return sum(lengths) / len(lengths) if lengths else 1.0


class _TokensLessRounds(Generation):
    """Accepted drafts as what was emitted less one token a round: a stop cuts accepted drafts off."""

    @property
    def num_accepted(self) -> int:
        return len(self.tokens) - len(self.rounds)


class _RootsDrafted(Generation):
    @property
    def num_drafted(self) -> int:
        return sum(len(one.tokens) for one in self.rounds)


class _LevelsDrafted(Generation):
    @property
    def num_drafted(self) -> int:
        return sum(_levels(one) for one in self.rounds)


class _LastRoundMissing(Generation):
    """Counts are written when the next round begins."""

    @property
    def num_drafted(self) -> int:
        return sum(len(one.tokens) - 1 for one in self.rounds[:-1])


class _CarriedOver(Decoder):
    """The counter lives with the decoder, and a new request does not set it back."""

    _num_accepted = 0

    def generate(self, *arguments: Any, **keywords: Any) -> Generation:
        one = super().generate(*arguments, **keywords)
        self._num_accepted += sum(len(each.path) for each in one.rounds)
        said = _Counted(one.tokens, one.finish_reason, one.rounds)
        object.__setattr__(said, "num_accepted", self._num_accepted)
        return said


class _Counted(Generation):
    num_accepted: int


class _CutOffReported(Decoder):
    """A round's record says that all of its tokens were emitted, those behind a stop too."""

    def generate(self, *arguments: Any, **keywords: Any) -> Generation:
        one = super().generate(*arguments, **keywords)
        rounds = [
            replace(each, emitted=(*(each.tokens[node] for node in each.path), each.bonus_token)) for each in one.rounds
        ]
        return replace(one, rounds=tuple(rounds))


def _reporting(kind: type[Generation]) -> Callable[[], ReferenceTarget]:
    """A target whose generations say of themselves what `kind` counts."""

    class Reporting(Decoder):
        def generate(self, *arguments: Any, **keywords: Any) -> Generation:
            one = super().generate(*arguments, **keywords)
            return kind(one.tokens, one.finish_reason, one.rounds)

    return lambda: ReferenceTarget(decoder=Reporting)


def _levels(one: Round) -> int:
    return int(DraftTree.of(one.tokens, one.parents).depth.max())


FAULTS = (
    Fault(
        "bonus_counted",
        "metric-wrong",
        "the bonus token counts as an accepted draft",
        "any generation with drafts",
        "metrics.acceptance",
        target=_reporting(_BonusInRate),
        origin="mlx-node/mlx-node#11",
    ),
    Fault(
        "bonus_left_out",
        "metric-wrong",
        "the acceptance length leaves the bonus token out: accepted drafts a forward",
        "any generation",
        "metrics.acceptance",
        target=_reporting(_BonusLeftOut),
    ),
    Fault(
        "bonus_after_full_accept",
        "metric-wrong",
        "the bonus token counts as an accepted draft where the whole draft was accepted",
        "a full accept",
        "metrics.acceptance",
        target=_reporting(_BonusAfterFullAccept),
        subtle="a full accept",
    ),
    Fault(
        "mean_of_rates",
        "metric-wrong",
        "the acceptance rate is the mean of the rounds' rates instead of one of pooled counts",
        "rounds of unequal depth",
        "metrics.acceptance",
        target=_reporting(_MeanOfRates),
        subtle="rounds of unequal depth",
    ),
    Fault(
        "rate_over_nodes",
        "metric-wrong",
        "accepted drafts are divided by drafted nodes instead of levels",
        "two siblings",
        "metrics.acceptance",
        target=_reporting(_OverNodes),
        subtle="width",
    ),
    Fault(
        "empty_rounds_in_rate",
        "metric-wrong",
        "a round without drafts counts as a refused draft in the rate",
        "a round without drafts",
        "metrics.acceptance",
        target=_reporting(_EmptyRoundsDrafted),
        origin="vllm-project/vllm#54054",
        subtle="a round without drafts",
    ),
    Fault(
        "empty_rounds_left_out",
        "metric-wrong",
        "rounds without drafts are left out of the acceptance length",
        "a round without drafts",
        "metrics.acceptance",
        target=_reporting(_EmptyRoundsSkipped),
        subtle="a round without drafts",
    ),
    Fault(
        "tokens_less_rounds",
        "metric-wrong",
        "accepted drafts are counted as tokens less rounds, which leaves out what a stop cut off",
        "a stop inside an accepted run",
        "metrics.acceptance",
        target=_reporting(_TokensLessRounds),
        subtle="a stop inside an accepted run",
    ),
    Fault(
        "roots_counted",
        "metric-wrong",
        "roots are counted among the drafted nodes",
        "any round",
        "metrics.acceptance",
        target=_reporting(_RootsDrafted),
        origin="lightseekorg/tokenspeed#1443",
    ),
    Fault(
        "levels_for_nodes",
        "metric-wrong",
        "drafted levels are reported as drafted nodes",
        "two siblings",
        "metrics.acceptance",
        target=_reporting(_LevelsDrafted),
        origin="sgl-project/sglang#13212",
        subtle="width",
    ),
    Fault(
        "last_round_missing",
        "metric-wrong",
        "drafts of the last round are missing from the count, which is written when a next one begins",
        "a last round with drafts",
        "metrics.acceptance",
        target=_reporting(_LastRoundMissing),
    ),
    Fault(
        "counts_carried_over",
        "metric-wrong",
        "accepted drafts of the request before are counted in",
        "a second request",
        "metrics.acceptance",
        target=lambda: ReferenceTarget(decoder=_CarriedOver),
        subtle="a second request",
    ),
    Fault(
        "cut_off_reported",
        "metric-wrong",
        "the last round's record holds the tokens that a stop cut off as emitted",
        "a stop inside an accepted run",
        "metrics.acceptance",
        target=lambda: ReferenceTarget(decoder=_CutOffReported),
        origin="vllm-project/vllm#56101",
        subtle="a stop inside an accepted run",
    ),
)
