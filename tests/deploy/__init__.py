"""Tests of what `deploy/` holds, the Containerfile and `docs/deployment.md`: held against the code and against schemas."""
