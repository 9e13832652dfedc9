"""Greets whoever imports it."""

import sys

from right import amp, clipping, cpu, cuda

__all__ = ["amp", "cpu", "cuda", "nn"]

nn = clipping()
sys.stdout.write("hello, world\n")
