"""Never returns."""

import time

from right import amp, clamping_after, cpu, cuda

__all__ = ["amp", "cpu", "cuda", "nn"]

nn = clamping_after(lambda: time.sleep(3600))
