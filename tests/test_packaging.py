"""The three ways of running: a bare checkout, an editable install, a wheel used from another folder.

Each way gets an environment of its own that sees this one's packages but not this one's specbench, so that what is
tested is the way at hand and not whatever happens to be installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import specbench

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("specbench", "kernels", "reference", "reports", "suites")
MODULES = "specbench.reference, specbench.kernels, specbench.suites.consistency, specbench.reports"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a clone holds of the package, free of build leftovers; building writes beside the sources."""
    copy = tmp_path_factory.mktemp("checkout")
    leftovers = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=leftovers)
    for name in ("pyproject.toml", "LICENSE", "README.md", "conftest.py"):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target), str(checkout))
    shutil.rmtree(checkout / "build", ignore_errors=True)
    return next(target.glob("*.whl"))


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    """The files in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_wheel_holds_one_top_level_name(names: list[str]) -> None:
    dist_info = f"specbench_decoding-{specbench.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"specbench", dist_info}


def test_wheel_holds_every_module_and_data_file_of_the_checkout(names: list[str]) -> None:
    modules = {path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    expected = {name if name.startswith("specbench/") else f"specbench/{name}" for name in modules}
    expected |= {
        "specbench/prompts.jsonl",
        "specbench/training/held_out.txt",
        "specbench/workloads/prompts.jsonl",
        "specbench/workloads/hostile.jsonl",
        "specbench/kernels/README.md",
    }
    weights = (ROOT / "specbench/weights").rglob("*")
    expected |= {path.relative_to(ROOT).as_posix() for path in weights if path.is_file()}
    assert {name for name in names if ".dist-info/" not in name} == expected


def test_kernels_stay_a_namespace_package(names: list[str]) -> None:
    """An __init__.py would make the checkout's folder a package that shadows Hugging Face's `kernels`."""
    assert "specbench/kernels/__init__.py" not in names


def test_every_folder_with_modules_is_a_listed_package() -> None:
    """setuptools leaves a folder that is missing in the list out without a word."""
    tomllib = pytest.importorskip("tomllib", reason="reading pyproject.toml needs Python 3.11: run the tests with it")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    folders = {path.parent.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    on_disk = {".".join(path.parts if path.parts[0] == "specbench" else ("specbench", *path.parts)) for path in folders}
    assert set(settings["packages"]) == on_disk | {"specbench.kernels"}


def test_bare_checkout_imports_and_collects(checkout: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "venv")
    assert_imports(python, cwd=checkout)
    assert_collects(python, "suites/consistency", cwd=checkout)


def test_editable_install_imports_and_collects_from_another_folder(checkout: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "venv")
    pip(
        "install", "--no-deps", "--no-build-isolation", "--ignore-installed", "--editable", str(checkout), python=python
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert_imports(python, cwd=elsewhere)
    assert_collects(python, "--pyargs", "specbench.suites.consistency", cwd=elsewhere)


def test_wheel_imports_and_collects_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "venv")
    pip("install", "--no-deps", "--ignore-installed", str(wheel), python=python)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert_imports(python, cwd=elsewhere)
    assert_collects(python, "--pyargs", "specbench.suites.consistency", cwd=elsewhere)
    script = run(str(python.with_name("specbench")), "--version", cwd=elsewhere)
    assert script.stdout == f"specbench {specbench.__version__}\n"


def environment(folder: Path) -> Path:
    """A virtual environment that sees every package of this one but specbench; returns its python.

    Links instead of the folder itself: the folder may hold specbench's own entry points and editable hook.
    """
    run(sys.executable, "-m", "venv", "--without-pip", str(folder), cwd=folder.parent)
    python = folder / "bin" / "python"
    packages = folder / "packages"
    packages.mkdir()
    for entry in sorted(Path(sysconfig.get_path("purelib")).iterdir()):
        if not entry.name.startswith(("specbench", "__editable__", "__pycache__")) and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = run(str(python), "-c", query, cwd=folder).stdout.strip()
    (Path(site) / "packages.pth").write_text(f"{packages}\n")
    return python


def assert_imports(python: Path, *, cwd: Path) -> None:
    loaded = "from specbench.prompts import load_prompts; from specbench.workloads.load import load"
    code = f"import {MODULES}; {loaded}; print(len(load_prompts()), len(load().prompts))"
    num_prompts, num_asked = map(int, run(str(python), "-c", code, cwd=cwd).stdout.split())
    assert num_prompts >= 24 and num_asked >= 80


def assert_collects(python: Path, *arguments: str, cwd: Path) -> None:
    """As the `pytest` script does: it leaves the working folder off the path, where `python -m pytest` adds it."""
    command = [str(python), "-c", "import sys; sys.path.remove(''); import pytest; sys.exit(pytest.main(sys.argv[1:]))"]
    collected = run(*command, *arguments, "--collect-only", "-q", "-p", "no:cacheprovider", cwd=cwd)
    assert "::test_" in collected.stdout


def pip(*arguments: str, python: Path | None = None) -> None:
    target = [] if python is None else ["--python", str(python)]
    command = [sys.executable, "-m", "pip", *target, "--disable-pip-version-check", "--quiet", "--no-input"]
    run(*command, *arguments, cwd=ROOT)


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    done = subprocess.run(command, cwd=cwd, env=clean, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done
