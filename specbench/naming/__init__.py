"""Which fault is it: the class, and where a planted fault does the very same, that fault, with the evidence.

Two sources: `structure` (which claims fail, where, and what the wrong answers look like) and `fingerprint` (which
planted faults give the target's own numbers on the failing case). `evidence` ranks them in one list.
"""
