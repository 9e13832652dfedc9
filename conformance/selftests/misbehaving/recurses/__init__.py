"""Recurses without end."""

from right import amp, clamping_after, cpu, cuda

__all__ = ["amp", "cpu", "cuda", "nn"]


def _recurse() -> None:
    _recurse()


nn = clamping_after(_recurse)
