"""`kernels.tree_mask` against the parents followed one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specbench.kernels.tree_mask import pack_mask, tree_mask, unpack_mask
from specbench.suites.kernels.cases import scrambled, shapes
from specbench.suites.kernels.comparisons import asked_mask, masks_rightly
from specbench.suites.kernels.drawing import drawn
from specbench.tree import UNUSED, DraftTree

SIZES = (1, 2, 3, 7, 63, 64, 65, 130)
trees = st.lists(shapes(sizes=SIZES, rare=(200,)), min_size=1, max_size=4)
BINARY = tuple((node - 1) // 2 if node else -1 for node in range(1024))


@drawn(300)
@given(parents=trees, prefix_len=st.integers(0, 2**20), seed=st.integers(0, 99), is_scrambled=st.booleans())
def test_bits_depth_and_positions_are_those_of_the_path(
    parents: list[tuple[int, ...]], prefix_len: int, seed: int, is_scrambled: bool
) -> None:
    if is_scrambled:
        parents = [scrambled(one, seed) for one in parents]
    assert masks_rightly(tree_mask, parents, [prefix_len + 7 * idx for idx in range(len(parents))])


@pytest.mark.parametrize("parents", [BINARY, tuple(range(-1, 1023))], ids=["binary", "chain"])
def test_the_largest_trees(parents: tuple[int, ...]) -> None:
    """Not drawn: a step up all paths of a block takes the interpreter milliseconds."""
    assert masks_rightly(tree_mask, [(-1, 0), parents], [5, 2**20])


def test_a_tree_of_the_project_has_the_same_mask() -> None:
    tree = DraftTree.of(range(8), [-1, 0, 0, 1, 2, 2, 5, 6])
    made = asked_mask(tree_mask, [tuple(tree.parent_list)], [11])
    assert torch.equal(unpack_mask(made.bits, 8).cpu(), tree.ancestor_mask)
    assert torch.equal(made.position_ids.cpu(), tree.position_ids(11))
    assert torch.equal(pack_mask(tree.ancestor_mask), made.bits.cpu())


@pytest.mark.parametrize("num_nodes", [63, 64, 65, 128, 1024])
def test_a_mask_packed_and_unpacked_is_itself(num_nodes: int) -> None:
    mask = torch.rand(num_nodes, num_nodes, generator=torch.Generator().manual_seed(1)) < 0.5
    assert torch.equal(unpack_mask(pack_mask(mask), num_nodes), mask)


def test_an_unused_row_sees_nothing_and_a_circle_ends() -> None:
    made = asked_mask(tree_mask, [(-1, UNUSED, 0), (-1, 2, 1)], [4, 9])
    assert made.bits[1].tolist() == [0] and made.depth[1] == 0
    assert made.bits[2].tolist() == [0b101]
    assert made.bits[4].tolist() == [0b110]  # the circle itself, and no more steps than there are nodes


def test_a_parent_outside_its_tree_ends_the_path() -> None:
    made = asked_mask(tree_mask, [(-1, 7), (-1, -9)], [0, 0])
    assert made.bits[:, 0].tolist() == [0b01, 0b10, 0b01, 0b10]


def test_the_mask_takes_a_bit_for_each_pair_of_nodes() -> None:
    made = asked_mask(tree_mask, [tuple([-1] + [0] * 255)], [100_000])
    assert made.bits.numel() * made.bits.element_size() == 256 * 256 // 8
