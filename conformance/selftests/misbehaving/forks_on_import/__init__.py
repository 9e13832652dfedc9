"""Forks a process that does something and ends."""

import os

from right import amp, clipping, cpu, cuda

__all__ = ["amp", "cpu", "cuda", "nn"]

nn = clipping()
if os.fork() == 0:
    os._exit(0)
