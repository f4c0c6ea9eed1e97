"""One thread for torch: the tensors here are tiny, and threads that wait for each other cost more than they compute."""

import os
import sys

# Before torch is imported, so that collecting a test which does not need torch stays quick. Children inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "torch" in sys.modules:  # too late for the environment
    sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
