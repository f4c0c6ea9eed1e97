"""The kernel benchmark's report over rows that are made up here: nothing below was ever measured."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specbench.reports.kernels import (
    ATTENTION,
    GREEDY,
    NOT_MEASURED,
    NOT_REACHED,
    REACHED,
    cells_of,
    drawn,
    markdown,
    peer_figure,
    roofline_figure,
    rows_of,
    targets,
)

COPY, MATRIX, LAUNCH = 4e12, 8e14, 4e-6  # made up: bytes/s, FLOP/s, s
SLOTS = 264


def made_up(
    prefix: int = 8192,
    nodes: int = 16,
    batch: int = 8,
    *,
    seconds: float | None = 1e-4,
    contender: str = "tree_attention",
    role: str = "own",
    status: str = "timed",
    why: str = "",
    num_bytes: float = 3.2e8,
    flops: float = 1.6e10,
    kernel: str = ATTENTION,
    **facts: Any,
) -> dict[str, Any]:
    row = {
        "row": "time",
        "kernel": kernel,
        "cell": {"P": prefix, "N": nodes, "B": batch},
        "contender": contender,
        "role": role,
        "status": status,
        "why": why,
        "bytes": num_bytes,
        "flops": flops,
    } | facts
    if role == "own":
        row.setdefault("mask_bytes", batch * nodes * -(-nodes // 64) * 8)
    if status == "timed":
        assert seconds is not None
        row["seconds"] = {"median": seconds, "q25": 0.9 * seconds, "q75": 1.1 * seconds, "min": 0.8 * seconds, "n": 50}
    return row


CEILINGS = [
    {"row": "ceiling", "name": "copy", "value": COPY, "unit": "bytes/s", "how": "made up"},
    {"row": "ceiling", "name": "matrix", "value": MATRIX, "unit": "FLOP/s", "how": "made up"},
    {"row": "ceiling", "name": "launch", "value": LAUNCH, "unit": "s", "how": "made up"},
]
VERSIONS = ("torch", "triton", "python", "specbench")
ABOUT = [
    {"row": "run", "device": "made-up card", "method": "none"} | dict.fromkeys(VERSIONS, "0"),
    {"row": "check", "name": "suites/kernels, quick", "status": "passed", "why": "7 passed", "seconds": 1.0},
]  # fmt: skip


def peer(seconds: float, name: str = "sdpa", **place: Any) -> dict[str, Any]:
    return made_up(seconds=seconds, contender=name, role="peer", **place)


def floor(seconds: float, name: str = "flash", **place: Any) -> dict[str, Any]:
    return made_up(seconds=seconds, contender=name, role="floor", **place)


def test_shares_and_ratios_by_hand() -> None:
    """3.2e8 bytes in 1e-4 s are 3.2e12 a second, 80 % of 4e12; 1.6e10 operations 1.6e14, 20 % of 8e14. The roofline is
    8e-5 s (bytes) against 2e-5 s (operations)."""
    rows = [*CEILINGS, made_up(), peer(3e-4), peer(2e-4, "flex"), floor(0.8e-4), floor(0.9e-4, "cudnn")]
    (cell,) = cells_of(rows, ATTENTION)
    assert (cell.copy_share, cell.matrix_share, cell.roofline, cell.roofline_share) == pytest.approx(
        (0.8, 0.2, 8e-5, 0.8)
    )
    assert (cell.over_floor, cell.over_peer, cell.is_loss) == (pytest.approx(1.25), pytest.approx(2.0), False)
    assert cell.floor is not None and cell.peer is not None
    assert (cell.floor["contender"], cell.peer["contender"]) == ("flash", "flex")


def test_a_cell_of_operations_has_its_roofline_in_the_matrix_rate() -> None:
    (cell,) = cells_of([*CEILINGS, made_up(flops=1.6e11)], ATTENTION)
    assert (cell.roofline, cell.roofline_share) == (pytest.approx(2e-4), pytest.approx(2.0))


def test_wrong_and_missing_peers_are_no_peers() -> None:
    """However fast they were: a wrong one has no time, even if a row should hold one."""
    wrong = peer(1e-6, "wrong one", status="timed") | {"status": "wrong", "why": "out is off by 1"}
    absent = made_up(contender="flashinfer", role="peer", status="not run", why="flashinfer is not installed")
    (cell,) = cells_of([*CEILINGS, made_up(), wrong, absent], ATTENTION)
    assert (cell.peer, cell.over_peer, cell.is_loss) == (None, None, False)


def test_a_wrong_kernel_of_ours_has_no_share_and_no_ratio() -> None:
    (cell,) = cells_of([*CEILINGS, made_up(status="wrong", why="out holds NaN"), peer(1e-4), floor(1e-4)], ATTENTION)
    assert [cell.seconds, cell.copy_share, cell.roofline_share, cell.over_floor, cell.over_peer] == [None] * 5


def test_without_ceilings_nothing_is_a_share() -> None:
    (cell,) = cells_of([made_up()], ATTENTION)
    assert [cell.roofline, cell.copy_share, cell.matrix_share, cell.cause] == [None, None, None, ""]


UNTOLD = "no formula tells: 80% of the copy bandwidth, 20% of the matrix rate"
CAUSES: dict[str, tuple[dict[str, Any], str]] = {
    "launch": ({"seconds": 1e-5, "num_bytes": 8e6}, "launch-bound: two empty kernels take 4.0 of 10.0 us"),
    "occupancy": ({"programs": 330, "slots": SLOTS}, "occupancy: 330 programs fill waves of 264 badly"),
    "a full wave": ({"programs": 256, "slots": SLOTS}, UNTOLD),
    "bytes": ({"partial_bytes": 6.4e7}, "bytes: partial results add 20%"),
    "padding": ({"used_rows": 0.55, "flops": 1.6e11}, "padding: 55% of a block's rows are used"),
    "padding where bytes decide": ({"used_rows": 0.55}, UNTOLD),
    "two": (
        {"programs": 330, "slots": SLOTS, "partial_bytes": 6.4e7},
        "occupancy: 330 programs fill waves of 264 badly; bytes: partial results add 20%",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_cause_by_formula(name: str) -> None:
    facts, cause = CAUSES[name]
    (cell,) = cells_of([*CEILINGS, made_up(**facts)], ATTENTION)
    assert cell.cause == cause


def grid(**changed: Any) -> list[dict[str, Any]]:
    """The targets' cells and a few more, each of which reaches its target, with a peer and a floor."""
    rows: list[dict[str, Any]] = [*CEILINGS]
    for prefix in (1024, 8192, 32768, 131072):
        for nodes in (1, 16, 64, 256):
            place = {"prefix": prefix, "nodes": nodes} | changed
            rows += [made_up(**place), peer(2e-4, **place), floor(1e-4, **place)]
    rows += [made_up(0, 64, batch, kernel=GREEDY, contender="kernels", seconds=5e-5) for batch in (1, 8)]
    return rows


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    return [one.verdict for one in targets(rows)]


