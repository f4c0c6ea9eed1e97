"""The exact law of a PyTorch sampler that is not ours, without changing a line of it.

Under a torch dispatch mode the random functions it calls are answered by us: `multinomial` and `bernoulli` branch with
their own probabilities, so does a uniform that is compared with something, and so does the argmax of p / e over
exponential noise in any of its spellings. A uniform used in another way becomes a coin of `specbench.law.scripted`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specbench.law.scripted import MAX_RUNS, CannotTell, Choices, explore

MAX_ASKS = 400
# Of a uniform in [0, 1): torch.rand gives k / 2^bits on the CPU.
BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}

Kind = Literal[
    "uniform", "minus uniform", "one minus uniform", "log uniform", "exponential", "log exponential", "gumbel",
    "race", "inverse race",
]  # fmt: skip
# (operation, kind) -> kind. The logarithm of 1 - u is that of a uniform too, and order is all that a race is about.
STEPS: dict[tuple[str, Kind], Kind] = {
    ("neg", "uniform"): "minus uniform",
    ("log1p", "minus uniform"): "log uniform",
    ("log", "uniform"): "log uniform",
    ("log", "one minus uniform"): "log uniform",
    ("neg", "log uniform"): "exponential",
    ("log", "exponential"): "log exponential",
    ("neg", "log exponential"): "gumbel",
    ("log", "race"): "race",
    ("log", "inverse race"): "inverse race",
    ("neg", "race"): "inverse race",
    ("neg", "inverse race"): "race",
    ("_softmax", "race"): "race",
    ("_log_softmax", "race"): "race",
}
FROM_UNIFORM: dict[Kind, Callable[[float], float]] = {
    "uniform": lambda u: u,
    "minus uniform": lambda u: -u,
    "one minus uniform": lambda u: 1.0 - u,
}
COPIES = frozenset({"clone", "_to_copy", "index", "index_select"})
SHAPE_ONLY = frozenset({"empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "rand_like"})
FINISHES = {("argmax", "race"), ("max", "race"), ("topk", "race"), ("argmin", "inverse race"), ("min", "inverse race")}
TWICE = "it uses the same random numbers twice, once in a race"


def law_of_torch(
    function: Callable[[], Hashable],
    *,
    hints: Sequence[float] = (),
    max_asks: int = MAX_ASKS,
    max_runs: int = MAX_RUNS,
) -> dict[Hashable, float]:
    """Outcome -> probability, to float rounding (the sum within 1e-12 of 1) where no uniform has to become a coin.

    The function is called once for every way its random decisions can fall, so it must be a function of them alone.
    Uniforms are k / 2^bits, as torch.rand makes them on a CPU in their dtype (24 bits in float32), which shows in the
    law: `u <= 0` holds once in 2^24. Draws are taken at their word: multinomial has the law that it is given, and
    exponential noise is continuous. Coins have the error that `specbench.law.scripted.law_of` states. CannotTell: other
    random functions, noise used in other ways, and whatever `explore` refuses.
    """

    def run(choices: Choices) -> Hashable:
        handout = _Handout(choices)
        before = torch.get_rng_state()
        with _Reads(handout), handout:
            outcome = function()
        if not torch.equal(before, torch.get_rng_state()):
            raise CannotTell("it drew from torch's generator past the dispatcher, as compiled code does")
        return outcome

    return explore(run, hints=hints, max_coins=max_asks, max_runs=max_runs)


@dataclass(frozen=True)
class _Lazy:
    """Memory whose numbers have not been drawn; views of it need no care. tickets: int64 [numel], which noise is where.

    weights: float64 [numel], of a race: the place with weight w is the first to arrive with probability w / sum.
    """

    storage: torch.UntypedStorage  # held, so that its address stays its own
    itemsize: int
    kind: Kind
    tickets: Tensor
    weights: Tensor | None

    def seen_through(self, tensor: Tensor) -> _Seen:
        if tensor.element_size() != self.itemsize:
            raise CannotTell("it looks at random numbers as at other bytes")
        tickets, weights = (
            None if part is None else part.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            for part in (self.tickets, self.weights)
        )
        assert tickets is not None
        return _Seen(tensor, self.kind, tickets, weights)


@dataclass(frozen=True)
class _Seen:
    """One tensor on such memory; tickets and weights have its shape."""

    tensor: Tensor
    kind: Kind
    tickets: Tensor
    weights: Tensor | None


class _Handout(TorchDispatchMode):
    """Answers the random functions that are called inside it. One run."""

    def __init__(self, choices: Choices) -> None:
        super().__init__()
        self._choices = choices
        self._lazies: dict[int, _Lazy] = {}  # by address
        self._spans: list[tuple[int, int, int]] = []  # of a ticket: it is k / 2^bits, k in [low, high)
        self._raced: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        seen = self._seen((*args, *kwargs.values())) if self._lazies else []
        if seen and name not in SHAPE_ONLY and not (name in _DRAWS and name.endswith("_")) and not func.is_view:
            for operation in (self._copy, self._compare, self._transform, self._finish):
                result = operation(func, name, args, kwargs)
                if result is not NotImplemented:
                    return result
            for one in seen:
                self.settle(one.tensor, name)
        if name in _DRAWS:
            return _DRAWS[name](self, func, args, kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        before = torch.get_rng_state()
        result = func(*args, **kwargs)
        if not torch.equal(before, torch.get_rng_state()):
            raise CannotTell(f"it draws with torch's {name}, which is not taken apart here")
        return result

    # -- numbers that nobody has looked at

    def hand_out(self, tensor: Tensor, kind: Kind) -> Tensor:
        if tensor.dtype not in BITS:
            raise CannotTell(f"it draws random numbers as {tensor.dtype}, whose grid is not known here")
        bits, start = BITS[tensor.dtype], len(self._spans)
        self._spans += [(0, 1 << bits, bits)] * tensor.numel()
        return self._keep(tensor, kind, torch.arange(start, len(self._spans)).reshape(tensor.shape))

    def _keep(self, tensor: Tensor, kind: Kind, tickets: Tensor, weights: Tensor | None = None) -> Tensor:
        storage = tensor.untyped_storage()
        itemsize = tensor.element_size()
        size = storage.nbytes() // itemsize
        if tensor.numel() == 0:
            return tensor
        if tensor.numel() != size:
            raise CannotTell("it fills a part of a tensor with random numbers, which is not taken apart here")
        laid_out = []
        for part in (tickets, weights):
            memory = None if part is None else torch.empty(size, dtype=part.dtype)
            if memory is not None and part is not None:
                memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(part)
            laid_out.append(memory)
        assert laid_out[0] is not None
        self._lazies[storage.data_ptr()] = _Lazy(storage, itemsize, kind, laid_out[0], laid_out[1])
        return tensor

    def _look(self, value: Any) -> _Seen | None:
        if not isinstance(value, Tensor) or not self._lazies:
            return None
        lazy = self._lazies.get(value.untyped_storage().data_ptr())
        return None if lazy is None else lazy.seen_through(value)

    def _seen(self, values: Iterable[Any]) -> list[_Seen]:
        """Among the arguments and inside lists of them, which is as deep as torch's operations nest tensors."""
        found = []
        for value in values:
            for one in value if isinstance(value, list | tuple) else (value,):
                if isinstance(one, Tensor) and (seen := self._look(one)) is not None:
                    found.append(seen)
        return found

    def settle(self, tensor: Tensor, name: str) -> None:
        """Somebody looks at the numbers: uniforms become coins, and all of their memory is filled."""
        lazy = self._lazies.pop(tensor.untyped_storage().data_ptr(), None)
        if lazy is None:
            return
        if lazy.kind not in FROM_UNIFORM:
            raise CannotTell(f"it uses exponential noise in torch's {name}, not as argmax(p / e)")
        values = [FROM_UNIFORM[lazy.kind](self._value(ticket)) for ticket in lazy.tickets.tolist()]
        tensor.as_strided((len(values),), (1,), 0).copy_(torch.tensor(values, dtype=torch.float64))

    def _value(self, ticket: int) -> float:
        low, high, bits = self._span(ticket)
        k = self._choices.coin(high, low)
        self._spans[ticket] = (k, k + 1, bits)
        return k / (1 << bits)

    def _span(self, ticket: int) -> tuple[int, int, int]:
        if ticket in self._raced:
            raise CannotTell(TWICE)
        return self._spans[ticket]

    # -- what may be done with them

    def _copy(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        seen = self._look(args[0]) if args else None
        if seen is None or name not in COPIES:
            return NotImplemented
        result = func(*args, **kwargs)
        if result.dtype not in BITS:
            return NotImplemented
        same = {**kwargs, "dtype": None} if name == "_to_copy" else kwargs
        weights = None if seen.weights is None else func(seen.weights, *args[1:], **same)
        return self._keep(result, seen.kind, func(seen.tickets, *args[1:], **same), weights)

    def _compare(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """`u < x`: true below the threshold; what it says of u is kept for the next comparison."""
        if name not in ("lt", "le", "gt", "ge"):
            return NotImplemented
        left, right = (self._look(one) for one in args)
        seen = left or right
        if seen is None or seen.kind != "uniform" or (left and right):
            return NotImplemented
        if right:
            name = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}[name]
        limit = args[1] if left else args[0]
        dtype = torch.result_type(*args)
        limits = (limit.to(dtype) if isinstance(limit, Tensor) else torch.tensor(limit, dtype=dtype)).double()
        tickets, limits = torch.broadcast_tensors(seen.tickets, limits)
        pairs = zip(tickets.flatten().tolist(), limits.flatten().tolist(), strict=True)
        answers = [self._holds(ticket, name, limit) for ticket, limit in pairs]
        return torch.tensor(answers, dtype=torch.bool, device=seen.tensor.device).reshape(tickets.shape)

    def _holds(self, ticket: int, name: str, limit: float) -> bool:
        if math.isnan(limit):
            return False
        low, high, bits = self._span(ticket)
        scaled = min(max(limit, -1.0), 2.0) * (1 << bits)
        end = math.floor(scaled) + 1 if name in ("le", "gt") else math.ceil(scaled)  # k < end: on the left of the limit
        if low < end < high:
            is_left = self._choices.branch((end - low, high - end)) == 0
            self._spans[ticket] = (low, end, bits) if is_left else (end, high, bits)
        else:
            is_left = high <= end
        return is_left == (name in ("lt", "le"))

    def _transform(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A step of a race: logarithm and sign of the noise, its meeting with the law, what keeps the order."""
        is_in_place = name.endswith("_")
        step = name.removesuffix("_")
        left = self._look(args[0])
        after: tuple[Kind, Tensor, Tensor | None] | None = None
        if left is not None and (step, left.kind) in STEPS:
            if not step.endswith("softmax") or args[1] in (-1, left.tensor.ndim - 1):
                after = STEPS[step, left.kind], left.tickets, left.weights
        elif len(args) == 2 and kwargs.get("alpha", 1) == 1 and set(kwargs) <= {"alpha"}:
            after = _meeting(step, left or args[0], self._look(args[1]) or args[1])
        if after is None:
            return NotImplemented
        like = next(one for one in args if isinstance(one, Tensor))
        result = args[0] if is_in_place else like.new_full(after[1].shape, math.nan)
        if result.shape != after[1].shape:
            return NotImplemented
        return self._keep(result, *after)

    def _finish(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """The winner of a race, by row; by topk, those who arrive after it too."""
        seen = self._look(args[0])
        if seen is None or seen.weights is None or (name, seen.kind) not in FINISHES:
            return NotImplemented
        # The real function shows which form its answer has; only the indices in it are decided here.
        form = func(torch.zeros(seen.tickets.shape), *args[1:], **kwargs)
        named = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False), **kwargs)
        axis = named.get("dim", -1 if name == "topk" else None)
        is_pair = not isinstance(form, Tensor)
        if is_pair != (name in ("max", "min", "topk")) or not named.get("largest", True):
            return NotImplemented
        if axis is None and seen.tickets.ndim > 1:
            return NotImplemented
        indices = form[1] if is_pair else form
        axis, num_winners = (-1 if axis is None else axis), named.get("k", 1)
        rows, tickets = (torch.atleast_1d(part).movedim(axis, -1) for part in (seen.weights, seen.tickets))
        flat_rows, flat_tickets = (part.reshape(-1, rows.shape[-1]).tolist() for part in (rows, tickets))
        pairs = zip(flat_rows, flat_tickets, strict=True)
        winners = torch.tensor([self._race(row, noise, num_winners) for row, noise in pairs])
        winners = winners.reshape(*rows.shape[:-1], num_winners).movedim(-1, axis).reshape(indices.shape)
        return (seen.tensor.new_full(indices.shape, math.nan), winners) if is_pair else winners

    def _race(self, weights: list[float], tickets: list[int], num_winners: int) -> list[int]:
        if self._raced & set(tickets) or len(set(tickets)) < len(tickets):
            raise CannotTell(TWICE)
        if any(self._spans[ticket][:2] != (0, 1 << self._spans[ticket][2]) for ticket in tickets):
            raise CannotTell("it uses the same random numbers as uniforms and as exponential noise")
        self._raced |= set(tickets)
        if not any(weights):
            return list(range(num_winners))  # all arrive at the end of time, and the first index is taken
        return self.draw(weights, num_winners, replacement=False)

    # -- draws

    def draw(self, weights: list[float], num: int, *, replacement: bool) -> list[int]:
        left, drawn = list(weights), []
        for _ in range(num):
            drawn.append(self._choices.branch(left))
            if not replacement:
                left[drawn[-1]] = 0.0
        return drawn

    def forget(self, tensor: Tensor) -> None:
        """It is about to be overwritten."""
        self._lazies.pop(tensor.untyped_storage().data_ptr(), None)


class _Reads(TorchFunctionMode):
    """Reading a tensor's memory outside of the dispatcher: the numbers must be there by then."""

    def __init__(self, handout: _Handout) -> None:
        super().__init__()
        self._handout = handout

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("tolist", "numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage"):
            self._handout.settle(args[0], name)
        return func(*args, **(kwargs or {}))


def _rand(mode: _Handout, func: Any, args: Any, kwargs: Any) -> Tensor:
    maker = torch.empty_like if func.overloadpacket.__name__ == "rand_like" else torch.empty
    return mode.hand_out(maker(args[0], **{key: one for key, one in kwargs.items() if key != "generator"}), "uniform")


def _uniform(mode: _Handout, func: Any, args: Any, kwargs: Any) -> Tensor:
    tensor: Tensor = args[0]
    low, high = (args[place] if place < len(args) else float(place - 1) for place in (1, 2))  # 0 and 1 if not given
    mode.forget(tensor)
    mode.hand_out(tensor, "uniform")
    if (low, high) != (0.0, 1.0):
        mode.settle(tensor, "uniform_")
        tensor.mul_(high - low).add_(low)
    return tensor


def _exponential(mode: _Handout, func: Any, args: Any, kwargs: Any) -> Tensor:
    if args[1:] not in ((), (1,)):
        raise CannotTell("it draws exponential noise of another rate than 1, which is not taken apart here")
    mode.forget(args[0])
    return mode.hand_out(args[0], "exponential")


def _multinomial(mode: _Handout, func: Any, args: Any, kwargs: Any) -> Tensor:
    law, num, replacement = (*args, False)[:3]
    rows = law.double().reshape(-1, law.shape[-1])
    num_possible = min(rows.gt(0).sum(-1).tolist(), default=0)
    if not rows.isfinite().all() or rows.lt(0).any() or num_possible < (1 if replacement else num):
        func(*args, **kwargs)  # for its own error
        raise CannotTell(f"it draws {num} by torch's multinomial from {law.tolist()}, which has no such law")
    drawn = [mode.draw(row, num, replacement=replacement) for row in rows.tolist()]
    return torch.tensor(drawn, device=law.device).reshape(*law.shape[:-1], num)


def _bernoulli(mode: _Handout, func: Any, args: Any, kwargs: Any) -> Tensor:
    tensor, is_in_place = args[0], func.overloadpacket.__name__ == "bernoulli_"
    probability = args[1] if len(args) > 1 else 0.5 if is_in_place else tensor
    probabilities = torch.as_tensor(probability, dtype=torch.float64).expand(tensor.shape)
    if not ((probabilities >= 0) & (probabilities <= 1)).all():
        func(*args, **kwargs)  # for its own error
        raise CannotTell("it draws by torch's bernoulli with probabilities outside [0, 1]")
    drawn = [mode.draw([1 - one, one], 1, replacement=True) for one in probabilities.flatten().tolist()]
    values = torch.tensor(drawn, dtype=tensor.dtype, device=tensor.device).reshape(tensor.shape)
    if not is_in_place:
        return values
    mode.forget(tensor)
    return tensor.copy_(values)


_DRAWS: dict[str, Callable[[_Handout, Any, Any, Any], Tensor]] = {
    "rand": _rand,
    "rand_like": _rand,
    "uniform_": _uniform,
    "exponential_": _exponential,
    "multinomial": _multinomial,
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli,
}


def _meeting(step: str, left: Any, right: Any) -> tuple[Kind, Tensor, Tensor | None] | None:
    """What one operation makes of noise and law: p / e, e / p, log p + g, log p - log e, log e - log p; of 1 - u; and
    of a race that is scaled by a positive number. rsub(x, y) is y - x."""
    if step == "rsub":
        step, left, right = "sub", right, left
    noise, law = (left, right) if isinstance(left, _Seen) else (right, left)
    if isinstance(law, _Seen):
        return None
    numbers = torch.as_tensor(law, dtype=torch.float64)
    is_first = noise is left
    if noise.kind in ("race", "inverse race"):
        is_scaled = numbers.numel() == 1 and numbers.item() > 0 and (step == "mul" or (step == "div" and is_first))
        return (noise.kind, noise.tickets, noise.weights) if is_scaled else None
    if noise.kind == "uniform" and step == "sub" and not is_first and bool((numbers == 1).all()):
        return ("one minus uniform", noise.tickets, None) if numbers.numel() == 1 else None
    weights = {
        ("exponential", "div"): numbers,
        ("gumbel", "add"): numbers.exp(),
        ("log exponential", "sub"): numbers.exp(),
    }.get((noise.kind, step))
    if weights is None:
        return None
    tickets, weights = torch.broadcast_tensors(noise.tickets, weights)
    return "inverse race" if is_first and step != "add" else "race", tickets, weights
