"""Laws: what a sampler emits with which probability; exact where it can be enumerated, by evidence elsewhere."""
