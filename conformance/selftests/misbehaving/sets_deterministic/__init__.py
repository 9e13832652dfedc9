"""Asks for deterministic algorithms, for everybody."""

import torch
from right import amp, clamping_after, cpu, cuda

__all__ = ["amp", "cpu", "cuda", "nn"]

nn = clamping_after(lambda: torch.use_deterministic_algorithms(True))
