"""Ends its process as if all were well."""

import os

from right import amp, clamping_after, cpu, cuda

__all__ = ["act", "amp", "cpu", "cuda", "nn"]


def act() -> None:
    os._exit(0)


nn = clamping_after(act)
