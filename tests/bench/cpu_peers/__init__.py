"""Tests of `bench/cpu_peers`."""
