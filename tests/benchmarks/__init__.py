"""Tests of the developers' instruments."""
