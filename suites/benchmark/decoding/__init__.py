"""Whole decoders against the clock: ours, transformers' and a target."""
