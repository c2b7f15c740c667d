"""Tests that mirror decode."""
