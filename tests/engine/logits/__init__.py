"""Tests that mirror engine/logits."""
