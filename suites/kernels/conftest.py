"""With a target its claims are judged (`test_target`), and without one our own kernels, each against its twin."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not collection_path.name.startswith("test_"):
        return None
    return (collection_path.name == "test_target.py") != bool(config.getoption("--specbench-target")) or None
