"""Trades precision for speed, for everybody."""

import torch
from right import amp, clamping_after, cpu, cuda

__all__ = ["amp", "cpu", "cuda", "nn"]

nn = clamping_after(lambda: torch.set_float32_matmul_precision("medium"))
