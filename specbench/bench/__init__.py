"""Measuring speculative decoding so that the figure can be believed: gate first, same tokens, intervals, memory.

`metrics` holds the definitions and `rows` the file format, both without torch; `loop` runs, `sweep` reads curves.
"""
