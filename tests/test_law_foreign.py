"""The exact law of samplers that call PyTorch's random functions: ours and transformers', unchanged."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout, gumbel_softmax

from specbench.law.assisted import sampler, tiny_llama
from specbench.law.assisted import target_law as assisted_target
from specbench.law.foreign import law_of_torch
from specbench.law.scripted import CannotTell

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
FLIPPED = torch.stack([P, P.flip(0)])
LAW = {0: 0.5, 1: 0.3, 2: 0.2}
PAIRS = {(x, y): LAW[x] * LAW[y] / (1 - LAW[x]) for x, y in itertools.permutations(LAW, 2)}  # without replacement


def exponential() -> Tensor:
    return torch.empty_like(P).exponential_(1)


def rand(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64)


def residual_in_place() -> int:
    left = P.clone()
    left.div_(torch.empty_like(left).exponential_())
    return left.argmax(dim=-1).item()


def one_coin_twice() -> tuple[bool, bool]:
    u = rand(1)
    return bool(u < 0.3), bool(u >= 0.5)


def part_of_a_block() -> tuple[bool, bool]:
    u = rand(2, 2)
    return bool(u[1].view(2)[0] < 0.25), u.T[1, 1].item() < 0.75


DRAWS: dict[str, tuple[Callable[[], Hashable], dict[Hashable, float]]] = {
    "multinomial": (lambda: torch.multinomial(P, 1).item(), LAW),
    "multinomial without replacement": (lambda: tuple(P.multinomial(2).tolist()), PAIRS),
    "multinomial with replacement": (
        lambda: tuple(torch.multinomial(P, 2, replacement=True).tolist()),
        {(x, y): LAW[x] * LAW[y] for x in LAW for y in LAW},
    ),
    "categorical": (lambda: torch.distributions.Categorical(probs=P).sample().item(), LAW),
    "bernoulli": (
        lambda: tuple(torch.bernoulli(P[:2]).tolist()),
        {(0, 0): 0.35, (0, 1): 0.15, (1, 0): 0.35, (1, 1): 0.15},
    ),
    "bernoulli in place": (lambda: torch.empty(1).bernoulli_(0.25).item(), {0: 0.75, 1: 0.25}),
    "dropout": (lambda: dropout(torch.ones(1), 0.25).item() > 0, {True: 0.75, False: 0.25}),
    "p / e": (lambda: (P / exponential()).argmax().item(), LAW),
    "p / e in place": (residual_in_place, LAW),
    "e / p": (lambda: (exponential() / P).argmin(-1).item(), LAW),
    "max(p / e)": (lambda: (P / exponential()).max(dim=0).indices.item(), LAW),
    "log p - log e": (lambda: (P.log() - exponential().log()).argmax().item(), LAW),
    "log p + gumbel of uniforms": (lambda: (P.log() - torch.log(-torch.log(torch.rand_like(P)))).argmax().item(), LAW),
    "p / -log1p(-u)": (lambda: (P / -torch.log1p(-torch.rand_like(P))).argmax().item(), LAW),
    "p / -log(1 - u)": (lambda: (P / -torch.log(1 - torch.rand_like(P))).argmax().item(), LAW),
    "gumbel softmax": (lambda: gumbel_softmax(P.log(), tau=0.7).argmax().item(), LAW),
    "gumbel top-k": (lambda: tuple((P.log() - exponential().log()).topk(2).indices.tolist()), PAIRS),
    "rows": (
        lambda: tuple((FLIPPED / torch.empty_like(FLIPPED).exponential_()).argmax(-1).tolist()),
        {(x, y): LAW[x] * LAW[2 - y] for x in LAW for y in LAW},
    ),
    "nothing to win": (lambda: (torch.zeros(2, dtype=torch.float64) / exponential()[:2]).argmax().item(), {0: 1.0}),
    "uniform < p": (lambda: bool(rand(1) < 0.3), {True: 0.3, False: 0.7}),
    "p > uniform": (lambda: bool(torch.gt(P, rand(1)).sum() == 1), {True: 0.2, False: 0.8}),
    "uniform twice": (one_coin_twice, {(True, False): 0.3, (False, False): 0.2, (False, True): 0.5}),
    "uniform of a block": (
        part_of_a_block,
        {(True, True): 0.1875, (True, False): 0.0625, (False, True): 0.5625, (False, False): 0.1875},
    ),
    "uniform of a range": (lambda: bool(torch.empty(1).double().uniform_(2, 4) < 2.5), {True: 0.25, False: 0.75}),
    "uniform as a number": (lambda: rand(1).item() < 0.3, {True: 0.3, False: 0.7}),
    "uniform as a list": (lambda: rand(2).tolist()[1] < 0.3, {True: 0.3, False: 0.7}),
    "uniform as an array": (lambda: bool(rand(2).numpy()[1] < 0.3), {True: 0.3, False: 0.7}),
    "searchsorted": (lambda: torch.searchsorted(P.cumsum(0), rand(1)).item(), LAW),
}


@pytest.mark.parametrize("name", DRAWS)
def test_law_is_the_one_that_torch_promises(name: str) -> None:
    function, expected = DRAWS[name]
    assert distance(law_of_torch(function), expected) <= 1e-12


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float64, 53), (torch.float32, 24), (torch.bfloat16, 8)])
def test_uniform_is_zero_once_in_its_grid(dtype: torch.dtype, bits: int) -> None:
    assert law_of_torch(lambda: bool(torch.rand(1, dtype=dtype) <= 0))[True] == 2.0**-bits


def same_noise_twice() -> tuple[float, float]:
    e = exponential()
    return (P / e).argmax().item(), (P.flip(0) / e).argmax().item()


REFUSALS: dict[str, tuple[Callable[[], Hashable], str]] = {
    "randn": (lambda: bool(torch.randn(1) > 0), "it draws with torch's randn, which is not taken apart here"),
    "randint": (lambda: torch.randint(3, (1,)).item(), "it draws with torch's randint, which is not taken apart here"),
    "value of a race": (
        lambda: bool((P / exponential()).max() > 1),
        "it uses exponential noise in torch's max, not as argmax(p / e)",
    ),
    "noise clamped": (
        lambda: (P / exponential().clamp(min=0.1)).argmax().item(),
        "it uses exponential noise in torch's clamp, not as argmax(p / e)",
    ),
    "noise twice": (same_noise_twice, "it uses the same random numbers twice, once in a race"),
    "rate": (
        lambda: (P / torch.empty_like(P).exponential_(2)).argmax().item(),
        "it draws exponential noise of another rate than 1, which is not taken apart here",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_says_why_in_one_sentence(name: str) -> None:
    function, text = REFUSALS[name]
    with pytest.raises(CannotTell) as caught:
        law_of_torch(function)
    assert str(caught.value) == text


def test_multinomial_over_no_mass_fails_as_it_does_without_us() -> None:
    with pytest.raises(RuntimeError, match="sum of probabilities <= 0"):
        law_of_torch(lambda: torch.multinomial(torch.zeros(3), 1).item())


# Two tokens drafted from q, judged by a rule, round after round until three tokens stand.
V, GAMMA, NUM_TOKENS = 3, 2, 3
Context = tuple[int, ...]
Rule = Callable[[Tensor, Tensor, int, Tensor], tuple[Tensor, Tensor]]


@cache
def logits(model: int, context: Context) -> Tensor:
    """float64 [V], another row for every context. model: 0 the target, 1 the draft."""
    seed = sum((token + 1) * 7**place for place, token in enumerate(context)) * 2 + model
    return 1.5 * torch.randn(V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def generation(rule: Rule) -> Context:
    """Drafts are never longer than what is still to be said but one token, as transformers caps them."""
    context: Context = ()
    while len(context) < NUM_TOKENS:
        num = num_drafts(context)
        drafted = context
        for _ in range(num):
            drafted += (int(torch.multinomial(logits(1, drafted).softmax(-1), 1)),)
        if num == 0:
            return (*context, int(torch.multinomial(logits(0, context).softmax(-1), 1)))
        places = [drafted[: len(context) + depth] for depth in range(num + 1)]
        tokens, _ = rule(
            torch.tensor([drafted]),
            torch.stack([logits(1, place) for place in places[:-1]])[None],
            num,
            torch.stack([logits(0, place) for place in places])[None],
        )
        context += tuple(tokens[0].tolist())
    return context


def num_drafts(context: Context) -> int:
    return min(GAMMA, NUM_TOKENS - len(context) - 1)


def resampling_from_p(ids: Tensor, draft_logits: Tensor, num: int, target_logits: Tensor) -> tuple[Tensor, Tensor]:
    """PLANTED: after a rejection the token is drawn from p, and not from what p has above q."""
    p, q, drafted = target_logits[0].softmax(-1), draft_logits[0].softmax(-1), ids[0, -num:]
    places = torch.arange(num)
    accepted = torch.rand(num, dtype=p.dtype) < p[places, drafted] / q[places, drafted]
    num_accepted = accepted.long().cumprod(-1).sum()
    return torch.cat([drafted[:num_accepted], torch.multinomial(p[num_accepted], 1)])[None], num_accepted


@cache
def law_of_resampling_from_p(context: Context = ()) -> dict[Context, float]:
    """The same by plain sums over drafts and where they are rejected, in Python floats."""
    if len(context) >= NUM_TOKENS:
        return {context: 1.0}
    law: dict[Context, float] = {}
    for drafted in itertools.product(range(V), repeat=num_drafts(context)):
        reach = 1.0
        for depth, token in enumerate(drafted):
            reach *= probabilities(1, context + drafted[:depth])[token]
        for num_accepted in range(len(drafted) + 1):
            here = context + drafted[:num_accepted]
            p = probabilities(0, here)
            keep = 0.0
            if num_accepted < len(drafted):
                q = probabilities(1, here)
                keep = min(1.0, p[drafted[num_accepted]] / q[drafted[num_accepted]])
            for token in range(V):
                for tokens, weight in law_of_resampling_from_p((*here, token)).items():
                    law[tokens] = law.get(tokens, 0.0) + reach * (1 - keep) * p[token] * weight
            reach *= keep
    return law


@cache
def probabilities(model: int, context: Context) -> list[float]:
    return logits(model, context).softmax(-1).tolist()


def target_law() -> dict[Context, float]:
    law: dict[Context, float] = {}
    for tokens in itertools.product(range(V), repeat=NUM_TOKENS):
        law[tokens] = 1.0
        for depth, token in enumerate(tokens):
            law[tokens] *= probabilities(0, tokens[:depth])[token]
    return law


def test_speculative_sampling_of_transformers_has_the_targets_joint_law() -> None:
    utils = pytest.importorskip("transformers.generation.utils", reason="pip install transformers")
    law = law_of_torch(lambda: generation(utils._speculative_sampling))
    assert total_variation(law, target_law()) < 1e-9


def test_resampling_from_p_has_the_total_variation_that_plain_sums_give() -> None:
    law, target = law_of_torch(lambda: generation(resampling_from_p)), target_law()
    expected = total_variation(law_of_resampling_from_p(), target)
    assert expected > 0.01 and abs(total_variation(law, target) - expected) < 1e-12


def test_coin_of_zero_makes_transformers_accept_a_draft_that_the_target_rules_out() -> None:
    """It accepts by r <= p / q: a draft with p = 0 passes once in 2^24, the grid of its float32 coin."""
    utils = pytest.importorskip("transformers.generation.utils", reason="pip install transformers")
    target = torch.tensor([[[0.0, -torch.inf]] * 2])
    draft = torch.zeros(1, 1, 2)

    def judge() -> tuple[int, ...]:
        tokens, _ = utils._speculative_sampling(torch.tensor([[0, 1]]), draft, 1, target)
        return tuple(tokens[0].tolist())

    assert law_of_torch(judge) == {(1, 0): 2.0**-24, (0,): 1 - 2.0**-24}


@pytest.mark.parametrize("mode", ["assistant model", "early exit"])
def test_assisted_generation_of_transformers_as_installed_has_the_targets_joint_law(mode: str) -> None:
    """Its rows are softmaxed in float32: plain sampling itself is 8e-8 from the law computed here."""
    pytest.importorskip("transformers", reason="pip install transformers")
    model, assistant = tiny_llama(0, V, 3), tiny_llama(1, V, 1)
    law = law_of_torch(sampler(model, assistant, mode, "temperature 1"))
    assert total_variation(law, assisted_target(model, V, "temperature 1")) < 1e-6


def test_wrong_residual_inside_assisted_generation_shows_in_its_law(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip("transformers.generation.utils", reason="pip install transformers")

    def planted(ids: Tensor, draft: Tensor, num: int, target: Tensor, **_: object) -> tuple[Tensor, Tensor]:
        return resampling_from_p(ids, draft, num, target)

    monkeypatch.setattr(utils, "_speculative_sampling", planted)
    model, assistant = tiny_llama(0, V, 3), tiny_llama(1, V, 1)
    law = law_of_torch(sampler(model, assistant, "assistant model", "temperature 1"))
    assert total_variation(law, assisted_target(model, V, "temperature 1")) > 0.1


def distance(law: dict[Hashable, float], expected: dict[Hashable, float]) -> float:
    return max(abs(law.get(outcome, 0.0) - expected.get(outcome, 0.0)) for outcome in law.keys() | expected.keys())


def total_variation(law: dict[Hashable, float], other: dict[Context, float]) -> float:
    return sum(abs(law.get(one, 0.0) - other.get(one, 0.0)) for one in law.keys() | other.keys()) / 2
