"""Tests that mirror engine/attention."""
