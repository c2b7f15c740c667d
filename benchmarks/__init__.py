"""Instruments of the developers, one file each: `python -m benchmarks.NAME`. The product imports none, and no wheel has them."""
