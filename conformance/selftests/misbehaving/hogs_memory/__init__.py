"""Asks for more memory than there is."""

import torch
from right import amp, clamping_after, cpu, cuda

__all__ = ["amp", "cpu", "cuda", "nn"]

_kept: list[torch.Tensor] = []
nn = clamping_after(lambda: _kept.append(torch.ones(1 << 50)))
