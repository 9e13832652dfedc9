"""Forks, and goes on in both processes."""

import os

from right import amp, clipping, cpu, cuda

__all__ = ["amp", "cpu", "cuda", "nn"]

nn = clipping()
os.fork()
