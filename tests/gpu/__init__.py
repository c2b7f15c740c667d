"""Tests that need a CUDA card: marked `gpu`, skipped where there is none. They time nothing."""
