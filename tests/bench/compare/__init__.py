"""Tests of `bench/compare`."""
