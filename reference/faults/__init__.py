"""Planted faults: what real projects shipped, as replacements of steps. The good code has no flags for them."""
