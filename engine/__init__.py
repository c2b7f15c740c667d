"""The engine: executes plans over KV pages. Knows no requests, messages or sockets."""
