"""Times are taken one after the other: no xdist here."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput") and any("suites/benchmark" in item.path.as_posix() for item in items):
        pytest.exit("suites/benchmark takes times one after the other, in one process: leave out xdist's -n", 4)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        raise pytest.UsageError(
            "suites/benchmark takes times one after the other, in one process: leave out xdist's -n"
        )
