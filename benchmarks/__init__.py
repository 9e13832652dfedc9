"""Benchmarks of `impl` against torch: `python -m benchmarks` measures now, asv draws the recorded results."""
