"""Planted faults: what real projects shipped, as replacements of one or two steps. The good code has no flags for them."""
