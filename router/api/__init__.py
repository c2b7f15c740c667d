"""The HTTP side of a router: what clients send, and how they are answered. Knows the core; the core does not know it."""
