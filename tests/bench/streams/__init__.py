"""Tests of `bench/streams`."""
