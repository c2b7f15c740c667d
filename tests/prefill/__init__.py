"""Tests that mirror prefill."""
