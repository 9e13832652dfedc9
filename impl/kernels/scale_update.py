"""Move the loss scale after a step."""

import torch
from torch import Tensor

from impl.kernels._dispatch import asked_backend, dispatch_for


def update_scale_(  # noqa: PLR0913  torch's operator takes six, and the floor is the seventh
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float,
) -> None:
    """Back the loss scale off after a non-finite step, grow it after enough finite ones, in place.

    Args:
        scale: f32, one element.
        growth_tracker: i32, one element: finite steps in a row, on the same device.
        found_inf: f32, one element, on the same device; not zero when the step was not finite.
        growth_factor: times the scale after `growth_interval` finite steps, unless that overflows f32.
        backoff_factor: times the scale after a step that was not finite.
        growth_interval: finite steps in a row before the scale grows.
        min_scale: the scale never falls below it.

    Sync: none. Collectives: none.
    Source: torch._amp_update_scale_; differences: the floor.
    """
    if scale.is_cpu and asked_backend() != "triton":
        torch._amp_update_scale_(
            scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval
        )
        # Here a look costs less than the operator that is almost never needed.
        if not _may_look_at(scale) or scale.item() < min_scale:
            scale.clamp_(min=min_scale)
        return
    # Numbers of another type are for torch's operator to refuse, in its words.
    are_numbers = type(growth_interval) is int and type(growth_factor) is type(backoff_factor) is float
    if are_numbers and dispatch_for([scale, found_inf]).backend == "triton":
        from impl.kernels._triton.scale_update import launch_update_scale  # noqa: PLC0415  as the other kernels

        launch_update_scale(
            scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval, min_scale
        )
        return
    torch._amp_update_scale_(scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval)
    scale.clamp_(min=min_scale)


def _may_look_at(scale: Tensor) -> bool:
    """As `is_eager`, in a third of its time, for a tensor that no transform of functions wraps."""
    return (
        type(scale) is Tensor
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
    )
