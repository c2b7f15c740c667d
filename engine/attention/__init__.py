"""Attention over KV pages: the port and its backends."""
