"""`launch bench engine`: builds, checks and times the engine on one device."""
