"""Tests of the text pipeline."""
