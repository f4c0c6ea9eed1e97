"""Recorded JSON to figures, tables and a page. Never imports torch."""
