"""Times are taken one after the other: xdist is refused."""

from __future__ import annotations

import pytest

REFUSAL = "suites/benchmark takes times one after the other, in one process: leave out xdist's -n"


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        raise pytest.UsageError(REFUSAL)


@pytest.fixture(autouse=True)
def alone(request: pytest.FixtureRequest) -> None:
    """For runs of a folder above, in which this file is read by xdist's workers only."""
    if hasattr(request.config, "workerinput"):
        pytest.fail(REFUSAL, pytrace=False)
