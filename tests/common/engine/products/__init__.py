"""Tests of the products with packed weights."""
