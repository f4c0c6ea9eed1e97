"""A fault as a change of a kernel's text, and the module that has it. `bank` holds the faults."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True)
class KernelFault:
    """kernel: the module in `specbench.kernels`. changes: (what stands there once, what stands there instead).
    origin: a public report of such a fault, where there is one."""

    id: str
    kernel: str
    sentence: str
    changes: tuple[tuple[str, str], ...]
    origin: str = ""


def planted(fault: KernelFault) -> ModuleType:
    """The kernel's module with the fault in it, under a name of its own. ValueError when a change does not fit the
    source: the kernel was rewritten and its fault was not."""
    source = Path(__file__).parents[1] / f"{fault.kernel}.py"
    text = source.read_text("utf-8")
    for old, new in fault.changes:
        if text.count(old) != 1:
            raise ValueError(
                f"fault {fault.id}: {old!r} stands {text.count(old)} times in {source.name}, must stand once"
            )
        text = text.replace(old, new)
    # A file, since Triton reads the source of a kernel from one.
    with tempfile.TemporaryDirectory(prefix="specbench-fault-") as folder:
        file = Path(folder) / f"{fault.kernel}_{fault.id}.py"
        file.write_text(text, "utf-8")
        name = f"specbench_faulty_{fault.kernel}_{fault.id}"
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        for kernel in vars(module).values():  # read while the file is there
            if type(kernel).__name__ in ("JITFunction", "InterpretedFunction") and hasattr(kernel, "src"):
                _ = kernel.src
        return module
