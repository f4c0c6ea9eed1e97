"""Who decodes: our own decoder, transformers' `generate`, or a target; each gives tokens and when they came.

The timed part records stamps and nothing else: two clock reads and one append a step, four steps a round
(`tests/test_bench_loop.py` counts them). What rounds drafted and accepted is read from the generation afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from specbench.bench.costs import WIDTHS, arm_costs, forward_seconds, settling
from specbench.bench.lean import LeanLlama
from specbench.bench.metrics import RoundCounts
from specbench.bench.rows import Setting
from specbench.models import unknown_name
from specbench.protocols import Drafter, LanguageModel
from specbench.reference.batch import BATCH_STEPS, BatchSteps
from specbench.reference.batch_layouts import can_batch
from specbench.reference.decoder import Decoder
from specbench.reference.drafters.adaptive import ARMS, Costs
from specbench.reference.drafters.best_first import BestFirstDrafter
from specbench.reference.drafters.caching import CachingDrafter
from specbench.reference.drafters.growth import BestFirst
from specbench.reference.drafters.ngram import NGramDrafter
from specbench.reference.drafters.sampled import SampledDrafter
from specbench.reference.drafters.suffix import SuffixDrafter
from specbench.reference.drafters.trained import load_adaptive, load_drafter
from specbench.reference.layouts import LAYOUTS
from specbench.reference.model import LlamaModel
from specbench.reference.steps import STEPS
from specbench.shipped import PUBLISHED
from specbench.steps import Steps
from specbench.training import KINDS
from specbench.types import NEVER_STOP, Generation, Request, Round, Sampling

MAX_NODES = 64  # of a tree
SHARE_OF_LAYERS = 3  # an early exit is the first third of them
DRAFT, VERIFY, COMMIT = range(3)
# One step of a round: which, and its begin and end by the clock.
Stamp = tuple[int, float, float]


@dataclass(frozen=True)
class Answer:
    """Fields as in `rows.Row`."""

    tokens: tuple[int, ...]
    seconds: float
    first_seconds: float
    first_tokens: int = 1
    rounds: tuple[RoundCounts, ...] = ()
    phases: Mapping[str, float] | None = None
    num_rows: int | None = None
    first_rounds: int = 1


class Side(Protocol):
    def generate(self, prompt: Sequence[int], num: int, *, seed: int = 0) -> Answer:
        """Exactly `num` new tokens, whatever end tokens there are among them."""
        ...


def load_own(folder: str, dtype: torch.dtype, device: str = "cpu") -> LanguageModel:
    """The model that our side runs on: lean where its type allows it, other types as `reference.hf` has them. Its name
    says which, and stands in the definition of a run as `forward`."""
    from transformers import AutoConfig

    from specbench.reference.hf import HFModel

    if AutoConfig.from_pretrained(folder, trust_remote_code=False).model_type not in ("llama", "mistral"):
        return HFModel.load(folder, dtype=dtype, device=device)
    model = LlamaModel.load(folder, dtype=dtype, device=device)
    try:
        return LeanLlama.of(model)
    except ValueError:  # windows or biases: the definition names the forward that was used
        return model


def _early_exit(model: LanguageModel) -> LanguageModel:
    if not isinstance(model, LlamaModel):
        raise ValueError(f"an early exit needs a Llama whose layers can be cut, not a {type(model).__name__}")
    return model.first_layers(max(1, model.num_layers // SHARE_OF_LAYERS))


def _lookup(setting: Setting) -> Drafter:
    from specbench.drafters.prompt_lookup import PromptLookupDrafter

    return PromptLookupDrafter(gamma=setting.gamma, max_ngram=2)  # generate's own default


# By name, over the target and, where one was named, a draft model.
DRAFTERS: dict[str, Callable[[Setting, LanguageModel, LanguageModel | None], Drafter]] = {
    "lookup": lambda setting, model, small: _lookup(setting),
    "ngram": lambda setting, model, small: NGramDrafter(gamma=setting.gamma, width=setting.width),
    "suffix": lambda setting, model, small: SuffixDrafter(num_nodes=setting.gamma * setting.width, gamma=setting.gamma),
    "early_exit": lambda setting, model, small: _drafting(setting, _early_exit(model)),
    "model": lambda setting, model, small: _drafting(setting, _named(small)),
    "best_first": lambda setting, model, small: _best_first(setting, _early_exit(model) if small is None else small),
}
WITH_DRAFT_MODEL = ("model", "best_first")
CHAINS = ("lookup",)
ADAPTIVE = ("adaptive", "router")  # by the cost model, by the router that was fitted
BEAM = 8  # nodes of a level that a trained drafter grows, and candidates of each


def _drafting(setting: Setting, model: LanguageModel) -> Drafter:
    """`width` candidates at every node, `gamma` deep, as far as MAX_NODES go; drawn at temperatures above 0."""
    widths = (setting.width,) * setting.gamma
    if setting.temperature:
        return SampledDrafter(model, widths=widths, proposal="iid" if setting.width == 1 else "without_replacement")
    return CachingDrafter(model, widths=widths)


def _best_first(setting: Setting, model: LanguageModel) -> Drafter:
    """`width` nodes grow at each of `gamma` levels; as many nodes are kept as `width` chains of that depth have."""
    num_nodes = setting.gamma * setting.width
    return BestFirstDrafter(model, gamma=setting.gamma, width=setting.width, num_nodes=num_nodes)


def _named(small: LanguageModel | None) -> LanguageModel:
    if small is None:
        raise ValueError("the drafter 'model' needs a draft model of the same vocabulary: name one by --draft-model")
    return small


@dataclass(frozen=True)
class Trained:
    """Folders of trained drafters by kind ("heads", "feature" ...), in order of preference for an adaptive one."""

    folders: Mapping[str, str]
    costs: Callable[[Any], Costs]  # of the arms of an adaptive drafter over a learned one

    def make(self, setting: Setting, model: LanguageModel) -> Drafter:
        if setting.drafter in ADAPTIVE:
            if setting.width != 1:
                raise ValueError(
                    f"the drafter {setting.drafter!r} takes its own widths: width = {setting.width} must be 1"
                )
            folder = self._folder(next(iter(self.folders), ""), setting.drafter)
            return load_adaptive(folder, model, self.costs, routed=setting.drafter == "router")
        shape = BestFirst(setting.gamma * setting.width, depth=setting.gamma, beam=BEAM, width=BEAM)
        return load_drafter(self._folder(setting.drafter, setting.drafter), model, shape=shape)

    def _folder(self, kind: str, drafter: str) -> str:
        if kind not in self.folders:
            raise ValueError(
                f"the drafter {drafter!r} needs a trained one for this target: make it by specbench train-drafter and "
                "name its folder by --trained"
            )
        return self.folders[kind]


UNTRAINED = Trained({}, lambda learned: Costs({1: 1.0}, (0.0,) * len(ARMS)))


def make_drafter(
    setting: Setting, model: LanguageModel, small: LanguageModel | None = None, trained: Trained = UNTRAINED
) -> Drafter | None:
    """ValueError for an unknown name, and for one that cannot be had over these models."""
    if not setting.drafter:
        return None
    if setting.drafter in (*KINDS, PUBLISHED, *ADAPTIVE):
        return trained.make(setting, model)
    if setting.drafter not in DRAFTERS:
        raise ValueError(unknown_name("drafter", setting.drafter, (*DRAFTERS, *KINDS, PUBLISHED, *ADAPTIVE)))
    if setting.drafter in CHAINS and setting.width != 1:
        raise ValueError(f"the drafter {setting.drafter!r} drafts chains: width = {setting.width} must be 1")
    return DRAFTERS[setting.drafter](setting, model, small)


def _settled(forward: Callable[..., Any], settle: Callable[[], object]) -> Callable[..., Any]:
    def run(*args: Any, **keywords: Any) -> Any:
        out = forward(*args, **keywords)
        settle()
        return out

    return run


def stamped(steps: Steps, log: list[Stamp], *, clock: Callable[[], float], settle: Callable[[], object]) -> Steps:
    """The same steps, each of which leaves a stamp. settle: waits for the device behind each forward."""

    timed = partial(_timed, log=log, clock=clock)
    return replace(
        steps,
        draft=timed(steps.draft, DRAFT),
        forward=timed(_settled(steps.forward, settle), VERIFY),
        walk=timed(steps.walk, VERIFY),
        sample=timed(steps.sample, VERIFY),
        commit=timed(steps.commit, COMMIT),
    )


def stamped_batch(
    steps: BatchSteps, log: list[Stamp], *, clock: Callable[[], float], settle: Callable[[], object]
) -> BatchSteps:
    """The same for the steps of a batch."""

    timed = partial(_timed, log=log, clock=clock)
    return replace(
        steps,
        forward=timed(_settled(steps.forward, settle), VERIFY),
        verify=timed(steps.verify, VERIFY),
        sample=timed(steps.sample, VERIFY),
        commit=timed(steps.commit, COMMIT),
    )


def _timed(step: Callable[..., Any], code: int, log: list[Stamp], clock: Callable[[], float]) -> Any:
    def run(*args: Any, **keywords: Any) -> Any:
        start = clock()
        out = step(*args, **keywords)
        log.append((code, start, clock()))
        return out

    return run


class OwnSide:
    """The reference decoder over a model. clock: read twice a step, once before and once behind the whole."""

    def __init__(
        self,
        model: LanguageModel,
        setting: Setting,
        *,
        small: LanguageModel | None = None,
        trained: Trained = UNTRAINED,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._log: list[Stamp] = []
        self._clock = clock
        steps = replace(STEPS, flatten=LAYOUTS[setting.layout])
        self._sampling = Sampling(temperature=setting.temperature)
        self._drafter = make_drafter(setting, model, small, trained)
        self._drafter_for = lambda request: make_drafter(setting, model, small, trained)
        settle = settling(model)
        if setting.batch > 1:
            # The batch's own steps are stamped, and of a text's only drafting, which they do not do.
            steps = replace(steps, draft=stamped(steps, self._log, clock=clock, settle=settle).draft)
        else:
            steps = stamped(steps, self._log, clock=clock, settle=settle)
        self.decoder = Decoder(
            model,
            self._drafter,
            steps=steps,
            cache=setting.cache,
            max_nodes=MAX_NODES,
            max_depth=max(1, setting.gamma),
            batch_steps=stamped_batch(BATCH_STEPS, self._log, clock=clock, settle=settle),
        )

    def generate(self, prompt: Sequence[int], num: int, *, seed: int = 0) -> Answer:
        if (reset := getattr(self._drafter, "reset", None)) is not None:
            reset()
        self._log.clear()
        start = self._clock()
        said = self.decoder.generate(prompt, max_new_tokens=num, sampling=self._sampling, seed=seed)
        end = self._clock()
        return _own_answer([said], self._log, start, end)

    def generate_batch(self, prompts: Sequence[Sequence[int]], num: int, *, seed: int = 0) -> Answer:
        """`num` new tokens of each, text by text. Times are those of all texts together, and so are the rows."""
        requests = [Request(tuple(one), num, sampling=self._sampling, seed=seed) for one in prompts]
        self._log.clear()
        start = self._clock()
        said = self.decoder.generate_batch(requests, drafter_for=self._drafter_for)
        end = self._clock()
        return _own_answer(said, self._log, start, end)


def generated(side: Side, batch: int, prompts: Sequence[Sequence[int]], num: int, *, seed: int = 0) -> Answer:
    """Of all prompts together where there is a batch, which only our own side decodes, and else of the one."""
    if batch == 1:
        return side.generate(prompts[0], num, seed=seed)
    assert isinstance(side, OwnSide)  # `Sides` makes no other
    return side.generate_batch(prompts, num, seed=seed)


def _own_answer(said: Sequence[Generation], log: Sequence[Stamp], start: float, end: float) -> Answer:
    """said: of each text. The first round ends with the first commit: what is not prefill of that round is in TTFT."""
    stamps = list(log)
    # A prefill without `encode` is a forward before any round: rounds are counted from behind.
    num_commits = sum(code == COMMIT for code, _, _ in stamps)
    assert num_commits == max(len(one.rounds) for one in said), "one commit a round"
    first = next(idx for idx, (code, _, _) in enumerate(stamps) if code == COMMIT)
    arrived = stamps[first][2]
    parts = dict.fromkeys(("draft", "verify", "commit"), 0.0)
    for code, begun, ended in stamps[first + 1 :]:
        parts[("draft", "verify", "commit")[code]] += ended - begun
    rounds = [one.rounds[0] for one in said] + [each for one in said for each in one.rounds[1:]]
    return Answer(
        tokens=tuple(token for one in said for token in one.tokens),
        seconds=end - start,
        first_seconds=arrived - start,
        first_tokens=sum(len(one.rounds[0].emitted) for one in said),
        rounds=tuple(counts_of(one) for one in rounds),
        phases={**parts, "decode": end - arrived},
        num_rows=sum(one.num_rows for one in rounds),
        first_rounds=len(said),
    )


def counts_of(one: Round) -> RoundCounts:
    depth = [0] * len(one.parents)
    for node, parent in enumerate(one.parents[1:], start=1):
        depth[node] = depth[parent] + 1
    return RoundCounts(len(one.tokens) - 1, max(depth), len(one.path), len(one.emitted))


class _Arrivals:
    """What transformers calls a streamer: is handed the prompt, then the new tokens of each forward."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.events: list[tuple[int, float]] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.events.append((tokens.numel(), self._clock()))

    def end(self) -> None:
        pass


