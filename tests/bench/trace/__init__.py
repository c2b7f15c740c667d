"""Tests of `bench/trace`."""
