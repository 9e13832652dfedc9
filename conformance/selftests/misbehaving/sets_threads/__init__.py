"""Takes fewer threads, for everybody."""

import torch
from right import amp, clamping_after, cpu, cuda

__all__ = ["amp", "cpu", "cuda", "nn"]

nn = clamping_after(lambda: torch.set_num_threads(3 - min(2, torch.get_num_threads())))
