"""Tests of what changes logits before a token is drawn."""
