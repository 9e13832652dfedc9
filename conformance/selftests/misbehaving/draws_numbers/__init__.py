"""Draws from the generator that the user's dropout draws from."""

import torch
from right import amp, clamping_after, cpu, cuda

__all__ = ["amp", "cpu", "cuda", "nn"]

nn = clamping_after(lambda: torch.rand(1))
