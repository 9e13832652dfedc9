"""The older spellings of `impl.amp` for CUDA."""

from impl.cuda.amp.autocast_mode import autocast, custom_bwd, custom_fwd
from impl.cuda.amp.common import amp_definitely_not_available

__all__ = ["amp_definitely_not_available", "autocast", "custom_bwd", "custom_fwd"]
