"""Tests of `docs/` and README: what they name exists, the site builds, and the reference is what the code says."""
