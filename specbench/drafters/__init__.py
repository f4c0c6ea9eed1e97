"""Drafters that nobody here wrote, each behind our `Drafter`: their code drafts, ours asks it as its own decoder would.

A file holds one kind: its drafter, and a target that `specbench check specbench.drafters.FILE:CLASS` judges on tiny
models. A library is imported when its drafter is made; `Missing` says how to install one that is not there. What they
are worth on a real model is measured by `run.py`.
"""
