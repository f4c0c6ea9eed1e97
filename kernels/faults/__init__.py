"""Faults to plant in kernels, each a changed line or two of the good source, which therefore needs no flags."""
