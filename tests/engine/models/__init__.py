"""Tests that mirror engine/models."""
