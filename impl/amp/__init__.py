"""Mixed precision: `autocast` for the forward pass, `GradScaler` for the backward pass and the step."""

from impl.amp.autocast_mode import autocast, custom_bwd, custom_fwd, is_autocast_available
from impl.amp.grad_scaler import GradScaler, NonfiniteGradient

__all__ = ["GradScaler", "NonfiniteGradient", "autocast", "custom_bwd", "custom_fwd", "is_autocast_available"]
