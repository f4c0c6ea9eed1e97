"""The weights of a sentinel: an ordinary Llama-like checkpoint, constructed so that it computes a `Program`.

Residual channels hold zeros and ones. Attention layer l fetches the state of 2^l positions back into a one-hot block
of its own; the MLP looks the next state up and writes it into another. The numbers are chosen so that bfloat16 holds
all hidden states exactly. Nothing here is trained, and nothing here writes files (`export.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.reference.model import LlamaConfig, LlamaModel
from specbench.reference.sentinel.program import BOS, NUM_SYMBOLS, VOCAB_SIZE, Program

VARIANTS = ("llama", "gqa", "tied", "window", "qwen2", "gemma")
HEAD_DIM = 64
ROPE_THETA = 10_000.0
RMS_NORM_EPS = 1e-5
MARGIN = 10.0  # of the greedy head: the logit of the next token; all others are 0

GROUP = 32  # channels of one scale in 4-bit formats; those that share a group are read with one magnitude and sign
NUM_PHASES = 10  # the fastest rotary frequencies: 34.5 below the peak for any wrong distance up to 16,384
QK_SIZE = 16.0  # of a unit phase in q and in k: 16 * 16 / sqrt(64) = 32 to a score for each frequency
BOS_Q, BOS_K = 50.5, 48.0  # 303 to a score: half-way between a full peak, 320, and the next distance, 285.5
GAIN = 128.0
HALF_UNITS = 288  # the 16 * 17 pairs of states, filled up to whole groups


@dataclass(frozen=True)
class Layout:
    """Which residual channel means what. Group 0 holds what is no one-hot block.

    is_tied: the last state overwrites the token's block, so that the embedding serves as head. has_square_width: the
    hidden size is a square, since Gemma multiplies the embedding by its root.
    """

    num_layers: int
    is_tied: bool = False
    has_square_width: bool = False

    const: int = 0  # 1 on every token but BOS
    half: int = 1  # 1/2
    quarter: int = 2  # 1/4
    flag: int = 3  # 1 on BOS alone
    bos_token: int = 4  # 1 on BOS, where other tokens have a symbol

    @property
    def hidden_size(self) -> int:
        used = max(self.fetched(self.num_layers - 1).stop, self.state(self.num_layers).stop)
        widths = (16**2, 24**2) if self.has_square_width else range(128, 1024, 128)
        return next(width for width in widths if width >= used)

    @property
    def fillers(self) -> list[tuple[int, float]]:
        """Channels and values that bring the sum of squares of every row to hidden_size / 16: a norm of 1/4."""
        missing = self.hidden_size - 16 - (16 + 4 + 1) - 16 * 2 * self.num_layers  # in sixteenths
        values = []
        while missing:
            values.append(math.isqrt(missing) / 4)
            missing -= math.isqrt(missing) ** 2
        return [(self.ballast(2 * self.num_layers) + idx, value) for idx, value in enumerate(values)]

    def ballast(self, idx: int) -> int:
        """1 in the embedding; a half-layer that adds a one takes one of these away, so that the norm never changes."""
        return 5 + idx

    def state(self, layer: int) -> slice:
        """The one-hot block of s_layer: layer 0 is the token, `num_layers` decides the next one."""
        in_token_block = layer == 0 or (self.is_tied and layer == self.num_layers)
        start = GROUP if in_token_block else self.fetched(layer - 1).stop
        return slice(start, start + NUM_SYMBOLS)

    def fetched(self, layer: int) -> slice:
        """The one-hot block of what layer `layer` fetches; its last channel is BOS."""
        start = self.state(layer).stop
        return slice(start, start + VOCAB_SIZE)

    def read(self, hidden: Tensor, layer: int) -> Tensor:
        """hidden: float [..., hidden_size], what layer `layer - 1` gives (0: the embedding), before any norm.

        Returns int64 [...], s_layer.
        """
        block = hidden[..., self.state(layer)]
        is_bos = hidden[..., self.flag] > 0.5
        return torch.where(is_bos, BOS, block.argmax(dim=-1))


@dataclass(frozen=True)
class Sentinel:
    """A program as a checkpoint.

    variant: "llama" has one key-value head, "gqa" several that each carry part of the states, "tied" its embedding as
    head, "window" is a Mistral with a window shorter than the field, "qwen2" needs its q, k and v biases, "gemma" has
    Gemma's norms of 1 + w, scaled and tied embedding and GeLU. has_law: the logits are the program's `law_logits`
    instead of 10 for the next token and 0 for the others.
    """

    program: Program
    variant: str = "llama"
    has_law: bool = False

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise ValueError(f"variant = {self.variant!r} must be one of {', '.join(VARIANTS)}")
        if self.variant == "gqa" and self.num_heads < 4:
            raise ValueError("variant = 'gqa' needs a receptive field of at least 8: a shorter one has two heads")
        if self.has_law and self.is_tied:
            raise ValueError(f"variant = {self.variant!r} has its embedding as head and no room for a law: use 'llama'")

    @property
    def described(self) -> str:
        field, layers = self.program.receptive_field, self.program.num_layers
        return f"{self.variant} sentinel{' with a law' * self.has_law}, {layers} layers, {field} tokens decide the next"

    @property
    def layout(self) -> Layout:
        return Layout(self.program.num_layers, self.is_tied, self.variant == "gemma")

    @property
    def is_tied(self) -> bool:
        return self.variant in ("tied", "gemma")

    @property
    def num_heads(self) -> int:
        return self.layout.hidden_size // HEAD_DIM

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads // 2 if self.variant == "gqa" else 1

    @property
    def _group_size(self) -> int:
        """Query head h reads key-value head h // _group_size."""
        return self.num_heads // self.num_kv_heads

    @property
    def window(self) -> int | None:
        """How many positions a row sees: one more than the last layer's distance, and fewer than the field."""
        return self.program.receptive_field // 2 + 1 if self.variant == "window" else None

    @property
    def distances(self) -> tuple[int, ...]:
        """How far back each layer looks.

        The last layer of a windowed sentinel looks one further than the window reaches, so that it gets the oldest
        token it may see, at the program's distance; whoever sees one more, or all, fetches another.
        """
        powers = [1 << layer for layer in range(self.program.num_layers)]
        return tuple(powers if self.window is None else [*powers[:-1], self.window])

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=self.layout.hidden_size,
            intermediate_size=2 * HALF_UNITS,
            num_layers=self.program.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=HEAD_DIM,
            rms_norm_eps=RMS_NORM_EPS,
            rope_theta=ROPE_THETA,
            tied=self.is_tied,
            windows=() if self.window is None else (self.window,) * self.program.num_layers,
        )

    def weights(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """By their names in a Hugging Face checkpoint, rounded once from fp64."""
        layout = self.layout
        norm = torch.full((layout.hidden_size,), math.sqrt(1 / 16 + RMS_NORM_EPS), dtype=torch.float64)
        named = {"model.embed_tokens.weight": _embedding(layout), "model.norm.weight": norm}
        if self.is_tied:  # the head sees the last state and nothing else
            named["model.norm.weight"] = torch.zeros_like(norm)
            named["model.norm.weight"][layout.state(layout.num_layers)] = MARGIN * norm[0]
        for layer, table in enumerate(self.program.tables):
            prefix = f"model.layers.{layer}."
            named[prefix + "input_layernorm.weight"] = norm.clone()
            named[prefix + "post_attention_layernorm.weight"] = norm.clone()
            named |= {f"{prefix}self_attn.{name}": one for name, one in self._attention(layer).items()}
            named |= {f"{prefix}mlp.{name}": one for name, one in _lookup(layout, layer, table).items()}
        if self.is_tied:
            _overwrite_token(layout, self.program.first, named)
        else:
            named["lm_head.weight"] = self._head()
        if self.variant == "gemma":
            named |= _as_gemma(named)
        return {name: one.to(dtype) for name, one in named.items()}

    def model(self, dtype: torch.dtype, *, bits: int | None = None) -> LlamaModel:
        """In memory; bits: 8 or 4, as `quantised` rounds."""
        if self.variant == "gemma":
            raise ValueError("variant = 'gemma' is no LlamaModel: export it and load the folder with transformers")
        weights = self.weights() if bits is None else quantised(self.weights(), bits)
        rounded = {name: one.to(dtype) for name, one in weights.items()}
        return LlamaModel(self.config, rounded, name=f"sentinel {self.variant} {self.program.receptive_field}")

    def _attention(self, layer: int) -> dict[str, Tensor]:
        return {**self._positions(layer), **self._codes(layer)}

    def _positions(self, layer: int) -> dict[str, Tensor]:
        """q and k, which come from the constant and the BOS flag alone: what is fetched depends on positions only.

        Per frequency f of the fastest ones k is a unit phase and q one turned back by f * distance, so that the score,
        the sum of 32 cos(f (t_q - t_k - distance)), peaks where t_k is `distance` back. On the slowest frequency, which
        hardly turns, BOS has a key below a full peak and above all others: it wins when the position does not exist.
        """
        layout, slowest = self.layout, HEAD_DIM // 2 - 1
        q = torch.zeros(self.num_heads, HEAD_DIM, layout.hidden_size, dtype=torch.float64)
        k = torch.zeros(self.num_kv_heads, HEAD_DIM, layout.hidden_size, dtype=torch.float64)
        q_bias, k_bias = torch.zeros_like(q[..., 0]), torch.zeros_like(k[..., 0])
        biased = self.variant == "qwen2"  # the phases are biases then
        for head in range(self.num_heads):
            turned = [turn - speed * self.distances[layer] for turn, speed in _phases(head // self._group_size)]
            _put_phases(q_bias[head] if biased else q[head, :, layout.const], turned)
            q[head, slowest, layout.const] = BOS_Q
        for kv_head in range(self.num_kv_heads):
            _put_phases(
                k_bias[kv_head] if biased else k[kv_head, :, layout.const], [one for one, _ in _phases(kv_head)]
            )
            k[kv_head, :, layout.flag] = -k_bias[kv_head]  # a bias reaches BOS too, which has no such key
            k[kv_head, slowest, layout.flag] = BOS_K
        weights = {"q_proj.weight": q.flatten(0, 1), "k_proj.weight": k.flatten(0, 1)}
        return weights | ({"q_proj.bias": q_bias.flatten(), "k_proj.bias": k_bias.flatten()} if biased else {})

    def _codes(self, layer: int) -> dict[str, Tensor]:
        """v and o_proj: each state's one has a slot in a key-value head, and one query head of that group copies it.

        With biases, every slot of v is one too large, and a slot of ones that no bias made takes it away again.
        """
        layout, biased = self.layout, self.variant == "qwen2"
        v = torch.zeros(self.num_kv_heads, HEAD_DIM, layout.hidden_size, dtype=torch.float64)
        out = torch.zeros(self.num_heads, HEAD_DIM, layout.hidden_size, dtype=torch.float64)  # o_proj's, transposed
        v_bias = torch.zeros_like(v[..., 0])
        for state in range(VOCAB_SIZE):
            slot, kv_head = divmod(state, self.num_kv_heads)
            head = kv_head * self._group_size + slot % self._group_size
            channel = layout.fetched(layer).start + state
            v[kv_head, slot, layout.flag if state == BOS else layout.state(layer).start + state] = 1.0
            out[head, slot, channel] = 1.0
            if biased:
                v_bias[kv_head, slot] = 1.0
                v[kv_head, -1, [layout.const, layout.flag]] = 1.0
                out[head, -1, channel] = -1.0
        out[..., layout.ballast(2 * layer)] = -out[..., layout.fetched(layer)].sum(dim=-1)
        weights = {"v_proj.weight": v.flatten(0, 1), "o_proj.weight": out.flatten(0, 1).T.contiguous()}
        return weights | ({"v_proj.bias": v_bias.flatten()} if biased else {})

    def _head(self) -> Tensor:
        """lm_head: [V, hidden]. Logits out of the last state, after BOS alone out of its flag."""
        layout, program = self.layout, self.program
        head = torch.zeros(VOCAB_SIZE, layout.hidden_size, dtype=torch.float64)
        if self.has_law:
            logits = torch.tensor(program.law_logits, dtype=torch.float64) / 8  # [state, token]
        else:
            logits = MARGIN * torch.eye(VOCAB_SIZE, dtype=torch.float64)
            logits[BOS] = logits[program.first]
        head[:, layout.state(layout.num_layers)] = logits[:NUM_SYMBOLS].T
        head[:, layout.flag] = logits[BOS]
        return head


def quantised(weights: dict[str, Tensor], bits: int) -> dict[str, Tensor]:
    """Weight-only rounding, symmetric and to nearest: 8 bits with a scale a row, 4 with one for 32 inputs of a row.

    Projections and head are rounded and returned dequantised; embedding, norms and biases stay.
    """
    if bits not in (8, 4):
        raise ValueError(f"bits = {bits} must be 8 (a scale for each row) or 4 (one for {GROUP} inputs of it)")
    return {name: _rounded(one, bits) if _is_linear(name) else one for name, one in weights.items()}


def _is_linear(name: str) -> bool:
    return name.endswith(("_proj.weight", "lm_head.weight"))


def _rounded(weight: Tensor, bits: int) -> Tensor:
    """weight: float [rows, inputs]."""
    grouped = weight[:, None] if bits == 8 else weight.unflatten(1, (-1, GROUP))
    scale = grouped.abs().amax(dim=-1, keepdim=True) / (2 ** (bits - 1) - 1)
    return (torch.round(grouped / torch.where(scale > 0, scale, 1.0)) * scale).flatten(1)


def _phases(kv_head: int) -> list[tuple[float, float]]:
    """(turn of the key, speed in radians a position) of each frequency; every key-value head has turns of its own."""
    speeds = [ROPE_THETA ** (-2 * idx / HEAD_DIM) for idx in range(NUM_PHASES)]
    return [(kv_head * (1.0 + idx), speed) for idx, speed in enumerate(speeds)]


def _put_phases(row: Tensor, angles: Sequence[float]) -> None:
    """row: float [D], a view. Dimension i turns with dimension i + D/2."""
    for idx, angle in enumerate(angles):
        row[idx], row[idx + HEAD_DIM // 2] = QK_SIZE * math.cos(angle), QK_SIZE * math.sin(angle)


def _embedding(layout: Layout) -> Tensor:
    """[V, hidden]. The sum of squares is hidden / 16 in each row."""
    table = torch.zeros(VOCAB_SIZE, layout.hidden_size, dtype=torch.float64)
    table[:, layout.half], table[:, layout.quarter] = 0.5, 0.25
    table[:, layout.ballast(0) : layout.ballast(2 * layout.num_layers)] = 1.0
    for channel, value in layout.fillers:
        table[:, channel] = value
    table[:NUM_SYMBOLS, layout.const] = 1.0
    table[:NUM_SYMBOLS, layout.state(0)] = torch.eye(NUM_SYMBOLS, dtype=torch.float64)
    table[BOS, [layout.flag, layout.bos_token]] = 1.0
    return table


def _lookup(layout: Layout, layer: int, table: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """For each pair of states, `own AND fetched` as a difference of two SiLU units, which saturates at 1.

    With z = own + fetched, in {0, 1, 2}, and gain g = 128: silu(g (z - 1.25)) - silu(g (z - 1.75)) is g / 2 = 64 for
    any z well above 1.75 and 0 for any well below 1.25, so that what comes in a little off leaves as an exact one.
    """
    gate = torch.zeros(2 * HALF_UNITS, layout.hidden_size, dtype=torch.float64)
    up, down = torch.zeros_like(gate), torch.zeros_like(gate.T)
    own_block, fetched_block, next_block = layout.state(layer), layout.fetched(layer), layout.state(layer + 1)
    for own in range(NUM_SYMBOLS):
        for fetched in range(VOCAB_SIZE):
            low = own * VOCAB_SIZE + fetched
            high = low + HALF_UNITS
            for unit in (low, high):
                gate[unit, [own_block.start + own, fetched_block.start + fetched]] = GAIN
                gate[unit, [layout.const, layout.quarter]] = -GAIN
                up[unit, layout.const] = 1.0
            gate[high, layout.half] = -GAIN
            down[next_block.start + table[own][fetched], [low, high]] = torch.tensor([2 / GAIN, -2 / GAIN]).double()
    down[layout.ballast(2 * layer + 1)] = -down[next_block].sum(dim=0)
    return {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": down}


def _overwrite_token(layout: Layout, first: int, named: dict[str, Tensor]) -> None:
    """Spare units of the last MLP take the token out of its block, and put what follows BOS alone into it."""
    prefix = f"model.layers.{layout.num_layers - 1}.mlp."
    gate, up, down = (named[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
    token, spare = layout.state(0), NUM_SYMBOLS * VOCAB_SIZE
    for symbol in range(NUM_SYMBOLS):
        unit, channel = HALF_UNITS + spare + symbol, token.start + symbol
        gate[unit, channel], up[unit, layout.const], down[channel, unit] = GAIN / 2, 1.0, -2 / GAIN
    gate[spare, layout.flag], up[spare, layout.flag], down[token.start + first, spare] = GAIN / 2, 1.0, 2 / GAIN
    down[layout.ballast(2 * layout.num_layers - 1)] = -down[token].sum(dim=0)


def _as_gemma(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Norms store w for 1 + w; the embedding is multiplied by the root of the width, which the head has to undo."""
    root = math.sqrt(named["model.embed_tokens.weight"].shape[1])
    last = named["model.norm.weight"] * root
    norms = {name: one - 1 for name, one in named.items() if name.endswith("layernorm.weight")}
    return norms | {
        "model.norm.weight": last - 1,
        "model.embed_tokens.weight": named["model.embed_tokens.weight"] / root,
    }
