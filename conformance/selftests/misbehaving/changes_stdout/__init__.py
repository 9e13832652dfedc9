"""Sends all that is printed to nowhere."""

import io
import sys

from right import amp, clamping_after, cpu, cuda

__all__ = ["amp", "cpu", "cuda", "nn"]

nn = clamping_after(lambda: setattr(sys, "stdout", io.StringIO()))
