"""Measurements: `python -m benchmarks cpu`, `python -m benchmarks compare A.json B.json`."""
