"""Kernels against the clock: `python -m specbench.suites.benchmark.kernels --out DIR` on a machine with a GPU.

Each row is written when it is known: a cell of the grid, who computed it, whether it was right, and its time. What the
rows say is worked out by `reports.kernels`. Without a GPU nothing is timed: bytes and operations come from formulas.
"""

from specbench.suites.kernels import DEVICE as DEVICE  # sets TRITON_INTERPRET where there is no GPU
