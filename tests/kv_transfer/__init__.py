"""Tests that mirror kv_transfer."""
