"""Times are taken one after the other: xdist is refused."""

from __future__ import annotations

import pytest

from specbench.bench import ONE_AFTER_THE_OTHER


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        raise pytest.UsageError(ONE_AFTER_THE_OTHER)


@pytest.fixture(autouse=True)
def alone(request: pytest.FixtureRequest) -> None:
    """For runs of a folder above, in which this file is read by xdist's workers only."""
    if hasattr(request.config, "workerinput"):
        pytest.fail(ONE_AFTER_THE_OTHER, pytrace=False)
