"""Tests that mirror engine/kernels."""
