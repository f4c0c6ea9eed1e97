"""specbench.coverage: which cell a round falls into, and which cells are left."""

from __future__ import annotations

import pytest

from specbench.coverage import all_shapes, broom, coverage_table, empty_cells, key, shape_of

SHAPES = {
    "a root alone is no cell": ((-1,), 0, None),
    "a chain of two, one accepted": ((-1, 0, 1), 1, (1, 1, 2)),
    "a star of five": ((-1, 0, 0, 0, 0, 0), 0, (0, 3, 1)),
    "a deep chain, all accepted": ((-1, 0, 1, 2, 3, 4), 5, (3, 1, 3)),
    "two branches of two": ((-1, 0, 0, 1, 1, 2, 2), 2, (2, 2, 2)),
}


@pytest.mark.parametrize(("parents", "num_accepted", "expected"), SHAPES.values(), ids=SHAPES)
def test_the_cell_of_a_round(parents: tuple[int, ...], num_accepted: int, expected: object) -> None:
    assert shape_of(parents, num_accepted) == expected


def test_no_cell_accepts_more_than_its_depth() -> None:
    shapes = all_shapes()
    assert (len(shapes), len(set(shapes))) == (27, 27)
    assert all(accepted <= depth for accepted, _, depth in shapes)


def test_an_unreached_cell_is_named() -> None:
    counts = {key(shape, "ring", "bf16"): 1 for shape in all_shapes()}
    del counts["2.1.3 ring bf16"]
    assert empty_cells(counts, ["ring"], ["bf16"]) == ["2.1.3 ring bf16"]


def test_the_table_shows_the_dtype_with_fewest_rounds() -> None:
    counts = {key((0, 1, 1), "ring", "fp64"): 7, key((0, 1, 1), "ring", "fp32"): 2}
    lines = coverage_table(counts, ["ring"], ["fp64", "fp32"])
    assert (lines[0].split(), lines[1].split()) == (["accept", "width", "depth", "ring"], ["0", "1", "1", "2"])


def test_a_broom_is_the_smallest_tree_of_its_cell() -> None:
    assert broom(3, 2, level=1) == (-1, 0, 1, 1, 1)
    assert {shape_of(broom(width, depth, level=depth - 1), 0)[1:] for _, width, depth in all_shapes()} == {
        (width, depth) for _, width, depth in all_shapes()
    }
