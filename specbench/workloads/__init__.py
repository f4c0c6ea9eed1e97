"""Workloads: what a benchmark asks, in categories. Our own prompts are shipped, those of others are loaded.

`prompts.jsonl` was written for specbench from nothing, people, places and products in it are invented, and it is under
the licence of this project (Apache-2.0). No text of anybody else is shipped. Here nothing is generated or timed.
"""
