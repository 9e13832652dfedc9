"""Enters inference mode and never leaves it."""

import torch
from right import amp, clamping_after, cpu, cuda

__all__ = ["amp", "cpu", "cuda", "nn"]

_entered: list[torch.inference_mode] = []


def _enter() -> None:
    _entered.append(torch.inference_mode())
    _entered[-1].__enter__()


nn = clamping_after(_enter)
