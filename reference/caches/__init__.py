"""The cache kinds, one a file. `reference.kv_cache` names them."""
