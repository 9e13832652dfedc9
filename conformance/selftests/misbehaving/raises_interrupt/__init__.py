"""Raises what Ctrl-C raises."""

from right import amp, clamping_after, cpu, cuda

__all__ = ["amp", "cpu", "cuda", "nn"]


def _interrupt() -> None:
    raise KeyboardInterrupt


nn = clamping_after(_interrupt)
