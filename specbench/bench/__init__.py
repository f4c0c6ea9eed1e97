"""Measuring speculative decoding so that the figure can be believed: gate first, same tokens, intervals, memory.

`metrics` holds the definitions and `rows` the file format, both without torch; `loop` runs, `sweep` reads curves.
"""

# How suites/benchmark refuses xdist.
ONE_AFTER_THE_OTHER = "suites/benchmark takes times one after the other, in one process: leave out xdist's -n"
