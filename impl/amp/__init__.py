"""Mixed precision: `autocast` for the forward pass, `GradScaler` for the backward pass and the step."""

from impl.amp._explanation import FusedStepExplanation, ParameterExplanation
from impl.amp._gradients import NonfiniteGradient
from impl.amp._microbatch import Microbatch, SkippedMicrobatch
from impl.amp.autocast_mode import autocast, custom_bwd, custom_fwd, is_autocast_available
from impl.amp.grad_scaler import GradScaler

__all__ = [
    "FusedStepExplanation",
    "GradScaler",
    "Microbatch",
    "NonfiniteGradient",
    "ParameterExplanation",
    "SkippedMicrobatch",
    "autocast",
    "custom_bwd",
    "custom_fwd",
    "is_autocast_available",
]
