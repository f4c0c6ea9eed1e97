"""Each kernel against its twin in the reference, in Triton's interpreter where there is no GPU."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before a kernel module is imported

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
