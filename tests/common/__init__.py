"""Tests that mirror common."""
