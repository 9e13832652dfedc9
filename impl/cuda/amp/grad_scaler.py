"""Deprecated spelling of `impl.amp.GradScaler` for CUDA, like torch's."""

import warnings

import impl.amp.grad_scaler as amp
from impl.amp.grad_scaler import OptState

__all__ = ["GradScaler", "OptState"]


class GradScaler(amp.GradScaler):
    """`impl.amp.GradScaler("cuda", ...)` with only torch's arguments. It raises a FutureWarning.

    Source: torch.cuda.amp.GradScaler 2.13; differences: those of `impl.amp.GradScaler`.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        warnings.warn(
            "`torch.cuda.amp.GradScaler(args...)` is deprecated. "
            "Please use `torch.amp.GradScaler('cuda', args...)` instead.",
            FutureWarning,
            stacklevel=2,
        )
        super().__init__("cuda", init_scale, growth_factor, backoff_factor, growth_interval, enabled)
