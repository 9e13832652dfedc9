"""Starts a thread that never ends and that the interpreter waits for."""

import threading

from right import amp, clamping_after, cpu, cuda

__all__ = ["amp", "cpu", "cuda", "nn"]

nn = clamping_after(lambda: threading.Thread(target=threading.Event().wait).start())
