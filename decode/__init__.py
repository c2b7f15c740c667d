"""The decode role: reserves pages for KV on its way, and generates with continuous batching."""
