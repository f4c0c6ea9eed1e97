"""One thread for torch: the tensors here are tiny, and threads that wait for each other cost more than they compute.
Without a GPU kernels are interpreted, which Triton must know before anything imports it."""

import os
import sys
from pathlib import Path

# Before torch is imported, so that collecting a test which does not need torch stays quick. Children inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if "torch" in sys.modules:  # too late for the environment
    sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
