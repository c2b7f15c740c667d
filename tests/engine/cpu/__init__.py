"""Tests that mirror engine/cpu."""
