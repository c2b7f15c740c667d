"""Tests of what `deploy/` holds and of the Containerfile: held against the code and against schemas."""
