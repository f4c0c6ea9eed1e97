"""Is the output of a decoder what plain decoding gives? One test per claim."""
