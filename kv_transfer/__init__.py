"""Moves KV pages between instances. Knows no tokens, text or HTTP."""
