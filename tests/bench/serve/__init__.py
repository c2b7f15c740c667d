"""Tests of `launch bench serve`."""
