"""The specification: a tree-verification decoder in readable PyTorch, and the oracle it is judged by."""