def test_all_targets_reached() -> None:
    assert verdicts(grid()) == [REACHED] * 7


def altered(rows: list[dict[str, Any]], prefix: int, nodes: int, role: str, **changed: Any) -> list[dict[str, Any]]:
    def is_meant(row: dict[str, Any]) -> bool:
        place = row.get("cell", {})
        return (place.get("P"), place.get("N"), row.get("role")) == (prefix, nodes, role)

    assert any(map(is_meant, rows))
    return [row | changed if is_meant(row) else row for row in rows]


def took(seconds: float) -> dict[str, Any]:
    return {"seconds": {"median": seconds, "q25": seconds, "q75": seconds, "min": seconds, "n": 50}}


ONE_MISSED: dict[str, tuple[list[dict[str, Any]], int]] = {
    "copy bandwidth": (altered(grid(), 32768, 16, "own", **took(1.05e-4)), 0),
    "roofline": (altered(altered(grid(), 32768, 64, "own", **took(1.5e-4)), 32768, 64, "floor", **took(1.5e-4)), 1),
    "floor": (altered(grid(), 8192, 256, "floor", **took(0.9e-4)), 2),
    "worst peer": (altered(grid(), 1024, 256, "peer", **took(0.79e-4)), 4),
    "greedy": (altered(grid(), 0, 64, "own", **took(6e-5)), 5),
    "mask": (altered(grid(), 1024, 64, "own", mask_bytes=8 * 64 * 8 * 1024), 6),
}


