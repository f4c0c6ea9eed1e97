"""Sliding windows that the forward of a tree measures wrongly. What a ring keeps of them is in `kinds`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specbench.reference.faults.fault import Fault
from specbench.reference.faults.hooks import Sight, in_verify, with_sight
from specbench.steps import Steps


def _windowed(near: Callable[[Sight, int], Tensor]) -> Callable[[Steps], Steps]:
    """Plants a layer whose rows see, of what the mask lets them see, what `near(sight, window)` says."""

    def see(sight: Sight) -> Tensor:
        return sight.visible if sight.window is None else sight.unwindowed & near(sight, sight.window)

    return in_verify(with_sight(see))


def _by_row_number(sight: Sight, window: int) -> Tensor:
    """Where a row stands in memory is taken for its position."""
    rows = sight.q_positions[..., :1] + torch.arange(sight.num_rows, device=sight.q_positions.device)
    cached = sight.k_positions[..., : sight.num_cached]
    return sight.near(window, q_positions=rows, k_positions=torch.cat([cached, rows], dim=-1))


def _block_spared(sight: Sight, window: int) -> Tensor:
    near = sight.near(window)
    near[..., sight.num_cached :] = True
    return near


def _from_root(sight: Sight, window: int) -> Tensor:
    return sight.near(window, q_positions=sight.q_positions[..., :1].expand_as(sight.q_positions))


def _from_deepest(sight: Sight, window: int) -> Tensor:
    deepest = sight.q_positions.amax(dim=-1, keepdim=True)
    near = sight.near(window, q_positions=deepest.expand_as(sight.q_positions))
    return near | _own(sight)


def _depth_twice(sight: Sight, window: int) -> Tensor:
    depth = sight.q_positions - sight.q_positions[..., :1]
    return sight.near(window, q_positions=sight.q_positions + depth) | _own(sight)


def _own(sight: Sight) -> Tensor:
    """bool [M, K]: a row sees itself, window or not."""
    own = torch.eye(sight.num_rows, dtype=torch.bool, device=sight.block_mask.device)
    return torch.nn.functional.pad(own, (sight.num_cached, 0))


def _ring_from_zero(sight: Sight, window: int) -> Tensor:
    """Cached keys are counted from zero on, though a ring may hold the last ones only."""
    cached = torch.arange(sight.num_cached, device=sight.k_positions.device)
    cached = cached.expand(*sight.k_positions.shape[:-1], -1)
    rows = sight.k_positions[..., sight.num_cached :]
    return sight.near(window, k_positions=torch.cat([cached, rows], dim=-1))


def _layer_map(layer_of: Callable[[int, int], int]) -> Callable[[Steps], Steps]:
    """layer_of: (layer, number of layers) -> the layer whose window it takes."""

    def see(sight: Sight) -> Tensor:
        window = sight.model.layer_windows[layer_of(sight.layer, sight.model.num_layers)]
        return sight.unwindowed if window is None else sight.unwindowed & sight.near(window)

    return in_verify(with_sight(see))


FAULTS = (
    Fault(
        "window_ignored",
        "sliding-window",
        "the rows of a tree see the whole prefix in layers with a window too",
        "more tokens than a window",
        "tree.attention_weights",
        in_verify(with_sight(lambda sight: sight.unwindowed)),
        origin="unslothai/unsloth#8253",
    ),
    Fault(
        "window_by_row_number",
        "sliding-window",
        "how far back a key lies is measured in rows of the flattened tree instead of in positions",
        "a second sibling, and a window that cuts the tree or the prefix: chains are right",
        "tree.attention_weights",
        _windowed(_by_row_number),
        origin="sgl-project/sglang#39287",
        subtle="a window that cuts, and width",
    ),
    Fault(
        "window_one_too_long",
        "sliding-window",
        "the rows of a tree see one position more than the window",
        "as many tokens as a window",
        "tree.attention_weights",
        _windowed(lambda sight, window: sight.near(window + 1)),
        origin="huggingface/transformers#39408",
        subtle="a window that cuts",
        kin="window_off_by_one",
    ),
    Fault(
        "window_one_too_short",
        "sliding-window",
        "the rows of a tree see one position less than the window",
        "as many tokens as a window",
        "tree.attention_weights",
        _windowed(lambda sight, window: sight.near(max(1, window - 1))),
        origin="lightseekorg/tokenspeed#578",
        subtle="a window that cuts",
        kin="window_off_by_one",
    ),
    Fault(
        "window_spares_the_block",
        "sliding-window",
        "the window cuts the prefix, but never the rows of the tree",
        "a path longer than a window",
        "tree.attention_weights",
        _windowed(_block_spared),
        subtle="a window that cuts the tree",
    ),
    Fault(
        "window_from_root",
        "sliding-window",
        "the window begins where the root's begins, for all rows of the tree",
        "a draft behind as many tokens as a window",
        "tree.attention_weights",
        _windowed(_from_root),
        subtle="a window that cuts, and a draft",
        kin="one_window_a_block",
    ),
    Fault(
        "window_from_deepest",
        "sliding-window",
        "the window begins where the deepest row's begins, for all rows of the tree",
        "a draft behind as many tokens as a window",
        "tree.attention_weights",
        _windowed(_from_deepest),
        origin="flashinfer-ai/flashinfer#4137",
        subtle="a window that cuts, and a draft",
        kin="one_window_a_block",
    ),
    Fault(
        "window_moves_twice",
        "sliding-window",
        "a row's depth is added twice where its window begins",
        "a draft behind as many tokens as a window",
        "tree.attention_weights",
        _windowed(_depth_twice),
        origin="microsoft/onnxruntime#32340",
        subtle="a window that cuts, and a draft",
    ),
    Fault(
        "window_of_next_layer",
        "sliding-window",
        "a layer takes the window of the next one",
        "windows in some layers only, and more tokens than one",
        "tree.attention_weights",
        _layer_map(lambda layer, num_layers: (layer + 1) % num_layers),
        subtle="windows that differ by layer",
        kin="window_of_another_layer",
    ),
    Fault(
        "window_in_all_layers",
        "sliding-window",
        "the first layer's window is taken for that of every layer",
        "windows in some layers only, and more tokens than one",
        "tree.attention_weights",
        _layer_map(lambda layer, num_layers: 0),
        subtle="windows that differ by layer",
        kin="window_of_another_layer",
    ),
    Fault(
        "ring_from_zero",
        "sliding-window",
        "keys in a ring are taken to begin at position zero, so that the window hides those it should show",
        "a ring that has let go of rows",
        "tree.attention_weights",
        _windowed(_ring_from_zero),
        subtle="a full ring",
    ),
)
