"""The import arrows of the project, read from every file by AST: down only, never sideways.

A module may import modules of lower LAYERS only, and a new module of `specbench/` has to be given its place there.
Imports for type checkers alone (`if TYPE_CHECKING:`) draw no arrow.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SIBLINGS = ("kernels", "reference", "reports", "suites")

# Lowest first. A package stands for everything inside it, whose files may import each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "specbench",
        "specbench.clock",
        "specbench.costs",
        "specbench.coverage",
        "specbench.models",
        "specbench.profiles",
        "specbench.prompts",
        "specbench.shim",
    ),
    ("specbench.ambient", "specbench.sanitize"),
    ("specbench.strict_json",),
    ("specbench.case_files", "specbench.record", "specbench.types", "specbench.watchdog"),
    (
        "specbench.annotations",
        "specbench.board",
        "specbench.budget",
        "specbench.exit_codes",
        "specbench.sampling_options",
        "specbench.shipped",
        "specbench.summary",
        "specbench.tree",
        "specbench.workloads",
    ),
    ("specbench.cases", "specbench.lockstep", "specbench.steps"),
    ("specbench.protocols",),
    ("specbench.wrapping",),
    ("specbench.counting", "specbench.kernels", "specbench.reference", "specbench.wire_process"),
    ("specbench.engines", "specbench.wire_values"),
    ("specbench.wire",),
    ("specbench.claims", "specbench.compare", "specbench.law", "specbench.training"),
    (
        "specbench.architectures",
        "specbench.audit",
        "specbench.banks",
        "specbench.failures",
        "specbench.fault_catalogue",
        "specbench.ledger",
        "specbench.loading",
        "specbench.probe",
        "specbench.redact",
    ),
    (
        "specbench.careless",
        "specbench.claim_list",
        "specbench.engine_models",
        "specbench.exits",
        "specbench.gate",
        "specbench.kernel_bank",
        "specbench.own_bank",
        "specbench.regret",
    ),
    ("specbench.engine_run", "specbench.subjects"),
    (
        "specbench.adversaries",
        "specbench.checks",
        "specbench.fixed",
        "specbench.reduce",
        "specbench.replay",
        "specbench.strategies",
    ),
    ("specbench.machines",),
    ("specbench.naming",),
    ("specbench.judge",),
    ("specbench.control_run", "specbench.drafters", "specbench.fault_run", "specbench.soak", "specbench.worker"),
    ("specbench.bench",),
    (
        "specbench.engine_command",
        "specbench.fault_report",
        "specbench.isolation",
        "specbench.reports",
        "specbench.server_command",
    ),
    ("specbench.bench_command", "specbench.plan_command"),
    ("specbench.cli", "specbench.plugin", "specbench.suites"),
)
PACKAGES = tuple(
    f"specbench.{name}"
    for name in (
        "bench",
        "checks",
        "drafters",
        "engines",
        "kernels",
        "law",
        "naming",
        "reference",
        "reports",
        "suites",
        "training",
        "workloads",
    )
)

# importer -> what it never imports, at any level of nesting.
NEVER = {
    "specbench.reference": ("pytest", "hypothesis", "specbench.kernels", "triton"),
    "specbench.kernels": ("specbench.reference",),
    "specbench.reports": ("torch", "specbench.reference", "specbench.suites", "specbench.plugin", "specbench.cli"),
    "specbench.record": ("torch", "specbench"),
    "specbench.shim": ("torch", "numpy", "specbench"),
}
# Modules that stay cheap to import: no torch, directly, before a function of theirs is called.
LIGHT = ("specbench", "specbench.cli", "specbench.models", "specbench.plugin", "specbench.prompts", "specbench.reports")
HEAVY = ("torch", "transformers", "triton", "datasets")


@dataclass(frozen=True)
class Import:
    """One imported module. at_import: it runs when the importing module is imported, not inside a function."""

    target: str
    line: int
    level: int
    at_import: bool


def test_every_file_keeps_to_the_arrows() -> None:
    complaints = [
        text for path in source_files() for text in complaints_about(module_of(path), path.read_text("utf-8"))
    ]
    assert complaints == []


def test_every_module_of_specbench_has_its_place() -> None:
    placed = {name for layer in LAYERS for name in layer}
    modules = {named(module_of(path)) for path in (ROOT / "specbench").rglob("*.py")}
    assert {name for name in modules if name not in placed} == set(), "add it to LAYERS in tests/test_imports.py"


def test_importing_the_harness_leaves_torch_alone() -> None:
    modules = "specbench, specbench.cli, specbench.models, specbench.prompts, specbench.plugin"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")


PLANTED = {
    "triton outside kernels": (
        "specbench.compare",
        "def f():\n    import triton.language as tl",
        ["specbench.compare:2 imports triton.language; Triton is imported in kernels/ only"],
    ),
    "torch in the plugin": (
        "specbench.plugin",
        "from torch import Tensor",
        ["specbench.plugin:1 imports torch when it is imported; it must stay light"],
    ),
    "torch in a report, however late": (
        "specbench.reports.table",
        "def f():\n    import torch",
        ["specbench.reports.table:2 imports torch; specbench.reports never does"],
    ),
    "upwards": (
        "specbench.tree",
        "from specbench import strategies",
        ["specbench.tree:1 imports specbench.strategies; arrows go down only, never up or sideways"],
    ),
    "sideways": (
        "specbench.compare",
        "import specbench.claims",
        ["specbench.compare:1 imports specbench.claims; arrows go down only, never up or sideways"],
    ),
    "upwards, late": (
        "specbench.steps",
        "def f():\n    from specbench.cli import main",
        ["specbench.steps:2 imports specbench.cli; arrows go down only, never up or sideways"],
    ),
    "reference with pytest": (
        "specbench.reference.model",
        "import pytest",
        ["specbench.reference.model:1 imports pytest; specbench.reference never does"],
    ),
    "kernels with reference": (
        "specbench.kernels.walk",
        "from specbench.reference import verify",
        [
            "specbench.kernels.walk:1 imports specbench.reference; specbench.kernels never does",
            "specbench.kernels.walk:1 imports specbench.reference; arrows go down only, never up or sideways",
        ],
    ),
    "relative": (
        "specbench.suites.consistency.test_walk",
        "from . import helpers",
        ["specbench.suites.consistency.test_walk:1 imports relatively; write from specbench... import"],
    ),
    "folder as top-level package": (
        "specbench.suites.consistency.test_walk",
        "from reference.verify import walk",
        ["specbench.suites.consistency.test_walk:1 imports reference; its name is specbench.reference"],
    ),
}


@pytest.mark.parametrize("case", PLANTED)
def test_planted_bad_import_is_caught(case: str) -> None:
    module, source, expected = PLANTED[case]
    assert complaints_about(module, source) == expected


ALLOWED = {
    "for type checkers": (
        "specbench.steps",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import specbench.protocols",
    ),
    "downwards": (
        "specbench.suites.consistency.test_walk",
        "from specbench.reference import verify\nimport pytest, torch",
    ),
    "inside a package": ("specbench.reference.decoder", "from specbench.reference import verify"),
    "torch late in the command line": ("specbench.cli", "def f():\n    import torch"),
    "triton in kernels": ("specbench.kernels.walk", "import triton"),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_good_import_is_left_alone(case: str) -> None:
    assert complaints_about(*ALLOWED[case]) == []


def source_files() -> list[Path]:
    return [path for folder in ("specbench", *SIBLINGS) for path in sorted((ROOT / folder).rglob("*.py"))]


def module_of(path: Path) -> str:
    """`reference/drafters/ngram.py` -> `specbench.reference.drafters.ngram`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "specbench" else ("specbench", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def complaints_about(module: str, source: str) -> list[str]:
    complaints = []
    for one in sorted(imports_of(source), key=lambda one: one.line):
        where = f"{module}:{one.line} imports"
        if one.level > 0:
            complaints.append(f"{where} relatively; write from specbench... import")
            continue
        if one.target.split(".")[0] in SIBLINGS:
            folder = one.target.split(".")[0]
            complaints.append(f"{where} {folder}; its name is specbench.{folder}")
            continue
        if within(one.target, "triton") and not within(module, "specbench.kernels"):
            complaints.append(f"{where} {one.target}; Triton is imported in kernels/ only")
            continue
        never = [(who, what) for who in NEVER if within(module, who) for what in NEVER[who] if within(one.target, what)]
        complaints += [f"{where} {what}; {who} never does" for who, what in never]
        light = any(module == name or (name in PACKAGES and within(module, name)) for name in LIGHT)
        heavy = [name for name in HEAVY if within(one.target, name)]
        if light and heavy and one.at_import and not never:
            complaints.append(f"{where} {heavy[0]} when it is imported; it must stay light")
        if within(one.target, "specbench") and not points_down(module, one.target):
            complaints.append(f"{where} {named(one.target)}; arrows go down only, never up or sideways")
    return list(dict.fromkeys(complaints))


def points_down(importer: str, target: str) -> bool:
    importer, target = named(importer), named(target)
    if target == "specbench" or (importer == target and importer in PACKAGES):
        return True
    return layer_of(target) < layer_of(importer)


def named(module: str) -> str:
    """The entry of LAYERS that a module or a name inside it belongs to: its package, or the module itself."""
    return ".".join(module.split(".")[:2])


def layer_of(name: str) -> int:
    for idx, layer in enumerate(LAYERS):
        if name in layer:
            return idx
    return len(LAYERS) - 2  # not placed yet: test_every_module_of_specbench_has_its_place speaks of it


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def imports_of(source: str) -> Iterator[Import]:
    """Every import, those under `if TYPE_CHECKING:` left out. `from specbench import x` counts as specbench.x."""
    todo: list[tuple[ast.AST, bool]] = [(ast.parse(source), True)]
    while todo:
        node, at_import = todo.pop()
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, 0, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if base == "specbench":
                for alias in node.names:
                    target = base if alias.name.startswith("__") or alias.name[0].isupper() else f"{base}.{alias.name}"
                    yield Import(target, node.lineno, node.level, at_import)
            else:
                yield Import(base, node.lineno, node.level, at_import)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += [(child, at_import) for child in node.orelse]
        else:
            late = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            todo += [(child, at_import and not late) for child in ast.iter_child_nodes(node)]
