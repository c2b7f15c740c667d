"""Tests that mirror common/engine/native."""
