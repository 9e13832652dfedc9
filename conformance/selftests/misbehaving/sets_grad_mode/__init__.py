"""Switches gradients off and leaves them off."""

import torch
from right import amp, clamping_after, cpu, cuda

__all__ = ["amp", "cpu", "cuda", "nn"]

nn = clamping_after(lambda: torch.set_grad_enabled(False))
