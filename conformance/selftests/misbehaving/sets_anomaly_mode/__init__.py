"""Leaves anomaly detection on."""

import torch
from right import amp, clamping_after, cpu, cuda

__all__ = ["amp", "cpu", "cuda", "nn"]

nn = clamping_after(lambda: torch.autograd.set_detect_anomaly(True))
