"""Tests of the harness of child processes."""
