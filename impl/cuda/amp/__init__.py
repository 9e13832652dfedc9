"""Deprecated spellings of `impl.amp` for CUDA."""

from impl.cuda.amp.autocast_mode import autocast, custom_bwd, custom_fwd
from impl.cuda.amp.common import amp_definitely_not_available
from impl.cuda.amp.grad_scaler import GradScaler

__all__ = ["GradScaler", "amp_definitely_not_available", "autocast", "custom_bwd", "custom_fwd"]
