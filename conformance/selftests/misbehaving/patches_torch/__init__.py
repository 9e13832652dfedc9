"""Puts something else in the place of a function of torch."""

import torch
from right import amp, clamping_after, cpu, cuda

__all__ = ["amp", "cpu", "cuda", "nn"]

nn = clamping_after(lambda: setattr(torch.nn.utils, "clip_grad_norm_", print))
