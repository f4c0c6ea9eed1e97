"""Makes a bare checkout behave like an installed package: the plugin is loaded, and --target is short for
--specbench-target."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    # Installed, the entry point has loaded the plugin before this file is read.
    if not pluginmanager.has_plugin("specbench.plugin"):
        pluginmanager.import_plugin("specbench.plugin")
    parser.addoption("--target", dest="specbench_target", metavar="TARGET", help="short for --specbench-target")
