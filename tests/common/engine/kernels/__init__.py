"""Tests that mirror common/engine/kernels."""