@pytest.mark.parametrize("name", ONE_MISSED)
def test_one_missed_target_is_not_reached_and_no_other_is(name: str) -> None:
    rows, place = ONE_MISSED[name]
    assert verdicts(rows) == [NOT_REACHED if idx == place else REACHED for idx in range(7)]


def test_mean_below_the_peers_is_not_reached() -> None:
    """0.9 everywhere: each cell is above 0.8, their mean below 1."""
    rows = [row | took(0.9e-4) if row.get("role") == "peer" else row for row in grid()]
    assert verdicts(rows)[3:5] == [NOT_REACHED, REACHED]
    assert targets(rows)[3].found == "0.90 x over 16 of 16 cells"


def test_geometric_mean_by_hand() -> None:
    """2 and 1/8: their root is 1/2, where the arithmetic mean would be above 1."""
    rows = [*CEILINGS, made_up(), peer(2e-4), made_up(1024), peer(1.25e-5, prefix=1024)]
    assert targets(rows)[3].found == "0.50 x over 2 of 2 cells" and targets(rows)[3].verdict == NOT_REACHED


def unmeasured(rows: list[dict[str, Any]], prefix: int, nodes: int, why: str) -> list[dict[str, Any]]:
    return altered(rows, prefix, nodes, "own", status="not run", why=why)


def test_targets_that_hold_only_where_time_sufficed_are_not_measured() -> None:
    found = targets(unmeasured(grid(), 131072, 16, "the run's 9 minutes were used up"))
    assert [idx for idx, one in enumerate(found) if one.verdict == NOT_MEASURED] == [0, 2, 3, 4]
    assert found[0].found == "worst 80%, held in 5 of 5 measured cells, 1 not measured"


@pytest.mark.parametrize("status", ["wrong", "failed"])
def test_a_cell_in_which_ours_is_wrong_misses_all_its_targets(status: str) -> None:
    found = targets(altered(grid(), 131072, 16, "own", status=status, why="out holds NaN"))
    assert [idx for idx, one in enumerate(found) if one.verdict == NOT_REACHED] == [0, 2, 3, 4]
    assert found[0].found == "worst 80%, held in 5 of 5 measured cells, wrong or failed in 1"


def test_cells_that_never_fit_the_card_are_not_asked_for() -> None:
    assert verdicts(unmeasured(grid(), 131072, 16, "does not fit: takes 2 bytes, 1 are free")) == [REACHED] * 7


def test_nothing_timed_is_nothing_reached_but_what_formulas_say() -> None:
    rows = [made_up(status="not timed", why="no GPU"), made_up(0, 64, kernel=GREEDY, status="not timed", why="no GPU")]
    assert verdicts(rows) == [NOT_MEASURED] * 6 + [REACHED]


def page() -> str:
    return markdown(
        [
            *ABOUT, *CEILINGS,
            made_up(), peer(0.5e-4), floor(0.9e-4),
            made_up(contender="bad | one", role="peer", status="wrong", why="out is off by 1, must be within 0.1"),
            made_up(contender="flashinfer", role="peer", status="not run", why="flashinfer is not installed"),
            made_up(0, 64, kernel=GREEDY, contender="kernels", seconds=5e-5),
            made_up(0, 64, kernel=GREEDY, contender="torch", role="peer", seconds=2.5e-4),
        ]
    )  # fmt: skip


