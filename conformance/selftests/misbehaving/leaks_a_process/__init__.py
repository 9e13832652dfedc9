"""Starts a process that never ends."""

import subprocess

from right import amp, clamping_after, cpu, cuda

__all__ = ["amp", "cpu", "cuda", "nn"]

nn = clamping_after(lambda: subprocess.Popen(["sleep", "3600"], start_new_session=True))
