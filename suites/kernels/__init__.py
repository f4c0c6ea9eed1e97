"""Each kernel against its twin in the reference, in Triton's interpreter where there is no GPU."""

import os

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before a kernel module is imported

    from specbench.kernels.interpreter import patch_once_a_launch

    patch_once_a_launch()
