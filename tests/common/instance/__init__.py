"""Tests that mirror common/instance."""
