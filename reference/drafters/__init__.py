"""Drafters: scripted, n-gram lookup, and any model of the same vocabulary, the target itself included: by its best
tokens or by draws, with rows that are kept or computed again. `by_name.DRAFTERS` names those that cases ask for.
"""
