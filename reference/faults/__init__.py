"""Planted faults: one replaced step of the reference decoder each, to prove that every claim can fail."""