class TransformersSide:
    """`generate` as installed: greedy or sampled, plain or with its prompt lookup ("lookup")."""

    def __init__(self, model: Any, setting: Setting, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """model: a transformers model, whose end tokens are taken from it, so that all that is asked for comes."""
        if setting.drafter not in ("", "lookup"):
            raise ValueError(f"transformers' drafter {setting.drafter!r} must be '' or 'lookup'")
        self._model, self._clock, self._setting = model, clock, setting
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        self._options: dict[str, Any] = {"do_sample": bool(setting.temperature)}
        if setting.temperature:
            self._options |= {"temperature": setting.temperature, "top_k": 0, "top_p": 1.0}
        if setting.drafter:
            self._options["prompt_lookup_num_tokens"] = setting.gamma

    def generate(self, prompt: Sequence[int], num: int, *, seed: int = 0) -> Answer:
        ids = torch.tensor([list(prompt)], device=self._model.device)
        mask, arrivals = torch.ones_like(ids), _Arrivals(self._clock)
        if self._setting.temperature:
            torch.manual_seed(seed)
        start = self._clock()
        said = self._model.generate(ids, attention_mask=mask, max_new_tokens=num, streamer=arrivals, **self._options)
        tokens = tuple(said[0, len(prompt) :].tolist())
        end = self._clock()
        events = arrivals.events[1:]  # the prompt came first
        drafted = None if self._setting.drafter else 0
        return Answer(
            tokens=tokens,
            seconds=end - start,
            first_seconds=events[0][1] - start,
            first_tokens=events[0][0],
            rounds=tuple(RoundCounts(drafted, drafted, emitted - 1, emitted) for emitted, _ in events),
        )


def load_transformers(folder: str, dtype: torch.dtype, device: str = "cpu") -> Any:
    """With the attention that transformers chooses for it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True, trust_remote_code=False)
    return model.to(device).eval()


class TargetSide:
    """Any target with `generate`. It shows no first token, so a call for one token alone says when that came."""

    def __init__(self, adapter: Any, setting: Setting, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._adapter, self._clock = adapter, clock
        self._sampling = Sampling(temperature=setting.temperature)

    def generate(self, prompt: Sequence[int], num: int, *, seed: int = 0) -> Answer:
        first_seconds, _ = self._timed(prompt, 1, seed)
        seconds, said = self._timed(prompt, num, seed)
        rounds = said.rounds if isinstance(said, Generation) else ()
        tokens = said.tokens if isinstance(said, Generation) else tuple(int(one) for one in said)
        return Answer(
            tokens=tokens,
            seconds=seconds,
            first_seconds=min(first_seconds, seconds),
            rounds=tuple(counts_of(one) for one in rounds),
            num_rows=sum(one.num_rows for one in rounds) if rounds else None,
        )

    def _timed(self, prompt: Sequence[int], num: int, seed: int) -> tuple[float, Any]:
        asked = list(prompt)
        start = self._clock()
        said = self._adapter.generate(asked, max_new_tokens=num, sampling=self._sampling, stop=NEVER_STOP, seed=seed)
        return self._clock() - start, said


class Sides:
    """Makes a side for each setting; what they share is loaded once, and only when it is asked for."""

    def __init__(
        self,
        folder: str | Path,
        dtype: torch.dtype,
        *,
        longest: int,
        device: str = "cpu",
        draft_model: str = "",
        trained: Mapping[str, str] | None = None,
        target: Any = None,
    ) -> None:
        """longest: tokens of a text, prompt and answer, for which our caches have room. trained: folders of trained
        drafters by kind. target: an adapter, of settings of side "target"; its plain decoding is
        `with_drafter(None)`."""
        self._folder, self._dtype, self._device, self._longest = str(folder), dtype, device, longest
        self._draft_model, self._target = draft_model, target
        self._trained = Trained(trained or {}, self._arm_costs)
        self._loaded: dict[str, Any] = {}

    def make(self, setting: Setting) -> Side:
        """ValueError for what cannot be had."""
        if setting.batch > 1 and setting.side != "own":
            raise ValueError(f"setting {setting.name}: batch = {setting.batch} must be 1 on the side {setting.side}")
        if setting.side == "transformers":
            return TransformersSide(self._once("transformers", self._load_transformers), setting)
        if setting.side == "target":
            return TargetSide(self._target if setting.drafter else self._target.with_drafter(None), setting)
        return OwnSide(self.model, setting, small=self._small(setting), trained=self._trained)

    def check(self, setting: Setting) -> None:
        """ValueError for a drafter of ours that cannot be had, before anything is measured."""
        if setting.side == "own":
            drafter = make_drafter(setting, self.model, self._small(setting), self._trained)
            if setting.batch > 1 and getattr(drafter, "reads_target_state", False):
                raise ValueError(f"setting {setting.name}: a drafter that reads the target's state drafts one text")
            if setting.batch > 1 and not can_batch(self.model):
                raise ValueError(
                    f"--batch {setting.batch}: a {type(self.model).__name__} cannot compute several texts at once"
                )

    def reserve(self, longest: int) -> None:
        """Room for longer texts, where it is not there yet; sides that were made before keep theirs."""
        if longest > self._longest:
            self._longest, model = longest, self.model
            self._loaded["own"] = self._with_room(model)

    def forward_seconds(self, widths: Sequence[int] = WIDTHS) -> dict[int, float]:
        """Of one forward of our model by its rows; measured once."""
        return self._once(f"seconds of {widths}", lambda: forward_seconds(self.model, self._some_tokens, widths))

    def _arm_costs(self, learned: Any) -> Costs:
        return self._once("costs", lambda: arm_costs(self.model, learned, self.forward_seconds(), self._some_tokens))

    @property
    def _some_tokens(self) -> range:
        """A text whose forwards are timed."""
        return range(min(64, self.model.vocab_size))

    @property
    def model(self) -> LanguageModel:
        return self._once("own", self._load_own)

    def _load_own(self) -> LanguageModel:
        return self._with_room(load_own(self._folder, self._dtype, self._device))

    def _with_room(self, model: LanguageModel) -> LanguageModel:
        return model.with_capacity(self._longest + MAX_NODES + 1) if isinstance(model, LeanLlama) else model

    def _small(self, setting: Setting) -> LanguageModel | None:
        if setting.drafter not in WITH_DRAFT_MODEL or not self._draft_model:
            return None
        small = self._once("small", lambda: load_own(self._draft_model, self._dtype, self._device))
        if small.vocab_size != self.model.vocab_size:
            sizes = f"{small.vocab_size} tokens, must have {self.model.vocab_size}"
            raise ValueError(f"--draft-model {self._draft_model} has {sizes} (the target's vocabulary)")
        return small

    def _load_transformers(self) -> Any:
        return load_transformers(self._folder, self._dtype, self._device)

    def _once(self, name: str, load: Callable[[], Any]) -> Any:
        if name not in self._loaded:
            self._loaded[name] = load()
        return self._loaded[name]
