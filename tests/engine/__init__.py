"""Tests that mirror engine."""
