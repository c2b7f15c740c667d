"""Tests that mirror engine/grammar."""
