"""Seeds the generator that the user has seeded."""

import torch
from right import amp, clamping_after, cpu, cuda

__all__ = ["amp", "cpu", "cuda", "nn"]

nn = clamping_after(lambda: torch.manual_seed(0))
