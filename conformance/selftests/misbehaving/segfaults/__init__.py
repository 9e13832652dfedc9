"""Reads where nothing is."""

import ctypes

from right import amp, clamping_after, cpu, cuda

__all__ = ["act", "amp", "cpu", "cuda", "nn"]


def act() -> None:
    ctypes.string_at(0)


nn = clamping_after(act)
