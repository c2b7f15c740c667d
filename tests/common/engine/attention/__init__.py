"""Tests that mirror common/engine."""
