"""Deprecated spellings of `impl.amp` for the CPU."""

from impl.cpu.amp.autocast_mode import autocast
from impl.cpu.amp.grad_scaler import GradScaler

__all__ = ["GradScaler", "autocast"]
