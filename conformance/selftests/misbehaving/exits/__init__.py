"""Asks Python to end."""

import sys

from right import amp, clamping_after, cpu, cuda

__all__ = ["amp", "cpu", "cuda", "nn"]

nn = clamping_after(lambda: sys.exit(0))
