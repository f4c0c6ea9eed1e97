"""Training of drafters on what a target itself writes (self-distillation): texts, the target's states over them, fits.

Nothing of a benchmark is in the texts: prompts come from `open_prompts`, checked against Spec-Bench's by hash.
"""

KINDS = ("heads", "heads-independent", "feature", "small-model")
