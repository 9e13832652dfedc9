"""Stops its process, which no timer of its own ends."""

import os
import signal

from right import amp, clamping_after, cpu, cuda

__all__ = ["act", "amp", "cpu", "cuda", "nn"]


def act() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


nn = clamping_after(act)
