"""Leaves a default device set."""

import torch
from right import amp, clamping_after, cpu, cuda

__all__ = ["amp", "cpu", "cuda", "nn"]

nn = clamping_after(lambda: torch.set_default_device("meta"))
