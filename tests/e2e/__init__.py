"""Real processes, a real KV transfer, real HTTP."""
