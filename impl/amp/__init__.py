"""Mixed precision: `autocast` for the forward pass, `GradScaler` for the backward pass and the step."""

from impl.amp._explanation import FusedStepExplanation, ParameterExplanation
from impl.amp.autocast_mode import autocast, custom_bwd, custom_fwd, is_autocast_available
from impl.amp.grad_scaler import GradScaler, NonfiniteGradient

__all__ = [
    "FusedStepExplanation",
    "GradScaler",
    "NonfiniteGradient",
    "ParameterExplanation",
    "autocast",
    "custom_bwd",
    "custom_fwd",
    "is_autocast_available",
]
