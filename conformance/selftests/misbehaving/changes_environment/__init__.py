"""Sets a variable of the environment."""

import os

from right import amp, clamping_after, cpu, cuda

__all__ = ["amp", "cpu", "cuda", "nn"]

nn = clamping_after(lambda: os.environ.update(OMP_NUM_THREADS="1"))
