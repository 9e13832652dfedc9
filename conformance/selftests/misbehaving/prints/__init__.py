"""Prints megabytes, by Python and past it, and fails."""

import os

from right import amp, clamping_after, cpu, cuda

__all__ = ["amp", "cpu", "cuda", "nn"]


def _print() -> None:
    for _ in range(32):
        print("x" * (1 << 19))  # noqa: T201 that is the point
        os.write(1, b"y" * (1 << 19))
        os.write(2, b"z" * (1 << 19))
    raise ValueError("the end")


nn = clamping_after(_print)
