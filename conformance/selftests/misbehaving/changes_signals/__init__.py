"""Takes the handler of a signal."""

import signal

from right import amp, clamping_after, cpu, cuda

__all__ = ["amp", "cpu", "cuda", "nn"]

nn = clamping_after(lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))