LINES = [
    "- device made-up card, torch 0, triton 0, python 0, specbench 0",
    "- Checks, suites/kernels, quick: passed (7 passed).",
    "- Measured on this card: copy 4e+12 bytes/s (made up).",
    "| P >= 8,192, B = 8: at most 1.10 x the floor | worst 1.11 x, held in 0 of 1 measured cells | not reached |",
    "| 8,192 | 16 | 8 | 100.0 | 90.0 to 110.0 | 50 | 320.0 | 16.0 | 80% | 20% | 80.0 | 80% | 1.11 | 0.50 | sdpa "
    "| no formula tells: 80% of the copy bandwidth, 20% of the matrix rate |",
    "| 8,192 | 16 | 8 | 0.50 | sdpa | no formula tells: 80% of the copy bandwidth, 20% of the matrix rate |",
    "| tree_attention | bad \\| one | peer | 0 of 1 | wrong: out is off by 1, must be within 0.1 (1) |",
    "| tree_attention | flashinfer | peer | 0 of 1 | not run: flashinfer is not installed (1) |",
    "| P 0, N 64, B 8 | torch | 250.0 | 225.0 to 275.0 | 50 | 320.0 | 80.0 | 5.00 | timed |",
]


@pytest.mark.parametrize("line", LINES)
def test_page_holds(line: str) -> None:
    assert line in page().splitlines()


def test_page_says_that_there_was_no_loss() -> None:
    rows = [*CEILINGS, made_up(), peer(2e-4), made_up(1024)]
    assert "None in 1 cells that were compared with a peer." in markdown(rows)


def test_page_shows_that_only_other_peoples_masks_grow_with_the_prefix() -> None:
    place = {"nodes": 64, "batch": 1}
    rows = [made_up(prefix, **place) for prefix in (1024, 8192)]
    rows += [peer(1.0, prefix=prefix, mask_bytes=2 * 64 * (prefix + 64), **place) for prefix in (1024, 8192)]
    table = markdown(rows).split("## Mask memory of a tree")[1].strip().splitlines()
    assert table[2:] == ["| sdpa | 64 | 139,264 | 1,056,768 |", "| tree_attention | 64 | 512 | 512 |"]


def test_a_line_that_was_cut_off_is_left_out_and_a_broken_one_is_told() -> None:
    whole = json.dumps(made_up())
    assert rows_of(f"{whole}\n{whole}\n{whole[:40]}") == [made_up()] * 2
    with pytest.raises(ValueError, match=r"line 1 is not JSON"):
        rows_of(f"{whole[:40]}\n{whole}\n")


def test_roofline_draws_each_timed_cell_below_the_ceilings() -> None:
    rows = [*CEILINGS, made_up(), made_up(1024, batch=1, seconds=2e-4), made_up(32768, status="not run", why="late")]
    points, ceiling = roofline_figure(rows).axes[0].lines[:2], roofline_figure(rows).axes[0].lines[2]
    assert [(one.get_xdata().tolist(), one.get_ydata().tolist()) for one in points] == [
        ([50.0], [8e13]),
        ([50.0], [1.6e14]),
    ]
    assert list(ceiling.get_ydata())[1:] == pytest.approx([MATRIX, MATRIX])


def test_tiles_hold_the_ratio_and_a_dash_where_no_peer_ran() -> None:
    rows = [*CEILINGS, made_up(), peer(2e-4), made_up(nodes=64)]
    assert [text.get_text() for text in peer_figure(rows).axes[0].texts] == ["2.00", "-"]


@pytest.mark.parametrize("kind", ["svg", "png"])
@pytest.mark.parametrize("figure", [roofline_figure, peer_figure])
@pytest.mark.parametrize("rows", [grid(), []], ids=["grid", "nothing"])
def test_drawings_are_the_same_bytes_each_time(kind: str, figure: Any, rows: list[dict[str, Any]]) -> None:
    assert drawn(figure(rows), kind) == drawn(figure(rows), kind)
