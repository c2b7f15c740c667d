"""Tests that mirror life."""
