"""The clock: `impl` beside torch, under asv for history and `python -m benchmarks` for a look now."""
