"""Tests of `bench/offline`."""
