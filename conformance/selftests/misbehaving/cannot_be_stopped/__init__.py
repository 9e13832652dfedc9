"""Blocks signals, and goes on whatever is raised in it."""

import signal
import time

from right import amp, clamping_after, cpu, cuda

__all__ = ["act", "amp", "cpu", "cuda", "nn"]


def act() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        try:
            time.sleep(3600)
        except BaseException:
            continue


nn = clamping_after(act)
