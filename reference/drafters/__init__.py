"""Drafters: scripted, n-gram lookup, and any model of the same vocabulary, the target itself included."""
