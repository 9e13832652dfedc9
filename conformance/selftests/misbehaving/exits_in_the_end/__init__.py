"""Is wrong, and has the interpreter end with the code of success."""

import atexit
import os

from right import amp, clamping_after, cpu, cuda

__all__ = ["amp", "cpu", "cuda", "nn"]


def _fail() -> None:
    raise ValueError("wrong")


atexit.register(os._exit, 0)
nn = clamping_after(_fail)
