"""Tests of the parts of answers."""
