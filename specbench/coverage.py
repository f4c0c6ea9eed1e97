"""Which states a run has reached: rounds by accept length, width, depth, cache kind and dtype. Standard library only.

A cell counts rounds of the tiny models. Its accept length, width and depth are 0, 1, 2 or "3+"; a tree's width is the
largest number of siblings in it. A root alone has no width and is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

LARGE = 3
Cell = tuple[int, int, int]  # accept length, width, depth


def shape_of(parents: Sequence[int], num_accepted: int) -> Cell | None:
    """The cell of one round; None for a root alone."""
    if len(parents) < 2:
        return None
    width = max(Counter(parents[1:]).values())
    depth = max(depth_of(parents, node) for node in range(len(parents)))
    return min(num_accepted, LARGE), min(width, LARGE), min(depth, LARGE)


def depth_of(parents: Sequence[int], node: int) -> int:
    """Edges between the root and `node`."""
    depth = 0
    while parents[node] >= 0:
        node, depth = parents[node], depth + 1
    return depth


def broom(width: int, depth: int, *, level: int) -> tuple[int, ...]:
    """Parents of a chain `depth` deep whose node at depth `level` has `width` children: the least tree of its cell."""
    return (*range(-1, depth), *(level,) * (width - 1))


def all_shapes() -> list[Cell]:
    """Every cell that can be: no more is accepted than there is depth."""
    return [
        (accepted, width, depth)
        for accepted in range(LARGE + 1)
        for width in range(1, LARGE + 1)
        for depth in range(max(accepted, 1), LARGE + 1)
    ]


def key(shape: Cell, cache: str, dtype: str) -> str:
    """As it stands in the run record: `2.1.3 ring bf16`."""
    return f"{'.'.join(map(str, shape))} {cache} {dtype}"


def empty_cells(counts: dict[str, int], caches: Iterable[str], dtypes: Iterable[str]) -> list[str]:
    """Keys of cells that no round has reached."""
    dtypes = list(dtypes)
    wanted = [key(shape, cache, dtype) for cache in caches for dtype in dtypes for shape in all_shapes()]
    return [one for one in wanted if not counts.get(one)]


def coverage_table(counts: dict[str, int], caches: Sequence[str], dtypes: Sequence[str]) -> list[str]:
    """Lines: a shape down, a cache kind across; in each cell the rounds of the dtype that has fewest."""
    header = ["accept", "width", "depth", *caches]
    rows = [header]
    for shape in all_shapes():
        fewest = [min((counts.get(key(shape, cache, dtype), 0) for dtype in dtypes), default=0) for cache in caches]
        rows.append([*(f"{one}+" if one == LARGE else str(one) for one in shape), *map(str, fewest)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
